"""Waiting ``async def`` handlers of an instance, the operations that they wait for, and answers to their callers.

All of it follows from the log: a message starts a handler, answers a call, tells the time or runs a ``def`` handler
that signals an event. Each woken handler runs until it waits again before the next one runs, first woken first.

The views of waiting handlers for operators, and the retry of effects, change nothing that handlers see.
"""

from __future__ import annotations

import linecache
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from operator import attrgetter
from types import FrameType
from typing import Any

import msgspec

from immortal.appsdk.calls.context import QUERY_RUNS, Context
from immortal.appsdk.calls.outbox import OF_ORDER
from immortal.appsdk.calls.user_code import describe_arguments, describe_result
from immortal.appsdk.effects.effect import encodable
from immortal.appsdk.errors import AS_RPC, QueryError, UsageError
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.state.journal import (
    CANCEL_STEP,
    TIMER,
    WAYS_OUT,
    Entry,
    JournalError,
    SavedTask,
    SavedTasks,
    describe_operation,
)
from immortal.appsdk.types.handles import read_extension
from immortal.appsdk.waiting.completions import Endings, Incoming, Orders
from immortal.appsdk.waiting.host import Host, Limits
from immortal.appsdk.waiting.impulses import Deadline, Effect, EffectResult, LoggedTime, TimeImpulses
from immortal.appsdk.waiting.operations import (
    NOTHING,
    Call,
    Event,
    Operation,
    Timer,
    encode_signal,
    event_name,
    make_node_call,
)
from immortal.appsdk.waiting.task import Task
from immortal.appsdk.waiting.task_self import TaskSelf
from immortal.protocol import decoding, redaction
from immortal.protocol.client_frames import Caller
from immortal.protocol.system_methods import CANCEL_CALL_METHOD_ID, HANDLERS_COUNT_MAX, REASON_CHARACTERS_MAX, Order
from immortal.protocol.verdicts import VerdictKind

DEADLINE = "its timeout"  # name of the canceller, for a handler whose time is over
_discarded: list[object] = []  # coroutines that must not run, kept: when Python clears one away it runs its 'finally'


