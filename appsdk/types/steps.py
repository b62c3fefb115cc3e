"""Steps that check and encode values of one class in one place of an annotation.

A :class:`Step` handles all values of its kind in one place together: it finds their parts and returns what is encoded
in their place. :mod:`immortal.appsdk.types.encoding` uses them.
"""

from __future__ import annotations

import copy
import functools
import threading
import typing
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, time
from itertools import chain
from operator import attrgetter, is_not
from typing import Any, Self

import msgspec

from immortal.appsdk.types import registry
from immortal.appsdk.types.handles import read_extension
from immortal.appsdk.types.registry import Codec, decode_custom, encode_custom
from immortal.protocol import decoding
from immortal.protocol.extension_values import encode_extension, is_beyond, zone_problem

EXTENSIONS_DEPTH_MAX = 32
"""Limit of nested tuples and sets as extensions: to read one takes four levels of Python's recursion, of 1,000."""

_KEY_CHARACTERS_MAX = 60

encoder = msgspec.msgpack.Encoder(enc_hook=encode_custom)
"""Encoder of all arguments and state. It writes sets, dicts and so on in their own order."""


class NotRoundTrippableError(TypeError):
    """Raised for a value that would not be read back the same. ``path``: of the part (``['eu'][3].price``)."""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.problem = problem
        self.path = path


class Tagged:
    """Stand-in for a value that is encoded as an extension, since an Ext can't be a key of a dict."""

    __slots__ = ("extension",)

    def __init__(self, value: Any) -> None:
        self.extension = encode_extension(value, _encode_contents)

    @classmethod
    def holding(cls, value: Any, tag: Callable[[Any], Any]) -> Self:
        """Make a stand-in for a container. ``tag``: called for its contents. Raises NotRoundTrippableError."""
        tagged = cls.__new__(cls)
        _depth.now += 1
        try:
            if _depth.now > EXTENSIONS_DEPTH_MAX:
                raise NotRoundTrippableError(
                    f"tuples, sets and the like in Any are nested more than {EXTENSIONS_DEPTH_MAX} deep"
                )
            tagged.extension = encode_extension(value, lambda contents: encoder.encode(tag(contents)))
        except UnicodeEncodeError as error:
            raise NotRoundTrippableError(surrogate_problem(error)) from None
        finally:
            _depth.now -= 1
        return tagged


def _encode_contents(contents: Any) -> bytes:
    try:
        return encoder.encode(contents)
    except OverflowError:  # of a range or fraction
        return encoder.encode([Tagged(one) if is_beyond(one) else one for one in contents])


registry._registered[Tagged] = Codec(attrgetter("extension"), lambda annotation, plain: plain)


class _Depth(threading.local):
    now = 0


_depth = _Depth()


# --- values of one class in one place ---------------------------------------------------------------------------------

Column = Any
"""List, tuple, or view of a dict."""
Level = list[tuple["Form", Column]]


class Form:
    """Form of one place of an annotation; see :class:`immortal.appsdk.types.encoding.AnnotatedForm`."""

    def scan(self, column: Column, below: Level) -> bool:
        """Check values of any classes, as :meth:`Step.scan` does."""
        raise NotImplementedError

    def step(self, cls: type) -> Step:
        """Return the step for values of the class."""
        raise NotImplementedError

    def tag(self, value: Any) -> Any:
        """Return what is encoded in place of the value: the value itself if nothing in it needs an extension."""
        return self.step(type(value)).tag(value)

    def are_plain(self, classes: Iterable[type]) -> bool:
        """Return True if all values of these classes are encoded as they are."""
        return all(type(self.step(cls)) in (Step, Integers) for cls in classes)


class Step:
    """Step for plain values, which are encoded as they are."""

    def scan(self, column: Column, below: Level) -> bool:
        """Return True if a value of ``column`` needs a tag; add parts to ``below``. Raises NotRoundTrippableError."""
        return False

    def is_plain(self, value: Any) -> bool:
        """Return True if :meth:`scan` surely accepts this one value, and it needs no tag: a fast answer."""
        return False

    def parts(self, value: Any) -> Iterator[tuple[str, Form, Any]]:
        """Yield the parts of ``value``: (path to it, its form, the part)."""
        yield from ()

    def tag(self, value: Any) -> Any:
        """Return ``value``, or what is encoded in its place."""
        return value


class Unfit(Step):
    def __init__(self, problem: str) -> None:
        self.problem = problem

    def scan(self, column: Column, below: Level) -> bool:
        raise NotRoundTrippableError(self.problem)


