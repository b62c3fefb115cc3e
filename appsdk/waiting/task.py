"""One run of an ``async def`` handler, from its call to its end: its journal, and how it is run again over that."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from immortal.appsdk.calls.codec import encoder
from immortal.appsdk.calls.context import datetime_of
from immortal.appsdk.calls.failures import encode_failed, text_of
from immortal.appsdk.calls.user_code import ControlFlowSignal, describe_arguments, is_user_failure, running
from immortal.appsdk.errors import AppError, Cancelled, HandlerError, UsageError
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.state.journal import CANCEL, CANCEL_STEP, WAYS_OUT, Entry, JournalError, SavedTask, described
from immortal.appsdk.waiting import waits
from immortal.appsdk.waiting.host import Host
from immortal.appsdk.waiting.operations import MISFITS, Operation, Owner, Rebuild
from immortal.appsdk.waiting.waits import Fiber
from immortal.protocol import decoding


class _Ending(ControlFlowSignal):
    """No coroutine is to catch it."""

    def __init__(self, error: Any) -> None:
        super().__init__(str(error))
        self.error = error


class Stopped(_Ending):
    """The app stops with ``error``, an AppError."""


class Abandoned(_Ending):
    """The handler ends with ``error``, whatever its coroutines would do about it."""


class ContinueAs(ControlFlowSignal):
    """The handler goes on from its beginning, with ``arguments`` and no journal. No coroutine is to catch it."""

    def __init__(self, arguments: bytes) -> None:
        super().__init__("continue_as")
        self.arguments = arguments


class Task(Owner):
    """``call`` began it. ``number`` is its own in the life of the instance. ``time_ns``: what ``immortal.now()`` says.

    ``main``: the coroutine of the handler itself.
    """

    __slots__ = (
        "_abandoned",
        "_continuation",
        "_is_cleared_away",
        "_is_running",
        "_rebuild",
        "_resumed_count",
        "_steps_count",
        "_stopped",
        "_streams",
        "arguments",
        "began_at",
        "call_number",
        "caller",
        "entries",
        "handler",
        "main",
        "pending",
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
        self.began_at = call.sequence_id, call.message_index
        self.time_ns = time_ns
        self._stopped: Stopped | None = None
        self._abandoned: Abandoned | None = None
        self._rebuild: Rebuild | None = None
        self._is_running = self._is_cleared_away = False
        self._streams: dict[tuple[bytes, bytes], random.Random] | None = None
        self._begin()

    def _begin(self) -> None:
        self.started_ns = self.time_ns
        self.entries: list[Entry] = []
        self.pending: dict[int, Operation] = {}
        self._steps_count = 0
        self._resumed_count = 0
        self._continuation: ContinueAs | None = None
        coroutine = self.handler.call(self.tasks.make_self(self), *self.decoded_arguments())
        variables = self.tasks.context.run_contexts.new()
        variables.run(running.set, self)
        self.main: Fiber[Any] = Fiber(self, coroutine, variables)
        self.main.begin()

    @property
    def name(self) -> str:
        return self.handler.function.__qualname__

    @property
    def method_id(self) -> int:
        return self.handler.method_id

    @property
    def is_done(self) -> bool:
        return self.main.is_done

    @property
    def cancelled(self) -> list[Entry]:
        """Return the cancellations after which the handler went on: each has the reason, and who ordered it."""
        return [entry for entry in self.entries if entry.step == CANCEL_STEP]

    @property
    def is_silent(self) -> bool:
        """Tell whether operations are not to be carried out: they were done before, or Python clears the coroutine
        away.
        """
        return self._rebuild is not None or not self._is_running

    @property
    def instance_name(self) -> str:
        return self.tasks.context.instance_name

    def decoded_arguments(self) -> tuple[Any, ...]:
        return self.tasks.codec(self.handler).decode(self.arguments)

    # --- running ----------------------------------------------------------------------------------------------------

    def advance(self, wake: Callable[..., None] | None = None, arguments: tuple[Any, ...] = ()) -> None:
        """Let ``wake(*arguments)`` wake somebody; until all of it waits, or it is done.

        Raises HandlerError (of a step), JournalError.
        """
        while True:
            self._is_running = True
            before, self.tasks.running = self.tasks.running, self
            try:
                if wake is not None:
                    wake(*arguments)
                self.run()
            except ContinueAs:
                pass
            except Stopped as stopped:
                self._stopped = self._stopped or stopped
            except Abandoned as abandoned:
                self._abandoned = self._abandoned or abandoned
            except BaseException as error:  # a coroutine's that was cancelled and did not let go
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
            if self._continuation is None:
                break
            wake, arguments = self._start_over, (self._continuation,)
        if not self.pending and not self.is_done and self._rebuild is None:
            self._end_with(UsageError("its coroutines wait for each other, and for nothing that could come"))

    def _end_with(self, error: BaseException) -> None:
        """None of its coroutines goes on."""
        self.ready.clear()
        self.unbegun.clear()
        self.main.give_up(error)

    def _start_over(self, continuation: ContinueAs) -> None:
        self.main.cancel()
        self.ready.clear()
        self.drop_pending()
        self.unbegun.clear()
        self.arguments = continuation.arguments
        self.generation += 1
        self._begin()
        self.tasks.began(self)

    def resolve(self, operation: Operation, raised: bool, value: bytes, time_ns: int) -> None:
        """Resume with the result of ``operation``. Raises HandlerError."""
        self.time_ns = time_ns
        self._resume(operation, self._take_outcome(operation, raised, value), time_ns)

    def _resume(self, operation: Operation, outcome: tuple[Any, ...], time_ns: int) -> None:
        self.forget(operation)
        self.time_ns = time_ns
        self._resumed_count += 1
        self.advance(operation.complete, outcome)

    def cancel(self, reason: str, who: str, time_ns: int) -> None:
        """Raise Cancelled where the handler waits: go on with that. Raises HandlerError."""
        self._cancel(Entry(CANCEL_STEP, CANCEL, 0, True, encoder.encode((reason, who)), time_ns))

    def _cancel(self, entry: Entry) -> None:
        """Cancel the handler. The entry stands in the journal among the results, at its place."""
        reason, who = self.cancellation(entry)
        self.time_ns = entry.time_ns
        self._resumed_count += 1
        self.entries.append(entry)
        self.advance(self.main.throw, (Cancelled(reason, who),))

    @staticmethod
    def cancellation(entry: Entry) -> tuple[str, str]:
        """Return (the reason, who ordered it) of a cancellation entry."""
        return decoding.decode(entry.value, type=tuple[str, str])

    def drop_pending(self) -> None:
        """Cancel all pending operations: the handler has ended."""
        for operation in list(self.pending.values()):
            operation.cancel()

    def result(self) -> tuple[Any, BaseException | None]:
        """Return (value, None) or (None, error); something that was never awaited is an error too."""
        if (error := self.main.error) is not None:
            return None, error
        for wait in self.unbegun.values():
            return None, UsageError(
                f"{wait} was made and never awaited, so it never began: write 'await' in front of it (or "
                f".fork(...), if nobody is to wait for it)"
            )
        return self.main.value, None

    # --- steps ------------------------------------------------------------------------------------------------------

    def begin(self, operation: Operation) -> None:
        """Give ``operation`` its step number, and do it, or take it from the journal. Raises Stopped, Abandoned."""
        if (ending := self._stopped or self._abandoned) is not None:
            raise ending
        if not self._is_running:  # a 'finally' that Python runs as it clears the coroutine away
            raise GeneratorExit
        self._steps_count += 1
        operation.step = self._steps_count
        if self._rebuild is not None:
            self._begin_again(operation, self._rebuild)
            return
        if not operation.is_immediate:
            operation.number = self.tasks.draw_number(operation)
            self._wait_for(operation)
        try:
            outcome = self.tasks.perform(operation)
        except HandlerError as error:
            raise self.stop(error) from error
        except BaseException as error:
            if not is_user_failure(error):
                raise
            raise self.abandon(error) from error
        if outcome is not None:
            operation.complete(*self._take_outcome(operation, *outcome))

    def _take_outcome(self, operation: Operation, raised: bool, value: bytes) -> tuple[Any, ...]:
        """Put it into the journal. What does not fit what it is declared to be is a failure of who sent it."""
        try:
            outcome = operation.outcome(raised, value)
        except MISFITS as error:
            raised, value = True, encode_failed(type(error).__name__, f"what came does not fit: {text_of(error)}", "")
            outcome = operation.outcome(raised, value)
        self.entries.append(Entry(operation.step, operation.what, operation.detail, raised, value, self.time_ns))
        return outcome

    def _begin_again(self, operation: Operation, rebuild: Rebuild) -> None:
        try:
            rebuild.check(operation)
            if not operation.is_immediate:
                self._wait_for(operation)
                return
            entry = rebuild.take(operation)
            self.entries.append(entry)
            outcome = rebuild.outcome(operation, entry)
        except JournalError as error:
            raise self.stop(error) from None
        operation.complete(*outcome)

    def _wait_for(self, operation: Operation) -> None:
        self.pending[operation.step] = operation
        operation.since_ns = self.time_ns
        if operation.number:
            self.tasks.register(operation)

    def clear_away(self, *, closes: bool = True) -> None:
        """Another life of it, or none, takes its place: what its coroutines still do as they are closed counts for
        nothing."""
        self._is_cleared_away = True
        if closes:
            self.main.clear_away()

    def forget(self, operation: Operation) -> None:
        if self._is_cleared_away:
            return
        self.pending.pop(operation.step, None)
        if operation.number:
            self.tasks.unregister(operation)

    def continue_as(self, arguments: bytes) -> NoReturn:
        if self._rebuild is not None:
            raise self.stop(self._rebuild.mismatch(self._steps_count + 1, self._rebuild.next_entry, "continue_as"))
        self._continuation = ContinueAs(arguments)
        raise self._continuation

    def abandon(self, error: BaseException) -> Abandoned:
        """Whatever the coroutines do about what is to be raised: the handler ends with ``error``."""
        self._abandoned = self._abandoned or Abandoned(error)
        return self._abandoned

    def stop(self, error: AppError) -> Stopped:
        """Whatever the coroutines do about what is to be raised: the app stops with ``error``."""
        self._stopped = self._stopped or Stopped(error)
        return self._stopped

    # --- what differs from run to run -------------------------------------------------------------------------------

    def now_ns(self) -> int:
        if not self.time_ns:
            raise UsageError("the records have no time: immortal.now() has no answer that a replay would repeat")
        return self.time_ns

    def random_at(self, frame: FrameType, method: str | None, purpose: bytes = b"random") -> random.Random:
        """Return a random stream, as Context.random_at; the run between two waits is what a message is there."""
        context = self.tasks.context
        if self._streams is None:
            self._streams = {}
        key = (purpose, context.sites.site(frame, method))
        if (stream := self._streams.get(key)) is None:
            moment = f"task {self.number} {self.generation} {self._resumed_count} "
            made: random.Random = context.make_stream(moment, *key)
            stream = self._streams[key] = made
        return stream

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
            *self.began_at,
        )

    @classmethod
    def rebuild(cls, tasks: Host, handler: Handler[Any, Any], saved: SavedTask) -> Task:
        """The task as it was saved. Raises JournalError."""
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
                rebuild.use_up()
                task._cancel(entry)
                continue
            operation = task.pending.get(entry.step)
            if operation is None:
                raise rebuild.mismatch(entry.step, entry, task._where_it_is())
            rebuild.use_up()
            task.entries.append(entry)
            task._resume(operation, rebuild.outcome(operation, entry), entry.time_ns)
        if task.is_done or task.pending.keys() != rebuild.pending.keys():
            raise rebuild.wrong_end(task.pending, task._steps_count, task._where_it_is())
        task._rebuild = None
        return task

    # --- in words -----------------------------------------------------------------------------------------------------

    def _where_it_is(self) -> str:
        if self.main.is_done:
            error = self.main.error
            return "its end" if error is None else f"{type(error).__name__}: {error}"
        return ", ".join(map(described, self.pending.values())) or "nothing that it waits for"

    def failure(self, error: BaseException) -> HandlerError:
        """Make the HandlerError for ``error``: this handler fails alone, or the app stops."""
        error = waits.asyncio_refusal(error) or error
        return self.tasks.handler_runs.failed(self.handler, self.decoded_arguments(), error, self.number)

    def _title(self) -> str:
        since = datetime_of(self.started_ns).isoformat()
        return f"{self.name}{describe_arguments(self.decoded_arguments())}, which waits since {since},"