class Tasks(Host):
    """Async handlers of one instance."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._tasks: dict[int, Task] = {}
        # Tasks whose caller waits, oldest first. Callers choose the numbers, so two can have the same one.
        self._by_call: dict[tuple[str, int], list[Task]] = {}
        self.limits = Limits()
        self.next_announced: Task | SavedTask | None = None  # the handler that runs next, see run_next_woken
        self._is_announced = False
        self.time_impulses = TimeImpulses(context, self.clock)
        self.incoming = Incoming(self)
        context.multicasts.run_effect = self.effects.run_held
        context.multicasts.receiver_of_call = self.incoming.receiver_of_call
        context.nodes.make_call = make_node_call
        self.orders = Orders(context)
        self._endings = Endings(context, self.answers, self.handler_runs)

    def make_self(self, task: Any) -> TaskSelf:
        return TaskSelf(task)

    def use(self, definition: Definition, instance: Any) -> None:
        """Use this class's code from here on. Raises JournalError if it is not the code that waiting handlers ran."""
        saved = self.save()
        self.definition, self.instance = definition, instance
        self.limits.use(definition)
        self.clock.use(definition)
        self.handler_runs.use(definition, instance)
        self.context.multicasts.expel_after = getattr(instance, "_immortal_expel_after", dict)()
        self.context.outbox.order_method_ids = OF_ORDER | getattr(instance, "_immortal_of_order", frozenset)()
        self.members.clear()
        self.peer_targets.clear()
        if saved is not None:
            self.restore(saved)

    def discard_all(self) -> None:
        """Discard the waiting handlers without running any of their code."""
        for task in self._tasks.values():
            task.detach()

    # --- waiting handlers -------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        return len(self._tasks)

    @property
    def all_waiting(self) -> list[Task]:
        """Tasks that wait, the oldest first."""
        return list(self._tasks.values())

    def waiting(self, number: int) -> Task | None:
        return self._tasks.get(number)

    def save(self) -> SavedTasks | None:
        """Return the data for a checkpoint; None if there is none, as in an app without ``async def`` and schedules."""
        if self._next_number == 1 and not self.events.kept and not self.clock.schedules:
            return None
        return SavedTasks(
            next_number=self._next_number,
            tasks=[task.save() for task in self._tasks.values()],
            signals={name: list(values) for name, values in self.events.kept.items()},
            schedules=dict(self.clock.schedules),
            jumps=self.clock.relevant_jumps(),
            jumped_to_ns=self.clock.jumped_to_ns,
            queued=list(self.limits.queued.values()),
        )

    def restore(self, saved: SavedTasks) -> None:
        """Run all saved waiting handlers again. Raises JournalError."""
        self.discard_all()
        self._queue.clear()
        self.next_announced = None
        self.ready.clear()
        self.calls.clear()
        self.effects.waiting.clear()
        self.clock.restore(saved)
        self.events.restore(saved.signals)
        self._next_number = saved.next_number
        self._tasks.clear()
        self._by_call.clear()
        self.limits.use(self.definition)
        for one in saved.tasks:
            self._add(Task.rebuild(self, self._handler_of(one), one))
        for one in saved.queued:
            self._handler_of(one)
            self.limits.queued[one.number] = one
        if saved.queued:  # limits of another version can let more of them begin, with the next input
            self.defer(self._start_queued)
        self.events.sort()

    def _handler_of(self, saved: SavedTask) -> Handler[Any, Any]:
        handler = self.definition.by_method_id.get(saved.method_id)
        if handler is None or not handler.is_async:
            has = "no such handler" if handler is None else f"{handler.name} there, which is no 'async def'"
            raise JournalError(
                f"an async handler with the method ID {saved.method_id} waits, and {self.definition.name} has {has}; "
                f"the app stops\n{WAYS_OUT}"
            )
        return handler

    def list_restored(self, saved: SavedTasks | None) -> None:
        """Tell the list of executions the record from which on input is handled again."""
        if self.executions is not None:
            saved = saved or SavedTasks()
            waiting = [(one, self._handler_of(one)) for one in (*saved.tasks, *saved.queued)]
            self.executions.note_restore(saved.next_number, self.context.sequence_id, waiting)

    def restart(self, order: Order) -> tuple[bool, str]:
        """Begin an execution again, with the same or other arguments; return (True if it was begun, outcome as text).

        Raises HandlerError.
        """
        try:
            method_id, encoded, origin_results = decoding.decode(order.value, type=tuple[int, msgspec.Raw, list[Entry]])
            handler = self.definition.by_method_id.get(method_id)
            if handler is None or not handler.is_async:
                return False, "only an 'async def' handler is begun again: call it anew ('immortal call')"
            arguments = self.codec(handler).decode(bytes(encoded))
        except Exception as error:  # msgspec's own, and what a type's __post_init__ raises
            return False, f"the arguments are not what it takes: {error}"
        if origin_results and not self.limits.has_room(handler, self.codec(handler).encoded(arguments)[1]):
            return False, f"as many runs of {handler.function.__qualname__} as may go on at once: try again later"
        number = self._next_number
        self.start(handler, arguments, None, 0, order.task, origin_results)
        return True, f"{handler.function.__qualname__} has begun again, as {number}"

    # --- requests of handlers ---------------------------------------------------------------------------------------

    def signal(self, name: str, value: Any) -> None:
        """Signal an event from a ``def`` handler."""
        if self.context.handling_thread_id == QUERY_RUNS:
            raise QueryError(f"immortal.signal: a query only reads, and signals nobody: {AS_RPC}")
        if threading.get_ident() != self.context.handling_thread_id:
            raise UsageError(
                "immortal.signal: only handlers signal: what hooks, __init__, prepare and upgrade do is not in the "
                "log; send an impulse to a handler that does it"
            )
        name = event_name("immortal.signal", name)
        encoded = encode_signal(name, value)
        self.events.require_room(name, encoded)
        self.events.signal(name, encoded)
        if not self.definition.has_tasks:  # nobody waits then, and no later code empties the queue
            self.drain()

    # --- input from the log -----------------------------------------------------------------------------------------

    def start(
        self,
        handler: Handler[Any, Any],
        arguments: tuple[Any, ...],
        caller: str | None,
        call_number: int,
        origin: int | None = None,
        origin_results: Sequence[Entry] = (),
    ) -> None:
        """Start an ``async def`` handler, for ``caller`` or (None) nobody. Raises HandlerError.

        ``origin``: the execution that it repeats; ``origin_results``: the results of the steps of ``origin``."""
        context = self.context
        number, time_ns = self.draw_number(), context.record_time_ns or 0
        place = context.sequence_id, context.message_index
        _, encoded = self.codec(handler).encoded(arguments)
        call = SavedTask(number, 0, handler.method_id, encoded, caller, call_number, time_ns, [], [], *place)
        if self.executions is not None:
            self.executions.note_start(call, handler, origin)
        if self.limits.has_room(handler, call.arguments):
            self._start_handler(call, handler, origin_results)
        else:
            self.limits.queued[number] = call
        self.drain()

    def _start_handler(self, call: SavedTask, handler: Handler[Any, Any], origin_results: Sequence[Entry] = ()) -> None:
        if self._report_if_killed(call.number, handler, call.caller, call.call_number):
            return
        task = Task(self, handler, call, self.context.record_time_ns or 0)  # type: ignore[abstract]  # see HandlerLoop
        if origin_results:
            task.origin_results = {entry.step: entry for entry in origin_results}
        self._add(task)
        task.advance()
        if task.is_done:
            self._end(task)

    def _add(self, task: Task) -> None:
        self._tasks[task.number] = task
        if task.caller is not None:
            self._by_call.setdefault((task.caller, task.call_number), []).append(task)
        self.note_start(task)

    def _start_queued(self, call: SavedTask | None = None) -> None:
        """Start the handlers whose turn it is, beginning with ``call``. Raises HandlerError."""
        while (call := call or self.limits.pop_next()) is not None:
            if self.one_by_one and self._must_announce(call, partial(self._start_queued, call)):
                return
            self._start_handler(call, self._handler_of(call))
            call = None

    def note_start(self, task: Task) -> None:
        """Count a run for the limits of its handler, and start its timeout, separately for each continue_as."""
        self.limits.release(task.number)
        self.limits.acquire(task.number, task.handler, task.arguments)
        if task.generation and self.executions is not None:
            self.executions.note_restart(task.number, task.handler, task.arguments)
        if self.limits.queued:
            self.defer(self._start_queued)
        timeout = task.handler.timeout
        had_none = (task.cancellation(entry)[1] == DEADLINE for entry in task.cancelled)
        if timeout is None or not task.started_ns or any(had_none):
            return
        due_ns = task.started_ns + timeout // timedelta(microseconds=1) * 1000
        self.clock.add(Deadline(task.number, task.started_ns, due_ns))

    def _expire(self, deadline: Deadline) -> None:
        """Cancel a handler whose time is over. Raises HandlerError."""
        if self.clock.has(deadline):
            task = self._tasks[deadline.number]
            if self.one_by_one and self._must_announce(task, partial(self._expire, deadline)):
                return
            if self._discard_if_killed(task):
                return
            self.clock.forget(deadline.number)
            self.cancel(task, f"it has not ended within {task.handler.timeout}", DEADLINE)

    def cancel_queued(self, number: int, reason: str) -> str | None:
        """Remove a call that waits for its turn; return the name of its handler, None if there is no such call."""
        call = self.limits.queued.pop(number, None)
        if call is None:
            return None
        handler = self._handler_of(call)
        self._endings.note(call.number, "cancelled", reason)
        self._endings.answer_cancelled(handler, call.caller, call.call_number, reason)
        return handler.function.__qualname__

    def _end(self, task: Task) -> None:
        self._remove(task)
        self._endings.finish(task)

    def _remove(self, task: Task) -> None:
        del self._tasks[task.number]
        self.clock.forget(task.number)
        self.limits.release(task.number)
        if self.limits.queued:
            self.defer(self._start_queued)
        if task.caller is not None:
            calls = self._by_call[task.caller, task.call_number]
            calls.remove(task)
            if not calls:
                del self._by_call[task.caller, task.call_number]

    def resolve(self, operation: Any, raised: bool, value: bytes) -> None:
        if not operation.done():
            task = operation.task
            if self.one_by_one and self._must_announce(task, partial(self.resolve, operation, raised, value)):
                return
            if self.handler_runs.verdicts and self._discard_if_killed(task):
                return
            if self.incoming.failed is not None:
                raised, value = True, self.incoming.failed
            task.resolve(operation, raised, value, self.context.record_time_ns or 0)
            if task.is_done:
                self._end(task)

    def receive_effect_result(self, result: EffectResult) -> None:
        """Give the result of an effect to its wait. Raises HandlerError."""
        request = self.effects.requests.get(result.number)
        if (effect := self.effects.match(result)) is not None:
            if self.executions is not None and request is not None and request.attempt > 1:
                self.executions.note_attempts(effect.task.number, effect.step, request.attempt)
            self.resolve(effect, result.raised, bytes(result.value))
            self.drain()

    # --- handlers that end the app's process ------------------------------------------------------------------------

    def run_next_woken(self) -> bool:
        """Let the handler woken first run (``one_by_one``); return False if no handler is left. Raises HandlerError.

        If it sets ``next_announced``, nothing was done yet: that handler runs at the next call."""
        self._is_announced, self.next_announced = self.next_announced is not None, None
        if not self._queue:
            return False
        self._queue.popleft()()
        return True

    def _must_announce(self, call: Task | SavedTask, action: Callable[[], None]) -> bool:
        """Return True if ``action``, which runs a handler (``one_by_one``), must wait until that was announced."""
        if self._is_announced:
            self._is_announced = False
            return False
        self._queue.appendleft(action)
        self.next_announced = call
        return True

    def _discard_if_killed(self, task: Task) -> bool:
        """Return True if a begun handler has a verdict, like :meth:`_report_if_killed`; then discard it."""
        if not self._report_if_killed(task.number, task.handler, task.caller, task.call_number):
            return False
        self._discard(task)
        return True

    def _discard(self, task: Task) -> None:
        """End a handler so that none of its code runs any more, not even a 'finally'."""
        task.drop_pending()
        task.detach(closes=False)
        _discarded.append(task.main)
        self._remove(task)

    def _report_if_killed(self, number: int, handler: Handler[Any, Any], caller: str | None, call_number: int) -> bool:
        """Return True if a verdict says that this handler ended the process at this message: then it runs no more.

        Its caller is told."""
        context = self.context
        verdict = self.handler_runs.verdicts.get((context.sequence_id, context.message_index, number, 0))
        if verdict is None or verdict.kind is not VerdictKind.KILLED:
            return False
        self._endings.note(number, "failed", verdict.text)
        if caller is not None:
            self.answers.answer_verdict(verdict, Caller(caller, call_number, handler.method_id))
        return True

    # --- orders of an operator --------------------------------------------------------------------------------------

    def execute_order(self, order: Order) -> None:
        """Carry out an operator's order. Raises HandlerError."""
        self.orders.execute(order)
        self.drain()

    def cancel_call(self, caller: str, number: int, cancelled: int, reason: str) -> None:
        """Cancel an earlier call of ``caller``, and answer whether it was still open. Raises HandlerError."""
        forward = getattr(self.instance, "_immortal_cancel", None)
        if forward is not None and forward(caller, number, cancelled, reason):
            return
        calls = self._by_call.get((caller, cancelled), [])
        queued = self.limits.queued.values()
        waits = next((one.number for one in queued if (one.caller, one.call_number) == (caller, cancelled)), None)
        reason = reason[:REASON_CHARACTERS_MAX]
        found = bool(calls) or waits is not None
        if calls:
            self.cancel(calls[0], reason, f"its caller, {caller or 'the instance itself'}")
        elif waits is not None:
            self.cancel_queued(waits, reason)
        self.answers.answer_value(Caller(caller, number, CANCEL_CALL_METHOD_ID), found)
        self.drain()

    def cancel(self, task: Task, reason: str, canceller: str) -> None:
        """Cancel a waiting handler. Raises HandlerError."""
        task.cancel(reason, canceller, self.context.record_time_ns or 0)
        if task.is_done:
            self._end(task)

    def terminate(self, task: Task, reason: str, canceller: str) -> None:
        """End a handler without running its code. Raises HandlerError."""
        text = f"terminated: {reason}" if reason else "terminated"
        task.entries.append(task.cancellation_entry(text, canceller, self.context.record_time_ns or 0))
        self._discard(task)
        self._endings.note(task.number, "terminated", reason, task)
        self._endings.answer_cancelled(task.handler, task.caller, task.call_number, text)

    # --- time -------------------------------------------------------------------------------------------------------

    def apply_time(self, now: LoggedTime) -> None:
        """Handle a time in the log: timers and schedules up to then are due. Raises HandlerError."""
        if now.jumped_ns:
            self.clock.shift(now.time_ns, now.jumped_ns)
        self.time_impulses.note_logged(now.time_ns)
        self.context.multicasts.tick()
        for handler in self.clock.pop_due_schedules(now.time_ns, now.decided):
            self.fork("", handler)()
        for due in self.clock.pop_due_timers(now.time_ns):
            if isinstance(due, Timer):
                self.defer(partial(self.resolve, due, False, NOTHING))
            else:
                self.defer(partial(self._expire, due))
        self.drain()


