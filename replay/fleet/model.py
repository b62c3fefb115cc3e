"""A what-if for a fleet: what it is about, by which rules, and what it finds."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import msgspec
from msgspec import Struct, field

from immortal.appsdk.calls.codec import encoder
from immortal.appsdk.calls.failures import encode_failed
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.waiting.impulses import Effect
from immortal.coordinator.core.formatting import time_text
from immortal.coordinator.core.interfaces import ONESELF
from immortal.coordinator.log.reader import RecordSource
from immortal.coordinator.log.record_contents import rpc_of
from immortal.protocol import decoding
from immortal.protocol.messages import RpcKind, RpcType, encode_incoming_rpc
from immortal.protocol.trailer import BatchKind
from immortal.protocol.verdicts import MessageKey, Verdict
from immortal.replay.fleet.player import FIRST_OTHER_NUMBER, EffectDone, Log, LoggedRecord, Place, Player, Recorded
from immortal.replay.plan import ReplayError

DELAY_NS = 1_000_000  # of a message in a stream that never had one, and of an effect that nobody ran


class Call(Struct, frozen=True):
    """A call, or an effect, that the logs have no answer to. ``method``: as ``Till.sold``, or an effect's name.

    ``fits``: raises TypeError for what is no result of that effect.
    """

    service: str
    to: str
    method: str
    arguments: Sequence[Any]
    named: Mapping[str, Any] = {}
    fits: Callable[[Any], object] = lambda value: None

    def __str__(self) -> str:
        arguments = [*map(repr, self.arguments), *(f"{name}={value!r}" for name, value in self.named.items())]
        return f"{self.method}({', '.join(arguments)})"


class NoResultError(BaseException):
    """Raised by a function for effects, for one that has no result: its handler waits to the end."""


Answer = Callable[[Call], Any]
Check = Callable[[Mapping[str, Any]], object]


class Logs(Struct):
    """Logs and changes of a what-if.

    ``code``: the class that made each log; ``changes``: what is tried in its place.
    """

    sources: Mapping[str, RecordSource]
    code: Callable[[str], Definition]
    changes: Mapping[str, Definition]
    begin_ns: int | None = None
    to_ns: int | None = None
    outsiders: frozenset[str] = frozenset()


class Difference(Struct):
    """A call that differs. ``kind``: "changed", "added", "missing" or "moved". ``place``: of the message that made it.

    ``cause``: the difference that it follows from, by its number; None: the changed code itself. ``began``: the message
    that began the execution which makes it; None: not known.
    """

    service: str
    kind: str
    destination: str
    place: Place
    old: bytes | None
    new: bytes | None
    cause: int | None
    time_ns: int
    began: Place | None = None


class AskedEffect(Struct):
    service: str
    words: str
    outcome: str
    time_ns: int


class UnansweredCall(Struct):
    call: Call
    outcome: str
    time_ns: int


class Broken(Struct):
    """A check that does not hold behind a record. ``message``: the last one there; b"" stands for the initial message.

    ``inputs``: how many messages from outside came up to there; ``cut``: the last record by service, -1 for none.
    """

    service: str
    place: Place
    time_ns: int
    text: str
    message: bytes
    inputs: int
    cut: dict[str, int]


class Service(Struct, eq=False):
    """A service of the cone. ``why``: the difference by which it joined; None: its code is changed."""

    name: str
    recorded: Recorded
    player: Player
    why: int | None
    cursor: int = 0
    joined_ns: int = -1
    time_ns: int = 0
    timer_ns: int = 0
    state_cause: int | None = None
    taken: dict[str, int] = field(default_factory=dict)
    done: set[Place] = field(default_factory=set)  # messages that came before their place
    open: dict[Place, int | None] = field(default_factory=dict)  # messages that have not come: by which difference
    effects: dict[int, str] = field(default_factory=dict)
    verdicts: dict[MessageKey, Verdict] = field(default_factory=dict)
    unmatched: dict[object, list[int]] = field(default_factory=dict)
    first: tuple[Place, int] | None = None
    equal: dict[str, int] = field(default_factory=dict)
    stopped: str = ""
    messages: int = 0

    @property
    def log(self) -> Log:
        return self.recorded.log

    @property
    def next_record(self) -> LoggedRecord | None:
        if self.stopped or self.cursor >= len(self.log.records):
            return None
        return self.log.records[self.cursor]

    def receiver(self, destination: str) -> str:
        """Return the name of the service that a stream of this one goes to."""
        return destination or self.name

    def tell(self, sequence_id: int, indices: Iterable[int]) -> None:
        """Tell which numbers the executions drew then that these messages are about to start."""
        told = [draw for index in indices for draw in self.recorded.draws.get((sequence_id, index), ())]
        self.player.tasks.told(told)

    def count_inputs(self) -> int:
        """Count the messages from outside that it has had: impulses, with timers and results, and clients' requests."""
        batches = (batch for record in self.log.records[: self.cursor] for batch in record.trailer.batches)
        return sum(batch.count for batch in batches if batch.kind in (BatchKind.IMPULSES, BatchKind.CLIENT))

    def count_equal(self, destination: str, count: int = 1) -> None:
        self.equal[destination] = self.equal.get(destination, 0) + count

    def refuse_early(self) -> NoReturn:
        """Raise ReplayError: what comes now is of before the state that the service begins with."""
        begin = time_text(self.log.begin_ns)
        raise ReplayError(
            f"{self.name!r} has no state of before {begin}: its log was trimmed, and what changes earlier can't be"
            f" worked out; the earliest that can: --from {begin}"
        )

    @property
    def is_there(self) -> bool:
        """True if the service has come to where the others are, behind its initial message: nothing new is earlier."""
        record = self.next_record
        return self.reached >= 0 and (record is None or record.time_ns > self.joined_ns)

    @property
    def reached(self) -> int:
        """The last record of its log that was handled."""
        return self.log.checkpoint.sequence_id + self.cursor


