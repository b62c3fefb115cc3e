"""Audit of a fleet: was every message executed exactly once, in order, and after its cause?

Spark reads the logs and sorts their evidence by stream; stream_audit checks each stream by itself. The driver combines
what is left and small: figures of each stream, findings, and which records must be later than which.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from immortal.coordinator.core.interfaces import is_outside
from immortal.pipeline.jobs.evidence import LOG, MARK, Row
from immortal.pipeline.jobs.ordering import ORDERED, OrderingAudit, ordered_results
from immortal.pipeline.jobs.sources import Fleet, LogState, Unreadable, rows_of
from immortal.pipeline.jobs.stream_audit import (
    KINDS,
    Finding,
    Mark,
    Needs,
    Part,
    Result,
    StreamAudit,
    StreamFigures,
    Violation,
    in_words,
)
from immortal.pipeline.reading import NO_LIMIT
from immortal.protocol import decoding

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(slots=True)
class StreamReport:
    """Report on one stream. ``in_flight``: messages made, not executed yet; ``unknown``: in damaged records."""

    sender: str
    receiver: str
    messages: int = 0
    impulses: int = 0
    size_bytes: int = 0
    first: int = 0
    last: int = 0
    made: int = 0
    in_flight: int = 0
    unknown: int = 0
    compared: int = 0
    shifted_marks: int = 0
    restarts: int = 0
    sender_given: bool = True
    receiver_given: bool = True
    violations: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class AuditReport:
    logs: list[LogReport]
    streams: list[StreamReport]
    violations: list[Violation]
    violation_count: int
    counts: dict[str, int]  # violations by kind
    notes: list[str]
    unreadable: Sequence[Unreadable] = ()

    def to_json(self, first: int) -> dict[str, Any]:
        """Return plain values, with the ``first`` violations in full."""
        return {
            "sound": not self.violation_count and not self.unreadable,
            "logs": [{k: v for k, v in asdict(log).items() if k not in ("damages", "unread")} for log in self.logs],
            "streams": [asdict(stream) for stream in self.streams],
            "violation_count": self.violation_count,
            "counts": self.counts,
            "violations": [asdict(violation) for violation in self.violations[:first]],
            "notes": self.notes,
            "unreadable": [asdict(each) for each in self.unreadable],
        }


# One log against itself: is each record there, and sound?


DAMAGES_PER_LOG_MAX = 10_000
"""Maximum of damages of a log that are described; further ones are only counted."""


@dataclass(slots=True)
class LogReport:
    """Report on one log, as far as it was read."""

    instance: str
    records: int = 0
    first: int = 0
    last: int = -1
    last_time_ns: int = 0
    damaged: int = 0
    damages: list[tuple[int, int, str]] = field(default_factory=list)  # first record, last, what
    unread: list[tuple[int, int]] = field(default_factory=list)  # first record, last

    def has_gap(self, after: int, before: int) -> bool:
        """Return True if damaged or unread records lie between two records."""
        gaps = [*((first, last) for first, last, _ in self.damages), *self.unread]
        return any(first < before and last > after for first, last in gaps)

    def add(self, row: Row) -> None:
        """Add the next row, in the order of the log's records; no items: records are missing up to the next row."""
        expected = self.last + 1
        if self.records == self.damaged == len(self.unread) == 0:
            self.first = row.sequence_id
        elif row.sequence_id > expected:
            if self.damages and self.damages[-1][1] == self.last:
                first, _, what = self.damages[-1]
                if what.endswith("missing"):
                    self.damages[-1] = (first, row.sequence_id - 1, what)
                    expected = row.sequence_id
            if row.sequence_id > expected:
                many = f"records {expected} to {row.sequence_id - 1} are missing"
                what = f"record {expected} is missing" if row.sequence_id == expected + 1 else many
                self._damage(expected, row.sequence_id - 1, what)
        if row.position:
            self.unread.append((row.sequence_id, row.position - 1))
            self.last = (row.sequence_id if row.position == NO_LIMIT else row.position) - 1
            return
        if row.reason is not None:
            self._damage(row.sequence_id, row.sequence_id, row.reason)
            self.last = row.sequence_id
            return
        self.records += row.items
        self.last = row.sequence_id + row.items - 1
        self.last_time_ns = row.time_ns

    def _damage(self, first: int, last: int, description: str) -> None:
        self.damaged += 1
        if len(self.damages) < DAMAGES_PER_LOG_MAX:
            self.damages.append((first, last, description))


