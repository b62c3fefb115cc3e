"""What a replay reads of a log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from immortal.coordinator.core.interfaces import LogSummary
from immortal.coordinator.log.meta import LogIdentity


class RecordSource(Protocol):
    """A log open for reading: :class:`immortal.coordinator.log.LogReader` is one."""

    identity: LogIdentity
    problems: list[str]
    """What the last summary had to leave out, in words."""
    trusts_pickle: bool
    """Whether a state in it that pickle wrote may be read, which runs what is in it."""

    def summary(self) -> LogSummary: ...

    def values(self, first_sequence_id: int, last_sequence_id: int | None = None) -> Iterator[bytes]: ...

    def checkpoint_chunks(self, checkpoint_id: int) -> Iterator[bytes]: ...
