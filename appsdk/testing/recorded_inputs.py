"""Inputs from outside in a fleet's logs: calls of clients and hooks, results of effects, answers of other services.

A sample (:mod:`immortal.appsdk.testing.sample`) gives some of them to the same services again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from immortal.appsdk.calls.codec import encoder
from immortal.appsdk.calls.context import datetime_of
from immortal.appsdk.handlers.decorators import CLOCK_METHOD_ID
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.waiting.impulses import EffectResult
from immortal.coordinator.core.interfaces import ONESELF
from immortal.coordinator.log.record_contents import rpc_of
from immortal.protocol import decoding
from immortal.protocol.messages import IncomingRpc, RpcKind, RpcType
from immortal.protocol.system_methods import EFFECT_METHOD_ID
from immortal.protocol.trailer import BatchKind
from immortal.replay.fleet.player import LoggedRecord, Slot, not_of_code
from immortal.replay.fleet.recorded import Recorded
from immortal.replay.plan import ReplayError

Fleet = Mapping[str, Recorded]


class Input(Struct):
    """Input from outside, as recorded in a log.

    ``kind``: "request" of a client, "impulse" of a hook, "call" of a service without a log; and "result" of an effect,
    or of a call to a service without a log, which is only redacted. ``method``: as ``Shop.order``, or an effect's name.
    ``arguments``: by name, as plain values; of a result, one that is called ``result``, or ``raised``.
    """

    service: str
    kind: str
    method: str
    arguments: dict[str, Any]
    time_ns: int

    @property
    def time(self) -> datetime:
        return datetime_of(self.time_ns)


Redact = Callable[[Input], Mapping[str, Any]]
"""Function that returns the arguments to put in place of those of an input."""


class Redaction:
    """Replacement of arguments by a user's function. ``replaced``: texts that it has removed from the arguments."""

    def __init__(self, function: Redact | None) -> None:
        self._function = function
        self.replaced: set[str] = set()

    def encoded(self, one: Input, raws: Sequence[msgspec.Raw]) -> list[msgspec.Raw]:
        """Return the encoded arguments of an input, replaced by the user's function if any. Raises ReplayError."""
        if self._function is None:
            return list(raws)
        given = replace(one, arguments=deepcopy(one.arguments))  # it may change values in place
        try:
            new = dict(self._function(given))
            if new.keys() != one.arguments.keys():
                raise ValueError(f"it returned the arguments {sorted(new)}, and {sorted(one.arguments)} were expected")
            pairs = zip(raws, one.arguments.items(), strict=True)
            found = [raw if new[name] == old else msgspec.Raw(encoder.encode(new[name])) for raw, (name, old) in pairs]
        except Exception as error:  # of the user's function
            text = f"--redact fails for {one.kind} {one.method} of {one.service}: {type(error).__name__}: {error}"
            raise ReplayError(text) from None
        self.replaced |= set(_texts(one.arguments)) - set(_texts(new))
        return found


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _texts(pair)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


class Given(Struct):
    """Input with its message. ``sender``: the client, or the instance that sent the impulse or call.

    ``record``: sequence ID of its record; ``at_ns``: when a sample sends it.
    """

    input: Input
    record: int
    sender: str
    rpc: IncomingRpc
    arguments: list[msgspec.Raw]
    at_ns: int


class Result(Struct, frozen=True):
    """Recorded result of a service's effect or of its call to a service without a log. ``requested_ns``: time of the
    request; ``delay_ns``: from it to the result."""

    service: str
    method: str
    requested_ns: int
    delay_ns: int
    raised: bool
    values: Sequence[msgspec.Raw]


