"""Verbs of the control socket: the requests of operators to a running coordinator, and the answers.

`cli` sends a verb with a JSON object; most verbs become an event of the core:

letters-drop   {"keys": [[SEQUENCE_ID, INDEX, TASK, STEP], ...], "who": "..."}      or "all": true in place of keys
letters-retry  the same
skip           {"sequence_id": 312, "message_index": 0, "reason": "...", "who": "..."}
reset-peer     {"peer": "..."}
pause          {"who": "..."}
resume         {"who": "..."}
handlers       {}: all waiting handlers; or {"task": 12}: details of that one
cancel         {"task": 12, "reason": "...", "who": "..."}
terminate      the same
retry-effect   {"task": 12, "who": "..."}: its effects that wait for their next attempt
signal         {"task": 12, "event": "...", "value": JSON, "who": "..."}
restart        {"task": 12, "method": 1234, "arguments": BASE64, "journal": BASE64, "who": "..."}; both MessagePack
expel          {"group": "...", "member": "...", "who": "..."}

stop           {}: as SIGTERM does
hand-over      {"to": "...", "who": "..."}: to the standby of that host or name; "": to any that is ready
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from immortal.coordinator.app.endpoint import AppInterface
from immortal.coordinator.audit import READ_ONLY, Auditor
from immortal.coordinator.clock import InstanceClock
from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.errors import LogError, fail
from immortal.coordinator.core.interfaces import LogStore, Standby
from immortal.coordinator.core.machine import Machine
from immortal.coordinator.fault_points import FaultPoint, reach
from immortal.coordinator.log_port.endpoint import LogEndpoint
from immortal.coordinator.operator.control_server import ControlRequest
from immortal.coordinator.peers.endpoint import PeerEndpoint
from immortal.protocol import decoding
from immortal.protocol.errors import ImmortalError, RemoteProtocolError
from immortal.protocol.executions import id_of
from immortal.protocol.system_methods import REASON_CHARACTERS_MAX, Order
from immortal.protocol.verdicts import MessageKey

WHO_CHARACTERS_MAX = 200
EMPTY_ARRAY = b"\x90"  # in MessagePack

TaskNumber = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]


class VerbError(ImmortalError):
    """Raised if the argument of a verb can't be used."""


