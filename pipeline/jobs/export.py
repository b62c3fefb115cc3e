"""Export of logs to Parquet, partitioned by instance and day: each run adds what is new since the last run.

    FOLDER/_immortal_export.json                      what is exported so far; written last, in one step
    FOLDER/TABLE/instance=NAME/day=DAY/run-N-*.parquet

A run writes to a staging folder, reads it back and compares it with the logs, moves the files into place under its own
number, then writes the state. An interrupted run leaves files whose number is not in the state; the next run removes
them.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812 (as everywhere)

from immortal.pipeline.decode import Values, binaries, decode_headers, decode_trailers, verify_checks
from immortal.pipeline.errors import PipelineError, SourceError
from immortal.pipeline.jobs.evidence import EVIDENCE, MARK, evidence_of_values
from immortal.pipeline.jobs.sources import (
    EXPORT_FILE_NAME,
    EXPORT_VERSION,
    RUN_PREFIX,
    TABLES,
    Fleet,
    LogFleet,
    LogState,
    Unreadable,
    exported_schema,
    none_left,
    read_export_state,
    run_of,
)
from immortal.pipeline.reading import Gap, LogRange, close_shared, read_range, whole_range
from immortal.pipeline.source import PARTITION_SIZE_BYTES, SCHEMAS, Options, RangeReader, split
from immortal.pipeline.tables import OUTPUTS
from immortal.protocol.checksum import crc64
from immortal.protocol.files import FILE_MODE, make_folder, opener, restrict_mode, sync_folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from immortal.coordinator.objects.store import Objects

_STAGING = "_staging"
_LOCK = "_lock"
_DAY_NS = 86_400_000_000_000


class ExportError(PipelineError):
    """Raised when the written export differs from the logs, or when the export can't continue."""


@dataclass(slots=True)
class InstanceExport:
    """One instance in one run. ``check`` is the xor of its records' CRCs, as in the table raw."""

    first: int = 0  # records of this run
    last: int = -1
    records: int = 0
    messages: int = 0
    check: int = 0
    skipped: int = 0  # trimmed away before they could be exported


@dataclass(slots=True)
class ExportReport:
    run: int
    tables: list[str]
    instances: dict[str, InstanceExport] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)  # by table, of this run
    unreadable: Sequence[Unreadable] = ()  # nothing of this run is theirs
    copied: int = 0  # files, to Delta tables


def export(
    spark: SparkSession,
    fleet: Fleet,
    folder: Path,
    tables: Sequence[str] | None = None,
    progress: Callable[[str], None] = lambda _: None,
    store: Objects | None = None,
) -> ExportReport:
    """Bring the export in ``folder`` up to date with the logs. ``tables``: all at first, later those of the export.
    ``store``: what is exported is copied there as Delta tables, see pipeline.jobs.delta.

    A log that cannot be read, or was replaced or set back since the last run, gets nothing of this run. Raises
    SourceError if the folder holds no export of ours or no log is left, ExportError if log and Parquet differ.
    """
    logs = prepare(fleet, folder, tables)
    with _locked(folder):
        state = read_export_state(folder)
        _remove_leftovers(folder, state)
        state.setdefault("id", uuid4().hex)
        report = _Run(spark, logs, folder, state, progress).run()
        if store is not None:
            from immortal.pipeline.jobs import delta

            report.copied = delta.copy(read_export_state(folder), folder, store, progress)
        return report


def prepare(fleet: Fleet, folder: Path, tables: Sequence[str] | None) -> LogFleet:
    """Check the request, and create the folder; return the logs to export. Needs no Spark. Raises SourceError."""
    if not isinstance(fleet, LogFleet):
        raise SourceError("what is to be exported is an export already: give logs")
    for table in tables or ():
        if table not in TABLES:
            raise SourceError(f"there is no table {table!r}: there are {', '.join(TABLES)}")
    _create_folder(folder, list(dict.fromkeys(tables or TABLES)))
    there = read_export_state(folder)["tables"]
    if tables is not None and set(tables) != set(there):
        raise SourceError(f"{folder} holds the tables {', '.join(there)}: export the same ones, or into a new folder")
    return fleet


