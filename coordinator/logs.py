"""Structured logs on stderr: one line per event, for people or, as JSON objects, for machines.

events = configure("counter", level="info", log_format="human")
events.info("ready", sequence_id=41, recovery_ms=310)

12:00:01.250 info    counter  ready  sequence_id=41 recovery_ms=310
{"time": "2026-01-31T12:00:01.250Z", "level": "info", "instance": "counter", "message": "ready", "sequence_id": 41, ...}
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from protocol.shown import printable, printable_json, printable_lines

LOG_FORMATS = ("human", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
_LOGGER_NAME = "immortal"
_LOGGERS = (_LOGGER_NAME, "coordinator")  # the second is that of modules that know no instance


class Events:
    """Logs events of one instance: a message, and what belongs to it as named values."""

    def __init__(self, instance: str, logger: logging.Logger | None = None) -> None:
        self.instance = instance
        self._logger = logger or logging.getLogger(_LOGGER_NAME)

    def debug(self, message: str, **values: object) -> None:
        self._log(logging.DEBUG, message, values)

    def info(self, message: str, **values: object) -> None:
        self._log(logging.INFO, message, values)

    def warning(self, message: str, **values: object) -> None:
        self._log(logging.WARNING, message, values)

    def error(self, message: str, **values: object) -> None:
        self._log(logging.ERROR, message, values)

    def exception(self, message: str, **values: object) -> None:
        """An error with the traceback of the exception that is being handled."""
        self._log(logging.ERROR, message, values, exc_info=True)

    def _log(self, level: int, message: str, values: dict[str, object], exc_info: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            extra = {"instance": self.instance, "values": values}
            self._logger.log(level, "%s", message, exc_info=exc_info, extra=extra)


def _values(record: logging.LogRecord) -> dict[str, Any]:
    values = getattr(record, "values", None)
    return values if isinstance(values, dict) else {}


class HumanFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created)
        values = " ".join(f"{key}={_shown(value)}" for key, value in _values(record).items() if value is not None)
        instance = getattr(record, "instance", record.name)
        line = printable(
            f"{time:%H:%M:%S}.{int(record.msecs):03d} {record.levelname.lower():<7} {instance}  {record.getMessage()}"
        )
        line = f"{line}  {values}" if values else line
        if not record.exc_info:
            return line
        return "\n".join([line, *printable_lines(self.formatException(record.exc_info), indent="    ")])


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": f"{time:%Y-%m-%dT%H:%M:%S}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "instance": getattr(record, "instance", record.name),
            "message": record.getMessage(),
        }
        line = {**line, **{key: value for key, value in _values(record).items() if key not in line}}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return printable_json(line, default=str)


class _NameInstance(logging.Filter):
    """Gives this process's instance to records of modules that know none."""

    def __init__(self, instance: str) -> None:
        super().__init__()
        self._instance = instance

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "instance"):
            record.instance = self._instance
        return True


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    text = str(value)
    if text and text.isprintable() and not any(one in ' "=' for one in text):
        return text
    return printable_json(text)


def configure(instance: str, *, level: str = "info", log_format: str = "human", stream: TextIO | None = None) -> Events:
    """Set this process's logging up, once, at its start."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else HumanFormatter())
    handler.addFilter(_NameInstance(instance))
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    return Events(instance)
