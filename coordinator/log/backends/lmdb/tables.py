"""Tables of a log in LMDB: views of a read transaction with the journal's rows on top, and a writer."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

import lmdb

from immortal.coordinator.core.errors import DamagedLogError, LogFormatError, fail, require
from immortal.coordinator.fault_points import reach
from immortal.coordinator.log.backend import Append, Row, Span, TableSize, View
from immortal.coordinator.log.backends.lmdb.environment import unavailable_error
from immortal.coordinator.log.format import (
    ALL_TABLES,
    INT,
    META_AUTHENTICATED,
    META_JOURNAL,
    SEQUENCE_KEY,
    TABLES,
    TABLES_OF_SEALS,
)
from immortal.coordinator.log.identity import check_format, meta_value
from immortal.protocol.varint import Readable

Tables: TypeAlias = dict[str, "lmdb._Database"]  # by name
ReadTransaction: TypeAlias = "lmdb.Transaction[memoryview]"
JournalRows: TypeAlias = dict[tuple[str, bytes], Readable]  # by table and key
Rows: TypeAlias = Iterator[tuple[Readable, Readable]]


def view_of(transaction: ReadTransaction, tables: Tables, rows: JournalRows) -> LmdbView:
    """Return the view of ``transaction`` as if the journal's ``rows`` were in its tables."""
    return OverlaidView(transaction, tables, rows) if rows else LmdbView(transaction, tables)


class LmdbView(View):
    """View of LMDB's tables alone. LMDB's own iterators yield the rows, without Python code per row."""

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
    """View of LMDB's tables with the journal's rows on top: the journal's row wins."""

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
        return _merge_ascending(under, over) if over else under

    def scan_back(self, table: str, last: bytes | None = None) -> Rows:
        over = rows_of_table(self._rows, table)
        over = over if last is None else over[: bisect_right(over, last, key=_key_of)]
        under = super().scan_back(table, last)
        return _merge_descending(under, over) if over else under

    def size(self, table: str) -> TableSize:
        """Estimate a table's size. Rows in both the table and the journal count twice."""
        size_bytes, rows_count = super().size(table)
        return TableSize(size_bytes, rows_count + len(rows_of_table(self._rows, table)))


def _merge_ascending(under: Rows, over: list[tuple[bytes, Readable]]) -> Rows:
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


def _merge_descending(under: Rows, over: list[tuple[bytes, Readable]]) -> Rows:
    for key_view, value in under:
        key = bytes(key_view)
        while over and over[-1][0] > key:
            yield over.pop()
        if not over or over[-1][0] != key:
            yield key_view, value
    yield from reversed(over)


def rows_of_table(rows: JournalRows, table: str) -> list[tuple[bytes, Readable]]:
    """Return the rows of one table, ordered by key."""
    return sorted([(key, value) for (name, key), value in rows.items() if name == table], key=_key_of)


def _key_of(row: tuple[bytes, Readable]) -> bytes:
    return row[0]


# Named databases of a log's LMDB environment, one for each table.


WriteTransaction: TypeAlias = "lmdb.Transaction[memoryview]"


def create_tables(environment: lmdb.Environment) -> Tables:
    """Create the tables of a new log. Raises lmdb.Error."""
    with environment.begin(write=True) as transaction:
        return {name: environment.open_db(name.encode(), txn=transaction) for name in TABLES}


def open_tables(environment: lmdb.Environment, folder: Path) -> Tables:
    """Open the tables of an existing log.

    Raises LogFormatError if one is missing or the log has another format version, DamagedLogError.
    """
    try:
        meta = environment.open_db(b"meta", create=False)
        with environment.begin(buffers=True) as transaction:  # first: another version may have other databases
            check_format(LmdbView(transaction, {"meta": meta}), str(folder))
        opened = ((name, _open_table(environment, name)) for name in ALL_TABLES)
        return {name: table for name, table in opened if table is not None}
    except (lmdb.NotFoundError, lmdb.ReadonlyError) as error:
        raise LogFormatError(f"there is no complete log in {folder}: {error}") from None
    except lmdb.Error as error:
        raise unavailable_error(folder, error) or LogFormatError(f"the log in {folder} is damaged: {error}") from error


def _open_table(environment: lmdb.Environment, name: str) -> lmdb._Database | None:
    """Return a table; None for a table of seals that the log lacks. Raises lmdb.NotFoundError for any other one."""
    try:
        return environment.open_db(name.encode(), create=False)
    except lmdb.NotFoundError:
        if name not in TABLES_OF_SEALS:
            raise
        return None


def journal_nonce(view: LmdbView) -> int | None:
    """Return the nonce of the log's journal; None if the log is whole without one. Raises DamagedLogError."""
    return meta_value(view, META_JOURNAL, INT)


class TableWriter:
    """Write transaction with the log's tables; the first row of a missing table creates it."""

    def __init__(self, environment: lmdb.Environment, transaction: WriteTransaction, tables: Tables) -> None:
        self.transaction = transaction
        self.tables = dict(tables)
        self._environment = environment

    def view(self) -> LmdbView:
        return LmdbView(self.transaction, self.tables)

    def put_rows(self, rows: Iterable[Row]) -> None:
        put = self.transaction.put
        for table, key, value in rows:
            put(key, value, db=self.tables.get(table) or self.create(table))

    def create(self, table: str) -> lmdb._Database:
        made = self._environment.open_db(table.encode(), txn=self.transaction)
        self.tables[table] = made
        return made

    def delete(self, span: Span) -> None:
        table = self.tables.get(span.table)
        if table is None:
            return
        if span.is_one:
            self.transaction.delete(span.first, db=table)
        elif not span.first and span.end is None:
            self.transaction.drop(table, delete=False)
        else:
            with self.transaction.cursor(table) as cursor:
                found = cursor.set_range(span.first) if span.first else cursor.first()
                while found and (span.end is None or bytes(cursor.key()) < span.end):
                    cursor.delete()  # moves to the next row
                    found = bool(cursor.key())

    def apply_journal(self, rows: JournalRows) -> None:
        """Put the journal's rows into the tables. Raises DamagedLogError."""
        for (table, key), value in rows.items():
            database = self.tables.get(table)
            if database is None:
                raise DamagedLogError(f"the log's journal has a row for the table {table!r}, which the log has not", -1)
            put = self.transaction.put(key, value, append=table == "records", db=database)
            require(put or table != "records", f"record {key.hex()} is in the log already")

    def put(self, append: Append) -> None:
        for span in append.deletes:
            self.delete(span)
        put, records = self.transaction.put, self.tables["records"]
        for sequence_id, value in append.records:
            if not put(SEQUENCE_KEY.pack(sequence_id), value, append=True, db=records):
                fail(f"record {sequence_id} is in the log already")
        self.put_rows(append.puts)
        if Span("record_seals") in append.deletes:
            self.fit_seal_tables()
        for point in append.points:
            reach(point)

    def fit_seal_tables(self) -> None:
        """Create the tables of seals if the log is authenticated, and remove them if not."""
        is_authenticated = self.transaction.get(META_AUTHENTICATED, db=self.tables["meta"]) is not None
        for name in TABLES_OF_SEALS:
            if is_authenticated and name not in self.tables:
                self.create(name)
            elif not is_authenticated and name in self.tables:
                self.transaction.drop(self.tables.pop(name), delete=True)

    def forget_journal(self) -> None:
        self.transaction.delete(META_JOURNAL, db=self.tables["meta"])