class Literals(Step):
    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values

    def scan(self, column: Column, below: Level) -> bool:
        for value in column:
            if value not in self._values:
                raise NotRoundTrippableError(f"{clipped(value)} where Literal{list(self._values)} is annotated")
        return False


class Integers(Step):
    """Step for integers. The encoder itself detects those of more than 64 bits."""

    def tag(self, value: Any) -> Any:
        return Tagged(value) if is_beyond(value) else value


class Extensions(Step):
    """Step for classes that are always encoded as extensions if no annotation says their type."""

    def scan(self, column: Column, below: Level) -> bool:
        return True

    def tag(self, value: Any) -> Any:
        try:
            return Tagged(value)
        except ValueError as error:
            raise NotRoundTrippableError(str(error)) from None


class Moments(Step):
    """Step for datetimes and times, which are plain if they have no zone or UTC, and are not in a repeated hour.

    ``typed``: the annotation says their class; otherwise only a datetime in UTC is plain.
    """

    def __init__(self, *, typed: bool) -> None:
        self._typed = typed

    def _is_plain(self, value: datetime | time) -> bool:
        if value.fold or not (value.tzinfo is None or value.tzinfo is UTC):
            return False
        return self._typed or (value.tzinfo is UTC and isinstance(value, datetime))

    def scan(self, column: Column, below: Level) -> bool:
        for value in column:
            if value.tzinfo is not None and (problem := zone_problem(value.tzinfo)):
                raise NotRoundTrippableError(problem)
        return not all(map(self._is_plain, column))

    def tag(self, value: Any) -> Any:
        return value if self._is_plain(value) else Tagged(value)


class Custom(Step):
    """Step for values with a codec, which makes ``cls`` of them when they are read.

    ``inside``: the form of the plain value, if the codec says it.
    """

    def __init__(self, cls: Any, given: type, anything: Form, inside: Form | None = None) -> None:
        self._cls = cls
        self._inside = inside
        self._form = inside or anything
        codec = registry.find_codec(given)
        self._unfit = codec.unfit if cls is not None and codec is not None else None
        self._is_same = given is (typing.get_origin(cls) or cls)
        self._is_ordered = given is OrderedDict

    def scan(self, column: Column, below: Level) -> bool:
        if not self._is_same and self._cls is not None:
            value = column[0]
            plain = decoding.decode(encoder.encode(self.tag(value)), ext_hook=read_extension)
            if type(came := decode_custom(self._cls, plain)) is not type(value):
                raise NotRoundTrippableError(not_the_same(type(value), f"a {type(came).__qualname__}"))
        if self._unfit is not None:
            for problem in filter(None, (self._unfit(self._cls, value) for value in column)):
                raise NotRoundTrippableError(problem)
        if self._inside is not None:
            below.append((self._form, list(map(encode_custom, column))))
        return self._is_ordered and any(map(_is_moved, column))

    def parts(self, value: Any) -> Iterator[tuple[str, Form, Any]]:
        if self._inside is not None:
            yield "", self._form, encode_custom(value)

    def tag(self, value: Any) -> Any:
        return self._form.tag(encode_custom(value))


def _is_moved(value: OrderedDict[Any, Any]) -> bool:
    """Return True if the encoder, which reads it as a plain dict, would not see a key that was moved."""
    return any(map(is_not, dict.__iter__(value), value))


class Items(Step):
    """Step for lists, tuples, sets and the like with any number of items. ``is_odd``: they need a tag themselves."""

    def __init__(self, item: Form, *, is_odd: bool = False) -> None:
        self._item = item
        self._is_odd = is_odd

    def scan(self, column: Column, below: Level) -> bool:
        items = column[0] if len(column) == 1 else list(chain.from_iterable(column))
        if items:
            below.append((self._item, items))
        return self._is_odd

    def parts(self, value: Any) -> Iterator[tuple[str, Form, Any]]:
        is_set = isinstance(value, set | frozenset)
        for index, item in enumerate(value):
            yield (f"{{{clipped(item)}}}" if is_set else f"[{index}]"), self._item, item

    def tag(self, value: Any) -> Any:
        tag = self._item.tag
        if self._is_odd:
            return Tagged.holding(value, lambda items: [tag(item) for item in items])
        made = [tag(item) for item in value]
        return made if isinstance(value, list) else tuple(made)


