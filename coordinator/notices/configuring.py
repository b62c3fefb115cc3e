"""A process's lines, set up once at its start."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from immortal.coordinator.core.notices import Level
from immortal.coordinator.notices.limited import Limited
from immortal.coordinator.notices.lines import Lines
from immortal.coordinator.notices.sink import ErrorLine, Line, Notices, Sink, WarningLine
from immortal.coordinator.notices.text_lines import TextLines

LOG_FORMATS = ("human", "json")


def configure(
    instance: str, *, level: Level = "info", log_format: str = "human", stream: TextIO | None = None
) -> Notices:
    """One line on ``stream`` (stderr) for each notice, also for what modules log that know of no instance."""
    lines: Lines
    if log_format == "json":
        from immortal.coordinator.notices.json_lines import JsonLines

        lines = JsonLines(instance, stream or sys.stderr, level)
    else:
        lines = TextLines(instance, stream or sys.stderr, level)
    logger = logging.getLogger("immortal.coordinator")
    logger.handlers[:] = [_FromLogging(lines)]
    logger.propagate = False
    logger.setLevel(level.upper())
    return Notices(instance, lines)


def warnings_on_stderr(instance: str) -> Notices:
    """For a command that makes use of parts of a coordinator, and has lines of its own."""
    return Notices(instance, Limited(TextLines(instance, sys.stderr, "warning")))


class _FromLogging(logging.Handler):
    """What is said with the logging module, by the messenger above all."""

    def __init__(self, sink: Sink) -> None:
        super().__init__()
        self._sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        kind = ErrorLine if record.levelno >= logging.ERROR else WarningLine
        traceback = {"traceback": logging.Formatter().formatException(record.exc_info)} if record.exc_info else {}
        self._sink.take((kind if record.levelno >= logging.WARNING else Line)(record.getMessage(), traceback))
