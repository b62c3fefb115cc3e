"""Data source for format("immortal"): schema, readers, writer, and the partitions of a read."""

from __future__ import annotations

import datetime
import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructField, StructType

from immortal.pipeline import tables
from immortal.pipeline.arguments import decode_targets, decoder_of
from immortal.pipeline.errors import LogChangedError, SourceError
from immortal.pipeline.reading import (
    NO_LIMIT,
    Gap,
    LogRange,
    folder_of,
    log_folders,
    open_range,
    paths_of,
    read_range,
    registered_apps,
    require_one_each,
    whole_range,
    within_time,
)
from immortal.pipeline.tables import CALLS, TABLES, TableReader
from immortal.pipeline.typed_calls import TypedCalls
from immortal.protocol import redaction

if TYPE_CHECKING:
    from immortal.pipeline.writer import Writer

SCHEMAS = {name: from_arrow_schema(table) for name, table in TABLES.items()}
PARTITION_SIZE_BYTES = 512 << 20  # a task costs 20 ms: with four times as many, a GiB takes a quarter longer
PARTITION_ROWS_MIN = 5_000  # with fewer rows and bytes, starting a task costs more than it reads
PARTITION_SIZE_BYTES_MIN = 64 << 20
RANGE_COST_BYTES = 256 << 10  # to open a log takes as long as to read so much of it
TASKS_PER_PROCESSOR = 4  # where there is enough for them: they do not end at the same time
_OPTIONS = {
    *(
        "table",
        "instance",
        "from",
        "to",
        "fromtime",
        "totime",
        "decode",
        "method",
        "check",
        "path",
        "paths",
        "partitionbytes",
        "plain",
    ),
    *("maxrecordsperbatch", "startingoffset", "committerid"),
}
_OF_CATALOGS = {  # Spark adds what a catalog knows of a table to its options
    *("provider", "location", "external", "is_managed_location", "owner", "comment", "collation"),
    *("serialization.format", "transient_lastddltime"),
}
_KEPT = "immortal.options"  # in a table's first column: of a catalog's table, readers get the columns, not the options
_typed_calls = functools.cache(TypedCalls)
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class Options:
    """Checked values of ``.option(...)``."""

    table: str
    paths: tuple[str, ...]
    first: int
    last: int
    check: bool
    decode: Mapping[str, str]
    partition_bytes: int
    instances: frozenset[str] = frozenset()  # none: all
    first_ns: int = 0
    last_ns: int = NO_LIMIT
    method: str = ""  # only its calls
    unloaded: Mapping[str, str] = field(default_factory=dict)  # instance: why its class is not among ``decode``
    rules: redaction.Rules = field(default_factory=redaction.rules)  # what is not shown

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Options:
        """Check ``options``. Raises SourceError, which names the option, its value and what was expected."""
        for name in options:
            known = name.lower().removeprefix("option.")
            if known not in _OPTIONS | _OF_CATALOGS and not known.startswith("spark.sql."):
                raise SourceError(f"there is no option {name!r}: there are {', '.join(sorted(_OPTIONS))}")
        table = options.get("table", "messages")
        if table not in SCHEMAS:
            raise SourceError(f"option table: {table!r}: there are {', '.join(SCHEMAS)}")
        check, plain = (options.get(name, default).lower() for name, default in (("check", "true"), ("plain", "false")))
        for name, value in (("check", check), ("plain", plain)):
            if value not in ("true", "false"):
                raise SourceError(f"option {name}: {value!r}: true or false was expected")
        decode, method = options.get("decode", ""), options.get("method", "")
        if method and table != "messages":
            raise SourceError(f"option method: {method!r}: it is for the table messages, not for {table!r}")
        paths = paths_of(options)
        instances = frozenset(name for part in options.get("instance", "").split(",") if (name := part.strip()))
        targets = decode_targets(decode) if decode else registered_apps(paths) if method else {}
        targets = {name: target for name, target in targets.items() if not (name and instances) or name in instances}
        unloaded = _unloaded(targets) if method and not decode else {}
        targets = {name: target for name, target in targets.items() if name not in unloaded}
        if method and not targets:
            why = next(iter(unloaded.values()), "no settings beside the logs name an app: add option decode")
            raise SourceError(f"option method: {method!r}: {why}")
        return cls(
            table,
            tuple(paths),
            number(options, "from", 0),
            number(options, "to", NO_LIMIT),
            check == "true",
            targets,
            max(1, number(options, "partitionBytes", PARTITION_SIZE_BYTES)),
            instances,
            _time_ns(options, "fromTime", 0),
            _time_ns(options, "toTime", NO_LIMIT, rest_ns=999),  # all of its last microsecond
            method,
            unloaded,
            redaction.Rules() if plain == "true" else _rules(paths),
        )

    @property
    def calls(self) -> TypedCalls | None:
        """The calls of the method, if one is asked for. Raises SourceError if no class has it."""
        if not self.method:
            return None
        try:
            return _typed_calls(self.method, frozenset(self.decode.values()), CALLS)
        except SourceError as error:
            raise SourceError("; ".join([str(error), *self.unloaded.values()])) from None

    @property
    def schema(self) -> StructType:
        return from_arrow_schema(calls.schema) if (calls := self.calls) is not None else SCHEMAS[self.table]

    def includes(self, instance: str) -> bool:
        """Return True if the options ask for the log of ``instance``."""
        return not self.instances or instance in self.instances

    def narrow(self, wanted: LogRange) -> LogRange:
        """Leave out the records that are not to be read."""
        if self.last != NO_LIMIT and wanted.end == NO_LIMIT:
            wanted = wanted.part(wanted.first, open_range(wanted).ends()[1] + 1)
        return within_time(wanted.part(self.first, self.last + 1), self.first_ns, self.last_ns)