class Sent(Struct, eq=False):
    """A message on its way. ``slot``: its place in the receiver's log; ``time_ns``: when it comes without one."""

    message: bytes
    slot: Place | None
    difference: int | None
    time_ns: int | None = None
    is_due: bool = False


class Stream(Struct, eq=False):
    """``settled``: how many of the recorded messages were made again alike, before the receiver was in the cone."""

    settled: int = 0
    queue: deque[Sent] = field(default_factory=deque)
    last_ns: int = 0
    drawn: random.Random | None = None
    delays: list[tuple[int, int]] | None = None

    def delay_ns(self, sender: Service, receiver: Service, seed: int, time_ns: int) -> int:
        """Return the delay of a new message in ns: what one took in this stream then. ``seed`` 0: the last before."""
        if self.delays is None:
            self.delays = []
            destination = ONESELF if sender is receiver else receiver.name
            made = zip(sender.recorded.order[destination], sender.recorded.places[destination], strict=True)
            for position, place in made:
                to = receiver.log.place_of(ONESELF if sender is receiver else sender.name, position)
                if to is not None:
                    made_ns = sender.log.time_of(place[0])
                    self.delays.append((made_ns, max(0, receiver.log.time_of(to[0]) - made_ns)))
        if not self.delays:
            return DELAY_NS
        if seed:
            if self.drawn is None:
                self.drawn = random.Random(f"{seed} {sender.name} {receiver.name}")  # noqa: S311 (from a seed)
            return self.drawn.choice(self.delays)[1]
        at = bisect_right(self.delays, time_ns, key=lambda one: one[0]) - 1
        return self.delays[max(0, at)][1]


class Rules(Struct):
    """``effects``: "fail", "by-key" or a function; ``answer``: None fails calls that no log answers.

    ``then``: records, by service, behind which the check does not hold in the record; None while that is looked for.
    """

    effects: str | Answer = "fail"
    answer: Answer | None = None
    check: Check | None = None
    then: set[tuple[str, int]] | None = None

    def answered(self, service: Service, to: str, message: bytes, time_ns: int) -> tuple[bytes, UnansweredCall] | None:
        """Return the answer to a call of ``service`` to one without a log; None where nobody waits for one, or the log
        has it.
        """
        rpc = rpc_of(message)
        if rpc.kind != RpcKind.CALL or rpc.rpc_type != RpcType.ASYNC:
            return None
        _, number, *rest = decoding.decode(rpc.arguments, type=list[msgspec.Raw])
        if (call_number := decoding.decode(number, type=int)) < FIRST_OTHER_NUMBER:
            return None
        method = service.player.methods.get((to, rpc.method_id), f"method {rpc.method_id}")
        call = Call(service.name, to, method, [decoding.decode(one) for one in rest])
        if self.answer is None:
            text = f"{to} has no log here, and nothing says what it would have answered: see --answer"
            kind, value = RpcKind.RAISED, encode_failed("NoLog", text, "")
            outcome = "failed: it has no log here"
        else:
            try:
                result = self.answer(call)
                kind, value, outcome = RpcKind.RETURNED_VALUE, encoder.encode(result), f"answered {result!r}"
            except Exception as error:  # of the user's function
                kind, value = RpcKind.RAISED, encode_failed(type(error).__name__, str(error), "")
                outcome = f"failed: {type(error).__name__}: {error}"
        if kind == RpcKind.RAISED:
            arguments = encoder.encode([call_number, *decoding.decode(value, type=list[msgspec.Raw])])
        else:
            arguments = encoder.encode([call_number, msgspec.Raw(value)])
        answer = encode_incoming_rpc(rpc.method_id, RpcType.ASYNC, arguments, kind)
        return answer, UnansweredCall(call, outcome, time_ns)

    def result(self, service: Service, number: int, effect: Effect, now_ns: int) -> tuple[bytes, AskedEffect]:
        """Return the result of an effect: that which the log has of it or of one like it, else by ``effects``.

        b"": it has none.
        """
        name, encoded, key = effect.function.name, effect.encoded, effect.options.key

        def is_like(one: EffectDone) -> bool:
            return one.done is not None and one.name == name and one.encoded == encoded

        def has_key(one: EffectDone) -> bool:
            return one.done is not None and one.name == name and key is not None and one.key == key

        found = service.recorded.effects.get(number)
        if found is None or found.done is None:
            done = service.recorded.effects.values()
            found = next(filter(is_like, done), None)
            if found is None and self.effects == "by-key":
                found = next(filter(has_key, done), None)
        if found is not None:
            rpc = rpc_of(found.message)
            arguments = [
                number,
                effect.what,
                effect.detail,
                *decoding.decode(rpc.arguments, type=list[msgspec.Raw])[3:],
            ]
            message = encode_incoming_rpc(rpc.method_id, rpc.rpc_type, encoder.encode(arguments))
            outcome = "the result that the log has"
        else:
            fits = effect.function.encode_result
            try:
                message, outcome = service.player.effect_message(effect, lambda one: self._run(service, one, fits))
            except NoResultError:
                message, outcome = b"", "has no result: its handler waits"
        return message, AskedEffect(service.name, effect.function.describe(encoded), outcome, now_ns)

    def _run(self, service: Service, request: Any, fits: Callable[[Any], object]) -> Any:
        if isinstance(self.effects, str):
            raise LookupError(
                f"a what-if runs no effect, and the log has no result of this one (--effects {self.effects})"
            )
        positional, named = request.arguments
        return self.effects(Call(service.name, "", request.name, positional, named, fits))
