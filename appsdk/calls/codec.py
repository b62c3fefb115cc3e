"""Codec of arguments, which are MessagePack arrays: it binds, encodes and decodes them, and limits their nesting.

Decoded arguments have the types of the handler's annotations; trailing ones can be missing if the handler has defaults
for them. A sender does not check types (its type checker does): the receiver must check in any case.
"""

from __future__ import annotations

import inspect
import os
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

import msgspec

from immortal.appsdk.errors import DefinitionError
from immortal.appsdk.types.encoding import AnnotatedForm, ValueDecoder, encode_value, form_to_send, why
from immortal.appsdk.types.registry import may_hold_handles, readable_type, unsupported_type
from immortal.appsdk.types.steps import NotRoundTrippableError, encoder
from immortal.protocol import decoding
from immortal.protocol.limits import NESTING_MAX, NESTING_MAX_DEFAULT
from immortal.protocol.nesting import is_nested_beyond, nesting_depth

__all__ = ["ArgumentCodec", "Decode", "ValueDecoder", "bind_arguments", "encode_value", "encoder", "unencodable"]

Decode = Callable[[Any], tuple[Any, ...]]

_items = decoding.Decoder(list[msgspec.Raw]).decode
_CALL_FRONT = (str, int)
_FIXARRAY, _FIXARRAY_MAX = 0x90, 15
_ARRAY_16 = 0xDC


def unencodable(name: str, parameters: Iterable[str], arguments: Sequence[Any], error: Exception) -> TypeError:
    """Return a TypeError that names the argument of ``name`` that can't be encoded.

    ``parameters``: names of the arguments.
    """
    try:
        for parameter, value in zip(parameters, arguments, strict=False):
            _require_encodable(name, parameter, value)
    except TypeError as found:
        return found
    return TypeError(f"{name}: an argument can't be encoded: {error}")


def _require_encodable(name: str, parameter: str, value: Any) -> None:
    try:
        encode_value(value)
    except Exception as problem:
        raise TypeError(
            f"{name}: parameter {parameter!r} (a {type(value).__qualname__}) can't be encoded: {why(problem)}"
        ) from None


def largest(parameters: Iterable[str], arguments: Sequence[Any]) -> str:
    """Return text about the largest argument, to append to the total size; "" if arguments have no names."""
    sizes = [
        (len(encode_value(value)), parameter, value) for parameter, value in zip(parameters, arguments, strict=False)
    ]
    if not sizes:
        return ""
    size_bytes, parameter, value = max(sizes, key=itemgetter(0))
    return f" (the largest is {parameter!r}, a {type(value).__qualname__} of {size_bytes} bytes)"


