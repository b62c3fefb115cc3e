"""Writing checkpoints: chunks as they come, then the header that makes them count; and what a crash left of them."""

from __future__ import annotations

from msgspec import Struct

from immortal.coordinator.core.errors import require
from immortal.coordinator.core.interfaces import CheckpointHeader
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log import reading
from immortal.coordinator.log.backend import Span, View
from immortal.coordinator.log.budget import Budget
from immortal.coordinator.log.format import CHUNK_KEY, SEQUENCE_KEY
from immortal.coordinator.log.rows import Changes
from immortal.protocol.checksum import crc64
from immortal.protocol.varint import Readable


class PendingBlob(Struct):
    """What has been written of a blob whose header is not committed yet."""

    checkpoint_id: int
    chunk_count: int = 0
    size_bytes: int = 0
    check: int = 0

    def add(self, data: Readable) -> None:
        self.chunk_count += 1
        self.size_bytes += len(data)
        self.check = crc64(data, self.check)

    def require_complete(self, header: CheckpointHeader) -> None:
        """The blob must be there with the size and CRC that its header says; a memory fault shows here as well."""
        require(
            (self.size_bytes, self.check) == (header.size_bytes, header.check),
            f"checkpoint {header.checkpoint_id} has {self.size_bytes} bytes with CRC {self.check:016x},"
            f" its header says {header.size_bytes} with {header.check:016x}",
        )


class CheckpointWriter:
    """Keeps track of the one blob that is on its way, so that only a whole and right one can get its header."""

    def __init__(self) -> None:
        self._pending: PendingBlob | None = None

    def put_chunk(self, view: View, checkpoint_id: int, index: int, data: Readable) -> Changes:
        """For one chunk; index 0 begins the blob anew. Call :meth:`chunk_committed` once it is durable."""
        changes = Changes()
        if index == 0:
            changes.deletes += _attempt(view, checkpoint_id)
        else:
            pending = self._pending
            require(
                pending is not None and (pending.checkpoint_id, pending.chunk_count) == (checkpoint_id, index),
                f"chunk {index} of checkpoint {checkpoint_id} does not follow the chunk before it: {pending}",
            )
        key = CHUNK_KEY.pack(checkpoint_id, index)
        changes.puts.append(("chunks", key, log_format.seal_chunk(key, data)))
        return changes

    def chunk_committed(self, checkpoint_id: int, index: int, data: Readable) -> None:
        if index == 0 or self._pending is None:
            self._pending = PendingBlob(checkpoint_id)
        self._pending.add(data)

    def put_header(self, view: View, header: CheckpointHeader, changes: Changes, *, adopts: bool = False) -> None:
        """Header and outputs go into ``changes``; the blob must be there, with the header's size and CRC.

        ``adopts``: somebody else has written it, and it was read and compared with its CRC since.
        """
        pending = _written_by_another(view, header) if adopts else self._pending
        if pending is None or pending.checkpoint_id != header.checkpoint_id:
            pending = PendingBlob(header.checkpoint_id)
        pending.require_complete(header)
        if not pending.chunk_count:
            changes.deletes += _attempt(view, header.checkpoint_id)
        outputs = log_format.encode_outputs(header.unacknowledged)
        for index, offset in enumerate(range(0, len(outputs), log_format.OUTPUTS_PIECE_SIZE_BYTES)):
            key = CHUNK_KEY.pack(header.checkpoint_id, index)
            piece = outputs[offset : offset + log_format.OUTPUTS_PIECE_SIZE_BYTES]
            changes.puts.append(("outputs", key, log_format.seal_chunk(key, piece)))
        value = log_format.encode_header(header, pending.chunk_count, outputs)
        changes.puts.append(("checkpoints", SEQUENCE_KEY.pack(header.checkpoint_id), value))

    def header_committed(self) -> None:
        self._pending = None


def _written_by_another(view: View, header: CheckpointHeader) -> PendingBlob:
    pending = PendingBlob(header.checkpoint_id, check=header.check)
    for key, size_bytes in view.sizes("chunks", CHUNK_KEY.pack(header.checkpoint_id, 0)):
        checkpoint_id, index = CHUNK_KEY.unpack(key)
        if checkpoint_id != header.checkpoint_id:
            break
        require(index == pending.chunk_count, f"chunk {pending.chunk_count} of checkpoint {checkpoint_id} is missing")
        pending.chunk_count += 1
        pending.size_bytes += size_bytes - log_format.CRC_SIZE_BYTES
    return pending


def checkpoint_spans(checkpoint_id: int) -> list[Span]:
    """All of a checkpoint but its header."""
    first, end = CHUNK_KEY.pack(checkpoint_id, 0), CHUNK_KEY.pack(checkpoint_id + 1, 0)
    return [Span(table, first, end) for table in ("chunks", "outputs")]


def _attempt(view: View, checkpoint_id: int) -> list[Span]:
    """What an earlier attempt under the same ID has left: it may have had more chunks than this one.

    So is a complete one that is damaged: the core was not told of it, and gives its ID away again.
    """
    require(
        not reading.has_readable_header(view, checkpoint_id),
        f"checkpoint {checkpoint_id} is complete already",
    )
    return [Span.of_one("checkpoints", SEQUENCE_KEY.pack(checkpoint_id)), *checkpoint_spans(checkpoint_id)]


def half_written(view: View) -> Changes:
    """One bounded step of the chunks that have no header; none: there are no more."""
    budget, changes = Budget.step(), Changes()
    for table in ("chunks", "outputs"):
        checkpoint_id = 0
        while not budget.exhausted:
            first = next(view.sizes(table, CHUNK_KEY.pack(checkpoint_id, 0)), None)
            if first is None:
                break
            checkpoint_id = CHUNK_KEY.unpack(first[0])[0]
            if view.get("checkpoints", SEQUENCE_KEY.pack(checkpoint_id)) is None:
                begin, end = CHUNK_KEY.pack(checkpoint_id, 0), CHUNK_KEY.pack(checkpoint_id + 1, 0)
                changes.deletes += budget.take_span(view, table, end, begin)
            checkpoint_id += 1
    return changes
