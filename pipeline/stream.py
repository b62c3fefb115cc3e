"""The live tail: ``spark.readStream.format("immortal")``, resumed from its offsets exactly where it was.

An offset says for each log which record is next, and of which log (its committer):
{folder: {"committer_id": 7, "next": 42}}. What lies between two offsets is the same whenever it is read, since a log is
only appended to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from immortal.pipeline.errors import LogChangedError, SourceError
from immortal.pipeline.paths import log_folders
from immortal.pipeline.reading import LogRange, whole_range
from immortal.pipeline.source import Options, RangePartition, RangeReader, number, split


class Place(TypedDict):
    """Where a stream is in one log."""

    committer_id: int
    next: int


Offset = dict[str, Place]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what is appended to the logs; those that turn up at the paths later are read from their first record.

    Options of its own: ``maxRecordsPerBatch``, shared by all logs; ``startingOffset``, "earliest" or "latest".
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._options = Options.of(options)
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
        """Raises LogChangedError where a log was replaced, or has lost records that were not read yet."""
        waiting: dict[str, int] = {}
        places = dict(start)
        for each in self._logs():
            if self._target is not None and each.folder not in self._target:
                continue  # it came after what is available now
            place = places.setdefault(each.folder, _place(each, self._first(each)))
            _require_same(each, place)
            _require_there(each, place["next"])
            end = self._end(each)
            if self._target is not None:
                end = min(end, self._target[each.folder]["next"])
            waiting[each.folder] = max(0, end - place["next"])
        taken = shares(waiting, limit.max_rows) if isinstance(limit, ReadMaxRows) else waiting
        for folder, count in taken.items():
            place = places[folder]
            places[folder] = {"committer_id": place["committer_id"], "next": place["next"] + count}
        return places

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        parts: list[InputPartition] = []
        for folder, place in end.items():
            now = whole_range(folder)
            begin = start.get(folder)
            first = begin["next"] if begin is not None else self._first(now)
            if first >= place["next"]:
                continue
            _require_same(now, {"committer_id": place["committer_id"], "next": first})
            _require_there(now, place["next"])
            wanted = LogRange(folder, now.instance, now.committer_id, first, place["next"])
            parts += [RangePartition(part) for part in split(wanted, self._options.partition_bytes)]
        return parts

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, RangePartition):
            yield from self._ranges.read(partition.wanted)

    def _logs(self) -> list[LogRange]:
        ranges = (whole_range(folder) for folder in log_folders(list(self._options.paths), may_be_none=True))
        return [each for each in ranges if self._options.takes(each.instance)]

    def _first(self, each: LogRange) -> int:
        return max(each.first, self._options.first)

    def _end(self, each: LogRange) -> int:
        return min(each.end, self._options.last + 1)


_START_ANEW = "start the query with a new checkpoint location"


def _place(each: LogRange, sequence_id: int) -> Place:
    return {"committer_id": each.committer_id, "next": sequence_id}


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
    """``count_max`` divided among those who wait: equal parts, and what one does not need goes to the others."""
    taken: dict[str, int] = {}
    rest = count_max
    by_need = sorted(waiting.items(), key=lambda item: (item[1], item[0]))
    for index, (name, count) in enumerate(by_need):
        taken[name] = min(count, -(-rest // (len(by_need) - index)))
        rest -= taken[name]
    return taken
