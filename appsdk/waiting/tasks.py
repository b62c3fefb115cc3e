"""The ``async def`` handlers of an instance that wait, what they wait for, and the answers to those who wait for it.

All of it follows from the log: a message starts a handler, answers a call, tells the time or runs a ``def`` handler
that signals an event. Each handler goes on until it waits again before the next one does, first woken first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import astuple

from appsdk.calls.codec import encoder
from appsdk.calls.context import QUERY_RUNS, Context
from appsdk.calls.failures import CANCELLED, encode_failed, forked, reference, refusal, verdict_on
from appsdk.calls.outbox import make_writer
from appsdk.errors import AS_RPC, Cancelled, HandlerError, QueryError, UsageError
from appsdk.handlers.decorators import CLOCK_METHOD_ID, Handler
from appsdk.handlers.definition import Definition
from appsdk.ordering.messages import Scope
from appsdk.state.journal import WAYS_OUT, Entry, JournalError, SavedTask, SavedTasks, declared_name, encode_raised
from appsdk.types.handles import MARK
from appsdk.waiting.clock import Clock, Deadline
from appsdk.waiting.effects import EffectResult
from appsdk.waiting.host import Host
from appsdk.waiting.limits import Limits
from appsdk.waiting.nodes import make_node_call
from appsdk.waiting.operations import NOTHING, Call, Event, MulticastCall, Timer
from appsdk.waiting.orders import Orders
from appsdk.waiting.signals import encode_signal
from appsdk.waiting.task import Task
from appsdk.waiting.task_self import TaskSelf
from protocol.client import Caller
from protocol.handlers import CANCEL_CALL_METHOD_ID, REASON_CHARACTERS_MAX, Order
from protocol.messages import RpcKind, RpcType
from protocol.verdicts import Cause, Verdict


class _ReturnedValue(msgspec.Struct, array_like=True, gc=False):
    number: int  # of the call
    value: msgspec.Raw


class _ReturnedNothing(msgspec.Struct, array_like=True, gc=False):
    number: int


DEADLINE = "its timeout"  # who has cancelled a handler that had none left


def is_deadline(task: Task, entry: Entry) -> bool:
    return task.cancellation(entry)[1] == DEADLINE


_take_call_number = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_RETURNED_VALUE, _RETURNED_NOTHING, _RAISED = RpcKind.RETURNED_VALUE, RpcKind.RETURNED_NOTHING, RpcKind.RAISED
# ... found faster than an enum's attributes
_decode_value = msgspec.msgpack.Decoder(_ReturnedValue).decode
_decode_nothing = msgspec.msgpack.Decoder(_ReturnedNothing).decode
_write_time = make_writer("the clock", CLOCK_METHOD_ID, RpcType.IMPULSE)


class Tasks(Host):
    """Those of one instance."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._tasks: dict[int, Task] = {}
        # Those whose caller waits, oldest first: it chooses the numbers, so two may have the same one.
        self._by_call: dict[tuple[str, int], list[Task]] = {}
        self._failed_wait: bytes | None = None  # what comes in place of all that is waited for
        self._told_ns: int | None = None  # the time in an impulse that is on its way
        self._scheduled: list[Handler[Any, Any]] = []
        self.limits = Limits()
        self._deadlines: dict[int, Deadline] = {}  # by number
        context.multicasts.run_effect = self.effects.unheld
        context.multicasts.called = self._called
        context.nodes.make_call = make_node_call
        self.orders = Orders(context, self.waiting, self._cancel, self._give, self._give_up, self._expel)

    def make_self(self, task: Any) -> TaskSelf:
        return TaskSelf(task)

    def use(self, definition: Definition, instance: Any) -> None:
        """From here on this class's code runs. Raises JournalError where it is not what those that wait ran."""
        saved = self.save()
        self.definition, self.instance = definition, instance
        self.limits.use(definition)
        self.handler_runs.use(definition, instance)
        self.members.clear()
        self.peer_targets.clear()
        self._scheduled = [handler for handler in definition.handlers.values() if handler.schedule]
        if saved is not None:
            self.restore(saved)

    # --- what waits -------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        return len(self._tasks)

    @property
    def all_waiting(self) -> list[Task]:
        """The oldest first."""
        return list(self._tasks.values())

    def waiting(self, number: int) -> Task | None:
        return self._tasks.get(number)

    def save(self) -> SavedTasks | None:
        """None where there is nothing to save, as in each app without ``async def`` and schedules."""
        if self._next_number == 1 and not self.events.kept and not self.clock.schedules:
            return None
        return SavedTasks(
            next_number=self._next_number,
            tasks=[task.save() for task in self._tasks.values()],
            signals={name: list(values) for name, values in self.events.kept.items()},
            schedules=dict(self.clock.schedules),
            jumps=self.clock.jumps_that_count(),
            jumped_to_ns=self.clock.jumped_to_ns,
            queued=list(self.limits.queued.values()),
        )

    def restore(self, saved: SavedTasks) -> None:
        """Run all that waited again. Raises JournalError."""
        self._queue.clear()
        self.ready.clear()
        self.calls.clear()
        self.effects.forget_all()
        self.clock = Clock()
        self.clock.schedules = dict(saved.schedules)
        self.clock.jumps = list(saved.jumps)
        self.clock.jumped_to_ns = saved.jumped_to_ns
        self.events.restore(saved.signals)
        self._next_number = saved.next_number
        self._tasks.clear()
        self._by_call.clear()
        self._deadlines.clear()
        self.limits.use(self.definition)
        for one in saved.tasks:
            task = self._tasks[one.number] = Task.rebuild(self, self._handler_of(one), one)
            if task.caller is not None:
                self._by_call.setdefault((task.caller, task.call_number), []).append(task)
            self.began(task)
        for one in saved.queued:
            self._handler_of(one)
            self.limits.queued[one.number] = one
        if saved.queued:  # limits of another version may let more of them begin, with what comes next
            self._queue.append(self._begin_next)
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

    # --- what handlers do -------------------------------------------------------------------------------------------

    def signal(self, name: str, value: Any) -> None:
        """Of a ``def`` handler."""
        if self.context.handling_thread_id == QUERY_RUNS:
            raise QueryError(f"self.signal: a query only reads, and signals nobody: {AS_RPC}")
        if threading.get_ident() != self.context.handling_thread_id:
            raise UsageError(
                "self.signal: only handlers signal: what hooks, __init__, prepare and upgrade do is not in the log; "
                "send an impulse to a handler that does it"
            )
        encoded = encode_signal(name, value)
        if self.signals_have_limit:
            self.events.require_room(name, encoded)
        self.events.signal(name, encoded)
        if not self.definition.has_tasks:  # so nobody waits, and nobody else lets it through
            self.drain()

    # --- what the log brings ----------------------------------------------------------------------------------------

    def receiver(self, handler: Handler[Any, Any], *, wakes: bool) -> Callable[..., None]:
        """What handles a fork or impulse of ``handler``. ``wakes``: there may be handlers that wait for its signals.

        Without, and with nothing special about it, it is the ``def`` handler itself.
        """
        if handler.is_async:

            def start(instance: object, *arguments: Any) -> None:
                self._start(handler, arguments, None, 0)

            return start
        if handler.raises:

            def run(instance: object, *arguments: Any) -> None:
                self.handler_runs.run_handler(handler, arguments, waits=False)
                self.drain()

            return run
        function: Callable[..., None] = partial(self.queries.run, handler) if handler.is_query else handler.function
        return self.waking(function) if wakes else function

    def waking(self, function: Callable[..., None]) -> Callable[..., None]:
        """``function``, and then whoever waited for what it has signalled."""

        def run(instance: object, *arguments: Any) -> None:
            function(instance, *arguments)
            self.drain()

        return run

    def answering_receiver(self, handler: Handler[Any, Any]) -> Callable[..., None]:
        """What handles a call of ``handler`` whose caller waits: (instance, caller, number of the call, arguments)."""
        if handler.is_async:

            def start(instance: object, caller: str, number: int, *arguments: Any) -> None:
                self._start(handler, arguments, caller, number)

            return start

        def run(instance: object, caller: str, number: int, *arguments: Any) -> None:
            self.answers.answer(handler, caller, number, *self.handler_runs.run_handler(handler, arguments))
            self.drain()

        return run

    def _start(
        self, handler: Handler[Any, Any], arguments: tuple[Any, ...], caller: str | None, call_number: int
    ) -> None:
        context = self.context
        number, time_ns = self.draw_number(), context.record_time_ns or 0
        place = context.sequence_id, context.message_index
        call = SavedTask(
            number, 0, handler.method_id, encoder.encode(arguments), caller, call_number, time_ns, [], [], *place
        )
        if self.limits.has_room(handler, call.arguments):
            self._begin(call, handler)
        else:
            self.limits.queued[number] = call
        self.drain()

    def _begin(self, call: SavedTask, handler: Handler[Any, Any]) -> None:
        """Raises HandlerError."""
        number, caller, time_ns = call.number, call.caller, self.context.record_time_ns or 0
        task = self._tasks[number] = Task(self, handler, number, call.arguments, caller, call.call_number, time_ns)
        task.began_at = call.sequence_id, call.message_index
        if caller is not None:
            self._by_call.setdefault((caller, call.call_number), []).append(task)
        self.began(task)
        task.advance()
        if task.is_done:
            self._end(task)

    def _begin_next(self) -> None:
        """Those whose turn it is. Raises HandlerError."""
        while (call := self.limits.take_next()) is not None:
            self._begin(call, self._handler_of(call))

    def began(self, task: Task) -> None:
        """Its run, or with continue_as its next one: it counts for limits, and has so much time from here on."""
        number = task.number
        if number in self._tasks:
            self.limits.ended(number)
        self.limits.began(number, task.handler, task.arguments)
        if self.limits.queued:
            self._queue.append(self._begin_next)
        timeout = task.handler.timeout
        if timeout is None or not task.started_ns or any(is_deadline(task, entry) for entry in task.cancelled):
            return
        due_ns = task.started_ns + timeout // timedelta(microseconds=1) * 1000
        deadline = self._deadlines[number] = Deadline(number, task.started_ns, due_ns)
        self.clock.add(deadline)

    def _expire(self, deadline: Deadline) -> None:
        """Raises HandlerError."""
        if self._deadlines.get(deadline.number) is deadline:
            self._forget_deadline(deadline.number)
            task = self._tasks[deadline.number]
            self._cancel(task, f"it has not ended within {task.handler.timeout}", DEADLINE)

    def _forget_deadline(self, number: int) -> None:
        if (deadline := self._deadlines.pop(number, None)) is not None:
            self.clock.remove(deadline)

    def _give_up(self, number: int, reason: str) -> str | None:
        """A call that waits for its turn does so no more; of which handler it was."""
        call = self.limits.queued.pop(number, None)
        if call is None:
            return None
        handler = self._handler_of(call)
        if call.caller is not None:
            self._answer_cancelled(handler, call.caller, call.call_number, reason)
        return handler.function.__qualname__

    def _end(self, task: Task) -> None:
        del self._tasks[task.number]
        self._forget_deadline(task.number)
        self.limits.ended(task.number)
        if self.limits.queued:
            self._queue.append(self._begin_next)
        if task.caller is not None:
            calls = self._by_call[task.caller, task.call_number]
            calls.remove(task)
            if not calls:
                del self._by_call[task.caller, task.call_number]
        value, error = task.result()
        if isinstance(error, Cancelled):
            self._end_cancelled(task, error)
            return
        declared = None if error is None else declared_name(task.handler.raises, error)
        if error is not None and declared is None:
            self._end_failed(task, task.failure(error))
            return
        if task.caller is None:
            return
        arguments = task.decoded_arguments()
        if error is not None and declared is not None:
            raised, encode = True, partial(encode_raised, declared, error)
        else:
            raised, encode = False, partial(self.handler_runs.result, task.handler, value)
        try:
            encoded = self.handler_runs.encoded(task.handler, arguments, encode)
        except HandlerError as problem:
            self._end_failed(task, problem)
            return
        try:
            self.answers.answer(task.handler, task.caller, task.call_number, raised, encoded)
        except UsageError as problem:  # it has a handle that can't be passed on
            self._end_failed(task, task.failure(problem))

    def _end_cancelled(self, task: Task, cancelled: Cancelled) -> None:
        """As it was told to: no failure of its own, and no dead letter. Who waits is told."""
        task.drop_pending()
        if task.caller is not None:
            self._answer_cancelled(task.handler, task.caller, task.call_number, cancelled.reason)

    def _answer_cancelled(self, handler: Handler[Any, Any], caller: str, call_number: int, reason: str) -> None:
        context = self.context
        where = reference(context.instance_name, context.sequence_id, context.message_index)
        self.answers.answer(handler, caller, call_number, True, encode_failed(CANCELLED, reason, where))

    def _end_failed(self, task: Task, error: HandlerError) -> None:
        """An async handler has changed no state by itself, so there is nothing to undo: who waits is told."""
        failure = error.failure
        if failure is None:
            raise error
        task.drop_pending()
        failed = replace(failure, policy="keep", task=task.number)
        verdict = verdict_on(error, failed, task.caller, forked(task.handler.method_id, task.arguments))
        verdict = self.handler_runs.verdicts.get(verdict.key, verdict)
        if not self.handler_runs.tell(verdict):
            raise error
        if task.caller is not None:
            self.answers.answer_verdict(verdict, Caller(task.caller, task.call_number, task.handler.method_id))

    def drain(self) -> None:
        """Let all go on that was woken. Raises HandlerError."""
        queue = self._queue
        while queue:
            queue.popleft()()

    @contextmanager
    def failing_waits(self, verdict: Verdict) -> Iterator[None]:
        """Whoever is woken meanwhile finds that what it waited for has failed, as ``verdict`` says."""
        where = reference(self.context.instance_name, verdict.sequence_id, verdict.message_index)
        self._failed_wait = encode_failed(verdict.type_name or verdict.kind.name.capitalize(), verdict.text, where)
        try:
            yield
        finally:
            self._failed_wait = None

    def _resolve(self, operation: Any, raised: bool, value: bytes) -> None:
        if not operation.is_over:
            if self._failed_wait is not None:
                raised, value = True, self._failed_wait
            task = operation.task
            task.resolve(operation, raised, value, self.context.record_time_ns or 0)
            if task.is_done:
                self._end(task)

    def _signalled(self, event: Event, value: bytes) -> None:
        self._resolve(event, False, value)

    def answered(self, kind: RpcKind, data: bytes) -> None:
        """An answer has come. One that nobody waits for any more is left alone. Raises HandlerError."""
        try:
            if kind is _RETURNED_VALUE:
                returned = _decode_value(data)
                number, value = returned.number, bytes(returned.value)
            elif kind is _RETURNED_NOTHING:
                number, value = _decode_nothing(data).number, NOTHING
            else:
                number_raw, *rest = _take_call_number(data)
                number, value = msgspec.msgpack.decode(number_raw, type=int), encoder.encode(rest)
        except (msgspec.DecodeError, ValueError, IndexError, UnicodeDecodeError) as error:
            raise self._wrong_answer(Cause.UNREADABLE, f"an answer that can't be read: {error}") from None
        if (call := self.calls.get(number)) is not None:
            if not self._was_called(call):
                if self._failed_wait is None:
                    text = f"an answer of {self.context.source!r} to call {number}, which went to somebody else"
                    raise self._wrong_answer(Cause.SENDER, text)
                return
            if (kind is _RAISED or self._may_hold_handles(call)) and MARK in data and self._failed_wait is None:
                self.context.nodes.accounts.arrived(data)
            self._resolve(call, kind is _RAISED, value)
            if self._queue:
                self.drain()
        elif MARK in data and self._failed_wait is None:
            self.context.nodes.accounts.not_taken(data)

    def expelled(self, scope: Scope, member: str, source: str, value: bytes) -> None:
        """``member`` has been expelled, says ``source``, another member, behind all of its answers before that: who
        waits for the answer of ``member`` to a call of a multicast gets ``value`` in its place. What ``source`` has not
        answered was cancelled, and has ``value`` as all of its answers."""
        done: set[int] = set()
        for call in list(self.calls.values()):
            if not isinstance(call, MulticastCall) or call.scope is None or not call.scope.reaches(*astuple(scope)):
                continue
            of = {one.to: one for one in call.all_of_it}
            if member not in of or call.number in done:
                continue
            is_cancelled = source not in of or of[source].number in self.calls
            ended = of.values() if is_cancelled else [of[member]]
            for one in ended:
                if self.calls.get(one.number) is one:
                    done.add(one.number)
                    self._queue.append(partial(self._resolve, one, False, value))

    def _called(self, number: int) -> str | None:
        """To whom the open call of that number went."""
        call = self.calls.get(number)
        return None if call is None else call.target.destination

    def _was_called(self, call: Call) -> bool:
        """Whether the answer that is handled is from whom ``call`` went to. What the instance says itself is."""
        source = self.context.source
        return not source or source == call.target.destination

    def _may_hold_handles(self, call: Call) -> bool:
        return call.target.codec.result_may_hold_handles

    def _wrong_answer(self, cause: Cause, text: str) -> HandlerError:
        context = self.context
        return HandlerError(
            f"record {context.sequence_id}, message {context.message_index}: {text}; the app stops",
            context.sequence_id,
            context.message_index,
            refusal("an answer", None, cause, text),
        )

    def effect_done(self, result: EffectResult) -> None:
        """An effect has returned or raised. Raises HandlerError."""
        if (effect := self.effects.take(result)) is not None:
            self._resolve(effect, result.raised, bytes(result.value))
            self.drain()

    # --- what an operator orders ------------------------------------------------------------------------------------

    def ordered(self, order: Order) -> None:
        """Raises HandlerError."""
        self.orders.obey(order)
        self.drain()

    def _expel(self, group: str, member: str) -> tuple[bool, str]:
        expel = getattr(self.instance, "_immortal_expel", None)
        if expel is None:
            return False, f"{self.definition.name} takes part in no groups"
        found: tuple[bool, str] = expel(group, member)
        return found

    def cancel_call(self, caller: str, number: int, cancelled: int, reason: str) -> None:
        """``caller`` cancels an earlier call of its own, and is told whether that still waited. Raises HandlerError."""
        calls = self._by_call.get((caller, cancelled), [])
        queued = self.limits.queued.values()
        waits = next((one.number for one in queued if (one.caller, one.call_number) == (caller, cancelled)), None)
        reason = reason[:REASON_CHARACTERS_MAX]
        if found := bool(calls) or waits is not None:
            if calls:
                self._cancel(calls[0], reason, f"its caller, {caller or 'the instance itself'}")
            elif waits is not None:
                self._give_up(waits, reason)
        self.answers.answer_value(Caller(caller, number, CANCEL_CALL_METHOD_ID), found)
        self.drain()

    def _cancel(self, task: Task, reason: str, who: str) -> None:
        """Raises HandlerError."""
        task.cancel(reason, who, self.context.record_time_ns or 0)
        if task.is_done:
            self._end(task)

    def _give(self, event: Event, value: bytes) -> None:
        """What ``event`` waits for. Raises HandlerError."""
        self._resolve(event, False, value)

    # --- time -------------------------------------------------------------------------------------------------------

    def told_time(self, time_ns: int, decided: Mapping[int, int], jumped_ns: int = 0) -> None:
        """The log says what time it is: timers and schedules up to then are due. Raises HandlerError.

        ``decided``: when schedules by cron expressions are due next. ``jumped_ns``: by how much the clock was stepped.
        """
        if jumped_ns:
            self.clock.jumped(time_ns, jumped_ns, self._scheduled)
        if self._told_ns is not None and time_ns >= self._told_ns:
            self._told_ns = None
        for handler in self.clock.take_schedules(time_ns, decided, self._scheduled):
            self.fork("", handler)()
        for due in self.clock.take_timers(time_ns):
            if isinstance(due, Timer):
                self._queue.append(partial(self._resolve, due, False, NOTHING))
            else:
                self._queue.append(partial(self._expire, due))
        self.drain()

    @property
    def next_due_ns(self) -> int | None:
        """When :meth:`tell_time` is to be called; None: not yet, or never."""
        return None if self._told_ns is not None else self.clock.next_due_ns(self._scheduled)

    def tell_time(self, time_ns: int) -> None:
        """Put the time into the log, as an impulse to oneself."""
        self._told_ns = time_ns
        decided = self.clock.decide(time_ns, self._scheduled)
        self.context.outbox.impulses.append_own(_write_time, (time_ns, decided) if decided else (time_ns,))

    def tell_jump(self, time_ns: int, jumped_ns: int) -> None:
        """Put it into the log that the clock was stepped by ``jumped_ns``, to ``time_ns``."""
        # What sleeps may be in records that are still to come.
        if self._scheduled or any(handler.is_async for handler in self.definition.handlers.values()):
            decided = self.clock.decide(time_ns, self._scheduled)
            self.context.outbox.impulses.append_own(_write_time, (time_ns, decided, jumped_ns))