# Judgement of the fleet, by the results of each stream and the tables of the logs.


_BY_MARKS = ("content", "causality")
"""Checks that use the sender's marks, whose numbers differ if the stream was reset."""

VIOLATIONS_MAX = 100_000
"""Maximum of violations that are kept; further ones are only counted."""


def judge(results: Iterable[Result], states: Mapping[str, LogState]) -> AuditReport:
    """Return the report on a fleet, from the results of all streams and the tables of the logs."""
    return _Judge(states).judge(results)


class _Judge:
    def __init__(self, states: Mapping[str, LogState]) -> None:
        self._states = states
        self._logs: dict[str, LogReport] = {}
        self._figures: dict[tuple[str, str], StreamFigures] = {}
        self._findings: dict[tuple[str, str], list[Finding]] = defaultdict(list)
        self._needs: dict[tuple[str, str], list[Needs]] = defaultdict(list)
        self._violations: list[Violation] = []
        self._counts: Counter[str] = Counter()
        self._notes: list[str] = []
        self._ordering = OrderingAudit()
        self._last_mark_ns: dict[str, int] = defaultdict(int)

    def judge(self, results: Iterable[Result]) -> AuditReport:
        self._sort(results)
        for name, log in sorted(self._logs.items()):
            for first, last, what in log.damages:
                self._add(Violation("damage", "", name, first, last, first, f"the log of {name!r}: {what}"))
            self._counts["damage"] += log.damaged - len(log.damages)
        for key in self._expected_streams():
            self._figures.setdefault(key, StreamFigures())
        streams = [self._judge_stream(*key) for key in sorted(self._figures)]
        self._judge_identities()
        needs = {
            (sender, receiver): each
            for (sender, receiver), each in self._needs.items()
            if not self._offset(sender, receiver)
        }
        firsts = {name: log.first or len(log.unread) for name, log in self._logs.items()}
        for violation in (*impossible_orders(needs, set(self._states)), *self._ordering.violations(firsts)):
            self._add(violation)
        self._note_resets()
        self._note_logs()
        rank = {kind: index for index, kind in enumerate(KINDS)}
        self._violations.sort(key=lambda each: (rank[each.kind], each.receiver, each.sender, each.first, each.record))
        counts = {kind: self._counts[kind] for kind in KINDS if self._counts[kind]}
        logs = [self._logs[name] for name in sorted(self._logs)]
        return AuditReport(logs, streams, self._violations, sum(counts.values()), counts, self._notes)

    def _sort(self, results: Iterable[Result]) -> None:
        for what, sender, receiver, first, last, body in results:
            key = (sender, receiver)
            if what == "log":
                self._logs[receiver] = decoding.decode_json(body, type=LogReport)
            elif what == ORDERED:
                self._ordering.add(sender, receiver, first, last, body)
            elif what == "finding":
                self._findings[key].append(decoding.decode_json(body, type=Finding))
            elif what == "needs":
                self._needs[key].append(Needs(first, last))
            else:
                self._figures[key] = figures = decoding.decode_json(body, type=StreamFigures)
                self._last_mark_ns[sender] = max(self._last_mark_ns[sender], figures.last_mark_ns)
        for name in self._states:
            self._logs.setdefault(name, LogReport(name))

    def _expected_streams(self) -> Iterator[tuple[str, str]]:
        """Yield the streams that the tables know, whatever the records say."""
        for name, state in self._states.items():
            for sender, (_, position) in state.sources.items():
                if position:
                    yield sender, name
            for receiver, position in state.acknowledged.items():
                if position:
                    yield name, receiver

    def _add(self, violation: Violation) -> None:
        self._counts[violation.kind] += 1
        if len(self._violations) < VIOLATIONS_MAX:
            self._violations.append(violation)

    def _judge_stream(self, sender: str, receiver: str) -> StreamReport:
        figures = self._figures[sender, receiver]
        sender_state, receiver_state = self._states.get(sender), self._states.get(receiver)
        renumbered = sender_state is not None and receiver in sender_state.offsets
        report = StreamReport(
            sender,
            receiver,
            figures.messages,
            figures.impulses,
            figures.size_bytes,
            figures.first,
            figures.last,
            figures.made,
            compared=0 if renumbered else figures.compared,
            shifted_marks=figures.shifted_marks,
            restarts=figures.restarts,
            sender_given=sender_state is not None or is_outside(sender),
            receiver_given=receiver_state is not None or is_outside(receiver),
        )
        before = Counter(self._counts)
        kept: Counter[str] = Counter()
        for finding in self._findings[sender, receiver]:
            kept[finding.kind] += 1
            if renumbered and finding.kind in _BY_MARKS:
                continue
            if finding.kind == "lost" and self._explain(report, finding):
                continue
            found = finding.kind, sender, receiver, finding.first, finding.last, finding.record, finding.text
            self._add(Violation(*found))
        self._counts += Counter(figures.counts) - kept  # findings of which only the number is known
        if receiver_state is not None:
            self._judge_end(report, figures, sender_state, receiver_state)
        has_marks = sender_state is not None and not sender_state.live and not self._logs[sender].unread
        if sender_state is not None and has_marks and receiver not in sender_state.offsets:
            self._judge_unmarked(report, figures, sender_state)
        report.violations = dict(self._counts - before)
        return report

    def _explain(self, report: StreamReport, finding: Finding) -> bool:
        """Return True if the messages can have been executed in records that are trimmed or damaged."""
        log = self._logs[report.receiver]
        if finding.behind_record < 0 and log.first > 0:
            return True
        if log.has_gap(finding.behind_record, finding.record):
            report.unknown += finding.last - finding.first + 1
            return True
        return False

    def _judge_end(
        self, report: StreamReport, figures: StreamFigures, sender_state: LogState | None, receiver_state: LogState
    ) -> None:
        """Judge messages after the last executed one: they are in flight, or lost."""
        sender, receiver = report.sender, report.receiver
        log = self._logs[receiver]
        by_receiver = receiver_state.sources.get(sender, (0, 0))[1]
        offset = self._offset(sender, receiver)
        by_sender = sender_state.acknowledged.get(receiver, 0) - offset if sender_state is not None else 0
        known = max(by_receiver, by_sender)
        if known > figures.last:
            is_kept = figures.last_record >= 0 or log.first == 0
            if log.has_gap(figures.last_record, 1 << 63):
                report.unknown += known - figures.last
            elif is_kept:
                who = f"{receiver!r} has acknowledged" if by_sender >= by_receiver else "its own table says it has"
                text = (
                    f"{in_words(sender)} sent messages {figures.last + 1} to {known}, which {who}:"
                    f" they are not in the log of {receiver!r}, which ends with record {log.last}"
                )
                self._add(Violation("lost", sender, receiver, figures.last + 1, known, -1, text))
        report.in_flight = max(0, figures.made - offset - max(known, figures.last))

    def _judge_unmarked(self, report: StreamReport, figures: StreamFigures, sender_state: LogState) -> None:
        """Report calls after the last mark that were sent before the sender last logged its streams' positions."""
        known = max(figures.made, sender_state.checkpointed.get(report.receiver, 0))
        last_said_ns = self._last_mark_ns[report.sender]
        for first, last, sent_ns, record in figures.unmarked:
            if last > known and sent_ns < last_said_ns:
                text = (
                    f"{report.receiver!r} executed messages {max(first, known + 1)} to {last} of {report.sender!r},"
                    f" which had made only {known} when they were sent"
                )
                violation = Violation("invented", report.sender, report.receiver, first, last, record, text)
                self._add(violation)

    def _judge_identities(self) -> None:
        """Check that each log knows the others by their committer IDs."""
        for name, state in sorted(self._states.items()):
            known = [(sender, committer, "sender") for sender, (committer, _) in state.sources.items() if committer]
            known += [(receiver, committer, "receiver") for receiver, committer in state.peers.items()]
            for other, committer_id, role in sorted(known):
                actual = self._states.get(other)
                if actual is None or actual.committer_id == committer_id:
                    continue
                text = (
                    f"the log of {name!r} knows its {role} {other!r} as committer {committer_id}, the log of"
                    f" {other!r} given here is committer {actual.committer_id}'s: it was wiped or swapped"
                )
                sender, receiver = (other, name) if role == "sender" else (name, other)
                self._add(Violation("identity", sender, receiver, 0, 0, -1, text))

    def _offset(self, sender: str, receiver: str) -> int:
        state = self._states.get(sender)
        return state.offsets.get(receiver, 0) if state is not None else 0

    def _note_resets(self) -> None:
        for (sender, receiver), figures in sorted(self._figures.items()):
            if figures.restarts:
                self._notes.append(
                    f"the stream from {sender!r} to {receiver!r} began anew, since the log of {sender!r} was replaced:"
                    f" only the last one is compared"
                )
            if self._offset(sender, receiver):
                self._notes.append(
                    f"the stream from {sender!r} to {receiver!r} was reset, since the log of {receiver!r} was replaced:"
                    f" its contents are not compared"
                )

    def _note_logs(self) -> None:
        for name, state in sorted(self._states.items()):
            if state.cut:
                self._notes.append(
                    f"the log of {name!r} was cut by hand: what its peers had of it then has no cause any more"
                )
        named = {name for stream in self._figures for name in stream if not is_outside(name)}
        missing = sorted(named - self._states.keys())
        if missing:
            names = ", ".join(missing[:20]) + (", ..." if len(missing) > 20 else "")
            self._notes.append(f"no log was given of {names}: of their streams only one end is checked")


