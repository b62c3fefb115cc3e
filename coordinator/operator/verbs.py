"""What an operator asks a running coordinator to do with dead letters, peers, and a message that stops its app.

A verb of the control socket and its JSON object become an event for the core. `coordinator/cli` asks.

    letters-drop   {"keys": [[SEQUENCE_ID, INDEX, TASK, STEP], ...], "who": "..."}      or "all": true in place of keys
    letters-retry  the same
    skip           {"sequence_id": 312, "message_index": 0, "reason": "...", "who": "..."}
    reset-peer     {"peer": "..."}
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from coordinator.core import events as ev
from coordinator.core.interfaces import LogStore
from protocol.errors import ImmortalError, RemoteProtocolError
from protocol.verdicts import MessageKey

VERBS = ("letters-drop", "letters-retry", "skip", "reset-peer")


class VerbError(ImmortalError):
    """What came behind a verb makes no sense."""


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


_LETTERS = msgspec.json.Decoder(_Letters)
_SKIP = msgspec.json.Decoder(_Skip)
_PEER = msgspec.json.Decoder(_Peer)


def event_of(verb: str, argument: bytes | str, token: object, store: LogStore, kept: Iterable[MessageKey]) -> ev.Event:
    """``kept``: the keys of all dead letters. Raises VerbError, LogError."""
    try:
        if verb == "skip":
            skip = _SKIP.decode(argument)
            message = _message(store, skip.sequence_id, skip.message_index)
            return ev.MessageSkipped(skip.sequence_id, skip.message_index, skip.reason, skip.who, message, token)
        if verb == "reset-peer":
            return ev.PeerReset(_PEER.decode(argument).peer, token)
        letters = _LETTERS.decode(argument)
    except msgspec.MsgspecError as error:
        raise VerbError(f"what came behind {verb!r} can't be read: {error}") from None
    if verb == "letters-drop":
        return ev.LettersDropped(None if letters.all else letters.keys, letters.who, token)
    keys = kept if letters.all else letters.keys
    return ev.LettersRetried({key: store.letter(key) for key in keys}, letters.who, token)


def _message(store: LogStore, sequence_id: int, message_index: int) -> bytes | None:
    """The message as it is in the log; None if there is none. Raises VerbError, LogError."""
    from coordinator.log.contents import message_at, record_of  # replays are no part of a coordinator's start

    summary = store.summary()
    if message_index < 0 or not summary.first_sequence_id <= sequence_id <= summary.last_sequence_id:
        return None
    try:
        return message_at(record_of(store.read(sequence_id, 1)[0]).content, message_index)
    except RemoteProtocolError as error:
        raise VerbError(f"record {sequence_id} can't be read: {error}") from None
