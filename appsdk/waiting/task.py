"""Run of an ``async def`` handler from its call to its end, with its journal, and the rebuild over that."""

from __future__ import annotations

import asyncio
import contextlib
import random
from asyncio import events
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from types import CoroutineType, FrameType
from typing import Any, NoReturn
from uuid import UUID

from immortal.appsdk.calls.codec import encoder
from immortal.appsdk.calls.context import datetime_of
from immortal.appsdk.calls.failures import encode_failed, text_of
from immortal.appsdk.calls.user_code import (
    ControlFlowSignal,
    describe_arguments,
    describe_encoded,
    is_user_failure,
    place_of,
    running,
)
from immortal.appsdk.errors import AppError, HandlerError, UsageError
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.handlers.log import HandlerLog
from immortal.appsdk.state.journal import (
    CANCEL,
    CANCEL_STEP,
    WAYS_OUT,
    Entry,
    JournalError,
    SavedTask,
    describe_operation,
)
from immortal.appsdk.state.schema import StateSchema
from immortal.appsdk.waiting.host import Host
from immortal.appsdk.waiting.loop import raise_signal
from immortal.appsdk.waiting.operations import MISFITS, LoopTimer, MulticastCall, Operation, Owner, Read, Rebuild
from immortal.protocol import decoding


class _Ending(ControlFlowSignal):
    """Signal to end a handler. No coroutine must catch it."""

    def __init__(self, error: Any) -> None:
        super().__init__(str(error))
        self.error = error


class Stopped(_Ending):
    """Raised to stop the app with ``error``, an AppError."""


class Abandoned(_Ending):
    """Raised to end the handler with ``error``, whatever its coroutines do about it."""


class ContinueAs(ControlFlowSignal):
    """Raised to begin the handler again with ``arguments`` and an empty journal. No coroutine must catch it."""

    def __init__(self, arguments: bytes) -> None:
        super().__init__("continue_as")
        self.arguments = arguments


_NO_RESULTS: dict[int, Entry] = {}
_IMMUTABLE = (int, float, complex, str, bytes, type(None), datetime, timedelta, Decimal, UUID)


def _explained(error: BaseException) -> BaseException:
    """Return ``error``, or a clearer one for asyncio.gather([a, b])."""
    trace = error.__traceback__ if isinstance(error, TypeError) else None
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    code = None if trace is None else trace.tb_frame.f_code
    if code is None or (code.co_name, code.co_filename) != _GATHER:
        return error
    text = "asyncio.gather takes each awaitable as an argument of its own, and no list: asyncio.gather(*[...])"
    return TypeError(f"{text} ({error})").with_traceback(error.__traceback__)


_GATHER = asyncio.gather.__name__, asyncio.gather.__code__.co_filename


def _is_of_user(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] not in ("asyncio", "immortal")


