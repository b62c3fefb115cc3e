"""Spans of messages: a call on its way, and its execution at the receiver.

    call     from its sending to its durability at the receiver
    handler  from there to the sending of its answer, if a caller waited for one and the answer is in a log that is
             read; otherwise it has no length, since a log does not say how long a handler ran
    effect   from the record at which its handler began it, which a replay reports, to the sending of its result
    timer    from there to the message of the clock in the log that said that it was due

If the instance notes times (:class:`immortal.replay.trace.messages.Timings`), a handler's span is from its begin to its
return or its answer, and there are two more spans:

    queue    from a message's arrival to its handler's begin, or to its delivery to the app if the app notes nothing
    commit   from the submission of its record to the log to its durability

IDs depend only on (instance, its log, record, message). So repeated runs give a message the same span, and a span leads
back to its message.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, Protocol, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from immortal.protocol.extensions import RandomDraw, decode_numbers
from immortal.protocol.trace_context import split_context
from immortal.replay.trace.messages import Executed, MessageTiming

OPEN_CALLS_MAX = 100_000  # waiting for answers; beyond it the oldest end without an answer
TRACES_KNOWN_MAX = 1_000_000  # handlers whose traces are kept for their calls


class Span(Struct, frozen=True):
    """Span of a trace. ``kind``: see the module. Times are ns since 1970, UTC."""

    instance: str
    name: str
    kind: Literal["call", "handler", "effect", "timer", "queue", "commit"]
    trace_id: str
    span_id: str
    parent_id: str | None
    start_ns: int
    end_ns: int
    attributes: Mapping[str, str | int] = field(default_factory=dict)
    is_answered: bool = False  # True: a handler's span ends with the sending of its answer


class Causes(Protocol):
    """Source of the causes of calls; see :mod:`immortal.replay.trace.causes`."""

    def cause_of(self, caller: str, receiver: str, position: int) -> tuple[int, int, int] | None:
        """Return the message that caused a call: (the caller's committer ID, record, message); None if unknown."""

    def waits(self, instance: str) -> Waits | None:
        """Return the waits of the instance's handlers; None if unknown."""


def handler_id(instance: str, committer_id: int, sequence_id: int, index: int) -> str:
    return _digest("handler", instance, committer_id, sequence_id, index, size_bytes=8)


def moment_path(instance: str, sequence_id: int, index: int) -> str:
    """Return the URL path of a moment in `immortal web`."""
    return f"/i/{quote(instance, safe='')}/travel?at={sequence_id}:{index}"


def _digest(*parts: object, size_bytes: int) -> str:
    text = "\0".join(map(str, parts))
    return hashlib.blake2b(text.encode(), digest_size=size_bytes, person=b"immortal.span").hexdigest()


class Spans:
    """Builder of spans from messages in the order of time. ``causes`` None: each message begins its own trace."""

    def __init__(self, causes: Causes | None = None) -> None:
        self._causes = causes
        self._open: OrderedDict[tuple[str, str, int], Span] = OrderedDict()  # by receiver, caller, number
        self._traces: OrderedDict[str, str] = OrderedDict()  # trace ID by a handler's span ID
        self._seen_since_ns: dict[str, int] = {}  # time of each instance's first message

    def all_of(self, messages: Iterable[Executed]) -> Iterator[Span]:
        for message in messages:
            yield from self.spans_of(message)
        yield from self.rest()

    def rest(self) -> Iterator[Span]:
        """Yield the spans of handlers whose answer has not arrived."""
        while self._open:
            yield self._open.popitem(last=False)[1]

    def spans_of(self, message: Executed) -> Iterator[Span]:
        """Yield the spans that this message completes; a handler with a waiting caller is not complete yet."""
        if message.answers is not None and (waited := self._open.pop(message.answers, None)) is not None:
            yield replace(waited, end_ns=max(message.sent_ns, waited.start_ns), is_answered=True)
        self._seen_since_ns.setdefault(message.instance, message.time_ns)
        own = message.instance, message.committer_id, message.sequence_id, message.index
        span_id, call_id = handler_id(*own), _digest("call", *own, size_bytes=8)
        parent_id, trace_id = self._cause(message)
        if message.effect is not None and (effect := self._effect(message, message.effect)) is not None:
            parent_id, trace_id = effect.span_id, effect.trace_id
            yield effect
        if message.told_ns is not None:
            yield from self._timers(message, message.told_ns)
        trace_id = trace_id or _digest("trace", *own, size_bytes=16)
        if self._causes is not None:
            self._traces[span_id] = trace_id
            if len(self._traces) > TRACES_KNOWN_MAX:
                self._traces.popitem(last=False)
        attributes: dict[str, str | int] = {
            "immortal.caller": message.caller,
            "immortal.instance": message.instance,
            "immortal.record": message.sequence_id,
            "immortal.message": message.index,
            "immortal.position": message.position,
            "immortal.arguments_size_bytes": message.size_bytes,
            "immortal.moment": moment_path(message.instance, message.sequence_id, message.index),
            **_effect_attribute(message),
        }
        timing = message.timing
        arrived_ns = None if timing is None else timing.arrived_ns
        durable_ns = None if timing is None else timing.durable_ns
        yield Span(
            message.caller,
            f"{message.method} on its way" if message.answers else f"call {message.method}",
            "call",
            trace_id,
            call_id,
            parent_id,
            message.sent_ns if arrived_ns is None else min(message.sent_ns, arrived_ns),
            durable_ns or message.time_ns,
            attributes,
        )
        start_ns = end_ns = message.time_ns
        if timing is not None:
            start_ns = timing.began_ns or timing.given_ns or timing.durable_ns or start_ns
            end_ns = timing.ended_ns or start_ns
            yield from self._noted(message, timing, trace_id, call_id, attributes)
        handler = Span(
            message.instance, message.method, "handler", trace_id, span_id, call_id, start_ns, end_ns, attributes
        )
        if message.waiter is None:
            yield handler
            return
        self._open[message.instance, *message.waiter] = handler
        if len(self._open) > OPEN_CALLS_MAX:
            yield self._open.popitem(last=False)[1]

    @staticmethod
    def _noted(
        message: Executed,
        timing: MessageTiming,
        trace_id: str,
        call_id: str,
        attributes: Mapping[str, str | int],
    ) -> Iterator[Span]:
        """Yield the spans of noted times: the queue, child of the call, and the commit, child of the queue."""
        own = message.instance, message.committer_id, message.sequence_id, message.index
        parent_id, name = call_id, message.instance
        until_ns = timing.began_ns or timing.given_ns
        if timing.arrived_ns is not None and until_ns is not None:
            parent_id = _digest("queue", *own, size_bytes=8)
            start_ns = timing.arrived_ns
            yield Span(name, "queue", "queue", trace_id, parent_id, call_id, start_ns, until_ns, attributes)
        if timing.durable_ns is not None:
            span_id = _digest("commit", *own, size_bytes=8)
            times_ns = timing.submitted_ns, timing.durable_ns
            yield Span(name, "commit", "commit", trace_id, span_id, parent_id, *times_ns, attributes)

    def knows(self, span_id: str) -> bool:
        """Return True if that handler's trace is known, so that its calls can be in it."""
        return span_id in self._traces

    def _effect(self, message: Executed, number: int) -> Span | None:
        waits = None if self._causes is None else self._causes.waits(message.instance)
        begun = None if waits is None else waits.effect(number, message.sequence_id)
        return None if begun is None else self._wait("effect", begun, message, message.sent_ns)

    def _timers(self, message: Executed, told_ns: int) -> Iterator[Span]:
        waits = None if self._causes is None else self._causes.waits(message.instance)
        since_ns = self._seen_since_ns[message.instance]
        for begun in () if waits is None else waits.timers(since_ns, told_ns, message.sequence_id):
            yield self._wait("timer", begun, message, message.time_ns)

    def _wait(self, kind: Literal["effect", "timer"], wait: StartedWait, message: Executed, end_ns: int) -> Span:
        own = message.instance, message.committer_id, wait.number
        parent_id = None if wait.handler is None else handler_id(*own[:2], *wait.handler)
        trace_id = None if parent_id is None else self._traces.get(parent_id)
        attributes: dict[str, str | int] = {
            "immortal.instance": message.instance,
            "immortal.began_record": wait.sequence_id,
            "immortal.record": message.sequence_id,
            "immortal.message": message.index,
            "immortal.moment": moment_path(message.instance, message.sequence_id, message.index),
            **(_effect_attribute(message) if kind == "effect" else {}),
        }
        return Span(
            message.instance,
            f"effect {wait.name}" if kind == "effect" else "timer",
            kind,
            trace_id or _digest("trace of wait", *own, size_bytes=16),
            _digest("wait", *own, size_bytes=8),
            parent_id if trace_id is not None else None,
            wait.time_ns,
            max(wait.time_ns, end_ns),
            attributes,
        )

    def _cause(self, message: Executed) -> tuple[str | None, str | None]:
        """Return (the span that made the call, of a handler or of a client; its trace ID)."""
        if message.trace_context:
            of_caller, parent_id = split_context(message.trace_context)
            return parent_id, of_caller
        if self._causes is None:
            return None, None
        cause = self._causes.cause_of(message.caller, message.instance, message.position)
        if cause is None:
            return None, None
        span_id = handler_id(message.caller, *cause)
        trace_id = self._traces.get(span_id)
        return (span_id, trace_id) if trace_id is not None else (None, None)


def _effect_attribute(message: Executed) -> dict[str, str]:
    return {"immortal.effect": message.effect_text} if message.effect_text else {}


# Waits of ``async def`` handlers: when an effect or a timer began, which no log says, but a replay does.
#
# A replay reports the number of each wait when it begins (:mod:`protocol.extensions`); in the log an effect's result
# has that number, and a timer ends with the first message of the clock that says that it is due.


KNOWN_MAX = 1_000_000  # of handlers, and of effects without a result: the oldest beyond it are dropped
_EFFECT, _TIMER = "effect ", "timer"  # their names in a journal

T = TypeVar("T")


class RecordDraws(msgspec.Struct, array_like=True, frozen=True):
    """Waits that a replay found in one record, whose time is ``time_ns``."""

    sequence_id: int
    time_ns: int
    draws: list[RandomDraw]


class StartedWait(Struct, frozen=True):
    """Wait that began. ``handler``: the record and message that started its handler; None: before the replay."""

    number: int
    name: str
    sequence_id: int
    time_ns: int
    handler: tuple[int, int] | None


class DrawCollector:
    """Collector of a replay's draws: it turns a sink's calls into :class:`RecordDraws`."""

    def __init__(self) -> None:
        self._times_ns: deque[tuple[int, int]] = deque()  # (record, time) of records whose numbers are not known yet

    def record(self, sequence_id: int, time_ns: int) -> None:
        self._times_ns.append((sequence_id, time_ns))

    def numbers(self, sequence_id: int | None, data: bytes, *, complete: bool) -> RecordDraws | None:
        if sequence_id is None:  # an app that reports none
            return None
        while self._times_ns and self._times_ns[0][0] < sequence_id + complete:
            self._times_ns.popleft()
        if complete or not self._times_ns:
            return None
        return RecordDraws(sequence_id, self._times_ns[0][1], decode_numbers(data).draws)


class Waits:
    """Open waits of one instance. ``next_draws`` returns the replay's next draws, by records; None: none so far."""

    def __init__(self, next_draws: Callable[[], RecordDraws | None]) -> None:
        self._next_draws = next_draws
        self._next: RecordDraws | None = None
        self._handlers: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._effects: OrderedDict[int, StartedWait] = OrderedDict()
        self._timers: list[tuple[int, int, StartedWait]] = []  # a heap: (due time, number, wait)

    def effect(self, number: int, before: int) -> StartedWait | None:
        """Return the effect whose result is in the record ``before``, and drop it."""
        self._advance(before)
        return self._effects.pop(number, None)

    def timers(self, since_ns: int, told_ns: int, before: int) -> list[StartedWait]:
        """Return timers due from ``since_ns`` to ``told_ns``, the clock's time in the record ``before``; each once."""
        self._advance(before)
        found = []
        while self._timers and self._timers[0][0] <= told_ns:
            due_ns, _, begun = heapq.heappop(self._timers)
            if due_ns >= since_ns:
                found.append(begun)
        return found

    def _advance(self, before: int) -> None:
        while True:
            drawn = self._next or self._next_draws()
            self._next = None
            if drawn is None:
                return
            if drawn.sequence_id >= before:
                self._next = drawn
                return
            for draw in drawn.draws:
                self._add(drawn, draw)

    def _add(self, drawn: RecordDraws, draw: RandomDraw) -> None:
        if not draw.task:
            _put(self._handlers, draw.number, (drawn.sequence_id, draw.detail))
            return
        name = draw.what.removeprefix(_EFFECT)
        begun = StartedWait(draw.number, name, drawn.sequence_id, drawn.time_ns, self._handlers.get(draw.task))
        if draw.what.startswith(_EFFECT):
            _put(self._effects, draw.number, begun)
        elif draw.what == _TIMER:
            heapq.heappush(self._timers, (draw.detail, draw.number, begun))


def _put(known: OrderedDict[int, T], number: int, value: T) -> None:
    known[number] = value
    if len(known) > KNOWN_MAX:
        known.popitem(last=False)
