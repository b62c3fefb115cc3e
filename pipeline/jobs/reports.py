"""What an audit comes to: violations, and figures of each log and each stream."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from immortal.pipeline.jobs.log_audit import LogReport


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not be. ``first`` and ``last`` are positions in the stream (damage: records of the log)."""

    kind: str
    sender: str
    receiver: str
    first: int
    last: int
    record: int  # of the receiver's log, -1 where it shows in none
    text: str


@dataclass(slots=True)
class StreamReport:
    """One stream. ``in_flight``: made, and not executed yet; ``unknown``: it was in damaged records."""

    sender: str
    receiver: str
    messages: int = 0
    impulses: int = 0
    size_bytes: int = 0
    first: int = 0
    last: int = 0
    made: int = 0
    in_flight: int = 0
    unknown: int = 0
    compared: int = 0
    shifted_marks: int = 0
    restarts: int = 0
    sender_given: bool = True
    receiver_given: bool = True
    violations: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class AuditReport:
    logs: list[LogReport]
    streams: list[StreamReport]
    violations: list[Violation]
    violation_count: int
    counts: dict[str, int]  # violations by kind
    notes: list[str]

    def to_json(self, first: int) -> dict[str, Any]:
        """Plain values, with the ``first`` violations in full."""
        return {
            "sound": not self.violation_count,
            "logs": [{k: v for k, v in asdict(log).items() if k != "damages"} for log in self.logs],
            "streams": [asdict(stream) for stream in self.streams],
            "violation_count": self.violation_count,
            "counts": self.counts,
            "violations": [asdict(violation) for violation in self.violations[:first]],
            "notes": self.notes,
        }
