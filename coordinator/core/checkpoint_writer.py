"""A checkpoint on its way from the app to the log: its blob in chunks, then the header that makes it count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from immortal.coordinator.core.effects import WriteCheckpointChunk
from immortal.coordinator.core.interfaces import CheckpointHeader, OutputBatch, OutputMark
from immortal.protocol.checksum import crc64


class CheckpointWriter:
    """Takes the blob as it comes. The output streams are as they were when its announcement came."""

    def __init__(
        self,
        checkpoint_id: int,
        sequence_id: int,
        version: int,
        outputs: Mapping[str, OutputMark],
        unacknowledged: Mapping[str, Sequence[OutputBatch]],
        open_calls: Mapping[str, Sequence[int]],
        chunk_size_bytes: int,
    ) -> None:
        self.checkpoint_id = checkpoint_id
        self.sequence_id = sequence_id
        self.version = version
        self._outputs = outputs
        self._unacknowledged = unacknowledged
        self._open_calls = open_calls
        self._chunk_size_bytes = chunk_size_bytes
        self._pieces: list[bytes] = []
        self._pieces_bytes = 0
        self._size_bytes = 0
        self._next_index = 0
        self._check = 0

    def receive(self, data: bytes, *, last: bool) -> WriteCheckpointChunk | None:
        """The chunk that is full now, or the last one."""
        if data:
            self._pieces.append(data)
            self._pieces_bytes += len(data)
            self._size_bytes += len(data)
            self._check = crc64(data, self._check)
        if not self._pieces or (self._pieces_bytes < self._chunk_size_bytes and not last):
            return None
        chunk = WriteCheckpointChunk(self.checkpoint_id, self._next_index, b"".join(self._pieces))
        self._next_index += 1
        self._pieces.clear()
        self._pieces_bytes = 0
        return chunk

    def header(self, time_ns: int) -> CheckpointHeader:
        return CheckpointHeader(
            self.checkpoint_id,
            self.sequence_id,
            self._size_bytes,
            self._check,
            time_ns,
            self._outputs,
            self._unacknowledged,
            self.version,
            self._open_calls,
        )