class Results:
    """Recorded results by request. A request gets one for equal arguments if any, else one for other arguments."""

    def __init__(self, redaction: Redaction, end_ns: int) -> None:
        self._redaction = redaction
        self._end_ns = end_ns
        self._all: dict[object, list[Result]] = defaultdict(list)
        self._taken: set[int] = set()
        self.guessed = self.missing = 0

    def add(self, request: tuple[object, ...], encoded: bytes, result: Result) -> None:
        self._all[request, encoded].append(result)
        self._all[request].append(result)

    def sort(self) -> None:
        for results in self._all.values():
            results.sort(key=lambda one: one.requested_ns)

    def match(self, request: tuple[object, ...], encoded: bytes, now_ns: int) -> Result | None:
        """Return the result whose request was nearest in time; of several requests at one time, the next unused one.

        None if there is none, or if it would come after the end.
        """
        equal = self._all.get((request, encoded))
        results = equal or self._all.get(request)
        if results is None:
            self.missing += 1
            return None
        at = bisect_left(results, now_ns, key=lambda one: one.requested_ns)
        if at == len(results) or (at and results[at].requested_ns - now_ns > now_ns - results[at - 1].requested_ns):
            at = bisect_left(results, results[at - 1].requested_ns, key=lambda one: one.requested_ns)
        while id(results[at]) in self._taken and results[at + 1 : at + 2]:
            if results[at + 1].requested_ns != results[at].requested_ns:
                break
            at += 1
        if now_ns + results[at].delay_ns > self._end_ns:
            self.missing += 1
            return None
        self.guessed += equal is None
        self._taken.add(id(results[at]))
        return replace(results[at], values=self._redacted(results[at]))

    def _redacted(self, one: Result) -> Sequence[msgspec.Raw]:
        if not one.values:
            return ()
        several = len(one.values) > 1  # of a failed call: the error's name, its arguments, its attributes
        value = msgspec.Raw(encoder.encode(one.values)) if several else one.values[0]
        arguments = {"raised" if one.raised else "result": decoding.decode(value)}
        given = Input(one.service, "result", one.method, arguments, one.requested_ns + one.delay_ns)
        (value,) = self._redaction.encoded(given, [value])
        return decoding.decode(value, type=list[msgspec.Raw]) if several else (value,)


class Times:
    """Recorded times of a service: when its log noted the time, and when its next timer was due then."""

    def __init__(self, recorded: Recorded, end_ns: int) -> None:
        self.logged_ns: list[int] = []
        log = recorded.log
        sequence_ids = range(log.checkpoint.sequence_id, log.last_sequence_id + 1)
        self._times = [log.time_of(one) for one in sequence_ids]
        self._due = [recorded.due_ns(one) for one in sequence_ids]
        self._end_ns = end_ns

    def fires_at_ns(self, due_ns: int) -> int | None:
        """Return when a timer due at ``due_ns`` fires: as late as in the log if one was due there too; None: never."""
        was_due_ns = self._due[max(0, bisect_right(self._times, due_ns) - 1)]
        if was_due_ns is None or was_due_ns > due_ns:
            return due_ns if due_ns <= self._end_ns else None
        at = bisect_left(self.logged_ns, due_ns)
        return self.logged_ns[at] if at < len(self.logged_ns) else None


class Delays:
    """Delays of one stream between two services, by the time at which a message was made."""

    def __init__(self) -> None:
        self._pairs: list[tuple[int, int]] = []

    def add(self, made_ns: int, arrived_ns: int) -> None:
        self._pairs.append((made_ns, max(0, arrived_ns - made_ns)))

    def sort(self) -> None:
        self._pairs.sort(key=lambda pair: pair[0])

    def at(self, now_ns: int) -> int:
        """Return the delay of a message made at ``now_ns``: that of the recorded one then, or of the last before."""
        at = bisect_left(self._pairs, now_ns, key=lambda pair: pair[0])
        if at == len(self._pairs) or self._pairs[at][0] != now_ns:
            at -= 1
        return self._pairs[at][1] if self._pairs and at >= 0 else 0


