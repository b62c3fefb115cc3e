"""Views of waiting handlers for operators, and the retry of their effects.

Nothing here changes anything, and no handler sees it.
"""

from __future__ import annotations

import linecache
import os
from operator import attrgetter
from types import FrameType
from typing import Any

from immortal.appsdk.calls.user_code import describe_arguments
from immortal.appsdk.effects.effect import encodable
from immortal.appsdk.state.journal import CANCEL_STEP, TIMER, Entry, SavedTask, described
from immortal.appsdk.types.handles import read_extension
from immortal.appsdk.waiting.impulses import Effect
from immortal.appsdk.waiting.operations import Call, Event, Operation, Timer
from immortal.appsdk.waiting.task import Task
from immortal.appsdk.waiting.tasks import Tasks
from immortal.protocol import decoding
from immortal.protocol.system_methods import HANDLERS_COUNT_MAX

Values = dict[str, Any]

STEPS_MAX = 1000  # of one handler that are told, the last


def describe_all(tasks: Tasks, hooks: list[Values] | None = None) -> Values:
    """Describe the oldest HANDLERS_COUNT_MAX. ``count``: of all. ``multicasts``: whom the instance waits for, if any;
    ``hooks``: the same for its `@on_primary` hooks.
    ``groups``: those that its class declares, if it takes part in any. ``schedules``: of its class, if it has any."""
    found: list[Task | SavedTask] = sorted(
        [*tasks.all_waiting, *tasks.limits.queued.values()], key=attrgetter("number")
    )
    values: Values = {"count": len(found)}
    values["handlers"] = [_any_described(tasks, one) for one in found[:HANDLERS_COUNT_MAX]]
    if multicasts := tasks.context.multicasts.describe() + (hooks or []):
        values["multicasts"] = multicasts
    if (groups := getattr(tasks.instance, "_immortal_groups", None)) is not None:
        values["groups"] = groups()
    if schedules := tasks.clock.describe():
        values["schedules"] = schedules
    return values


def describe_one(tasks: Tasks, number: int) -> Values:
    """Describe a waiting handler. ``handler`` None: none of that number waits."""
    task = tasks.waiting(number)
    if task is None:
        queued = tasks.limits.queued.get(number)
        return {"handler": None if queued is None else _queued(tasks, queued) | {"steps": [], "steps_count": 0}}
    steps = [describe_step(entry) for entry in task.entries[-STEPS_MAX:]]
    return {"handler": _described(tasks, task) | {"steps": steps, "steps_count": len(task.entries)}}


def _any_described(tasks: Tasks, one: Task | SavedTask) -> Values:
    return _queued(tasks, one) if isinstance(one, SavedTask) else _described(tasks, one)


def _queued(tasks: Tasks, call: SavedTask) -> Values:
    """Describe a call that waits for its turn."""
    handler = tasks.definition.by_method_id[call.method_id]
    waits = {"step": 0, "for": tasks.limits.describe(call), "since_ns": call.started_ns, "number": 0, "kind": "other"}
    arguments = describe_arguments(tasks.codec(handler).decode(call.arguments), handler.signature.parameters)
    place = call.sequence_id, call.message_index
    told = _call(call, handler.function.__qualname__, arguments, place)
    return told | {"waits": [waits], "at": [], "cancelled": []}


def _described(tasks: Tasks, task: Task) -> Values:
    return _call(task, task.name, task.described_arguments(), task.began_at) | {
        "waits": [_wait(tasks, task, operation) for operation in task.pending.values()],
        "at": [[_place(frame) for frame in frames] for frames in task.frames()],
        "cancelled": [_cancellation(entry) for entry in task.cancelled],
    }


def _call(one: Task | SavedTask, name: str, arguments: str, place: tuple[int, int]) -> Values:
    """Describe the call of a handler. ``place``: of the message that began it."""
    return {
        "id": one.number,
        "handler": name,
        "arguments": encodable(arguments),
        "since_ns": one.started_ns,
        "caller": one.caller,
        "call_number": one.call_number,
        "record": None if place[0] < 0 else place[0],
        "message": place[1],
        "generation": one.generation,
    }


