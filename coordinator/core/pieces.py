"""Batches of an output stream, cut at the borders of their messages, and joined."""

from __future__ import annotations

from collections.abc import Sequence

from immortal.coordinator.core.errors import require
from immortal.coordinator.core.interfaces import OutputBatch
from immortal.protocol.batch import offset_after


def cut(batch: OutputBatch, count: int) -> tuple[OutputBatch, OutputBatch]:
    """The first ``count`` messages of ``batch``, and the others; both non-empty."""
    require(0 < count < batch.count, f"cut {count} of {batch.count} messages")
    return _cut_at(batch, count, offset_after(batch.payload, count, batch.count))


def behind(batch: OutputBatch, position: int) -> OutputBatch | None:
    """What of ``batch`` lies behind ``position``; None if nothing does."""
    if batch.first_position > position:
        return batch
    if batch.last_position <= position:
        return None
    return cut(batch, position - batch.first_position + 1)[1]


def fitting(batch: OutputBatch, size_bytes_max: int) -> tuple[OutputBatch, OutputBatch | None]:
    """Messages of ``batch`` that fit into ``size_bytes_max``, as many as there can be where all have one size.

    One at least. And the others.
    """
    count, offset = batch.count, len(batch.payload)
    while offset > size_bytes_max and count > 1:
        count = max(1, min(count - 1, count * size_bytes_max // offset))
        offset = offset_after(batch.payload, count, batch.count)
    return (batch, None) if count == batch.count else _cut_at(batch, count, offset)


def join(batches: Sequence[OutputBatch]) -> OutputBatch:
    """One or more batches, each at the position behind the one before it, as one."""
    if len(batches) == 1:
        return batches[0]
    payload = b"".join([batch.payload for batch in batches])
    return OutputBatch(batches[0].first_position, sum([batch.count for batch in batches]), payload)


def _cut_at(batch: OutputBatch, count: int, offset: int) -> tuple[OutputBatch, OutputBatch]:
    return (
        OutputBatch(batch.first_position, count, batch.payload[:offset]),
        OutputBatch(batch.first_position + count, batch.count - count, batch.payload[offset:]),
    )
