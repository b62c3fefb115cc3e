"""Calls, answers, effects and times as people read them."""

from __future__ import annotations

import msgspec
import pytest

from immortal.coordinator.core.formatting import effect_text, format_call
from immortal.presenters.records import rpc_of
from immortal.protocol.messages import RpcKind, RpcType, encode_incoming_rpc

METHODS = {("", 1): "Ride.ride", ("", -2): "the clock", ("", -3): "the result of an effect"}
UNLOCK = [14, "effect unlock", 13471934609640582639]
WORDS = "unlock(bike=7) of Ride.ride(17)"
FAILED = ["", ["unlock", "OSError", "no road", "a trace", 3], {}]


@pytest.mark.parametrize(
    ("method_id", "kind", "values", "text"),
    [
        (-3, RpcKind.CALL, [*UNLOCK, False, True, WORDS], f"{WORDS} returned True"),
        (-3, RpcKind.CALL, [*UNLOCK, True, FAILED, WORDS], f"{WORDS} raised OSError: no road"),
        (-3, RpcKind.CALL, [*UNLOCK, True, ["Locked", [7], {}], WORDS], f"{WORDS} raised Locked(7)"),
        (-3, RpcKind.CALL, [*UNLOCK, False, True], "the result of an effect 'unlock': it returned True"),
        (-2, RpcKind.CALL, [1795876823064250312], "the clock says 2026-11-28T14:40:23.064250Z"),
        (-2, RpcKind.CALL, [0, {}, 5_000_000_000], "the clock says 1970-01-01T00:00:00.000000Z, stepped by 5 s"),
        (1, RpcKind.RETURNED_VALUE, ["~c", 1, "open"], "the answer 'open' of Ride.ride to call 1 of ~c"),
        (
            1,
            RpcKind.RAISED,
            ["~c", 1, "Locked", [7], {}],
            "the answer of Ride.ride to call 1 of ~c: it raised Locked(7)",
        ),
        (1, RpcKind.RETURNED_VALUE, [3, "open"], "the answer 'open' of Ride.ride to call 3"),
    ],
)
def test_a_message_in_words(method_id: int, kind: RpcKind, values: list[object], text: str) -> None:
    rpc_type = RpcType.ASYNC if method_id > 0 else RpcType.IMPULSE
    message = encode_incoming_rpc(method_id, rpc_type, msgspec.msgpack.encode(values), kind)
    assert format_call(message, "", METHODS) == text
    rpc = rpc_of(message)
    assert rpc is not None
    assert effect_text(rpc) == (WORDS if WORDS in values else "")
