"""Encoder and decoder of values that keeps their types, by annotation.

msgspec writes more than it reads back: a subclass as the annotated class, a tuple in ``Any`` as a list, a ``Decimal``
there as text. An :class:`AnnotatedForm` knows what an annotation says about that. It checks values level by level, all
values in one place of an annotation together: a list of a million numbers costs one check of their types. A value that
MessagePack has no form for, but that can be read back, becomes an extension
(:mod:`immortal.protocol.extension_values`).
"""

from __future__ import annotations

import functools
import types
import typing
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
from msgspec import inspect as shapes

from immortal.appsdk.types import registry
from immortal.appsdk.types.handles import Handle, read_extension
from immortal.appsdk.types.registry import (
    converted_custom,
    decode_custom,
    may_hold_ordered,
    may_hold_untyped,
    readable_type,
)
from immortal.appsdk.types.steps import (
    Column,
    Custom,
    Extensions,
    Form,
    Integers,
    Items,
    Level,
    Literals,
    Mappings,
    Moments,
    NotRoundTrippableError,
    Objects,
    Records,
    Step,
    Tagged,
    Tuples,
    Unfit,
    encoder,
    not_the_same,
    surrogate_problem,
)
from immortal.protocol import decoding
from immortal.protocol.extension_values import EXTENSION_CODE, kind_of

DEPTH_MAX = 256
"""Limit of nested values: to read a value takes a level of Python's recursion for each, of 1,000 in all."""

_DEEP, _WIDE = 8, 4096
_PATH_STEPS_MAX = 12
_PLAIN = (type(None), bool, float, str, bytes, Handle)
PLAIN_CLASSES = frozenset((type(None), bool, int, float, str, bytes))
_BOUNDS = ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length", "pattern")
_LEAVES: dict[type, type] = {
    shapes.NoneType: type(None),
    shapes.BoolType: bool,
    shapes.FloatType: float,
    shapes.StrType: str,
    shapes.BytesType: bytes,
    shapes.ByteArrayType: bytearray,
    shapes.MemoryViewType: memoryview,
    shapes.DateType: date,
    shapes.TimeDeltaType: timedelta,
    shapes.DecimalType: Decimal,
    shapes.UUIDType: UUID,
    shapes.ExtType: msgspec.msgpack.Ext,
    shapes.RawType: msgspec.Raw,
}

_AS_IT_IS, _INTEGERS, _EXTENSIONS = Step(), Integers(), Extensions()
_TYPED_MOMENTS, _MOMENTS = Moments(typed=True), Moments(typed=False)


