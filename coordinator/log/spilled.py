"""The table ``spilled``: outputs that their sender's memory had no room for; impulses stay in a table of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import lmdb

from coordinator.core.errors import DamagedLogError
from coordinator.core.interfaces import OutputBatch, SpilledBatch, SpilledExtent
from coordinator.core.pieces import cut
from coordinator.log import format as log_format
from coordinator.log.environment import Tables
from coordinator.log.format import IMPULSES_TABLE, SPILLED_TABLE
from coordinator.log.trim import Budget

ReadTransaction: TypeAlias = "lmdb.Transaction[memoryview]"
WriteTransaction: TypeAlias = "lmdb.Transaction[memoryview]"

EXTENT_SIZE_BYTES = 1 << 20  # rows are told as one up to this: there may be very many


def put(write: WriteTransaction, tables: Tables, batch: SpilledBatch) -> None:
    key = log_format.batch_key(batch.destination, batch.first_position)
    value = log_format.encode_batch(SPILLED_TABLE, key, batch.count, batch.payload)
    write.put(key, value, db=tables.spilled)


def extents(
    transaction: ReadTransaction, tables: Tables, acknowledged: Mapping[str, int]
) -> dict[str, list[SpilledExtent]]:
    """What is not acknowledged, by destination, in order. Only the heads are looked at. Raises DamagedLogError."""
    found: dict[str, list[SpilledExtent]] = {}
    with transaction.cursor(tables.spilled) as cursor:
        for key_view, value in cursor:
            key = bytes(key_view)
            destination, first_position = log_format.batch_of_key(SPILLED_TABLE, key)
            last_position = first_position + log_format.decode_batch_count(SPILLED_TABLE, key, value) - 1
            if last_position > acknowledged.get(destination, 0):
                extent = SpilledExtent(first_position, last_position, log_format.batch_payload_size(value))
                add_extent(found.setdefault(destination, []), extent)
    return found


def add_extent(found: list[SpilledExtent], extent: SpilledExtent) -> None:
    """Put ``extent`` behind the others, joined with the last one where that is small and next to it."""
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
    transaction: ReadTransaction,
    tables: Tables,
    destination: str,
    first_position: int,
    last_position: int,
    size_bytes_max: int,
) -> list[OutputBatch]:
    """As LogStore.read_spilled."""
    batches: list[OutputBatch] = []
    size_bytes, position = 0, first_position
    while position <= last_position:
        batch = _covering(transaction, tables.spilled, SPILLED_TABLE, destination, position)
        if batch is None:
            batch = _covering(transaction, tables.impulses, IMPULSES_TABLE, destination, position)
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


def _covering(
    transaction: ReadTransaction, table: lmdb._Database, name: bytes, destination: str, position: int
) -> OutputBatch | None:
    """The row that has ``position``."""
    with transaction.cursor(table) as cursor:
        wanted = log_format.batch_key(destination, position)
        found = cursor.set_range(wanted)
        if not found or bytes(cursor.key()) != wanted:
            found = cursor.prev() if found else cursor.last()
        if not found:
            return None
        key, value = bytes(cursor.key()), cursor.value()
        row_destination, first_position = log_format.batch_of_key(name, key)
        if row_destination != destination:
            return None
        count = log_format.decode_batch_count(name, key, value)
        if first_position + count - 1 < position:
            return None
        return OutputBatch(first_position, count, log_format.decode_batch_payload(name, key, value))


def end_at(write: WriteTransaction, tables: Tables, destination: str, position: int) -> None:
    """Remove what is spilled to ``destination`` behind ``position``, also from the row that holds both."""
    last = _covering(write, tables.spilled, SPILLED_TABLE, destination, position) if position > 0 else None
    if last is not None and last.last_position > position:
        rest, _ = cut(last, position - last.first_position + 1)
        put(write, tables, SpilledBatch(destination, rest.first_position, rest.count, rest.payload))
    with write.cursor(tables.spilled) as cursor:
        found = cursor.set_range(log_format.batch_key(destination, position + 1))
        while found and log_format.batch_of_key(SPILLED_TABLE, bytes(cursor.key()))[0] == destination:
            cursor.delete()
            found = bool(cursor.key())


def trim(write: WriteTransaction, tables: Tables, acknowledged: Mapping[str, int], budget: Budget) -> None:
    """Remove one step of the rows that are acknowledged whole: by this log's word, so that none is needed again."""
    for destination, position in acknowledged.items():
        with write.cursor(tables.spilled) as cursor:
            found = cursor.set_range(log_format.batch_key(destination, 0))
            while found and not budget.exhausted:
                key, value = bytes(cursor.key()), cursor.value()
                row_destination, first_position = log_format.batch_of_key(SPILLED_TABLE, key)
                if row_destination != destination or first_position > position:
                    break
                if first_position + log_format.decode_batch_count(SPILLED_TABLE, key, value) - 1 > position:
                    break
                budget.rows_left -= 1
                budget.bytes_left -= len(value)
                cursor.delete()
                found = bool(cursor.key())


def check(transaction: ReadTransaction, tables: Tables) -> None:
    """Check every row with its payload, and that no two hold the same positions. Raises DamagedLogError."""
    before = ("", 0)
    with transaction.cursor(tables.spilled) as cursor:
        for key_view, value in cursor:
            key = bytes(key_view)
            destination, first_position = log_format.batch_of_key(SPILLED_TABLE, key)
            count = log_format.decode_batch_count(SPILLED_TABLE, key, value)
            log_format.decode_batch_payload(SPILLED_TABLE, key, value)
            if destination == before[0] and first_position <= before[1]:
                raise DamagedLogError(f"two rows hold the message {first_position} spilled to {destination!r}", -1)
            before = (destination, first_position + count - 1)
