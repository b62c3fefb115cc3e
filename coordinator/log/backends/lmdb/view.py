"""A log in LMDB at one moment: a read transaction, with the rows of the journal laid over its tables."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import TypeAlias

import lmdb

from immortal.coordinator.log.backend import TableSize, View
from immortal.protocol.varint import Readable

Tables: TypeAlias = dict[str, "lmdb._Database"]  # by name; those that the log has
ReadTransaction: TypeAlias = "lmdb.Transaction[memoryview]"
JournalRows: TypeAlias = dict[tuple[str, bytes], Readable]  # by table and key
Rows: TypeAlias = Iterator[tuple[Readable, Readable]]


def view_of(transaction: ReadTransaction, tables: Tables, rows: JournalRows) -> LmdbView:
    """``transaction`` as it would be with ``rows`` in its tables."""
    return OverlaidView(transaction, tables, rows) if rows else LmdbView(transaction, tables)


class LmdbView(View):
    """Its rows come from LMDB's own iterators: nothing of ours runs for each of them."""

    def __init__(self, transaction: ReadTransaction, tables: Tables) -> None:
        self._transaction = transaction
        self._tables = tables

    def get(self, table: str, key: bytes) -> Readable | None:
        database = self._tables.get(table)
        return None if database is None else self._transaction.get(key, db=database)

    def scan(self, table: str, first: bytes = b"") -> Rows:
        if (database := self._tables.get(table)) is None:
            return iter(())
        cursor = self._transaction.cursor(database)
        found = cursor.set_range(first) if first else cursor.first()
        return cursor.iternext() if found else iter(())

    def scan_back(self, table: str, last: bytes | None = None) -> Rows:
        if (database := self._tables.get(table)) is None:
            return iter(())
        cursor = self._transaction.cursor(database)
        if last is None or not cursor.set_range(last):
            found = cursor.last()
        else:
            found = bytes(cursor.key()) == last or cursor.prev()
        return cursor.iterprev() if found else iter(())

    def size(self, table: str) -> TableSize:
        if (database := self._tables.get(table)) is None:
            return TableSize(0, 0)
        state = self._transaction.stat(database)
        pages = state["branch_pages"] + state["leaf_pages"] + state["overflow_pages"]
        return TableSize(pages * state["psize"], state["entries"])


class OverlaidView(LmdbView):
    """Where both have a key, the journal's row counts."""

    def __init__(self, transaction: ReadTransaction, tables: Tables, rows: JournalRows) -> None:
        super().__init__(transaction, tables)
        self._rows = rows

    def get(self, table: str, key: bytes) -> Readable | None:
        row = self._rows.get((table, bytes(key)))
        return super().get(table, key) if row is None else row

    def scan(self, table: str, first: bytes = b"") -> Rows:
        over = rows_of_table(self._rows, table)
        over = over[bisect_left(over, first, key=_key_of) :]
        under = super().scan(table, first)
        return _ascending(under, over) if over else under

    def scan_back(self, table: str, last: bytes | None = None) -> Rows:
        over = rows_of_table(self._rows, table)
        over = over if last is None else over[: bisect_right(over, last, key=_key_of)]
        under = super().scan_back(table, last)
        return _descending(under, over) if over else under

    def size(self, table: str) -> TableSize:
        """Rows that are in both count twice: it is for estimates."""
        size_bytes, rows_count = super().size(table)
        return TableSize(size_bytes, rows_count + len(rows_of_table(self._rows, table)))


def _ascending(under: Rows, over: list[tuple[bytes, Readable]]) -> Rows:
    rows = iter(over)
    next_key, next_value = next(rows)
    left = True
    for key_view, value in under:
        key = bytes(key_view)
        while left and next_key < key:
            yield next_key, next_value
            next_key, next_value = next(rows, (b"", b""))
            left = bool(next_key)
        if not left or key != next_key:
            yield key_view, value
    if left:
        yield next_key, next_value
        yield from rows


def _descending(under: Rows, over: list[tuple[bytes, Readable]]) -> Rows:
    for key_view, value in under:
        key = bytes(key_view)
        while over and over[-1][0] > key:
            yield over.pop()
        if not over or over[-1][0] != key:
            yield key_view, value
    yield from reversed(over)


def rows_of_table(rows: JournalRows, table: str) -> list[tuple[bytes, Readable]]:
    """In the order of their keys."""
    return sorted([(key, value) for (name, key), value in rows.items() if name == table], key=_key_of)


def _key_of(row: tuple[bytes, Readable]) -> bytes:
    return row[0]
