"""Whether a value comes back from its bytes as what it is, types included; and bytes from which more values do.

msgspec writes more than it reads back: a subclass as what is annotated, a tuple in ``Any`` as a list, a ``Decimal``
there as a text. A :class:`Form` is what an annotation says about that. It looks at values level by level, at all that
stand in one place of an annotation together: a list of a million numbers costs one look at their types. What
MessagePack has no form for, and can be read back, becomes an extension (:mod:`protocol.values`).
"""

from __future__ import annotations

import copy
import functools
import threading
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from itertools import chain
from operator import attrgetter
from typing import Any
from uuid import UUID

import msgspec
from msgspec import inspect as shapes

from appsdk.types import registry
from appsdk.types.handles import Handle, read_extension
from appsdk.types.registry import Codec, decode_custom, encode_custom, readable_type
from protocol.values import CONTAINERS, EXTENSION_CODE, SCALARS, encode_extension, is_beyond, zone_problem

DEPTH_MAX = 256
"""Values in one another: to read one takes a level of Python's recursion for each, of 1,000 in all."""

EXTENSIONS_DEPTH_MAX = 32
"""... of tuples and sets that are extensions, which take four each."""

_DEEP, _WIDE = 8, 4096
_KEY_CHARACTERS_MAX = 60
_PATH_STEPS_MAX = 12
_EXTENSION_BYTE = bytes((EXTENSION_CODE,))
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

encoder = msgspec.msgpack.Encoder(enc_hook=encode_custom)
"""The only encoder, of arguments and state: sets, dicts and so on are written in the order they have."""


class UnfitError(TypeError):
    """A value that would not come back as what it is. ``path``: to it, as in Python: ``['eu'][3].price``."""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.problem = problem
        self.path = path


class _Tagged:
    """In place of a value that is encoded as an extension: an Ext can't be a key of a dict."""

    __slots__ = ("extension",)

    def __init__(self, value: Any) -> None:
        self.extension = encode_extension(value, encoder.encode)


registry._registered[_Tagged] = Codec(attrgetter("extension"), lambda annotation, plain: plain)


class _Depth(threading.local):
    now = 0


_depth = _Depth()


# --- what is done with the values of one class in one place -----------------------------------------------------------

Column = Any
"""A list, a tuple, or a view of a dict."""
Level = list[tuple["Form", Column]]


class _Step:
    """Plain values: they come back as they are."""

    def look(self, column: Column, below: Level) -> bool:
        """Whether some of ``column`` are to be tagged; what is in them goes ``below``. Raises UnfitError."""
        return False

    def parts(self, value: Any) -> Iterator[tuple[str, Form, Any]]:
        """What is in ``value``: (how to get there, its form, the part)."""
        yield from ()

    def tag(self, value: Any) -> Any:
        """``value``, or what is encoded in its place."""
        return value


class _Unfit(_Step):
    def __init__(self, problem: str) -> None:
        self.problem = problem

    def look(self, column: Column, below: Level) -> bool:
        raise UnfitError(self.problem)


class _Literals(_Step):
    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values

    def look(self, column: Column, below: Level) -> bool:
        for value in column:
            if value not in self._values:
                raise UnfitError(f"{_clipped(value)} where Literal{list(self._values)} is annotated")
        return False


class _Integers(_Step):
    """The encoder itself says where they have more than 64 bits."""

    def tag(self, value: Any) -> Any:
        return _Tagged(value) if is_beyond(value) else value


class _Extensions(_Step):
    """Of classes that are always written as extensions where nothing says their type."""

    def look(self, column: Column, below: Level) -> bool:
        return True

    def tag(self, value: Any) -> Any:
        return _Tagged(value)


class _Moments(_Step):
    """Datetimes and times: without a zone, or in UTC, and the only ones of their hour, they are plain.

    ``typed``: the annotation says what they are; else only a datetime in UTC is plain.
    """

    def __init__(self, *, typed: bool) -> None:
        self._typed = typed

    def _is_plain(self, value: datetime | time) -> bool:
        if value.fold or not (value.tzinfo is None or value.tzinfo is UTC):
            return False
        return self._typed or (value.tzinfo is UTC and isinstance(value, datetime))

    def look(self, column: Column, below: Level) -> bool:
        for value in column:
            if value.tzinfo is not None and (problem := zone_problem(value.tzinfo)):
                raise UnfitError(problem)
        return not all(map(self._is_plain, column))

    def tag(self, value: Any) -> Any:
        return value if self._is_plain(value) else _Tagged(value)


