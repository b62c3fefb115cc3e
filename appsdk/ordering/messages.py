"""Messages of ordered multicast, checks of their senders, and other input that can have to wait behind them.

`docs/explanation/ordering.md` explains each message. A *run* is ordered as a unit: successive calls of one method by
one sender to the same destinations. ``number`` is the sender's, from 1.
"""

from __future__ import annotations

from functools import cached_property
from typing import TypeAlias

import msgspec

from immortal.protocol import decoding
from immortal.protocol.client_frames import CLIENTS, decode_answered_number, decode_caller
from immortal.protocol.errors import ProtocolError
from immortal.protocol.messages import RpcKind, RpcType, decode_incoming_rpc, decode_message
from immortal.protocol.system_methods import (
    FENCING_METHOD_ID,
    HANDLES_METHOD_ID,
    NODE_METHOD_ID,
    ORDERED_METHOD_ID,
    ORDERING_METHOD_ID,
)
from immortal.protocol.varint import decode_zigzag_int, encode_zigzag

Timestamp: TypeAlias = int
"""Time of a queue's clock, which is a counter. Users never see it."""


class Scope(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Scope of runs to the members of a named group's view: the group, and the view's number."""

    group: str
    view: int

    def reaches(self, group: str, view: int) -> bool:
        """Return True if the scope is of ``group`` and of ``view`` or an earlier one."""
        return self.group == group and self.view <= view


class Propose(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Message of a sender to a destination: make room for this run at ``estimate``, and answer with the place.

    ``method_id`` comes first: the destination's coordinator checks by it whether the sender has permission. ``calls``
    are whole RPC messages, in incoming form. ``alone``: there is no other destination, and all earlier runs of the
    sender stand; then the proposal is final, and the destination delivers without a Commit.
    """

    method_id: int
    sender: str
    number: int
    estimate: Timestamp
    calls: list[bytes]
    alone: bool = False
    scope: Scope | None = None


class Proposed(msgspec.Struct, array_like=True, frozen=True, tag=1, gc=False):
    """Message of a destination to a sender: a block is at ``timestamp``; nothing after it is delivered."""

    number: int
    timestamp: Timestamp


class Settle(msgspec.Struct, array_like=True, frozen=True, tag=2, gc=False):
    """Message of a sender to a destination: ``timestamp`` is final; move your clock and the block there."""

    number: int
    timestamp: Timestamp


class Settled(msgspec.Struct, array_like=True, frozen=True, tag=3, gc=False):
    """Message of a destination to a sender: the Settle is done."""

    number: int


class Commit(msgspec.Struct, array_like=True, frozen=True, tag=4, gc=False):
    """Message of a sender to a destination: all destinations' clocks are there; deliver the run at its turn."""

    number: int
    timestamp: Timestamp


class Refused(msgspec.Struct, array_like=True, frozen=True, tag=5, gc=False):
    """Message of a destination to a sender: this run is refused; the others must continue without this destination."""

    number: int
    text: str


class Cancel(msgspec.Struct, array_like=True, frozen=True, tag=6, gc=False):
    """Message of a sender to a destination: nobody delivers this run."""

    number: int


class Fence(msgspec.Struct, array_like=True, frozen=True, tag=7, gc=False):
    """Message that expels ``member`` from ``group``: cancel your runs to it, of views up to ``view``, and send no more.

    ``asks``: the expelling instance sends it; answer Fenced once all present entries of your queue are final.
    """

    group: str
    member: str
    view: int
    asks: bool = False


class Fenced(msgspec.Struct, array_like=True, frozen=True, tag=8, gc=False):
    """Message of a member to the expelling one: the fence is set.

    ``committed``: the last run of the expelled member that was committed here; 0: none."""

    group: str
    member: str
    view: int
    committed: int


class Resolve(msgspec.Struct, array_like=True, frozen=True, tag=9, gc=False):
    """Message of the expelling member to the others: deliver the expelled one's own runs only up to ``committed``."""

    group: str
    member: str
    view: int
    committed: int


class Late(msgspec.Struct, array_like=True, frozen=True, tag=10, gc=False):
    """Message of a destination to a sender: your run delays others; if it does not stand, Settle it at ``timestamp``.

    Or later. What was executed here before that timestamp, when the sender receives this, is no effect of the run.
    """

    number: int
    timestamp: Timestamp


Fencing: TypeAlias = Fence | Resolve
"""Messages that only instances with permission to change a group can send."""
OfFences: TypeAlias = Fencing | Fenced
Message: TypeAlias = Proposed | Settle | Settled | Commit | Refused | Cancel | Fenced | Late


# Checks of the sender of a run. The destination makes the calls to itself, and could make any.


_decode_items = decoding.Decoder(list[msgspec.Raw]).decode
_decode_speaker = decoding.Decoder(str).decode


def problem_of(propose: Propose, source: str | None) -> str | None:
    """Check a Propose that came from ``source``; return the problem as text or None."""
    if propose.sender != source:
        return f"{source!r} speaks for {propose.sender!r}"
    front = bytes((RpcKind.CALL,)) + encode_zigzag(propose.method_id)
    is_of_nodes = propose.method_id in (NODE_METHOD_ID, HANDLES_METHOD_ID)
    if (not 1 <= propose.method_id < ORDERED_METHOD_ID and not is_of_nodes) or not propose.calls:
        return f"{len(propose.calls)} calls of method {propose.method_id}"
    for call in propose.calls:
        try:
            _, start, end = decode_message(call, 0)
            rpc_type = call[start + len(front)]
        except (ProtocolError, IndexError):
            return "a call that can't be read"
        if end != len(call) or not call.startswith(front, start):
            return f"a call of another method than {propose.method_id}"
        if rpc_type == RpcType.ASYNC:
            caller = decode_caller(call, start, end)
            if caller is None or caller.name != propose.sender:
                return "a call whose answer would go to somebody else"
        elif rpc_type != RpcType.FORK:
            return f"a call of the type {rpc_type}"
        if is_of_nodes and _speaker(arguments_of(call), rpc_type) != propose.sender:
            return "a call to a node in the name of somebody else"
    return None


def arguments_of(call: bytes) -> bytes:
    """Return the arguments of a whole RPC message."""
    _, start, end = decode_message(call, 0)
    return bytes(decode_incoming_rpc(call, start, end).arguments)


def _speaker(arguments: bytes, rpc_type: int) -> str:
    """Return the sender named in a call to a node or a message about handles; "" if there is none."""
    try:
        found = _decode_speaker(_decode_items(arguments)[2 if rpc_type == RpcType.ASYNC else 0])
    except (decoding.DecodeError, IndexError):
        return ""
    return found


# Other input: whether it comes from outside, so that it can have to wait in the queue.
#
# Messages of an instance to itself do not wait, since they follow from what it has handled. They are forks or answers;
# requests of clients and impulses, which also have no other source, never are.


CLOCK_METHOD_ID, EFFECT_METHOD_ID = -2, -3


class Plain:
    """RPC message of a record, with its size field. ``source``: as in :class:`appsdk.calls.context.Context`."""

    def __init__(self, message: bytes, source: str | None) -> None:
        self.message = message
        self.source = source
        _, self._start, self._end = decode_message(message, 0)
        self.kind = message[self._start]
        self.method_id, self.type_offset = decode_zigzag_int(message, self._start + 1)
        self.rpc_type = message[self.type_offset]

    @property
    def is_own(self) -> bool:
        """True if the instance has sent the message, and so the whole batch that it is in, to itself."""
        if self.source != "" or self.rpc_type == RpcType.IMPULSE:
            return False
        return self.kind != RpcKind.CALL or self.rpc_type == RpcType.FORK or self.caller is None

    @property
    def may_wait(self) -> bool:
        if self.source is None or self.is_own:
            return False
        if self.kind == RpcKind.CALL:
            # Timers and operators' orders reveal nothing that others did because of a multicast.
            reserved = (ORDERED_METHOD_ID, ORDERING_METHOD_ID, FENCING_METHOD_ID)
            return self.method_id == EFFECT_METHOD_ID or (self.method_id > 0 and self.method_id not in reserved)
        return True

    @cached_property
    def caller(self) -> tuple[str, int] | None:
        """Client that waits for the answer, and the number of its request; None: no client does."""
        found = decode_caller(self.message, self._start, self._end)
        if found is None or not found.name.startswith(CLIENTS):
            return None
        return found.name, found.number

    @property
    def answers(self) -> int | None:
        """Number of the call that the message answers; None: it is a call."""
        if self.kind == RpcKind.CALL:
            return None
        number = decode_answered_number(self.message, self._start, self._end)
        return -1 if number is None else number


def as_fork(plain: Plain) -> bytes:
    """Return the message as the instance can send it to itself: an impulse becomes a fork."""
    message = plain.message
    if plain.rpc_type != RpcType.IMPULSE:
        return message
    return message[: plain.type_offset] + bytes((RpcType.FORK,)) + message[plain.type_offset + 1 :]
