"""Where a value is within a state: ``balances[3]``, ``orders['a-1'].price``, as :mod:`appsdk.state.diff` writes it."""

from __future__ import annotations

import ast
import re
from typing import Any, Final

from immortal.appsdk.state.tree import Fields, Tree, canonical, tree
from immortal.replay.errors import ReplayError

MISSING: Final = object()
Step = tuple[str, Any]
"""(".", a name), or ("[", a key or an index)."""

_PLAIN = (int, str, bool, bytes)  # the frequent ones, compared at every message
_NAME = re.compile(r"[^.\[\]{}]+")


def steps_of(path: str) -> list[Step]:
    """Raises ReplayError for a text that is no path."""
    found: list[Step] = []
    offset = 0
    while offset < len(path):
        if path[offset] == "[":
            key, offset = _key(path, offset + 1)
            found.append(("[", key))
            continue
        if path[offset] == "." and found:
            offset += 1
        elif found:
            raise _wrong(path)
        name = _NAME.match(path, offset)
        if name is None:
            raise _wrong(path)
        found.append((".", name[0]))
        offset = name.end()
    return found


def _key(path: str, start: int) -> tuple[Any, int]:
    """The literal that begins there, and where what is behind its "]" begins."""
    end = path.find("]", start)
    while end >= 0:
        try:
            return ast.literal_eval(path[start:end]), end + 1
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # a "]" inside of it
            end = path.find("]", end + 1)
    raise _wrong(path)


def _wrong(path: str) -> ReplayError:
    return ReplayError(f"{path[:100]!r} names no value: such as balances[3] or orders['a-1'].price was expected")


def step_text(holder: Tree, key: Any, path: str) -> str:
    """The path of a part of ``holder``, which is at ``path``."""
    if isinstance(holder, Fields):
        return f"{path}.{key}" if path else str(key)
    return f"{path}[{key!r}]"


def part_of(whole: Tree, steps: list[Step]) -> Tree:
    """Of a tree; MISSING where there is no such part."""
    for kind, key in steps:
        if kind == "." and not isinstance(whole, Fields):
            return MISSING
        try:
            whole = whole[key]
        except (KeyError, IndexError, TypeError):
            return MISSING
    return whole


def value_at(instance: object, steps: list[Step]) -> Tree:
    """Of a live instance, as a tree: only that part of it is looked at. MISSING where there is none.

    Paths within what has no attributes or items of its own (``$waiting`` and its like) need :func:`part_of`.
    """
    value: Any = instance
    for kind, key in steps:
        if kind == ".":
            value = value.get(key, MISSING) if isinstance(value, dict) else getattr(value, key, MISSING)
        elif isinstance(value, dict):
            value = value[key] if _has(value, key) else _by_look(value, key)
        else:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                return MISSING
        if value is MISSING:
            return MISSING
    return tree(value)


def _has(holder: dict[Any, Any], key: Any) -> bool:
    try:
        return key in holder
    except TypeError:
        return False


def _by_look(holder: dict[Any, Any], wanted: Any) -> Any:
    """By what its keys look like in a tree: an Enum is shown as its value, a date as its text."""
    if isinstance(next(iter(holder), 0), str | int):
        return MISSING  # as nearly always, and this is asked for each message
    for key, value in holder.items():
        if not isinstance(key, str | int) and tree({key: 0}).get(wanted, MISSING) == 0:
            return value
    return MISSING


def same(one: Tree, other: Tree) -> bool:
    if one is other or one is MISSING or other is MISSING:
        return one is other
    if type(one) in _PLAIN and type(one) is type(other):
        return bool(one == other)
    return type(one) is type(other) and canonical(one) == canonical(other)