Values = dict[str, Any]

STEPS_MAX = 1000  # of one handler: only the last ones are shown


def describe_all(tasks: Tasks, hooks: list[Values] | None = None) -> Values:
    """Describe the oldest HANDLERS_COUNT_MAX handlers. ``count``: the number of all.

    ``multicasts``: the instances that this one waits for, if any, also those that its ``hooks`` wait for. ``groups``:
    those that its class declares, if any. ``schedules``: of its class, if any."""
    found: list[Task | SavedTask] = sorted(
        [*tasks.all_waiting, *tasks.limits.queued.values()], key=attrgetter("number")
    )
    values: Values = {"count": len(found)}
    values["handlers"] = [
        _describe_queued(tasks, one) if isinstance(one, SavedTask) else _describe_task(tasks, one)
        for one in found[:HANDLERS_COUNT_MAX]
    ]
    if multicasts := tasks.context.multicasts.describe() + (hooks or []):
        values["multicasts"] = multicasts
    if (groups := getattr(tasks.instance, "_immortal_groups", None)) is not None:
        values["groups"] = groups()
    if schedules := tasks.clock.describe():
        values["schedules"] = schedules
    return values


def describe_one(tasks: Tasks, number: int) -> Values:
    """Describe a waiting handler. ``handler`` None: no handler of that number waits."""
    task = tasks.waiting(number)
    if task is None:
        queued = tasks.limits.queued.get(number)
        return {
            "handler": None if queued is None else _describe_queued(tasks, queued) | {"steps": [], "steps_count": 0}
        }
    steps = [describe_step(entry) for entry in task.entries[-STEPS_MAX:]]
    return {"handler": _describe_task(tasks, task) | {"steps": steps, "steps_count": len(task.entries)}}


