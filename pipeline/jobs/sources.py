"""Sources of a job: the logs of a fleet, or an export of them in Parquet. Both have the same tables."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 (as everywhere)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from immortal.coordinator.core.interfaces import ONESELF, LogSummary
from immortal.coordinator.log.identity import LogIdentity
from immortal.coordinator.log.open import is_locked, open_reader
from immortal.pipeline.errors import SourceError
from immortal.pipeline.jobs.evidence import EVIDENCE, evidence_of_log, evidence_of_raw
from immortal.pipeline.reading import LogRange, close_shared, log_folders, whole_range
from immortal.pipeline.source import NO_LIMIT, PARTITION_SIZE_BYTES, SCHEMAS, split, within_time
from immortal.protocol import decoding
from immortal.protocol.files import opener, sync_folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EXPORT_FILE_NAME = "_immortal_export.json"
"""File with the state of an export. Spark ignores files whose names begin with an underscore."""

EXPORT_VERSION = 1
RUN_PREFIX = "run-"
TABLES = tuple(SCHEMAS)
_EVIDENCE = from_arrow_schema(EVIDENCE)
_ADDED = {"raw": "time_ns long, check long, day date", "outputs": "time_ns long, day date"}
_RANGE = "folder string, instance string, committer_id long, first long, end long"


@dataclass(frozen=True, slots=True)
class LogState:
    """Tables of a log beside its records, at one moment; names are those of instances, never ""."""

    instance: str
    committer_id: int
    folder: str
    first: int  # records
    last: int
    live: bool  # a coordinator writes it
    sources: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # sender: its committer ID, last position
    acknowledged: Mapping[str, int] = field(default_factory=dict)  # receiver: position
    peers: Mapping[str, int] = field(default_factory=dict)  # receiver: its committer ID
    checkpointed: Mapping[str, int] = field(default_factory=dict)  # receiver: made by the newest checkpoint
    offsets: Mapping[str, int] = field(
        default_factory=dict
    )  # receiver: its position p is p + offset here, after a reset
    cut: bool = False  # its last records were cut off by hand

    @classmethod
    def of(cls, identity: LogIdentity, folder: str, summary: LogSummary, *, live: bool) -> LogState:
        own = identity.instance_name
        newest = summary.checkpoints[-1].outputs if summary.checkpoints else {}

        def name(of: str) -> str:
            return own if of == ONESELF else of

        return cls(
            own,
            identity.committer_id,
            folder,
            summary.first_sequence_id,
            summary.last_sequence_id,
            live,
            {name(sender): (known.committer_id, known.position) for sender, known in summary.sources.items()},
            {name(receiver): position for receiver, position in summary.acknowledged.items()},
            dict(summary.peers),
            {name(receiver): mark.position for receiver, mark in newest.items()},
            {receiver: start.offset for receiver, start in summary.stream_starts.items() if start.offset},
            summary.cut_sequence_id is not None,
        )

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> LogState:
        sources = {name: (known[0], known[1]) for name, known in values["sources"].items()}
        return cls(**{**values, "sources": sources})


@dataclass(frozen=True, slots=True)
class Wanted:
    """Records ``first`` to ``last`` of some instances."""

    instances: Sequence[str]
    first: int
    last: int


class Fleet(ABC):
    """Instances by name, and their tables."""

    states: Mapping[str, LogState]

    def table(
        self,
        spark: SparkSession,
        name: str,
        columns: Sequence[str] | None = None,
        *,
        only: Wanted | None = None,
        decode: str | None = None,
    ) -> DataFrame:
        """Return a table of pipeline.tables, or some ``columns`` of it (a log's other columns are not decoded).

        ``only``: no other records are read. ``decode``: the data source's option, for logs only. Raises SourceError.
        """
        return self._table(spark, name, columns, only, decode)

    @abstractmethod
    def _table(
        self, spark: SparkSession, name: str, columns: Sequence[str] | None, only: Wanted | None, decode: str | None
    ) -> DataFrame:
        """Return a table, as :meth:`table`."""

    @abstractmethod
    def evidence(self, spark: SparkSession, first_ns: int = 0, last_ns: int = NO_LIMIT) -> DataFrame:
        """Return the rows of pipeline.jobs.evidence, in no order, of the records between two times, both included."""


class LogFleet(Fleet):
    """Fleet of logs, each read as it is when a table is requested; ``states`` were read before."""

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders = list(folders)
        self.states = log_states(self.folders)

    def _table(
        self, spark: SparkSession, name: str, columns: Sequence[str] | None, only: Wanted | None, decode: str | None
    ) -> DataFrame:
        options = {} if decode is None else {"decode": decode}
        if only is not None:
            options |= {"instance": ",".join(only.instances), "from": f"{only.first}", "to": f"{only.last}"}
        reader = spark.read.format("immortal").option("table", name).option("paths", json.dumps(self.folders))
        for option, value in options.items():
            reader = reader.option(option, value)
        if columns is not None:
            reader = reader.schema(StructType([SCHEMAS[name][column] for column in columns]))
        return reader.load()

    def evidence(self, spark: SparkSession, first_ns: int = 0, last_ns: int = NO_LIMIT) -> DataFrame:
        ranges = log_ranges(self.folders, first_ns, last_ns)
        return ranges_frame(spark, ranges).mapInArrow(evidence_of_log, _EVIDENCE)


class ExportFleet(Fleet):
    """Fleet of logs that `immortal pipeline export` has written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        state = read_export_state(folder)
        self.run: int = state["run"]
        self.tables: list[str] = state["tables"]
        self.exported: dict[str, dict[str, int]] = state["exported"]
        self.states = {name: LogState.from_json(values) for name, values in state["instances"].items()}

    def _table(
        self, spark: SparkSession, name: str, columns: Sequence[str] | None, only: Wanted | None, decode: str | None
    ) -> DataFrame:
        if decode is not None:
            raise SourceError(f"{self.folder} is an export: options such as 'decode' are for logs")
        if name not in self.tables:
            raise SourceError(
                f"the export in {self.folder} has no table {name!r}, it has {', '.join(self.tables)}:"
                f" export again into a new folder with --tables {','.join([*self.tables, name])}"
            )
        folder = self.folder / name
        if not any(folder.glob("instance=*")):
            frame = spark.createDataFrame([], exported_schema(name))
        else:  # without a schema Spark would read names of instances such as "007" as numbers
            frame = spark.read.schema(exported_schema(name)).parquet(str(folder))
            # Files of a run that was interrupted, or has not ended yet, do not count.
            frame = frame.where(F.col("_metadata.file_name") < f"{RUN_PREFIX}{self.run + 1:08d}-")
        if only is not None:
            sequence_id = F.col("sequence_id").between(only.first, only.last)
            frame = frame.where(F.col("instance").isin(list(only.instances)) & sequence_id)
        return frame if columns is None else frame.select(*columns)

    def evidence(self, spark: SparkSession, first_ns: int = 0, last_ns: int = NO_LIMIT) -> DataFrame:
        raw = self.table(spark, "raw")
        if (first_ns, last_ns) != (0, NO_LIMIT):
            raw = raw.where(raw["time_ns"].between(first_ns, last_ns))
        raw = raw.select("instance", "sequence_id", "value")
        committer_ids = {name: state.committer_id for name, state in self.states.items()}
        return raw.mapInArrow(partial(evidence_of_raw, committer_ids=committer_ids), _EVIDENCE)


def exported_schema(table: str) -> str:
    """Return the columns of an exported table, with those that an export adds, in Spark's notation."""
    columns = [f"`{column.name}` {column.dataType.simpleString()}" for column in SCHEMAS[table]]
    return ", ".join([*columns, _ADDED.get(table, "day date")])


def open_fleet(paths: Sequence[str]) -> Fleet:
    """Open an export if ``paths`` names one, otherwise all logs there. Raises SourceError, LogError."""
    exports = [path for path in paths if (Path(path) / EXPORT_FILE_NAME).exists()]
    if not exports:
        return LogFleet(log_folders(list(paths)))
    if len(paths) > 1:
        raise SourceError(f"{exports[0]} is an export: it has to be the only path, {len(paths)} were given")
    return ExportFleet(Path(exports[0]))


def read_export_state(folder: Path) -> dict[str, Any]:
    """Read the state of an export. Raises SourceError."""
    path = folder / EXPORT_FILE_NAME
    try:
        state: dict[str, Any] = decoding.load_json(path.read_text())
        version = state["version"]
        _ = state["tables"], state["instances"], state["run"], state["exported"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{path} cannot be read ({error}): export into a new folder") from None
    if version != EXPORT_VERSION:
        raise SourceError(
            f"{folder} was exported with version {version}, this program reads version {EXPORT_VERSION}:"
            f" use the program that wrote it, or export into a new folder"
        )
    return state


def log_states(folders: Iterable[str]) -> dict[str, LogState]:
    """Return the state of each log, by instance. Raises SourceError if an instance has two logs, LogError."""
    states: dict[str, LogState] = {}
    for folder in folders:
        with open_reader(folder) as reader:
            state = LogState.of(reader.identity, folder, reader.summary(), live=is_locked(folder))
        other = states.setdefault(state.instance, state)
        if other is not state:
            raise SourceError(
                f"{other.folder} and {state.folder} are both logs of the instance {state.instance!r}: give one"
            )
    return states


def log_ranges(folders: Iterable[str], first_ns: int = 0, last_ns: int = NO_LIMIT) -> list[LogRange]:
    """Cut the records that logs hold between two times into ranges for the workers."""
    parts: list[LogRange] = []
    try:
        for folder in folders:
            parts += split(within_time(whole_range(folder), first_ns, last_ns), PARTITION_SIZE_BYTES)
    finally:
        close_shared()
    return parts


def ranges_frame(spark: SparkSession, ranges: Sequence[LogRange]) -> DataFrame:
    """Return a frame with one row, and one task, for each range."""
    rows = [(each.folder, each.instance, each.committer_id, each.first, each.end) for each in ranges]
    return spark.createDataFrame(rows, _RANGE).repartition(max(1, len(rows)))


def write_atomically(path: Path, text: str) -> None:
    """Write all of ``text`` or nothing, also if the machine stops."""
    temporary = path.with_name(f"{path.name}.new")
    with open(temporary, "w", opener=opener) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def rows_of(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of Arrow batches as tuples."""
    for batch in batches:
        yield from zip(*[column.to_pylist() for column in batch.columns], strict=True)
