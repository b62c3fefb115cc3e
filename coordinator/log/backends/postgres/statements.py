"""What an append is to the server: the arguments of its functions (schema.py), and their bytes for one of them.

psycopg finds out anew what a list holds, each time; that takes longer than all else that the coordinator does for a
small append. So the arguments of immortal.append, whose types are known, are encoded here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, LiteralString

from immortal.coordinator.core.errors import require
from immortal.coordinator.log.backend import Append, Row, Span
from immortal.coordinator.log.backends.postgres.packing import packs
from immortal.coordinator.log.backends.postgres.view import RECORDS, SEQUENCE_ID_MAX
from immortal.protocol.varint import Readable

STATEMENT_SIZE_BYTES_MAX = 32 << 20  # of rows; a larger append is several statements of one transaction
ROWS_MAX = 20_000  # in a statement

CHANGE: LiteralString = "SELECT immortal.change(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
PREPARED = b"immortal_append"
PREPARE: LiteralString = (
    "PREPARE immortal_append (text, bigint, bigint, bigint, bigint, text[], bytea[], bytea[], bigint, bigint,"
    " bigint[], int[], bytea[], text[], bytea[], bytea[])"
    " AS SELECT * FROM immortal.append($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)"
)
_BYTEA, _BIGINT, _INT, _TEXT = 17, 20, 23, 25  # types, as the server numbers them
_BIGINT_BYTES, _INT_BYTES = struct.Struct(">q").pack, struct.Struct(">i").pack
_ARRAY_HEAD = struct.Struct(
    ">iiIii"
).pack  # dimensions, whether it has nulls, the items' type, how many, the first's index
_EMPTY_ARRAY = struct.Struct(">iiI").pack
_NULL = b"\xff\xff\xff\xff"


def statements(append: Append) -> Iterator[list[object]]:
    """The arguments of immortal.change, but the first, for one statement or more. Raises LogError."""
    spans = [span for span in append.deletes if span.table != RECORDS]
    removed = [span for span in append.deletes if span.table == RECORDS]
    require(len(removed) < 2, f"records are removed in {len(removed)} spans at once")
    packed = list(packs(append.records))
    batches = _batches(append.puts)
    first = next(batches, [])
    yield [*_span_arguments(spans, removed), *_columns(packed, 3), *_columns(first, 3)]
    for batch in batches:
        yield [*_span_arguments([], []), *_columns([], 3), *_columns(batch, 3)]


def encoded(arguments: Sequence[Any]) -> list[bytes]:
    """Those of immortal.append, in the server's binary format."""
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


def _batches(puts: Iterable[Row]) -> Iterator[list[tuple[str, bytes, bytes]]]:
    batch: list[tuple[str, bytes, bytes]] = []
    size_bytes = 0
    for table, key, value in puts:
        if batch and (size_bytes + len(value) > STATEMENT_SIZE_BYTES_MAX or len(batch) >= ROWS_MAX):
            yield batch
            batch, size_bytes = [], 0
        batch.append((table, bytes(key), bytes(value)))
        size_bytes += len(key) + len(value)
    if batch:
        yield batch


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


def _bytes_array(items: Sequence[Readable | None]) -> bytes:
    return _array(_BYTEA, items)


def _text_array(items: Sequence[str]) -> bytes:
    return _array(_TEXT, [item.encode() for item in items])


def _bigint_array(items: Sequence[int]) -> bytes:
    return _array(_BIGINT, [_BIGINT_BYTES(item) for item in items])


def _int_array(items: Sequence[int]) -> bytes:
    return _array(_INT, [_INT_BYTES(item) for item in items])


_ENCODERS: tuple[Callable[[Any], bytes], ...] = (
    str.encode,
    *[_BIGINT_BYTES] * 4,
    _text_array,
    _bytes_array,
    _bytes_array,
    *[_BIGINT_BYTES] * 2,
    _bigint_array,
    _int_array,
    _bytes_array,
    _text_array,
    _bytes_array,
    _bytes_array,
)
