"""The values of signals, from who signals to who waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from appsdk.calls.codec import ValueDecoder, encode_value
from appsdk.errors import UsageError
from appsdk.types.registry import unsupported_type


def require_name(where: str, name: object) -> None:
    """It is kept, so what can't be encoded is none. Raises UsageError."""
    if not isinstance(name, str):
        raise UsageError(f"{where}: the name of an event is a str")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{where}: the name of an event is text that can be encoded: {error.reason}") from None


def encode_signal(name: object, value: object) -> bytes:
    """Raises UsageError, TypeError."""
    require_name(f"self.signal({name!r}, ...)", name)
    try:
        return encode_value(value)
    except Exception as error:
        raise TypeError(f"self.signal({name!r}, ...): the value can't be encoded: {error}") from error


def event_decoder(kind: Any) -> Callable[[bytes], Any]:
    """Raises UsageError for a type that can't be encoded."""
    if problem := unsupported_type(kind):
        raise UsageError(f"self.event(..., {kind!r}): {problem}")
    return ValueDecoder(kind).decode
