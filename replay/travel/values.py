"""Paths to values within a state (``balances[3]``, ``orders['a-1'].price``), states for a page, and expressions."""

from __future__ import annotations

import ast
import json
import re
from types import CodeType
from typing import Any, Final

from immortal.appsdk.state.tree import Fields, Members, Tree, canonical, to_json, tree
from immortal.coordinator.log.record_contents import shown_arguments
from immortal.protocol.messages import IncomingRpc
from immortal.replay.plan import ReplayError

MISSING: Final = object()
Step = tuple[str, Any]
"""Step of a path: (".", a name), or ("[", a key or an index)."""

_PLAIN = (int, str, bool, bytes)  # frequent types, compared at every message
_NAME = re.compile(r"[^.\[\]{}]+")


def steps_of(path: str) -> list[Step]:
    """Parse a path into its steps. Raises ReplayError if the text is no path."""
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
    """Parse the literal that begins at ``start``; return it, and the offset after its "]"."""
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
    """Return the path of the part ``key`` of ``holder``, whose own path is ``path``."""
    if isinstance(holder, Fields):
        return f"{path}.{key}" if path else str(key)
    return f"{path}[{key!r}]"


def part_of(whole: Tree, steps: list[Step]) -> Tree:
    """Return the part of a tree at ``steps``; MISSING if there is none."""
    for kind, key in steps:
        if kind == "." and not isinstance(whole, Fields):
            return MISSING
        try:
            whole = whole[key]
        except (KeyError, IndexError, TypeError):
            return MISSING
    return whole


def value_at(instance: object, steps: list[Step]) -> Tree:
    """Return a part of a live instance as a tree, without building the rest; MISSING if there is none.

    Paths within values without attributes or items of their own (such as ``$waiting``) need :func:`part_of`.
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
    """Find an item by its key's form in a tree: an Enum as its value, a date as text."""
    if isinstance(next(iter(holder), 0), str | int):
        return MISSING  # the frequent case, which this function meets at each message
    for key, value in holder.items():
        if not isinstance(key, str | int) and tree({key: 0}).get(wanted, MISSING) == 0:
            return value
    return MISSING


def same(first: Tree, second: Tree) -> bool:
    if first is second or first is MISSING or second is MISSING:
        return first is second
    if type(first) in _PLAIN and type(first) is type(second):
        return bool(first == second)
    return type(first) is type(second) and canonical(first) == canonical(second)


# A state for a page: only as much of it as a person reads, with the path of each part.


NODES_MAX = 1500
ITEMS_MAX = 100  # of one container
DEPTH_MAX = 8
TEXT_CHARACTERS_MAX = 300

Node = dict[str, Any]
"""Node of a shown tree: {"label", "path", "kind"}, with "text", or for a container "count", "items" and "more"."""

_KINDS: dict[type, str] = {Fields: "object", Members: "set", list: "list", dict: "dict"}


def text_of(value: Tree, characters: int = TEXT_CHARACTERS_MAX) -> str:
    """Return a value as JSON, clipped; "absent" if it is MISSING."""
    if value is MISSING:
        return "absent"
    if isinstance(value, str) and len(value) > characters:
        value = value[:characters] + "…"  # before quoting: it can have MiBs
    text = json.dumps(to_json(value), ensure_ascii=False)
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


WAITING = ("$waiting", "$queued")  # handlers, in a state


def call_text(task: Tree) -> str:
    """Return a waiting handler in the form of a call: ``ride(17)``."""
    arguments = ", ".join(text_of(one, 60) for one in task["arguments"])
    return f"{task['handler']}({arguments})"


def text_at(path: str, value: Tree) -> str:
    """Return the value at a path of a state like :func:`text_of`, but waiting handlers as calls."""
    if path in WAITING and isinstance(value, list):
        return f"[{', '.join(map(call_text, value))}]"[:TEXT_CHARACTERS_MAX]
    if path.partition("[")[0] in WAITING and isinstance(value, Fields) and "handler" in value:
        return call_text(value)
    return text_of(value)


def shown(whole: Tree, path: str = "") -> Node:
    """Return the tree at ``path``, cut to NODES_MAX nodes: those nearest to the root."""
    left = NODES_MAX
    root: Node = {"label": path or "state", "path": path}
    level: list[tuple[Node, Tree]] = [(root, whole)]
    for depth in range(DEPTH_MAX + 1):
        below: list[tuple[Node, Tree]] = []
        for node, value in level:
            kind = _KINDS.get(type(value))
            if kind is None:
                node.update(kind=type(value).__name__, text=text_of(value))
                continue
            node.update(kind=kind, count=len(value), items=[], more=0)
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            for number, (key, part) in enumerate(parts):
                if left <= 0 or number >= ITEMS_MAX or depth == DEPTH_MAX:
                    node["more"] = len(value) - number
                    break
                left -= 1
                inner = node["path"]
                label = str(key) if isinstance(value, Fields) else text_of(key, 60) if kind == "dict" else f"{key}"
                if inner in WAITING:
                    label = call_text(part)
                # A set has no order that a path could name: its members are shown without paths.
                child: Node = {"label": label, "path": "" if kind == "set" else step_text(value, key, inner)}
                node["items"].append(child)
                below.append((child, part))
        level = below
    return root


# Python expressions about a moment: ``self.balances[3] < 0 and method == "debit"``.
#
# They run in this process with its rights: a person who may give one may run any code.


def compiled(text: str) -> CodeType:
    """Compile a Python expression. Raises ReplayError if the text is no expression."""
    try:
        return compile(text.strip(), "<expression>", "eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ReplayError(f"{text[:100]!r} is no Python expression: {error}") from None


def evaluate(code: CodeType, instance: Any, method: str, rpc: IncomingRpc | None, sequence_id: int, index: int) -> Any:
    """Evaluate the expression after the message was handled. Raises the expression's errors."""
    args = [] if rpc is None else shown_arguments(rpc) or []
    names = {"self": instance, "method": method, "args": args, "record": sequence_id, "message": index}
    return eval(code, names)  # noqa: S307 (that is what it is for)
