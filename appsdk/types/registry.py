"""Registry of codecs by type. It loads codecs for libraries on demand, and knows former module paths.

A codec converts a value to a plain one, which is encoded in its place, and converts it back by the annotation. Types
that msgspec knows need no codec and cost nothing here. The codecs of a library are loaded with its first class that
needs one: an app without numpy, pyarrow, pandas or pydantic types imports none of these.
"""

from __future__ import annotations

import functools
import importlib
import types
import typing
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from itertools import islice, repeat, zip_longest
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Struct

from immortal.appsdk.errors import DefinitionError
from immortal.protocol import decoding
from immortal.protocol.extension_values import converted
from immortal.protocol.redaction import Redacted

T = TypeVar("T")
Plain = TypeVar("Plain")


def _no_problem(annotation: Any) -> str | None:
    return None


class Codec(Struct, frozen=True):
    """Codec for values of one class. Each function but ``problem`` can raise any exception.

    ``encode``: returns the plain value that is encoded. ``decode``: takes (annotation, plain value). ``show``: returns
    what people see, if that is not the plain value. ``problem``: returns why an annotation with the class can't be
    supported; None if it can. ``form``: returns the annotation of the plain value, to which it is converted before
    ``decode`` gets it; None: it stays plain. ``unfit``: takes (annotation, value) and returns why the value would
    change; None if it would not.
    """

    encode: Callable[[Any], Any]
    decode: Callable[[Any, Any], Any]
    show: Callable[[Any], Any] | None = None
    problem: Callable[[Any], str | None] = _no_problem
    form: Callable[[Any], Any] | None = None
    unfit: Callable[[Any, Any], str | None] | None = None


_PYTHON = "immortal.appsdk.types.python_types"
_LIBRARIES = {
    **dict.fromkeys(("builtins", "collections", "fractions", "ipaddress", "re", "zoneinfo"), _PYTHON),
    "immortal": "immortal.appsdk.types.handles",
    "numpy": "immortal.appsdk.types.numpy_arrays",
    "pandas": "immortal.appsdk.types.pandas_frames",
    "pathlib": "immortal.appsdk.types.paths",
    "pyarrow": "immortal.appsdk.types.arrow_tables",
    "pydantic": "immortal.appsdk.types.pydantic_models",
}
"""Module with ``codec_of(cls) -> Codec | None``, by the package of a class or of one of its bases."""

_registered: dict[type, Codec] = {}
_found: dict[type, Codec] = {}  # all classes that were looked up and have one


def find_codec(cls: Any) -> Codec | None:
    """Return the codec of a class; None if it has none. A codec of a base class does not count."""
    try:
        if (codec := _found.get(cls)) is not None:
            return codec
    except TypeError:  # not hashable, so it is no class
        return None
    if not isinstance(cls, type):
        return None
    codec = _registered.get(cls) or _library_codec(cls)
    if codec is not None:
        _found[cls] = codec
    return codec


def _library_codec(cls: type) -> Codec | None:
    for base in cls.__mro__:
        module = _LIBRARIES.get(base.__module__.partition(".")[0])
        if module is not None:
            codec: Codec | None = importlib.import_module(module).codec_of(cls)
            if codec is not None:
                return codec
    return None


