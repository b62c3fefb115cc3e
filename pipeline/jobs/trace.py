"""Trace of a message: the records that it caused, those that they caused, and so on, across services.

A log does not say which message made which call. Certain: the calls of a record come after the marks in it, which say
what was made when the record was sealed, since it is handled only then; and they are sent at its time or later.

Assumed, and can be set: an app is at most ``lag_records`` behind when a record is sealed, so the marks of record
r + lag + 1 include all that record r has made; and calls are sent within ``within_ms`` of their record's time.

So each call has a set of records that can have made it. If that is one record with one message, the cause is exact;
otherwise it is one of several, and the answer includes their number.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 (as everywhere)

from immortal.coordinator.core.interfaces import is_outside
from immortal.pipeline.errors import PipelineError
from immortal.pipeline.jobs.evidence import BATCH, MARK
from immortal.pipeline.jobs.sources import Fleet, Unreadable, Wanted, rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LAG_RECORDS = 1
WITHIN_MS = 1_000
HORIZON_S = 60
"""Default for how long effects are followed."""

NODES_MAX = 1_000
OUTSIDE = "outside"
"""Source of impulses."""

_NO_BOUND = (1 << 63) - 1
_BEFORE_NS = 5_000_000_000  # marks a little older than the first record show the positions of its streams


class TraceError(PipelineError):
    """Raised when a message to trace was not found."""


@dataclass(frozen=True, slots=True)
class Node:
    """Messages of one batch, executed together. ``candidates``: number of their possible causes; 1 is exact."""

    number: int
    parent: int | None
    depth: int
    instance: str
    record: int
    source: str
    first: int  # positions
    last: int
    sent_ns: int
    time_ns: int
    candidates: int
    methods: tuple[str, ...] = ()  # the different ones


@dataclass(slots=True)
class Trace:
    nodes: list[Node]
    cut_off: bool  # there was more than could be followed
    lag_records: int
    within_ms: int
    unreadable: Sequence[Unreadable] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages that ``instance`` executed with one record."""

    instance: str
    record: int
    source: str
    first: int  # position
    count: int
    sent_ns: int
    time_ns: int

    @property
    def last(self) -> int:
        return self.first + self.count - 1


@dataclass(slots=True)
class _Stream:
    """Stream: the sender's marks in the order of its records, the receiver's batches by position."""

    records: list[int] = field(default_factory=list)  # those that hold the marks
    positions: list[int] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)

    def position_at(self, record: int) -> int | None:
        """Return the stream's position when the sender's ``record`` was sealed; None if no mark is that old."""
        index = bisect_right(self.records, record) - 1
        return self.positions[index] if index >= 0 else None


@dataclass(slots=True)
class _Log:
    """Records of one log that hold calls, oldest first."""

    records: list[int] = field(default_factory=list)
    times_ns: list[int] = field(default_factory=list)
    batches: dict[int, list[Batch]] = field(default_factory=dict)


