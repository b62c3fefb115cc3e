"""Method names and arguments, by the class that handles them: the option decode."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import msgspec

from appsdk.definition import Definition
from appsdk.proxy import definition_of
from appsdk.runner import load
from pipeline.errors import SourceError


@dataclass(frozen=True, slots=True)
class DecodedCall:
    """``problem`` says in words why there is no ``arguments_json``, which is an object by parameter name."""

    method: str | None
    arguments_json: str | None = None
    problem: str | None = None


class ArgumentDecoder:
    """Decodes calls by the annotations of one class's handlers, as its app does. Runs no handler."""

    def __init__(self, definition: Definition) -> None:
        self._definition = definition

    def decode(self, method_id: int, arguments: bytes | memoryview) -> DecodedCall:
        definition = self._definition
        handler = definition.by_method_id.get(method_id)
        if handler is None:
            return DecodedCall(None, problem=f"{definition.name} has no method with ID {method_id}")
        codec = definition.codec(handler)
        try:
            values = codec.decode(arguments)
            named = dict(zip(codec.signature.parameters, values, strict=False))  # trailing defaults may be missing
            return DecodedCall(handler.name, msgspec.json.encode(named).decode())
        except Exception as error:  # types of the user's make what they like of strange bytes
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            return DecodedCall(handler.name, problem=f"the arguments of {codec.name} cannot be shown: {reason}")


@functools.cache
def decoder_of(target: str) -> ArgumentDecoder:
    """The decoder for the class that ``module:Class`` names. Raises LoadError, DefinitionError, SourceError."""
    try:
        definition = definition_of(load(target))
    except ImportError as error:
        raise SourceError(f"option decode: {target!r} cannot be imported: {error}") from error
    definition.resolve(names_may_be_missing=False)
    return ArgumentDecoder(definition)


def decode_targets(option: str) -> dict[str, str]:
    """The option decode: "module:Class", or "counter=module:Class,reader=..." by instance. "" stands for all others."""
    targets = {}
    for item in option.split(","):
        name, equals, target = item.rpartition("=")
        if not target.strip() or (equals and not name.strip()):
            raise SourceError(f"option decode: {option!r}: module:Class, or NAME=module:Class,... was expected")
        targets[name.strip()] = target.strip()
    return targets
