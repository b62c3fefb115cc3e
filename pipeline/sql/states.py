"""States of instances as tables: each log is replayed to its cut, in a process beside the instance."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from immortal.appsdk.state.tree import STATE
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.log.reader import LogReader
from immortal.protocol import decoding
from immortal.replay import AppCommand, ReplayPlan, plan_route, run_replay
from immortal.replay.app_process import code_of_record, write_rows
from immortal.replay.plan import LogViewError, unshowable_state_text
from immortal.replay.verify import ProvingSink, state_problem

AS_OF = "as_of_record"  # the first column of a state
ROWS_AT_ONCE = 50_000

Row = dict[str, Any]

_NULL = type(None)
_JSON = dict  # stands for values that no type of column holds
_FLOAT_INT_MAX = 1 << 53  # floats hold integers up to this exactly


class _WideInt:
    """Kind of column for integers beyond 53 bits, which can't stand beside floats."""


_TYPES = {
    bool: pa.bool_(),
    int: pa.int64(),
    _WideInt: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
}


def state_tables(settings: InstanceSettings, reader: LogReader, last_sequence_id: int) -> dict[str, pa.Table]:
    """Return the tables of :mod:`immortal.appsdk.state.tree`, by name, as of right after a record.

    Raises LogViewError, ReplayError and the other errors of a replay.
    """
    name = settings.name
    summary = reader.summary()
    route = plan_route(ReplayPlan(last_sequence_id=last_sequence_id), reader, summary)
    own = code_of_record(settings, summary, route.last_version, last_sequence_id)
    with tempfile.TemporaryDirectory(prefix="immortal-sql-") as folder:
        blob, rows = Path(folder) / "state", Path(folder) / "rows"
        proving = ProvingSink(reader, route)
        command = AppCommand.of(own.app, settings=settings, code=own.archive)
        result = run_replay(reader, route, command, proving, blob_path=blob)
        if result.failure is not None:
            raise LogViewError(
                f"the state of {name} can't be had: its replay ends at record {result.failure.sequence_id}, message"
                f" {result.failure.message_index}: {result.failure.text}"
            )
        problem = proving.problem(name, result) or (
            state_problem(reader, route, command, own.first) if result.records else ""
        )
        if result.news:
            problem = f"record {result.news[0].sequence_id}, message {result.news[0].message_index} fails now"
        if problem:
            raise LogViewError(unshowable_state_text(name, problem))
        write_rows(own.app, blob, rows, own.archive)
        tables = read_tables(rows)
    as_of = pa.array([last_sequence_id])
    state = tables.get(STATE)
    tables[STATE] = pa.table({AS_OF: as_of}) if state is None else state.add_column(0, AS_OF, as_of)
    return tables


def read_tables(file: Path) -> dict[str, pa.Table]:
    """Read tables from a file, twice: first the types of columns, so that a large state is never held as rows."""
    empty: set[str] = set()
    kinds: dict[str, dict[str, set[type]]] = defaultdict(lambda: defaultdict(set))
    for table, row in _lines(file):
        if isinstance(row, str):  # the first column of a container, which can be empty
            kinds[table] |= {row: {int if row == "index" else _NULL}, "value": {_NULL}}
            empty.add(table)
            continue
        if table in empty:
            empty.remove(table)
            kinds[table].clear()
        for name, value in row.items():
            kinds[table][name].add(_kind(value))
    schemas = {
        table: pa.schema([(name, _type(found)) for name, found in columns.items()]) for table, columns in kinds.items()
    }
    batches: dict[str, list[pa.RecordBatch]] = defaultdict(list)
    rows: dict[str, list[Row]] = defaultdict(list)
    for table, row in _lines(file):
        if isinstance(row, str):
            continue
        rows[table].append(row)
        if len(rows[table]) == ROWS_AT_ONCE:
            batches[table].append(_batch(rows.pop(table), schemas[table], kinds[table]))
    for table, rest in rows.items():
        if table in schemas:  # otherwise it is a state without a shown attribute
            batches[table].append(_batch(rest, schemas[table], kinds[table]))
    return {table: pa.Table.from_batches(batches[table], schema) for table, schema in schemas.items()}


def _lines(file: Path) -> Iterator[tuple[str, Row | str]]:
    with file.open(encoding="utf-8") as lines:
        yield from map(decoding.load_json, lines)


def _batch(rows: Sequence[Row], schema: pa.Schema, kinds: Mapping[str, set[type]]) -> pa.RecordBatch:
    arrays = []
    for field in schema:
        made = _json_text if _is_json(kinds[field.name]) else _plain
        values = [row.get(field.name) for row in rows]
        arrays.append(pa.array([None if value is None else made(value) for value in values], field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _kind(value: Any) -> type:
    plain = _plain(value)
    if type(plain) is int and not -(1 << 63) <= plain < 1 << 63:
        return _JSON
    if type(plain) is int and abs(plain) > _FLOAT_INT_MAX:
        return _WideInt
    if type(plain) is str and not plain.isascii():
        try:
            plain.encode()
        except UnicodeEncodeError:  # half a surrogate pair
            return _JSON
    return type(plain) if plain is None or type(plain) in _TYPES else _JSON


def _is_json(kinds: set[type]) -> bool:
    found = kinds - {_NULL}
    return found not in ({int, float}, {int, _WideInt}) and (len(found) > 1 or _JSON in found)


def _type(kinds: set[type]) -> pa.DataType:
    found = kinds - {_NULL}
    if not found or _is_json(kinds):
        return pa.string()
    return pa.float64() if found == {int, float} else _TYPES[found.pop()]


_json_text = json.dumps  # ASCII


def _plain(value: Any) -> Any:
    """Restore values that :func:`immortal.appsdk.state.tree.to_json` wrote because JSON lacks them."""
    match value:
        case {"$bytes": str(digits), **rest} if not rest:
            return bytes.fromhex(digits)
        case {"$float": str(text), **rest} if not rest:
            return float(text)
    return value


def with_instance(tables: Mapping[str, Mapping[str, pa.Table]], name: str) -> Iterator[pa.Table]:
    """Yield the table ``name`` of each instance that has one, with the instance as first column."""
    for instance, of_instance in tables.items():
        table = of_instance.get(name)
        if table is not None:
            yield table.add_column(0, "instance", pa.repeat(instance, len(table)))
