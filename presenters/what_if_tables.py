"""Parquet tables of the outcome of a fleet's what-if, for a notebook."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import asdict

from immortal.protocol.files import make_folder, opener
from immortal.protocol.safe_output import printable_json
from immortal.replay.fleet.outcome import KINDS, FleetOutcome

_NUMBERS = ("number", "record", "message", "cause", "recorded", *KINDS)
_TIME = pa.timestamp("us", "UTC")

TABLES = {
    name: pa.schema([(column, kinds.get(column, pa.string())) for column in columns.split()])
    for kinds in [{"time": _TIME, "hour": _TIME, **dict.fromkeys(_NUMBERS, pa.int64())}]
    for name, columns in {
        "differences": "number service kind to handler record message time old new cause",
        "states": "service path old new",
        "outcomes": "service to handler hour recorded changed added missing moved",
    }.items()
}
"""Columns of each table; docs/reference/pipeline.md has their meaning."""


def write_tables(outcome: FleetOutcome, folder: Path) -> None:
    """Write the tables into the new ``folder``. The outcome needs details. Raises OSError."""
    states = [
        {"service": one.name, **{name: part if name == "path" else printable_json(part) for name, part in each.items()}}
        for one in outcome.services
        for each in one.state
    ]
    rows: dict[str, list[dict[str, Any]]] = {
        "differences": [{**asdict(one), "time": one.time_ns // 1000} for one in outcome.differences],
        "states": states,
        "outcomes": [{**asdict(one), "hour": one.start_ns // 1000} for one in outcome.hours],
    }
    try:
        make_folder(folder.parent)
        with TemporaryDirectory(prefix=".", dir=folder.parent) as made:  # a full disk leaves nothing
            for name, schema in TABLES.items():
                with open(Path(made, f"{name}.parquet"), "wb", opener=opener) as file:
                    pq.write_table(pa.Table.from_pylist(rows[name], schema), file, compression="zstd")
            os.rename(made, folder)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from None
