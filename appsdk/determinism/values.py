"""Values of expressions, as far as names, classes and annotations show them without running the code."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import random
import types
import typing
from types import FunctionType, ModuleType
from typing import Annotated, Any, ClassVar, Final, Union

from msgspec import Struct
from msgspec.structs import replace

from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.handlers.definition import Peer

_MISSING = object()
_SETS = (collections.abc.Set, collections.abc.MutableSet)


class Known(Struct, frozen=True):
    """Value that is known: the object ``value`` itself."""

    value: Any


class Instance(Struct, frozen=True):
    """Unknown value of a known type, ``hint``. ``of_state``: it is part of the app's attributes.

    ``waits``: it is the ``self`` of an async handler, whose attributes are awaitable calls.
    """

    hint: Any
    of_state: bool = False
    waits: bool = False


class Bound(Struct, frozen=True):
    """Function bound to its first argument."""

    function: Any  # a FunctionType; mypy takes that for a method in a field
    receiver: Known | Instance


class PeerOf(Struct, frozen=True):
    """Peer of the app. ``waits``: an async handler uses it."""

    waits: bool


class Super(Struct, frozen=True):
    """Value of ``super()`` in a method of the class ``after``."""

    receiver: Instance
    after: type


Value = Known | Instance | Bound | PeerOf | Super | None


def shape(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a hint's class and its parameters, without Annotated, Final, aliases and ``| None``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Annotated, Final, ClassVar):
        return shape(arguments[0])
    if origin in (Union, types.UnionType):
        parts = [part for part in arguments if part is not type(None)]
        return shape(parts[0]) if len(parts) == 1 else (object, ())
    for inner in ("__value__", "__supertype__"):  # type X = ..., NewType
        if not isinstance(hint, type) and hasattr(hint, inner):
            return shape(getattr(hint, inner))
    return (hint, ()) if origin is None else (origin, arguments)


def is_object(value: Value, *objects: object) -> bool:
    """Return True if ``value`` is one of these objects, by identity (a user's __eq__ does not matter)."""
    return isinstance(value, Known) and any(value.value is one for one in objects)


def is_state_set(value: Value) -> bool:
    if not isinstance(value, Instance) or not value.of_state:
        return False
    origin, _ = shape(value.hint)
    return origin in _SETS or (isinstance(origin, type) and issubclass(origin, set | frozenset))


@functools.lru_cache(maxsize=256)
def hints_of(subject: Any) -> dict[str, Any]:
    """Return the annotations of a class or function; none if they can't be evaluated."""
    try:
        return typing.get_type_hints(subject, include_extras=True)
    except Exception:  # whatever evaluating an annotation raises
        return {}


def state_names(cls: Any) -> frozenset[str]:
    """Return the names of an app's attributes, both saved and Transient ones."""
    try:
        state = vars(cls)["_immortal_definition"].state()
    except Exception:  # no app, or annotations that can't be evaluated
        return frozenset()
    return frozenset({*state.fields, *state.transient})


def attribute(value: Value, name: str) -> Value:
    """Return the value of ``value.name``."""
    if isinstance(value, Known):
        return _attribute_of_object(value, name)
    if isinstance(value, Instance):
        cls, _ = shape(value.hint)
        return _attribute_of_instance(value, cls, name, inspect.getattr_static(cls, name, _MISSING))
    if isinstance(value, Super):
        classes = shape(value.receiver.hint)[0].__mro__
        for cls in classes[classes.index(value.after) + 1 :] if value.after in classes else ():
            if name in vars(cls):
                return _attribute_of_instance(value.receiver, cls, name, vars(cls)[name])
    return None


def _attribute_of_object(value: Known, name: str) -> Value:
    subject = value.value
    if isinstance(subject, ModuleType | random.Random):
        try:
            return Known(getattr(subject, name))
        except Exception:  # a module's own __getattr__ can raise anything
            return None
    static = inspect.getattr_static(subject, name, _MISSING)
    if isinstance(subject, type):
        if isinstance(static, classmethod) and isinstance(static.__func__, FunctionType):
            return Bound(static.__func__, value)
        if isinstance(static, types.ClassMethodDescriptorType | types.BuiltinFunctionType):
            return Known(getattr(subject, name))
        if isinstance(static, Handler):
            return Known(static.function)
    elif isinstance(static, FunctionType):
        return Known(static) if name in getattr(subject, "__dict__", ()) else Bound(static, value)
    elif isinstance(static, classmethod) and isinstance(static.__func__, FunctionType):
        return Bound(static.__func__, Known(type(subject)))
    if isinstance(static, staticmethod):
        return Known(static.__func__)
    return None if static is _MISSING or isinstance(static, property) else Known(static)


def _attribute_of_instance(value: Instance, cls: Any, name: str, static: Any) -> Value:
    if isinstance(static, Handler):  # the self of a 'def' handler is the app itself, wherever it is called
        static, value = static.function, replace(value, waits=value.waits and static.is_async)
    elif isinstance(static, Peer):
        return PeerOf(value.waits)
    elif isinstance(static, property):
        static = static.fget
    elif isinstance(static, functools.cached_property):
        static = static.func
    elif isinstance(static, staticmethod):
        return Known(static.__func__)
    elif isinstance(static, classmethod) and isinstance(static.__func__, FunctionType):
        return Bound(static.__func__, Known(cls))
    if isinstance(static, FunctionType):
        return Bound(static, value)
    if isinstance(cls, type) and name in (hints := hints_of(cls)):
        return Instance(hints[name], value.of_state)
    return None


def element(value: Value) -> Value:
    """Return the value of an item in an iteration over ``value``: of a list an element, of a dict a key."""
    return _parameter(value, 0)


def item(value: Value) -> Value:
    """Return the value of ``value[...]``."""
    is_mapping = isinstance(value, Instance) and _is_mapping(value)
    return _parameter(value, 1 if is_mapping else 0)


def values_of(value: Instance) -> Instance | None:
    """Return the value of ``value.values()``."""
    found = _parameter(value, 1) if _is_mapping(value) else None
    return None if found is None else Instance(list[found.hint], found.of_state)  # type: ignore[name-defined]


def _is_mapping(value: Instance) -> bool:
    origin, _ = shape(value.hint)
    return isinstance(origin, type) and issubclass(origin, collections.abc.Mapping)


def _parameter(value: Value, index: int) -> Instance | None:
    if not isinstance(value, Instance):
        return None
    origin, parameters = shape(value.hint)
    if not isinstance(origin, type) or not issubclass(origin, collections.abc.Iterable) or len(parameters) <= index:
        return None
    return Instance(parameters[index], value.of_state)


def result(value: Value) -> Value:
    """Return the value of a call of ``value``, by its class or its annotation."""
    if isinstance(value, Known) and isinstance(value.value, type):
        return Instance(value.value)
    function = value.function if isinstance(value, Bound) else value.value if isinstance(value, Known) else None
    if isinstance(function, FunctionType) and (hint := hints_of(function).get("return")) is not None:
        return Instance(hint)
    return None