class AnnotatedForm(Form):
    """Form of one place of an annotation. ``info`` None: any class is allowed; only large integers are treated."""

    def __init__(self, info: shapes.Type | None, known: dict[int, AnnotatedForm]) -> None:
        while isinstance(info, shapes.Metadata):
            info = info.type
        self._info = info
        self._known = known  # by the identity of their infos, so that a type may refer to itself
        self._steps: dict[type, Step] = {}

    def _of(self, info: shapes.Type) -> AnnotatedForm:
        if (found := self._known.get(id(info))) is None:
            found = self._known[id(info)] = AnnotatedForm(info, self._known)
        return found

    def step(self, cls: type) -> Step:
        if (found := self._steps.get(cls)) is None:
            found = self._steps[cls] = self._make_step(cls)
        return found

    def is_plain_value(self, value: Any) -> bool:
        """Return True if a value of a plain class surely fits. The annotation must have no bounds."""
        cls = type(value)
        if cls not in PLAIN_CLASSES or self._has_bounds:
            return False
        return self.are_plain((cls,)) and (cls is not str or value.isascii())

    @functools.cached_property
    def is_sure(self) -> bool:
        """True if all values that :meth:`is_odd` accepts can be read back.

        Nothing in the annotation (bounds, codecs, constructors, validators) could change or refuse them."""
        pending, seen = [self], {id(self)}
        while pending:
            form = pending.pop()
            if form._has_bounds or not form._is_plain_shape():
                return False
            for part in registry._parts(form._info) if form._info is not None else ():
                below = form._of(part)
                if id(below) not in seen:
                    seen.add(id(below))
                    pending.append(below)
        return True

    def _is_plain_shape(self) -> bool:
        info = self._info
        if isinstance(info, shapes.CustomType | shapes.RawType):
            return False
        cls = getattr(info, "cls", None)
        return not any(hasattr(cls, name) for name in ("__post_init__", "__attrs_attrs__"))

    @functools.cached_property
    def _has_bounds(self) -> bool:
        parts = getattr(self._info, "types", (self._info,))
        return any(getattr(part, bound, None) is not None for part in parts for bound in _BOUNDS)

    # --- use ------------------------------------------------------------------------------------------------------

    def is_odd(self, value: Any) -> bool:
        """Return True if a part of the value needs a tag (:meth:`tag`). Large integers need none.

        Raises NotRoundTrippableError with the path to the part that would change.
        """
        level: Level = [(self, (value,))]
        odd = False
        try:
            if self.step(type(value)).is_plain(value):
                return False
            for depth in range(DEPTH_MAX):
                below: Level = []
                for form, column in level:
                    odd |= form.scan(column, below)
                if not below:
                    return odd
                level = below
                if depth >= _DEEP:
                    level = [(form, _without_repetitions(column)) for form, column in below]
        except Exception as error:  # also of a class of the user's, such as one whose field was deleted
            unfit = error if isinstance(error, NotRoundTrippableError) else NotRoundTrippableError(why(error))
            raise self._place_of(value, None) or unfit from None
        raise self._place_of(value, None) or NotRoundTrippableError(_TOO_DEEP)

    def scan(self, column: Column, below: Level) -> bool:
        classes = set(map(type, column))
        if len(classes) == 1:
            (cls,) = classes
            if cls not in PLAIN_CLASSES and not isinstance(column, list | tuple):
                column = list(column)
            return self.step(cls).scan(column, below)
        odd = False
        for cls in classes:
            odd |= self.step(cls).scan([one for one in column if type(one) is cls], below)
        return odd

    def encode(self, value: Any) -> bytes:
        """Encode a value. Raises NotRoundTrippableError for a part that would change, or can't be encoded."""
        odd = self.is_odd(value)
        try:
            return encoder.encode(self.tag(value)) if odd else encode_value(value)
        except Exception as error:
            raise self.unencodable(value, error) from error

    def unencodable(self, value: Any, error: Exception) -> NotRoundTrippableError:
        """Return an error for the part of ``value`` that can't be encoded. ``error``: of the whole value."""
        return self._place_of(value, encode_value) or NotRoundTrippableError(why(error))

    def _place_of(self, value: Any, encode: Callable[[Any], object] | None) -> NotRoundTrippableError | None:
        """Return an error for the first part that would change or, with ``encode``, that it does not take."""
        pending: list[tuple[Form, Any, tuple[str, ...]]] = [(self, value, ())]
        while pending:
            form, value, path = pending.pop()
            if len(path) >= DEPTH_MAX:
                return NotRoundTrippableError(_TOO_DEEP, _joined(path))
            step = form.step(type(value))
            try:
                step.scan((value,), [])
                parts = [(part_form, part, (*path, place)) for place, part_form, part in step.parts(value)]
                if encode is not None and not parts:
                    encode(step.tag(value))
            except NotRoundTrippableError as error:
                return NotRoundTrippableError(error.problem, _joined(path))
            except Exception as error:
                return NotRoundTrippableError(
                    f"a value of type {type(value).__qualname__} can't be encoded: {why(error)}", _joined(path)
                )
            pending += reversed(parts)
        return None

    # --- from the annotation --------------------------------------------------------------------------------------

    def _make_step(self, cls: type) -> Step:
        info = self._info
        if info is None:
            return self._step_of_anything(cls)
        if isinstance(info, shapes.AnyType):
            return self._step_of_any(cls)
        if isinstance(info, shapes.UnionType):
            custom_last = sorted(info.types, key=lambda one: isinstance(one, shapes.CustomType))
            steps = (self._of(one).step(cls) for one in custom_last)
            return next((step for step in steps if not isinstance(step, Unfit)), None) or self._unfit(cls)
        if isinstance(info, shapes.CustomType):
            if registry.find_codec(cls) is None:
                return self._unfit(cls)
            inside = registry.info_of_form(info.cls)
            return Custom(info.cls, cls, ANYTHING, None if inside is None else self._of(inside))
        if isinstance(info, shapes.EnumType):
            return _AS_IT_IS if cls is info.cls else self._unfit(cls)
        if isinstance(info, shapes.LiteralType):
            return Literals(info.values) if cls in map(type, info.values) else self._unfit(cls)
        if isinstance(info, shapes.IntType):
            return _INTEGERS if cls is int else self._unfit(cls)
        if isinstance(info, shapes.DateTimeType | shapes.TimeType):
            return (
                _TYPED_MOMENTS
                if cls is (datetime if isinstance(info, shapes.DateTimeType) else time)
                else self._unfit(cls)
            )
        if (leaf := _LEAVES.get(type(info))) is not None:
            return _AS_IT_IS if cls is leaf else self._unfit(cls)
        return self._step_of_container(info, cls)

    def _step_of_container(self, info: shapes.Type, cls: type) -> Step:
        if isinstance(info, shapes.CollectionType):
            fits = cls is _COLLECTIONS[type(info)]
            return Items(self._of(info.item_type)) if fits else self._unfit(cls)
        if isinstance(info, shapes.DictType):
            return Mappings(self._of(info.key_type), self._of(info.value_type)) if cls is dict else self._unfit(cls)
        if isinstance(info, shapes.TupleType):
            return Tuples([self._of(one) for one in info.item_types]) if cls is tuple else self._unfit(cls)
        known: Any = info
        wanted = typing.get_origin(known.cls) or known.cls
        fields: dict[str, Form] = {field.name: self._of(field.type) for field in known.fields}
        if isinstance(info, shapes.TypedDictType):
            return Records(fields) if cls is dict else self._unfit(cls)
        if cls is not wanted:
            return self._unfit(cls)
        if isinstance(info, shapes.NamedTupleType):
            return Tuples(list(fields.values()), list(fields))
        if private := [one.name for one in getattr(cls, "__attrs_attrs__", ()) if one.name.startswith("_")]:
            return Unfit(f"the attribute {private[0]!r} of {cls.__qualname__} is not kept, as its name begins with '_'")
        return Objects(cls, fields)

    def _step_of_any(self, cls: type) -> Step:
        if cls is int:
            return _INTEGERS
        if cls in _PLAIN:
            return _AS_IT_IS
        if cls is list:
            return Items(self)
        if cls is dict:
            return Mappings(self, self)
        if cls in (datetime, time):
            return _MOMENTS
        if (kind := kind_of(cls)) is not None:
            if not kind.is_container:
                return _EXTENSIONS
            return Mappings(self, self, is_odd=True) if issubclass(cls, dict) else Items(self, is_odd=True)
        return Unfit(
            f"a value of type {cls.__qualname__} can't be kept where the annotation is Any: nothing says as what it is "
            f"to be read, so name its type in the annotation"
        )

    def _step_of_anything(self, cls: type) -> Step:
        if cls is int:
            return _INTEGERS
        if cls is OrderedDict:
            return Custom(None, cls, ANYTHING, self)
        if issubclass(cls, dict):
            return Mappings(self, self)
        if issubclass(cls, list | tuple | set | frozenset):
            return Items(self)
        names = getattr(cls, "__struct_fields__", None) or getattr(cls, "__dataclass_fields__", None)
        names = names or [one.name for one in getattr(cls, "__attrs_attrs__", ())]
        if names:
            return Objects(cls, dict.fromkeys(names, self))
        return _AS_IT_IS if registry.find_codec(cls) is None or cls is Tagged else Custom(None, cls, ANYTHING)

    def _unfit(self, cls: type) -> Step:
        return Unfit(not_the_same(cls, _named(self._info)))