def register_type(cls: type[T], *, encode: Callable[[T], Plain], decode: Callable[[Plain], T], form: Any = Any) -> None:
    """Register ``cls`` as a type of arguments, results and state.

    ``encode`` makes a plain value (numbers, str, bytes, lists, dicts, dataclasses, ...), the same for equal values in
    each process; ``decode`` makes a ``cls`` of it, and raises ValueError if it can't. ``form`` is the type of the plain
    value: a received value without that type is refused before ``decode`` gets it.

    Call it in the module of ``cls``, before a class below :class:`immortal.Immortal` uses it. Raises DefinitionError.
    """
    if not isinstance(cls, type):
        raise DefinitionError(f"register_type({cls!r}): a class was expected")
    name = cls.__qualname__
    if cls in _registered:
        raise DefinitionError(f"register_type({name}): it is registered already: remove one of the two")
    is_pythons = importlib.import_module(_PYTHON).codec_of(cls) is not None  # apps of 0.1.0 can have a codec for it
    if not _is_custom(cls) or (_library_codec(cls) is not None and not is_pythons):
        raise DefinitionError(f"register_type({name}): its values are carried already, without a codec: remove this")
    if problem := unsupported_type(form):
        raise DefinitionError(f"register_type({name}, form=...): {problem}")

    def read(annotation: Any, plain: Any) -> T:
        value = decode(converted_custom(plain, form))
        if not isinstance(value, cls):
            raise ValueError(f"its codec made a {type(value).__qualname__} of it, not a {name}")
        return value

    _registered[cls] = _found[cls] = Codec(encode, read)


def _is_custom(cls: type) -> bool:
    try:
        return isinstance(msgspec.inspect.type_info(cls), msgspec.inspect.CustomType)
    except TypeError:  # for example a dataclass with a field that has no codec
        return False


# --- functions that msgspec calls -------------------------------------------------------------------------------------


def encode_custom(value: Any) -> Any:
    """Return the plain value that is encoded in place of ``value``. Raises TypeError, ValueError, MemoryError."""
    return _applied(value, _codec_for(value).encode)


def show_custom(value: Any) -> Any:
    """Return the value to show to people in place of ``value``."""
    if isinstance(value, Redacted):
        return str(value)
    codec = _codec_for(value)
    return _applied(value, codec.show or codec.encode)


def _codec_for(value: Any) -> Codec:
    cls = type(value)
    if (codec := find_codec(cls)) is None:
        raise TypeError(f"Encoding objects of type {cls.__module__}.{cls.__qualname__} is unsupported")
    return codec


def _applied(value: Any, function: Callable[[Any], Any]) -> Any:
    try:
        return function(value)
    except (TypeError, ValueError, MemoryError):
        raise
    except Exception as error:  # a library's own, or the user's
        raise TypeError(f"the codec of {type(value).__qualname__} raised {type(error).__name__}: {error}") from error


def decode_custom(annotation: Any, plain: Any) -> Any:
    """Return the value of a plain value. Raises ValueError, TypeError, to which msgspec adds the place in the data."""
    cls = typing.get_origin(annotation) or annotation
    if (codec := find_codec(cls)) is None:
        raise ValueError(f"{cls.__qualname__} is no type that can be read")
    try:
        if type(plain) is _Key:
            plain = str(plain)
        if codec.form is not None:
            plain = codec.encode(plain) if type(plain) is cls else plain  # it was encoded as an extension
            plain = converted_custom(plain, codec.form(annotation))
        return codec.decode(annotation, plain)
    except msgspec.ValidationError as error:  # msgspec would raise it again without the place in the data
        text, _, place = str(error).partition(" - at `$")
        raise ValueError(f"{text} (at {place.removesuffix('`')} of it)" if place else text) from None
    except (TypeError, ValueError, MemoryError):
        raise
    except Exception as error:  # a library's own, or the user's
        raise ValueError(f"the codec of {cls.__qualname__} raised {type(error).__name__}: {error}") from error


class _Key(str):
    """Text that is a key of a custom type: ``msgspec.convert`` calls no codec for a str (msgspec's issue 775)."""


def converted_custom(plain: Any, annotation: Any) -> Any:
    """Convert a decoded value to its annotation, with integers of any size. Raises ValidationError."""
    info = _info_with_custom_keys(annotation)
    return converted(plain if info is None else _keys_marked(plain, info), annotation, decode_custom)


@functools.cache
def _info_with_custom_keys(annotation: Any) -> msgspec.inspect.Type | None:
    info = type_info(annotation)
    return info if any(_has_custom_keys(part) for part in _types_in(info)) else None


def _has_custom_keys(info: msgspec.inspect.Type) -> bool:
    key = getattr(info, "key_type", None)
    return any(isinstance(arm, msgspec.inspect.CustomType) for arm in getattr(key, "types", (key,)))


