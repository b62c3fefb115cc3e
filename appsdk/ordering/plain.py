"""Input that is no message of the protocol: whether it comes from outside, so that it may have to wait in the queue.

What an instance sends to itself does not wait, as it follows from what it has handled. To tell it from requests of
clients and impulses, which have no other source either, goes by what it is: these are never forks or answers.
"""

from __future__ import annotations

from functools import cached_property

from immortal.protocol.client import CLIENTS, decode_answered_number, decode_caller
from immortal.protocol.messages import RpcKind, RpcType, decode_message
from immortal.protocol.ordering import FENCING_METHOD_ID, ORDERED_METHOD_ID, ORDERING_METHOD_ID
from immortal.protocol.varint import decode_zigzag_int

CLOCK_METHOD_ID, EFFECT_METHOD_ID = -2, -3


class Plain:
    """One RPC message of a record, from its size on. ``source``: as :class:`appsdk.calls.context.Context` has it."""

    def __init__(self, message: bytes, source: str | None) -> None:
        self.message = message
        self.source = source
        _, self._start, self._end = decode_message(message, 0)
        self.kind = message[self._start]
        self.method_id, self.type_offset = decode_zigzag_int(message, self._start + 1)
        self.rpc_type = message[self.type_offset]

    @property
    def is_own(self) -> bool:
        """The instance has sent it to itself; so has it the whole batch that it is in."""
        if self.source != "" or self.rpc_type == RpcType.IMPULSE:
            return False
        return self.kind != RpcKind.CALL or self.rpc_type == RpcType.FORK or self.caller is None

    @property
    def may_wait(self) -> bool:
        if self.source is None or self.is_own:
            return False
        if self.kind == RpcKind.CALL:
            # Timers and orders of operators tell nothing that somebody else has done because of a multicast.
            reserved = (ORDERED_METHOD_ID, ORDERING_METHOD_ID, FENCING_METHOD_ID)
            return self.method_id == EFFECT_METHOD_ID or (self.method_id > 0 and self.method_id not in reserved)
        return True

    @cached_property
    def caller(self) -> tuple[str, int] | None:
        """The client that waits for its answer, and the number of its request; None: no client does."""
        found = decode_caller(self.message, self._start, self._end)
        if found is None or not found.name.startswith(CLIENTS):
            return None
        return found.name, found.number

    @property
    def answers(self) -> int | None:
        """The number of the call that it answers; None: it is a call."""
        if self.kind == RpcKind.CALL:
            return None
        number = decode_answered_number(self.message, self._start, self._end)
        return -1 if number is None else number


def as_fork(plain: Plain) -> bytes:
    """The message as the instance can send it to itself: an impulse is a fork there."""
    message = plain.message
    if plain.rpc_type != RpcType.IMPULSE:
        return message
    return message[: plain.type_offset] + bytes((RpcType.FORK,)) + message[plain.type_offset + 1 :]
