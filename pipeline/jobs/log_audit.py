"""One log against itself: are all its records there, and sound?"""

from __future__ import annotations

from dataclasses import dataclass, field

from immortal.pipeline.jobs.evidence import Row

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
