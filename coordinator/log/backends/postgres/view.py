"""View of a log in PostgreSQL: a read-only transaction, which sees the data committed before its begin."""

from __future__ import annotations

import contextlib
import heapq
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, LiteralString

from immortal.coordinator.core.errors import DamagedLogError, LogError
from immortal.coordinator.log.backend import TableSize, View, batches
from immortal.coordinator.log.backends.postgres.chunks import CHUNKS, ELSEWHERE, Pointer, fetch_chunk, pointer_of
from immortal.coordinator.log.backends.postgres.connections import Connection, Connections
from immortal.coordinator.log.format import SEQUENCE_KEY
from immortal.protocol.varint import Readable

RECORDS = "records"
SEQUENCE_ID_MAX = (1 << 63) - 1
FETCH_SIZE_BYTES = 4 << 20  # size of a page, estimated from the rows of the page before
FIRST_ROWS_MAX = 8  # most scans need one row, or all of a small table
ROWS_MAX = 4096
SMALL_PACK_SIZE_BYTES = 64 << 10  # packs up to this size are fetched with their heads: 4 MiB at once
PACKS_MAX = 64

_BACK: dict[str, LiteralString] = {
    bound: "SELECT key, value FROM immortal.rows WHERE instance = %(instance)s AND table_name = %(table)s"
    " AND " + bound + " ORDER BY key DESC LIMIT %(limit)s"
    for bound in ("true", "key <= %(key)s", "key < %(key)s")
}
_FROM_KEY: LiteralString = (
    " FROM immortal.rows WHERE instance = %(instance)s AND table_name = %(table)s AND key >= %(key)s"
    " ORDER BY key LIMIT %(limit)s"
)
_VALUES: LiteralString = "SELECT key, value" + _FROM_KEY
_VALUE_SIZES: LiteralString = "SELECT key, octet_length(value)" + _FROM_KEY
_PACKS: LiteralString = (
    "SELECT first, kept_from, kept_count, CASE WHEN octet_length(pack) <= %(small)s THEN pack END"
    " FROM immortal.records WHERE instance = %(instance)s AND "
)
_PACKS_FROM: LiteralString = (
    _PACKS + "first >= coalesce((SELECT max(first) FROM immortal.records"
    " WHERE instance = %(instance)s AND first <= %(first)s), 0) ORDER BY first LIMIT %(limit)s"
)
_PACKS_TO: LiteralString = _PACKS + "first <= %(first)s ORDER BY first DESC LIMIT %(limit)s"


