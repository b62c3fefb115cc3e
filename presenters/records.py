"""Descriptions of a log's records for people: the messages of each, and the source of each batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from immortal.protocol import decoding, redaction
from immortal.protocol.errors import ImmortalError
from immortal.protocol.safe_output import printable

if TYPE_CHECKING:
    from immortal.protocol.executions import ExecutionIndex

from immortal.appsdk.state.tree import to_json, tree
from immortal.appsdk.types.registry import show_custom
from immortal.coordinator.core.formatting import CallText, Methods, method_name, shown_values, time_text
from immortal.coordinator.log.identity import verify_value
from immortal.coordinator.log.reader import LoggedValue
from immortal.coordinator.log.record_contents import batches, waiting_caller
from immortal.pipeline.arguments import ArgumentDecoder
from immortal.protocol.extensions import decode_record_time
from immortal.protocol.messages import (
    IncomingRpc,
    MessageType,
    RpcKind,
    RpcType,
    decode_incoming_rpc,
    decode_message,
    decode_messages,
    decode_outgoing_rpc,
)
from immortal.protocol.record import HEADER_SIZE_BYTES
from immortal.protocol.system_methods import CANCEL_CALL_METHOD_ID, EFFECT_METHOD_ID, ORDER_METHOD_ID
from immortal.protocol.trailer import BatchKind

ARGUMENTS_SHOWN_BYTES_MAX = 48


def describe_record(logged: LoggedValue, committer_id: int, methods: Methods | None = None) -> dict[str, Any]:
    """Return the record as plain values; for a damaged one only the "problem".

    ``methods``: the methods of the instance's class; with them, messages have names, and their arguments as values.
    """
    described: dict[str, Any] = {"sequence_id": logged.sequence_id, "size_bytes": len(logged.value)}
    if logged.problem is not None:
        return {**described, "problem": logged.problem}
    try:
        header, trailer = verify_value(logged.value, logged.sequence_id, committer_id)
        content = logged.value[HEADER_SIZE_BYTES : header.size_bytes]
        messages = list(_messages(content, methods or {}))
    except ImmortalError as error:
        return {**described, "problem": str(error)}
    return {
        **described,
        "size_bytes": header.size_bytes,
        "time": time_text(trailer.time_ns),
        "time_ns": trailer.time_ns,
        "check": f"{header.check:016x}",
        "sources": [
            {
                "kind": BatchKind(batch.kind).name.lower(),
                "source": batch.name,
                "first_position": batch.first_position,
                "count": batch.count,
                "send_time_ns": batch.send_time_ns,
            }
            for batch in trailer.batches
        ],
        "outputs": [
            {"destination": mark.destination, "position": mark.position, "check": f"{mark.checksum:016x}"}
            for mark in trailer.outputs
        ],
        "messages": messages,
    }


def _messages(content: bytes, methods: Methods) -> Iterator[dict[str, Any]]:
    """Yield each message; those of a batch one by one, marked with the batch's type."""
    offset = 0
    for message_type, start, end in decode_messages(content):
        if message_type == MessageType.RECORD_TIME:
            yield {"type": "RECORD_TIME", "time_ns": decode_record_time(content, start, end)}
        elif message_type in (MessageType.RPC_BATCH, MessageType.COUNT_REPLAYABLE_RPC_BATCH):
            (batch,) = batches(content[offset:end])
            for inner_type, inner_start, inner_end in decode_messages(batch.payload):
                inner = _message(batch.payload, inner_type, inner_start, inner_end, methods)
                yield {**inner, "batch": MessageType(message_type).name}
        else:
            yield _message(content, message_type, start, end, methods)
        offset = end


def _message(content: bytes, message_type: int, start: int, end: int, methods: Methods) -> dict[str, Any]:
    if message_type == MessageType.RPC:
        return _rpc(content, start, end, methods)
    name = MessageType(message_type).name if message_type in set(MessageType) else f"type {message_type}"
    described = {"type": name, "size_bytes": end - start, "data": _shown(content[start:end], None)}
    if message_type == MessageType.INITIAL_MESSAGE and (wrapped := _inner_rpc(content[start:end], methods)) is not None:
        return {**described, "wraps": wrapped}
    return described


def _inner_rpc(content: bytes, methods: Methods) -> dict[str, Any] | None:
    """Describe the RPC in an initial message: the SDK's is incoming, others are outgoing. None if it is no RPC."""
    try:
        message_type, start, end = decode_message(content, 0)
        if message_type != MessageType.RPC or end != len(content):
            return None
        try:
            incoming = decode_outgoing_rpc(content, start, end).incoming
        except ImmortalError:
            incoming = content[start:end]
        return _rpc(incoming, 0, len(incoming), methods)
    except (ImmortalError, ValueError):
        return None


