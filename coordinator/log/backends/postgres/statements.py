"""Encodes appends as arguments of the server's functions (schema.py), sends them, and copies whole logs.

psycopg determines the types in a list each time, which takes longer than all other work of the coordinator for a small
append. So the arguments of immortal.append, whose types are known, are encoded here.
"""

from __future__ import annotations

import select
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, LiteralString, NamedTuple

import psycopg
from psycopg import errors, pq

from immortal.coordinator.core.errors import require
from immortal.coordinator.log.backend import Append, Row, Span, View, batches
from immortal.coordinator.log.backends.postgres.connections import Connection
from immortal.coordinator.log.backends.postgres.durability import SETTINGS
from immortal.coordinator.log.backends.postgres.view import (
    PACK_SIZE_BYTES_MAX,
    RECORDS,
    SEQUENCE_ID_MAX,
    packs,
)
from immortal.coordinator.log.format import ALL_TABLES, META_JOURNAL, SEQUENCE_KEY
from immortal.protocol.varint import Readable

STATEMENT_SIZE_BYTES_MAX = 32 << 20  # of a statement's rows; a larger append takes several, in one transaction
ROWS_MAX = 20_000  # limit of one statement

CHANGE: LiteralString = "SELECT immortal.change(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
PREPARED = b"immortal_append"
_TYPES = (
    *("text", "bigint", "bigint", "bigint", "bigint", "text[]", "bytea[]", "bytea[]", "bigint", "bigint"),
    *("bigint[]", "int[]", "bytea[]", "text[]", "bytea[]", "bytea[]"),
)  # of the arguments of immortal.append
PREPARE = (
    f"PREPARE immortal_append ({', '.join(_TYPES)}) AS SELECT * FROM immortal.append"
    f"({', '.join(f'${number}' for number in range(1, len(_TYPES) + 1))})"
)
_BYTEA, _BIGINT, _INT, _TEXT = 17, 20, 23, 25  # the server's numbers of types
_BIGINT_BYTES, _INT_BYTES = struct.Struct(">q").pack, struct.Struct(">i").pack
# Dimensions, whether it has nulls, the items' type, how many, the first's index.
_ARRAY_HEAD = struct.Struct(">iiIii").pack
_EMPTY_ARRAY = struct.Struct(">iiI").pack
_NULL = b"\xff\xff\xff\xff"


def statements(append: Append) -> Iterator[list[object]]:
    """Yield the arguments of immortal.change except the first, for one or more statements. Raises LogError."""
    spans = [span for span in append.deletes if span.table != RECORDS]
    removed = [span for span in append.deletes if span.table == RECORDS]
    require(len(removed) < 2, f"records are removed in {len(removed)} spans at once")
    packed = list(packs(append.records))
    rows = ((table, bytes(key), bytes(value)) for table, key, value in append.puts)
    row_batches = batches(rows, STATEMENT_SIZE_BYTES_MAX, ROWS_MAX, counts=2)  # keys and values
    yield [*_span_arguments(spans, removed), *_columns(packed, 3), *_columns(next(row_batches, []), 3)]
    for batch in row_batches:
        yield [*_span_arguments([], []), *_columns([], 3), *_columns(batch, 3)]


def encoded(arguments: Sequence[Any]) -> list[bytes]:
    """Encode arguments of immortal.append in the server's binary format."""
    return [encode(argument) for encode, argument in zip(_ENCODERS, arguments, strict=True)]


def _span_arguments(spans: list[Span], removed: list[Span]) -> list[object]:
    begin, end = 0, 0
    for span in removed:
        begin = int.from_bytes(span.first[:8].ljust(8, b"\0"), "big")
        end = SEQUENCE_ID_MAX if span.end is None else int.from_bytes(span.end[:8].ljust(8, b"\0"), "big")
        end += span.is_one
    tables, firsts, ends = _columns(spans, 3)
    return [tables, firsts, ends, begin, end]


def _columns(rows: Iterable[tuple[Any, ...]], count: int) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(count)]


def _array(item_type: int, items: Sequence[Readable | None]) -> bytes:
    if not items:
        return _EMPTY_ARRAY(0, 0, item_type)
    parts: list[Readable] = [_ARRAY_HEAD(1, None in items, item_type, len(items), 1)]
    for item in items:
        if item is None:
            parts.append(_NULL)
        else:
            parts += (_INT_BYTES(len(item)), item)
    return b"".join(parts)


_ENCODER_OF: dict[str, Callable[[Any], bytes]] = {
    "text": str.encode,
    "bigint": _BIGINT_BYTES,
    "text[]": lambda items: _array(_TEXT, [item.encode() for item in items]),
    "bigint[]": lambda items: _array(_BIGINT, [_BIGINT_BYTES(item) for item in items]),
    "int[]": lambda items: _array(_INT, [_INT_BYTES(item) for item in items]),
    "bytea[]": lambda items: _array(_BYTEA, items),
}
_ENCODERS = tuple(_ENCODER_OF[each] for each in _TYPES)


# Sending appends: several are in flight on one connection, each in its own transaction.
#
# Sending does not wait for earlier answers (libpq's pipeline mode); answers arrive in order. An append is done when the
# server has answered it and then reported the end of its transaction: until then its commit can fail, or warn that no
# standby has it.


_BINARY = [pq.Format.BINARY] * len(_TYPES)


class Answer(NamedTuple):
    """Result of immortal.append. All fields except the first describe the head if the append was refused."""

    is_done: bool
    epoch: int = 0
    appends_count: int = 0
    last_sequence_id: int = -1
    holder: str = ""


