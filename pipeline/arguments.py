"""Decoder of method names and arguments by the class that handles the calls, for the option ``decode``."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from dataclasses import dataclass
from typing import Any

import msgspec

from immortal.appsdk.calls.codec import ArgumentCodec
from immortal.appsdk.handlers.definition import Definition, definition_of
from immortal.appsdk.handlers.proxy import method_names
from immortal.appsdk.running.runner import load, load_or_report
from immortal.appsdk.types.handles import read_extension
from immortal.appsdk.types.registry import show_custom
from immortal.pipeline.errors import SourceError
from immortal.protocol import decoding, redaction
from immortal.protocol.command_line import FailedError, echo
from immortal.protocol.errors import ImmortalError
from immortal.protocol.messages import (
    RpcKind,
    RpcType,
)


@dataclass(frozen=True, slots=True)
class DecodedCall:
    """Decoded call or answer. ``problem`` says why ``arguments_json``, an object by parameter name, is missing."""

    method: str | None
    arguments_json: str | None = None
    problem: str | None = None


class ArgumentDecoder:
    """Decoder of calls to one class, and of answers to it, by the annotations of its handlers.

    A call that waits for its answer has "$caller" and "$call" (the call's number) beside its arguments. An answer has
    "$call", and "value", or "raised" with the "arguments" of that exception. No handler runs.
    """

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self._methods = {method_id: name for (to, method_id), name in method_names(definition).items() if to}

    def decode(self, kind: int, rpc_type: int, method_id: int, arguments: bytes | memoryview) -> DecodedCall:
        """Decode a message. ``kind`` (an RpcKind) and ``rpc_type`` (an RpcType) are the message's."""
        if kind != RpcKind.CALL:
            return self._answer(kind, method_id, arguments)
        definition = self.definition
        handler = definition.by_method_id.get(method_id)
        if handler is None:
            return DecodedCall(None, problem=f"{definition.name} has no method with ID {method_id}")
        codec = definition.codec(handler)
        try:
            named = read_arguments(codec, rpc_type, arguments)
            return DecodedCall(handler.name, _to_json(named, handler.name))
        except Exception as error:  # a user's types can raise anything for strange bytes
            return DecodedCall(handler.name, problem=unreadable(codec, error))

    def _answer(self, kind: int, method_id: int, arguments: bytes | memoryview) -> DecodedCall:
        """Decode an answer to plain values; only the handler that waits knows their types."""
        qualified = self._methods.get(method_id, f"method {method_id}")
        method = qualified.rpartition(".")[2] if method_id in self._methods else None
        try:
            number, *rest = decoding.decode_shown(arguments, type=list[Any], ext_hook=read_extension)
            named = {"$call": number}
            if kind == RpcKind.RAISED:
                named |= {"raised": rest[0], "arguments": rest[1]}
            elif kind == RpcKind.RETURNED_VALUE:
                named |= {"value": rest[0]}
            kept = {"$call", "raised"}
            shown = {key: one if key in kept else redaction.result(method, one) for key, one in named.items()}
            return DecodedCall(method, msgspec.json.encode(shown, enc_hook=show_custom).decode())
        except Exception as error:  # a foreign app can send any bytes
            return DecodedCall(method, problem=f"the answer of {qualified} cannot be shown: {_reason(error)}")


def _to_json(named: dict[str, Any], handler: str) -> str:
    encoded = msgspec.json.encode(named, enc_hook=show_custom)
    if redaction.may_apply(handler):
        shown = redaction.redact(decoding.load_json(encoded), (redaction.name_in_rules(handler),))
        front = {name: named[name] for name in ("$caller", "$call") if name in named}
        encoded = json.dumps(shown | front, ensure_ascii=False).encode()
    return encoded.decode()


def read_arguments(codec: ArgumentCodec, rpc_type: int, arguments: bytes | memoryview) -> dict[str, Any]:
    """Decode the arguments of a call, by parameter; trailing defaults can be missing. Raises anything."""
    decoding.check_shown(arguments)
    if rpc_type != RpcType.ASYNC:
        return dict(zip(codec.signature.parameters, codec.decode(arguments), strict=False))
    return dict(zip(["$caller", "$call", *codec.signature.parameters], codec.decode_call(arguments), strict=False))


def unreadable(codec: ArgumentCodec, error: Exception) -> str:
    """Return what is said of arguments for which :func:`read_arguments` raised ``error``."""
    why = type(error).__name__ if redaction.may_apply(codec.name) else _reason(error)  # which can quote a value
    return f"the arguments of {codec.name} cannot be shown: {why}"


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


@functools.cache
def decoder_of(target: str) -> ArgumentDecoder:
    """Return the decoder for the class ``module:Class``. Raises LoadError, DefinitionError, SourceError."""
    try:
        definition = definition_of(load(target))
    except ImportError as error:
        raise SourceError(f"option decode: {target!r} cannot be imported: {error}") from error
    definition.resolve(names_may_be_missing=False)
    return ArgumentDecoder(definition)


def decode_targets(option: str) -> dict[str, str]:
    """Parse the option decode, "module:Class" or "counter=module:Class,...", by instance; "" means all others."""
    targets = {}
    for item in option.split(","):
        name, equals, target = item.rpartition("=")
        if not target.strip() or (equals and not name.strip()):
            raise SourceError(f"option decode: {option!r}: module:Class, or NAME=module:Class,... was expected")
        targets[name.strip()] = target.strip()
    return targets


def decoder_for(given: str | None, registered: str | None) -> ArgumentDecoder | None:
    """Return a decoder for the class that was ``given`` (--app) or is registered; None if there is none.

    Raises FailedError if the ``given`` class can't be used. Output of the module's import goes to stderr.
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
