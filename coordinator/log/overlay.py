"""A read transaction of LMDB with the rows of the journal laid over it: what a reader sees of a log.

Only what readers in here ask of a transaction and of a cursor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, TypeAlias, cast

import lmdb

from coordinator.log.environment import Tables
from coordinator.log.journal import Rows, rows_of_table

ReadTransaction: TypeAlias = "lmdb.Transaction[memoryview]"


def laid_over(transaction: ReadTransaction, tables: Tables, rows: Rows) -> ReadTransaction:
    """``transaction`` as it would be with ``rows`` in its tables."""
    return cast(ReadTransaction, _Overlay(transaction, tables, rows)) if rows else transaction


class _Overlay:
    def __init__(self, transaction: ReadTransaction, tables: Tables, rows: Rows) -> None:
        self._transaction = transaction
        self._rows = rows
        self._names = {getattr(tables, name): name for name in Tables.__dataclass_fields__}

    def get(self, key: bytes, default: memoryview | None = None, db: lmdb._Database | None = None) -> memoryview | None:
        row = self._rows.get((self._names[db], bytes(key)))
        return self._transaction.get(key, default, db=db) if row is None else memoryview(row)

    def cursor(self, db: lmdb._Database) -> Any:
        cursor = self._transaction.cursor(db)
        rows = rows_of_table(self._rows, self._names[db])
        return _Cursor(cursor, rows) if rows else cursor

    def stat(self, db: lmdb._Database) -> dict[str, Any]:
        """Rows that are in both count twice: it is for estimates."""
        stat = self._transaction.stat(db)
        return {**stat, "entries": stat["entries"] + len(rows_of_table(self._rows, self._names[db]))}


class _Cursor:
    """Over LMDB's rows and the others; where both have a key, the other one counts."""

    def __init__(self, cursor: lmdb.Cursor[memoryview], rows: list[tuple[bytes, bytes]]) -> None:
        self._cursor = cursor
        self._rows = rows
        self._keys = [key for key, _ in rows]
        self._at: tuple[bytes, memoryview] | None = None

    def __enter__(self) -> _Cursor:
        return self

    def __exit__(self, *args: object) -> None:
        self._cursor.close()

    def key(self) -> memoryview:
        return memoryview(b"" if self._at is None else self._at[0])

    def value(self) -> memoryview:
        return memoryview(b"") if self._at is None else self._at[1]

    def first(self) -> bool:
        return self._forward(self._cursor.first(), 0)

    def last(self) -> bool:
        return self._backward(self._cursor.last(), len(self._keys) - 1)

    def set_range(self, key: bytes) -> bool:
        return self._forward(self._cursor.set_range(key), bisect_left(self._keys, bytes(key)))

    def next(self) -> bool:
        if self._at is None:
            return self.first()
        return self.set_range(self._at[0] + b"\0")

    def prev(self) -> bool:
        if self._at is None:
            return self.last()
        key = self._at[0]
        found = self._cursor.prev() if self._cursor.set_range(key) else self._cursor.last()
        return self._backward(found, bisect_left(self._keys, key) - 1)

    def __iter__(self) -> Iterator[tuple[memoryview, memoryview]]:
        positioned = self._at is not None or self.first()
        if self._at is not None and self._at[0] < self._keys[0]:  # LMDB's own up to the first other one, at its speed
            for key, value in self._cursor:
                if bytes(key) >= self._keys[0]:
                    break
                yield key, value
            positioned = self.set_range(self._keys[0])
        while positioned and self._at is not None:
            yield memoryview(self._at[0]), self._at[1]
            positioned = self.next()

    iternext = __iter__

    def _forward(self, found: bool, index: int) -> bool:
        """To the lower of LMDB's row, where it has one, and the other one at ``index``."""
        key = bytes(self._cursor.key()) if found else None
        if index < len(self._keys) and (key is None or self._keys[index] <= key):
            return self._move(self._rows[index])
        return self._move(None if key is None else (key, self._cursor.value()))

    def _backward(self, found: bool, index: int) -> bool:
        key = bytes(self._cursor.key()) if found else None
        if index >= 0 and (key is None or self._keys[index] >= key):
            return self._move(self._rows[index])
        return self._move(None if key is None else (key, self._cursor.value()))

    def _move(self, to: tuple[bytes, bytes | memoryview] | None) -> bool:
        self._at = None if to is None else (to[0], memoryview(to[1]))
        return to is not None
