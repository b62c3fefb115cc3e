"""Model of a what-if for a fleet: its logs and changes, its rules, its services and streams, and its findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import msgspec
from msgspec import Struct, field

from immortal.appsdk.calls.codec import encoder
from immortal.appsdk.calls.failures import encode_failed
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.waiting.impulses import Effect
from immortal.coordinator.core.formatting import time_text
from immortal.coordinator.log.reader import RecordSource
from immortal.coordinator.log.record_contents import rpc_of
from immortal.protocol import decoding, redaction
from immortal.protocol.messages import RpcKind, RpcType, encode_incoming_rpc
from immortal.protocol.verdicts import MessageKey, Verdict
from immortal.replay.fleet.player import FIRST_OTHER_NUMBER, LoggedRecord, Place, Player
from immortal.replay.fleet.recorded import Log, Recorded
from immortal.replay.plan import ReplayError

DELAY_NS = 1_000_000  # of a message in a stream that never had one, and of an effect that never ran


class Call(Struct, frozen=True):
    """Call or effect that the logs have no answer to. ``method``: as ``Till.sold``, or an effect's name.

    ``fits``: raises TypeError for a value that is no result of that effect.
    """

    service: str
    to: str
    method: str
    arguments: Sequence[Any]
    named: Mapping[str, Any] = {}
    fits: Callable[[Any], object] = lambda value: None

    def __str__(self) -> str:
        named = redaction.redact(dict(self.named), (self.method.rpartition(".")[2],))
        arguments = [repr(one) for one in redaction.arguments(self.method, self.arguments)]
        arguments += [f"{name}={value!r}" for name, value in named.items()]
        return f"{self.method}({', '.join(arguments)})"


class NoResultError(BaseException):
    """Raised by a function for effects, for one that has no result: its handler waits to the end."""


Answer = Callable[[Call], Any]
Check = Callable[[Mapping[str, Any]], object]
Row = dict[str, str]


class Logs(Struct):
    """Logs and changes of a what-if.

    ``code``: returns the class that made a log; ``changes``: the classes to try instead.
    """

    sources: Mapping[str, RecordSource]
    code: Callable[[str], Definition]
    changes: Mapping[str, Definition]
    begin_ns: int | None = None
    to_ns: int | None = None
    outsiders: frozenset[str] = frozenset()


class Difference(Struct):
    """Call that differs. ``kind``: "changed", "added", "missing" or "moved". ``place``: of the message that caused it.

    ``cause``: the index of the difference that caused it; None: the changed code itself. ``began``: the message
    that began the execution which makes the call; None: unknown.
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

    @property
    def message(self) -> bytes:
        """The call now, else then."""
        return self.new or self.old or b""


class Broken(Struct):
    """Failure of the check after a record. ``message``: the last one there; b"" stands for the initial message.

    ``inputs``: how many messages from outside arrived until then; ``cut``: the last record by service, -1 for none.
    """

    service: str
    place: Place
    time_ns: int
    text: str
    message: bytes
    inputs: int
    cut: dict[str, int]


