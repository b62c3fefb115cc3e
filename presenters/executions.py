"""Views of an execution: its steps, its calls across services and its waits, as a timeline; orders for executions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any

import msgspec

from immortal.appsdk.state.journal import decode_journal
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core.formatting import time_text
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.coordinator.operator.control import ControlError
from immortal.presenters.operations import format_caller, format_wait, step_end, with_times
from immortal.protocol.command_line import counted
from immortal.protocol.errors import ImmortalError
from immortal.protocol.executions import (
    Execution,
    ExecutionIndex,
    ExecutionsError,
    Query,
    described_labels,
    id_of,
    key_of_id,
    open_index,
)

if TYPE_CHECKING:
    from immortal.replay.travel.sessions import Sessions

ASK_S = 10.0
AT_ONCE_MAX = 1000  # executions that one command cancels, terminates, signals or restarts

Values = dict[str, Any]


def execution_view(registry: Registry, settings: InstanceSettings, key: int) -> Values:
    """Return all data about one execution as plain values, to be shown. Raises ExecutionsError.

    Keys: ``execution``, ``steps`` (each with ``attempts``, ``children``), ``children`` of unfinished steps, ``waits``,
    ``parent``, ``repeats``, ``problem``."""
    with open_index(settings.folder, settings.name) as index:
        found = _get(index, settings.name, key)
        key = found.key
        journal, attempts, calls = index.journal(key), index.attempts(key), index.calls(key)
        view: Values = {"execution": found, "waits": [], "problem": "", "repeats": index.repeats_of(key)}
    live = _live_handler(settings, found) if found.state == "waiting" else {}
    view["problem"] = live.get("problem", "")
    view["waits"] = live.get("waits", [])
    children = [
        {"step": step, "instance": to or settings.name, "execution": child}
        for step, number, to in calls
        for child in _executions_of_call(registry, settings.name, to, number)
    ]
    made = live.get("steps", []) if journal is None else with_times(_steps(journal))
    view["steps"] = [
        step
        | {
            "attempts": attempts.get(step["step"], 1),
            "children": [child for child in children if child["step"] == step["step"]],
        }
        for step in made
    ]
    had = {step["step"] for step in made}
    view["children"] = [child for child in children if child["step"] not in had]  # no answer yet, or abandoned
    view["parent"] = _parent(registry, settings.name, found)
    return view


def _get(index: ExecutionIndex, name: str, key: int) -> Execution:
    if (found := index.get(key)) is None:
        record = id_of(key).partition(":")[0]
        hint = "" if key > 0 else f", 'immortal log show {name} --from {record} --to {record}' shows the record"
        raise ExecutionsError(
            f"{name!r} has no execution {id_of(key)}: it is no longer kept, or never existed;"
            f" 'immortal executions {name}' lists them{hint}"
        )
    return found


def execution_states(sessions: Sessions, name: str, execution: Execution) -> Values:
    """Return the state ``before`` an execution's first step and ``after`` its last, as nodes, and the ``changes``.

    The log is replayed for this. Raises ExecutionsError, ReplayError.
    """
    if execution.record < 0 or (execution.state != "waiting" and execution.ended_record is None):
        raise ExecutionsError(f"the records in which execution {execution.id} began and ended are not known")
    place = execution.ended_record, execution.ended_message
    since = execution.record, execution.message
    found: Values = sessions.ask(name, "between", since=since, record=place[0], index=place[1])
    return found


def _steps(journal: bytes) -> list[Values]:
    from immortal.appsdk.waiting.tasks import describe_step  # imported here: few commands show steps

    return [describe_step(entry) for entry in decode_journal(journal)]


def _live_handler(settings: InstanceSettings, execution: Execution) -> Values:
    """Return the app's description of a waiting handler, or ``problem``: the reason why there is none."""
    try:
        answer = control.query(settings.folder, "handlers", ASK_S, argument={"task": execution.key})
    except ControlError as error:
        return {"problem": f"only its app knows what it waits for: {error}"}
    one = answer.get("handler")
    if one is None:
        return {"problem": str(answer.get("error", "it has just ended: look again"))}
    found_now: Values = with_times(one)
    return found_now


def _executions_of_call(registry: Registry, name: str, to: str, number: int) -> list[Execution]:
    """Return the executions that a call began in the instance ``to``, if its index can be read here."""
    found: list[Execution] = []
    with suppress(ImmortalError), _index(registry, to or name) as index:
        found = index.called_by(name if to else "", number)
    return found


def _parent(registry: Registry, name: str, execution: Execution) -> Values | None:
    """Return the execution that called this one, with its instance; None if it is not known."""
    if execution.caller is None or execution.caller.startswith("~"):
        return None
    with suppress(ImmortalError), _index(registry, execution.caller or name) as index:
        if (key := index.caller_of(execution.call_number)) is not None and (caller := index.get(key)) is not None:
            return {"instance": execution.caller or name, "execution": caller}
    return None


def _index(registry: Registry, name: str) -> AbstractContextManager[ExecutionIndex]:
    return open_index(registry.load(name).folder, name)