class ArgumentCodec:
    """Binds, checks, encodes and decodes the arguments of one handler.

    Raises DefinitionError for an annotation that can't be encoded, NameError for one that can't be resolved yet.
    """

    def __init__(self, function: Callable[..., Any], signature: inspect.Signature) -> None:
        self.name = function.__qualname__
        self.signature = signature
        parameters = list(signature.parameters.values())
        self.count = len(parameters)
        required = [index for index, one in enumerate(parameters) if one.default is inspect.Parameter.empty]
        self.required_count = required[-1] + 1 if required else 0
        self.positional_count = positional_count(signature)
        self._named = [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
        hints = resolve_hints(function)
        self.types = [hints[parameter.name] for parameter in parameters]
        for parameter, annotation in zip(parameters, self.types, strict=True):
            if problem := unsupported_type(annotation):
                raise DefinitionError(
                    f"{self.name}: parameter {parameter.name!r}: {problem}; use a type that msgspec knows "
                    f"(numbers, str, bytes, datetime, list, dict, dataclass, msgspec.Struct, ...), or give yours a "
                    f"codec: immortal.register_type"
                )
        self.may_hold_handles = any(map(may_hold_handles, self.types))
        self._forms = [
            (parameter.name, form_to_send(annotation))
            for parameter, annotation in zip(parameters, self.types, strict=True)
        ]
        self.needs_forms = any(form for _, form in self._forms)
        self.returns_nothing = hints.get("return") is type(None)
        self.decode_plainly, self.decode = self._make_readers(())
        """Decoders of arguments. The first is faster; pass data that it refuses to :meth:`decode_again`."""
        self._function = function

    def _make_readers(self, front: tuple[type, ...]) -> tuple[Decode, Decode]:
        plainly = self._make_decode(front)

        def decode(data: Any) -> tuple[Any, ...]:
            try:
                return plainly(data)
            except msgspec.ValidationError as error:
                return self.decode_again(data, error, front)

        return plainly, decoding.guarded(decode)

    @cached_property
    def decode_call(self) -> Decode:
        """Decoder of a call that waits for an answer: (caller's name, number of the call, arguments ...)."""
        return self._make_readers(_CALL_FRONT)[1]

    def decode_again(self, data: Any, error: BaseException, front: tuple[type, ...] = ()) -> tuple[Any, ...]:
        """Decode data with integers beyond 64 bits and other extensions; raise ``error`` if that can't help."""
        if isinstance(error, msgspec.ValidationError):
            count = len(_items(data)) - len(front)
            if self.required_count <= count <= self.count:
                found: tuple[Any, ...] = ValueDecoder(self._shape(front, count)).decode_again(data, error)
                return found
        raise error

    def encoded(self, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], bytes]:
        """Return (the arguments, their bytes). A value annotated ``Any`` is replaced by one with a tag of its type.

        Raises TypeError.
        """
        if self.needs_forms:
            arguments = self.tag_values(arguments)
        try:
            return arguments, encode_value(arguments)
        except Exception as error:
            raise unencodable(self.name, self.signature.parameters, arguments, error) from None

    def tag_values(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Return ``arguments``, with a type tag on each value annotated ``Any`` that would lose its type otherwise.

        Raises TypeError.
        """
        made = []
        for (parameter, form), value in zip(self._forms, arguments, strict=False):
            try:
                made.append(value if form is None or not form.is_odd(value) else form.tag(value))
            except NotRoundTrippableError as error:
                _require_encodable(self.name, parameter, value)
                path = f" {error.path}" if error.path else ""
                raise TypeError(f"{self.name}: parameter {parameter!r}{path}: {error.problem}") from None
        return tuple(made)

    @cached_property
    def _result_form(self) -> AnnotatedForm | None:
        return form_to_send(resolve_hints(self._function)["return"])

    def encode_result(self, value: Any) -> bytes:
        """Encode a result; values annotated ``Any`` keep their types. Raises what the encoder raises."""
        form = self._result_form
        return encode_value(value) if form is None else form.encode(value)

    @cached_property
    def result_may_hold_handles(self) -> bool:
        return may_hold_handles(resolve_hints(self._function)["return"])

    @cached_property
    def decode_result(self) -> Callable[[Any], Any]:
        """Decoder of a result, by the handler's annotation. The decoder raises msgspec.DecodeError.

        Raises DefinitionError for an annotation that can't be encoded: only here, since only awaited results need it.
        """
        annotation = resolve_hints(self._function)["return"]
        if problem := unsupported_type(annotation):
            raise DefinitionError(f"{self.name}: what it returns can't be sent: {problem}")
        return ValueDecoder(annotation).decode

    def _make_decode(self, front: tuple[type, ...]) -> Decode:
        """Make a decoder of arguments into a tuple. It raises msgspec.DecodeError, also for a wrong count."""
        decoders: list[Decode] = [
            ValueDecoder(self._shape(front, count)).plainly for count in range(self.required_count, self.count + 1)
        ]
        whole = decoders[-1]
        if len(decoders) == 1:
            return whole
        if self.count > _FIXARRAY_MAX:
            raise DefinitionError(
                f"{self.name}: {self.count} parameters, some with defaults: at most {_FIXARRAY_MAX} can be, use a "
                f"dataclass for some of them"
            )
        if len(front) + self.count > _FIXARRAY_MAX:  # with 3 bytes in front
            by_count = {len(front) + self.required_count + index: decode for index, decode in enumerate(decoders)}

            def decode_long(arguments: Any) -> tuple[Any, ...]:
                first = arguments[0] if len(arguments) else -1
                count = int.from_bytes(arguments[1:3], "big") if first == _ARRAY_16 else first - _FIXARRAY
                return by_count.get(count, whole)(arguments)

            return decode_long
        by_front = {
            _FIXARRAY + len(front) + self.required_count + index: decode for index, decode in enumerate(decoders)
        }

        def decode(arguments: Any) -> tuple[Any, ...]:
            return by_front.get(arguments[0] if len(arguments) else -1, whole)(arguments)

        return decode

    def _shape(self, front: tuple[type, ...], count: int) -> Any:
        return tuple[(*front, *map(readable_type, self.types[:count]))]  # type: ignore[misc, valid-type]

    def split_keywords(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Split a list of all arguments into (positional arguments, keyword-only arguments by name)."""
        at = self.count - len(self._named)
        return values[:at], dict(zip(self._named, values[at:], strict=False))

    def bind(self, arguments: Sequence[Any], keywords: dict[str, Any]) -> tuple[Any, ...]:
        """Return all arguments by position, like :func:`bind_arguments`."""
        if not keywords and len(arguments) == self.positional_count:
            return tuple(arguments)
        return bind_arguments(self.name, self.signature, arguments, keywords)


def positional_count(signature: inspect.Signature) -> int:
    """Return the number of parameters of a call by position; -1: some are keyword-only, so a call must be bound."""
    parameters = signature.parameters.values()
    return -1 if any(one.kind is inspect.Parameter.KEYWORD_ONLY for one in parameters) else len(parameters)


def bind_arguments(
    name: str, signature: inspect.Signature, arguments: Sequence[Any], keywords: dict[str, Any]
) -> tuple[Any, ...]:
    """Return all arguments by position, defaults filled in. Raises TypeError that names the method."""
    try:
        bound = signature.bind(*arguments, **keywords)
    except TypeError as error:
        named = f", {', '.join(keywords)} by name" if keywords else ""
        given = f"it was called with {len(arguments)} {'argument' if len(arguments) == 1 else 'arguments'}{named}"
        raise TypeError(f"{name}{signature}: {error}; {given}") from None
    bound.apply_defaults()
    return tuple(bound.arguments.values())


# Annotations. Python evaluates them at the definition; from 3.14 on, when they are read.
#
# A name in an annotation can be defined later in the module, so :func:`resolve_hints` is the first to evaluate one.


def resolve_hints(subject: Any) -> dict[str, Any]:
    """Evaluate the annotations of a function or class. Raises NameError while a name in them is not defined yet."""
    return typing.get_type_hints(subject, include_extras=True)


def annotated_names(subject: Any) -> Mapping[str, Any]:
    """Return the annotations of a class, without its bases, or of a function; names can be unresolved."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format, get_annotations

        return get_annotations(subject, format=Format.FORWARDREF)
    return inspect.get_annotations(subject)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return a signature: names, kinds and defaults; its annotations can be unresolved names. Raises TypeError,
    ValueError, as ``inspect.signature``."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)


# Limit of nesting in sent values: checked at the sender, so that no receiver has to refuse one.


NESTING_VARIABLE = "IMMORTAL_NESTING_MAX"
"""Variable with the nesting that other instances accept, if their ``nesting_max`` is not the default."""


def _limit() -> int:
    given = os.environ.get(NESTING_VARIABLE, "")
    return min(int(given), NESTING_MAX) if given.isdecimal() and int(given) > 0 else NESTING_MAX_DEFAULT


nesting_max = _limit()


def is_too_deep(arguments: bytes) -> bool:
    """Return True if an encoded array of arguments is nested too deeply; the array itself does not count."""
    return is_nested_beyond(arguments, 0, len(arguments), nesting_max + 1)


def describe_depth(name: str, parameters: Iterable[object], arguments: Sequence[Any]) -> str:
    """Return the error text for arguments of ``name`` that are nested too deeply: which one, and how deeply."""
    named = zip(arguments, chain(parameters, repeat("")), strict=False)  # arguments of a client have no names
    depths = [(nesting_depth(encoder.encode(value)), parameter) for value, parameter in named]
    deepest, parameter = max(depths, key=itemgetter(0), default=(0, ""))
    what = "what it sends" if parameter == "" else f"parameter {parameter!r}"
    return (
        f"{name}: {what} is nested {deepest} levels deep, at most {nesting_max} are possible: flatten it, or send it "
        f"as bytes"
    )


def check_value(name: str, value: bytes) -> None:
    """Check an encoded value. Raises TypeError if it is nested too deeply."""
    if len(value) > nesting_max and is_nested_beyond(value, 0, len(value), nesting_max):
        raise TypeError(f"{name} is nested {nesting_depth(value)} levels deep, at most {nesting_max} are possible")
