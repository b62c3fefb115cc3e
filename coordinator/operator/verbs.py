"""Verbs of the control socket: a verb and its JSON object become an event for the core. `cli` sends them.

letters-drop   {"keys": [[SEQUENCE_ID, INDEX, TASK, STEP], ...], "who": "..."}      or "all": true in place of keys
letters-retry  the same
skip           {"sequence_id": 312, "message_index": 0, "reason": "...", "who": "..."}
reset-peer     {"peer": "..."}
pause          {"who": "..."}
resume         {"who": "..."}
handlers       {}: all waiting handlers; or {"task": 12}: details of that one
cancel         {"task": 12, "reason": "...", "who": "..."}
retry-effect   {"task": 12, "who": "..."}: its effects that wait for their next attempt
signal         {"task": 12, "event": "...", "value": JSON, "who": "..."}
expel          {"group": "...", "member": "...", "who": "..."}

hand-over      {"to": "...", "who": "..."}: to the standby of that host or name; "": to any that is ready
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec

from immortal.coordinator.core import events as ev
from immortal.coordinator.core.interfaces import LogStore, Standby
from immortal.protocol import decoding
from immortal.protocol.errors import ImmortalError, RemoteProtocolError
from immortal.protocol.system_methods import REASON_CHARACTERS_MAX, Order
from immortal.protocol.verdicts import MessageKey

VERBS = (
    "letters-drop",
    "letters-retry",
    "skip",
    "reset-peer",
    "pause",
    "resume",
    "handlers",
    "cancel",
    "retry-effect",
    "signal",
    "expel",
)
WHO_CHARACTERS_MAX = 200


TaskNumber = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]


class VerbError(ImmortalError):
    """The argument of a verb can't be used."""


class _Letters(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[tuple[int, int, int, int]] = []
    all: bool = False
    who: str = "an operator"


class _Skip(msgspec.Struct, forbid_unknown_fields=True):
    sequence_id: int
    message_index: int
    reason: str
    who: str = "an operator"


class _Peer(msgspec.Struct, forbid_unknown_fields=True):
    peer: str


class _Who(msgspec.Struct, forbid_unknown_fields=True):
    who: Annotated[str, msgspec.Meta(min_length=1, max_length=WHO_CHARACTERS_MAX)] = "an operator"


class _Handlers(msgspec.Struct, forbid_unknown_fields=True):
    task: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0


class _Cancel(msgspec.Struct, forbid_unknown_fields=True):
    task: TaskNumber
    reason: Annotated[str, msgspec.Meta(max_length=REASON_CHARACTERS_MAX)] = ""
    who: str = "an operator"


class _Retry(msgspec.Struct, forbid_unknown_fields=True):
    task: TaskNumber
    who: str = "an operator"


class _Signal(msgspec.Struct, forbid_unknown_fields=True):
    task: TaskNumber
    event: str
    value: Any = None
    who: str = "an operator"


class _Expel(msgspec.Struct, forbid_unknown_fields=True):
    group: str
    member: str
    who: str = "an operator"


class _HandOver(msgspec.Struct, forbid_unknown_fields=True):
    to: str = ""
    who: str = "an operator"


_HAND_OVER = decoding.JsonDecoder(_HandOver)
_LETTERS = decoding.JsonDecoder(_Letters)
_SKIP = decoding.JsonDecoder(_Skip)
_PEER = decoding.JsonDecoder(_Peer)
_WHO = decoding.JsonDecoder(_Who)
_HANDLERS = decoding.JsonDecoder(_Handlers)
_CANCEL = decoding.JsonDecoder(_Cancel)
_RETRY = decoding.JsonDecoder(_Retry)
_SIGNAL = decoding.JsonDecoder(_Signal)
_EXPEL = decoding.JsonDecoder(_Expel)


def event_of(verb: str, argument: bytes | str, token: object, store: LogStore, kept: Iterable[MessageKey]) -> ev.Event:
    """Return the event of a verb. ``kept``: the keys of all dead letters. Raises VerbError, LogError."""
    try:
        if verb == "skip":
            skip = _SKIP.decode(argument)
            message = _message(store, skip.sequence_id, skip.message_index)
            return ev.MessageSkipped(skip.sequence_id, skip.message_index, skip.reason, skip.who, message, token)
        if verb == "reset-peer":
            return ev.PeerReset(_PEER.decode(argument).peer, token)
        if verb == "pause":
            return ev.InstancePaused(_WHO.decode(argument).who, token)
        if verb == "resume":
            return ev.InstanceResumed(_WHO.decode(argument).who, token)
        if verb == "retry-effect":
            return ev.HandlersAsked(_RETRY.decode(argument).task, token, retries=True)
        if verb == "handlers":
            asked = _HANDLERS.decode(argument)
            return ev.HandlersAsked(asked.task, token)
        if verb == "cancel":
            cancel = _CANCEL.decode(argument)
            return ev.HandlerOrdered(Order("cancel", cancel.task, cancel.reason, cancel.who), token)
        if verb == "signal":
            signal = _SIGNAL.decode(argument)
            value = msgspec.Raw(msgspec.msgpack.encode(signal.value))
            return ev.HandlerOrdered(Order("signal", signal.task, signal.event, signal.who, value), token)
        if verb == "expel":
            expel = _EXPEL.decode(argument)
            value = msgspec.Raw(msgspec.msgpack.encode(expel.group))
            return ev.HandlerOrdered(Order("expel", 0, expel.member, expel.who, value), token)
        letters = _LETTERS.decode(argument)
    except decoding.DecodeError as error:
        raise VerbError(f"what came behind {verb!r} can't be read: {error}") from None
    if verb == "letters-drop":
        return ev.LettersDropped(None if letters.all else letters.keys, letters.who, token)
    keys = kept if letters.all else letters.keys
    return ev.LettersRetried({key: store.letter(key) for key in keys}, letters.who, token)


def requested_successor(argument: bytes | str) -> str:
    """Return the successor that "hand-over" names; "" for any. Raises VerbError."""
    try:
        return _HAND_OVER.decode(argument).to
    except decoding.DecodeError as error:
        raise VerbError(f"what came behind 'hand-over' can't be read: {error}") from None


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
    """An instance can't be handed over: no standby is ready, or none has the name."""


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
