"""The values of signals, from who signals to who waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from appsdk.calls.codec import encoder
from appsdk.errors import UsageError


def encode_signal(name: object, value: object) -> bytes:
    """Raises UsageError, TypeError."""
    if not isinstance(name, str):
        raise UsageError(f"self.signal({name!r}, ...): the name of an event is a str")
    try:
        return encoder.encode(value)
    except Exception as error:
        raise TypeError(f"self.signal({name!r}, ...): the value can't be encoded: {error}") from error


def event_decoder(kind: Any) -> Callable[[bytes], Any]:
    """Raises UsageError for a type that can't be encoded."""
    try:
        return msgspec.msgpack.Decoder(kind).decode
    except TypeError as error:
        raise UsageError(f"self.event(..., {kind!r}): {error}") from None
