"""Sources of a job: the logs of a fleet, or an export of them in Parquet. Both have the same tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
from msgspec import convert
from pyspark.accumulators import Accumulator, AddingAccumulatorParam
from pyspark.sql import functions as F  # noqa: N812 (as everywhere)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from immortal.coordinator.core.interfaces import ONESELF, LogSummary
from immortal.coordinator.log.identity import LogIdentity
from immortal.coordinator.log.open import is_locked, open_reader
from immortal.pipeline.errors import SourceError
from immortal.pipeline.jobs.evidence import EVIDENCE, evidence_of_range, evidence_of_raw
from immortal.pipeline.reading import NO_LIMIT, LogRange, log_folders, range_of, require_one_each
from immortal.pipeline.source import PARTITION_SIZE_BYTES, SCHEMAS, Options, RangeReader, pack, split
from immortal.protocol import decoding
from immortal.protocol.errors import ImmortalError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")

EXPORT_FILE_NAME = "_immortal_export.json"
"""File with the state of an export. Spark ignores files whose names begin with an underscore."""

EXPORT_VERSION = 1
RUN_PREFIX = "run-"
TABLES = tuple(SCHEMAS)
_EVIDENCE = from_arrow_schema(EVIDENCE)
_ADDED = {"raw": "time_ns long, check long, day date", "outputs": "time_ns long, day date"}

Read = Callable[[LogRange], Iterator[pa.RecordBatch]]
"""Makes rows of a range, in a worker."""
TextAccumulator = Accumulator[tuple[tuple[str, str], ...]]
"""Takes logs that a worker could not read, with what is wrong."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A log that could not be read, or not as a whole."""

    log: str  # its folder or URL
    text: str


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
    def from_summary(cls, identity: LogIdentity, folder: str, summary: LogSummary, *, live: bool) -> LogState:
        own = identity.instance_name
        newest = summary.checkpoints[-1].outputs if summary.checkpoints else {}

        def name(party: str) -> str:
            return own if party == ONESELF else party

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


@dataclass(frozen=True, slots=True)
class Wanted:
    """Records ``first`` to ``last`` of some instances."""

    instances: Sequence[str]
    first: int
    last: int


class Fleet(ABC):
    """Instances by name, and their tables."""

    states: Mapping[str, LogState]

    @property
    def sources(self) -> list[str]:
        """Folders and URLs that are read."""
        return [state.folder for state in self.states.values()]

    @property
    def unreadable(self) -> Sequence[Unreadable]:
        """The logs that could not be read, as far as they were tried."""
        return ()

    @abstractmethod
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

    @abstractmethod
    def evidence(
        self, spark: SparkSession, first_ns: int = 0, last_ns: int = NO_LIMIT, *, streams: bool = True
    ) -> DataFrame:
        """Return the rows of pipeline.jobs.evidence, in no order, of the records between two times, both included.

        Without ``streams``: of the logs themselves.
        """


class LogFleet(Fleet):
    """Fleet of logs, each read as it is when a table is requested; ``states`` were read before."""

    def __init__(self, folders: Sequence[str], *, strict: bool = False) -> None:
        """``strict``: a log that cannot be read ends the job; otherwise it is one of ``unreadable``.

        Raises SourceError if none can be opened.
        """
        self._strict = strict
        self._texts: dict[str, str] = {}
        self._failures: TextAccumulator | None = None
        logs = [log for folder in folders if (log := self.attempt(folder, partial(_open_log, folder)))]
        self.ranges = require_one_each(whole for _, whole in logs)
        self.states = {state.instance: state for state, _ in logs}
        if self._texts and not logs:
            raise none_left(self._texts)

    def attempt(self, folder: str, action: Callable[[], T]) -> T | None:
        """Return the result of ``action`` on a log; None if it fails, which is noted."""
        try:
            return action()
        except (ImmortalError, OSError) as error:
            if self._strict:
                raise
            self._texts.setdefault(folder, str(error))
            return None

    @property
    def unreadable(self) -> Sequence[Unreadable]:
        texts = {**self._texts, **dict(self._failures.value if self._failures is not None else ())}
        return [Unreadable(*each) for each in sorted(texts.items())]

    def frame(self, spark: SparkSession, ranges: Sequence[LogRange], read: Read, schema: StructType | str) -> DataFrame:
        """Return the rows of ``ranges``. Those that cannot be read have none, and are noted when it is run."""
        context = spark.sparkContext
        if self._failures is None and not self._strict:
            self._failures = context.accumulator((), AddingAccumulatorParam(()))  # type: ignore[type-var, arg-type]
        packs = pack(ranges, context.defaultParallelism)
        function = partial(read_packs, packs=packs, read=read, failures=self._failures)
        return spark.range(0, len(packs), 1, max(1, len(packs))).mapInArrow(function, schema)

    def table(
        self,
        spark: SparkSession,
        name: str,
        columns: Sequence[str] | None = None,
        *,
        only: Wanted | None = None,
        decode: str | None = None,
    ) -> DataFrame:
        options = {"table": name} if decode is None else {"table": name, "decode": decode}
        if self.ranges:
            options["path"] = self.ranges[0].folder  # beside its home are the rules of redaction
        if only is not None:
            options |= {"instance": ",".join(only.instances), "from": f"{only.first}", "to": f"{only.last}"}
        wanted = Options.parse(options)
        schema = SCHEMAS[name] if columns is None else StructType([SCHEMAS[name][column] for column in columns])
        parts = self.ranges if name == "checkpoints" else self._parts()
        ranges = [each for each in parts if wanted.includes(each.instance)]
        return self.frame(spark, ranges, RangeReader(wanted, schema).read, schema)

    def evidence(
        self, spark: SparkSession, first_ns: int = 0, last_ns: int = NO_LIMIT, *, streams: bool = True
    ) -> DataFrame:
        read = partial(evidence_of_range, first_ns=first_ns, last_ns=last_ns, streams=streams)
        return self.frame(spark, self._parts(), read, _EVIDENCE)

    def _parts(self) -> list[LogRange]:
        """Cut the logs into ranges for the workers. The last one of each goes to where the log ends by then.

        So they hold all that any of ``states`` knows of, however long it took to look at all logs.
        """
        parts: list[LogRange] = []
        for each in self.ranges:
            *before, last = split(each, PARTITION_SIZE_BYTES) or [each]
            parts += [*before, replace(last, end=NO_LIMIT)]
        return parts


