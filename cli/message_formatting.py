"""One logged message in words: its method and arguments, by the class that handles it where that is known."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import msgspec

from immortal.appsdk.handlers.definition import Definition, definition_of
from immortal.appsdk.running.runner import load_or_report
from immortal.pipeline.arguments import ArgumentDecoder
from immortal.protocol import decoding
from immortal.protocol.client_frames import decode_caller
from immortal.protocol.command_line import FailedError, echo
from immortal.protocol.errors import ImmortalError
from immortal.protocol.messages import (
    IncomingRpc,
    MessageType,
    RpcKind,
    RpcType,
    decode_incoming_rpc,
    decode_message,
    encode_incoming_data,
)

BYTES_SHOWN_MAX = 64  # of what can't be decoded


def decoder_for(given: str | None, registered: str | None) -> ArgumentDecoder | None:
    """By the class that was ``given`` (--app), or the one in the settings; None where there is none to be had.

    Raises FailedError for a ``given`` one that can't be used. What the module prints as it is imported goes to stderr.
    """
    app = given or registered
    if app is None:
        return None
    with contextlib.redirect_stdout(sys.stderr):
        cls = load_or_report(app)
        if cls is not None:
            try:
                definition: Definition = definition_of(cls)
                definition.resolve(names_may_be_missing=False)
                return ArgumentDecoder(definition)
            except ImmortalError as error:
                echo(f"{app}: {error}", err=True)
    if given is not None:
        raise FailedError(f"{given} can't be used to decode arguments: see above")
    return None


def rpc_of(message: bytes) -> IncomingRpc | None:
    """None for what is no RPC, or none that can be read."""
    try:
        message_type, start, end = decode_message(message)
        return decode_incoming_rpc(message, start, end) if message_type == MessageType.RPC else None
    except ImmortalError:
        return None


def waiting_caller(rpc: IncomingRpc) -> tuple[str, int] | None:
    """Who waits for the answer of a call, and its number there; None where nobody does, or nobody can tell."""
    data = encode_incoming_data(rpc.method_id, rpc.rpc_type, rpc.arguments, rpc.kind)
    caller = decode_caller(data, 0, len(data))
    return None if caller is None else (caller.name, caller.number)


def describe_message(message: bytes, decoder: ArgumentDecoder | None) -> dict[str, Any]:
    """Plain JSON values: "method" (None: unknown), "type", and "arguments", or "bytes" with the "problem".

    "arguments" are an object by parameter name, or where no class is known an array. "$caller" and "$call" tell who
    waits for the answer, and its number.
    """
    if not message:
        return {"method": None, "problem": "the message is not kept: it is too large"}
    rpc = rpc_of(message)
    if rpc is None:
        return {"method": None, "problem": "it is no call that can be read", "bytes": _hex(message)}
    described: dict[str, Any] = {"method": None, "type": _type(rpc)}
    problem = None
    if decoder is not None:
        decoded = decoder.decode(rpc.kind, rpc.rpc_type, rpc.method_id, rpc.arguments)
        described["method"], problem = decoded.method, decoded.problem
        if decoded.arguments_json is not None:
            named = decoding.load_json(decoded.arguments_json)
            front = {name: named.pop(name) for name in ("$caller", "$call") if name in named}
            return {**described, **front, "arguments": named}
    described |= {} if problem is None else {"problem": problem}
    return {**described, **_by_position(rpc)}


def _type(rpc: IncomingRpc) -> str:
    return RpcType(rpc.rpc_type).name.lower() if rpc.kind == RpcKind.CALL else RpcKind(rpc.kind).name.lower()


def _by_position(rpc: IncomingRpc) -> dict[str, Any]:
    caller = waiting_caller(rpc)
    values = _values(rpc)
    front = {} if caller is None else {"$caller": caller[0], "$call": caller[1]}
    try:
        arguments = decoding.load_json(msgspec.json.encode(values[len(front) :])) if values is not None else None
    except (ValueError, TypeError, RecursionError):
        arguments = None  # such as a map whose keys are arrays
    return {**front, **({"bytes": _hex(rpc.arguments)} if arguments is None else {"arguments": arguments})}


def _values(rpc: IncomingRpc) -> list[Any] | None:
    """The arguments as MessagePack has them; None where they are no array of it."""
    try:
        values: list[Any] = decoding.decode_shown(rpc.arguments, type=list[Any])
    except decoding.DecodeError:
        return None
    return values


def _hex(data: bytes) -> str:
    return data[:BYTES_SHOWN_MAX].hex(" ") + (" ..." if len(data) > BYTES_SHOWN_MAX else "")