class _Run:
    def __init__(
        self, spark: SparkSession, fleet: LogFleet, folder: Path, state: dict[str, Any], progress: Callable[[str], None]
    ) -> None:
        self._spark = spark
        self._fleet = fleet
        self._folder = folder
        self._staging = folder / _STAGING
        self._state = state
        self._progress = progress
        self._report = ExportReport(state["run"] + 1, state["tables"])
        self._checkpoint_ids: dict[str, int] = {
            name: known["last_checkpoint_id"] for name, known in state["exported"].items()
        }
        self._last_checkpoint_ids: dict[str, int] = {}
        self._last_checks: dict[str, int | None] = {}  # of the last record in the log
        self._rows: dict[str, dict[str, int]] = {}  # by table and instance

    def run(self) -> ExportReport:
        states = self._fleet.states.values()
        ranges = [new for each in states if (new := self._fleet.attempt(each.folder, partial(self._new_range, each)))]
        parts = [part for each in ranges for part in split(each, PARTITION_SIZE_BYTES)]
        close_shared()
        for table in self._state["tables"]:
            wanted = ranges if table == "checkpoints" else parts
            if wanted:
                self._progress(f"writing {table}")
                self._write(table, wanted)
                self._progress(f"comparing {table} with the logs")
                self._compare(table, wanted)
        self._drop_unreadable()
        self._progress("moving the files into place")
        self._move()
        self._finish([each for each in ranges if each.instance in self._report.instances])
        return self._report

    def _new_range(self, state: LogState) -> LogRange:
        """Return the range of a log that is not exported yet. Raises ExportError, LogError."""
        name = state.instance
        now = whole_range(state.folder)
        exported = self._state["exported"].get(name)
        next_record = exported["next"] if exported else 0
        if exported and exported["committer_id"] != now.committer_id:
            raise ExportError(
                f"the log of {name!r} has committer {now.committer_id}, the one exported before had"
                f" {exported['committer_id']}: it was wiped or swapped; export into a new folder"
            )
        if now.end < next_record:
            raise ExportError(
                f"the log of {name!r} ends with record {now.end - 1}, records up to {next_record - 1} were"
                f" exported before: it was set back; export into a new folder"
            )
        before = (exported or {}).get("last_check")
        if before is not None and now.first < next_record and before != _check_of(now, next_record - 1):
            raise ExportError(
                f"record {next_record - 1} in the log of {name!r} is not the one that was exported: the log was cut and"
                " has grown since, or is damaged; export into a new folder"
            )
        self._last_checks[name] = _check_of(now, now.end - 1)
        first = max(next_record, now.first)
        skipped = max(0, first - next_record) if exported else 0
        self._report.instances[name] = InstanceExport(first, now.end - 1, skipped=skipped)
        return now.part(first, now.end)

    def _drop_unreadable(self) -> None:
        """Remove the rows of logs that could not be read to the end. Raises SourceError if none is left."""
        self._report.unreadable = self._fleet.unreadable
        texts = {each.log: each.text for each in self._report.unreadable}
        for state in self._fleet.states.values():
            if state.folder in texts:
                self._report.instances.pop(state.instance, None)
        if texts and not self._report.instances:
            raise none_left(texts)
        for table, rows in self._rows.items():
            self._report.rows[table] = sum(rows[name] for name in rows.keys() & self._report.instances.keys())

    def _read(self, table: str, ranges: Sequence[LogRange]) -> DataFrame:
        reader = RangeReader(Options.parse({"table": table}), SCHEMAS[table])
        read = partial(read_for_export, reader=reader, checkpoint_ids=self._checkpoint_ids)
        return self._fleet.frame(self._spark, ranges, read, exported_schema(table))

    def _write(self, table: str, ranges: Sequence[LogRange]) -> None:
        frame = self._read(table, ranges)
        writer = frame.write.partitionBy("instance", "day").option("compression", "zstd")
        writer.mode("overwrite").parquet(str(self._staging / table))

    def _compare(self, table: str, ranges: Sequence[LogRange]) -> None:
        """Check that each instance's written rows agree with its log, which is read once more."""
        staged = self._staging / table
        if not any(staged.glob("instance=*")):
            written: dict[str, dict[str, int]] = {}
        else:
            written = _digest(table, self._spark.read.schema(exported_schema(table)).parquet(str(staged)))
        logged = _digest(table, self._read(table, ranges))
        unreadable = {each.log for each in self._fleet.unreadable}
        left_out = {name for name, state in self._fleet.states.items() if state.folder in unreadable}
        for name in sorted((written.keys() | logged.keys()) - left_out):
            if written.get(name) != logged.get(name):
                raise ExportError(
                    f"the table {table!r} of {name!r} was not written as it is in the log: {written.get(name)} instead"
                    f" of {logged.get(name)}; nothing of this run counts: check the disk, then export again"
                )
        self._rows[table] = {name: digest["rows"] for name, digest in logged.items()}
        for name in logged.keys() - left_out:
            digest, instance = logged[name], self._report.instances[name]
            if table == "raw":
                instance.check = digest["check"]
            if table in ("raw", "records"):
                instance.records = digest["rows"]
            if table == "messages":
                instance.messages = digest["rows"]
            if table == "checkpoints":
                self._last_checkpoint_ids[name] = digest["last"]

    def _move(self) -> None:
        for table in self._state["tables"]:
            for path in sorted((self._staging / table).glob("instance=*/day=*/*.parquet")):
                if unquote(path.parent.parent.name.removeprefix("instance=")) not in self._report.instances:
                    continue
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                target = self._folder / path.relative_to(self._staging).parent
                make_folder(target)
                restrict_mode(path, FILE_MODE)  # Spark's workers have a umask of their own
                path.replace(target / f"{RUN_PREFIX}{self._report.run:08d}-{path.name}")
        shutil.rmtree(self._staging, ignore_errors=True)

    def _finish(self, ranges: Sequence[LogRange]) -> None:
        state = self._state
        exported: dict[str, Any] = state["exported"]
        for each in ranges:
            before = exported.get(each.instance, {"records": 0, "check": 0})
            done = self._report.instances[each.instance]
            exported[each.instance] = {
                "committer_id": each.committer_id,
                "next": each.end,
                "records": before["records"] + done.records,
                "check": before["check"] ^ done.check,
                "last_check": self._last_checks[each.instance],
                "last_checkpoint_id": self._last_checkpoint_ids.get(
                    each.instance, self._checkpoint_ids.get(each.instance, 0)
                ),
            }
        states = self._fleet.states
        instances = {each.instance: asdict(states[each.instance]) for each in ranges}
        _write_state(self._folder, {**state, "run": self._report.run, "instances": {**state["instances"], **instances}})