class Task(Owner):
    """Run of an ``async def`` handler: the asyncio loop of its coroutines, and the journal of their results.

    ``call``: the call that began it. ``number``: unique in the life of the instance. ``time_ns``: the value of
    ``immortal.now()``. ``main``: the asyncio task of the handler itself.
    """

    __slots__ = (
        "_abandoned",
        "_call_text",
        "_continuation",
        "_copies",
        "_error",
        "_is_detached",
        "_is_running",
        "_rebuild",
        "_resumed_count",
        "_steps_count",
        "_stopped",
        "_streams",
        "_variables",
        "arguments",
        "call_number",
        "caller",
        "entries",
        "handler",
        "key",
        "origin_results",
        "pending",
        "runs_local_step",
        "started_by",
        "started_ns",
        "tasks",
        "time_ns",
    )

    def __init__(self, tasks: Host, handler: Handler[Any, Any], call: SavedTask, time_ns: int) -> None:
        super().__init__(tasks.ready)
        self.tasks = tasks
        self.handler = handler
        self.number, self.generation = call.number, call.generation
        self.arguments = call.arguments
        self.caller, self.call_number = call.caller, call.call_number
        self.started_by = call.sequence_id, call.message_index
        self.time_ns = time_ns
        self._stopped: Stopped | None = None
        self._abandoned: Abandoned | None = None
        self._rebuild: Rebuild | None = None
        self._is_running = self._is_detached = False
        self._call_text = ""
        self._streams: dict[tuple[bytes, bytes], random.Random] | None = None
        self.origin_results = _NO_RESULTS
        self._start_run()

    def _start_run(self) -> None:
        self.started_ns = self.time_ns
        self.entries: list[Entry] = []
        self.pending: dict[int, Operation] = {}
        self._steps_count = 0
        self._resumed_count = 0
        self._continuation: ContinueAs | None = None
        self._copies: list[tuple[Read, Any, bytes]] | None = None  # of the state, read in this turn
        self.runs_local_step = False
        self._error: BaseException | None = None  # with it the handler ends, whatever its coroutines do
        self.remaining, self.must_end = None, False
        self.futures_count = self.tasks_count = 0
        arguments = self.decoded_arguments()
        self.key = arguments[0] if self.handler.is_keyed else None
        coroutine = self.handler.call(self.tasks.make_self(self), *arguments)
        self._variables = self.tasks.context.run_contexts.new()
        self._variables.run(running.set, self)
        with self._as_running_loop():
            self.main = self.make_task(coroutine, self.name, self._variables)

    @contextlib.contextmanager
    def _as_running_loop(self) -> Iterator[None]:
        outside, outer = events._get_running_loop(), self.ready.enter(self)
        try:
            yield
        finally:
            self.ready.loop = outer
            events._set_running_loop(outside)

    @property
    def name(self) -> str:
        return self.handler.function.__qualname__

    @property
    def method_id(self) -> int:
        return self.handler.method_id

    @property
    def is_done(self) -> bool:
        return self._error is not None or (self.remaining is not None and all(task.done() for task in self.remaining))

    @property
    def cancelled(self) -> list[Entry]:
        """Cancellations after which the handler continued: each has the reason, and who ordered it."""
        return [entry for entry in self.entries if entry.step == CANCEL_STEP]

    @property
    def is_silent(self) -> bool:
        """True if operations must not be carried out: they were done before, or Python clears the coroutine away."""
        return self._rebuild is not None or not self._is_running

    @property
    def instance_name(self) -> str:
        return self.tasks.context.instance_name

    def decoded_arguments(self) -> tuple[Any, ...]:
        return self.tasks.codec(self.handler).decode(self.arguments)

    def arguments_text(self) -> str:
        """Return the handler's arguments as text, without secrets."""
        return describe_arguments(self.decoded_arguments(), self.handler.signature.parameters, self.name)

    @property
    def described_call(self) -> str:
        if not self._call_text:
            names = self.handler.signature.parameters
            self._call_text = f"{self.name}{describe_encoded(self.arguments, names, self.name, named=False)}"
        return self._call_text

    # --- running ----------------------------------------------------------------------------------------------------

    def advance(self, wake: Callable[..., object] | None = None, arguments: tuple[Any, ...] = ()) -> None:
        """Call ``wake``, which can wake coroutines, and run until all of them wait, or the handler is done. Raises
        HandlerError (of a step), JournalError."""
        while True:
            self._is_running = True
            before, self.tasks.running = self.tasks.running, self
            try:
                self.run_ready(wake, arguments)
                if self.main.done():
                    raise_signal(self.main)
                if self._copies:
                    self._check_copies()
            except ContinueAs:
                pass
            except Stopped as stopped:
                self.stop_app(stopped.error)
            except Abandoned as abandoned:
                self.abandon(abandoned.error)
            except BaseException as error:
                if not is_user_failure(error):
                    raise
                self.abandon(error)
            finally:
                self._streams, self._is_running, self.tasks.running = None, False, before
            if self._stopped is not None:
                self.ready.clear()
                raise self._stopped.error
            if self._abandoned is not None:
                self._end_with(self._abandoned.error)
                return
            if self._continuation is not None:
                wake, arguments = self._start_over, (self._continuation,)
            elif self.main.done() and self.remaining is None:
                wake, arguments = self.end_subtasks, ()
            else:
                break
        if not self.pending and not self.is_done and self._rebuild is None:
            users = [[one for one in frames if _is_of_user(one)] or frames for frames in self.frames()]
            where = ", ".join(f"{one[-1].f_code.co_qualname} ({place_of(one[-1])})" for one in users)
            self._end_with(
                UsageError(
                    f"its coroutines wait for each other, and for nothing that could come: {where}; a lock, queue or "
                    f"event of asyncio is of one handler: between handlers use limit=1, or an immortal.event"
                )
            )

    def _end_with(self, error: BaseException) -> None:
        self._error = error
        self._close()

    def _close(self) -> None:
        with self._as_running_loop():
            for task, variables in {self.main: self._variables, **self.subtasks}.items():
                if not task.done():
                    coroutine: Any = task.get_coro()
                    with contextlib.suppress(BaseException):  # errors in its clean-up do not matter any more
                        variables.run(coroutine.close)
        self.drop_pending()
        self.subtasks = {}
        self.unawaited = {}

    def _start_over(self, continuation: ContinueAs) -> None:
        self._close()
        self.arguments = continuation.arguments
        self._call_text = ""
        self.origin_results = _NO_RESULTS
        self.generation += 1
        self._start_run()
        self.tasks.note_start(self)

    def resolve(self, operation: Operation, raised: bool, value: bytes, time_ns: int) -> None:
        """Resume with the result of ``operation``. Raises HandlerError."""
        self.time_ns = time_ns  # which goes into the journal
        self._resume(operation, self._journal_outcome(operation, raised, value))

    def _resume(self, operation: Operation, outcome: tuple[Any, ...]) -> None:
        self.forget(operation)
        self._resumed_count += 1
        self.advance(operation.complete, outcome)

    def cancel(self, reason: str, canceller: str, time_ns: int) -> None:
        """Raise CancelledError where the handler waits, and run it. Raises HandlerError."""
        self._cancel(self.cancellation_entry(reason, canceller, time_ns))

    @staticmethod
    def cancellation_entry(reason: str, canceller: str, time_ns: int) -> Entry:
        return Entry(CANCEL_STEP, CANCEL, 0, True, encoder.encode((reason, canceller)), time_ns)

    def _cancel(self, entry: Entry) -> None:
        """Cancel the handler. The entry is in the journal among the results, at its place."""
        reason, _ = self.cancellation(entry)
        self.time_ns = entry.time_ns
        self._resumed_count += 1
        self.entries.append(entry)
        self.advance(self._cancel_tasks, (reason,))

    def _cancel_tasks(self, reason: str) -> None:
        if not self.main.cancel(reason):  # it has ended, and its subtasks have not
            for task in list(self.subtasks):
                task.cancel(reason)

    @staticmethod
    def cancellation(entry: Entry) -> tuple[str, str]:
        """Return (the reason, who ordered it) of a cancellation entry."""
        return decoding.decode(entry.value, type=tuple[str, str])

    def close_leftovers(self) -> None:
        """End what an ended handler has left: tasks of its last moment, and pending operations."""
        if self.subtasks or self.pending:
            self._close()

    def drop_pending(self) -> None:
        """Forget all operations that the handler waits for: none of its code continues."""
        with self._as_running_loop():
            for operation in list(self.pending.values()):
                operation.cancel()
        self.ready.clear()

    def result(self) -> tuple[Any, BaseException | None]:
        """Return (value, None) or (None, error). A future that was never awaited is an error too."""
        if self._error is not None:
            return None, self._error
        try:
            value = self.main.result()
        except BaseException as error:
            return None, _explained(error)
        for future in self.unawaited.values():
            return None, UsageError(
                f"{future} was made and never awaited, so it never began: write 'await' in front of it (or "
                f".fork(...), if nobody is to wait for it)"
            )
        return value, None

    @property
    def cancelled_with(self) -> str | None:
        """Reason of the cancellation that ended the handler; None: it has not ended, or not by that."""
        if self._error is not None or not self.main.cancelled() or not self.cancelled:
            return None
        return self.cancellation(self.cancelled[-1])[0]

    def start_timer(self, due_ns: int, handle: asyncio.TimerHandle) -> LoopTimer:
        alarm = LoopTimer(self, due_ns, handle)
        alarm.begin()
        return alarm

    # --- steps ------------------------------------------------------------------------------------------------------

    def begin(self, operation: Operation) -> None:
        """Give ``operation`` its step number, and do it, or take it from the journal. Raises Stopped, Abandoned."""
        if (ending := self._stopped or self._abandoned) is not None:
            raise ending
        if not self._is_running:  # a 'finally' that Python runs when it clears the coroutine away
            raise GeneratorExit
        self._steps_count += 1
        operation.step = self._steps_count
        if self._rebuild is not None:
            self._repeat(operation, self._rebuild)
            return
        if self.origin_results and self._complete_from_origin(operation):
            return
        if not operation.is_immediate:
            operation.number = self.tasks.draw_number(operation)
            self._wait_for(operation)
        try:
            outcome = self.tasks.perform(operation)
        except HandlerError as error:
            raise self.stop_app(error) from error
        except BaseException as error:
            if not is_user_failure(error):
                raise
            raise self.abandon(error) from error
        if outcome is not None:
            operation.complete(*self._journal_outcome(operation, *outcome))

    def _complete_from_origin(self, operation: Operation) -> bool:
        """Complete ``operation`` with the result that this step of the origin had; return True if there is one. Only
        while the message is handled that began this handler: so no checkpoint has to keep such results."""
        context = self.tasks.context
        entry = self.origin_results.pop(operation.step, None)
        if entry is None or entry.what != operation.what or isinstance(operation, MulticastCall):  # sent with others
            return False
        if self.started_by != (context.sequence_id, context.message_index):
            return False
        if operation.is_immediate:
            operation.complete(*self._journal_outcome(operation, entry.raised, entry.value))
        else:
            self._wait_for(operation)
            self.tasks.defer(partial(self.tasks.resolve, operation, entry.raised, entry.value))
        return True

    def _journal_outcome(self, operation: Operation, raised: bool, value: bytes) -> tuple[Any, ...]:
        """Put a result into the journal. If it does not fit its declaration, its sender has failed."""
        try:
            outcome = operation.outcome(raised, value)
        except MISFITS as error:
            raised, value = True, encode_failed(type(error).__name__, f"what came does not fit: {text_of(error)}", "")
            outcome = operation.outcome(raised, value)
        self.entries.append(Entry(operation.step, operation.what, operation.detail, raised, value, self.time_ns))
        return outcome

    def _repeat(self, operation: Operation, rebuild: Rebuild) -> None:
        try:
            rebuild.check(operation)
            if not operation.is_immediate:
                self._wait_for(operation)
                return
            entry = rebuild.take_entry(operation)
            self.entries.append(entry)
            outcome = rebuild.outcome(operation, entry)
        except JournalError as error:
            raise self.stop_app(error) from None
        operation.complete(*outcome)

    def _wait_for(self, operation: Operation) -> None:
        self.pending[operation.step] = operation
        operation.since_ns = self.time_ns
        if operation.number:
            self.tasks.register(operation)

    def detach(self, *, closes: bool = True) -> None:
        """Remove the handler from its place: actions of its coroutines when they are closed have no effect."""
        self._is_detached = True
        if closes:
            self._close()

    def forget(self, operation: Operation) -> None:
        if self._is_detached:
            return
        self.pending.pop(operation.step, None)
        if operation.number:
            self.tasks.unregister(operation)

    def continue_as(self, arguments: bytes) -> NoReturn:
        if self._rebuild is not None:
            raise self.stop_app(self._rebuild.mismatch(self._steps_count + 1, self._rebuild.next_entry, "continue_as"))
        self._continuation = ContinueAs(arguments)
        self.must_end = True
        raise self._continuation

    def abandon(self, error: BaseException) -> Abandoned:
        """End the handler with ``error``, whatever its coroutines do about it; return the signal to raise."""
        self.must_end = True
        self._abandoned = self._abandoned or Abandoned(error)
        return self._abandoned

    def stop_app(self, error: AppError) -> Stopped:
        """Stop the app with ``error``, whatever the coroutines do about it; return the signal to raise."""
        self.must_end = True
        self._stopped = self._stopped or Stopped(error)
        return self._stopped

    def read(self, schema: StateSchema, name: str) -> Any:
        """Return a copy of an attribute, which the journal keeps. Raises UsageError, StateError."""
        operation = Read(self, schema, name)
        operation.begin()
        value = operation.result()
        if not isinstance(value, _IMMUTABLE):
            self._copies = self._copies or []
            self._copies.append((operation, value, schema.encode_attribute(name, value)))
        return value

    def _check_copies(self) -> None:
        """Check that the handler has not changed copies of the state that it read; otherwise it fails."""
        copies, self._copies = self._copies, None
        for operation, value, data in copies or ():
            name = operation.name
            if operation.schema.encode_attribute(name, value) != data:
                self.abandon(
                    UsageError(
                        f"{self.name} has changed what it read as self.{name}: that is a copy, so the state would not "
                        f"have it: change it in a step, await immortal.step(<function>), or in a 'def' handler"
                    )
                )

    # --- values that differ from run to run -------------------------------------------------------------------------

    def now_ns(self) -> int:
        if not self.time_ns:
            raise UsageError("the records have no time: immortal.now() has no answer that a replay would repeat")
        return self.time_ns

    def random_at(self, frame: FrameType, method: str | None, purpose: bytes = b"random") -> random.Random:
        """Return a random stream like Context.random_at; the run between two waits counts like a message there."""
        context = self.tasks.context
        if self._streams is None:
            self._streams = {}
        key = (purpose, context.sites.site(frame, method))
        if (stream := self._streams.get(key)) is None:
            moment = f"task {self.number} {self.generation} {self._resumed_count} "
            made: random.Random = context.make_stream(moment, *key)
            stream = self._streams[key] = made
        return stream

    def label(self, labels: Mapping[str, str]) -> None:
        """Label this execution in the list of executions, if the label is not there already from before a rebuild."""
        executions = self.tasks.executions
        if executions is not None and (executions.is_new or not self.is_silent):
            executions.note_labels(self.number, labels)

    def report(self, text: str, error: BaseException | None) -> None:
        self._variables.copy().run(HandlerLog().error, text, exception=error)

    # --- saving, and running again ----------------------------------------------------------------------------------

    def save(self) -> SavedTask:
        return SavedTask(
            self.number,
            self.generation,
            self.handler.method_id,
            self.arguments,
            self.caller,
            self.call_number,
            self.started_ns,
            list(self.entries),
            [operation.pending() for operation in self.pending.values()],
            *self.started_by,
        )

    @classmethod
    def rebuild(cls, tasks: Host, handler: Handler[Any, Any], saved: SavedTask) -> Task:
        """Return the task as it was saved. Raises JournalError."""
        try:
            task = cls(tasks, handler, saved, saved.started_ns)
        except decoding.DecodeError as error:
            raise JournalError(
                f"{handler.function.__qualname__}, which waits since {datetime_of(saved.started_ns).isoformat()}, has "
                f"arguments that do not fit its annotations any more: {error}; the app stops\n{WAYS_OUT}"
            ) from None
        task._rebuild = rebuild = Rebuild(saved, task._title)
        task.advance()
        while (entry := rebuild.next_entry) is not None:
            if entry.step == CANCEL_STEP:
                rebuild.consume_entry()
                task._cancel(entry)
                continue
            operation = task.pending.get(entry.step)
            if operation is None:
                raise rebuild.mismatch(entry.step, entry, task._describe_place())
            rebuild.consume_entry()
            task.entries.append(entry)
            task.time_ns = entry.time_ns
            task._resume(operation, rebuild.outcome(operation, entry))
        if task.is_done or task.pending.keys() != rebuild.pending.keys():
            raise rebuild.end_mismatch(task.pending, task._steps_count, task._describe_place())
        task._rebuild = None
        return task

    def frames(self) -> Iterator[list[FrameType]]:
        """Yield the frames of each coroutine that waits, the handler's own first, the innermost frame last."""
        for task in (self.main, *self.subtasks):
            if not task.done():
                frames: list[FrameType] = []
                coroutine: Any = task.get_coro()
                while isinstance(coroutine, CoroutineType) and coroutine.cr_frame is not None:
                    frames.append(coroutine.cr_frame)
                    coroutine = coroutine.cr_await
                yield frames

    # --- in words -----------------------------------------------------------------------------------------------------

    def _describe_place(self) -> str:
        if self.is_done:
            _, error = self.result()
            return "its end" if error is None else f"{type(error).__name__}: {error}"
        return ", ".join(map(describe_operation, self.pending.values())) or "nothing that it waits for"

    def failure(self, error: BaseException) -> HandlerError:
        """Return the HandlerError for ``error``: this handler fails alone, or the app stops."""
        return self.tasks.handler_runs.failed(self.handler, self.decoded_arguments(), error, self.number)

    def _title(self) -> str:
        since = datetime_of(self.started_ns).isoformat()
        return f"{self.name}{self.arguments_text()}, which waits since {since},"