class Sender:
    """Sender of appends over ``connection`` in pipeline mode. Once all are answered, other queries can use it.

    After psycopg.Error the outcome of open appends is unknown. One thread at a time. ``reads_settings``: request the
    server's settings after each append, in the same round trip. If they have changed since the append began, its commit
    may not have waited for standbys.
    """

    def __init__(self, connection: Connection, *, reads_settings: bool) -> None:
        connection.execute(PREPARE.encode())
        if reads_settings:
            connection.execute(b"PREPARE immortal_settings AS " + SETTINGS.encode())
        self._connection = connection
        self._reads_settings = reads_settings
        self.settings = ""  # read after the last answered append, in the form of durability.SETTINGS
        self._pgconn = connection.pgconn
        self._unanswered_count = 0
        self._result: pq.abc.PGresult | None = None  # partial answer
        self._results: list[pq.abc.PGresult | None] = []  # answers to the oldest append and its settings query
        self._is_unsent = False  # a part is still unsent, because the server reads slowly

    def send(self, arguments: Sequence[object]) -> None:
        """Send an append after all earlier ones, without waiting: see :attr:`events`."""
        pgconn = self._pgconn
        if not self._unanswered_count:
            pgconn.enter_pipeline_mode()
        self._unanswered_count += 1
        pgconn.send_query_prepared(PREPARED, encoded(arguments), _BINARY)
        pgconn.pipeline_sync()
        if self._reads_settings:
            pgconn.send_query_prepared(b"immortal_settings", None)
            pgconn.pipeline_sync()
        self._is_unsent = bool(pgconn.flush())

    def answer(self) -> Answer | None:
        """Return the answer to the oldest open append; None: it has not arrived."""
        pgconn = self._pgconn
        if self._is_unsent:
            self._is_unsent = bool(pgconn.flush())
        pgconn.consume_input()
        while not pgconn.is_busy():
            result = pgconn.get_result()
            if result is None:  # end of these results; the end of the transaction follows
                if pgconn.status != pq.ConnStatus.OK:
                    raise psycopg.OperationalError(pgconn.get_error_message())
            elif result.status == pq.ExecStatus.PIPELINE_SYNC:
                self._results.append(self._result)
                self._result = None
                if len(self._results) > self._reads_settings:
                    return self._parse_answer()
            elif self._result is None or result.status == pq.ExecStatus.FATAL_ERROR:
                self._result = result
        return None

    def _parse_answer(self) -> Answer:
        results, self._results = self._results, []
        self._unanswered_count -= 1
        if not self._unanswered_count:
            self._pgconn.exit_pipeline_mode()
        for result in results:
            if result is None or result.status != pq.ExecStatus.TUPLES_OK:
                raise _error_of(result)
        append, *looked = [result for result in results if result is not None]
        self.settings = _text(looked[0], 0) if looked else ""
        if _text(append, 0) == "t":
            return Answer(True)
        epoch, appends_count, last_sequence_id, holder = (_text(append, column) for column in range(1, 5))
        return Answer(False, int(epoch or 0), int(appends_count or 0), int(last_sequence_id or -1), holder)

    def request_settings(self) -> None:
        """Request the settings now. No append may be in flight."""
        row = self._connection.execute("EXECUTE immortal_settings").fetchone()
        self.settings = "" if row is None else row[0]

    @property
    def events(self) -> int:
        """Events of select.poll on the connection after which :meth:`answer` should be called."""
        return select.POLLIN | select.POLLOUT if self._is_unsent else select.POLLIN

    def wait(self) -> None:
        """Wait until :meth:`answer` should be called."""
        poll = select.poll()
        poll.register(self._pgconn.socket, self.events)
        poll.poll()


def _text(result: pq.abc.PGresult, column: int) -> str:
    return (result.get_value(0, column) or b"").decode()


def _error_of(result: pq.abc.PGresult | None) -> psycopg.Error:
    if result is None:
        return psycopg.OperationalError("a transaction ended without an answer")
    state = result.error_field(pq.DiagnosticField.SQLSTATE)
    if not state:  # the connection is gone
        return psycopg.OperationalError(result.get_error_message())
    try:
        kind: type[psycopg.Error] = errors.lookup(state.decode())
    except KeyError:
        kind = psycopg.DatabaseError
    return kind(result.get_error_message())


# Filling a log without a writer: a new one, or the copy of another.


def change(connection: Connection, instance: str, append: Append) -> None:
    """Apply ``append`` without a check of the head. Raises LogError for data that PostgreSQL rejects."""
    for statement in statements(append):
        connection.execute(CHANGE, [instance, *statement])


def write_copy(connection: Connection, instance: str, source: View) -> int:
    """Write all of ``source``, with one pack in memory at a time; return the number of records."""
    count = 0
    rows = ((SEQUENCE_KEY.unpack(key)[0], bytes(value)) for key, value in source.scan(RECORDS))
    for records in batches(rows, PACK_SIZE_BYTES_MAX, ROWS_MAX):
        change(connection, instance, Append(-1, records=records))
        count += len(records)
    change(connection, instance, Append(-1, puts=_rows(source)))
    return count


def _rows(source: View) -> Iterator[Row]:
    for table in ALL_TABLES:
        if table != RECORDS:
            for key, value in source.scan(table):
                if table != "meta" or bytes(key) != META_JOURNAL:  # of a folder: the rows include its journal
                    yield table, bytes(key), value