class _Custom(_Step):
    """With a codec, which says what comes back: ``cls``, or what it makes of others."""

    def __init__(self, cls: Any, given: type) -> None:
        self._cls = cls
        self._is_same = given is (typing.get_origin(cls) or cls)

    def look(self, column: Column, below: Level) -> bool:
        if not self._is_same and self._cls is not None:
            value = column[0]
            plain = msgspec.msgpack.decode(encode_value(value), ext_hook=read_extension)
            if type(came := decode_custom(self._cls, plain)) is not type(value):
                raise UnfitError(_not_the_same(type(value), f"a {type(came).__qualname__}"))
        return False

    def tag(self, value: Any) -> Any:
        return ANYTHING.tag(encode_custom(value))


class _Items(_Step):
    """Lists, tuples and sets, of any number of items. ``is_odd``: they are to be tagged themselves."""

    def __init__(self, item: Form, *, is_odd: bool = False) -> None:
        self._item = item
        self._is_odd = is_odd

    def look(self, column: Column, below: Level) -> bool:
        items = column[0] if len(column) == 1 else list(chain.from_iterable(column))
        if items:
            below.append((self._item, items))
        return self._is_odd

    def parts(self, value: Any) -> Iterator[tuple[str, Form, Any]]:
        is_set = isinstance(value, set | frozenset)
        for index, item in enumerate(value):
            yield (f"{{{_clipped(item)}}}" if is_set else f"[{index}]"), self._item, item

    def tag(self, value: Any) -> Any:
        tag = self._item.tag
        if self._is_odd:
            tagged = _Tagged.__new__(_Tagged)
            _depth.now += 1
            try:
                if _depth.now > EXTENSIONS_DEPTH_MAX:
                    raise UnfitError(f"tuples and sets in Any are nested more than {EXTENSIONS_DEPTH_MAX} deep")
                tagged.extension = encode_extension(value, lambda items: encoder.encode([tag(item) for item in items]))
            finally:
                _depth.now -= 1
            return tagged
        made = [tag(item) for item in value]
        return made if isinstance(value, list) else tuple(made)


class _Mappings(_Step):
    def __init__(self, key: Form, value: Form) -> None:
        self._key = key
        self._value = value

    def look(self, column: Column, below: Level) -> bool:
        if len(column) == 1:
            (only,) = column
            if only:
                below += [(self._key, only), (self._value, only.values())]
        elif any(column):
            below.append((self._key, list(chain.from_iterable(column))))
            below.append((self._value, list(chain.from_iterable(map(dict.values, column)))))
        return False

    def parts(self, value: Any) -> Iterator[tuple[str, Form, Any]]:
        for key, item in value.items():
            yield f" key {_clipped(key)}", self._key, key
            yield f"[{_clipped(key)}]", self._value, item

    def tag(self, value: Any) -> Any:
        return {self._key.tag(key): self._value.tag(item) for key, item in value.items()}


class _Records(_Step):
    """Dicts whose keys have a type each."""

    def __init__(self, fields: dict[str, Form]) -> None:
        self._fields = fields

    def look(self, column: Column, below: Level) -> bool:
        for value in column:
            for key in value.keys() - self._fields.keys():
                raise UnfitError(f"the key {_clipped(key)} is not in the TypedDict, so a recovery would lose it")
        for key, form in self._fields.items():
            if found := [value[key] for value in column if key in value]:
                below.append((form, found))
        return False

    def parts(self, value: Any) -> Iterator[tuple[str, Form, Any]]:
        for key, form in self._fields.items():
            if key in value:
                yield f"[{key!r}]", form, value[key]

    def tag(self, value: Any) -> Any:
        return {key: self._fields[key].tag(item) for key, item in value.items()}


class _Tuples(_Step):
    """Of a fixed length; ``names``: of named ones."""

    def __init__(self, forms: Sequence[Form], names: Sequence[str] = ()) -> None:
        self._forms = forms
        self._names = names

    def look(self, column: Column, below: Level) -> bool:
        for value in column:
            if len(value) != len(self._forms):
                raise UnfitError(f"a tuple of {len(value)} items where {len(self._forms)} are annotated")
        below += [(form, [value[index] for value in column]) for index, form in enumerate(self._forms)]
        return False

    def parts(self, value: Any) -> Iterator[tuple[str, Form, Any]]:
        for index, (form, item) in enumerate(zip(self._forms, value, strict=False)):
            yield (f".{self._names[index]}" if self._names else f"[{index}]"), form, item

    def tag(self, value: Any) -> Any:
        return tuple(form.tag(item) for form, item in zip(self._forms, value, strict=False))