def _without_repetitions(column: Column) -> Column:
    """Remove repeated objects: a value that contains one twice would double on each level."""
    if len(column) < _WIDE or type(next(iter(column))) in (int, str, float):
        return column
    return list({id(one): one for one in column}.values())


ANYTHING = AnnotatedForm(None, {})
_COLLECTIONS: dict[type, type] = {
    shapes.ListType: list,
    shapes.SetType: set,
    shapes.FrozenSetType: frozenset,
    shapes.VarTupleType: tuple,
}
_TOO_DEEP = f"it is nested more than {DEPTH_MAX} deep, or holds itself"


def form_of(annotation: Any) -> AnnotatedForm:
    """Return the form of a whole annotation. Raises what ``msgspec.inspect.type_info`` raises."""
    info = registry.type_info(readable_type(annotation))
    form = AnnotatedForm(info, {})
    form._known[id(info)] = form
    return form


def form_to_send(annotation: Any) -> AnnotatedForm | None:
    """Return the form for what is sent as ``annotation``; None if the encoder alone writes it so that it is kept."""
    if may_hold_untyped(annotation):
        return form_of(annotation)
    return ANYTHING if may_hold_ordered(annotation) else None


def _named(info: Any) -> str:
    if isinstance(info, shapes.UnionType):
        return " | ".join(map(_named, info.types))
    if isinstance(info, shapes.LiteralType):
        return f"Literal{list(info.values)}"
    cls = getattr(info, "cls", None) or _LEAVES.get(type(info)) or _COLLECTIONS.get(type(info))
    if cls is type(None):
        return "None"
    return getattr(cls, "__qualname__", None) or type(info).__name__.removesuffix("Type").lower()