def _check_of(log: LogRange, sequence_id: int) -> int | None:
    """Return the checksum of a record's bytes; None if it is not there."""
    values = list(read_range(log.part(sequence_id, sequence_id + 1)))
    return None if not values or isinstance(values[0], Gap) else crc64(values[0].value(0))


def _create_folder(folder: Path, tables: list[str]) -> None:
    """Create the folder and an empty state, so that a broken run's files are known to be ours."""
    if (folder / EXPORT_FILE_NAME).exists():
        return
    if folder.is_file():
        raise SourceError(f"{folder} is a file: a folder for the export was expected")
    if folder.exists() and any(entry.name != _LOCK for entry in folder.iterdir()):
        raise SourceError(f"{folder} is not empty and holds no export: give a new folder, or that of an export")
    make_folder(folder)
    _write_state(folder, {"version": EXPORT_VERSION, "run": 0, "tables": tables, "instances": {}, "exported": {}})


def _write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write all of the state or nothing, also if the machine stops."""
    path = folder / EXPORT_FILE_NAME
    temporary = path.with_name(f"{path.name}.new")
    with open(temporary, "w", opener=opener) as file:
        file.write(json.dumps(state, indent=1, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ExportError(f"another process exports to {folder}: wait until it has ended") from None
    finally:
        os.close(descriptor)


def _remove_leftovers(folder: Path, state: Mapping[str, Any]) -> None:
    shutil.rmtree(folder / _STAGING, ignore_errors=True)
    for table in state["tables"]:
        for path in (folder / table).glob(f"instance=*/day=*/{RUN_PREFIX}*.parquet"):
            if run_of(path) > state["run"]:
                path.unlink()


def _digest(table: str, frame: DataFrame) -> dict[str, dict[str, int]]:
    """Return the number of rows of each instance, and a checksum that does not depend on their order."""
    columns = [F.col(column) for column in sorted(frame.columns)]  # Parquet puts partitions last
    totals = {
        "rows": F.count(F.lit(1)),
        "hash": F.bit_xor(F.xxhash64(*columns)),
        "sum": F.sum(F.xxhash64(*columns).cast("decimal(38,0)")),
    }
    if table == "raw":
        totals["check"] = F.bit_xor("check")
    if table == "checkpoints":
        totals["last"] = F.max("checkpoint_id")
    rows = frame.groupBy("instance").agg(*[total.alias(name) for name, total in totals.items()]).collect()
    return {row["instance"]: {name: int(row[name]) for name in totals} for row in rows}


# --- in the workers --------------------------------------------------------------------------------------------------


def read_for_export(
    wanted: LogRange, reader: RangeReader, checkpoint_ids: Mapping[str, int]
) -> Iterator[pa.RecordBatch]:
    """Yield rows of the reader's table, with the columns that an export adds."""
    table = reader.options.table
    if table in ("raw", "outputs"):
        for values in read_range(wanted):
            if isinstance(values, Gap):
                continue  # it has no bytes; the table of records shows it
            if table == "raw":
                yield _raw(values, wanted)
            else:
                yield from _outputs(values, wanted)
        return
    for rows in reader.read(wanted):
        if table == "checkpoints":
            rows = rows.filter(pc.greater(rows["checkpoint_id"], checkpoint_ids.get(wanted.instance, 0)))
        yield _with_day(rows, rows["time_ns"])