class TraceIndex:
    """Index of batches and marks of a stretch of time, for questions on causes. Add all in the order of its log."""

    def __init__(self, lag_records: int = LAG_RECORDS, within_ms: int = WITHIN_MS) -> None:
        self.lag_records = lag_records
        self.within_ms = within_ms
        self._streams: dict[str, dict[str, _Stream]] = defaultdict(lambda: defaultdict(_Stream))  # sender, receiver
        self._logs: dict[str, _Log] = defaultdict(_Log)

    def add_mark(self, sender: str, receiver: str, record: int, position: int) -> None:
        stream = self._streams[sender][receiver]
        stream.records.append(record)
        stream.positions.append(position)

    def add_batch(self, batch: Batch) -> None:
        log = self._logs[batch.instance]
        if batch.record not in log.batches:
            log.records.append(batch.record)
            log.times_ns.append(batch.time_ns)
        log.batches.setdefault(batch.record, []).append(batch)
        if batch.source != OUTSIDE:
            self._streams[batch.source][batch.instance].batches.append(batch)

    def messages_at(self, instance: str, record: int, message: int | None) -> tuple[Batch, int, int]:
        """Return a message of a record, or without ``message`` its first batch: (batch, first position, last).

        Raises TraceError if there is none.
        """
        batches = self._logs[instance].batches.get(record)
        if not batches:
            raise TraceError(f"record {record} of {instance!r} holds no calls")
        if message is None:
            return batches[0], batches[0].first, batches[0].last
        rest = message
        for batch in batches:
            if rest < batch.count:
                return batch, batch.first + rest, batch.first + rest
            rest -= batch.count
        count = sum(batch.count for batch in batches)
        raise TraceError(f"record {record} of {instance!r} has the messages 0 to {count - 1}, {message} was asked for")

    def effects(self, instance: str, record: int) -> Iterator[tuple[Batch, int, int]]:
        """Yield the possible effects of ``record``: (batch of a receiver, first position, last)."""
        time_ns = self._logs[instance].batches[record][0].time_ns
        for _, stream in sorted(self._streams[instance].items()):
            above, upto = self._bounds(stream, instance, record)
            first = bisect_right(stream.batches, above, key=lambda batch: batch.last)
            for batch in stream.batches[first:]:
                if batch.first > upto:
                    break
                if time_ns <= batch.sent_ns <= time_ns + self.within_ms * 1_000_000:
                    yield batch, max(batch.first, above + 1), min(batch.last, upto)

    def candidates(self, effect: Batch, first: int, last: int) -> int:
        """Count the sender's messages that can have made the positions ``first`` to ``last`` of ``effect``."""
        log = self._logs[effect.source]
        stream = self._streams[effect.source][effect.instance]
        count = 0
        index = bisect_left(log.times_ns, effect.sent_ns - self.within_ms * 1_000_000)
        for record in log.records[index : bisect_right(log.times_ns, effect.sent_ns)]:
            above, upto = self._bounds(stream, effect.source, record)
            if above < last and first <= upto:
                count += sum(batch.count for batch in log.batches[record])
        return count

    def _bounds(self, stream: _Stream, sender: str, record: int) -> tuple[int, int]:
        """Return the bounds of the calls of ``record``: after the first position, up to the second."""
        above = stream.position_at(record)
        complete = record + self.lag_records + 1
        records = self._logs[sender].records
        upto = stream.position_at(complete) if records and complete <= records[-1] else None
        return above or 0, _NO_BOUND if upto is None else upto


def follow(index: TraceIndex, instance: str, record: int, message: int | None, nodes_max: int = NODES_MAX) -> Trace:
    """Return the tree of possible effects of a message, breadth first; the effects of a record are followed once."""
    batch, first, last = index.messages_at(instance, record, message)
    trace = Trace([_node(0, None, 0, batch, first, last, 1)], False, index.lag_records, index.within_ms)
    followed = {(instance, record)}
    seen: set[tuple[str, str, int, int]] = set()
    waiting = deque(trace.nodes)
    while waiting:
        cause = waiting.popleft()
        for effect, first, last in index.effects(cause.instance, cause.record):
            key = (effect.source, effect.instance, first, last)
            if key in seen:
                continue
            if len(trace.nodes) >= nodes_max:
                trace.cut_off = True
                return trace
            seen.add(key)
            candidates = index.candidates(effect, first, last)
            node = _node(len(trace.nodes), cause.number, cause.depth + 1, effect, first, last, candidates)
            trace.nodes.append(node)
            if (node.instance, node.record) not in followed:
                followed.add((node.instance, node.record))
                waiting.append(node)
    return trace


def _node(number: int, parent: int | None, depth: int, batch: Batch, first: int, last: int, candidates: int) -> Node:
    return Node(
        number, parent, depth, batch.instance, batch.record, batch.source, first, last, batch.sent_ns, batch.time_ns,
        candidates,
    )  # fmt: skip