class Service(Struct, eq=False):
    """Service of the cone (the services that run). ``why``: the difference by which it joined; None: changed code."""

    name: str
    recorded: Recorded
    player: Player
    why: int | None
    cursor: int = 0
    joined_ns: int = -1
    time_ns: int = 0
    timer_ns: int = 0
    state_cause: int | None = None
    received_positions: dict[str, int] = field(default_factory=dict)
    done: set[Place] = field(default_factory=set)  # messages that arrived before their place
    open: dict[Place, int | None] = field(default_factory=dict)  # missing messages: the difference that caused it
    effects: dict[int, str] = field(default_factory=dict)
    verdicts: dict[MessageKey, Verdict] = field(default_factory=dict)
    unmatched: dict[object, list[int]] = field(default_factory=dict)
    equal: int = 0
    stopped: str = ""
    messages: int = 0
    records: Iterator[LoggedRecord] = iter(())
    upcoming: LoggedRecord | None = None

    @property
    def log(self) -> Log:
        return self.recorded.log

    def __post_init__(self) -> None:
        self.records = self.log.records()
        self.upcoming = next(self.records, None)

    @property
    def next_record(self) -> LoggedRecord | None:
        return None if self.stopped else self.upcoming

    def step(self) -> None:
        """Note that the next record is being handled."""
        self.cursor += 1
        self.upcoming = next(self.records, None)

    def receiver(self, destination: str) -> str:
        """Return the name of the service that receives this service's stream to ``destination``."""
        return destination or self.name

    def pass_draws(self, sequence_id: int, indices: Iterable[int] | None = None) -> None:
        """Give the run the numbers that the executions which these messages start (None: all of the record) drew in
        the log's run."""
        draws = self.recorded.draws
        of_all = draws.starts(sequence_id) if indices is None else indices
        told = [draw for index in of_all for draw in draws.draws_of(sequence_id, index)]
        self.player.tasks.receive_draws(told)

    def refuse_early(self) -> NoReturn:
        """Raise ReplayError: a changed message belongs before the service's first state."""
        begin = time_text(self.log.begin_ns)
        raise ReplayError(
            f"{self.name!r} has no state from before {begin}: its log was trimmed, so earlier changes can't be worked"
            f" out; the earliest possible start is --from {begin}"
        )

    @property
    def has_joined(self) -> bool:
        """True if the service has reached the others' time, after its initial message: no new message is earlier."""
        record = self.next_record
        return self.reached >= 0 and (record is None or record.time_ns > self.joined_ns)

    @property
    def reached(self) -> int:
        """Last record of its log that was handled."""
        return self.log.checkpoint.sequence_id + self.cursor


class Rules(Struct):
    """Rules of a what-if. ``effects``: "fail", "by-key" or a function; ``answer``: None fails calls without a log.
    ``delays``: which delay of its stream's log a new message takes: "recorded" is the one at that time, else "shortest"
    or "longest".

    ``then``: records by service after which the check fails in the record too; None while these are searched.
    ``progress``: called with the time that a run has reached, and that of its end, in ns since the Unix epoch.
    """

    effects: str | Answer = "fail"
    answer: Answer | None = None
    check: Check | None = None
    then: set[tuple[str, int]] | None = None
    progress: Callable[[int, int], object] = lambda now_ns, end_ns: None
    delays: str = "recorded"

    def answered(self, service: Service, to: str, message: bytes, time_ns: int) -> tuple[bytes, Row] | None:
        """Return the answer to a call of ``service`` to one without a log, with a row for people; None if no caller
        waits, or the log has the answer.
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
            text = f"{to} has no log here, so its answer is not known: see --answer"
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
        row = {"service": service.name, "to": to, "call": str(call), "outcome": outcome, "time": time_text(time_ns)}
        return answer, row

    def result(self, service: Service, number: int, effect: Effect, now_ns: int) -> tuple[bytes, Row]:
        """Return an effect's result: the log's result of it or of an equal effect, else by the rule ``effects``; b"":
        none. Also return a row for people.
        """
        name, encoded, key = effect.function.name, effect.encoded, effect.options.key
        found = service.recorded.effects.get(number)
        if found is None or found.done is None:
            done = [one for one in service.recorded.effects.values() if one.done is not None and one.name == name]
            found = next((one for one in done if one.encoded == encoded), None)
            if found is None and self.effects == "by-key" and key is not None:
                found = next((one for one in done if one.key == key), None)
        if found is not None:
            rpc = rpc_of(found.message)
            rest = decoding.decode(rpc.arguments, type=list[msgspec.Raw])[3:]
            arguments = [number, effect.what, effect.detail, *rest]
            message = encode_incoming_rpc(rpc.method_id, rpc.rpc_type, encoder.encode(arguments))
            outcome = "the result that the log has"
        else:
            fits = effect.function.encode_result
            try:
                message, outcome = service.player.effect_message(effect, lambda one: self._run(service, one, fits))
            except NoResultError:
                message, outcome = b"", "has no result: its handler waits"
        words = effect.function.describe(encoded)
        return message, {"service": service.name, "effect": words, "outcome": outcome, "time": time_text(now_ns)}

    def _run(self, service: Service, request: Any, fits: Callable[[Any], object]) -> Any:
        if isinstance(self.effects, str):
            raise LookupError(
                f"a what-if runs no effect, and the log has no result of this one (--effects {self.effects})"
            )
        positional, named = request.arguments
        return self.effects(Call(service.name, "", request.name, positional, named, fits))
