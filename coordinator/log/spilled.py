"""The table ``spilled``: outputs that their sender's memory had no room for. Impulses have a table of their own."""

from __future__ import annotations

from collections.abc import Mapping

from immortal.coordinator.core.errors import DamagedLogError
from immortal.coordinator.core.interfaces import OutputBatch, SpilledBatch, SpilledExtent
from immortal.coordinator.core.output.send_buffer import cut
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.backend import RemovalBudget, Span, View
from immortal.coordinator.log.format import SPILLED_TABLE

EXTENT_SIZE_BYTES = 1 << 20  # rows are told as one up to this: there may be very many


def extents(view: View, acknowledged: Mapping[str, int]) -> dict[str, list[SpilledExtent]]:
    """Return the extents that are not acknowledged, by destination, in order.

    Only heads of rows are read. Raises DamagedLogError.
    """
    found: dict[str, list[SpilledExtent]] = {}
    for key_view, value in view.scan("spilled"):
        key = bytes(key_view)
        destination, first_position = log_format.batch_of_key(SPILLED_TABLE, key)
        last_position = first_position + log_format.decode_batch_count(SPILLED_TABLE, key, value) - 1
        if last_position > acknowledged.get(destination, 0):
            extent = SpilledExtent(first_position, last_position, log_format.batch_payload_size(value))
            add_extent(found.setdefault(destination, []), extent)
    return found


def add_extent(found: list[SpilledExtent], extent: SpilledExtent) -> None:
    """Append ``extent`` to the others, merged with the last one where that is small and adjacent."""
    last = found[-1] if found else None
    if (
        last is not None
        and last.last_position + 1 == extent.first_position
        and last.size_bytes + extent.size_bytes <= EXTENT_SIZE_BYTES
    ):
        found[-1] = SpilledExtent(last.first_position, extent.last_position, last.size_bytes + extent.size_bytes)
    else:
        found.append(extent)


def read(
    view: View,
    destination: str,
    first_position: int,
    last_position: int,
    size_bytes_max: int,
) -> list[OutputBatch]:
    """Read spilled batches, as specified by :meth:`LogStore.read_spilled`."""
    batches: list[OutputBatch] = []
    size_bytes, position = 0, first_position
    while position <= last_position:
        batch = _covering(view, "spilled", destination, position)
        if batch is None:
            batch = _covering(view, "impulses", destination, position)
        if batch is None:
            if not batches:
                raise missing(destination, position)
            break
        size_bytes += len(batch.payload)
        if batches and size_bytes > size_bytes_max:
            break
        batches.append(batch)
        position = batch.last_position + 1
    return batches


def missing(destination: str, position: int) -> DamagedLogError:
    return DamagedLogError(f"the message {position} to {destination!r} waits to be sent and is not in the log", -1)


def _covering(view: View, table: str, destination: str, position: int) -> OutputBatch | None:
    """Return the row that has the message at ``position``."""
    for key_view, value in view.scan_back(table, log_format.batch_key(destination, position)):
        key, name = bytes(key_view), table.encode()
        row_destination, first_position = log_format.batch_of_key(name, key)
        if row_destination != destination:
            return None
        count = log_format.decode_batch_count(name, key, value)
        if first_position + count - 1 < position:
            return None
        return OutputBatch(first_position, count, log_format.decode_batch_payload(name, key, value))
    return None


def end_at(view: View, destination: str, position: int) -> tuple[list[SpilledBatch], Span]:
    """Plan the removal of spilled messages to ``destination`` behind ``position``: the remains of the row that holds
    both, and the span to delete.
    """
    last = _covering(view, "spilled", destination, position) if position > 0 else None
    left = []
    if last is not None and last.last_position > position:
        rest, _ = cut(last, position - last.first_position + 1)
        left.append(SpilledBatch(rest.first_position, rest.count, rest.payload, destination))
    end = log_format.name_key(destination)[:-1] + b"\1"  # a name ends with a zero byte
    return left, Span("spilled", log_format.batch_key(destination, position + 1), end)


def trim(view: View, table: str, destination: str, position: int, budget: RemovalBudget) -> list[Span]:
    """Return spans of one removal step: rows of ``table`` to ``destination`` that end at or below ``position``."""
    name, first = table.encode(), log_format.batch_key(destination, 0)
    last_key = None
    for key_view, value in view.scan(table, first):
        key = bytes(key_view)
        row_destination, first_position = log_format.batch_of_key(name, key)
        if budget.exhausted or row_destination != destination or first_position > position:
            break
        if first_position + log_format.decode_batch_count(name, key, value) - 1 > position:
            break
        budget.take(len(value))
        last_key = key
    return [] if last_key is None else [Span(table, first, last_key + b"\0")]


def check(view: View) -> None:
    """Check every row with its payload, and that no two hold the same positions. Raises DamagedLogError."""
    before = ("", 0)
    for key_view, value in view.scan("spilled"):
        key = bytes(key_view)
        destination, first_position = log_format.batch_of_key(SPILLED_TABLE, key)
        count = log_format.decode_batch_count(SPILLED_TABLE, key, value)
        log_format.decode_batch_payload(SPILLED_TABLE, key, value)
        if destination == before[0] and first_position <= before[1]:
            raise DamagedLogError(f"two rows hold the message {first_position} spilled to {destination!r}", -1)
        before = (destination, first_position + count - 1)
