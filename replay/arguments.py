"""Two calls of one method beside one another, argument by argument."""

from __future__ import annotations

from msgspec import Struct

from immortal.protocol import decoding
from immortal.protocol.messages import IncomingRpc, RpcKind, RpcType
from immortal.protocol.shown import shown

ARGUMENTS_MAX = 50  # that are told apart
VALUE_CHARACTERS_MAX = 200


class ArgumentPair(Struct, frozen=True):
    """In words; None where that call has no such argument. ``differs``: the whole values, not what is shown."""

    old: str | None
    new: str | None
    differs: bool


def pair_arguments(old: IncomingRpc | None, new: IncomingRpc | None, *, is_msgpack: bool) -> list[ArgumentPair]:
    """By position; empty where they are no two calls of one method, or their arguments no MessagePack array."""
    if old is None or new is None or not is_msgpack or (old.method_id, old.kind) != (new.method_id, new.kind):
        return []
    before, after = _values(old), _values(new)
    if before is None or after is None:
        return []
    return [
        ArgumentPair(_shown(before, index), _shown(after, index), before[index : index + 1] != after[index : index + 1])
        for index in range(min(ARGUMENTS_MAX, max(len(before), len(after))))
    ]


def _values(rpc: IncomingRpc) -> list[object] | None:
    """Of a call: behind who waits for its answer, which its words tell."""
    if rpc.kind != RpcKind.CALL:
        return None
    try:
        values = decoding.decode_shown(rpc.arguments)
    except decoding.DecodeError:
        return None
    if not isinstance(values, list):
        return None
    return values[2:] if rpc.rpc_type == RpcType.ASYNC else values


def _shown(values: list[object], index: int) -> str | None:
    if index >= len(values):
        return None
    text = shown(values[index])
    return text if len(text) <= VALUE_CHARACTERS_MAX else f"{text[: VALUE_CHARACTERS_MAX - 3]}..."
