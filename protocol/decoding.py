"""Decoding of MessagePack and JSON from outside. Every failure is a DecodeError.

A decoder raises more than its own error: RecursionError for deeply nested data, UnicodeDecodeError, MemoryError, and
any error of a user's own type. If a caller forgot one of them, another process's message could end it. So no other
module calls a decoder of msgspec or ``json.loads``; ruff's TID251 checks that.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import msgspec
from msgspec import DecodeError

from immortal.protocol.errors import RemoteProtocolError

__all__ = [
    "DecodeError",
    "Decoder",
    "JsonDecoder",
    "TooDeepError",
    "check_shown",
    "decode",
    "decode_json",
    "decode_shown",
    "guarded",
    "load_json",
    "parse_json_argument",
]

SHOWN_NESTING_MAX = 128  # formatting takes up to four levels of Python's recursion per level, of 1,000 in all
T = TypeVar("T")


class TooDeepError(DecodeError):
    """Raised if data is nested more deeply than a decoder can follow."""


DecHook = Callable[[type, Any], Any]
ExtHook = Callable[[int, memoryview], Any]


def guarded(decode: Callable[[Any], T]) -> Callable[[Any], T]:
    """Wrap ``decode`` so that it raises nothing but DecodeError."""

    def guard(data: Any) -> T:
        try:
            return decode(data)
        except DecodeError:
            raise
        except RecursionError:
            raise TooDeepError("it is nested too deeply to be read") from None
        except Exception as error:
            raise DecodeError(_describe(error)) from None

    return guard


def _describe(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "there is not enough memory to read it"
    try:
        text = str(error)
    except Exception:  # raised by a user's class
        text = ""
    return text or type(error).__name__


class Decoder(Generic[T]):
    """Decoder of MessagePack for one type. ``unguarded``: for callers that catch every error."""

    __slots__ = ("decode", "unguarded")

    @overload
    def __init__(
        self: Decoder[Any], type: None = None, *, dec_hook: DecHook | None = None, ext_hook: ExtHook | None = None
    ) -> None: ...
    @overload
    def __init__(
        self: Decoder[T], type: type[T], *, dec_hook: DecHook | None = None, ext_hook: ExtHook | None = None
    ) -> None: ...
    @overload
    def __init__(
        self: Decoder[Any], type: Any, *, dec_hook: DecHook | None = None, ext_hook: ExtHook | None = None
    ) -> None: ...
    def __init__(self, type: Any = Any, *, dec_hook: DecHook | None = None, ext_hook: ExtHook | None = None) -> None:
        found: Any = msgspec.msgpack.Decoder(Any if type is None else type, dec_hook=dec_hook, ext_hook=ext_hook)
        self.unguarded: Callable[[Any], T] = found.decode
        self.decode: Callable[[Any], T] = guarded(self.unguarded)

    def decode_message(self, data: Any, name: str) -> T:
        """Decode a message's data. Raises RemoteProtocolError; its text calls the message ``name``."""
        try:
            return self.decode(data)
        except DecodeError as error:
            raise RemoteProtocolError(f"{name} can't be read: {error}") from None


class JsonDecoder(Generic[T]):
    """Decoder of JSON for one type."""

    __slots__ = ("decode",)

    def __init__(self, type: type[T]) -> None:
        self.decode: Callable[[Any], T] = guarded(msgspec.json.Decoder(type).decode)


@overload
def decode(data: Any, type: type[T], *, ext_hook: ExtHook | None = None) -> T: ...
@overload
def decode(data: Any, type: Any = ..., *, ext_hook: ExtHook | None = None) -> Any: ...
def decode(data: Any, type: Any = Any, *, ext_hook: ExtHook | None = None) -> Any:
    """Decode one MessagePack value. Raises DecodeError."""
    return guarded(lambda given: msgspec.msgpack.decode(given, type=type, ext_hook=ext_hook))(data)


def decode_shown(data: bytes | memoryview, type: Any = Any, *, ext_hook: ExtHook | None = None) -> Any:
    """Decode a MessagePack value for people: its nesting must be shallow enough to print.

    ``ext_hook``: reads extensions; the default reads those of :mod:`immortal.protocol.extension_values`.
    """
    check_shown(data)
    return _shown_decoder(type, ext_hook)(data)


@functools.cache
def _shown_decoder(type: Any, ext_hook: ExtHook | None) -> Callable[[Any], Any]:
    from immortal.protocol.extension_values import read_extension  # imported here: few commands show messages

    return Decoder(type, ext_hook=ext_hook or read_extension).decode


def check_shown(data: bytes | memoryview) -> None:
    """Check that a value can be printed. Raises TooDeepError."""
    if len(data) <= SHOWN_NESTING_MAX:  # each level takes a byte
        return
    from immortal.protocol.nesting import (
        is_nested_beyond,
        nesting_depth,
    )  # imported here: few commands show messages

    if is_nested_beyond(data, 0, len(data), SHOWN_NESTING_MAX):
        raise TooDeepError(f"it is nested {nesting_depth(data)} levels deep, too many to be shown")


@overload
def decode_json(data: Any, type: type[T]) -> T: ...
@overload
def decode_json(data: Any, type: Any = ...) -> Any: ...
def decode_json(data: Any, type: Any = Any) -> Any:
    """Decode one JSON value as ``type``. Raises DecodeError."""
    return guarded(lambda given: msgspec.json.decode(given, type=type))(data)


def load_json(text: str | bytes) -> Any:
    """Decode one JSON value like the standard library: integers of any size, NaN. Raises DecodeError."""
    return guarded(json.loads)(text)


def parse_json_argument(text: str) -> Any:
    """Decode a JSON value that a person typed: like :func:`load_json`, with at most SHOWN_NESTING_MAX levels."""
    value = load_json(text)
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, list | dict)]:
        depth += 1
        if depth > SHOWN_NESTING_MAX:
            raise TooDeepError(f"it is nested more than {SHOWN_NESTING_MAX} levels deep")
        level = [child for one in level for child in (one.values() if isinstance(one, dict) else one)]
    return value
