"""Calls in words, for the people who read a report."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from coordinator.core.output_check import Divergence
from protocol.errors import ImmortalError
from protocol.messages import MessageType, decode_incoming_rpc, decode_message

Methods = Mapping[tuple[str, int], str]
"""(destination, method ID) to a name, as an app's AppDescription gives them."""

ARGUMENTS_SIZE_MAX = 200  # characters


def call_in_words(message: bytes, destination: str, methods: Methods) -> str:
    """One RPC message in incoming form: ``Counter.count('the', 3)``.

    The arguments of an app that names its methods are a MessagePack array; others are shown in hex.
    """
    try:
        message_type, start, end = decode_message(message, 0)
        if message_type != MessageType.RPC:
            return f"a message of type {message_type}"
        rpc = decode_incoming_rpc(message, start, end)
    except ImmortalError as error:
        return f"a message that can't be read ({error})"
    name = methods.get((destination, rpc.method_id))
    return f"{name or f'method {rpc.method_id}'}({arguments_in_words(bytes(rpc.arguments), name is not None)})"


def arguments_in_words(arguments: bytes, is_msgpack: bool) -> str:
    text = arguments.hex(" ")
    if is_msgpack:
        try:
            values = msgspec.msgpack.decode(arguments)
            text = ", ".join(repr(value) for value in values) if isinstance(values, list) else repr(values)
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass  # a handler with a form of its own
    return text if len(text) <= ARGUMENTS_SIZE_MAX else f"{text[: ARGUMENTS_SIZE_MAX - 3]}..."


def divergence_in_words(divergence: Divergence, name: str, methods: Methods, shown: int = 3) -> str:
    """Where a replay of the instance ``name`` left what its log says, and what it makes there now."""
    to = f"the calls to {divergence.destination!r}" if divergence.destination else "the calls to itself"
    where = "a checkpoint" if divergence.sequence_id is None else f"record {divergence.sequence_id}"
    first, last = divergence.after_position + 1, divergence.position
    span = f"number {first}" if first == last else f"numbers {first} to {last}"
    text = f"{name!r} does not do again what it did before: by {where}, {to} had reached number {last}; "
    if divergence.made_position < last:
        text += f"the replay makes only {divergence.made_position}"
    else:
        text += f"{span} are others now" if first != last else f"{span} is another one now"
    if divergence.made:
        made = [
            f"{position}: {call_in_words(message, divergence.destination, methods)}"
            for position, message in divergence.made[:shown]
        ]
        more = len(divergence.made) - len(made)
        text += f" (now: {'; '.join(made)}{f'; and {more} more' if more > 0 else ''})"
    return text
