"""One run of an ``async def`` handler, from its call to its end: its journal, and how it is run again over that."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import msgspec

from appsdk.calls.codec import encoder
from appsdk.calls.context import datetime_of
from appsdk.calls.failures import encode_failed, failure_of, text_of
from appsdk.calls.report import describe_arguments, handler_failed
from appsdk.errors import AppError, Cancelled, HandlerError, UsageError
from appsdk.handlers.decorators import Handler
from appsdk.state.journal import CANCEL, CANCEL_STEP, WAYS_OUT, Entry, JournalError, Pending, SavedTask, described
from appsdk.waiting.host import Host
from appsdk.waiting.operations import Operation, Owner
from appsdk.waiting.waits import Fiber

NO_LOOP = "no running event loop"  # what asyncio's functions raise outside a loop of theirs


class Stopped(BaseException):
    """The app stops with ``error``. No coroutine is to catch it."""

    def __init__(self, error: AppError) -> None:
        super().__init__(str(error))
        self.error = error


class Abandoned(BaseException):
    """The handler ends with ``error``, whatever its coroutines would do about it. No coroutine is to catch it."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class ContinueAs(BaseException):
    """The handler goes on from its beginning, with ``arguments`` and no journal. No coroutine is to catch it."""

    def __init__(self, arguments: bytes) -> None:
        super().__init__("continue_as")
        self.arguments = arguments


class Rebuild:
    """What a task that is run again has in its journal. ``at``: how many of the entries are used up."""

    def __init__(self, saved: SavedTask) -> None:
        self.entries = saved.entries
        self.pending = {pending.step: pending for pending in saved.pending}
        self.by_step: dict[int, Entry | Pending] = {**self.pending, **{entry.step: entry for entry in saved.entries}}
        self.at = 0

    @property
    def next_entry(self) -> Entry | None:
        return self.entries[self.at] if self.at < len(self.entries) else None


