"""Lines for machines: a JSON object each, by structlog, which takes 7 MiB and is imported by who writes them alone.

{"time": "2026-01-31T12:00:01.250102Z", "level": "info", "instance": "counter", "message": "recovered",
 "notice": "Recovered", "epoch": 4, "sequence_id": 41}
"""

from __future__ import annotations

from structlog.processors import JSONRenderer, TimeStamper, add_log_level
from structlog.typing import Processor

from immortal.coordinator.core.notices import Notice
from immortal.coordinator.notices.lines import Lines
from immortal.coordinator.notices.sink import Line
from immortal.protocol.shown import printable_json

_PROCESSORS: tuple[Processor, ...] = (
    add_log_level,
    TimeStamper("iso", key="time"),  # UTC
    JSONRenderer(printable_json, default=str),
)


class JsonLines(Lines):
    """All fields of a notice, also those in its text, and what it is called: for who looks for more than words."""

    def line(self, notice: Notice) -> str:
        front = {"time": "", "level": "", "instance": self.instance, "message": notice.text}  # what a reader looks for
        if not isinstance(notice, Line):
            front["notice"] = type(notice).__name__
        event = {**front, **notice.fields(), **front}
        line: object = event
        for process in _PROCESSORS:
            line = process(None, notice.level, event)
        return str(line)