# Test if the records of several logs can have been written in any order at all.


def impossible_orders(needs: Mapping[tuple[str, str], list[Needs]], known: set[str]) -> list[Violation]:
    """Return the records that cannot have been written in any order: each waits for another one.

    ``needs``: by (sender, receiver), the receiver's record and the sender's record that must be earlier; ``known``: the
    instances whose logs are there. Each log is advanced while the records that its next record needs are there.
    """
    waiting_for: dict[str, list[tuple[int, str, int]]] = defaultdict(list)  # receiver: (record, sender, its record)
    for (sender, receiver), each in needs.items():
        if sender in known and receiver in known:
            waiting_for[receiver] += [(one.record, sender, one.sender_record) for one in each]
    everything = 1 << 63
    done = dict.fromkeys(known, everything)
    next_index: dict[str, int] = {}
    for receiver, records in waiting_for.items():
        records.sort()
        next_index[receiver] = 0
        done[receiver] = records[0][0] - 1
    sleepers: dict[str, list[tuple[int, str]]] = defaultdict(list)  # sender: (record waited for, receiver)
    ready = list(waiting_for)
    while ready:
        receiver = ready.pop()
        records = waiting_for[receiver]
        index = next_index[receiver]
        while True:
            done[receiver] = records[index][0] - 1 if index < len(records) else everything
            if index == len(records):
                break
            _, sender, sender_record = records[index]
            if done[sender] < sender_record:
                heapq.heappush(sleepers[sender], (sender_record, receiver))
                break
            index += 1
        next_index[receiver] = index
        asleep = sleepers[receiver]
        while asleep and asleep[0][0] <= done[receiver]:
            ready.append(heapq.heappop(asleep)[1])
    stuck = []
    for receiver, records in sorted(waiting_for.items()):
        if next_index[receiver] < len(records):
            record, sender, sender_record = records[next_index[receiver]]
            text = (
                f"record {record} of {receiver!r} holds a message made behind record {sender_record} of {sender!r},"
                f" which itself lies behind what follows record {record} of {receiver!r}: an effect before its cause"
            )
            stuck.append(Violation("causality", sender, receiver, 0, 0, record, text))
    return stuck