def _joined(path: Sequence[str]) -> str:
    text = "".join(path[:_PATH_STEPS_MAX]).strip()
    return text if len(path) <= _PATH_STEPS_MAX else f"{text}..."


def why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return _TOO_DEEP
    return surrogate_problem(error) if isinstance(error, UnicodeEncodeError) else str(error)


def encode_value(value: Any) -> bytes:
    """Encode a value, whatever its annotation. Raises what the encoder and codecs raise."""
    try:
        return encoder.encode(value)
    except OverflowError:
        return encoder.encode(ANYTHING.tag(value))
    except UnicodeEncodeError as error:
        raise NotRoundTrippableError(surrogate_problem(error)) from None


# Values from bytes, by their annotation.


_EXTENSION_BYTE = bytes((EXTENSION_CODE,))


class ValueDecoder:
    """Decoder of values of ``annotation``. Raises TypeError for a type that can't be read at all."""

    __slots__ = ("decode", "plainly", "type")

    def __init__(self, annotation: Any) -> None:
        self.type = readable_type(annotation)
        self.plainly: Callable[[Any], Any] = decoding.Decoder(
            self.type, dec_hook=decode_custom, ext_hook=read_extension
        ).unguarded
        self.decode: Callable[[Any], Any] = decoding.guarded(self._decode)
        """Decode a value. Raises only DecodeError."""

    def _decode(self, data: Any) -> Any:
        try:
            return self.plainly(data)
        except msgspec.ValidationError as error:
            return self.decode_again(data, error)

    def decode_again(self, data: Any, error: BaseException) -> Any:
        """Decode again if ``error`` can be about an extension (a typed decoder accepts none); else raise it."""
        if not isinstance(error, msgspec.ValidationError) or _EXTENSION_BYTE not in bytes(data):
            raise error
        return converted_custom(decoding.decode(data, ext_hook=read_extension), self.type)


_HOLDERS = (list, dict, tuple, set, frozenset, deque, defaultdict, OrderedDict)


def allow_integers(annotation: Any) -> Any:
    """Return ``annotation`` with ``float | int`` for each ``float`` outside of classes: so an int stays one."""
    if annotation is float:
        return float | int
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(allow_integers, arguments))]  # noqa: UP007
    if origin in _HOLDERS and arguments:
        return origin[tuple(one if one is Ellipsis else allow_integers(one) for one in arguments)]
    return annotation
