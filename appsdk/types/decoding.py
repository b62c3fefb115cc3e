"""Values from bytes, by what is annotated."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from immortal.appsdk.types.handles import read_extension
from immortal.appsdk.types.registry import decode_custom, readable_type
from immortal.protocol import decoding
from immortal.protocol.values import EXTENSION_CODE

_EXTENSION_BYTE = bytes((EXTENSION_CODE,))


class ValueDecoder:
    """Of values that ``annotation`` says. Raises TypeError for what can't be read at all."""

    __slots__ = ("decode", "plainly", "type")

    def __init__(self, annotation: Any) -> None:
        self.type = readable_type(annotation)
        self.plainly: Callable[[Any], Any] = decoding.Decoder(
            self.type, dec_hook=decode_custom, ext_hook=read_extension
        ).unguarded
        self.decode: Callable[[Any], Any] = decoding.guarded(self._decode)
        """Raises DecodeError alone."""

    def _decode(self, data: Any) -> Any:
        try:
            return self.plainly(data)
        except msgspec.ValidationError as error:
            return self.decode_again(data, error)

    def decode_again(self, data: Any, error: BaseException) -> Any:
        """Where ``error`` may be for an extension, which a typed decoder takes nowhere but for Any. Raises it, or
        another one."""
        if not isinstance(error, msgspec.ValidationError) or _EXTENSION_BYTE not in bytes(data):
            raise error
        plain = decoding.decode(data, ext_hook=read_extension)
        return msgspec.convert(plain, self.type, dec_hook=decode_custom, builtin_types=(bytes, bytearray, memoryview))


def with_integers(annotation: Any) -> Any:
    """``annotation`` with ``int | float`` for each ``float`` that is no field of a class: so an int stays one."""
    if annotation is float:
        return int | float
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(with_integers, arguments))]  # noqa: UP007
    if origin in (list, dict, tuple, set, frozenset) and arguments:
        return origin[tuple(one if one is Ellipsis else with_integers(one) for one in arguments)]
    return annotation
