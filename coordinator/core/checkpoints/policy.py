"""Checkpoint policy: when the next one is due, the one being taken, and the one that a recovery starts from."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from immortal.coordinator.core.effects import CheckCheckpoint, ReadCheckpointChunk, WriteCheckpointChunk
from immortal.coordinator.core.errors import LogError, require
from immortal.coordinator.core.interfaces import CheckpointHeader, LogSummary
from immortal.coordinator.core.limits import Limits
from immortal.protocol.checksum import crc64


class CheckpointPolicy:
    """Decides when a checkpoint is due, and holds the one being taken."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._next_id = 1
        self._writer: CheckpointWriter | None = None
        self._logged_bytes_at_last = 0
        self.last: CheckpointHeader | None = None
        self.last_failed_ns = 0  # when the app last failed to give one
        self.is_requested = False  # the app or the operator has asked for one
        self.settled = True  # no header waits to become durable: the log takes one blob at a time
        self.chunks_pending_bytes = 0  # handed to the disk, not written yet

    def load(self, headers: Sequence[CheckpointHeader]) -> None:
        """Load the checkpoints of the log, oldest first."""
        self._next_id = 1 + max((header.checkpoint_id for header in headers), default=0)
        self.last = without_outputs(headers[-1]) if headers else None

    @property
    def is_being_taken(self) -> bool:
        return self._writer is not None

    def is_due(self, logged_bytes: int, now_ns: int) -> bool:
        """Return True if a checkpoint is due. ``logged_bytes``: written to the log since this process started."""
        grown_bytes = logged_bytes - self._logged_bytes_at_last
        limits = self._limits
        too_old = (
            limits.checkpoint_age_ns is not None
            and self.last is not None
            and now_ns - max(self.last.time_ns, self.last_failed_ns) >= limits.checkpoint_age_ns
        )
        return self.is_requested or grown_bytes >= limits.checkpoint_trigger_bytes or (too_old and grown_bytes > 0)

    def checkpoint_began(self, logged_bytes: int) -> None:
        """Restart the count: the app was asked for a checkpoint, or its state is that of one."""
        self.is_requested = False
        self._logged_bytes_at_last = logged_bytes

    def next_id(self) -> int:
        """Return an ID for a checkpoint. No other checkpoint gets it."""
        self._next_id += 1
        return self._next_id - 1

    def begin(self, header: CheckpointHeader) -> None:
        """Begin a checkpoint of the state and the output streams that ``header`` tells; its blob's size is not known
        yet."""
        self._writer = CheckpointWriter(header, self._limits.chunk_size_bytes)

    def receive(self, data: bytes, *, last: bool) -> WriteCheckpointChunk | None:
        """Add bytes to the blob; return the chunk that is full now, if any."""
        writer = self._writer
        require(writer is not None, "a blob without a Checkpoint")
        chunk = writer.receive(data, last=last) if writer is not None else None
        if chunk is not None:
            self.chunks_pending_bytes += len(chunk.data)
        return chunk

    def end(self, time_ns: int) -> CheckpointHeader:
        """End the blob; return the header that makes the checkpoint count."""
        writer, self._writer = self._writer, None
        require(writer is not None, "the end of a blob without a Checkpoint")
        assert writer is not None
        self.settled = False
        return writer.header(time_ns)

    def abandon(self) -> None:
        """Drop the checkpoint that is being taken. Its chunks do not count without a header."""
        self._writer = None

    def became_durable(self, header: CheckpointHeader) -> int | None:
        """Note that the checkpoint of ``header`` is durable. Return when the next one is due by age, ns since the
        Unix epoch."""
        self.last = without_outputs(header)
        self.settled = True
        age_ns = self._limits.checkpoint_age_ns
        return None if age_ns is None else header.time_ns + age_ns


# Writing a checkpoint: its blob in chunks, then the header that makes it count.


class CheckpointWriter:
    """Splits a blob into chunks as it arrives. ``header``: of the time that the blob was announced; what it says of the
    blob itself does not count."""

    def __init__(self, header: CheckpointHeader, chunk_size_bytes: int) -> None:
        self._header = header
        self._chunk_size_bytes = chunk_size_bytes
        self._pieces: list[bytes] = []
        self._pieces_bytes = 0
        self._size_bytes = 0
        self._next_index = 0
        self._check = 0

    def receive(self, data: bytes, *, last: bool) -> WriteCheckpointChunk | None:
        """Add bytes to the blob; return the chunk that is full now, or the last one."""
        if data:
            self._pieces.append(data)
            self._pieces_bytes += len(data)
            self._size_bytes += len(data)
            self._check = crc64(data, self._check)
        if not self._pieces or (self._pieces_bytes < self._chunk_size_bytes and not last):
            return None
        chunk = WriteCheckpointChunk(self._header.checkpoint_id, self._next_index, b"".join(self._pieces))
        self._next_index += 1
        self._pieces.clear()
        self._pieces_bytes = 0
        return chunk

    def header(self, time_ns: int) -> CheckpointHeader:
        return replace(self._header, size_bytes=self._size_bytes, check=self._check, time_ns=time_ns)


# Choosing a checkpoint to recover from, and reading its blob.
#
# The newest checkpoint with all records after it is read whole and checked before the app gets a byte of it. If it is
# damaged, the one before is tried.


def without_outputs(header: CheckpointHeader) -> CheckpointHeader:
    """Return the header without the output streams' contents, which can be many megabytes."""
    return replace(header, unacknowledged={})


class Recovery:
    """Chooses the checkpoint from which an app recovers, and reads its blob chunk by chunk."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._damaged: set[int] = set()
        self._header: CheckpointHeader | None = None
        self._summary: LogSummary | None = None
        self._next_chunk_index = 0
        self._read_bytes = 0

    @property
    def is_choosing(self) -> bool:
        """True while a checkpoint is being checked."""
        return self._summary is not None

    def forget(self) -> None:
        """Forget the recovery of an app that is gone. Damaged checkpoints are still remembered."""
        self._header = self._summary = None

    def choose(self, summary: LogSummary) -> CheckCheckpoint:
        """Choose the newest usable checkpoint and return the check of it. Raises LogError if none is left."""
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
        """Return the checkpoint that was checked, with its log's summary; None if another one was chosen since."""
        header, summary = self._header, self._summary
        if header is None or summary is None or header.checkpoint_id != checkpoint_id:
            return None
        self._header, self._summary = without_outputs(header), None
        self._next_chunk_index = self._read_bytes = 0
        return header, summary

    def choose_previous(self, checkpoint_id: int) -> CheckCheckpoint | None:
        """Choose the checkpoint before the damaged one. Raises LogError if none is left."""
        self._damaged.add(checkpoint_id)
        return self.choose(self._summary) if self._summary is not None else None

    def next_read(self) -> ReadCheckpointChunk | None:
        """Return the next chunk to read; None at the end of the blob."""
        header = self._header
        require(header is not None, "restoring no checkpoint")
        if header is None or self._read_bytes >= header.size_bytes:
            return None
        return ReadCheckpointChunk(header.checkpoint_id, self._next_chunk_index)

    def chunk_read(self, data: bytes) -> None:
        """Count a chunk as read. Raises LogError if the blob ends too early."""
        if not data:
            raise LogError(f"a checkpoint of {self._name!r} ends after {self._read_bytes} bytes")
        self._next_chunk_index += 1
        self._read_bytes += len(data)
