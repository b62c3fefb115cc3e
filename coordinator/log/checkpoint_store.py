"""Writing checkpoints: chunks as they come, then the header that makes them count; and what a crash left of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import lmdb

from coordinator.core.errors import require
from coordinator.core.interfaces import CheckpointHeader
from coordinator.log import format as log_format
from coordinator.log import reading
from coordinator.log.environment import Tables
from coordinator.log.format import CHUNK_KEY, SEQUENCE_KEY
from coordinator.log.trim import Budget, delete_range
from protocol.checksum import crc64
from protocol.varint import Readable

WriteTransaction: TypeAlias = "lmdb.Transaction[memoryview]"


@dataclass(slots=True)
class PendingBlob:
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

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._pending: PendingBlob | None = None

    def put_chunk(self, transaction: WriteTransaction, checkpoint_id: int, index: int, data: Readable) -> None:
        """Put one chunk; index 0 begins the blob anew. Call :meth:`chunk_committed` once it is durable."""
        if index == 0:
            self._remove_attempt(transaction, checkpoint_id)
        else:
            pending = self._pending
            require(
                pending is not None and (pending.checkpoint_id, pending.chunk_count) == (checkpoint_id, index),
                f"chunk {index} of checkpoint {checkpoint_id} does not follow the chunk before it: {pending}",
            )
        key = CHUNK_KEY.pack(checkpoint_id, index)
        transaction.put(key, log_format.seal_chunk(key, data), db=self._tables.chunks)

    def chunk_committed(self, checkpoint_id: int, index: int, data: Readable) -> None:
        if index == 0 or self._pending is None:
            self._pending = PendingBlob(checkpoint_id)
        self._pending.add(data)

    def put_header(self, transaction: WriteTransaction, header: CheckpointHeader) -> None:
        """Put the header and the unacknowledged outputs; the blob must be there, with the size and CRC it says."""
        pending = self._pending
        if pending is None or pending.checkpoint_id != header.checkpoint_id:
            pending = PendingBlob(header.checkpoint_id)
        pending.require_complete(header)
        if not pending.chunk_count:
            self._remove_attempt(transaction, header.checkpoint_id)
        outputs = log_format.encode_outputs(header.unacknowledged)
        for index, offset in enumerate(range(0, len(outputs), log_format.OUTPUTS_PIECE_SIZE_BYTES)):
            key = CHUNK_KEY.pack(header.checkpoint_id, index)
            piece = outputs[offset : offset + log_format.OUTPUTS_PIECE_SIZE_BYTES]
            transaction.put(key, log_format.seal_chunk(key, piece), db=self._tables.outputs)
        transaction.put(
            SEQUENCE_KEY.pack(header.checkpoint_id),
            log_format.encode_header(header, pending.chunk_count, outputs),
            db=self._tables.checkpoints,
        )

    def _remove_attempt(self, transaction: WriteTransaction, checkpoint_id: int) -> None:
        """Remove what an earlier attempt under the same ID has left: it may have had more chunks than this one.

        So is a complete one that is damaged: the core was not told of it, and gives its ID away again.
        """
        require(
            not reading.has_readable_header(transaction, self._tables, checkpoint_id),
            f"checkpoint {checkpoint_id} is complete already",
        )
        transaction.delete(SEQUENCE_KEY.pack(checkpoint_id), db=self._tables.checkpoints)
        first, end = CHUNK_KEY.pack(checkpoint_id, 0), CHUNK_KEY.pack(checkpoint_id + 1, 0)
        for table in (self._tables.chunks, self._tables.outputs):
            delete_range(transaction, table, first, end, Budget.unlimited())

    def header_committed(self) -> None:
        self._pending = None


def remove_half_written(transaction: WriteTransaction, tables: Tables) -> bool:
    """Remove one bounded step of the chunks that have no header; True if there were any: more may remain."""
    budget = Budget.step()
    for table in (tables.chunks, tables.outputs):
        checkpoint_id = 0
        while not budget.exhausted:
            with transaction.cursor(table) as cursor:
                if not cursor.set_range(CHUNK_KEY.pack(checkpoint_id, 0)):
                    break
                checkpoint_id = CHUNK_KEY.unpack(cursor.key())[0]
            if transaction.get(SEQUENCE_KEY.pack(checkpoint_id), db=tables.checkpoints) is None:
                first, end = CHUNK_KEY.pack(checkpoint_id, 0), CHUNK_KEY.pack(checkpoint_id + 1, 0)
                delete_range(transaction, table, first, end, budget)
            checkpoint_id += 1
    return budget != Budget.step()