class _Objects(_Step):
    """Dataclasses, Structs and attrs classes."""

    def __init__(self, cls: type, fields: dict[str, Form]) -> None:
        self._cls = cls
        self._fields = fields
        self._is_struct = issubclass(cls, msgspec.Struct)
        self._has_dict = bool(getattr(cls, "__dictoffset__", 0))
        self._names = frozenset() if self._is_struct else frozenset(fields)
        self._getters = [(attrgetter(name), form) for name, form in fields.items()]

    def look(self, column: Column, below: Level) -> bool:
        if self._has_dict and set(map(len, map(vars, column))) != {len(self._names)}:
            for value in column:
                self._require_no_more(value)
        for get, form in self._getters:
            if not form.are_plain(set(map(type, map(get, column)))):
                below.append((form, list(map(get, column))))
        return False

    def _require_no_more(self, value: Any) -> None:
        for name in vars(value).keys() - self._names:
            if not isinstance(getattr(self._cls, name, None), functools.cached_property):  # which is made again
                raise UnfitError(
                    f"{self._cls.__qualname__} has an attribute {name!r} that is no field of it, so a recovery would "
                    f"lose it"
                )

    def parts(self, value: Any) -> Iterator[tuple[str, Form, Any]]:
        for name, form in self._fields.items():
            yield f".{name}", form, getattr(value, name)

    def tag(self, value: Any) -> Any:
        made = copy.copy(value) if self._is_struct else object.__new__(self._cls)
        change = msgspec.structs.force_setattr if self._is_struct else object.__setattr__
        for name, form in self._fields.items():
            change(made, name, form.tag(getattr(value, name)))
        return made


_AS_IT_IS, _INTEGERS, _EXTENSIONS = _Step(), _Integers(), _Extensions()
_TYPED_MOMENTS, _MOMENTS = _Moments(typed=True), _Moments(typed=False)


# --- what an annotation says ------------------------------------------------------------------------------------------


