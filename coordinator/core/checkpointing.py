"""Checkpoints as a policy: when the next one is due, and the one that is on its way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from immortal.coordinator.core.checkpoint_writer import CheckpointWriter
from immortal.coordinator.core.effects import WriteCheckpointChunk
from immortal.coordinator.core.errors import require
from immortal.coordinator.core.interfaces import CheckpointHeader, OutputBatch, OutputMark
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.recovery import without_outputs


class Checkpointing:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._next_id = 1
        self._writer: CheckpointWriter | None = None
        self._logged_bytes_at_last = 0
        self.last: CheckpointHeader | None = None
        self.tried_ns = 0  # when the app last had none to give
        self.wanted = False  # the app or the operator has asked for one
        self.settled = True  # no header waits to become durable: the log takes one blob after the other
        self.chunks_pending_bytes = 0  # handed to the disk, not written yet

    def load(self, taken: Sequence[CheckpointHeader]) -> None:
        """The checkpoints of the log, oldest first."""
        self._next_id = 1 + max((header.checkpoint_id for header in taken), default=0)
        self.last = without_outputs(taken[-1]) if taken else None

    @property
    def on_its_way(self) -> bool:
        return self._writer is not None

    def is_due(self, logged_bytes: int, now_ns: int) -> bool:
        """``logged_bytes``: in the log since the start of this process."""
        grown_bytes = logged_bytes - self._logged_bytes_at_last
        limits = self._limits
        too_old = (
            limits.checkpoint_age_ns is not None
            and self.last is not None
            and now_ns - max(self.last.time_ns, self.tried_ns) >= limits.checkpoint_age_ns
        )
        return self.wanted or grown_bytes >= limits.checkpoint_trigger_bytes or (too_old and grown_bytes > 0)

    def asked(self, logged_bytes: int) -> None:
        """One is asked for now, or the state is that of a checkpoint."""
        self.wanted = False
        self._logged_bytes_at_last = logged_bytes

    def next_id(self) -> int:
        """For one that somebody else is asked for: nobody gets this ID again."""
        self._next_id += 1
        return self._next_id - 1

    def begin(
        self,
        sequence_id: int,
        version: int,
        outputs: Mapping[str, OutputMark],
        unacknowledged: Mapping[str, Sequence[OutputBatch]],
        open_calls: Mapping[str, Sequence[int]],
    ) -> int:
        """Its state is that behind the record ``sequence_id``, and as far as ``outputs``; its ID."""
        checkpoint_id = self.next_id()
        self._writer = CheckpointWriter(
            checkpoint_id, sequence_id, version, outputs, unacknowledged, open_calls, self._limits.chunk_size_bytes
        )
        return checkpoint_id

    def receive(self, data: bytes, *, last: bool) -> WriteCheckpointChunk | None:
        """More of the blob; what is to be written now."""
        writer = self._writer
        require(writer is not None, "a blob without a Checkpoint")
        chunk = writer.receive(data, last=last) if writer is not None else None
        if chunk is not None:
            self.chunks_pending_bytes += len(chunk.data)
        return chunk

    def end(self, time_ns: int) -> CheckpointHeader:
        """The blob is whole: the header that makes it count."""
        writer, self._writer = self._writer, None
        require(writer is not None, "the end of a blob without a Checkpoint")
        assert writer is not None
        self.settled = False
        return writer.header(time_ns)

    def abandon(self) -> None:
        """There will be no more of it. Its chunks count for nothing without a header."""
        self._writer = None

    def became_durable(self, header: CheckpointHeader) -> int | None:
        """``header``'s checkpoint is the last one now; when the next is due by age, ns since the Unix epoch."""
        self.last = without_outputs(header)
        self.settled = True
        age_ns = self._limits.checkpoint_age_ns
        return None if age_ns is None else header.time_ns + age_ns