def _rpc(content: bytes, start: int, end: int, methods: Methods) -> dict[str, Any]:
    rpc = decode_incoming_rpc(content, start, end)
    name = method_name(rpc.method_id, rpc.kind, "", methods)
    return {
        "type": "RPC",
        "kind": RpcKind(rpc.kind).name.lower(),
        "method_id": rpc.method_id,
        "rpc_type": RpcType(rpc.rpc_type).name.lower(),
        "size_bytes": len(rpc.arguments),
        "arguments": _shown(rpc.arguments, name if 0 <= rpc.method_id < CANCEL_CALL_METHOD_ID else None),
        **({} if name is None else _named(rpc, name)),
    }


def _named(rpc: IncomingRpc, name: str) -> dict[str, Any]:
    """Describe a message whose method has a name: its arguments are a MessagePack array."""
    try:
        values = decoding.decode_shown(rpc.arguments)
        if not isinstance(values, list):
            return {"method": name}
        decoded = {key: to_json(tree(value)) for key, value in _parts(rpc, values, name).items()}
        return {
            "method": name,
            "in_words": CallText.from_rpc(rpc, is_msgpack=True, name=name).with_method(name),
            **decoded,
        }
    except decoding.DecodeError:  # not a call that the SDK made
        return {"method": name}


def _parts(rpc: IncomingRpc, values: list[Any], name: str) -> dict[str, Any]:
    match rpc.kind, values:
        case RpcKind.RETURNED_VALUE, [number, value]:
            return {"call_number": number, "value": redaction.result(name, value)}
        case RpcKind.RETURNED_NOTHING, [number]:
            return {"call_number": number}
        case RpcKind.RAISED, [number, error, list(arguments), attributes]:
            parts = {"values": arguments, "attributes": attributes}
            return {"call_number": number, "raised": error, **{k: redaction.result(name, v) for k, v in parts.items()}}
    if rpc.kind == RpcKind.CALL and rpc.rpc_type == RpcType.ASYNC and len(values) >= 2:
        caller, number, *values = values
        return {"caller": caller, "call_number": number, "values": redaction.arguments(name, values)}
    return {"values": shown_values(rpc.method_id, values, name)}


def _shown(data: bytes, name: str | None) -> str:
    if redaction.may_apply(name):
        return redaction.REDACTED
    if len(data) <= ARGUMENTS_SHOWN_BYTES_MAX:
        return repr(data)[2:-1]
    return f"{repr(data[:ARGUMENTS_SHOWN_BYTES_MAX])[2:-1]}..."


# --- for people ------------------------------------------------------------------------------------------------------


def record_lines(described: dict[str, Any]) -> Iterator[str]:
    """Yield the record as lines of text that are safe to print: its own line, then one for each message."""
    yield from map(printable, _record_lines(described))


def _record_lines(described: dict[str, Any]) -> Iterator[str]:
    front = f"record {described['sequence_id']}"
    if "problem" in described:
        yield f"{front}  DAMAGED: {described['problem']}"
        return
    sources = ", ".join(_source_text(source) for source in described["sources"])
    outputs = ", ".join(f"{mark['destination'] or 'oneself'} {mark['position']}" for mark in described["outputs"])
    yield (
        f"{front}  {described['time']}  {described['size_bytes']} bytes  check {described['check']}"
        + (f"  from {sources}" if sources else "")
        + (f"  outputs {outputs}" if outputs else "")
    )
    for message in described["messages"]:
        yield f"    {_message_text(message)}"


def grouped_lines(described: Iterable[dict[str, Any]], index: ExecutionIndex) -> Iterator[str]:
    """Yield messages as lines of text, grouped by execution, in the order of the groups' first messages."""
    groups: dict[int | None, list[str]] = {}
    for record in described:
        if "problem" in record:
            groups.setdefault(None, []).append(f"record {record['sequence_id']}  DAMAGED: {record['problem']}")
            continue
        begun = index.started_by(record["sequence_id"], record["time_ns"] or 0)
        messages = [one for one in record["messages"] if one["type"] not in ("RECORD_TIME", "INSTANCE_NAME")]
        for number, message in enumerate(messages):
            key = begun.get(number) or _execution_of(message, index)
            place = f"{record['sequence_id']}:{number}"
            groups.setdefault(key, []).append(f"{place}  {record['time']}  {_message_text(message)}")
    for key, lines in groups.items():
        found = None if key is None else index.get(key)
        if found is not None:
            yield printable(f"execution {found.id}: {found.call}, {found.state}")
        else:
            yield "not part of a listed execution"
        yield from (f"    {printable(line)}" for line in lines)


