"""Codec of exceptions: it calls no ``__init__``, and finds only Python's own classes by name.

An exception has its arguments, its ``__dict__``, and what its class keeps elsewhere: ``__slots__``, and the fields of
Python's own exceptions, such as ``OSError.errno``. It is restored without a traceback; its cause is kept only if that
is one of Python's own exceptions.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Mapping
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

from immortal.appsdk.types.registry import Codec

CAUSE = "__cause__"
CAUSES_MAX = 8
_ARGUMENTS: Any = vars(BaseException)["args"]
_NOT_FIELDS = {"__class__", "__dict__", "__weakref__", *vars(BaseException)}
_PLAIN = (bool, int, float, str, bytes)


def attributes_of(error: BaseException, causes_max: int = CAUSES_MAX) -> dict[str, Any]:
    """Return an exception's attributes by name, without its arguments, and its cause only if that is builtin."""
    found = {**vars(error)}
    for name, (field, is_own) in _fields(type(error)).items():
        with contextlib.suppress(AttributeError):  # a slot that has no value
            value = field.__get__(error)
            # AttributeError.obj is only for Python's hints: mostly it is the instance.
            if is_own or (value is not None and (name != "obj" or isinstance(value, _PLAIN))):
                found[name] = value
    cause = error.__cause__
    if cause is not None and causes_max and _builtin(type(cause).__name__) is type(cause):
        found[CAUSE] = (type(cause).__name__, cause.args, attributes_of(cause, causes_max - 1))
    return found


def made(cls: type[Exception], arguments: list[Any], attributes: Mapping[str, Any]) -> Exception:
    """Create an exception without ``__init__``, since its arguments often do not fit it."""
    try:
        error = cls.__new__(cls)
    except TypeError:  # its __new__ needs arguments
        error = _base(cls).__new__(cls)
    if issubclass(cls, SyntaxError) and "lineno" in attributes:  # its place is a tuple, which is decoded as a list
        arguments = [tuple(one) if isinstance(one, list) else one for one in arguments]
    _ARGUMENTS.__set__(error, tuple(arguments))
    fields = _fields(cls)
    for name, value in attributes.items():
        if name == CAUSE:
            error.__cause__ = _cause(value)
        elif name in fields:
            with contextlib.suppress(AttributeError, TypeError):  # a read-only one
                fields[name][0].__set__(error, value)
        else:
            vars(error)[name] = value
    return error


def _cause(value: Any) -> Exception | None:
    with contextlib.suppress(TypeError, ValueError):
        name, arguments, attributes = value
        if (cls := _builtin(name)) is not None:
            return made(cls, arguments, attributes)
    return None


def _builtin(name: str) -> type[Exception] | None:
    found = getattr(builtins, name, None)
    is_one = isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, BaseExceptionGroup)
    return found if is_one else None


def _base(cls: type[Exception]) -> Any:
    return next(one for one in cls.__mro__ if one.__module__ == "builtins")


def _fields(cls: type) -> dict[str, tuple[Any, bool]]:
    """Return fields by name, each with True if a class other than Python's own defines it."""
    return {
        name: (field, one.__module__ != "builtins")
        for one in reversed(cls.__mro__)
        for name, field in vars(one).items()
        if isinstance(field, MemberDescriptorType | GetSetDescriptorType) and name not in _NOT_FIELDS
    }


# --- as values --------------------------------------------------------------------------------------------------------


def codec_of(cls: type) -> Codec | None:
    is_one = issubclass(cls, Exception) and not issubclass(cls, BaseExceptionGroup)
    return _EXCEPTION if is_one else None


def _encode(error: Exception) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Encode an exception. A name of a class that is not Python's is only for people: the annotation says the class."""
    cls = type(error)
    name = cls.__name__ if _builtin(cls.__name__) is cls else f"{cls.__module__}.{cls.__qualname__}"
    return name, error.args, attributes_of(error)


def _decode(cls: Any, plain: tuple[str, tuple[Any, ...], dict[str, Any]]) -> Exception:
    name, arguments, attributes = plain
    is_own = _builtin(cls.__name__) is cls  # Python's
    found = _builtin(name) if is_own else cls
    if found is None or not issubclass(found, cls) or (not is_own and _builtin(name) is not None):
        raise ValueError(f"Expected `{cls.__qualname__}`, got the exception `{name}`: name its class in the annotation")
    return made(found, list(arguments), attributes)


def _show(error: Exception) -> dict[str, Any]:
    cls = type(error)  # as in the tree of a pickled state
    arguments = {"$arguments": list(error.args)} if error.args else {}
    return {"$type": f"{cls.__module__}.{cls.__qualname__}", **arguments, **attributes_of(error)}


_EXCEPTION = Codec(_encode, _decode, show=_show, form=lambda annotation: tuple[str, tuple[Any, ...], dict[str, Any]])
