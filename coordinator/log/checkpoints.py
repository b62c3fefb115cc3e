"""Checkpoints in the log: writing (chunks, then the header that completes them), trimming, standbys' offers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache

import msgspec
from msgspec import Struct

from immortal.coordinator.core.errors import DamagedLogError, LogError, require
from immortal.coordinator.core.interfaces import CheckpointHeader, Offer
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log import view_queries
from immortal.coordinator.log.backend import RemovalBudget, Span, View
from immortal.coordinator.log.format import CHUNK_KEY, SEQUENCE_KEY
from immortal.coordinator.log.identity import first_and_last_sequence_id, meta_row
from immortal.coordinator.log.rows import Changes
from immortal.coordinator.log.view_queries import acknowledged_positions
from immortal.protocol import decoding
from immortal.protocol.checksum import crc64
from immortal.protocol.varint import Readable


class PendingBlob(Struct):
    """Chunks written so far for a blob without a committed header."""

    checkpoint_id: int
    chunk_count: int = 0
    size_bytes: int = 0
    check: int = 0

    def add(self, data: Readable) -> None:
        self.chunk_count += 1
        self.size_bytes += len(data)
        self.check = crc64(data, self.check)

    def require_complete(self, header: CheckpointHeader) -> None:
        """Check that the blob has the size and CRC in its header; this also finds memory faults."""
        require(
            (self.size_bytes, self.check) == (header.size_bytes, header.check),
            f"checkpoint {header.checkpoint_id} has {self.size_bytes} bytes with CRC {self.check:016x},"
            f" its header says {header.size_bytes} with {header.check:016x}",
        )


class CheckpointWriter:
    """Writer of one blob at a time, so that only a complete and valid one gets its header."""

    def __init__(self) -> None:
        self._pending: PendingBlob | None = None

    def put_chunk(self, view: View, checkpoint_id: int, index: int, data: Readable) -> Changes:
        """Return changes for a chunk; index 0 begins a new blob. :meth:`chunk_committed` follows the commit."""
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
        """Add header and outputs to ``changes``. The blob must be stored, with the header's size and CRC.

        ``adopts``: another process has written the blob, and it was read and compared with its CRC since then.
        """
        pending = _blob_of_standby(view, header) if adopts else self._pending
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


def _blob_of_standby(view: View, header: CheckpointHeader) -> PendingBlob:
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
    """Return the spans of a checkpoint's rows, except its header."""
    return [Span.of_checkpoint(table, checkpoint_id) for table in ("chunks", "outputs")]


def _attempt(view: View, checkpoint_id: int) -> list[Span]:
    """Return the spans of an earlier attempt under the same ID, which can have had more chunks than this one.

    A complete but damaged checkpoint counts too: the core was not told of it, and uses its ID again.
    """
    require(
        not view_queries.has_readable_header(view, checkpoint_id),
        f"checkpoint {checkpoint_id} is complete already",
    )
    return [Span.of_key("checkpoints", SEQUENCE_KEY.pack(checkpoint_id)), *checkpoint_spans(checkpoint_id)]


def half_written(view: View) -> Changes:
    """Return changes that remove one bounded step of chunks without a header; no changes: there are no more."""
    budget, changes = RemovalBudget.step(), Changes()
    for table in ("chunks", "outputs"):
        checkpoint_id = 0
        while not budget.exhausted:
            first = next(view.sizes(table, CHUNK_KEY.pack(checkpoint_id, 0)), None)
            if first is None:
                break
            checkpoint_id = CHUNK_KEY.unpack(first[0])[0]
            if view.get("checkpoints", SEQUENCE_KEY.pack(checkpoint_id)) is None:
                span = Span.of_checkpoint(table, checkpoint_id)
                changes.deletes += budget.spend_span(view, table, span.end or b"", span.first)
            checkpoint_id += 1
    return changes


# Trimming: removes data that no kept checkpoint needs, in bounded steps (docs/decisions/0002-trim-in-bounded-steps.md).


class Retention(Struct, frozen=True):
    """Rule for keeping checkpoints, see :meth:`LogStore.trim`. Times in ns since the Unix epoch."""

    keep_checkpoints: int | None
    keep_since_ns: int | None
    keep_bytes: int | None = None

    def __post_init__(self) -> None:
        require(
            self.keep_checkpoints is None or self.keep_checkpoints >= 1,
            f"{self.keep_checkpoints} checkpoints cannot be kept, it must be at least one",
        )

    def oldest_kept(
        self, newest_first: Iterable[CheckpointHeader], size_bytes_behind: Callable[[CheckpointHeader], float]
    ) -> CheckpointHeader | None:
        """Return the oldest checkpoint to keep; None if there is no checkpoint.

        ``size_bytes_behind``: returns the size of the records after a checkpoint.
        """
        oldest = None
        least = self.keep_checkpoints or 1
        by_count_alone = self.keep_since_ns is None and self.keep_bytes is None
        blobs_size_bytes = 0
        for kept, header in enumerate(newest_first, start=1):
            blobs_size_bytes += header.size_bytes
            if (
                kept > least
                and self.keep_bytes is not None
                and blobs_size_bytes + size_bytes_behind(header) > self.keep_bytes
            ):
                break
            oldest = header
            is_old = by_count_alone or (self.keep_since_ns is not None and header.time_ns <= self.keep_since_ns)
            if kept >= least and is_old:
                break
        return oldest