def _rules(paths: Sequence[str]) -> redaction.Rules:
    """Return the rules of redaction beside the home of the logs in ``paths``; elsewhere see redaction.rules_file."""
    if redaction.FILE_VARIABLE not in os.environ:
        for path in paths:
            folder = Path(os.path.abspath(folder_of(path).removeprefix("file:")))
            for file in (parent / redaction.FILE_NAME for parent in list(folder.parents)[:3]):  # of HOME/NAME/log
                if file.exists():
                    return redaction.read_rules(file)
    return redaction.rules()


def _unloaded(targets: Mapping[str, str]) -> dict[str, str]:
    """Return the instances whose class cannot be loaded, and why."""
    found = {}
    for name, target in targets.items():
        try:
            decoder_of(target)
        except Exception as error:  # a user's module can raise anything
            found[name] = f"the app of {name!r} cannot be loaded: {error}"
    return found


def number(options: Mapping[str, str], name: str, default: int) -> int:
    """Return the value of an option that is a number, 0 or more. Raises SourceError."""
    value = options.get(name)
    if value is None:
        return default
    if not value.isascii() or not value.isdigit() or int(value) > NO_LIMIT:
        raise SourceError(f"option {name}: {value!r}: a number, 0 or more, was expected")
    return int(value)


def _time_ns(options: Mapping[str, str], name: str, default: int, rest_ns: int = 0) -> int:
    """Return an option's time in ns: ISO 8601 (UTC by default) or a number of ns. Raises SourceError."""
    value = options.get(name, "")
    if not value or value.isdigit():
        return number(options, name, default)
    try:
        time = datetime.datetime.fromisoformat(value)
    except ValueError:
        raise SourceError(
            f"option {name}: {value!r}: a time such as 2026-01-31T12:00:00Z, or ns since 1970, was expected"
        ) from None
    aware = time if time.tzinfo is not None else time.replace(tzinfo=datetime.UTC)
    return max(0, (aware - _EPOCH) // datetime.timedelta(microseconds=1) * 1000 + rest_ns)


class ImmortalSource(DataSource):
    """Data source ``immortal``: pipeline/tables.py has the tables, docs/reference/pipeline.md the options."""

    @classmethod
    def name(cls) -> str:
        return "immortal"

    def schema(self) -> StructType:
        schema = Options.parse(self.options).schema
        if "provider" not in self.options:
            return schema
        kept = {_KEPT: {name: self.options[name] for name in self.options}}
        return StructType([StructField(schema[0].name, schema[0].dataType, metadata=kept), *schema.fields[1:]])

    def reader(self, schema: StructType) -> Reader:
        self._add_kept(schema)
        return Reader(Options.parse(self.options), schema)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 (Spark's name)
        self._add_kept(schema)
        return StreamReader(self.options, schema)

    def _add_kept(self, schema: StructType) -> None:
        for first in schema.fields[:1]:
            for name, value in first.metadata.get(_KEPT, {}).items():
                self.options.setdefault(name, value)

    def writer(self, schema: StructType, overwrite: bool) -> Writer:
        from immortal.pipeline.writer import Writer

        return Writer(self.options, schema, overwrite=overwrite)


class RangePartition(InputPartition):
    """Partition of one task: ranges of logs."""

    def __init__(self, ranges: list[LogRange]) -> None:
        super().__init__(None)
        self.ranges = ranges


class RangeReader:
    """Reader of ranges of logs as rows of one table; Spark sends it to the workers."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self.options = options
        self.columns = _checked_columns(options, schema)
        for target in options.decode.values():
            decoder_of(target)  # a failed import is reported here, once, not by each task

    def read(self, wanted: LogRange) -> Iterator[pa.RecordBatch]:
        options = self.options
        redaction.set_rules(options.rules)
        if options.table == "checkpoints":
            yield from tables.read(open_range(wanted), wanted, options.check, self.columns)
            return
        wanted = options.narrow(wanted)
        target = options.decode.get(wanted.instance, options.decode.get(""))
        calls = options.calls
        table = TableReader(
            options.table,
            self.columns,
            wanted.instance,
            wanted.committer_id,
            options.check,
            decoder_of(target) if target else None,
            calls.reader(target, options.unloaded.get(wanted.instance)) if calls is not None else None,
        )
        for values in read_range(wanted):
            if isinstance(values, Gap):
                yield from table.damaged(values.first, values.reason)
            else:
                yield from table.batches(values)


def _checked_columns(options: Options, schema: StructType) -> pa.Schema:
    """Return the requested columns. Raises SourceError unless they are columns of the table."""
    types = {field.name: field.dataType for field in options.schema}
    for column in schema:
        if types.get(column.name) != column.dataType:
            expected = ", ".join(f"{name} {kind.simpleString()}" for name, kind in types.items())
            raise SourceError(
                f"the table {options.table!r} has no column {column.name!r} of type {column.dataType.simpleString()}:"
                f" it has {expected}"
            )
    return to_arrow_schema(schema, timezone="UTC")


class Reader(DataSourceReader):
    """Reader of a batch: it reads what the logs hold when the read is planned.

    It has no ``pushFilters``: Spark keeps one reader for each ``load()``. Rows that one query's filter left out would
    be missing in later queries of that DataFrame (docs/decisions/0075-no-filter-pushdown.md).
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._ranges = RangeReader(options, schema)

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        ranges = require_one_each(map(whole_range, log_folders(list(options.paths))))
        if missing := options.instances - {each.instance for each in ranges}:
            there = ", ".join(sorted({each.instance for each in ranges})[:20])
            raise SourceError(f"option instance: there is no log of {', '.join(sorted(missing))}: there are {there}")
        ranges = [each for each in ranges if options.includes(each.instance)]
        if options.table != "checkpoints":
            ranges = [part for each in ranges for part in split(options.narrow(each), options.partition_bytes)]
        return _partitions(ranges, options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._ranges, partition)


def _partitions(ranges: Iterable[LogRange], options: Options) -> list[InputPartition]:
    return [RangePartition(packed) for packed in pack(ranges, os.cpu_count() or 1, options.partition_bytes)]


def _read(ranges: RangeReader, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    if isinstance(partition, RangePartition):  # where there are none at all, Spark makes up an empty one
        for wanted in partition.ranges:
            yield from ranges.read(wanted)


def pack(
    ranges: Iterable[LogRange], processors: int, task_bytes: int = PARTITION_SIZE_BYTES_MIN
) -> list[list[LogRange]]:
    """Ranges that one task each reads: in their order, up to ``task_bytes``; fewer where there are too few tasks."""
    costs = [(each, max(each.size_bytes, RANGE_COST_BYTES)) for each in ranges]
    share_bytes = sum(cost for _, cost in costs) // (processors * TASKS_PER_PROCESSOR)
    full_bytes = min(task_bytes, PARTITION_SIZE_BYTES_MIN, share_bytes)
    packs: list[list[LogRange]] = []
    filled_bytes = 0
    for each, cost in costs:
        filled_bytes += cost
        if not packs or filled_bytes > full_bytes:
            packs.append([])
            filled_bytes = cost
        packs[-1].append(each)
    return packs


def split(wanted: LogRange, partition_bytes: int) -> list[LogRange]:
    """Split into ranges of about ``partition_bytes``; a smaller log into one for each processor, if worth a task."""
    rows = wanted.end - wanted.first
    if rows <= 0:
        return []
    size = wanted.size_bytes
    worth_it = max(rows // PARTITION_ROWS_MIN, size // PARTITION_SIZE_BYTES_MIN)
    count = max(size // partition_bytes, min(os.cpu_count() or 1, worth_it))
    count = min(max(count, 1), rows)
    bounds = [wanted.first + rows * index // count for index in range(count + 1)]
    return [wanted.part(first, end) for first, end in itertools.pairwise(bounds)]


# The live tail: ``spark.readStream.format("immortal")``, which resumes exactly at its offsets.
#
# An offset holds, for each log, its committer and the next record: {folder: {"committer_id": 7, "next": 42}}. The
# records between two offsets are the same at each read, since a log is only appended to.


class Place(TypedDict):
    """Position of a streaming read in one log."""

    committer_id: int
    next: int


Offset = dict[str, Place]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader of records that are appended to the logs; a log that is created later is read from its first record.

    Options of its own: ``maxRecordsPerBatch``, shared by all logs; ``startingOffset``, "earliest" or "latest".
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._options = Options.parse(options)
        if self._options.table == "checkpoints":
            raise SourceError("the table 'checkpoints' is no stream, it shrinks: read it with spark.read")
        for name in ("fromTime", "toTime"):
            if options.get(name):
                raise SourceError(f"option {name} is for spark.read: a stream begins where startingOffset or from says")
        self._start = options.get("startingOffset", "earliest")
        if self._start not in ("earliest", "latest"):
            raise SourceError(f"option startingOffset: {self._start!r}: earliest or latest was expected")
        self._records_max = number(options, "maxRecordsPerBatch", 0)
        self._ranges = RangeReader(self._options, schema)
        self._target: Offset | None = None

    def initialOffset(self) -> Offset:  # noqa: N802 (Spark's names, here and below)
        ranges = self._logs()
        if self._start == "latest":
            return {each.folder: _place(each, each.end) for each in ranges}
        return {each.folder: _place(each, self._first(each)) for each in ranges}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._records_max) if self._records_max else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = {each.folder: _place(each, self._end(each)) for each in self._logs()}

    def reportLatestOffset(self) -> Offset:  # noqa: N802
        return {each.folder: _place(each, self._end(each)) for each in self._logs()}

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Return the next offset. Raises LogChangedError if a log was replaced, or lost records not read yet."""
        _require_ours(start)
        waiting: dict[str, int] = {}
        places = dict(start)
        for each in self._logs():
            if self._target is not None and each.folder not in self._target:
                continue  # the log was created after the moment that counts as available now
            place = places.setdefault(each.folder, _place(each, self._first(each)))
            _require_same(each, place)
            _require_there(each, place["next"])
            end = self._end(each)
            if self._target is not None:
                end = min(end, self._target[each.folder]["next"])
            waiting[each.folder] = max(0, end - place["next"])
        granted = shares(waiting, limit.max_rows) if isinstance(limit, ReadMaxRows) else waiting
        for folder, count in granted.items():
            place = places[folder]
            places[folder] = {"committer_id": place["committer_id"], "next": place["next"] + count}
        return places

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        parts: list[LogRange] = []
        _require_ours({**start, **end})
        for folder, place in end.items():
            now = whole_range(folder)
            begin = start.get(folder)
            first = begin["next"] if begin is not None else self._first(now)
            if first >= place["next"]:
                continue
            _require_same(now, {"committer_id": place["committer_id"], "next": first})
            _require_there(now, place["next"])
            parts += split(now.part(first, place["next"]), self._options.partition_bytes)
        return _partitions(parts, self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._ranges, partition)

    def _logs(self) -> list[LogRange]:
        ranges = require_one_each(map(whole_range, log_folders(list(self._options.paths), may_be_none=True)))
        return [each for each in ranges if self._options.includes(each.instance)]

    def _first(self, each: LogRange) -> int:
        return max(each.first, self._options.first)

    def _end(self, each: LogRange) -> int:
        return min(each.end, self._options.last + 1)


_START_ANEW = "start the query with a new checkpoint location"


def _place(each: LogRange, sequence_id: int) -> Place:
    return {"committer_id": each.committer_id, "next": sequence_id}


def _require_ours(offset: Offset) -> None:
    for place in offset.values():
        if not isinstance(place, dict) or place.keys() != Place.__required_keys__:
            raise SourceError(f"the checkpoint location is of another source: its offset is {offset}; {_START_ANEW}")


def _require_same(each: LogRange, place: Place) -> None:
    if each.committer_id != place["committer_id"]:
        raise LogChangedError(
            f"the log of {each.instance!r} in {each.folder} was replaced: the stream has read that of committer"
            f" {place['committer_id']}, now it is {each.committer_id}'s; {_START_ANEW}"
        )
    if each.first > place["next"]:
        raise LogChangedError(
            f"the log of {each.instance!r} in {each.folder} was trimmed up to record {each.first - 1} before record"
            f" {place['next']} was read: let the instance keep more checkpoints (keep_checkpoints); {_START_ANEW}"
        )


def _require_there(each: LogRange, end: int) -> None:
    if each.end < end:
        raise LogChangedError(
            f"the log of {each.instance!r} in {each.folder} ends with record {each.end - 1}, record {end - 1} was there"
            f" before: its end was cut off, or it was replaced by an older copy; {_START_ANEW}"
        )


def shares(waiting: Mapping[str, int], count_max: int) -> dict[str, int]:
    """Divide ``count_max`` among those who wait: equal parts; the rest of a smaller need goes to the others."""
    granted: dict[str, int] = {}
    rest = count_max
    by_need = sorted(waiting.items(), key=lambda item: (item[1], item[0]))
    for index, (name, count) in enumerate(by_need):
        granted[name] = min(count, -(-rest // (len(by_need) - index)))
        rest -= granted[name]
    return granted
