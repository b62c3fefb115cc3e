"""Calls and answers as people read them."""

from __future__ import annotations

import msgspec
import pytest

from immortal.coordinator.core.formatting import CallText, Methods, format_call, format_counted_method
from immortal.protocol.messages import RpcKind, RpcType, decode_incoming_rpc, decode_message, encode_incoming_rpc

METHODS: Methods = {("", 7): "Teller.transfer", ("north", 8): "Bank.debit"}


def rpc(method_id: int, *arguments: object, rpc_type: int = RpcType.FORK, kind: int = RpcKind.CALL) -> bytes:
    return encode_incoming_rpc(method_id, rpc_type, msgspec.msgpack.encode(arguments), kind)


@pytest.mark.parametrize(
    ("message", "destination", "text"),
    [
        (rpc(8, "ann", 3), "north", "Bank.debit('ann', 3)"),
        (rpc(8, "ann", 3), "south", "method 8(92 a3 61 6e 6e 03)"),
        (rpc(8, "teller", 17, "ann", 3, rpc_type=RpcType.ASYNC), "north", "Bank.debit('ann', 3) as call 17 of teller"),
        (rpc(7, "", 18, rpc_type=RpcType.ASYNC), "", "Teller.transfer() as call 18 of itself"),
        (rpc(7, 17, 97, kind=RpcKind.RETURNED_VALUE), "south", "the answer 97 of Teller.transfer to call 17"),
        (rpc(8, 17, 97, kind=RpcKind.RETURNED_VALUE), "", "the answer 97 of Bank.debit to call 17"),
        (rpc(7, 17, kind=RpcKind.RETURNED_NOTHING), "south", "the answer of Teller.transfer to call 17"),
        (
            rpc(8, 17, "ClosedError", [5], {}, kind=RpcKind.RAISED),
            "",
            "the answer of Bank.debit to call 17: it raised ClosedError(5)",
        ),
        (rpc(7, "odd", kind=RpcKind.RAISED), "south", "Teller.transfer('odd')"),
        (encode_incoming_rpc(8, RpcType.FORK, b"\xc1"), "north", "Bank.debit(c1)"),
    ],
)
def test_calls_and_answers(message: bytes, destination: str, text: str) -> None:
    assert format_call(message, destination, METHODS) == text


def test_large_arguments_are_cut_unless_all_are_wanted() -> None:
    _, start, end = decode_message(rpc(8, "x" * 1000))
    decoded = decode_incoming_rpc(rpc(8, "x" * 1000), start, end)
    assert len(CallText.from_rpc(decoded, is_msgpack=True).with_method("f")) == 203
    assert "x" * 1000 in CallText.from_rpc(decoded, is_msgpack=True, size_max=None).with_method("f")


def test_answers_are_counted_apart() -> None:
    assert format_counted_method(8, RpcKind.CALL, "north", METHODS) == "Bank.debit"
    assert format_counted_method(7, RpcKind.RETURNED_VALUE, "north", METHODS) == "answers of Teller.transfer"
    assert format_counted_method(9, RpcKind.RAISED, "north", METHODS) == "exceptions of method 9"