TOLERANCE_MS = 1_000
"""Default for how much clocks can differ: synchronized clocks differ less."""

_SIGN = 1 << 64
_ORDER = ("sender", "receiver", "what", "sequence_id", "batch")
_RESULT = pa.schema(
    [
        ("what", pa.string()),
        ("sender", pa.string()),
        ("receiver", pa.string()),
        ("first", pa.int64()),
        ("last", pa.int64()),
        ("body", pa.string()),
    ]
)
_RESULTS_PER_BATCH = 10_000


def audit(spark: SparkSession, fleet: Fleet, *, tolerance_ms: int = TOLERANCE_MS) -> AuditReport:
    """Audit all streams of ``fleet``. ``tolerance_ms``: by how much the machines' clocks can differ."""
    report = judge(results_of(spark, fleet.evidence(spark), tolerance_ms * 1_000_000), fleet.states)
    report.unreadable = fleet.unreadable
    return report


def results_of(spark: SparkSession, evidence: DataFrame, tolerance_ns: int = 0) -> Iterator[Result]:
    """Run the audit of ``evidence`` in the workers and yield its results."""
    partitions = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    results = (
        evidence.repartition(partitions, "sender", "receiver")
        .sortWithinPartitions(*_ORDER)
        .mapInArrow(partial(audit_partition, tolerance_ns=tolerance_ns), from_arrow_schema(_RESULT))
        .toArrow()
    )
    yield from rows_of(results.to_batches())