class Inputs:
    """All inputs from outside of a fleet from ``begin_ns`` to ``end_ns``, and the delays and times of other messages.

    ``unknown``: messages by service that no handler of the class takes, such as orders of operators.
    """

    def __init__(self, fleet: Fleet, codes: Mapping[str, Definition], redaction: Redaction, begin_ns: int) -> None:
        self.given: list[Given] = []
        self.end_ns = max(one.log.time_of(one.log.last_sequence_id) for one in fleet.values())
        self.results = Results(redaction, self.end_ns)
        self.times: dict[str, Times] = {}
        self.delays: dict[tuple[str, str], Delays] = defaultdict(Delays)
        self.unknown: dict[str, int] = defaultdict(int)
        self._fleet = fleet
        self._codes = codes
        self._begin_ns = begin_ns
        self._open_calls: dict[tuple[str, int], tuple[int, bytes, int]] = {}  # calls to services without a log
        for name, recorded in fleet.items():
            self._note_calls(name, recorded)
        for name, recorded in fleet.items():
            self.times[name] = Times(recorded, self.end_ns)
            self._note_effects(name, recorded)
            skipped = {key[:2] for key, verdict in recorded.verdicts.items() if not_of_code(verdict)}
            for record in recorded.log.records():
                for index, slot in enumerate(record.slots()):
                    if slot.batch.kind != BatchKind.INITIAL and (record.sequence_id, index) not in skipped:
                        self._add_message(name, recorded, record, slot)
        self.results.sort()
        for delays in self.delays.values():
            delays.sort()
        self.given.sort(key=lambda one: one.at_ns)

    def _note_calls(self, name: str, recorded: Recorded) -> None:
        for destination, runs in recorded.runs.items():
            if destination == ONESELF or destination in self._fleet:
                continue
            for first, last, sequence_id in zip(runs.firsts, runs.lasts, runs.records, strict=True):
                for output in recorded.sent(destination, range(first, last + 1)):
                    rpc = rpc_of(output.message)
                    if rpc.kind == RpcKind.CALL and rpc.rpc_type == RpcType.ASYNC:
                        _, number, *rest = decoding.decode(rpc.arguments, type=list[msgspec.Raw])
                        call = rpc.method_id, encoder.encode(rest), recorded.log.time_of(sequence_id)
                        self._open_calls[name, decoding.decode(number, type=int)] = call

    def _note_effects(self, name: str, recorded: Recorded) -> None:
        for effect in recorded.effects.values():
            if effect.done is not None:
                logged = decoding.decode(rpc_of(effect.message).arguments, type=EffectResult)
                took_ns = effect.done_ns - effect.begun_ns
                result = Result(name, effect.name, effect.begun_ns, took_ns, logged.raised, [logged.value])
                self.results.add((name, effect.name), effect.encoded, result)

    def _add_message(self, name: str, recorded: Recorded, record: LoggedRecord, slot: Slot) -> None:
        rpc = rpc_of(slot.message)
        kind, sender, at_ns = "impulse", name, record.time_ns
        if slot.source is None and slot.batch.kind == BatchKind.CLIENT:
            kind, sender = "request", slot.batch.name
        elif slot.source is None:
            if rpc.method_id == CLOCK_METHOD_ID:
                self.times[name].logged_ns.append(record.time_ns)
            if rpc.method_id in (CLOCK_METHOD_ID, EFFECT_METHOD_ID):
                return
        elif slot.source == ONESELF:
            return
        elif (other := self._fleet.get(slot.source)) is not None:
            made_at = other.origin_of(name, slot.position)
            at_ns = slot.batch.send_time_ns if made_at is None else other.log.time_of(made_at[0])
            self.delays[slot.source, name].add(at_ns, record.time_ns)
            mark = other.log.checkpoint.outputs.get(name)
            if made_at is not None or (mark is not None and slot.position <= mark.position):
                return
            sender = slot.source
        else:
            kind, sender = "call", slot.source
            if rpc.kind != RpcKind.CALL:
                self._note_answer(name, record, slot.source, rpc)
                return
        if record.time_ns >= self._begin_ns:
            self._add_input(name, kind, sender, rpc, record, at_ns)

    def _note_answer(self, name: str, record: LoggedRecord, sender: str, rpc: IncomingRpc) -> None:
        number, *values = decoding.decode(rpc.arguments, type=list[msgspec.Raw])
        call = self._open_calls.get((name, decoding.decode(number, type=int)))
        if call is not None:
            method_id, encoded, requested_ns = call
            raised = rpc.kind == RpcKind.RAISED
            method = self._fleet[name].methods.get((sender, method_id), f"method {method_id}")
            result = Result(name, method, requested_ns, record.time_ns - requested_ns, raised, values)
            self.results.add((sender, name, method_id), encoded, result)

    def _add_input(self, name: str, kind: str, sender: str, rpc: IncomingRpc, record: LoggedRecord, at_ns: int) -> None:
        definition = self._codes[name]
        handler = definition.by_method_id.get(rpc.method_id)
        if handler is None:
            self.unknown[name] += 1
            return
        raws = decoding.decode(rpc.arguments, type=list[msgspec.Raw])
        raws = raws[2:] if rpc.rpc_type == RpcType.ASYNC else raws
        parameters = definition.codec(handler).signature.parameters
        arguments = {one: decoding.decode(raw) for one, raw in zip(parameters, raws, strict=False)}
        one = Input(name, kind, f"{definition.name}.{handler.name}", arguments, record.time_ns)
        self.given.append(Given(one, record.sequence_id, sender, rpc, raws, max(at_ns, self._begin_ns)))