class _Request(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    who: str = "an operator"


class _Letters(_Request):
    keys: list[tuple[int, int, int, int]] = []
    all: bool = False


class _Skip(_Request):
    sequence_id: int
    message_index: int
    reason: str


class _Peer(msgspec.Struct, forbid_unknown_fields=True):
    peer: str


class _Who(msgspec.Struct, forbid_unknown_fields=True):
    who: Annotated[str, msgspec.Meta(min_length=1, max_length=WHO_CHARACTERS_MAX)] = "an operator"


class _Handlers(msgspec.Struct, forbid_unknown_fields=True):
    task: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0


class _Cancel(_Request):
    task: TaskNumber
    reason: Annotated[str, msgspec.Meta(max_length=REASON_CHARACTERS_MAX)] = ""


class _Retry(_Request):
    task: TaskNumber


class _Signal(_Request):
    task: TaskNumber
    event: str
    value: Any = None


class _Restart(_Request):
    task: int
    method: int
    arguments: bytes
    journal: bytes = EMPTY_ARRAY


class _Expel(_Request):
    group: str
    member: str


class _HandOver(_Request):
    to: str = ""


_DECODERS: Mapping[str, decoding.JsonDecoder[Any]] = {
    "letters-drop": decoding.JsonDecoder(_Letters),
    "letters-retry": decoding.JsonDecoder(_Letters),
    "skip": decoding.JsonDecoder(_Skip),
    "reset-peer": decoding.JsonDecoder(_Peer),
    "pause": decoding.JsonDecoder(_Who),
    "resume": decoding.JsonDecoder(_Who),
    "handlers": decoding.JsonDecoder(_Handlers),
    "cancel": decoding.JsonDecoder(_Cancel),
    "terminate": decoding.JsonDecoder(_Cancel),
    "retry-effect": decoding.JsonDecoder(_Retry),
    "signal": decoding.JsonDecoder(_Signal),
    "restart": decoding.JsonDecoder(_Restart),
    "expel": decoding.JsonDecoder(_Expel),
    "hand-over": decoding.JsonDecoder(_HandOver),
}
VERBS = tuple(verb for verb in _DECODERS if verb != "hand-over")
"""Verbs whose requests become events of the core."""


def event_of(
    verb: str, argument: bytes | str, token: object, store: LogStore, letter_keys: Iterable[MessageKey]
) -> ev.Event:
    """Return the core's event for a verb. ``letter_keys``: of all dead letters. Raises VerbError, LogError."""
    given = _decode(verb, argument)
    match given:
        case _Skip():
            message = _message(store, given.sequence_id, given.message_index)
            return ev.MessageSkipped(given.sequence_id, given.message_index, given.reason, given.who, message, token)
        case _Peer():
            return ev.PeerReset(given.peer, token)
        case _Who() if verb == "pause":
            return ev.InstancePaused(given.who, token)
        case _Who():
            return ev.InstanceResumed(given.who, token)
        case _Retry():
            return ev.HandlersAsked(given.task, token, retries=True)
        case _Handlers():
            return ev.HandlersAsked(given.task, token)
        case _Cancel():
            return ev.HandlerOrdered(Order(verb, given.task, given.reason, given.who), token)
        case _Signal():
            value = msgspec.Raw(msgspec.msgpack.encode(given.value))
            return ev.HandlerOrdered(Order("signal", given.task, given.event, given.who, value), token)
        case _Restart():
            parts = given.method, msgspec.Raw(given.arguments), msgspec.Raw(given.journal)
            value = msgspec.Raw(msgspec.msgpack.encode(parts))
            return ev.HandlerOrdered(Order("restart", given.task, id_of(given.task), given.who, value), token)
        case _Expel():
            value = msgspec.Raw(msgspec.msgpack.encode(given.group))
            return ev.HandlerOrdered(Order("expel", 0, given.member, given.who, value), token)
    if verb == "letters-drop":
        return ev.LettersDropped(None if given.all else given.keys, given.who, token)
    keys = letter_keys if given.all else given.keys
    return ev.LettersRetried({key: store.letter(key) for key in keys}, given.who, token)


def _decode(verb: str, argument: bytes | str) -> Any:
    try:
        return _DECODERS[verb].decode(argument)
    except decoding.DecodeError as error:
        raise VerbError(f"what came behind {verb!r} can't be read: {error}") from None


def _message(store: LogStore, sequence_id: int, message_index: int) -> bytes | None:
    """Read a message from the log; None if there is none. Raises VerbError, LogError."""
    from immortal.coordinator.log.record_contents import message_at, record_of

    summary = store.summary()
    if message_index < 0 or not summary.first_sequence_id <= sequence_id <= summary.last_sequence_id:
        return None
    try:
        return message_at(record_of(store.read(sequence_id, 1)[0]).content, message_index)
    except RemoteProtocolError as error:
        raise VerbError(f"record {sequence_id} can't be read: {error}") from None


class HandOverError(ImmortalError):
    """Raised if an instance can't be handed over: no standby is ready, or none has the requested name."""


def choose_successor(standbys: Sequence[Standby], to: str) -> Standby:
    """Return the standby to hand over to. ``to``: its host or whole name; "": any that is ready. Raises
    HandOverError."""
    if not standbys:
        raise HandOverError("nobody follows its log: 'immortal run' it on another machine first, with the same log")
    meant = [standby for standby in standbys if not to or to in (standby.host, standby.name)]
    names = ", ".join(standby.name for standby in standbys)
    if not meant:
        raise HandOverError(f"{to!r} does not follow its log; who does: {names}")
    ready = next((standby for standby in meant if standby.is_ready), None)
    if ready is None:
        names = ", ".join(standby.name for standby in meant)
        raise HandOverError(f"{names} has not caught up with the log yet: try again once it has")
    return ready


class OperatorEndpoint:
    """Endpoint for requests of operators. ``post``: takes events of changes, answered when these are durable."""

    def __init__(
        self,
        machine: Machine,
        app: AppInterface,
        peers: PeerEndpoint,
        log: LogEndpoint,
        clock: InstanceClock,
        auditor: Auditor,
        post: Callable[[ev.Event], None],
        request_stop: Callable[[], None],
    ) -> None:
        self._machine, self._app, self._peers, self._log = machine, app, peers, log
        self._clock, self._auditor, self._post = clock, auditor, post
        self._request_stop = request_stop
        self._verbs: dict[str, Callable[[ControlRequest], None]] = {
            "status": lambda request: request.answer(self._status()),
            "checkpoint": self._checkpoint,
            "clock": lambda request: request.answer(clock.status()),
            "accept-clock": self._accept_clock,
            "peers": lambda request: request.answer({"peers": self._peers_status()}),
            "clients": lambda request: request.answer(machine.view.clients()),
            "hand-over": self._hand_over,
            "stop": self._stop,
            "reclaim": lambda request: post(ev.Reclaimed(request)),
            "renew-key": self._renew_key,
            **dict.fromkeys(VERBS, self._post_change),
        }

    def handle(self, requests: Sequence[ControlRequest]) -> None:
        """Audit each request, refuse it, or pass it to the handler of its verb."""
        for request in requests:
            reach(FaultPoint.CONTROL)
            self._auditor.write_verb(f"uid {request.uid}", request.verb, request.argument.decode(errors="replace"))
            verb = self._verbs.get(request.verb)
            lease = self._machine.state.write_lease
            if verb is None:
                request.answer({"error": f"unknown verb {request.verb!r}; known: {', '.join(self._verbs)}"})
            elif not lease.writes and request.verb not in READ_ONLY:
                request.answer({"refused": f"it does not write the log now ({lease.role.value}): ask {lease.holder}"})
            else:
                verb(request)

    def peer_reset_done(self, effect: ef.PeerResetDone) -> None:
        if isinstance(effect.token, ControlRequest):
            effect.token.answer({"found": effect.found})

    def operator_answered(self, effect: ef.OperatorAnswered) -> None:
        if isinstance(effect.token, ControlRequest):
            effect.token.answer(effect.answer)

    def _checkpoint(self, request: ControlRequest) -> None:
        self._post(ev.CheckpointRequested())
        request.answer({"asked": True})

    def _renew_key(self, request: ControlRequest) -> None:
        self._log.renew_key()
        request.answer({"asked": True})

    def _stop(self, request: ControlRequest) -> None:
        """Stop as by SIGTERM, for an operator in another container, who can't send signals."""
        request.answer({"asked": True})
        self._request_stop()

    def _hand_over(self, request: ControlRequest) -> None:
        try:
            successor = choose_successor(self._log.standbys, _decode(request.verb, request.argument).to)
        except (VerbError, HandOverError) as error:
            request.answer({"refused": str(error)})
            return
        if not self._machine.view.can_hand_over:
            request.answer({"refused": "its app does not work now: try again once it does ('immortal status')"})
            return
        self._log.hand_over_to(successor.name)
        self._post(ev.StopRequested(hands_over=True))
        request.answer({"to": successor.name})

    def _accept_clock(self, request: ControlRequest) -> None:
        self._clock.now_ns(accept=True)
        request.answer(self._clock.status())

    def _post_change(self, request: ControlRequest) -> None:
        store = self._log.store
        if store is None:
            fail("an operator changes a log that is not ours")
        try:
            event = event_of(request.verb, request.argument, request, store, self._machine.view.letters)
        except (VerbError, LogError) as error:
            request.answer({"error": str(error)})
        else:
            self._post(event)

    def _status(self) -> dict[str, object]:
        status: dict[str, Any] = {
            **self._machine.view.status(self._clock.now_ns()),
            "pid": os.getpid(),
            "clock": self._clock.status(),
            "standbys": [{"name": one.name, "peer": one.endpoint, "ready": one.is_ready} for one in self._log.standbys],
            "commit_ms": round(self._log.commit_s * 1000, 3),
            "security": self._peers.describe_security(),
        }
        if self._log.problem:
            status["problems"] = [*status.get("problems", ()), self._log.problem]
        status["unsent_bytes"] -= self._app.sent_bytes  # the machine does not know of these yet
        behind = bool(status["backlog_records"] or status["unsent_bytes"]) and not status["paused"]
        silent_s = (time.monotonic_ns() - self._app.last_traffic_ns) / 1e9
        status["app_silent_s"] = round(silent_s, 3) if behind and status["app_connected"] else 0.0
        for destination, output in status["outputs"].items():
            output |= self._peers.describe_output(destination, output["error"])
        return status

    def _peers_status(self) -> dict[str, dict[str, object]]:
        """Return the machine's knowledge of each peer, and the state of its connection."""
        peers = self._machine.view.peers()
        for name, peer in peers.items():
            peer |= self._peers.describe_peer(name, peer["error"])
        return peers
