"""Copy of an export as Delta tables in a folder or an object store, such as s3://bucket/tables.

Each table's own log says up to which run of the export it has the rows. One commit adds the files of all later runs,
and says so: a copy that was killed goes on where it was, and no row comes twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import click
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, create_table_with_add_actions

from immortal.coordinator.objects.store import Objects, store_of
from immortal.pipeline.errors import PipelineError
from immortal.pipeline.jobs.sources import RUN_PREFIX, run_of

_PARTITIONS = pa.schema([("instance", pa.string()), ("day", pa.date32())])
_BOUNDED = ("sequence_id", "time_ns")  # readers leave out files by their smallest and largest values


class DeltaCopyError(PipelineError):
    """Raised when the Delta tables cannot be brought up to the export."""


def open_store(url: str) -> Objects:
    """Return the store that holds the tables. Raises ObjectError, StoreError."""
    return Objects(store_of(url), url.rstrip("/"))


def copy(state: Mapping[str, Any], folder: Path, store: Objects, progress: Callable[[str], None]) -> int:
    """Bring the tables up to the last run of the export in ``folder``, whose ``state`` is given; return the new files.

    Raises DeltaCopyError, StoreError.
    """
    return sum(_copy(state, folder, store, table, progress) for table in state["tables"])


def _copy(state: Mapping[str, Any], folder: Path, store: Objects, table: str, progress: Callable[[str], None]) -> int:
    place, app = f"{store.location}/{table}", f"immortal-{state['id']}"
    try:
        there = DeltaTable(place) if DeltaTable.is_deltatable(place) else None
        done = there.transaction_version(app) if there is not None else 0
        if done is None:
            raise DeltaCopyError(f"the Delta table {place} is not of the export in {folder}: give another URL")
        files = sorted((folder / table).glob(f"instance=*/day=*/{RUN_PREFIX}*.parquet"))
        new = [path for path in files if done < run_of(path) <= state["run"]]
        if not new:
            return 0
        progress(f"copying {table} to {place}")
        for path in new:
            store.put_file(path.relative_to(folder).as_posix(), path)
        actions = [_action(path, folder / table) for path in new]
        properties = CommitProperties(app_transactions=[Transaction(app, state["run"])])
        schema, by = _schema(new[0]), _PARTITIONS.names
        if there is None:
            create_table_with_add_actions(place, schema, actions, partition_by=by, commit_properties=properties)
        else:
            there.create_write_transaction([*actions], "append", schema, by, commit_properties=properties)
        return len(new)
    except (DeltaError, OSError) as error:
        said = " ".join(click.unstyle(str(error)).split())
        raise DeltaCopyError(f"the Delta table {place} is not up to date: {said}; export again to go on") from None


def _schema(path: Path) -> Schema:
    """Return the columns of the table that a file is of: its own, and those in the names of its folders."""
    own = [
        field.with_type(pa.timestamp("us", "UTC")) if pa.types.is_timestamp(field.type) else field
        for field in pq.read_schema(path)
    ]
    return Schema.from_arrow(pa.schema([*own, *_PARTITIONS]))


def _action(path: Path, table: Path) -> AddAction:
    """Describe a file for Delta's log."""
    values = [unquote(part.partition("=")[2]) for part in path.relative_to(table).parts[:-1]]
    metadata, known = pq.read_metadata(path), path.stat()
    bounds = {name: found for name in _BOUNDED if (found := list(_bounds(metadata, name)))}
    statistics = {
        "numRecords": metadata.num_rows,
        "minValues": {name: min(found) for name, found in bounds.items()},
        "maxValues": {name: max(found) for name, found in bounds.items()},
    }
    return AddAction(
        path.relative_to(table).as_posix(),
        known.st_size,
        {
            name: None if value.startswith("__HIVE") else value
            for name, value in zip(_PARTITIONS.names, values, strict=True)
        },
        int(known.st_mtime * 1000),
        data_change=True,
        stats=json.dumps(statistics),
    )


def _bounds(metadata: pq.FileMetaData, name: str) -> Iterator[int]:
    """Yield the smallest and largest value of a column in each part of the file, as far as they are known."""
    index = metadata.schema.names.index(name) if name in metadata.schema.names else None
    for number in range(metadata.num_row_groups if index is not None else 0):
        found = metadata.row_group(number).column(index).statistics
        if found is not None and found.has_min_max:
            yield from (found.min, found.max)
