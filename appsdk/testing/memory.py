"""A log in memory as a replay reads it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from immortal.coordinator.core.interfaces import LogSummary
from immortal.coordinator.log import LogIdentity
from immortal.coordinator.log.format import FORMAT_VERSION
from immortal.coordinator.log.memory import MemoryLogStore

READ_SIZE_BYTES = 1 << 20


def checkpoint_chunks(store: MemoryLogStore, checkpoint_id: int) -> Iterator[bytes]:
    """The pieces of a checkpoint's blob, in order."""
    for index in count():
        chunk = store.read_checkpoint_chunk(checkpoint_id, index)
        if not chunk:
            return
        yield chunk


class MemorySource:
    """A :class:`replay.RecordSource` over the log of the instance ``name``."""

    def __init__(self, name: str, store: MemoryLogStore) -> None:
        self._store = store
        self.identity = LogIdentity(FORMAT_VERSION, name, store.summary().committer_id, 0)
        self.problems: list[str] = []
        self.trusts_pickle = True  # this process made it

    def summary(self) -> LogSummary:
        return self._store.summary()

    def values(self, first_sequence_id: int, last_sequence_id: int | None = None) -> Iterator[bytes]:
        sequence_id = max(first_sequence_id, 0)
        while values := self._store.read(sequence_id, READ_SIZE_BYTES):
            for value in values:
                if last_sequence_id is not None and sequence_id > last_sequence_id:
                    return
                yield value
                sequence_id += 1

    def checkpoint_chunks(self, checkpoint_id: int) -> Iterator[bytes]:
        return checkpoint_chunks(self._store, checkpoint_id)
