"""Arguments of two calls beside one another."""

from __future__ import annotations

import msgspec

from immortal.protocol.messages import IncomingRpc, RpcType, decode_incoming_rpc, decode_message, encode_incoming_rpc
from immortal.replay.findings import VALUE_CHARACTERS_MAX, ArgumentPair, pair_arguments


def call(*arguments: object, method_id: int = 3, rpc_type: int = 1, raw: bytes | None = None) -> IncomingRpc:
    encoded = msgspec.msgpack.encode(arguments) if raw is None else raw
    message = encode_incoming_rpc(method_id, rpc_type, encoded)
    _, start, end = decode_message(message)
    return decode_incoming_rpc(message, start, end)


def pairs(old: IncomingRpc | None, new: IncomingRpc | None) -> list[ArgumentPair]:
    return pair_arguments(old, new, is_msgpack=True)


def test_those_that_differ_are_marked() -> None:
    assert pairs(call("tea", 2), call("tea", 3, None)) == [
        ArgumentPair("'tea'", "'tea'", False),
        ArgumentPair("2", "3", True),
        ArgumentPair(None, "None", True),
    ]


def test_who_waits_is_no_argument() -> None:
    asynchronous = int(RpcType.ASYNC)
    old, new = call("a", 7, "x", rpc_type=asynchronous), call("a", 8, "y", rpc_type=asynchronous)
    assert pairs(old, new) == [ArgumentPair("'x'", "'y'", True)]


def test_values_that_differ_only_behind_what_is_shown() -> None:
    (pair,) = pairs(call("x" * 1000 + "a"), call("x" * 1000 + "b"))
    assert pair.differs
    assert pair.old == pair.new
    assert len(pair.old or "") == VALUE_CHARACTERS_MAX


def test_what_can_not_be_compared_so() -> None:
    assert pairs(call(1), None) == []
    assert pairs(call(1), call(1, method_id=4)) == []
    assert pairs(call(raw=b"\x92\xbf"), call(1)) == []
    assert pairs(call(raw=b"\x05"), call(1)) == []
    assert pair_arguments(call(1), call(2), is_msgpack=False) == []