def _keys_marked(plain: Any, info: Any) -> Any:
    for arm in getattr(info, "types", ()):  # of a union
        plain = _keys_marked(plain, arm)
    fields = getattr(info, "fields", ())
    if isinstance(plain, dict) and hasattr(info, "key_type"):
        marks = _has_custom_keys(info)
        pairs = ((_Key(key) if marks and type(key) is str else key, item) for key, item in plain.items())
        return {key: _keys_marked(item, info.value_type) for key, item in pairs}
    if isinstance(plain, dict) and fields:
        types = {field.encode_name: field.type for field in fields}
        return {key: _keys_marked(item, types.get(key)) for key, item in plain.items()}
    if isinstance(plain, list):
        items = repeat(info.item_type) if hasattr(info, "item_type") else getattr(info, "item_types", ())
        items = [field.type for field in fields] or items
        return [_keys_marked(item, one) for item, one in zip_longest(plain, islice(items, len(plain)))]
    return plain


def describe_received(plain: Any) -> str:
    """Return the name of a plain value's type, in msgspec's words."""
    names = {dict: "object", list: "array", type(None): "null"}
    return f"`{names.get(type(plain), type(plain).__name__)}`"


# --- annotations ------------------------------------------------------------------------------------------------------


class _UnionType(type):
    """Metaclass of types that stand for a union. Its codec decides which classes values have."""

    def __instancecheck__(cls, value: object) -> bool:
        return True


_unions: dict[Any, Any] = {}


def readable_type(annotation: Any) -> Any:
    """Return the type that msgspec reads for ``annotation``: itself, or one type for a union with pydantic models.

    msgspec allows a union only one custom type beside None."""
    union = typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation
    arms = typing.get_args(union) if typing.get_origin(union) in (typing.Union, types.UnionType) else ()
    if len([arm for arm in arms if arm is not type(None)]) < 2 or not any(map(_is_model, arms)):
        return annotation
    key = repr(annotation), arms
    if (found := _unions.get(key)) is None:
        codec = importlib.import_module(_LIBRARIES["pydantic"]).union_codec(annotation)
        found = _unions[key] = _UnionType("Union", (), {})
        _found[found] = codec
    return found


def _is_model(cls: Any) -> bool:
    is_model = isinstance(cls, type) and any(base.__module__.startswith("pydantic.") for base in cls.__mro__)
    return is_model and find_codec(cls) is not None


def may_hold_handles(annotation: Any) -> bool:
    """Return True if a value of the annotation can contain an :class:`immortal.Handle`, by name or in Any."""
    for info in types_of(annotation):
        cls = info.cls if isinstance(info, msgspec.inspect.CustomType) else None
        if isinstance(info, msgspec.inspect.AnyType) or find_codec(typing.get_origin(cls) or cls) is _handle_codec():
            return True
    return False


def may_hold_untyped(annotation: Any) -> bool:
    """Return True if a part of a value of the annotation has no declared type (Any)."""
    return any(isinstance(info, msgspec.inspect.AnyType) for info in types_of(annotation))


def may_hold_ordered(annotation: Any) -> bool:
    """Return True if a value of the annotation can contain an OrderedDict."""
    customs = (info.cls for info in types_of(annotation) if isinstance(info, msgspec.inspect.CustomType))
    return any((typing.get_origin(cls) or cls) is OrderedDict for cls in customs)


_MUTABLE = (
    msgspec.inspect.AnyType
    | msgspec.inspect.CustomType
    | msgspec.inspect.ListType
    | msgspec.inspect.SetType
    | msgspec.inspect.DictType
    | msgspec.inspect.TypedDictType
    | msgspec.inspect.ByteArrayType
    | msgspec.inspect.MemoryViewType
    | msgspec.inspect.RawType
    | msgspec.inspect.ExtType
)


def may_change(annotation: Any) -> bool:
    """Return True if a value of the annotation can contain one that code can change, such as a list."""
    return any(map(_is_mutable, types_of(annotation)))


