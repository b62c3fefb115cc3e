"""Messages of several logs in the order of time, with one record of each log in memory; and the noted times of them.

An instance can note when messages arrived, were durable and were executed (protocol/timings.py). Notes are beside the
log and are less trusted: damaged or lost notes, and those of another log, are skipped.
"""

from __future__ import annotations

import heapq
import os
import stat
import sys
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import msgspec
from msgspec import Struct, field

from immortal.coordinator.core.formatting import Methods, effect_text, method_name
from immortal.coordinator.log.reader import LogReader
from immortal.coordinator.log.record_contents import DecodedMessage, DecodedRecord, read_record, waiting_caller
from immortal.protocol import decoding
from immortal.protocol.messages import IncomingRpc, RpcKind
from immortal.protocol.system_methods import CLOCK_METHOD_ID, EFFECT_METHOD_ID
from immortal.protocol.timings import (
    APP,
    COORDINATOR,
    HEADER_SIZE_BYTES,
    ROW_SIZE_BYTES,
    TimingKind,
    TimingRow,
    decode_row,
    decode_segment_header,
    segments,
)
from immortal.protocol.trailer import BatchKind

BLOCK_ROWS = 64  # read at once
DAMAGED_RUN_MAX = 1_000  # damaged rows in sequence: a segment with more is not used
SPAN_NS_MAX = 7 * 86_400 * 10**9  # two notes of one message that are further apart do not belong together

CLIENTS = "clients"
OUTSIDE = "outside"
"""Caller of impulses and of the initial message."""

_RAW = decoding.Decoder(list[msgspec.Raw])


class MessageTiming(Struct, frozen=True):
    """Times of one message in ns since 1970 by the instance's clock, in order; None if not noted.

    ``given_ns``: passed to the app's connection. ``ended_ns``: the handler returned, or began to wait.
    """

    arrived_ns: int | None
    submitted_ns: int
    durable_ns: int | None
    given_ns: int | None
    began_ns: int | None
    ended_ns: int | None


class RecordTiming(Struct):
    """Times of one record on the monotonic clock."""

    commit: TimingRow
    arrived: dict[int, int] = field(default_factory=dict)  # by the index of a batch's first message
    handled: dict[int, tuple[int, int]] = field(default_factory=dict)  # by message

    def message_timing(self, message: int, first_of_batch: int, time_ns: int, accepted_ns: int | None) -> MessageTiming:
        """Return the times of one message. ``time_ns``: of the record, the time of its submission. ``accepted_ns``:
        when the coordinator accepted the message, if the log says so."""
        submitted = self.commit.first_ns
        last_ns = time_ns

        def then(monotonic_ns: int) -> int | None:
            """Convert a monotonic time to the instance's time."""
            nonlocal last_ns
            if not monotonic_ns or not -SPAN_NS_MAX < monotonic_ns - submitted < SPAN_NS_MAX:
                return None
            last_ns = max(last_ns, time_ns + monotonic_ns - submitted)
            return last_ns

        arrived_ns = accepted_ns
        if (arrived := self.arrived.get(first_of_batch)) is not None and 0 <= submitted - arrived < SPAN_NS_MAX:
            arrived_ns = time_ns - (submitted - arrived)
        durable_ns, given_ns = then(self.commit.second_ns), then(self.commit.third_ns)
        began, ended = self.handled.get(message, (0, 0))
        return MessageTiming(
            None if arrived_ns is None else min(arrived_ns, time_ns), time_ns, durable_ns, given_ns,
            then(began), then(ended),
        )  # fmt: skip


class Timings:
    """Reader of the timings in ``folder`` for the log of ``committer_id``. For one thread."""

    def __init__(self, folder: Path, committer_id: int) -> None:
        self.problems: list[str] = []
        """Descriptions of skipped notes."""
        self._segments = {writer: list(self._open(folder, writer, committer_id)) for writer in (COORDINATOR, APP)}
        self._known: tuple[int, RecordTiming | None] = (-1, None)

    def record_timing(self, sequence_id: int) -> RecordTiming | None:
        """Return the timing of a record; None if nothing is known about it."""
        if self._known[0] != sequence_id:
            self._known = sequence_id, self._read(sequence_id)
        return self._known[1]

    def _open(self, folder: Path, writer: str, committer_id: int) -> Iterator[_Segment]:
        """Yield the segments of the log, the newest first."""
        for path in reversed(segments(folder, writer)):
            try:
                segment = _Segment(path)
            except (OSError, ValueError) as error:
                self.problems.append(f"{path} can't be read: {error}")
                continue
            if segment.committer_id is None and segment.size_bytes:
                self.problems.append(f"{path} holds no times of an instance")
            if segment.committer_id == committer_id:
                yield segment

    def _read(self, sequence_id: int) -> RecordTiming | None:
        rows = self._rows(COORDINATOR, sequence_id)
        commits = [row for row in rows if row.kind == TimingKind.COMMIT and row.first_ns]
        if not commits:
            return None
        found = RecordTiming(commits[-1])
        for row in rows:
            if row.kind == TimingKind.ARRIVED:
                found.arrived[row.message] = row.first_ns
        for row in self._rows(APP, sequence_id):
            if row.kind == TimingKind.HANDLED:
                found.handled[row.message] = row.first_ns, row.second_ns
        return found

    def _rows(self, writer: str, sequence_id: int) -> list[TimingRow]:
        """Return rows from the newest segment with the record, and from the one before if it can begin there."""
        found: list[TimingRow] = []
        for segment in list(self._segments[writer]):
            try:
                rows = segment.rows(sequence_id)
            except (OSError, ValueError) as error:
                self.problems.append(f"{segment.path} is damaged: {error}")
                self._segments[writer].remove(segment)
                continue
            if segment.is_news:
                segment.is_news = False
                self.problems.append(f"{segment.path} has damaged rows: they are passed over")
            found = rows + found
            if rows and segment.row(0) != rows[0]:
                break
        return found