def _execution_of(message: dict[str, Any], index: ExecutionIndex) -> int | None:
    """Return the key of the execution to which an answer, an effect's result or an order belongs; None if unknown."""
    values = message.get("values", ())
    number = message.get("call_number") if message.get("kind") != "call" else None
    place = {EFFECT_METHOD_ID: 6, ORDER_METHOD_ID: 1}.get(message.get("method_id", 0))
    if place is not None and len(values) > place:
        return values[place] if isinstance(values[place], int) else None
    return index.caller_of(number) if isinstance(number, int) else None


def _source_text(source: dict[str, Any]) -> str:
    first, count = source["first_position"], source["count"]
    positions = f"{first}" if count == 1 else f"{first}-{first + count - 1}"
    if source["kind"] == "initial":
        return "the first start"
    if source["kind"] == "impulses":
        return f"impulses {positions}"
    return f"{source['source'] or 'oneself'} {positions}"


def _message_text(message: dict[str, Any]) -> str:
    if message["type"] == "RECORD_TIME":
        return f"RECORD_TIME {time_text(message['time_ns'])}"
    batch = f"{message['batch']} " if "batch" in message else ""
    if message["type"] != "RPC":
        wraps = f" wraps {_message_text(message['wraps'])}" if "wraps" in message else f" {message['data']}"
        return f"{batch}{message['type']}  {message['size_bytes']} bytes{wraps}"
    if "in_words" in message:
        return f"{batch}RPC {message['rpc_type']}  {message['size_bytes']} bytes  {message['in_words']}"
    kind = "" if message["kind"] == "call" else f"{message['kind']} "
    return (
        f"{batch}RPC {kind}method {message['method_id']} {message['rpc_type']}"
        f"  {message['size_bytes']} bytes  {message['arguments']}"
    )


# Description of one logged message: its method and arguments, by the class that handles it if that is known.


BYTES_SHOWN_MAX = 64  # of data that can't be decoded


def rpc_of(message: bytes) -> IncomingRpc | None:
    """Parse an RPC message; None if it is no RPC, or damaged."""
    try:
        message_type, start, end = decode_message(message)
        return decode_incoming_rpc(message, start, end) if message_type == MessageType.RPC else None
    except ImmortalError:
        return None


def describe_message(message: bytes, decoder: ArgumentDecoder | None) -> dict[str, Any]:
    """Return plain JSON values: "method" (None: unknown), "type", and "arguments", or "bytes" with the "problem".

    "arguments" are an object by parameter name, or an array if no class is known. "$caller" and "$call": who waits for
    the answer, and its number.
    """
    if not message:
        return {"method": None, "problem": "the message is too large to be kept"}
    rpc = rpc_of(message)
    if rpc is None:
        return {"method": None, "problem": "it is not a readable call", "bytes": _hex(message, None)}
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
    return {**described, **_by_position(rpc, described["method"])}


def _type(rpc: IncomingRpc) -> str:
    return RpcType(rpc.rpc_type).name.lower() if rpc.kind == RpcKind.CALL else RpcKind(rpc.kind).name.lower()


def _by_position(rpc: IncomingRpc, method: str | None) -> dict[str, Any]:
    caller = waiting_caller(rpc)
    front = {} if caller is None else {"$caller": caller[0], "$call": caller[1]}
    try:
        values = decoding.decode_shown(rpc.arguments, type=list[Any])
        shown = redaction.arguments(method, values[len(front) :])
        arguments = decoding.load_json(msgspec.json.encode(shown, enc_hook=show_custom))
    except (ValueError, TypeError, RecursionError):
        arguments = None  # no array, or such as a map whose keys are arrays
    return {**front, **({"bytes": _hex(rpc.arguments, method)} if arguments is None else {"arguments": arguments})}


def _hex(data: bytes, method: str | None) -> str:
    return (
        redaction.REDACTED
        if redaction.may_apply(method)
        else data[:BYTES_SHOWN_MAX].hex(" ") + (" ..." if len(data) > BYTES_SHOWN_MAX else "")
    )


def cell(value: Any) -> str:
    """Format a value of a table as text."""
    if value is None:
        return "-"
    return value.hex(" ") if isinstance(value, bytes) else str(value)
