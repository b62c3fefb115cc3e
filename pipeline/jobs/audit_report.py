"""Result of an audit: violations, and figures of each log and each stream."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from immortal.pipeline.jobs.evidence import Row


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


# One log against itself: are all its records there, and sound?


DAMAGES_PER_LOG_MAX = 10_000
"""Of these each is kept in words; of more only the count."""


@dataclass(slots=True)
class LogReport:
    """One log, as far as it was read."""

    instance: str
    records: int = 0
    first: int = 0
    last: int = -1
    last_time_ns: int = 0
    damaged: int = 0
    damages: list[tuple[int, int, str]] = field(default_factory=list)  # first record, last, what

    def take(self, row: Row) -> None:
        """Rows of a log come in the order of its records; no items stand for missing ones, up to the next row."""
        expected = self.last + 1
        if self.records == self.damaged == 0:
            self.first = row.sequence_id
        elif row.sequence_id > expected:
            if self.damages and self.damages[-1][1] == self.last:
                first, _, what = self.damages[-1]
                if what.endswith("missing"):
                    self.damages[-1] = (first, row.sequence_id - 1, what)
                    expected = row.sequence_id
            if row.sequence_id > expected:
                many = f"records {expected} to {row.sequence_id - 1} are missing"
                what = f"record {expected} is missing" if row.sequence_id == expected + 1 else many
                self._damage(expected, row.sequence_id - 1, what)
        if row.reason is not None:
            self._damage(row.sequence_id, row.sequence_id, row.reason)
            self.last = row.sequence_id
            return
        self.records += row.items
        self.last = row.sequence_id + row.items - 1
        self.last_time_ns = row.time_ns

    def _damage(self, first: int, last: int, what: str) -> None:
        self.damaged += 1
        if len(self.damages) < DAMAGES_PER_LOG_MAX:
            self.damages.append((first, last, what))
