"""The values of signals, from who signals to who waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from immortal.appsdk.calls.codec import ValueDecoder, encode_value
from immortal.appsdk.errors import UsageError
from immortal.appsdk.types.registry import unsupported_type
from immortal.protocol.shown import is_encodable


def event_name(what: str, name: object) -> str:
    """What is kept: a plain str. ``what``: for people. Raises UsageError."""
    if not isinstance(name, str):
        raise UsageError(f"{what}({name!r}): the name of an event is a str")
    if not is_encodable(name):
        raise UsageError(f"{what}({name!r}): the name of an event is text that can be encoded, without lone surrogates")
    return str.__str__(name)


def encode_signal(name: str, value: object) -> bytes:
    """Raises TypeError."""
    try:
        return encode_value(value)
    except Exception as error:
        raise TypeError(f"self.signal({name!r}, ...): the value can't be encoded: {error}") from error


def event_decoder(kind: Any) -> Callable[[bytes], Any]:
    """Raises UsageError for a type that can't be encoded."""
    if problem := unsupported_type(kind):
        raise UsageError(f"self.event(..., {kind!r}): {problem}")
    return ValueDecoder(kind).decode
