"""Texts for reports to people: calls, answers, divergences, and problems between two logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from immortal.coordinator.core.output.output_check import Divergence
from immortal.protocol import decoding, redaction, system_methods
from immortal.protocol.errors import ImmortalError
from immortal.protocol.messages import IncomingRpc, MessageType, RpcKind, RpcType, decode_incoming_rpc, decode_message
from immortal.protocol.peer_frames import PeerFrame, RefusedCode
from immortal.protocol.safe_output import safe_repr

Methods = Mapping[tuple[str, int], str]
"""Names of methods by (destination, method ID), from an app's AppDescription."""

ARGUMENTS_SIZE_MAX = 200  # characters


def format_call(message: bytes, destination: str, methods: Methods) -> str:
    """Format an RPC message in incoming form, as ``Counter.count('the', 3)`` or ``the answer 3 of Counter.total to
    call 17``.

    The arguments of an app that names its methods are a MessagePack array; other arguments are shown in hex.
    """
    try:
        message_type, start, end = decode_message(message, 0)
        if message_type != MessageType.RPC:
            return f"a message of type {message_type}"
        rpc = decode_incoming_rpc(message, start, end)
    except ImmortalError as error:
        return f"a message that can't be read ({error})"
    name = method_name(rpc.method_id, rpc.kind, destination, methods)
    return CallText.from_rpc(rpc, is_msgpack=name is not None, name=name).with_method(name)


@dataclass(frozen=True, slots=True)
class CallText:
    """Text of a call or an answer, in two parts around the method's name, which can be known later."""

    method_id: int
    kind: int
    prefix: str
    suffix: str
    redacted: tuple[str, str] | None = None  # both parts for a name that rules of redaction concern

    @classmethod
    def from_rpc(
        cls, rpc: IncomingRpc, *, is_msgpack: bool, size_max: int | None = ARGUMENTS_SIZE_MAX, name: str | None = None
    ) -> CallText:
        """Format a call. ``is_msgpack``: the arguments are a MessagePack array, as the SDK's are; other arguments are
        shown in hex. ``size_max``: of the arguments, in characters; None: no limit. ``name``: of the method, if it is
        known now.
        """
        if name is not None or not redaction.rules():
            return cls(rpc.method_id, rpc.kind, *_around_name(rpc, is_msgpack, size_max, name or ""))
        plain, redacted = (_around_name(rpc, is_msgpack, size_max, each) for each in ("", None))
        return cls(rpc.method_id, rpc.kind, *plain, redacted)

    def with_method(self, name: str | None) -> str:
        prefix, suffix = self.prefix, self.suffix
        if self.redacted is not None and redaction.may_apply(name):
            prefix, suffix = self.redacted
        if self.method_id == system_methods.EFFECT_METHOD_ID and prefix:  # this text already names the effect
            return prefix
        return f"{prefix}{name or f'method {self.method_id}'}{suffix}"


_SYSTEM_METHODS = {
    system_methods.CANCEL_CALL_METHOD_ID: "the cancellation of a call",
    system_methods.ORDERED_METHOD_ID: "an ordered multicast",
    system_methods.ORDERING_METHOD_ID: "an ordered multicast",
    system_methods.EXECUTED_METHOD_ID: "an ordered multicast",
    system_methods.FENCING_METHOD_ID: "the expulsion of a member",
    system_methods.NODE_METHOD_ID: "a node",
    system_methods.HANDLES_METHOD_ID: "word of a handle",
}


def method_name(method_id: int, kind: int, destination: str, methods: Methods) -> str | None:
    """Return the method's name for a call to ``destination`` or an answer; None if it is unknown."""
    if method_id in _SYSTEM_METHODS:
        return _SYSTEM_METHODS[method_id]
    if kind == RpcKind.CALL:
        return methods.get((destination, method_id))
    # An answer that the app gives names one of its own methods; an answer that it gets names a method of its receiver.
    own = methods.get(("", method_id))
    return own or next((name for (_, known_id), name in methods.items() if known_id == method_id), None)


def format_counted_method(method_id: int, kind: int, destination: str, methods: Methods) -> str:
    """Return the name under which calls of a method, its answers or its exceptions are counted."""
    name = method_name(method_id, kind, destination, methods) or f"method {method_id}"
    if kind == RpcKind.CALL:
        return name
    return f"exceptions of {name}" if kind == RpcKind.RAISED else f"answers of {name}"


