"""A log in PostgreSQL at one moment: a transaction that sees one snapshot, read in pages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from coordinator.log.backend import TableSize
from coordinator.log.format import SEQUENCE_KEY
from protocol.varint import Readable

if TYPE_CHECKING:
    import psycopg

RECORDS = "records"
PAGE_ROWS_MIN, PAGE_ROWS_MAX = 8, 512
PAGE_SIZE_BYTES = 1 << 20  # about: the next page has twice the rows of one that was smaller

_GET = "SELECT value FROM immortal.rows WHERE log = %s AND tab = %s AND key = %s"
_SCAN = "SELECT key, value FROM immortal.rows WHERE log = %s AND tab = %s AND key >= %s ORDER BY key LIMIT %s"
_SCAN_ON = "SELECT key, value FROM immortal.rows WHERE log = %s AND tab = %s AND key > %s ORDER BY key LIMIT %s"
_BACK = "SELECT key, value FROM immortal.rows WHERE log = %s AND tab = %s AND key <= %s ORDER BY key DESC LIMIT %s"
_BACK_ON = "SELECT key, value FROM immortal.rows WHERE log = %s AND tab = %s AND key < %s ORDER BY key DESC LIMIT %s"
_BACK_ALL = "SELECT key, value FROM immortal.rows WHERE log = %s AND tab = %s ORDER BY key DESC LIMIT %s"
_SIZE = "SELECT coalesce(sum(octet_length(value)), 0), count(*) FROM immortal.rows WHERE log = %s AND tab = %s"
_USED = (
    "SELECT (SELECT coalesce(sum(octet_length(packed)), 0) FROM immortal.records WHERE log = %s) + "
    "(SELECT coalesce(sum(octet_length(key) + octet_length(value)), 0) FROM immortal.rows WHERE log = %s)"
)
_LIVE = (
    "SELECT FROM immortal.logs JOIN immortal.leases ON log = id AND leases.epoch = logs.epoch "
    "WHERE id = %s AND until > clock_timestamp()"
)
_BOUNDS = "SELECT first_sequence_id, last_sequence_id FROM immortal.logs WHERE id = %s"
_RECORDS = (
    "SELECT first, sizes, packed FROM immortal.records WHERE log = %s AND first >= coalesce("
    "(SELECT max(first) FROM immortal.records WHERE log = %s AND first <= %s), %s) ORDER BY first LIMIT %s"
)
_RECORDS_BACK = (
    "SELECT first, sizes, packed FROM immortal.records WHERE log = %s AND first <= %s ORDER BY first DESC LIMIT %s"
)
_RECORDS_SIZE = "SELECT coalesce(sum(octet_length(packed)), 0) FROM immortal.records WHERE log = %s"


class PostgresView:
    """``connection`` is in a transaction of its own for as long as this lives."""

    def __init__(self, connection: psycopg.Connection[tuple[Any, ...]], log_id: int) -> None:
        self._connection = connection
        self._log_id = log_id
        self._bounds: tuple[int, int] | None = None

    def get(self, table: str, key: bytes) -> Readable | None:
        if table == RECORDS:
            return next((value for found, value in self._records(SEQUENCE_KEY.unpack(key)[0]) if found == key), None)
        row = self._one(_GET, self._log_id, table, bytes(key))
        return None if row is None else row[0]

    def scan(self, table: str, first: bytes = b"") -> Iterator[tuple[Readable, Readable]]:
        if table == RECORDS:
            yield from self._records(_sequence_id_from(first))
            return
        statement, rows_max = _SCAN, PAGE_ROWS_MIN
        while page := self._all(statement, self._log_id, table, bytes(first), rows_max):
            yield from page
            if len(page) < rows_max:
                return
            statement, first, rows_max = _SCAN_ON, page[-1][0], _next_page_rows(page, rows_max)

    def scan_back(self, table: str, last: bytes | None = None) -> Iterator[tuple[Readable, Readable]]:
        if table == RECORDS:
            yield from self._records_back(last)
            return
        rows_max = PAGE_ROWS_MIN
        if last is None:
            page = self._all(_BACK_ALL, self._log_id, table, rows_max)
        else:
            page = self._all(_BACK, self._log_id, table, bytes(last), rows_max)
        while page:
            yield from page
            if len(page) < rows_max:
                return
            last, rows_max = page[-1][0], _next_page_rows(page, rows_max)
            page = self._all(_BACK_ON, self._log_id, table, last, rows_max)

    def size(self, table: str) -> TableSize:
        if table == RECORDS:
            row = self._one(_RECORDS_SIZE, self._log_id)
            first, last = self.bounds()
            return TableSize(int(row[0]) if row else 0, last + 1 - first)
        row = self._one(_SIZE, self._log_id, table)
        return TableSize(int(row[0]), int(row[1])) if row else TableSize(0, 0)

    def used_bytes(self) -> int:
        """What keys and values take, of all tables."""
        row = self._one(_USED, self._log_id, self._log_id)
        return 0 if row is None else int(row[0])

    def has_holder(self) -> bool:
        """Somebody's lease runs."""
        return self._one(_LIVE, self._log_id) is not None

    def bounds(self) -> tuple[int, int]:
        """The first record that is kept, and the last one."""
        if self._bounds is None:
            row = self._one(_BOUNDS, self._log_id)
            self._bounds = (0, -1) if row is None else (row[0], row[1])
        return self._bounds

    def _records(self, first: int) -> Iterator[tuple[bytes, memoryview]]:
        kept, last = self.bounds()
        first, rows_max = max(first, kept), PAGE_ROWS_MIN
        while first <= last:
            page = self._all(_RECORDS, self._log_id, self._log_id, first, first, rows_max)
            for start, sizes, packed in page:
                for sequence_id, value in _unpacked(start, sizes, packed):
                    if sequence_id >= first:
                        yield SEQUENCE_KEY.pack(sequence_id), value
            if len(page) < rows_max:
                return
            first = page[-1][0] + len(page[-1][1])
            rows_max = _next_page_rows([(b"", row[2]) for row in page], rows_max)

    def _records_back(self, last_key: bytes | None) -> Iterator[tuple[bytes, memoryview]]:
        kept, last = self.bounds()
        if last_key is not None:
            last = min(last, SEQUENCE_KEY.unpack(last_key.ljust(SEQUENCE_KEY.size, b"\0"))[0])
        rows_max = 1
        while kept <= last:
            page = self._all(_RECORDS_BACK, self._log_id, last, rows_max)
            for start, sizes, packed in page:
                for sequence_id, value in reversed(_unpacked(start, sizes, packed)):
                    if kept <= sequence_id <= last:
                        yield SEQUENCE_KEY.pack(sequence_id), value
            if len(page) < rows_max:
                return
            last, rows_max = page[-1][0] - 1, _next_page_rows([(b"", row[2]) for row in page], rows_max)

    def _one(self, statement: str, *parameters: object) -> tuple[Any, ...] | None:
        return self._connection.execute(statement.encode(), parameters, binary=True).fetchone()

    def _all(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(statement.encode(), parameters, binary=True).fetchall()


def _unpacked(first: int, sizes: list[int], packed: bytes) -> list[tuple[int, memoryview]]:
    whole, ends = memoryview(packed), [*accumulate(sizes)]
    return [(first + n, whole[end - size : end]) for n, (size, end) in enumerate(zip(sizes, ends, strict=True))]


def _sequence_id_from(first: bytes) -> int:
    """The first record whose key is not below ``first``, of any length."""
    whole = SEQUENCE_KEY.unpack(first[: SEQUENCE_KEY.size].ljust(SEQUENCE_KEY.size, b"\0"))[0]
    return int(whole) + (len(first) > SEQUENCE_KEY.size)


def _next_page_rows(page: list[tuple[Any, ...]], rows_max: int) -> int:
    size_bytes = sum(len(value) for _, value in page)
    if size_bytes > 2 * PAGE_SIZE_BYTES:
        return max(1, rows_max // 2)
    return min(2 * rows_max, PAGE_ROWS_MAX) if size_bytes < PAGE_SIZE_BYTES else rows_max
