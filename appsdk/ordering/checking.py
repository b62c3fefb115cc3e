"""Whether the calls of a run are its sender's to make: the destination makes them to itself, and may make any."""

from __future__ import annotations

from appsdk.ordering.messages import Propose
from protocol.client import decode_caller
from protocol.errors import ProtocolError
from protocol.messages import RpcKind, RpcType, decode_message
from protocol.ordering import ORDERED_METHOD_ID
from protocol.varint import encode_zigzag


def problem_of(propose: Propose, source: str | None) -> str | None:
    """What is wrong with a Propose that came from ``source``, in words; None: nothing."""
    if propose.sender != source:
        return f"{source!r} speaks for {propose.sender!r}"
    front = bytes((RpcKind.CALL,)) + encode_zigzag(propose.method_id)
    if not 1 <= propose.method_id < ORDERED_METHOD_ID or not propose.calls:
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
    return None