class Mappings(Step):
    """Step for dicts and the like. ``is_odd``: they need a tag themselves."""

    def __init__(self, key: Form, value: Form, *, is_odd: bool = False) -> None:
        self._key = key
        self._value = value
        self._is_odd = is_odd

    def scan(self, column: Column, below: Level) -> bool:
        if len(column) == 1:
            (only,) = column
            if only:
                below += [(self._key, only), (self._value, only.values())]
        elif any(column):
            below.append((self._key, list(chain.from_iterable(column))))
            below.append((self._value, list(chain.from_iterable(map(dict.values, column)))))
        return self._is_odd

    def parts(self, value: Any) -> Iterator[tuple[str, Form, Any]]:
        for key, item in value.items():
            yield f" key {clipped(key)}", self._key, key
            yield f"[{clipped(key)}]", self._value, item

    def tag(self, value: Any) -> Any:
        return Tagged.holding(value, self._tagged) if self._is_odd else self._tagged(value)

    def _tagged(self, value: Any) -> Any:
        return {self._key.tag(key): self._value.tag(item) for key, item in value.items()}


class Records(Step):
    """Step for dicts of a TypedDict."""

    def __init__(self, fields: dict[str, Form]) -> None:
        self._fields = fields

    def scan(self, column: Column, below: Level) -> bool:
        for value in column:
            for key in value.keys() - self._fields.keys():
                raise NotRoundTrippableError(
                    f"the key {clipped(key)} is not in the TypedDict, so a recovery would lose it"
                )
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


class Tuples(Step):
    """Step for tuples of a fixed length. ``names``: the fields of named tuples."""

    def __init__(self, forms: Sequence[Form], names: Sequence[str] = ()) -> None:
        self._forms = forms
        self._names = names

    def scan(self, column: Column, below: Level) -> bool:
        for value in column:
            if len(value) != len(self._forms):
                raise NotRoundTrippableError(f"a tuple of {len(value)} items where {len(self._forms)} are annotated")
        below += [(form, [value[index] for value in column]) for index, form in enumerate(self._forms)]
        return False

    def parts(self, value: Any) -> Iterator[tuple[str, Form, Any]]:
        for index, (form, item) in enumerate(zip(self._forms, value, strict=False)):
            yield (f".{self._names[index]}" if self._names else f"[{index}]"), form, item

    def tag(self, value: Any) -> Any:
        return tuple(form.tag(item) for form, item in zip(self._forms, value, strict=False))


class Objects(Step):
    """Step for dataclasses, Structs and attrs classes."""

    def __init__(self, cls: type, fields: dict[str, Form]) -> None:
        self._cls = cls
        self._fields = fields
        self._is_struct = issubclass(cls, msgspec.Struct)
        self._has_dict = bool(getattr(cls, "__dictoffset__", 0))
        self._names = frozenset() if self._is_struct else frozenset(fields)
        self._getters = [(attrgetter(name), form) for name, form in fields.items()]
        self._get_all = attrgetter(*fields) if len(fields) > 1 else None
        self._plain: set[tuple[type, ...]] = set()  # classes of the fields of values that were plain

    def is_plain(self, value: Any) -> bool:
        if self._get_all is None or (self._has_dict and vars(value).keys() != self._names):
            return False
        classes = tuple(map(type, self._get_all(value)))
        if classes in self._plain:
            return True
        if all(form.are_plain((cls,)) for cls, (_, form) in zip(classes, self._getters, strict=True)):
            self._plain.add(classes)
        return classes in self._plain

    def scan(self, column: Column, below: Level) -> bool:
        if self._has_dict and not all(map(self._names.issuperset, map(vars, column))):
            for value in column:
                self._require_no_more(value)
        for get, form in self._getters:
            if not form.are_plain(set(map(type, map(get, column)))):
                below.append((form, list(map(get, column))))
        return False

    def _require_no_more(self, value: Any) -> None:
        for name in vars(value).keys() - self._names:
            if not isinstance(getattr(self._cls, name, None), functools.cached_property):  # it is computed again
                raise NotRoundTrippableError(
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


def not_the_same(cls: type, wanted: str) -> str:
    return f"a value of type {cls.__qualname__} where {wanted} is annotated would come back as something else"


def surrogate_problem(error: UnicodeEncodeError) -> str:
    return f"a text with a lone surrogate ({error.object[error.start : error.end]!a}), which is no Unicode character"


def clipped(key: object) -> str:
    try:
        text = repr(key)
    except Exception:  # of the user's own
        text = f"a {type(key).__qualname__}"
    return text if len(text) <= _KEY_CHARACTERS_MAX else f"{text[: _KEY_CHARACTERS_MAX - 3]}..."
