"""Codec of pandas' frames, which are encoded as Arrow tables with the index and dtypes that pandas notes in them."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pandas as pd

from immortal.appsdk.types.registry import Codec
from immortal.protocol import decoding

_OBJECTS = frozenset(("string", "bytes", "date", "time", "decimal", "boolean", "empty"))
"""Kinds of objects that a column can hold, as pandas infers them: others would not come back the same."""

_OF_VERSIONS = ("creator", "pandas_version")  # of libraries: a frame must have the same bytes after an upgrade of them


def codec_of(cls: type) -> Codec | None:
    return _FRAME if cls is pd.DataFrame else None


def _table(frame: pd.DataFrame) -> Any:
    import pyarrow as pa

    if frame.columns.inferred_type.startswith("mixed"):
        raise TypeError(f"the columns of a DataFrame have names of several types: {list(frame.columns)[:10]}")
    for place, name in enumerate(frame.columns):
        column = frame.iloc[:, place]
        if column.dtype == object and (kind := pd.api.types.infer_dtype(column, skipna=True)) not in _OBJECTS:
            raise TypeError(
                f"column {name!r} of a DataFrame holds objects ({kind}), and would come back as something else: give "
                f"it a dtype"
            )
    table = pa.Table.from_pandas(frame)
    metadata = dict(table.schema.metadata)
    notes = decoding.load_json(metadata[b"pandas"])
    for name in _OF_VERSIONS:
        notes.pop(name, None)
    return table.replace_schema_metadata({**metadata, b"pandas": json.dumps(notes).encode()})


def _encode(frame: pd.DataFrame) -> memoryview:
    from immortal.appsdk.types.arrow_tables import write_stream

    return write_stream(_table(frame))


def _decode(annotation: Any, plain: Any) -> pd.DataFrame:
    from immortal.appsdk.types.arrow_tables import read_table

    frame: pd.DataFrame = read_table("DataFrame", plain).to_pandas()
    return frame.copy()  # a frame that refers to the stream is read-only


def _show(frame: pd.DataFrame) -> dict[str, Any]:
    from immortal.appsdk.types.arrow_tables import show_table

    return show_table(_table(frame))


def _problem(annotation: Any) -> str | None:
    if importlib.util.find_spec("pyarrow") is not None:
        return None
    return "a DataFrame is sent as an Arrow table: install pyarrow"


_FRAME = Codec(_encode, _decode, _show, _problem)