def execution_row(execution: Execution) -> tuple[str, ...]:
    """Return the cells of an execution's row: ID, state, call, caller, began, took, labels."""
    caller, began = format_caller({"caller": execution.caller}), f"{time_text(execution.began_ns)[:19]}Z"
    return (
        execution.id,
        execution.state,
        execution.call,
        caller,
        began,
        duration_of(execution),
        described_labels(execution.labels) or "-",
    )


def duration_of(execution: Execution) -> str:
    return "-" if execution.ended_ns is None else f"{(execution.ended_ns - execution.began_ns) / 1e9:.3f} s"


def execution_lines(name: str, view: Values) -> Iterator[str]:
    """Yield lines of text that show an execution. ``view``: from :func:`execution_view`."""
    one: Execution = view["execution"]
    yield f"execution {one.id}: {one.call}"
    result = "" if one.result is None else f": {one.result}"
    yield f"  state      {one.state}{f', after {duration_of(one)}' if one.ended_ns is not None else ''}{result}"
    if one.labels:
        yield f"  labels     {described_labels(one.labels)}"
    yield f"  began      {time_text(one.began_ns)}"
    if one.record >= 0:
        yield f"  begun by   message {one.message} of record {one.record}:"
        yield f"             'immortal log show {name} --from {one.record} --to {one.record}'"
    parent = "" if view["parent"] is None else f", {_linked(view['parent'])}"
    yield f"  called by  {format_caller({'caller': one.caller})}{parent}"
    if one.origin is not None:
        yield f"  repeats    {one.plain()['origin']}"
    for repeat in view["repeats"]:
        yield f"  restarted as {repeat.id}, {repeat.state}"
    if one.key > 0:
        yield ""
        yield f"  {counted(len(view['steps']), 'step')}{':' if view['steps'] else ''}"
    for step in view["steps"]:
        tries = f" ({step['attempts']} attempts)" if step["attempts"] > 1 else ""
        since_s = (step["time_ns"] - one.began_ns) / 1e9
        yield f"    {step['step']:>3}  +{since_s:.3f} s  {step['what']}{tries} {step_end(step)}"
        for child in step["children"]:
            yield f"        {_linked(child)}"
    for wait in view["waits"]:
        yield f"    {wait.get('step') or '':>3}  waits for {format_wait(wait)}"
    for child in view["children"]:
        yield f"        {_linked(child)}"
    if view["problem"]:
        yield f"    {view['problem']}"
    if one.record >= 0:
        yield ""
        yield f"  the state then: 'immortal replay {name} --to {one.record} --state'"
        yield f"  its state before and after: 'immortal executions {name} {one.id} --states'"
        yield f"  with other code: 'immortal what-if {name} --app MODULE:CLASS'"


def _linked(child: Values) -> str:
    one: Execution = child["execution"]
    return f"{child['instance']} {one.id}: {one.call} {one.state} ('immortal executions {child['instance']} {one.id}')"


# Orders of an operator, for one or many executions: the choice, and the request to the coordinator for each.


def chosen(settings: InstanceSettings, verb: str, query: Query, ids: Sequence[str] = ()) -> list[Execution]:
    """Return the executions to which ``verb`` applies, by ``ids`` if given, else by ``query``. Raises ExecutionsError.

    A "restart" by a query omits waiting ones, unless the query has a state; the other verbs are only for waiting ones.
    """
    if bool(ids) == (query != Query()):
        raise ExecutionsError(
            f"give the executions to {verb}, as IDs or by --where LABEL=VALUE, --handler, --caller, --since, --text"
        )
    with open_index(settings.folder, settings.name) as index:
        if ids:
            named = [_get(index, settings.name, key_of_id(one)) for one in ids]
            if calls := [one.id for one in named if one.key < 0]:
                raise ExecutionsError(f"{', '.join(calls)}: {verb} works only for 'async def' handlers")
            return named
        state = query.state if verb == "restart" else "waiting"
        found = index.find(msgspec.structs.replace(query, state=state, limit=AT_ONCE_MAX + 1))
    if len(found) > AT_ONCE_MAX:
        raise ExecutionsError(f"more than {AT_ONCE_MAX:,} executions match: add conditions, such as --since or --state")
    return [one for one in found if one.key > 0 and (state or one.state != "waiting")]


def order_for(settings: InstanceSettings, verb: str, execution: Execution, given: Values) -> Values:
    """Return the request to the coordinator for ``verb`` on one execution. Raises ExecutionsError.

    ``given``: "reason"; or "event" and "value"; or for a restart "arguments", a list or None, and "from_step".
    """
    if verb != "restart":
        return {"task": execution.key, **given}
    with open_index(settings.folder, settings.name) as index:
        data, journal = index.data(execution.key), index.journal(execution.key)
    if given["arguments"] is not None:
        data = msgspec.msgpack.encode(given["arguments"])
    if data is None:
        raise ExecutionsError(f"the arguments of {execution.id} are too large to be kept: give them with --arguments")
    request = {"task": execution.key, "method": execution.method_id, "arguments": msgspec.to_builtins(data)}
    if given["from_step"] > 1:
        if journal is None or execution.state == "waiting":
            raise ExecutionsError(
                f"the steps of {execution.id} are not kept: it waits, had none, or they were too large"
            )
        before = [entry for entry in decode_journal(journal) if 0 < entry.step < given["from_step"]]
        request["journal"] = msgspec.to_builtins(msgspec.msgpack.encode(before))
    return request
