"""Python expressions about a moment: ``self.balances[3] < 0 and method == "debit"``.

They run with the rights of this process, in it; whoever may give one may run any code.
"""

from __future__ import annotations

from types import CodeType
from typing import Any

from immortal.protocol import decoding
from immortal.protocol.messages import IncomingRpc, RpcKind, RpcType
from immortal.replay.errors import ReplayError


def compiled(text: str) -> CodeType:
    """Raises ReplayError for a text that is no expression."""
    try:
        return compile(text.strip(), "<expression>", "eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ReplayError(f"{text[:100]!r} is no Python expression: {error}") from None


def arguments_of(rpc: IncomingRpc | None) -> list[Any]:
    """Of a call, as MessagePack has them; of an answer its value."""
    if rpc is None:
        return []
    try:
        values = decoding.decode_shown(rpc.arguments)
    except decoding.DecodeError:
        return []
    if not isinstance(values, list):
        return []
    if rpc.kind != RpcKind.CALL or rpc.rpc_type == RpcType.ASYNC:  # the caller, or the number of the call
        return values[1:] if rpc.kind != RpcKind.CALL else values[2:]
    return values


def evaluate(code: CodeType, instance: Any, method: str, rpc: IncomingRpc | None, sequence_id: int, index: int) -> Any:
    """What it gives where the message was handled; raises whatever it raises."""
    names = {"self": instance, "method": method, "args": arguments_of(rpc), "record": sequence_id, "message": index}
    return eval(code, names)  # noqa: S307 (that is what it is for)