class PostgresView(View):
    """View of an instance's rows. ``connection`` is in a transaction for this view alone."""

    def __init__(self, connection: Connection, instance: str) -> None:
        self._connection = connection
        self._instance = instance

    def get(self, table: str, key: bytes) -> Readable | None:
        if table == RECORDS:
            return self._record(_sequence_id(key))
        value = self._value(table, key)
        if value is None and table == CHUNKS and (pointer := self._value(ELSEWHERE, key)) is not None:
            return fetch_chunk(pointer)
        return value

    def _value(self, table: str, key: bytes) -> bytes | None:
        rows = self.rows(
            "SELECT value FROM immortal.rows"
            " WHERE instance = %(instance)s AND table_name = %(table)s AND key = %(key)s",
            table=table,
            key=bytes(key),
        )
        return rows[0][0] if rows else None

    def scan(self, table: str, first: bytes = b"") -> Iterator[tuple[Readable, Readable]]:
        if table == RECORDS:
            yield from self._scan_records(_sequence_id(first))
        elif table == CHUNKS:
            yield from self._merge_stored(self._scan(CHUNKS, first), self._scan(ELSEWHERE, first))
        else:
            yield from self._scan(table, first)

    def _scan(self, table: str, first: bytes, query: LiteralString = _VALUES) -> Iterator[tuple[bytes, Any]]:
        """Run ``query`` page by page."""
        limit = FIRST_ROWS_MAX
        while True:
            rows = self.rows(query, table=table, key=bytes(first), limit=limit)
            yield from rows
            if len(rows) < limit:
                return
            first, limit = rows[-1][0] + b"\0", _limit_after(rows) if query is _VALUES else ROWS_MAX

    def scan_back(self, table: str, last: bytes | None = None) -> Iterator[tuple[Readable, Readable]]:
        if table == RECORDS:
            yield from self._scan_records_back(SEQUENCE_ID_MAX if last is None else _sequence_id(last))
        elif table == CHUNKS:
            rows, elsewhere = self._scan_back(CHUNKS, last), self._scan_back(ELSEWHERE, last)
            yield from self._merge_stored(rows, elsewhere, back=True)
        else:
            yield from self._scan_back(table, last)

    def _scan_back(self, table: str, last: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        bound, key, limit = "true" if last is None else "key <= %(key)s", bytes(last or b""), FIRST_ROWS_MAX
        while True:
            rows = self.rows(_BACK[bound], table=table, key=key, limit=limit)
            yield from rows
            if len(rows) < limit:
                return
            bound, key = "key < %(key)s", rows[-1][0]
            limit = _limit_after(rows)

    def _merge_stored(
        self, rows: Iterable[tuple[bytes, bytes]], elsewhere: Iterable[tuple[bytes, bytes]], *, back: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        both = heapq.merge(
            ((key, value, False) for key, value in rows),
            ((key, value, True) for key, value in elsewhere),
            key=lambda row: row[0],
            reverse=back,
        )
        for key, value, is_elsewhere in both:
            found = fetch_chunk(value) if is_elsewhere else value
            if found is not None:
                yield key, found

    def sizes(self, table: str, first: bytes = b"") -> Iterator[tuple[Readable, int]]:
        if table == RECORDS:
            yield from super().sizes(table, first)
            return
        sizes: Iterator[tuple[bytes, int]] = self._scan(table, first, _VALUE_SIZES)
        if table == CHUNKS:
            elsewhere = ((key, pointer_of(value).size_bytes) for key, value in self._scan(ELSEWHERE, first))
            sizes = heapq.merge(sizes, elsewhere)
        yield from sizes

    def pointers(self, first: bytes = b"", end: bytes | None = None) -> list[Pointer]:
        """Return the pointers of the chunks in this range of keys that are in an object store."""
        rows = self._scan(ELSEWHERE, first)
        return [pointer_of(value) for key, value in rows if end is None or key < end]

    def size(self, table: str) -> TableSize:
        if table == RECORDS:
            rows = self.rows(
                "SELECT coalesce(sum(octet_length(pack)), 0)::bigint, coalesce(sum(kept_count), 0)::bigint"
                " FROM immortal.records WHERE instance = %(instance)s"
            )
        else:
            rows = self.rows(
                "SELECT coalesce(sum(octet_length(key) + octet_length(value)), 0)::bigint, count(*)"
                " FROM immortal.rows WHERE instance = %(instance)s AND table_name = %(table)s",
                table=table,
            )
        return TableSize(*rows[0])

    def used_bytes(self) -> int:
        """Return the bytes used by all rows of the log."""
        rows = self.rows(
            "SELECT coalesce(sum(octet_length(key) + octet_length(value)), 0)::bigint"
            " FROM immortal.rows WHERE instance = %(instance)s"
        )
        return self.size(RECORDS).size_bytes + int(rows[0][0])

    def rows(self, query: LiteralString, **values: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(query, {"instance": self._instance, **values}, binary=True).fetchall()

    def _record(self, sequence_id: int) -> Readable | None:
        for pack in self._packs(_PACKS_TO, sequence_id, 1):
            if sequence_id in pack.kept:
                return pack.value(sequence_id)
        return None

    def _scan_records(self, sequence_id: int) -> Iterator[tuple[Readable, Readable]]:
        at, limit = sequence_id, 2
        while packs := self._packs(_PACKS_FROM, at, limit):
            for pack in packs:
                yield from pack.rows(range(max(pack.kept.start, at), pack.kept.stop))
            if len(packs) < limit:
                return
            at, limit = packs[-1].kept.stop, PACKS_MAX

    def _scan_records_back(self, sequence_id: int) -> Iterator[tuple[Readable, Readable]]:
        at, limit = sequence_id, 1
        while packs := self._packs(_PACKS_TO, at, limit):
            for pack in packs:
                yield from pack.rows(range(min(pack.kept.stop - 1, at), pack.kept.start - 1, -1))
            at, limit = packs[-1].first - 1, PACKS_MAX

    def _packs(self, query: LiteralString, sequence_id: int, limit: int) -> list[_Pack]:
        rows = self.rows(query, first=min(sequence_id, SEQUENCE_ID_MAX), limit=limit, small=SMALL_PACK_SIZE_BYTES)
        return [_Pack(self, first, range(kept_from, kept_from + count), data) for first, kept_from, count, data in rows]


class _Pack:
    """Pack of records.

    ``kept``: sequence IDs of its remaining records. ``data``: the whole pack; None: it is large, and not read yet.
    """

    def __init__(self, view: PostgresView, first: int, kept: range, data: bytes | None) -> None:
        self.first, self.kept = first, kept
        self._view = view
        self._values = None if data is None else unpack(data, first)

    def rows(self, sequence_ids: range) -> Iterator[tuple[Readable, Readable]]:
        """Yield rows. Read the first record of a large pack alone; the second one loads the whole pack."""
        for number, sequence_id in enumerate(sequence_ids):
            if number and self._values is None:
                self._values = unpack(self._part(0, None), self.first)
            yield SEQUENCE_KEY.pack(sequence_id), self.value(sequence_id)

    def value(self, sequence_id: int) -> Readable:
        index = sequence_id - self.first
        if self._values is not None:
            return self._values[index]
        head = self._part(0, 4 * (index + 2))
        try:
            count, *sizes = struct.unpack(f"<{index + 2}I", head)
        except struct.error:
            what = f"the pack of record {self.first} has no head for record {sequence_id}"
            raise DamagedLogError(what, sequence_id) from None
        return self._part(4 * (count + 1) + sum(sizes[:-1]), sizes[-1])

    def _part(self, offset_bytes: int, size_bytes: int | None) -> bytes:
        rows = self._view.rows(
            "SELECT CASE WHEN %(size)s::int IS NULL THEN pack ELSE substring(pack FROM %(from)s FOR %(size)s::int) END"
            " FROM immortal.records WHERE instance = %(instance)s AND first = %(first)s",
            first=self.first,
            size=size_bytes,
            **{"from": offset_bytes + 1},
        )
        return rows[0][0]  # type: ignore[no-any-return]


def _sequence_id(key: bytes) -> int:
    """Return the first sequence ID whose key is not less than ``key``."""
    number = int.from_bytes(bytes(key[:8]).ljust(8, b"\0"), "big")
    return number + (len(key) > SEQUENCE_KEY.size)


def _limit_after(rows: list[tuple[Any, ...]]) -> int:
    mean_size_bytes = sum(len(key) + len(value) for key, value in rows) // len(rows) + 1
    return max(1, min(ROWS_MAX, FETCH_SIZE_BYTES // mean_size_bytes))


@contextlib.contextmanager
def viewing(connections: Connections, instance: str) -> Iterator[PostgresView]:
    """Yield a view of the log of ``instance`` as it is now. Raises LogUnavailableError."""
    with connections.borrowed() as connection:
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        yield PostgresView(connection, instance)
        connection.execute("COMMIT")


# Packs: several records in one value. A pack is ``count`` sizes in bytes (32-bit unsigned LE), then the records.
#
# A row of ``immortal.records`` has a pack, and says which records at its beginning or end were removed.


PACK_SIZE_BYTES_MAX = 16 << 20
"""Limit of a pack, which can be read whole for one record. Joined commits have at most half of it."""
RECORD_SIZE_BYTES_MAX = 900 << 20
"""Limit of a record: a value of PostgreSQL has less than 1 GiB, including all that is sent to the server with it."""


def pack(values: Sequence[Readable]) -> bytes:
    sizes = [len(value) for value in values]
    return b"".join((struct.pack(f"<{len(sizes) + 1}I", len(sizes), *sizes), *values))


def packs(records: Sequence[tuple[int, Readable]]) -> Iterator[tuple[int, int, bytes]]:
    """Pack consecutive ``records``; yield (first sequence ID, count, pack). Raises LogError."""
    for sequence_id, value in records:
        if len(value) > RECORD_SIZE_BYTES_MAX:
            raise LogError(
                f"record {sequence_id} has {len(value)} bytes, PostgreSQL takes {RECORD_SIZE_BYTES_MAX}:"
                " lower group_size_kib_max or rpc_limit_mb"
            )
    for batch in batches(records, PACK_SIZE_BYTES_MAX):
        yield batch[0][0], len(batch), pack([value for _, value in batch])


def unpack(data: Readable, first: int) -> list[Readable]:
    """Unpack the records of a pack. ``first``: sequence ID of the first one, for messages. Raises DamagedLogError."""
    view = memoryview(data)
    try:
        (count,) = struct.unpack_from("<I", view)
        sizes = struct.unpack_from(f"<{count}I", view, 4)
    except struct.error:
        raise DamagedLogError(f"the pack of record {first} has {len(view)} bytes, and no head", first) from None
    at = 4 + 4 * count
    if at + sum(sizes) != len(view):
        raise DamagedLogError(
            f"the pack of record {first} has {len(view)} bytes, {at + sum(sizes)} were expected", first
        )
    values: list[Readable] = []
    for size_bytes in sizes:
        values.append(view[at : at + size_bytes])
        at += size_bytes
    return values