def _around_name(rpc: IncomingRpc, is_msgpack: bool, size_max: int | None, name: str | None) -> tuple[str, str]:
    """Return the text before and behind the method's name. ``name`` None: all that a rule may hide is hidden; "": no
    rule is for it."""
    try:
        values = decoding.decode_shown(rpc.arguments) if is_msgpack else None
    except decoding.DecodeError:
        values = None  # a handler with its own format
    if not isinstance(values, list):
        is_hidden = name != "" and redaction.may_apply(name)
        return "", f"({redaction.REDACTED if is_hidden else _clipped(bytes(rpc.arguments).hex(' '), size_max)})"
    of = ""
    if rpc.kind != RpcKind.CALL and values[1:] and isinstance(values[0], str):  # an answer that goes to a client
        client, *values = values
        of = f" of {client}"

    def shown(value: object) -> object:
        return value if name == "" else redaction.result(name, value)

    match rpc.kind, values:
        case RpcKind.RETURNED_VALUE, [number, value]:
            return f"the answer {_clipped(safe_repr(shown(value)), size_max)} of ", f" to call {number}{of}"
        case RpcKind.RETURNED_NOTHING, [number]:
            return "the answer of ", f" to call {number}{of}"
        case RpcKind.RAISED, [number, error, list(arguments), _]:
            raised = f"{error}({', '.join(map(safe_repr, map(shown, arguments)))})"
            return "the answer of ", f" to call {number}{of}: it raised {_clipped(raised, size_max)}"
    if rpc.method_id == system_methods.EFFECT_METHOD_ID and 5 <= len(values) <= 7:
        # The number of the wait, "effect NAME", a checksum of its arguments, whether it raised, the value, its text,
        # its execution.
        values = shown_values(rpc.method_id, values, name)
        how, value = ("raised", _effect_error(values[4])) if values[3] else ("returned", safe_repr(values[4]))
        if values[5:]:
            return f"{values[5]} {how} {_clipped(value, size_max)}", ""
        return "", f" {str(values[1]).removeprefix('effect ')!r}: it {how} {_clipped(value, size_max)}"
    if rpc.method_id == system_methods.CLOCK_METHOD_ID and values and isinstance(values[0], int):
        stepped = f", stepped by {values[2] / 1e9:g} s" if values[2:] and isinstance(values[2], int) else ""
        return "", f" says {time_text(values[0])}{stepped}"
    waits = ""
    if rpc.kind == RpcKind.CALL and rpc.rpc_type == RpcType.ASYNC and len(values) >= 2:
        caller, number, *values = values
        waits = f" as call {number} of {caller or 'itself'}"
    values = values if name == "" else shown_values(rpc.method_id, values, name)
    return "", f"({_clipped(', '.join(map(safe_repr, values)), size_max)}){waits}"


def shown_values(method_id: int, values: list[Any], name: str | None) -> list[Any]:
    """Return the arguments of a method, ``name``, as people are shown them. Of an effect's result and an order the
    numbers stay, by which readers of logs find the handler.
    """
    if method_id == system_methods.EFFECT_METHOD_ID and len(values) >= 5:
        shown = redaction.result(str(values[1]).removeprefix("effect "), values[4])
        return [*values[:4], shown, *(redaction.redact_call_text(str(text)) for text in values[5:6]), *values[6:]]
    if method_id == system_methods.ORDER_METHOD_ID:
        return values[:2] + redaction.arguments(None, values[2:])
    return redaction.arguments(None if method_id in _SYSTEM_METHODS else name, values)  # calls can be within


def effect_text(rpc: IncomingRpc) -> str:
    """Return the effect that a result belongs to, as ``unlock(bike=7) of Ride.ride(17)``; "" if the log lacks it."""
    try:
        values = decoding.decode_shown(rpc.arguments) if rpc.method_id == system_methods.EFFECT_METHOD_ID else None
    except decoding.DecodeError:
        return ""
    return redaction.redact_call_text(str(values[5])) if isinstance(values, list) and len(values) >= 6 else ""