def _describe_queued(tasks: Tasks, call: SavedTask) -> Values:
    handler = tasks.definition.by_method_id[call.method_id]
    waits = {"step": 0, "for": tasks.limits.describe(call), "since_ns": call.started_ns, "number": 0, "kind": "other"}
    arguments = tasks.codec(handler).decode(call.arguments)
    shown = describe_arguments(arguments, handler.signature.parameters, handler.name)
    place = call.sequence_id, call.message_index
    described = _describe_call(call, handler.function.__qualname__, shown, place)
    return described | {"waits": [waits], "at": [], "cancelled": []}


def _describe_task(tasks: Tasks, task: Task) -> Values:
    return _describe_call(task, task.name, task.arguments_text(), task.started_by) | {
        "waits": [_describe_wait(tasks, task, operation) for operation in task.pending.values()],
        "at": [[describe_place(frame) for frame in frames] for frames in task.frames()],
        "cancelled": [_describe_cancellation(entry) for entry in task.cancelled],
    }


def _describe_call(one: Task | SavedTask, name: str, arguments: str, place: tuple[int, int]) -> Values:
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


def _describe_wait(tasks: Tasks, task: Task, operation: Operation) -> Values:
    values: Values = {
        "step": operation.step,
        "for": describe_operation(operation),
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
        request = tasks.effects.requests.get(operation.number)
        attempt, failure = (0, "") if request is None else (request.attempt, request.failure)
        what = f"effect {operation.function.describe(operation.encoded)}"
        return values | {"kind": "effect", "for": what, "attempt": attempt, "failure": failure}
    return values | {"kind": "other"}


def _describe_cancellation(entry: Entry) -> Values:
    reason, who = Task.cancellation(entry)
    return {"time_ns": entry.time_ns, "reason": reason, "who": who}


def describe_step(entry: Entry) -> Values:
    """Describe a journal's entry: a step of an async handler with its result."""
    if entry.step == CANCEL_STEP:
        return {"step": 0, "what": "cancelled", **_describe_cancellation(entry), "raised": True}
    try:
        shown = decoding.decode_shown(entry.value, ext_hook=read_extension)
        value = encodable(_raised(shown) if entry.raised else describe_result(shown, redaction.step_name(entry.what)))
    except decoding.DecodeError:
        value = f"{len(entry.value)} bytes"
    what = describe_operation(entry) if entry.what == TIMER else entry.what
    return {"step": entry.step, "what": what, "time_ns": entry.time_ns, "raised": entry.raised, "value": value}


def _raised(shown: Any) -> str:
    """Return the text of a raised error: "KeyError: 'x'" for a failure, "Refused(5)" for a declared exception."""
    match shown:
        case ["~failed", [str(kind), str(text), *_], *_] | ["", [_, str(kind), str(text), *_], *_]:
            return f"{kind}: {text}"
        case [str(name), list(arguments), *_]:
            return f"{name}{describe_arguments(arguments)}"
    return describe_arguments((shown,))[1:-1]


# --- places in the code -----------------------------------------------------------------------------------------------


def describe_place(frame: FrameType, line: int | None = None) -> Values:
    """Describe a line of a frame's code for people: file, line, function and text. ``line`` None: where it is now."""
    code, line = frame.f_code, frame.f_lineno if line is None else line
    file = code.co_filename
    text = linecache.getline(file, line, frame.f_globals).strip()
    if file.startswith(os.getcwd() + os.sep):
        file = os.path.relpath(file)
    return {"file": file, "line": line, "function": code.co_qualname, "text": text}


# Retry of effects between two attempts, on request of an operator.
#
# The log has no attempts, only results: the time of an attempt changes nothing that a replay does.


def retry_effects(tasks: Tasks, number: int) -> dict[str, Any]:
    """Retry the effects that the handler ``number`` waits for.

    ``retried``: how many were between two attempts; ``text``: the outcome, for people.
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