class ExportFleet(Fleet):
    """Fleet of logs that `immortal pipeline export` has written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        state = read_export_state(folder)
        self.run: int = state["run"]
        self.tables: list[str] = state["tables"]
        self.exported: dict[str, dict[str, int]] = state["exported"]
        self.states = convert(state["instances"], dict[str, LogState])

    @property
    def sources(self) -> list[str]:
        return [str(self.folder)]

    def table(
        self,
        spark: SparkSession,
        name: str,
        columns: Sequence[str] | None = None,
        *,
        only: Wanted | None = None,
        decode: str | None = None,
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

    def evidence(
        self, spark: SparkSession, first_ns: int = 0, last_ns: int = NO_LIMIT, *, streams: bool = True
    ) -> DataFrame:
        raw = self.table(spark, "raw")
        if (first_ns, last_ns) != (0, NO_LIMIT):
            raw = raw.where(raw["time_ns"].between(first_ns, last_ns))
        raw = raw.select("instance", "sequence_id", "value")
        committer_ids = {name: state.committer_id for name, state in self.states.items()}
        return raw.mapInArrow(partial(evidence_of_raw, committer_ids=committer_ids, streams=streams), _EVIDENCE)


def exported_schema(table: str) -> str:
    """Return the columns of an exported table, with those that an export adds, in Spark's notation."""
    columns = [f"`{column.name}` {column.dataType.simpleString()}" for column in SCHEMAS[table]]
    return ", ".join([*columns, _ADDED.get(table, "day date")])


def open_fleet(paths: Sequence[str], *, strict: bool = False) -> Fleet:
    """An export where ``paths`` is one, otherwise all logs that are there, see LogFleet. Raises SourceError."""
    exports = [path for path in paths if (Path(path) / EXPORT_FILE_NAME).exists()]
    if not exports:
        return LogFleet(log_folders(list(paths)), strict=strict)
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


def run_of(path: Path) -> int:
    """Return the number of the run that wrote a file of an export."""
    return int(path.name.split("-")[1])


def _open_log(folder: str) -> tuple[LogState, LogRange]:
    with open_reader(folder) as reader:
        state = LogState.from_summary(reader.identity, folder, reader.summary(), live=is_locked(folder))
        return state, range_of(reader, folder)


def none_left(texts: Mapping[str, str]) -> SourceError:
    """Return the error for logs of which none can be read. ``texts``: what is wrong, by log."""
    first = next(iter(texts.values()))
    return SourceError(first if len(texts) == 1 else f"none of {len(texts)} logs can be read; the first: {first}")


def read_packs(
    batches: Iterator[pa.RecordBatch], packs: Sequence[Sequence[LogRange]], read: Read, failures: TextAccumulator | None
) -> Iterator[pa.RecordBatch]:
    """For mapInArrow: numbers of packs into the rows of their ranges. ``failures`` None: an error ends it."""
    for batch in batches:
        for wanted in (each for number in batch.column(0).to_pylist() for each in packs[number]):
            try:
                yield from read(wanted)
            except (ImmortalError, OSError) as error:
                if failures is None:
                    raise
                failures.add(((wanted.folder, str(error)),))


def rows_of(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of Arrow batches as tuples."""
    for batch in batches:
        yield from zip(*[column.to_pylist() for column in batch.columns], strict=True)