def _wait(tasks: Tasks, task: Task, operation: Operation) -> Values:
    values: Values = {
        "step": operation.step,
        "for": described(operation),
        "since_ns": operation.since_ns,
        "number": operation.number,
    }
    if isinstance(operation, Call):
        return values | {"kind": "call", "for": operation.what, "to": operation.target.destination}
    if isinstance(operation, Timer):
        return values | {"kind": "timer", "due_ns": tasks.clock.due_ns(operation)}
    if isinstance(operation, Event):
        return values | {"kind": "event", "event": operation.name}
    if isinstance(operation, Effect):
        request = tasks.effects.request(operation.number)
        attempt, failure = (0, "") if request is None else (request.attempt, request.failure)
        what = f"effect {operation.function.describe(operation.encoded)}"
        return values | {"kind": "effect", "for": what, "attempt": attempt, "failure": failure}
    return values | {"kind": "other"}


def _cancellation(entry: Entry) -> Values:
    reason, who = Task.cancellation(entry)
    return {"time_ns": entry.time_ns, "reason": reason, "who": who}


def describe_step(entry: Entry) -> Values:
    """Describe something that an async handler has had."""
    if entry.step == CANCEL_STEP:
        return {"step": 0, "what": "cancelled", **_cancellation(entry), "raised": True}
    try:
        shown = decoding.decode_shown(entry.value, ext_hook=read_extension)
        value = encodable(_raised(shown) if entry.raised else describe_arguments((shown,))[1:-1])
    except decoding.DecodeError:
        value = f"{len(entry.value)} bytes"
    what = described(entry) if entry.what == TIMER else entry.what
    return {"step": entry.step, "what": what, "time_ns": entry.time_ns, "raised": entry.raised, "value": value}


def _raised(shown: Any) -> str:
    """Return what a call or effect raised: "KeyError: 'x'" of a failure, "Refused(5)" of what is declared."""
    match shown:
        case ["~failed", [str(kind), str(text), *_], *_] | ["", [_, str(kind), str(text), *_], *_]:
            return f"{kind}: {text}"
        case [str(name), list(arguments), *_]:
            return f"{name}{describe_arguments(arguments)}"
    return describe_arguments((shown,))[1:-1]


# --- where it stands in the code --------------------------------------------------------------------------------------


def _place(frame: FrameType) -> Values:
    code, line = frame.f_code, frame.f_lineno
    file = code.co_filename
    text = linecache.getline(file, line, frame.f_globals).strip()
    if file.startswith(os.getcwd() + os.sep):
        file = os.path.relpath(file)
    return {"file": file, "line": line, "function": code.co_qualname, "text": text}


# Effects between two attempts, which an operator wants to be tried at once.
#
# No log knows of attempts, only of results: when one is made changes nothing that a replay does.


def retry_effects(tasks: Tasks, number: int) -> dict[str, Any]:
    """Retry the effects that the handler ``number`` waits for.

    ``retried``: how many were between two attempts; ``text``: the outcome for people.
    """
    task = tasks.waiting(number)
    if task is None:
        return {"retried": 0, "text": f"no handler {number} waits: it has ended, or there never was one"}
    effects = [one for one in task.pending.values() if isinstance(one, Effect)]
    if not effects:
        return {"retried": 0, "text": f"{task.name} waits for no effect"}
    hastened = [one for one in effects if tasks.effects.try_now(one.number)]
    if not hastened:
        return {"retried": 0, "text": f"no effect of {task.name} waits for its next attempt: they run, or wait to"}
    names = ", ".join(one.function.name for one in hastened)
    return {"retried": len(hastened), "text": f"{names}, for {task.name}: the next attempt is made now"}