class _Segment:
    """Reader of one file of timings. A bisection finds rows, so that only few are read."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises OSError, ValueError."""
        self.path = path
        self.is_news = False  # True after the first damaged row, until it is reported
        self._met_damage = False
        self._block, self._rows = -1, b""  # the block that was read last, and its rows
        header = self._read(0, HEADER_SIZE_BYTES)
        self.committer_id, self.size_bytes = decode_segment_header(header), path.stat().st_size
        self._header_crc = zlib.crc32(header)
        self._count = max(self.size_bytes - HEADER_SIZE_BYTES, 0) // ROW_SIZE_BYTES
        self._at = 0  # after the rows found last: the next ones are close to it

    def rows(self, sequence_id: int) -> list[TimingRow]:
        """Return the rows of a record. Raises OSError, and ValueError if too many rows are damaged."""
        found: list[TimingRow] = []
        if not self._count or not self._bounds[0] <= sequence_id <= self._bounds[1]:
            return found
        at = self._first_from(sequence_id)
        damaged = 0
        while at < self._count:
            row = self.row(at)
            at += 1
            if row is None:
                damaged += 1
                self._check(damaged)
            elif row.sequence_id == sequence_id:
                found.append(row)
                damaged = 0
                self._at = at
            else:
                break
        return found

    @cached_property
    def _bounds(self) -> tuple[int, int]:
        """The first and the last record; the last is sys.maxsize if the last row is damaged."""
        last = self.row(self._count - 1)
        return self._sequence_id(0), sys.maxsize if last is None else last.sequence_id

    def _read(self, offset: int, size_bytes: int) -> bytes:
        """Read bytes of the file. It is not kept open (there can be many) nor mapped, so that disk failures raise."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("it is no file")
            return os.pread(descriptor, size_bytes, offset)
        finally:
            os.close(descriptor)

    def _first_from(self, sequence_id: int) -> int:
        """Return the index of the first row of that record or of a later one."""
        at, step = self._at, 1
        if at and self._sequence_id(at - 1) >= sequence_id:
            at = 0
        end = at
        while end < self._count and self._sequence_id(end) < sequence_id:
            at, end, step = end + 1, end + step, step * 2
        rows = range(at, min(end, self._count))
        self._at = at + bisect_left(rows, sequence_id, key=self._sequence_id)
        return self._at

    def _sequence_id(self, at: int) -> int:
        """Return the sequence ID of the first undamaged row from ``at`` on."""
        for damaged in range(self._count - at):
            if (row := self.row(at + damaged)) is not None:
                return row.sequence_id
            self._check(damaged)
        return sys.maxsize

    def row(self, at: int) -> TimingRow | None:
        block, start = at // BLOCK_ROWS, at % BLOCK_ROWS * ROW_SIZE_BYTES
        if block != self._block:
            offset = HEADER_SIZE_BYTES + block * BLOCK_ROWS * ROW_SIZE_BYTES
            self._rows = self._read(offset, BLOCK_ROWS * ROW_SIZE_BYTES)
            self._block = block
        row = decode_row(self._rows[start : start + ROW_SIZE_BYTES], self._header_crc)
        if row is None and not self._met_damage:
            self._met_damage = self.is_news = True
        return row

    def _check(self, damaged: int) -> None:
        if damaged >= DAMAGED_RUN_MAX:
            raise ValueError(f"{damaged} rows one after the other can't be read")


# Messages.


class Source(Struct):
    """Log to read. ``first``, ``last``: sequence IDs, both included; None: the log's own ends."""

    reader: LogReader
    methods: Methods
    first: int | None = None
    last: int | None = None
    problems: list[str] = field(default_factory=list)
    """Descriptions of records that were left out."""
    timings: Timings | None = None
    """Times noted beside the log."""

    @property
    def instance(self) -> str:
        return self.reader.identity.instance_name


