"""Codecs of pyarrow's tables and record batches, which are encoded as an Arrow IPC stream.

A decoded table refers to the bytes that it was read from: no column is copied. The whole table is checked before a
handler sees it, since Arrow trusts its offsets afterwards.
"""

from __future__ import annotations

import base64
from typing import Any

import pyarrow as pa

from immortal.appsdk.types.registry import Codec, describe_received


def codec_of(cls: type) -> Codec | None:
    return {pa.Table: _TABLE, pa.RecordBatch: _BATCH}.get(cls)


def write_stream(part: Any) -> memoryview:
    """Encode a table or a batch as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, part.schema) as writer:
        writer.write(part)
    return memoryview(sink.getvalue())


def read_table(name: str, plain: Any) -> Any:
    """Read a table from a stream, or from JSON: columns by name, or a list of rows. ``name``: of the type."""
    if isinstance(plain, bytes | str):
        data = plain if isinstance(plain, bytes) else _from_text(name, plain)
        table = pa.ipc.open_stream(pa.py_buffer(data)).read_all()
    elif isinstance(plain, dict):
        table = pa.table(plain)
    elif isinstance(plain, list):
        table = pa.Table.from_pylist(plain)
    else:
        raise ValueError(f"Expected `{name}` (an Arrow stream, columns or rows), got {describe_received(plain)}")
    table.validate(full=True)
    return table


def _from_text(name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError(
            f"Expected `{name}` (an Arrow stream, columns or rows), got a text that is no base64"
        ) from None


def _decode_batch(annotation: Any, plain: Any) -> Any:
    table = read_table("RecordBatch", plain)
    batches = table.to_batches()
    if len(batches) > 1:
        raise ValueError(f"Expected `RecordBatch`, got a stream of {len(batches)} of them")
    if batches:
        return batches[0]
    return pa.RecordBatch.from_arrays([_empty(column) for column in table.columns], schema=table.schema)


def _empty(column: Any) -> Any:
    return column.chunk(0) if column.num_chunks else pa.array([], column.type)


def show_table(table: Any) -> dict[str, Any]:
    columns = {field.name: _shown(table.column(place)) for place, field in enumerate(table.schema)}
    return {"schema": {field.name: str(field.type) for field in table.schema}, "columns": columns}


def _shown(column: Any) -> list[Any]:
    values: list[Any] = column.to_pylist()
    if pa.types.is_temporal(column.type):  # if pandas is loaded, these are of its classes
        return [None if value is None else str(value) for value in values]
    return values


_TABLE = Codec(write_stream, lambda annotation, plain: read_table("Table", plain), show_table)
_BATCH = Codec(write_stream, _decode_batch, show_table)