def _with_day(rows: pa.RecordBatch, time_ns: pa.Array) -> pa.RecordBatch:
    days = pc.divide(time_ns, _DAY_NS)
    return rows.append_column("day", days.cast(pa.int32()).cast(pa.date32()))


def _raw(values: Values, wanted: LogRange) -> pa.RecordBatch:
    """Return records as bytes, also damaged ones, which have no day."""
    headers = decode_headers(values, wanted.committer_id)
    verify_checks(values, headers)
    time_ns = decode_trailers(values, headers, with_marks=False).time_ns
    checks = [crc64(values.value(index)) for index in range(len(values.start))]
    rows = pa.RecordBatch.from_arrays(
        [
            pa.repeat(pa.scalar(wanted.instance, pa.string()), len(values.start)),
            pa.array(values.sequence_ids),
            binaries(values.raw, values.start, values.end),
            pa.array(time_ns, mask=~headers.usual),
            pa.array(np.array(checks, np.uint64).view(np.int64)),
        ],
        names=["instance", "sequence_id", "value", "time_ns", "check"],
    )
    return _with_day(rows, rows["time_ns"])


def _outputs(values: Values, wanted: LogRange) -> Iterator[pa.RecordBatch]:
    names = {"instance": "sender", "destination": "receiver"}
    columns = [*OUTPUTS.names, "time_ns"]
    for batch in evidence_of_values(values, wanted.instance, wanted.committer_id):
        marks = batch.filter(pc.equal(batch["what"], MARK))
        if marks.num_rows:
            arrays = [marks.column(EVIDENCE.get_field_index(names.get(name, name))) for name in columns]
            yield _with_day(pa.RecordBatch.from_arrays(arrays, names=columns), marks["time_ns"])