class Form:
    """Of one place of an annotation. ``info`` None: anything, of whatever class; only integers matter."""

    def __init__(self, info: shapes.Type | None, known: dict[int, Form]) -> None:
        while isinstance(info, shapes.Metadata):
            info = info.type
        self._info = info
        self._known = known  # by the identity of their infos, so that a type may refer to itself
        self._steps: dict[type, _Step] = {}

    def _of(self, info: shapes.Type) -> Form:
        if (found := self._known.get(id(info))) is None:
            found = self._known[id(info)] = Form(info, self._known)
        return found

    def step(self, cls: type) -> _Step:
        if (found := self._steps.get(cls)) is None:
            found = self._steps[cls] = self._make_step(cls)
        return found

    def takes_plainly(self, value: Any) -> bool:
        """It is of a plain class and fits: known at a glance, where the annotation has no bounds."""
        cls = type(value)
        if cls not in PLAIN_CLASSES or self._has_bounds:
            return False
        return self.are_plain((cls,)) and (cls is not str or value.isascii())

    def are_plain(self, classes: Iterable[type]) -> bool:
        """Values of these classes come back as they are, whatever they are."""
        return all(type(self.step(cls)) in (_Step, _Integers) for cls in classes)

    @functools.cached_property
    def is_sure(self) -> bool:
        """What :meth:`is_odd` lets through comes back: there are no bounds, and no codecs, constructors or validators
        that could make something else of it."""
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
        """Whether some of it is to be tagged (:meth:`tag`), but for large integers, of which the encoder knows.

        Raises UnfitError with the path to what is not kept.
        """
        level: Level = [(self, (value,))]
        odd = False
        try:
            for depth in range(DEPTH_MAX):
                below: Level = []
                for form, column in level:
                    odd |= form._look(column, below)
                if not below:
                    return odd
                level = below
                if depth >= _DEEP:
                    level = [(form, _without_repetitions(column)) for form, column in below]
        except Exception as error:  # also of a class of the user's, such as one whose field was deleted
            unfit = error if isinstance(error, UnfitError) else UnfitError(why(error))
            raise self._place_of(value, None) or unfit from None
        raise self._place_of(value, None) or UnfitError(_TOO_DEEP)

    def _look(self, column: Column, below: Level) -> bool:
        classes = set(map(type, column))
        if len(classes) == 1:
            (cls,) = classes
            if cls not in PLAIN_CLASSES and not isinstance(column, list | tuple):
                column = list(column)
            return self.step(cls).look(column, below)
        odd = False
        for cls in classes:
            odd |= self.step(cls).look([one for one in column if type(one) is cls], below)
        return odd

    def tag(self, value: Any) -> Any:
        """What is encoded in its place: the same where nothing in it needs an extension."""
        return self.step(type(value)).tag(value)

    def encode(self, value: Any) -> bytes:
        """Raises UnfitError, with the path to what is not kept or can't be encoded."""
        odd = self.is_odd(value)
        try:
            return encoder.encode(self.tag(value)) if odd else encode_value(value)
        except Exception as error:
            raise self.unencodable(value, error) from error

    def unencodable(self, value: Any, error: Exception) -> UnfitError:
        """Where in ``value`` what can't be encoded is. ``error``: why all of it can't be."""
        return self._place_of(value, encode_value) or UnfitError(why(error))

    def _place_of(self, value: Any, encode: Callable[[Any], object] | None) -> UnfitError | None:
        """The first part that is not kept or, with ``encode``, that this does not take."""
        pending: list[tuple[Form, Any, tuple[str, ...]]] = [(self, value, ())]
        while pending:
            form, value, path = pending.pop()
            if len(path) >= DEPTH_MAX:
                return UnfitError(_TOO_DEEP, _joined(path))
            step = form.step(type(value))
            try:
                step.look((value,), [])
                parts = [(part_form, part, (*path, place)) for place, part_form, part in step.parts(value)]
                if encode is not None and not parts:
                    encode(step.tag(value))
            except UnfitError as error:
                return UnfitError(error.problem, _joined(path))
            except Exception as error:
                return UnfitError(
                    f"a value of type {type(value).__qualname__} can't be encoded: {why(error)}", _joined(path)
                )
            pending += reversed(parts)
        return None

    # --- from the annotation --------------------------------------------------------------------------------------

    def _make_step(self, cls: type) -> _Step:
        info = self._info
        if info is None:
            return self._step_of_anything(cls)
        if isinstance(info, shapes.AnyType):
            return self._step_of_any(cls)
        if isinstance(info, shapes.UnionType):
            custom_last = sorted(info.types, key=lambda one: isinstance(one, shapes.CustomType))
            steps = (self._of(one).step(cls) for one in custom_last)
            return next((step for step in steps if not isinstance(step, _Unfit)), None) or self._unfit(cls)
        if isinstance(info, shapes.CustomType):
            return _Custom(info.cls, cls)
        if isinstance(info, shapes.EnumType):
            return _AS_IT_IS if cls is info.cls else self._unfit(cls)
        if isinstance(info, shapes.LiteralType):
            return _Literals(info.values) if cls in map(type, info.values) else self._unfit(cls)
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

    def _step_of_container(self, info: shapes.Type, cls: type) -> _Step:
        if isinstance(info, shapes.CollectionType):
            fits = cls is _COLLECTIONS[type(info)]
            return _Items(self._of(info.item_type)) if fits else self._unfit(cls)
        if isinstance(info, shapes.DictType):
            return _Mappings(self._of(info.key_type), self._of(info.value_type)) if cls is dict else self._unfit(cls)
        if isinstance(info, shapes.TupleType):
            return _Tuples([self._of(one) for one in info.item_types]) if cls is tuple else self._unfit(cls)
        known: Any = info
        wanted = typing.get_origin(known.cls) or known.cls
        fields = {field.name: self._of(field.type) for field in known.fields}
        if isinstance(info, shapes.TypedDictType):
            return _Records(fields) if cls is dict else self._unfit(cls)
        if cls is not wanted:
            return self._unfit(cls)
        if isinstance(info, shapes.NamedTupleType):
            return _Tuples(list(fields.values()), list(fields))
        if private := [one.name for one in getattr(cls, "__attrs_attrs__", ()) if one.name.startswith("_")]:
            return _Unfit(
                f"the attribute {private[0]!r} of {cls.__qualname__} is not kept, as its name begins with '_'"
            )
        return _Objects(cls, fields)

    def _step_of_any(self, cls: type) -> _Step:
        if cls is int:
            return _INTEGERS
        if cls in _PLAIN:
            return _AS_IT_IS
        if cls is list or cls in CONTAINERS:
            return _Items(self, is_odd=cls is not list)
        if cls is dict:
            return _Mappings(self, self)
        if cls in (datetime, time):
            return _MOMENTS
        if cls in SCALARS:
            return _EXTENSIONS
        return _Unfit(
            f"a value of type {cls.__qualname__} can't be kept where the annotation is Any: nothing says as what it is "
            f"to be read, so name its type in the annotation"
        )

    def _step_of_anything(self, cls: type) -> _Step:
        if cls is int:
            return _INTEGERS
        if issubclass(cls, dict):
            return _Mappings(self, self)
        if issubclass(cls, list | tuple | set | frozenset):
            return _Items(self)
        names = getattr(cls, "__struct_fields__", None) or getattr(cls, "__dataclass_fields__", None)
        names = names or [one.name for one in getattr(cls, "__attrs_attrs__", ())]
        if names:
            return _Objects(cls, dict.fromkeys(names, self))
        return _AS_IT_IS if registry.find_codec(cls) is None or cls is _Tagged else _Custom(None, cls)

    def _unfit(self, cls: type) -> _Step:
        return _Unfit(_not_the_same(cls, _named(self._info)))