# --- in the workers --------------------------------------------------------------------------------------------------


def audit_partition(batches: Iterable[pa.RecordBatch], tolerance_ns: int) -> Iterator[pa.RecordBatch]:
    """Convert sorted evidence of whole streams to results."""
    results: list[Result] = []
    for result in audit_rows(map(Row._make, rows_of(batches)), tolerance_ns):
        results.append(result)
        if len(results) >= _RESULTS_PER_BATCH:
            yield _to_arrow(results)
            results = []
    if results:
        yield _to_arrow(results)


def _to_arrow(results: list[Result]) -> pa.RecordBatch:
    columns = zip(zip(*results, strict=True), _RESULT, strict=True)
    return pa.RecordBatch.from_arrays([pa.array(values, column.type) for values, column in columns], schema=_RESULT)


def audit_rows(rows: Iterable[Row], tolerance_ns: int = 0) -> Iterator[Result]:
    """Audit rows one by one, as :func:`audit_partition` does."""
    key: tuple[str, str] | None = None
    stream: StreamAudit | None = None
    log: LogReport | None = None
    for row in rows:
        if (row.sender, row.receiver) != key:
            yield from _results(key, stream, log)
            key = (row.sender, row.receiver)
            log = LogReport(row.receiver) if row.what == LOG else None
            stream = None if row.what == LOG else StreamAudit(row.sender, row.receiver, tolerance_ns)
        if log is not None:
            log.add(row)
        elif stream is not None and row.what == MARK:
            stream.add_mark(Mark(row.position, row.checksum % _SIGN, row.sequence_id, row.time_ns))
        elif stream is not None:
            yield from ordered_results(row)
            part = Part(row.position, row.items, row.impulses, row.sent_ns, row.payload or b"")
            stream.add_batch(row.sequence_id, row.time_ns, part)
    yield from _results(key, stream, log)


def _results(key: tuple[str, str] | None, stream: StreamAudit | None, log: LogReport | None) -> Iterator[Result]:
    if key is None:
        return
    if log is not None:
        yield "log", *key, log.first, log.last, json.dumps(asdict(log))
    if stream is not None:
        stream.finish()
        for finding in stream.findings:
            yield "finding", *key, finding.first, finding.last, json.dumps(asdict(finding))
        for needs in stream.needs:
            yield "needs", *key, needs.record, needs.sender_record, ""
        yield "stream", *key, stream.figures.first, stream.figures.last, json.dumps(asdict(stream.figures))
