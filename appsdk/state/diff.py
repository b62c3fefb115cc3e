"""What differs between two trees of :mod:`immortal.appsdk.state.tree`, part by part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from msgspec import Struct

from immortal.appsdk.state.tree import Fields, Members, Tree, canonical, to_json


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = _Absent()


class Difference(Struct, frozen=True):
    """One part that is not the same. ``path`` is as in Python: ``items[0].name``, ``counts['the']``, ``tags{'a'}``.

    ``old`` or ``new`` is ABSENT where there is none.
    """

    path: str
    old: Tree | _Absent
    new: Tree | _Absent

    def to_json(self) -> dict[str, Any]:
        sides = (("old", self.old), ("new", self.new))
        return {"path": self.path, **{name: to_json(part) for name, part in sides if part is not ABSENT}}


def differences(old: Tree, new: Tree, path: str = "") -> Iterator[Difference]:
    """In the order of the old tree. Values of two types differ (1 and 1.0), NaN is the same as NaN.

    In lists what is alike in front and at the end is left out; the rest is compared item by item.
    """
    if type(old) is not type(new):
        yield Difference(path, old, new)
    elif isinstance(old, Members):
        yield from _of_members(old, new, path)
    elif isinstance(old, list):
        yield from _of_lists(old, new, path)
    elif isinstance(old, dict):
        before, after = ({_step(holder, key, path): part for key, part in holder.items()} for holder in (old, new))
        for step in {**before, **after}:
            yield from _of_parts(before.get(step, ABSENT), after.get(step, ABSENT), path + step)
    elif old != new if not isinstance(old, float) else repr(old) != repr(new):
        yield Difference(path, old, new)


def _step(holder: dict[Any, Tree], key: Any, path: str) -> str:
    """The text tells keys apart that a dict takes for the same, such as 1 and True."""
    if isinstance(holder, Fields):
        return f".{key}" if path else f"{key}"
    return f"[{key!r}]"


def _of_parts(old: Tree, new: Tree, path: str) -> Iterator[Difference]:
    if old is ABSENT or new is ABSENT:
        yield Difference(path, old, new)
    else:
        yield from differences(old, new, path)


def _of_members(old: Members, new: Members, path: str) -> Iterator[Difference]:
    before, after = ({canonical(member): member for member in members} for members in (old, new))
    for text in sorted({*before, *after}):
        if (text in before) != (text in after):
            part = before[text] if text in before else after[text]
            name = text if isinstance(part, list | dict) else repr(part)
            yield Difference(f"{path}{{{name}}}", before.get(text, ABSENT), after.get(text, ABSENT))


def _of_lists(old: list[Tree], new: list[Tree], path: str) -> Iterator[Difference]:
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
        yield from _of_parts(before, after, f"{path}[{front + offset}]")


def _same(old: Tree, new: Tree) -> bool:
    return next(differences(old, new), None) is None
