"""The messages of several logs, by time, one record of each log in memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct, field

from immortal.coordinator.core.formatting import Methods, effect_words, method_name
from immortal.coordinator.log import LogReader
from immortal.coordinator.log.record_decoder import DecodedMessage, DecodedRecord, read_record
from immortal.protocol import decoding
from immortal.protocol.messages import IncomingRpc, RpcKind, RpcType
from immortal.protocol.system_methods import CLOCK_METHOD_ID, EFFECT_METHOD_ID
from immortal.protocol.trailer import BatchKind
from immortal.replay.trace.timings import MessageTiming, RecordTiming, Timings

CLIENTS = "clients"
OUTSIDE = "outside"
"""As a caller: who sent impulses, or the initial message."""

_RAW = decoding.Decoder(list[msgspec.Raw])


class Source(Struct):
    """One log. ``first``, ``last``: sequence IDs, both included; None: the log's own ends."""

    reader: LogReader
    methods: Methods
    first: int | None = None
    last: int | None = None
    problems: list[str] = field(default_factory=list)
    """Records that were left out, in words."""
    timings: Timings | None = None
    """What was noted beside the log."""

    @property
    def instance(self) -> str:
        return self.reader.identity.instance_name


class Executed(Struct, frozen=True):
    """A logged message: sent by ``caller`` at ``sent_ns``, durable and next in turn for ``instance`` at ``time_ns``.

    Two machines have two clocks: what was sent after it came, by these, counts as sent when it came.

    ``waiter``: (who waits for its answer, the number of the call there). ``answers``: (who answered, to whom, the
    number). ``effect``: the number of the effect whose result it is. ``told_ns``: what a message of the clock says.
    ``effect_words``: which effect that was, for people.
    ``trace_context``: that a client gave, or "". ``width_ns``: its share of the time until the next record;
    None where nothing says it. ``timing``: what was noted of it, if anything.
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
    effect_words: str = ""
    told_ns: int | None = None
    timing: MessageTiming | None = None

    @property
    def place(self) -> tuple[int, int]:
        return self.sequence_id, self.index


def by_time(sources: Sequence[Source]) -> Iterator[Executed]:
    """All messages, by the time of their records. Raises LogError."""
    yield from heapq.merge(*(messages_of(source) for source in sources), key=lambda message: message.time_ns)


def messages_of(source: Source) -> Iterator[Executed]:
    """In the log's order. Damaged records are left out, and told in the source's ``problems``."""
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
    """The messages of one record. ``next_ns``: the time of the next one."""
    instance, time_ns = source.instance, record.trailer.time_ns
    share = None if next_ns is None else max(next_ns - time_ns, 0) // max(len(record.messages), 1)
    timing = None if source.timings is None else source.timings.of(record.header.sequence_id)
    for index, message in enumerate(record.messages):
        kind, rpc = message.source.kind, message.rpc
        caller = message.source.name or instance
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
            None if rpc is None or kind == BatchKind.INITIAL else _waiter(rpc, instance),
            answers,
            message.source.trace_context,
            _own_number(rpc, EFFECT_METHOD_ID),
            "" if rpc is None else effect_words(rpc),
            _own_number(rpc, CLOCK_METHOD_ID),
            None if timing is None else _timing(timing, message, index, time_ns),
        )


def _timing(timing: RecordTiming, message: DecodedMessage, index: int, time_ns: int) -> MessageTiming:
    batch = message.source
    is_own = batch.kind in (BatchKind.IMPULSES, BatchKind.INITIAL) or not batch.name
    first_of_batch = index - (message.position - batch.first_position)
    return timing.of(index, first_of_batch, time_ns, batch.send_time_ns if is_own else None)


def _name(kind: int, rpc: IncomingRpc | None, methods: Methods) -> str:
    if kind == BatchKind.INITIAL or rpc is None:
        return "initial message"
    name = method_name(rpc.method_id, rpc.kind, "", methods) or f"method {rpc.method_id}"
    if rpc.kind == RpcKind.CALL:
        return name
    return f"exception of {name}" if rpc.kind == RpcKind.RAISED else f"answer of {name}"


def _waiter(rpc: IncomingRpc, instance: str) -> tuple[str, int] | None:
    """Return (caller, number) of a call that waits, as the SDK encodes them; other apps' arguments may be any bytes."""
    if (rpc.kind, rpc.rpc_type) != (RpcKind.CALL, RpcType.ASYNC):
        return None
    try:
        caller, number, *_ = _RAW.decode(rpc.arguments)
        return decoding.decode(caller, type=str) or instance, decoding.decode(number, type=int)
    except ValueError:
        return None


def _own_number(rpc: IncomingRpc | None, method_id: int) -> int | None:
    """The first argument of a message of the instance to itself; None for another message."""
    return _number(rpc) if rpc is not None and (rpc.kind, rpc.method_id) == (RpcKind.CALL, method_id) else None


def _number(rpc: IncomingRpc) -> int | None:
    try:
        return decoding.decode(_RAW.decode(rpc.arguments)[0], type=int)
    except (ValueError, IndexError):
        return None