def time_text(time_ns: int) -> str:
    """Format a time in ns since the Unix epoch as ISO 8601 in UTC, to the microsecond."""
    try:
        time = datetime.fromtimestamp(time_ns // 1_000_000_000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{time_ns} ns"
    return f"{time:%Y-%m-%dT%H:%M:%S}.{time_ns % 1_000_000_000 // 1000:06d}Z"


def _effect_error(value: object) -> str:
    match value:
        case ["", [_, kind, message, *_], *_]:  # an EffectFailed
            return f"{kind}: {message}"
        case [name, list(arguments), *_]:
            return f"{name}({', '.join(map(safe_repr, arguments))})"
    return safe_repr(value)


def _clipped(text: str, size_max: int | None) -> str:
    return text if size_max is None or len(text) <= size_max else f"{text[: size_max - 3]}..."


def format_divergence(divergence: Divergence, name: str, methods: Methods, shown: int = 3) -> str:
    """Describe where a replay of the instance ``name`` diverged from its log, and what it makes there now."""
    to = f"the calls to {divergence.destination!r}" if divergence.destination else "the calls to itself"
    where = "a checkpoint" if divergence.sequence_id is None else f"record {divergence.sequence_id}"
    first, last = divergence.after_position + 1, divergence.position
    span = f"number {first}" if first == last else f"numbers {first} to {last}"
    text = f"{name!r} does not do again what it did before: by {where}, {to} had reached number {last}; "
    if divergence.made_position < last:
        text += f"the replay makes only {divergence.made_position}"
    else:
        text += f"{span} are others now" if first != last else f"{span} is another one now"
    parts = [
        f"{when}: {_format_calls(calls, divergence.destination, methods, shown)}"
        for when, calls in (("then", divergence.logged), ("now", divergence.made))
        if calls
    ]
    return f"{text} ({'; '.join(parts)})" if parts else text


def _format_calls(calls: Sequence[tuple[int, bytes]], destination: str, methods: Methods, shown: int) -> str:
    words = [f"{position}: {format_call(message, destination, methods)}" for position, message in calls[:shown]]
    more = len(calls) - len(words)
    return f"{'; '.join(words)}{f'; and {more} more' if more > 0 else ''}"


# Texts about an instance and a peer with another log: how much each has, and what an operator can do.


def reset_command(name: str, peer: str) -> str:
    return f"'immortal peers reset {name} {peer}'"


def reclaim_command(name: str) -> str:
    return f"'immortal peers reclaim {name}'"


# --- texts of a stream's sender, ``name``, about its receiver --------------------------------------------------------


def describe_swapped_receiver(name: str, receiver: str, old_id: int, new_id: int, acknowledged: int, sent: int) -> str:
    """Describe a receiver whose log was replaced. ``old_id``, ``new_id``: committer IDs."""
    return (
        f"{receiver!r} was committer {old_id} and is {new_id} now: its log was wiped or swapped; it had acknowledged "
        f"{acknowledged} of {sent} messages; restore it, or run {reset_command(name, receiver)}"
    )


def describe_older_receiver(name: str, receiver: str, received: int, earlier: int) -> str:
    return (
        f"{receiver!r} has {received} messages of this instance, it once had {earlier}: its log was replaced by an "
        f"older copy; restore it, or run {reset_command(name, receiver)}"
    )


def describe_older_own_log(name: str, receiver: str, received: int, sent: int) -> str:
    return (
        f"{receiver!r} has {received} messages of this instance, which has sent only {sent}: this instance's log was "
        f"replaced by an older copy; restore it, or run {reset_command(name, receiver)}"
    )


def describe_refusal(name: str, receiver: str, refusal: PeerFrame) -> str:
    """Describe a refusal and what an operator can do, since a frame may have no room for a long name."""
    text = f"{receiver!r} refuses this instance's messages: {refusal.reason}"
    own, other = reset_command(name, receiver), reset_command(receiver, name)
    if refusal.code == RefusedCode.STALE_EPOCH:  # to the newest frames: this log lacks an epoch that was used before
        return f"{text}; restore the log of {name!r}, or, where a copy of it has run, run {reclaim_command(name)}"
    if refusal.code not in (RefusedCode.COMMITTER_CHANGED, RefusedCode.ROLLED_BACK):
        return text
    command = own if refusal.code == RefusedCode.ROLLED_BACK else other
    return text if command in text else f"{text}; restore the log that was replaced, or run {command}"


# --- texts of a stream's receiver, ``name``, about its sender --------------------------------------------------------


def describe_swapped_sender(name: str, sender: str, old_id: int, new_id: int, received: int) -> str:
    """Describe a sender whose log was replaced. ``old_id``, ``new_id``: committer IDs."""
    return (
        f"{sender!r} was committer {old_id} here and is {new_id} now: its log was wiped or swapped; {received} of its "
        f"messages are here; restore it, or run {reset_command(name, sender)}"
    )


def describe_lost_messages(name: str, sender: str, received: int, earlier: int) -> str:
    return (
        f"{name!r} has {received} messages of {sender!r}, it once had {earlier}: its log was wiped or replaced by an "
        f"older copy; restore it, or run {reset_command(sender, name)}"
    )


def describe_older_sender(name: str, sender: str, reason: str) -> str:
    """Describe a Hello that was refused for its epoch."""
    command = reclaim_command(sender)
    return f"{reason}; if its log was replaced by an older copy, or a copy has run, restore it, or run {command}"