def trace(
    spark: SparkSession,
    fleet: Fleet,
    instance: str,
    record: int,
    message: int | None = None,
    *,
    lag_records: int = LAG_RECORDS,
    within_ms: int = WITHIN_MS,
    horizon_s: float = HORIZON_S,
    nodes_max: int = NODES_MAX,
    decode: str | None = None,
) -> Trace:
    """Trace one message, at most ``horizon_s`` after it. Raises TraceError, SourceError."""
    check_instance(fleet, instance)
    start_ns = _time_of(spark, fleet, instance, record)
    evidence = fleet.evidence(spark, start_ns - _BEFORE_NS, start_ns + int(horizon_s * 1e9))
    rows = (
        evidence.where(evidence["what"].isin(MARK, BATCH))
        .select("what", "sender", "receiver", "sequence_id", "position", "items", "sent_ns", "time_ns")
        .orderBy("sequence_id", "batch")
        .toArrow()
    )
    index = TraceIndex(lag_records, within_ms)
    for what, sender, receiver, sequence_id, position, items, sent_ns, time_ns in rows_of(rows.to_batches()):
        if what == MARK:
            index.add_mark(sender, receiver, sequence_id, position)
        else:
            source = OUTSIDE if is_outside(sender) else sender
            index.add_batch(Batch(receiver, sequence_id, source, position, items, sent_ns, time_ns))
    found = follow(index, instance, record, message, nodes_max)
    found.nodes = _with_methods(spark, fleet, found.nodes, decode)
    found.unreadable = fleet.unreadable
    return found


def check_instance(fleet: Fleet, instance: str) -> None:
    """Raise TraceError if ``instance`` is not in the fleet."""
    if instance not in fleet.states:
        known = ", ".join(list(fleet.states)[:20])
        rest = f"; {len(fleet.unreadable)} could not be read: {fleet.unreadable[0].text}" if fleet.unreadable else ""
        raise TraceError(f"there is no log of {instance!r} among those given: {known}{rest}")


def _time_of(spark: SparkSession, fleet: Fleet, instance: str, record: int) -> int:
    wanted = Wanted([instance], record, record)
    rows = fleet.table(spark, "records", ["time_ns", "ok", "reason"], only=wanted).collect()
    if not rows:
        state = fleet.states[instance]
        if texts := [each.text for each in fleet.unreadable if each.log == state.folder]:
            raise TraceError(texts[0])
        raise TraceError(f"the log of {instance!r} holds records {state.first} to {state.last}, not {record}")
    if not rows[0]["ok"]:
        raise TraceError(f"the log of {instance!r}: {rows[0]['reason']}")
    return int(rows[0]["time_ns"])


def _with_methods(spark: SparkSession, fleet: Fleet, nodes: list[Node], decode: str | None) -> list[Node]:
    columns = ["instance", "sequence_id", "source", "kind", "position", "method_id", "method"]
    records = [node.record for node in nodes]
    only = Wanted(sorted({node.instance for node in nodes}), min(records), max(records))
    messages = fleet.table(spark, "messages", columns, only=only, decode=decode)
    wanted = spark.createDataFrame(
        [(node.number, node.instance, node.record, node.source, node.first, node.last) for node in nodes],
        "number int, of string, record long, sender string, first long, last long",
    )
    sender = F.when(F.col("kind").isin("impulse", "client"), F.lit(OUTSIDE)).otherwise(F.col("source"))
    same = (F.col("instance") == F.col("of")) & (F.col("sequence_id") == F.col("record")) & (sender == F.col("sender"))
    name = F.coalesce("method", F.concat(F.lit("method "), F.col("method_id").cast("string")))
    rows = (
        messages.join(F.broadcast(wanted), same & F.col("position").between(F.col("first"), F.col("last")))
        .groupBy("number")
        .agg(F.array_sort(F.collect_set(name)).alias("methods"))
        .collect()
    )
    methods = {row["number"]: tuple(row["methods"]) for row in rows}
    return [replace(node, methods=methods.get(node.number, ())) for node in nodes]