class Executed(Struct, frozen=True):
    """Logged message: sent by ``caller`` at ``sent_ns``, durable and next in turn for ``instance`` at ``time_ns``.

    Two machines have two clocks: if a message was sent after it arrived by these, ``sent_ns`` is the arrival.

    ``waiter``: (caller that waits for the answer, the number of its call). ``answers``: (who answered, to whom, the
    number). ``effect``: the number of the effect whose result it is. ``told_ns``: the time in a message of the clock.
    ``effect_text``: the effect, for people.
    ``trace_context``: from a client, or "". ``width_ns``: its share of the time until the next record;
    None if unknown. ``timing``: its noted times, if any.
    """

    instance: str
    committer_id: int
    sequence_id: int
    index: int
    caller: str
    kind: int
    position: int
    sent_ns: int
    time_ns: int
    method: str
    size_bytes: int
    width_ns: int | None
    waiter: tuple[str, int] | None = None
    answers: tuple[str, str, int] | None = None
    trace_context: str = ""
    effect: int | None = None
    effect_text: str = ""
    told_ns: int | None = None
    timing: MessageTiming | None = None

    @property
    def place(self) -> tuple[int, int]:
        return self.sequence_id, self.index


def by_time(sources: Sequence[Source]) -> Iterator[Executed]:
    """Yield all messages, by the time of their records. Raises LogError."""
    yield from heapq.merge(*(messages_of(source) for source in sources), key=lambda message: message.time_ns)


def messages_of(source: Source) -> Iterator[Executed]:
    """Yield a log's messages in order. Damaged records are left out and described in ``source.problems``."""
    before: DecodedRecord | None = None
    committer_id = source.reader.identity.committer_id
    for logged in source.reader.records(source.first, source.last):
        record = logged.problem or read_record(logged.value, logged.sequence_id, committer_id, whole=True)
        if isinstance(record, str):
            source.problems.append(f"{source.instance}: {record}")
            continue
        if before is not None:
            yield from executed(source, before, record.trailer.time_ns)
        before = record
    if before is not None:
        yield from executed(source, before, None)


def executed(source: Source, record: DecodedRecord, next_ns: int | None) -> Iterator[Executed]:
    """Yield the messages of one record. ``next_ns``: the time of the next record."""
    instance, time_ns = source.instance, record.trailer.time_ns
    share = None if next_ns is None else max(next_ns - time_ns, 0) // max(len(record.messages), 1)
    timing = None if source.timings is None else source.timings.record_timing(record.header.sequence_id)
    for index, message in enumerate(record.messages):
        kind, rpc = message.source.kind, message.rpc
        caller = message.source.name or instance
        waiter = None if rpc is None or kind == BatchKind.INITIAL else waiting_caller(rpc)
        answers = None
        if rpc is not None and rpc.kind != RpcKind.CALL and (number := _number(rpc)) is not None:
            answers = caller, instance, number
        yield Executed(
            instance,
            source.reader.identity.committer_id,
            record.header.sequence_id,
            index,
            {BatchKind.CLIENT: CLIENTS, BatchKind.IMPULSES: OUTSIDE, BatchKind.INITIAL: OUTSIDE}.get(kind, caller),  # type: ignore[call-overload]
            kind,
            message.position,
            min(message.source.send_time_ns, time_ns),
            time_ns,
            _name(kind, rpc, source.methods),
            len(message.arguments),
            share,
            None if waiter is None else (waiter[0] or instance, waiter[1]),
            answers,
            message.source.trace_context,
            _own_number(rpc, EFFECT_METHOD_ID),
            "" if rpc is None else effect_text(rpc),
            _own_number(rpc, CLOCK_METHOD_ID),
            None if timing is None else _timing(timing, message, index, time_ns),
        )


def _timing(timing: RecordTiming, message: DecodedMessage, index: int, time_ns: int) -> MessageTiming:
    batch = message.source
    is_own = batch.kind in (BatchKind.IMPULSES, BatchKind.INITIAL) or not batch.name
    first_of_batch = index - (message.position - batch.first_position)
    return timing.message_timing(index, first_of_batch, time_ns, batch.send_time_ns if is_own else None)


def _name(kind: int, rpc: IncomingRpc | None, methods: Methods) -> str:
    if kind == BatchKind.INITIAL or rpc is None:
        return "initial message"
    name = method_name(rpc.method_id, rpc.kind, "", methods) or f"method {rpc.method_id}"
    if rpc.kind == RpcKind.CALL:
        return name
    return f"exception of {name}" if rpc.kind == RpcKind.RAISED else f"answer of {name}"


def _own_number(rpc: IncomingRpc | None, method_id: int) -> int | None:
    """Return the first argument of a message of the instance to itself; None for another message."""
    return _number(rpc) if rpc is not None and (rpc.kind, rpc.method_id) == (RpcKind.CALL, method_id) else None


def _number(rpc: IncomingRpc) -> int | None:
    try:
        return decoding.decode(_RAW.decode(rpc.arguments)[0], type=int)
    except (ValueError, IndexError):
        return None
