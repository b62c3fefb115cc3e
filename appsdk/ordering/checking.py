"""Whether the calls of a run are its sender's to make: the destination makes them to itself, and may make any."""

from __future__ import annotations

import msgspec

from immortal.appsdk.ordering.messages import Propose
from immortal.protocol import decoding
from immortal.protocol.client import decode_caller
from immortal.protocol.errors import ProtocolError
from immortal.protocol.messages import RpcKind, RpcType, decode_incoming_rpc, decode_message
from immortal.protocol.nodes import HANDLES_METHOD_ID, NODE_METHOD_ID
from immortal.protocol.ordering import ORDERED_METHOD_ID
from immortal.protocol.varint import encode_zigzag

_decode_items = decoding.Decoder(list[msgspec.Raw]).decode
_decode_speaker = decoding.Decoder(str).decode


def problem_of(propose: Propose, source: str | None) -> str | None:
    """What is wrong with a Propose that came from ``source``, in words; None: nothing."""
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
    """Of a whole RPC message."""
    _, start, end = decode_message(call, 0)
    return bytes(decode_incoming_rpc(call, start, end).arguments)


def _speaker(arguments: bytes, rpc_type: int) -> str:
    """Who sends a call to a node, or word of a handle, as the call itself says; "" where it does not."""
    try:
        found = _decode_speaker(_decode_items(arguments)[2 if rpc_type == RpcType.ASYNC else 0])
    except (decoding.DecodeError, IndexError):
        return ""
    return found
