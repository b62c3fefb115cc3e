"""Trees of plain values that represent a state; differences of two trees; and rows of tables from trees.

Attributes of objects are :class:`Fields`, other mappings plain dicts, sequences lists, sets :class:`Members`. Objects
without such a form (the serializer "pickle" allows any) are taken apart as pickle would.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Struct

from immortal.appsdk.state.journal import TIMER, Pending, SavedTask, SavedTasks, describe_wait
from immortal.appsdk.types.registry import find_codec, show_custom
from immortal.protocol.redaction import REDACTED, Redacted

Tree = Any
"""Tree: None, bool, int, float, str, bytes, list, dict, Fields or Members; containers hold trees."""

_AS_TEXT = datetime | date | time | timedelta | Decimal | UUID
_DIGITS_BITS_MAX = 14_000  # 4,215 digits: Python writes 4,300
_SCALARS = (bool, int, float, str, bytes)


class Fields(dict[str, Tree]):
    """Attributes of an object, by name. Names that start with "$" are no attributes."""


class Members(list[Tree]):
    """Members of a set, in an order that depends only on them."""


def tree(value: Any) -> Tree:
    """Convert ``value`` to a tree. Raises RecursionError if it is nested too deeply."""
    return _Builder().build(value)


class _Builder:
    def __init__(self) -> None:
        self._above: list[int] = []  # identities of the containers of the value that is being built

    def build(self, value: Any) -> Tree:
        if value is None or type(value) in _SCALARS:
            return value
        if isinstance(value, Enum):
            return self.build(value.value)
        if isinstance(value, _AS_TEXT):
            return msgspec.to_builtins(value, enc_hook=str)  # pandas has a class below datetime
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        for scalar in (int, float, str):
            if isinstance(value, scalar):
                return scalar(value)
        if id(value) in self._above:
            return Fields({"$cycle": len(self._above) - self._above.index(id(value))})
        self._above.append(id(value))
        try:
            return self._container(value)
        finally:
            self._above.pop()

    def _container(self, value: Any) -> Tree:
        if isinstance(value, AbstractSet):
            return Members(sorted(map(self.build, value), key=canonical))
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._fields(value, value._fields)
        if isinstance(value, list | tuple | deque):
            return [self.build(item) for item in value]
        if isinstance(value, msgspec.Struct):
            tag = value.__struct_config__.tag
            front = {} if tag is None else {value.__struct_config__.tag_field or "type": tag}
            return Fields({**front, **self._fields(value, value.__struct_fields__)})
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._fields(value, [field.name for field in dataclasses.fields(value)])
        if (attributes := getattr(type(value), "__attrs_attrs__", None)) is not None:
            return self._fields(value, [attribute.name for attribute in attributes])
        if not isinstance(value, BaseException) and find_codec(type(value)) is not None:
            return self._by_codec(value)
        return self._reduced(value)

    def _by_codec(self, value: Any) -> Tree:
        try:
            shown = show_custom(value)
        except (TypeError, ValueError):  # a value that can't be saved can still be shown
            return self._reduced(value)
        if isinstance(shown, dict) and all(isinstance(name, str) for name in shown):
            return Fields({name: self.build(item) for name, item in shown.items()})
        return self.build(shown)

    def _fields(self, value: Any, names: Iterable[str]) -> Fields:
        return Fields({name: self.build(getattr(value, name)) for name in names if hasattr(value, name)})

    def _mapping(self, value: Mapping[Any, Any]) -> dict[Any, Tree]:
        made: dict[Any, Tree] = {}
        for key, item in value.items():
            key_tree = self._key(key)
            if key_tree in made:  # two keys that look alike, such as a UUID and its text
                key_tree = (type(key).__qualname__, key_tree)
            made[key_tree] = self.build(item)
        return made

    def _key(self, key: Any) -> Any:
        found = self.build(key)
        if isinstance(found, list) and not isinstance(found, Members):
            return tuple(map(self._key, found))
        return canonical(found) if isinstance(found, list | dict) else found

    def _reduced(self, value: Any) -> Fields:
        if isinstance(value, type | FunctionType | BuiltinFunctionType):
            return Fields({"$global": f"{value.__module__}.{value.__qualname__}"})
        made = Fields({"$type": f"{type(value).__module__}.{type(value).__qualname__}"})
        try:
            parts: Any = value.__reduce_ex__(4)
        except Exception as error:  # any error of a user's method; a lock, a socket
            return Fields({**made, "$opaque": str(error)})
        if isinstance(parts, str):
            return Fields({"$global": parts})
        arguments, state, items, entries = [*parts[1:5], None, None, None][:4]
        if arguments := [argument for argument in arguments if argument is not type(value)]:
            made["$arguments"] = self.build(arguments)
        for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):  # (__dict__, __slots__)
            if isinstance(part, dict):
                made.update({str(name): self.build(item) for name, item in part.items()})
            elif part is not None:
                made["$state"] = self.build(state)
        if items is not None:
            made["$items"] = self.build(list(items))
        if entries is not None:
            made["$entries"] = self.build(dict(entries))
        return made


def to_json(part: Tree, *, reveals: bool = False) -> Any:
    """Convert a tree to JSON values. A value that JSON lacks becomes an object with one name that starts with "$".

    bytes {"$bytes": hex}, sets {"$set": [...]}, NaN and infinities {"$float": "nan"}, integers of more digits than
    Python writes {"$int": "0x..."}. Keys that are no strings are written as text; if two would look alike, or like one
    of these objects, the mapping is {"$map": [[key, value], ...]}. ``reveals``: also what is hidden from people.
    """
    if isinstance(part, Redacted):
        return to_json(part.value, reveals=True) if reveals else REDACTED
    if isinstance(part, bytes):
        return {"$bytes": part.hex()}
    if isinstance(part, float) and not math.isfinite(part):
        return {"$float": repr(part)}
    if type(part) is int and part.bit_length() > _DIGITS_BITS_MAX:
        return {"$int": hex(part)}
    plain = partial(to_json, reveals=reveals)
    if isinstance(part, Members):
        return {"$set": list(map(plain, part))}
    if isinstance(part, list | tuple):
        return list(map(plain, part))
    if isinstance(part, Fields):
        return {name: plain(item) for name, item in part.items()}
    if isinstance(part, dict):
        made = {key if isinstance(key, str) else json.dumps(plain(key)): plain(item) for key, item in part.items()}
        if len(made) < len(part) or any(name.startswith("$") for name in made):
            return {"$map": [[plain(key), plain(part[key])] for key in sorted(part, key=canonical)]}
        return made
    return part


def canonical(part: Tree) -> str:
    """Return a text that equal trees share."""
    return json.dumps(to_json(part, reveals=True), sort_keys=True)


# Differences between two trees, part by part.


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = _Absent()


class Difference(Struct, frozen=True):
    """Part that differs in two trees. ``path``: in Python's form: ``items[0].name``, ``counts['the']``, ``tags{'a'}``.

    ``old`` or ``new`` is ABSENT if that tree has no such part.
    """

    path: str
    old: Tree | _Absent
    new: Tree | _Absent

    def to_json(self) -> dict[str, Any]:
        sides = (("old", self.old), ("new", self.new))
        return {"path": self.path, **{name: to_json(part) for name, part in sides if part is not ABSENT}}


def differences(old: Tree, new: Tree, path: str = "") -> Iterator[Difference]:
    """Yield the differences in the order of the old tree. Values of two types differ (1 and 1.0), NaN equals NaN.

    In lists, equal items at the beginning and at the end are skipped; the others are compared item by item.
    """
    if type(old) is not type(new):
        yield Difference(path, old, new)
    elif isinstance(old, Members):
        yield from _member_differences(old, new, path)
    elif isinstance(old, list):
        yield from _list_differences(old, new, path)
    elif isinstance(old, dict):
        before, after = ({_step(holder, key, path): part for key, part in holder.items()} for holder in (old, new))
        for step in {**before, **after}:
            yield from _part_differences(before.get(step, ABSENT), after.get(step, ABSENT), path + step)
    elif old != new if not isinstance(old, float) else repr(old) != repr(new):
        yield Difference(path, old, new)


def _step(holder: dict[Any, Tree], key: Any, path: str) -> str:
    """Return the path of ``holder[key]``; the text of the key distinguishes equal keys such as 1 and True."""
    if isinstance(holder, Fields):
        return f".{key}" if path else f"{key}"
    return f"[{key!r}]"


def _part_differences(old: Tree, new: Tree, path: str) -> Iterator[Difference]:
    if old is ABSENT or new is ABSENT:
        yield Difference(path, old, new)
    else:
        yield from differences(old, new, path)


def _member_differences(old: Members, new: Members, path: str) -> Iterator[Difference]:
    before, after = ({canonical(member): member for member in members} for members in (old, new))
    for text in sorted({*before, *after}):
        if (text in before) != (text in after):
            part = before[text] if text in before else after[text]
            name = json.dumps(to_json(part), sort_keys=True) if isinstance(part, list | dict) else repr(part)
            yield Difference(f"{path}{{{name}}}", before.get(text, ABSENT), after.get(text, ABSENT))


def _list_differences(old: list[Tree], new: list[Tree], path: str) -> Iterator[Difference]:
    shorter = min(len(old), len(new))
    front = 0
    while front < shorter and _same(old[front], new[front]):
        front += 1
    end = 0
    while end < shorter - front and _same(old[-1 - end], new[-1 - end]):
        end += 1
    befores, afters = old[front : len(old) - end], new[front : len(new) - end]
    for offset in range(max(len(befores), len(afters))):
        before = befores[offset] if offset < len(befores) else ABSENT
        after = afters[offset] if offset < len(afters) else ABSENT
        yield from _part_differences(before, after, f"{path}[{front + offset}]")


def _same(old: Tree, new: Tree) -> bool:
    return next(differences(old, new), None) is None


# A state as rows of tables, for queries. The trees of :mod:`immortal.appsdk.state.tree` distinguish structs from
# mappings.
#
#     state          one row: each attribute that is no container, under its own name
#     ATTRIBUTE      of a mapping a row for each key ("key"), of a sequence for each item ("index"), of a set for each
#                    member; a struct gives its fields, all else is "value"
#     $waiting       waits of async handlers: a row for each, and for each call that waits for its turn
#     $timers        when each sleep ends, and each schedule is due next
#     $effects       effects that have no result yet
#
# Within a cell lists, mappings and structs stay as they are.


STATE = "state"
WAITING = "$waiting"
TIMERS = "$timers"
EFFECTS = "$effects"
_KINDS = ("call", "effect", "event")

Row = dict[str, Tree]


def state_rows(state: Fields) -> Iterator[tuple[str, Row | str]]:
    """Yield (table, row) of the attributes; the rows of the SDK's own data are in :func:`task_rows`.

    Each container first yields the name of its first column, since it can have no rows.
    """
    single: Row = {}
    for name, value in state.items():
        if name.startswith("$") and name not in ("$opaque", "check"):
            continue
        if isinstance(value, Fields) or not isinstance(value, dict | list):
            single[name] = value
            continue
        keyed = value.items() if isinstance(value, dict) else enumerate(value)
        front = "key" if isinstance(value, dict) else "index"
        yield name, front
        for key, item in keyed:
            yield name, _row(front, key, item)
    yield STATE, single


def _row(front: str, key: Tree, item: Tree) -> Row:
    if not isinstance(item, Fields):
        return {front: key, "value": item}
    return {front: key, **{f"{name}_" if name == front else name: value for name, value in item.items()}}


def task_rows(
    saved: SavedTasks, name_of: Callable[[int], str], decoded: Callable[[bytes], Any]
) -> Iterator[tuple[str, Row]]:
    """Yield rows of waits. ``name_of``: a handler's name by method ID. ``decoded``: decodes arguments."""
    for task in saved.tasks:
        front: Row = {"id": task.number, "handler": name_of(task.method_id)}
        for pending in task.pending:
            yield WAITING, {**front, **_task_columns(task, decoded), **_wait_columns(pending)}
            if pending.what == TIMER:
                yield TIMERS, {**front, "kind": "sleep", "due_ns": pending.detail}
            elif pending.what.startswith("effect "):
                effect = pending.what.removeprefix("effect ")
                yield EFFECTS, {**front, "effect": effect, "number": pending.number, "step": pending.step}
    for call in saved.queued:
        front = {"id": call.number, "handler": name_of(call.method_id)}
        yield WAITING, {**front, **_task_columns(call, decoded), "kind": "turn", "waits_for": "its turn", "step": 0}
    for method_id, due_ns in saved.schedules.items():
        yield TIMERS, {"id": None, "handler": name_of(method_id), "kind": "schedule", "due_ns": due_ns}


def _task_columns(task: SavedTask, decoded: Callable[[bytes], Any]) -> Row:
    return {
        "arguments": decoded(task.arguments),
        "since_ns": task.started_ns,
        "caller": task.caller,
        "call_number": None if task.caller is None else task.call_number,
        "sequence_id": None if task.sequence_id < 0 else task.sequence_id,
        "index": None if task.sequence_id < 0 else task.message_index,
    }


def _wait_columns(pending: Pending) -> Row:
    first = pending.what.partition(" ")[0]
    kind = "timer" if pending.what == TIMER else first if first in _KINDS else "other"
    return {"kind": kind, "waits_for": describe_wait(pending), "step": pending.step}