def trim_step(
    view: View, retention: Retention | None, damaged_ids: Collection[int], budget: RemovalBudget
) -> tuple[Changes, bool]:
    """Return the changes of one removal step, and True if spilled rows are among them.

    ``budget`` is exhausted if more can remain.
    """
    acknowledged = acknowledged_positions(view)
    changes = Changes()
    for destination, position in acknowledged.items():
        if not budget.exhausted:
            changes.deletes += view_queries.trim(view, "spilled", destination, position, budget)
    from_spilled = bool(changes.deletes)
    if retention is not None and not budget.exhausted:
        _trim_history(view, changes, retention, damaged_ids, acknowledged, budget)
    return changes, from_spilled


def _trim_history(
    view: View,
    changes: Changes,
    retention: Retention,
    damaged_ids: Collection[int],
    acknowledged: Mapping[str, int],
    budget: RemovalBudget,
) -> None:
    """Remove headers before their chunks, and before the records that they need.

    So a crash between two steps never leaves an incomplete checkpoint that looks complete.
    """
    oldest = retention.oldest_kept(_valid_headers(view, damaged_ids), _sizes_behind(view))
    if oldest is None:
        return
    changes.deletes += budget.spend_span(view, "checkpoints", SEQUENCE_KEY.pack(oldest.checkpoint_id))
    for table in ("chunks", "outputs"):
        changes.deletes += budget.spend_span(view, table, CHUNK_KEY.pack(oldest.checkpoint_id, 0))
    for span in budget.spend_span(view, "records", SEQUENCE_KEY.pack(oldest.sequence_id + 1)):
        (end,) = SEQUENCE_KEY.unpack(span.end or b"")
        changes.deletes.append(span)
        changes.puts.append(meta_row(log_format.META_TRIMMED, end - 1))
    changes.deletes += budget.spend_span(view, "verdicts", log_format.record_key(oldest.sequence_id + 1))
    for destination, mark in oldest.outputs.items():
        if not budget.exhausted:
            # Also impulses before the checkpoint that still wait: the checkpoint may have left them in the log.
            position = min(mark.position, acknowledged.get(destination, 0))
            changes.deletes += view_queries.trim(view, "impulses", destination, position, budget)


def _sizes_behind(view: View) -> Callable[[CheckpointHeader], float]:
    """Return a function that estimates the size of the records after a checkpoint, in bytes.

    It uses the mean size of a record: to add up all sizes would read the whole log in each step.
    """

    @cache  # computed on first use: some backends count rows
    def measured() -> tuple[float, int]:
        size = view.size("records")
        return size.size_bytes / max(size.rows_count, 1), first_and_last_sequence_id(view)[1]

    def size_bytes_behind(header: CheckpointHeader) -> float:
        mean_size_bytes, last = measured()
        return (last - header.sequence_id) * mean_size_bytes

    return size_bytes_behind


def _valid_headers(view: View, damaged_ids: Collection[int]) -> Iterator[CheckpointHeader]:
    """Yield the headers of all checkpoints, newest first, except those known to be damaged."""
    for key, value in view.scan_back("checkpoints"):
        with contextlib.suppress(DamagedLogError):
            header = log_format.decode_header(bytes(key), bytes(value)).header
            if header.checkpoint_id not in damaged_ids:
                yield header


# Offers: a standby's answer to the writer, about a checkpoint whose chunks it has written.


_encode = msgspec.msgpack.Encoder().encode
_decode = decoding.Decoder(Offer).decode


def sealed_chunk(checkpoint_id: int, index: int, data: Readable) -> bytes:
    """Seal a chunk for the table of chunks."""
    return log_format.seal_chunk(CHUNK_KEY.pack(checkpoint_id, index), data)


def encode_offer(offer: Offer) -> bytes:
    """Encode an offer. Only the current writer reads it, so it is not part of the log's format."""
    return _encode(offer)


def decode_offer(data: bytes) -> Offer:
    """Decode an offer. Raises LogError."""
    try:
        return _decode(data)
    except decoding.DecodeError as error:
        raise LogError(f"what a standby says of its checkpoint can't be read: {error}") from None
