"""A state as rows of tables: for queries. The trees of :mod:`immortal.appsdk.state.tree` tell structs from mappings.

    state          one row: each attribute that is no container, under its own name
    ATTRIBUTE      of a mapping a row for each key ("key"), of a sequence for each item ("index"), of a set for each
                   member; a struct gives its fields, all else is "value"
    $waiting       what async handlers wait for: a row for each thing, and for each call that waits for its turn
    $timers        when what sleeps wakes, and each schedule is due next
    $effects       effects that have no result yet

Within a cell lists, mappings and structs stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from immortal.appsdk.state.journal import TIMER, Pending, SavedTask, SavedTasks, described
from immortal.appsdk.state.tree import Fields, Tree

STATE = "state"
WAITING = "$waiting"
TIMERS = "$timers"
EFFECTS = "$effects"
_KINDS = ("call", "effect", "event")

Row = dict[str, Tree]


def state_rows(state: Fields) -> Iterator[tuple[str, Row | str]]:
    """(table, row) of the attributes; those of what the SDK keeps itself are in :func:`task_rows`.

    Each container has the name of its first column in front of its rows, as it may have none.
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
    """``name_of``: a handler's, by its method ID. ``decoded``: what arguments are."""
    for task in saved.tasks:
        front: Row = {"id": task.number, "handler": name_of(task.method_id)}
        for pending in task.pending:
            yield WAITING, {**front, **_of(task, decoded), **_for(pending)}
            if pending.what == TIMER:
                yield TIMERS, {**front, "kind": "sleep", "due_ns": pending.detail}
            elif pending.what.startswith("effect "):
                effect = pending.what.removeprefix("effect ")
                yield EFFECTS, {**front, "effect": effect, "number": pending.number, "step": pending.step}
    for call in saved.queued:
        front = {"id": call.number, "handler": name_of(call.method_id)}
        yield WAITING, {**front, **_of(call, decoded), "kind": "turn", "waits_for": "its turn", "step": 0}
    for method_id, due_ns in saved.schedules.items():
        yield TIMERS, {"id": None, "handler": name_of(method_id), "kind": "schedule", "due_ns": due_ns}


def _of(task: SavedTask, decoded: Callable[[bytes], Any]) -> Row:
    return {
        "arguments": decoded(task.arguments),
        "since_ns": task.started_ns,
        "caller": task.caller,
        "call_number": None if task.caller is None else task.call_number,
        "sequence_id": None if task.sequence_id < 0 else task.sequence_id,
        "index": None if task.sequence_id < 0 else task.message_index,
    }


def _for(pending: Pending) -> Row:
    first = pending.what.partition(" ")[0]
    kind = "timer" if pending.what == TIMER else first if first in _KINDS else "other"
    what = described(pending) if kind == "timer" else pending.what
    return {"kind": kind, "waits_for": what, "step": pending.step}
