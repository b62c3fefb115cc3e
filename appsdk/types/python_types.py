"""Codecs of Python's types that msgspec does not know: deques, special dicts, numbers, zones, patterns, addresses.

A value annotated with its type is encoded as its parts, a value annotated ``Any`` as an extension value, by one table:
:data:`immortal.protocol.extension_values.KINDS`.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from immortal.appsdk.types import exceptions
from immortal.appsdk.types.registry import Codec
from immortal.protocol.extension_values import kind_of

T = TypeVar("T")


class _Bounded(msgspec.Struct, Generic[T]):
    """Encoded form of a deque with a maximum length. A deque without one is encoded as a list."""

    items: list[T]
    maxlen: int


def codec_of(cls: type) -> Codec | None:
    if (found := _CONTAINERS.get(cls)) is not None:
        return found
    if (kind := kind_of(cls)) is not None:
        return Codec(
            kind.parts,
            lambda annotation, contents: kind.build(cls, contents),
            show=kind.parts if cls is re.Pattern else str,
            form=lambda annotation: kind.form,
        )
    return exceptions.codec_of(cls) if issubclass(cls, BaseException) else None


def _parameters(annotation: Any, count: int) -> tuple[Any, ...]:
    """Return the ``count`` types in an annotation's brackets; Any for each if there are no brackets."""
    return typing.get_args(annotation) or (Any,) * count


# --- deques and dicts -------------------------------------------------------------------------------------------------


def _deque_form(annotation: Any) -> Any:
    (item,) = _parameters(annotation, 1)
    return list[item] | _Bounded[item]  # type: ignore[valid-type]


def _read_deque(annotation: Any, plain: Any) -> deque[Any]:
    return deque(plain.items, plain.maxlen) if isinstance(plain, _Bounded) else deque(plain)


def _dict_form(annotation: Any) -> Any:
    key, value = _parameters(annotation, 2)
    return dict[key, value]  # type: ignore[valid-type]


def _counter_form(annotation: Any) -> Any:
    (key,) = _parameters(annotation, 1)
    return dict[key, int]  # type: ignore[valid-type]


def _factory(annotation: Any) -> Callable[[], Any] | None:
    """Return the factory of a defaultdict: the class of its values, of a union the first; None: no such class."""
    value = _parameters(annotation, 2)[1]
    while typing.get_origin(value) in (Annotated, typing.Union, types.UnionType):
        value = typing.get_args(value)[0]
    cls = typing.get_origin(value) or value
    if cls is defaultdict:
        inner = _factory(value)
        return None if inner is None else partial(defaultdict, inner)
    return cls if isinstance(cls, type) and cls is not Any and not inspect.isabstract(cls) else None


def _factory_problem(annotation: Any) -> str | None:
    if _factory(annotation) is not None:
        return None
    return (
        f"{annotation}: the class of its values makes its defaults, so annotate one, as in defaultdict[str, int] or "
        f"defaultdict[str, list[int]]"
    )


def _unfit_factory(annotation: Any, value: Any) -> str | None:
    """Return why a defaultdict would change (a recovery takes the factory from the annotation); None: it would not."""
    wanted, given = _factory(annotation), getattr(value, "default_factory", None)
    if wanted is given or (_parts_of(wanted) == _parts_of(given)):
        return None
    shown = "functools.partial(defaultdict, ...)" if isinstance(wanted, partial) else getattr(wanted, "__name__", "")
    named = getattr(given, "__qualname__", repr(given))
    return f"its default_factory is {named}, and would come back as {shown}, which the annotation says"


def _parts_of(factory: Any) -> Any:
    is_partial = isinstance(factory, partial) and not factory.keywords
    return (factory.func, *map(_parts_of, factory.args)) if is_partial else factory


_CONTAINERS: dict[type, Codec] = {
    deque: Codec(
        lambda value: list(value) if value.maxlen is None else _Bounded(list(value), value.maxlen),
        _read_deque,
        form=_deque_form,
    ),
    OrderedDict: Codec(dict, lambda annotation, plain: OrderedDict(plain), form=_dict_form),
    Counter: Codec(dict, lambda annotation, plain: Counter(plain), form=_counter_form),
    defaultdict: Codec(
        dict,
        lambda annotation, plain: defaultdict(_factory(annotation), plain),
        form=_dict_form,
        problem=_factory_problem,
        unfit=_unfit_factory,
    ),
}
