"""The ``async def`` handlers of an instance that wait, what they wait for, and the answers to those who wait for it.

All of it follows from the log: a message starts a handler, answers a call, tells the time or runs a ``def`` handler
that signals an event. Each handler goes on until it waits again before the next one does, first woken first.

A call that waits for an answer has the RPC type ASYNC, and [caller's name ("" is oneself), number of the call,
arguments ...] as its arguments. The answer goes to the caller with the same method ID: RETURNED_VALUE [number, value],
RETURNED_NOTHING [number] or RAISED [number, name of the exception, its arguments, its attributes].
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from appsdk.calls.codec import ArgumentCodec, encoder
from appsdk.calls.context import QUERY_RUNS, Context
from appsdk.calls.failures import answer_of, encode_failed, failure_of, forked, reference, refusal, verdict_on
from appsdk.calls.outbox import Send, make_writer
from appsdk.calls.report import handler_failed
from appsdk.calls.rules import Rules
from appsdk.errors import AS_RPC, HandlerError, QueryError, UsageError
from appsdk.handlers.decorators import CLOCK_METHOD_ID, Handler
from appsdk.handlers.definition import Peer
from appsdk.handlers.proxy import make_fork
from appsdk.handlers.queries import Queries
from appsdk.state.journal import WAYS_OUT, JournalError, SavedTask, SavedTasks, declared_name, encode_raised
from appsdk.waiting.clock import Clock
from appsdk.waiting.effects import EffectResult, WaitingEffects
from appsdk.waiting.events import Events
from appsdk.waiting.operations import NOTHING, Call, Event, Operation, Target
from appsdk.waiting.task import Task
from appsdk.waiting.task_self import encode_signal, event_decoder
from appsdk.waiting.waits import Fiber
from protocol.client import CLIENTS, Caller
from protocol.messages import RpcKind, RpcType
from protocol.verdicts import Cause, MessageKey, Verdict

if TYPE_CHECKING:
    from appsdk.handlers.definition import Definition


class _ReturnedValue(msgspec.Struct, array_like=True, gc=False):
    number: int  # of the call
    value: msgspec.Raw


class _ReturnedNothing(msgspec.Struct, array_like=True, gc=False):
    number: int


_take_call_number = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_RETURNED_VALUE, _RETURNED_NOTHING, _RAISED = RpcKind.RETURNED_VALUE, RpcKind.RETURNED_NOTHING, RpcKind.RAISED
# ... found faster than an enum's attributes
_decode_value = msgspec.msgpack.Decoder(_ReturnedValue).decode
_decode_nothing = msgspec.msgpack.Decoder(_ReturnedNothing).decode
_write_time = make_writer("the clock", CLOCK_METHOD_ID, RpcType.IMPULSE)


class Tasks:
    """Those of one instance. ``definition`` and ``instance`` are of the class that runs (see :meth:`use`)."""

    definition: Definition

    def __init__(self, context: Context) -> None:
        self.context = context
        self.instance: Any = None
        self.ready: deque[Fiber[Any]] = deque()
        self.calls: dict[int, Call] = {}
        self.clock = Clock()
        self.effects = WaitingEffects(context)
        self.queries = Queries(context)
        self.events = Events(lambda action: self._queue.append(action), self._signalled)
        self._queue: deque[Callable[[], None]] = deque()
        self._tasks: dict[int, Task] = {}
        self._next_number = 1
        self._failed_wait: bytes | None = None  # what comes in place of all that is waited for
        self._told_ns: int | None = None  # the time in an impulse that is on its way
        self._scheduled: list[Handler[Any, Any]] = []
        self._senders: dict[tuple[str, int, RpcKind], Send] = {}
        self._forks: dict[tuple[str, int], Callable[..., None]] = {}
        self.members: dict[str, Target | Peer] = {}  # what handlers have found of their class, by name
        self.peer_targets: dict[tuple[Peer, str], Target] = {}
        self._event_decoders: dict[Any, Callable[[bytes], Any]] = {}
        self.verdicts: Mapping[MessageKey, Verdict] = {}  # those that are known; the dispatcher's
        self.tell: Callable[[Verdict], bool] = lambda verdict: False  # of one more; False: it can't fail alone

    def use(self, definition: Definition, instance: Any) -> None:
        """From here on this class's code runs. Raises JournalError where it is not what those that wait ran."""
        saved = self.save()
        self.definition = definition
        self.members.clear()
        self.peer_targets.clear()
        self.instance = instance
        self.queries.use(definition.state())
        self._scheduled = [handler for handler in definition.handlers.values() if handler.schedule]
        if saved is not None:
            self.restore(saved)

    # --- what waits -------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        return len(self._tasks)

    def draw_number(self, operation: Operation | None = None) -> int:
        """The next one, for ``operation`` or (None) for a handler that starts."""
        number = self._next_number
        self._next_number = number + 1
        return number

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
        for one in saved.tasks:
            self._tasks[one.number] = Task.rebuild(self, self._handler_of(one), one)
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

    def codec(self, handler: Handler[Any, Any]) -> ArgumentCodec:
        return self.definition.codec(handler)

    @property
    def signals_have_limit(self) -> bool:
        return self.context.sites.rules is not Rules.FIRST

    def target(self, destination: str, handler: Handler[Any, Any], called: Handler[Any, Any]) -> Target:
        return Target(destination, handler, called, self.codec(called))

    def event_decoder(self, kind: Any) -> Callable[[bytes], Any]:
        try:
            if (decode := self._event_decoders.get(kind)) is None:
                decode = self._event_decoders[kind] = event_decoder(kind)
        except TypeError:  # an annotation that can't be a key
            decode = event_decoder(kind)
        return decode

    # --- what handlers do -------------------------------------------------------------------------------------------

    def fork(self, destination: str, handler: Handler[Any, Any]) -> Callable[..., None]:
        key = (destination, handler.method_id)
        if (fork := self._forks.get(key)) is None:
            fork = self._forks[key] = make_fork(self.context, destination, handler)
        return fork

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

    def run_handler(
        self, handler: Handler[Any, Any], arguments: tuple[Any, ...], *, waits: bool = True
    ) -> tuple[bool, bytes]:
        """Run a ``def`` handler for somebody who ``waits``: (whether it raised, what for them). Raises HandlerError."""
        try:
            if handler.is_query:
                value = self.queries.run(handler, self.instance, *arguments)
            else:
                value = handler.function(self.instance, *arguments)
        except (Exception, SystemExit) as error:
            if (declared := declared_name(handler.raises, error)) is None:
                raise self._failed(handler, arguments, error) from error
            if not waits:
                return True, NOTHING
            return True, self._encoded(handler, arguments, partial(encode_raised, declared, error))
        if not waits:
            return False, NOTHING
        try:
            return False, self._result(handler, value)
        except Exception as error:
            raise self._unsendable(handler, arguments, error) from error

    def _result(self, handler: Handler[Any, Any], value: Any) -> bytes:
        """What goes to who waits: checked here, so that what does not fit is this handler's failure, not theirs."""
        data = encoder.encode(value)
        codec = self.codec(handler)
        if value is not None or not codec.returns_nothing:
            codec.decode_result(data)
        return data

    def _encoded(self, handler: Handler[Any, Any], arguments: tuple[Any, ...], encode: Callable[[], bytes]) -> bytes:
        try:
            return encode()
        except Exception as error:
            raise self._unsendable(handler, arguments, error) from error

    def _unsendable(self, handler: Handler[Any, Any], arguments: tuple[Any, ...], error: Exception) -> HandlerError:
        name = handler.function.__qualname__
        problem = TypeError(f"what {name} returned or raised can't be sent to whoever waits for it: {error}")
        return self._failed(handler, arguments, problem)

    def _failed(self, handler: Handler[Any, Any], arguments: tuple[Any, ...], error: BaseException) -> HandlerError:
        context = self.context
        name = handler.function.__qualname__
        made = handler_failed(name, arguments, error, context.sequence_id, context.message_index)
        if (policy := self.definition.policy(handler)) != "stop":
            made.failure = failure_of(
                policy, name, handler.method_id, error, shares_trace=self.definition.share_tracebacks
            )
        made.__cause__ = error
        return made

    def send_call(self, call: Call, arguments: tuple[Any, ...]) -> None:
        """Raises UsageError."""
        target = call.target
        caller = self.context.instance_name if target.destination else ""
        if target.destination and not caller:
            raise UsageError(
                f"{call}: the log does not say what this instance is called, so the answer could not come back: a log "
                f"that an older version of the coordinator has begun; start the instance with a new log"
            )
        if (send := target.send) is None:
            send = target.send = self._sender(target.destination, target.handler, RpcKind.CALL)
        send((caller, call.number, *arguments))

    def _sender(self, destination: str, handler: Handler[Any, Any], kind: RpcKind) -> Send:
        key = (destination, handler.method_id, kind)
        if (send := self._senders.get(key)) is None:
            outbox, name = self.context.outbox, handler.function.__qualname__
            made: Send = outbox.make_sender(destination, name, handler.method_id, kind)
            send = self._senders[key] = made
        return send

    def _answer(self, handler: Handler[Any, Any], caller: str, number: int, raised: bool, value: bytes) -> None:
        front: tuple[Any, ...] = (number,)
        if caller.startswith(CLIENTS):  # all answers to clients go one way, and say to whom
            caller, front = CLIENTS, (caller, number)
        if raised:
            name, arguments, attributes = msgspec.msgpack.decode(value, type=list[msgspec.Raw])
            self._sender(caller, handler, RpcKind.RAISED)((*front, name, arguments, attributes))
        elif value == NOTHING:
            self._sender(caller, handler, _RETURNED_NOTHING)(front)
        else:
            self._sender(caller, handler, _RETURNED_VALUE)((*front, msgspec.Raw(value)))

    def answer_verdict(self, verdict: Verdict, caller: Caller) -> None:
        """Its call has failed: tell ``caller`` how."""
        to = caller.name
        front: tuple[Any, ...] = (caller.number,)
        if to.startswith(CLIENTS):
            to, front = CLIENTS, (caller.name, caller.number)
        send = self.context.outbox.make_sender(to, "the answer to a call", caller.method_id, RpcKind.RAISED)
        send((*front, *answer_of(verdict, self.context.instance_name)))

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
                self.run_handler(handler, arguments, waits=False)
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
            self._answer(handler, caller, number, *self.run_handler(handler, arguments))
            self.drain()

        return run

    def _start(
        self, handler: Handler[Any, Any], arguments: tuple[Any, ...], caller: str | None, call_number: int
    ) -> None:
        number = self.draw_number()
        time_ns = self.context.record_time_ns or 0
        task = self._tasks[number] = Task(
            self, handler, number, encoder.encode(arguments), caller, call_number, time_ns
        )
        task.advance()
        if task.is_done:
            self._end(task)
        self.drain()

    def _end(self, task: Task) -> None:
        del self._tasks[task.number]
        value, error = task.result()
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
            raised, encode = False, partial(self._result, task.handler, value)
        try:
            encoded = self._encoded(task.handler, arguments, encode)
        except HandlerError as problem:
            self._end_failed(task, problem)
            return
        self._answer(task.handler, task.caller, task.call_number, raised, encoded)

    def _end_failed(self, task: Task, error: HandlerError) -> None:
        """An async handler has changed no state by itself, so there is nothing to undo: who waits is told."""
        failure = error.failure
        if failure is None:
            raise error
        for operation in list(task.pending.values()):
            operation.cancel()
        failed = replace(failure, policy="keep", task=task.number)
        verdict = verdict_on(error, failed, task.caller, forked(task.handler.method_id, task.arguments))
        verdict = self.verdicts.get(verdict.key, verdict)
        if not self.tell(verdict):
            raise error
        if task.caller is not None:
            self.answer_verdict(verdict, Caller(task.caller, task.call_number, task.handler.method_id))

    def run_step(
        self, task: Task, step: int, handler: Handler[Any, Any], arguments: tuple[Any, ...]
    ) -> tuple[bool, bytes]:
        """A ``def`` handler that ``task`` awaits: as :meth:`run_handler`. One that has failed is not called again."""
        context = self.context
        key = context.sequence_id, context.message_index, task.number, step
        if (verdict := self.verdicts.get(key)) is not None and verdict.skips:
            where = reference(context.instance_name, verdict.sequence_id, verdict.message_index)
            return True, encode_failed(verdict.type_name, verdict.text, where)
        try:
            return self.run_handler(handler, arguments)
        except HandlerError as error:
            if error.failure is None:
                raise
            error.failure = failure = replace(error.failure, task=task.number, step=step)
            if failure.policy != "keep":
                raise
            if not self.tell(verdict_on(error, failure, None, b"")):
                raise
            where = reference(context.instance_name, error.sequence_id, error.message_index)
            return True, encode_failed(failure.type_name, failure.text, where)

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
            self._resolve(call, kind is _RAISED, value)
            if self._queue:
                self.drain()

    def _was_called(self, call: Call) -> bool:
        """Whether the answer that is handled is from whom ``call`` went to. What the instance says itself is."""
        source = self.context.source
        return not source or source == call.target.destination

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
        for timer in self.clock.take_timers(time_ns):
            self._queue.append(partial(self._resolve, timer, False, NOTHING))
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
