"""From which checkpoint an app recovers, and how far its blob has been read.

The newest one whose records behind it are all still there is read whole and checked before the app sees a byte of it;
if it is damaged, the one before is tried.
"""

from __future__ import annotations

from msgspec.structs import replace

from immortal.coordinator.core.effects import CheckCheckpoint, ReadCheckpointChunk
from immortal.coordinator.core.errors import LogError, require
from immortal.coordinator.core.interfaces import CheckpointHeader, LogSummary


def without_outputs(header: CheckpointHeader) -> CheckpointHeader:
    """What is needed of a header for long; the outputs may be many megabytes."""
    return replace(header, unacknowledged={})


class Recovery:
    """One app's recovery: choose a checkpoint, then read its blob chunk by chunk."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._damaged: set[int] = set()
        self._header: CheckpointHeader | None = None
        self._summary: LogSummary | None = None
        self._next_chunk_index = 0
        self._read_bytes = 0

    @property
    def is_choosing(self) -> bool:
        """A checkpoint is being checked."""
        return self._summary is not None

    def forget(self) -> None:
        """The app is gone. Checkpoints once found damaged stay so."""
        self._header = self._summary = None

    def choose(self, summary: LogSummary) -> CheckCheckpoint:
        """The newest checkpoint that may be of use, to be checked. Raises LogError when none is left."""
        self._summary = summary
        for header in reversed(summary.checkpoints):
            if header.sequence_id + 1 >= summary.first_sequence_id and header.checkpoint_id not in self._damaged:
                self._header = header
                return CheckCheckpoint(header)
        raise LogError(
            f"the log of {self._name!r} has no usable checkpoint, so its state can't be rebuilt: "
            f"run 'immortal log verify {self._name}' for what is damaged, and restore the log from a copy"
        )

    def chosen(self, checkpoint_id: int) -> tuple[CheckpointHeader, LogSummary] | None:
        """The checkpoint that is sound, whole, and the log that it is from; None if another one was chosen since."""
        header, summary = self._header, self._summary
        if header is None or summary is None or header.checkpoint_id != checkpoint_id:
            return None
        self._header, self._summary = without_outputs(header), None
        self._next_chunk_index = self._read_bytes = 0
        return header, summary

    def choose_another(self, checkpoint_id: int) -> CheckCheckpoint | None:
        """That one is damaged: the one before it. Raises LogError when none is left."""
        self._damaged.add(checkpoint_id)
        return self.choose(self._summary) if self._summary is not None else None

    def next_read(self) -> ReadCheckpointChunk | None:
        """The next chunk to read; None at the end of the blob."""
        header = self._header
        require(header is not None, "restoring no checkpoint")
        if header is None or self._read_bytes >= header.size_bytes:
            return None
        return ReadCheckpointChunk(header.checkpoint_id, self._next_chunk_index)

    def chunk_read(self, data: bytes) -> None:
        """Raises LogError if the blob ends before its size."""
        if not data:
            raise LogError(f"a checkpoint of {self._name!r} ends after {self._read_bytes} bytes")
        self._next_chunk_index += 1
        self._read_bytes += len(data)