class Task(Owner):
    """``number`` is its own in the life of the instance. ``time_ns``: what ``self.now()`` says."""

    __slots__ = (
        "_abandoned",
        "_continuation",
        "_is_running",
        "_main",
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
        "pending",
        "started_ns",
        "tasks",
        "time_ns",
    )

    def __init__(
        self,
        tasks: Host,
        handler: Handler[Any, Any],
        number: int,
        arguments: bytes,
        caller: str | None,
        call_number: int,
        time_ns: int,
    ) -> None:
        super().__init__(tasks.ready)
        self.tasks = tasks
        self.handler = handler
        self.number = number
        self.generation = 0
        self.arguments = arguments
        self.caller = caller
        self.call_number = call_number
        self.time_ns = time_ns
        self.began_at = -1, 0  # which message of which record; not known
        self._stopped: Stopped | None = None
        self._abandoned: Abandoned | None = None
        self._rebuild: Rebuild | None = None
        self._is_running = False
        self._streams: dict[tuple[bytes, bytes], random.Random] | None = None
        self._begin()

    def _begin(self) -> None:
        self.started_ns = self.time_ns
        self.entries: list[Entry] = []
        self.pending: dict[int, Operation] = {}
        self._steps_count = 0
        self._resumed_count = 0
        self._continuation: ContinueAs | None = None
        self._main: Fiber[Any] = Fiber(
            self, self.handler.function(self.tasks.make_self(self), *self.decoded_arguments())
        )
        self._main.begin()

    @property
    def name(self) -> str:
        return self.handler.function.__qualname__

    @property
    def is_done(self) -> bool:
        return self._main.is_done

    @property
    def main(self) -> Fiber[Any]:
        """The coroutine of the handler itself."""
        return self._main

    @property
    def cancelled(self) -> list[Entry]:
        """How often it was cancelled, and goes on: each has the reason, and who."""
        return [entry for entry in self.entries if entry.step == CANCEL_STEP]

    @property
    def is_silent(self) -> bool:
        """What it does now is not to be done: it was done before, or Python clears away what is no more."""
        return self._rebuild is not None or not self._is_running

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
            except (Exception, SystemExit) as error:  # a coroutine's that was cancelled and did not let go
                self._abandoned = self._abandoned or Abandoned(error)
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
        self._main.give_up(error)

    def _start_over(self, continuation: ContinueAs) -> None:
        self._main.cancel()
        self.ready.clear()
        self.drop_pending()
        self.unbegun.clear()
        self.arguments = continuation.arguments
        self.generation += 1
        self._begin()
        self.tasks.began(self)

    def resolve(self, operation: Operation, raised: bool, value: bytes, time_ns: int) -> None:
        """What ``operation`` waited for is there: go on. Raises HandlerError."""
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
        """It stands in the journal among the results, at its place."""
        reason, who = self.cancellation(entry)
        self.time_ns = entry.time_ns
        self._resumed_count += 1
        self.entries.append(entry)
        self.advance(self._main.throw, (Cancelled(reason, who),))

    @staticmethod
    def cancellation(entry: Entry) -> tuple[str, str]:
        """Of an entry that is one: (the reason, who)."""
        return msgspec.msgpack.decode(entry.value, type=tuple[str, str])

    def drop_pending(self) -> None:
        """It has ended: nothing is waited for."""
        for operation in list(self.pending.values()):
            operation.cancel()

    def result(self) -> tuple[Any, BaseException | None]:
        """How it ended: (value, None) or (None, error), which is an error too where something was never awaited."""
        if (error := self._main.error) is not None:
            return None, error
        for wait in self.unbegun.values():
            return None, UsageError(
                f"{wait} was made and never awaited, so it never began: write 'await' in front of it (or "
                f".fork(...), if nobody is to wait for it)"
            )
        return self._main.value, None

    # --- steps ------------------------------------------------------------------------------------------------------

    def begin(self, operation: Operation) -> None:
        """Give ``operation`` its step number, and do it, or take it from the journal. Raises Stopped, Abandoned."""
        if self._stopped is not None:
            raise self._stopped
        if self._abandoned is not None:
            raise self._abandoned
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
        except (Exception, SystemExit) as error:
            raise self.abandon(error) from error
        if outcome is not None:
            operation.complete(*self._take_outcome(operation, *outcome))

    def _take_outcome(self, operation: Operation, raised: bool, value: bytes) -> tuple[Any, ...]:
        """Put it into the journal. What does not fit what it is declared to be is a failure of who sent it."""
        try:
            outcome = operation.outcome(raised, value)
        except (msgspec.DecodeError, LookupError, UnicodeDecodeError) as error:
            raised, value = True, encode_failed(type(error).__name__, f"what came does not fit: {text_of(error)}", "")
            outcome = operation.outcome(raised, value)
        self.entries.append(Entry(operation.step, operation.what, operation.detail, raised, value, self.time_ns))
        return outcome

    def _begin_again(self, operation: Operation, rebuild: Rebuild) -> None:
        saved = rebuild.by_step.get(operation.step)
        if saved is not None and not operation.fits(saved):
            raise self.stop(self._mismatch(operation.step, saved, described(operation)))
        if not operation.is_immediate:
            if isinstance(saved, Pending):
                operation.number = saved.number
            self._wait_for(operation)
        elif (entry := rebuild.next_entry) is not None and entry.step == operation.step:
            rebuild.at += 1
            self.entries.append(entry)
            try:
                operation.complete(*operation.outcome(entry.raised, entry.value))
            except (msgspec.DecodeError, LookupError, UnicodeDecodeError) as error:
                raise self.stop(self._unreadable(entry, error)) from None
        else:
            raise self.stop(self._mismatch(operation.step, entry or saved, described(operation)))

    def _wait_for(self, operation: Operation) -> None:
        self.pending[operation.step] = operation
        operation.since_ns = self.time_ns
        if operation.number:
            self.tasks.register(operation)

    def forget(self, operation: Operation) -> None:
        self.pending.pop(operation.step, None)
        if operation.number:
            self.tasks.unregister(operation)

    def continue_as(self, arguments: bytes) -> NoReturn:
        if self._rebuild is not None:
            raise self.stop(self._mismatch(self._steps_count + 1, self._rebuild.next_entry, "continue_as"))
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
            raise UsageError("the records have no time: self.now() has no answer that a replay would repeat")
        return self.time_ns

    def random_at(self, frame: FrameType, purpose: bytes = b"random") -> random.Random:
        """As Context.random_at: a message there is here what happens between two waits."""
        context = self.tasks.context
        if self._streams is None:
            self._streams = {}
        key = (purpose, context.sites.site(frame))
        if (stream := self._streams.get(key)) is None:
            moment = f"task {self.number} {self.generation} {self._resumed_count} "
            made: random.Random = context.make_stream(moment, *key)
            stream = self._streams[key] = made
        return stream

    def uuid4_at(self, frame: FrameType) -> uuid.UUID:
        return uuid.UUID(int=self.random_at(frame, b"uuid4").getrandbits(128), version=4)

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
            task = cls(tasks, handler, saved.number, saved.arguments, saved.caller, saved.call_number, saved.started_ns)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise JournalError(
                f"{handler.function.__qualname__}, which waits since {datetime_of(saved.started_ns).isoformat()}, has "
                f"arguments that do not fit its annotations any more: {error}; the app stops\n{WAYS_OUT}"
            ) from None
        task.generation = saved.generation
        task.began_at = saved.sequence_id, saved.message_index
        task._rebuild = rebuild = Rebuild(saved)
        task.advance()
        while (entry := rebuild.next_entry) is not None:
            if entry.step == CANCEL_STEP:
                rebuild.at += 1
                task._cancel(entry)
                continue
            operation = task.pending.get(entry.step)
            if operation is None:
                raise task._mismatch(entry.step, entry, task._where_it_is())
            rebuild.at += 1
            task.entries.append(entry)
            try:
                outcome = operation.outcome(entry.raised, entry.value)
            except (msgspec.DecodeError, LookupError, UnicodeDecodeError) as error:
                raise task._unreadable(entry, error) from None
            task._resume(operation, outcome, entry.time_ns)
        if task.is_done or task.pending.keys() != rebuild.pending.keys():
            missing = [pending for step, pending in rebuild.pending.items() if step not in task.pending]
            extra = [operation for step, operation in task.pending.items() if step not in rebuild.pending]
            step = (missing or extra)[0].step if missing or extra else task._steps_count
            raise task._mismatch(step, missing[0] if missing else None, task._where_it_is())
        task._rebuild = None
        return task

    # --- errors -----------------------------------------------------------------------------------------------------

    def _where_it_is(self) -> str:
        if self._main.is_done:
            error = self._main.error
            return "its end" if error is None else f"{type(error).__name__}: {error}"
        return ", ".join(map(described, self.pending.values())) or "nothing that it waits for"

    def failure(self, error: BaseException) -> HandlerError:
        """This handler raised ``error``, or did what it can't: it fails alone, or the app stops."""
        context = self.tasks.context
        if isinstance(error, RuntimeError) and str(error) == NO_LOOP:
            error = UsageError(
                "asyncio does not run async handlers: they can await calls (await self.<peer>.<method>(...)), their "
                "own handlers, self.effect, self.sleep, self.at, self.event, self.gather and self.race"
            ).with_traceback(error.__traceback__)
        made = handler_failed(
            self.name, self.decoded_arguments(), error, context.sequence_id, max(context.message_index, 0)
        )
        if (policy := self.tasks.definition.policy(self.handler)) != "stop":
            shares_trace = self.tasks.definition.share_tracebacks
            made.failure = failure_of(
                policy, self.name, self.handler.method_id, error, self.number, shares_trace=shares_trace
            )
        made.__cause__ = error
        return made

    def _unreadable(self, entry: Entry, error: Exception) -> JournalError:
        return JournalError(
            f"{self._title()} has a result at step {entry.step} ({entry.what}) that does not fit what that is "
            f"declared to return or raise any more: {error}; the app stops\n{WAYS_OUT}"
        )

    def _mismatch(self, step: int, saved: Entry | Pending | None, got: str) -> JournalError:
        expected = described(saved) if saved is not None else "nothing more"
        if got == expected:
            got = f"{got}, in another order"
        return JournalError(
            f"{self._title()} does not match its journal at step {step}: expected {expected}, got {got}; the app "
            f"stops\n{WAYS_OUT}"
        )

    def _title(self) -> str:
        since = datetime_of(self.started_ns).isoformat()
        return f"{self.name}{describe_arguments(self.decoded_arguments())}, which waits since {since},"