def _without_repetitions(column: Column) -> Column:
    """What holds itself twice would be twice as wide on each level."""
    if len(column) < _WIDE or type(next(iter(column))) in (int, str, float):
        return column
    return list({id(one): one for one in column}.values())


ANYTHING = Form(None, {})
_COLLECTIONS: dict[type, type] = {
    shapes.ListType: list,
    shapes.SetType: set,
    shapes.FrozenSetType: frozenset,
    shapes.VarTupleType: tuple,
}
_TOO_DEEP = f"it is nested more than {DEPTH_MAX} deep, or holds itself"


def form_of(annotation: Any) -> Form:
    """Raises as ``msgspec.inspect.type_info``."""
    info = shapes.type_info(readable_type(annotation))
    form = Form(info, {})
    form._known[id(info)] = form
    return form


def _not_the_same(cls: type, wanted: str) -> str:
    return f"a value of type {cls.__qualname__} where {wanted} is annotated would come back as something else"


def _named(info: Any) -> str:
    """The type, for people."""
    if isinstance(info, shapes.UnionType):
        return " | ".join(map(_named, info.types))
    if isinstance(info, shapes.LiteralType):
        return f"Literal{list(info.values)}"
    cls = getattr(info, "cls", None) or _LEAVES.get(type(info)) or _COLLECTIONS.get(type(info))
    if cls is type(None):
        return "None"
    return getattr(cls, "__qualname__", None) or type(info).__name__.removesuffix("Type").lower()


def _clipped(key: object) -> str:
    try:
        text = repr(key)
    except Exception:  # of the user's own
        text = f"a {type(key).__qualname__}"
    return text if len(text) <= _KEY_CHARACTERS_MAX else f"{text[: _KEY_CHARACTERS_MAX - 3]}..."


def _joined(path: Sequence[str]) -> str:
    text = "".join(path[:_PATH_STEPS_MAX]).strip()
    return text if len(path) <= _PATH_STEPS_MAX else f"{text}..."


def why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return _TOO_DEEP
    if isinstance(error, UnicodeEncodeError):
        return (
            f"a text with a lone surrogate ({error.object[error.start : error.end]!a}), which is no Unicode character"
        )
    return str(error)


# --- bytes and back ---------------------------------------------------------------------------------------------------


def encode_value(value: Any) -> bytes:
    """Whatever is annotated. Raises what the encoder and codecs raise."""
    try:
        return encoder.encode(value)
    except OverflowError:
        return encoder.encode(ANYTHING.tag(value))


class ValueDecoder:
    """Of values that ``annotation`` says. Raises TypeError for what can't be read at all."""

    __slots__ = ("plainly", "type")

    def __init__(self, annotation: Any) -> None:
        self.type = readable_type(annotation)
        self.plainly: Callable[[Any], Any] = msgspec.msgpack.Decoder(
            self.type, dec_hook=decode_custom, ext_hook=read_extension
        ).decode

    def decode(self, data: Any) -> Any:
        """Raises msgspec.DecodeError, and what codecs and constructors raise."""
        try:
            return self.plainly(data)
        except msgspec.ValidationError as error:
            return self.decode_again(data, error)

    def decode_again(self, data: Any, error: Exception) -> Any:
        """Where ``error`` may be for an extension, which a typed decoder takes nowhere but for Any. Raises it, or
        another one."""
        if not isinstance(error, msgspec.ValidationError) or _EXTENSION_BYTE not in bytes(data):
            raise error
        plain = msgspec.msgpack.decode(data, ext_hook=read_extension)
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