def _is_mutable(info: msgspec.inspect.Type) -> bool:
    if isinstance(info, msgspec.inspect.StructType):
        return not info.cls.__struct_config__.frozen
    if isinstance(info, msgspec.inspect.DataclassType):
        parameters = getattr(info.cls, "__dataclass_params__", None)  # None: a class of attrs
        return parameters is None or not parameters.frozen
    return isinstance(info, _MUTABLE)


@functools.cache
def _handle_codec() -> Codec:
    handles = importlib.import_module(_LIBRARIES["immortal"])
    found: Codec = handles.codec_of(handles._Handle)
    return found


def types_of(annotation: Any) -> Iterator[msgspec.inspect.Type]:
    """Yield all types that an annotation consists of. Raises what ``msgspec.inspect.type_info`` raises."""
    return _types_in(type_info(readable_type(annotation)))


def _types_in(first: msgspec.inspect.Type) -> Iterator[msgspec.inspect.Type]:
    """Yield ``first``, and all types below it."""
    pending, seen = [first], list[msgspec.inspect.Type]()
    while pending:
        info = pending.pop()
        if not any(info is other for other in seen):  # else a type that refers to itself
            seen.append(info)
            yield info
            pending.extend(_parts(info))


_WithNames = msgspec.inspect.DataclassType | msgspec.inspect.StructType | msgspec.inspect.TypedDictType
_SAMPLE_COUNT = 16


def has_named_fields(annotation: Any) -> bool:
    """Return True if a value of the annotation can contain an object whose fields are encoded by name."""
    return any(isinstance(info, _WithNames) for info in types_of(annotation))


def lost_field(annotation: Any, data: bytes | msgspec.Raw) -> str:
    """Return a field that is encoded in ``data`` and that its class does not have any more, as "Item.price".

    "" if there is none. It looks at some values of each container, since all of a class have the same fields.
    """
    return _lost_field(type_info(readable_type(annotation)), data)


def _lost_field(info: msgspec.inspect.Type, data: bytes | msgspec.Raw) -> str:
    try:
        if isinstance(info, _WithNames) and not getattr(info, "array_like", False):
            known = {field.encode_name: field.type for field in info.fields}
            found = decoding.decode(data, type=dict[str, msgspec.Raw])
            gone = found.keys() - known.keys() - {getattr(info, "tag_field", None)}
            if gone and not any(name.startswith("$") for name in found):  # "$..." marks another form of a value
                return f"{info.cls.__qualname__}.{min(gone)}"
            parts: list[tuple[msgspec.inspect.Type, bytes | msgspec.Raw]]
            parts = [(known[name], value) for name, value in found.items() if name in known]
        elif isinstance(info, msgspec.inspect.DictType):
            values = decoding.decode(data, type=dict[Any, msgspec.Raw]).values()
            parts = [(info.value_type, value) for value in islice(values, _SAMPLE_COUNT)]
        elif isinstance(item := getattr(info, "item_type", None), msgspec.inspect.Type):
            parts = [(item, value) for value in decoding.decode(data, type=list[msgspec.Raw])[:_SAMPLE_COUNT]]
        elif isinstance(info, msgspec.inspect.UnionType):
            arms = [one for one in info.types if any(isinstance(part, _WithNames) for part in _types_in(one))]
            parts = [(arms[0], data)] if len(arms) == 1 else []  # of several each value would have to be told apart
        else:
            return ""
    except decoding.DecodeError:
        return ""  # a value in another form, or None
    return next(filter(None, (_lost_field(*part) for part in parts)), "")


def unsupported_type(annotation: Any) -> str | None:
    """Return what in ``annotation`` can't be encoded and decoded, as text; None if nothing."""
    for model in filter(_is_model, typing.get_args(annotation)):
        if problem := _custom_problem(model):
            return problem
    try:
        for info in types_of(annotation):
            if isinstance(info, msgspec.inspect.CustomType) and (problem := _custom_problem(info.cls)):
                return problem
    except (TypeError, ValueError, NotImplementedError) as error:  # the last two: for integers beyond 64 bits
        return str(error).splitlines()[0].partition(". If you need")[0]
    return None


