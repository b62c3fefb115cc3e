"""Rows that go into a log which nobody writes yet: a new one, or the copy of another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from psycopg import Connection

from immortal.coordinator.log.backend import Append, Row, View
from immortal.coordinator.log.backends.postgres.packing import PACK_SIZE_BYTES_MAX
from immortal.coordinator.log.backends.postgres.statements import CHANGE, ROWS_MAX, statements
from immortal.coordinator.log.backends.postgres.view import RECORDS
from immortal.coordinator.log.format import ALL_TABLES, META_JOURNAL, SEQUENCE_KEY


def change(connection: Connection[tuple[Any, ...]], instance: str, append: Append) -> None:
    """Without a look at who writes. Raises LogError for what PostgreSQL does not take."""
    for statement in statements(append):
        connection.execute(CHANGE, [instance, *statement])


def put_copy(connection: Connection[tuple[Any, ...]], instance: str, source: View) -> int:
    """All of ``source``; how many records. Memory for one pack is enough."""
    count = 0
    for records in _packs(source):
        change(connection, instance, Append(-1, records=records))
        count += len(records)
    change(connection, instance, Append(-1, puts=_rows(source)))
    return count


def _packs(source: View) -> Iterator[list[tuple[int, bytes]]]:
    records: list[tuple[int, bytes]] = []
    size_bytes = 0
    for key, value in source.scan(RECORDS):
        if records and (size_bytes + len(value) > PACK_SIZE_BYTES_MAX or len(records) >= ROWS_MAX):
            yield records
            records, size_bytes = [], 0
        records.append((SEQUENCE_KEY.unpack(key)[0], bytes(value)))
        size_bytes += len(value)
    if records:
        yield records


def _rows(source: View) -> Iterator[Row]:
    for table in ALL_TABLES:
        if table != RECORDS:
            for key, value in source.scan(table):
                if table != "meta" or bytes(key) != META_JOURNAL:  # a folder's, whose rows are in the tables here
                    yield table, bytes(key), value