def _custom_problem(cls: Any) -> str | None:
    codec = find_codec(typing.get_origin(cls) or cls)
    return (
        f"{getattr(cls, '__qualname__', cls)} is no type that can be encoded" if codec is None else codec.problem(cls)
    )


def _parts(info: msgspec.inspect.Type) -> Iterable[msgspec.inspect.Type]:
    for name in ("types", "item_types"):
        yield from getattr(info, name, ())
    for name in ("item_type", "key_type", "value_type"):
        if isinstance(part := getattr(info, name, None), msgspec.inspect.Type):
            yield part
    for field in getattr(info, "fields", ()):
        yield field.type
    if isinstance(info, msgspec.inspect.CustomType) and (form := info_of_form(info.cls)) is not None:
        yield form


class _Translator(msgspec.inspect._Translator):
    """Translator of ``msgspec.inspect`` that also keeps the parameters in brackets of custom types."""

    def translate(self, annotation: Any) -> Any:
        info = super().translate(annotation)  # type: ignore[no-untyped-call]
        is_custom = isinstance(info, msgspec.inspect.CustomType) and info.cls is typing.get_origin(annotation)
        return msgspec.inspect.CustomType(annotation) if is_custom else info


def type_info(annotation: Any) -> msgspec.inspect.Type:
    """Return ``msgspec.inspect.type_info``, with the whole annotation as ``cls`` of a custom type."""
    found: msgspec.inspect.Type
    (found,) = _Translator((annotation,)).run()  # type: ignore[no-untyped-call]
    return found


@functools.cache  # always the same object, so that a type can refer to itself
def info_of_form(annotation: Any) -> msgspec.inspect.Type | None:
    """Return the type of the plain value of a custom type; None if its codec does not say."""
    codec = find_codec(typing.get_origin(annotation) or annotation)
    return None if codec is None or codec.form is None else type_info(codec.form(annotation))


# Module paths older than the one import root `immortal`: checkpoints, registrations and projects still name them.


_FORMER_ROOT = "appsdk"
_MOVED = {
    "appsdk.effects.options": "immortal.appsdk.effects.effect",
    "appsdk.patterns.clone.errors": "immortal.appsdk.patterns.clone.model",
    "appsdk.patterns.clone.records": "immortal.appsdk.patterns.clone.model",
    "appsdk.patterns.harmony.dispatch": "immortal.appsdk.patterns.harmony.cluster",
    "appsdk.patterns.harmony.errors": "immortal.appsdk.patterns.harmony.batch",
    "appsdk.patterns.harmony.runs": "immortal.appsdk.patterns.harmony.batch",
    "appsdk.patterns.pirate.errors": "immortal.appsdk.patterns.pirate.frames",
    "appsdk.patterns.queue.errors": "immortal.appsdk.patterns.queue.model",
    "appsdk.waits": "immortal.appsdk.waiting.loop",
    "appsdk.waiting.waits": "immortal.appsdk.waiting.loop",
    "immortal.appsdk.patterns.harmony.dispatch": "immortal.appsdk.patterns.harmony.cluster",
    "immortal.appsdk.patterns.harmony.runs": "immortal.appsdk.patterns.harmony.batch",
    "immortal.appsdk.waiting.waits": "immortal.appsdk.waiting.loop",
}


def current_module(name: str) -> str:
    """Return the current path of the module ``name``: ``appsdk.patterns.queue`` is ``immortal.appsdk.patterns.queue``.

    Return any other name unchanged, also one in a package `appsdk` of the user's own.
    """
    if name in _MOVED:
        return _MOVED[name]
    if name.partition(".")[0] != _FORMER_ROOT:
        return name
    path = f"immortal.{name}"
    try:
        return path if find_spec(path) is not None else name
    except ModuleNotFoundError:  # a package above it
        return name
