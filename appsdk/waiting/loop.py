"""Asyncio event loop of one run of an ``async def`` handler.

A replay repeats its turns: ready callbacks run first in, first out; the clock is that of the log's records; a delay is
a timer in the handler's journal, which outlives crashes. There is no selector and no thread. All outside results come
through a :class:`LazyFuture`: a call, an effect, an event.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import sys
import threading
import weakref
from asyncio import events
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from types import FrameType
from typing import Any, Generic, NoReturn, TypeVar, TypeVarTuple

from immortal.appsdk.calls.user_code import ControlFlowSignal, inherited_context, is_collecting, is_user_failure
from immortal.appsdk.errors import UsageError
from immortal.appsdk.handlers.decorators import TIME_NS_MAX

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Ts = TypeVarTuple("Ts")


# Shared empty values: mostly a loop needs no others. A used dict takes 300 bytes in each waiting handler.
_NO_FUTURES: dict[int, LazyFuture[Any]] = {}
_NO_SUBTASKS: dict[asyncio.Task[Any], contextvars.Context] = {}
_NO_GENERATORS: Sequence[weakref.ref[AsyncGenerator[Any, Any]]] = ()


class Ready(deque[asyncio.Handle]):
    """Callbacks that can run, of all loops of an instance, and the loop that runs now.

    asyncio knows it too, but makes a system call at each look. ``outside``: asyncio's loop and hooks of the code that
    lets handlers run. ``thread_id``: of the handlers.
    """

    __slots__ = ("loop", "outside", "thread_id")

    def __init__(self) -> None:
        super().__init__()
        self.thread_id = threading.get_ident()
        self.loop: HandlerLoop | None = None
        self.note_outside()

    def note_outside(self) -> None:
        self.outside = events._get_running_loop(), sys.get_asyncgen_hooks()

    def enter(self, loop: HandlerLoop | None) -> HandlerLoop | None:
        """Make ``loop`` the running one (None: that of outside); return the one before."""
        before, self.loop = self.loop, loop
        events._set_running_loop(self.outside[0] if loop is None else loop)
        return before


class HandlerLoop(asyncio.AbstractEventLoop):
    """Asyncio loop for the coroutines of one run. ``ready``: callbacks that can run, of all loops of an instance.

    One loop of an instance runs at a time, until it has no ready callback. ``number``: unique in the life of the
    instance. ``main``: the task of the handler itself. ``must_end``: run no more callbacks: the handler is over,
    whatever its coroutines do about it. ``subtasks``: tasks of the handler that have not ended, with their contexts.
    ``remaining``: of those, the ones that were cancelled when the handler ended; None before. ``unawaited``: futures
    that were created and never awaited, by number, oldest first.
    """

    __slots__ = (
        "_asyncgens",
        "futures_count",
        "main",
        "must_end",
        "number",
        "ready",
        "remaining",
        "subtasks",
        "unawaited",
    )

    number: int
    main: asyncio.Task[Any]

    def __init__(self, ready: Ready) -> None:
        self.ready = ready
        self.unawaited = _NO_FUTURES
        self.subtasks = _NO_SUBTASKS
        self.remaining: list[asyncio.Task[Any]] | None = None
        self._asyncgens = _NO_GENERATORS
        self.futures_count = self.tasks_count = 0
        self.must_end = False

    @property
    def name(self) -> str:
        """Name of the handler."""
        raise NotImplementedError

    def now_ns(self) -> int:
        """Return the time of the record that is handled, in ns since the Unix epoch."""
        raise NotImplementedError

    def start_timer(self, due_ns: int, handle: asyncio.TimerHandle) -> LazyFuture[None]:
        """Set a timer of the journal, which makes ``handle`` ready at ``due_ns`` (ns since the Unix epoch)."""
        raise NotImplementedError

    def run_ready(self, wake: Callable[..., object] | None, arguments: tuple[Any, ...]) -> None:
        """Call ``wake(*arguments)``, then run all callbacks until none is ready, or the handler's own task has ended.

        Raises what ``wake`` raises, and what user code must not catch (ControlFlowSignal, an interrupt).
        """
        ready = self.ready
        outer = ready.enter(self)
        sys.set_asyncgen_hooks(self._generator_begins, self._generator_is_dropped)
        try:
            if wake is not None:
                wake(*arguments)
            is_last_turn = False
            while ready and not self.must_end:
                for _ in range(len(ready)):
                    if self.must_end:
                        break
                    handle: Any = ready.popleft()
                    if not handle._cancelled:
                        try:
                            handle._context.run(handle._callback, *handle._args)
                        except BaseException as error:
                            self._callback_failed(handle, error)
                if is_last_turn:
                    break
                is_last_turn = self.remaining is None and self.main.done()  # asyncio.run stops one turn after the end
        finally:
            ready.enter(outer)
            sys.set_asyncgen_hooks(*ready.outside[1])
            if not self.unawaited:
                self.unawaited = _NO_FUTURES

    def _callback_failed(self, handle: asyncio.Handle, error: BaseException) -> None:
        """Report what a callback has raised; raise it if user code must not catch it."""
        if isinstance(error, ControlFlowSignal) or not is_user_failure(error):
            raise error
        if isinstance(error, Exception):  # a task raises SystemExit and KeyboardInterrupt, and keeps them too
            self.call_exception_handler({"message": f"Exception in callback {handle}", "exception": error})

    # --- callbacks and time -------------------------------------------------------------------------------------------

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle, ready = asyncio.Handle(callback, args, self, context), self.ready
        if ready.loop is not self or threading.get_ident() != ready.thread_id:
            if is_collecting():
                return handle
            raise UsageError(
                f"{self.name}: other code has touched a future or task of this handler: only its own run may, as the "
                f"log wakes it; to tell it something use immortal.signal(...)"
            )
        ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> NoReturn:
        # NotImplementedError is what libraries expect of a loop that other threads must not disturb.
        raise NotImplementedError(
            f"{self.name}: the log alone wakes a handler: another thread can't give it anything, as no replay would"
        )

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Set a timer of the handler, ``delay`` seconds from now, which outlives crashes."""
        due_ns = TIME_NS_MAX if delay == math.inf else self.now_ns() + round(delay * 1e9)
        return self._set_timer(due_ns, callback, args, context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Set a timer of the handler, for ``when`` by :meth:`time`, which outlives crashes."""
        return self._set_timer(TIME_NS_MAX if when == math.inf else round(when * 1e9), callback, args, context)

    def _set_timer(
        self,
        due_ns: int,
        callback: Callable[[*Ts], object],
        args: tuple[*Ts],
        context: contextvars.Context | None,
    ) -> asyncio.TimerHandle:
        handle = _TimerHandle(due_ns / 1e9, callback, args, self, context)
        if due_ns <= self.now_ns():
            self.ready.append(handle)
        else:
            handle.timer = self.start_timer(due_ns, handle)
            handle._scheduled = True  # type: ignore[attr-defined]  # asyncio's mark, so that cancel() tells the loop
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if isinstance(handle, _TimerHandle) and handle.timer is not None:
            handle.timer.cancel()

    def time(self) -> float:
        """Return the time of the record that is handled, in seconds since the Unix epoch."""
        return self.now_ns() / 1e9

    # --- futures and tasks --------------------------------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        return HandlerFuture(self)

    def create_task(self, coro: Any, *, name: object = None, **options: Any) -> asyncio.Task[Any]:
        """Make a task of a coroutine, or of anything else that a handler can await, such as a call."""
        if isinstance(coro, asyncio.Future):
            coro = _await(coro)
        elif sys._getframe(1).f_code in _OF_ENSURE_FUTURE and _is_of_a_set(sys._getframe(2)):
            coro.close()
            raise UsageError(
                f"{self.name}: asyncio.as_completed of coroutines begins them in the order of a set, which differs at "
                f"each replay: give it tasks: [asyncio.create_task(coroutine), ...]"
            )
        context = options.get("context") or inherited_context()
        task = self.make_task(coro, None if name is None else str(name), context)
        if self.subtasks is _NO_SUBTASKS:
            self.subtasks = {}
        self.subtasks[task] = context
        task.add_done_callback(self._subtask_ended)
        return task

    def make_task(self, coro: Any, name: str | None, context: contextvars.Context) -> asyncio.Task[Any]:
        task = HandlerTask(self, coro, name, context)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # a crash or checkpoint drops waiting handlers
        return task

    def _subtask_ended(self, task: asyncio.Task[Any]) -> None:
        self.subtasks.pop(task, None)
        raise_signal(task)

    def get_task_factory(self) -> None:
        return None

    def _generator_begins(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._asyncgens = [*(one for one in self._asyncgens if one() is not None), weakref.ref(generator)]

    def _generator_is_dropped(self, generator: AsyncGenerator[Any, Any]) -> None:
        if events._get_running_loop() is self and not self.must_end:
            self.create_task(generator.aclose())

    def end_subtasks(self) -> None:
        """Cancel the tasks that the handler left running, like asyncio.run: the handler ends after them."""
        self.remaining = [task for task in self.subtasks if not task.done()]
        alive: list[Any] = [found for one in self._asyncgens if (found := one()) is not None]
        self._asyncgens = _NO_GENERATORS
        for task in self.remaining:
            task.cancel()
        self.remaining += [self.create_task(found.aclose()) for found in alive if found.ag_frame is not None]

    # --- methods that asyncio and libraries call ----------------------------------------------------------------------

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        if not isinstance(executor, InlineExecutor):
            raise self._refusal("run_in_executor (which asyncio.to_thread uses)")
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    get_debug = bool  # False; each future and handle asks, and this calls no Python code

    def is_running(self) -> bool:
        return events._get_running_loop() is self

    def is_closed(self) -> bool:
        return False

    async def shutdown_asyncgens(self) -> None:
        pass

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not self.must_end and not isinstance(error, ControlFlowSignal):
            self.report(str(context.get("message")), error)

    def report(self, text: str, error: BaseException | None) -> None:
        """Write that a task or callback has failed and that nobody has awaited it."""
        raise NotImplementedError

    def _refusal(self, name: str) -> UsageError:
        return UsageError(
            f"{self.name}: its asyncio code asks for {name}, and a handler does not reach outside, as a replay "
            f"would do it again: do it in an effect: await immortal.effect(<function>, ...)"
        )


def _outside(name: str) -> Callable[..., NoReturn]:
    def refuse(self: HandlerLoop, *args: Any, **options: Any) -> NoReturn:
        raise self._refusal(name)

    return refuse


for _name in vars(asyncio.AbstractEventLoop).keys() - vars(HandlerLoop).keys():
    if not _name.startswith("_"):  # sockets, processes, signals, threads: the log does not have their input
        setattr(HandlerLoop, _name, _outside(_name))
HandlerLoop.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]  # these are all of them


def raise_signal(task: asyncio.Task[Any]) -> None:
    """Raise the ControlFlowSignal that ended ``task``, if one did: asyncio has kept it as the task's error."""
    if isinstance(error := task._exception, ControlFlowSignal):  # exception() marks it as seen
        raise error


HASH_FACTOR = 1_000_003


class _Numbered:
    """Base of futures and tasks whose place in a set is the same at each replay: asyncio makes sets of them."""

    __slots__ = ()

    _number: int

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class HandlerFuture(_Numbered, asyncio.Future[Any]):
    __slots__ = ("_number",)

    def __init__(self, loop: HandlerLoop) -> None:
        super().__init__(loop=loop)
        self._number = loop.futures_count = loop.futures_count + 1


class HandlerTask(_Numbered, asyncio.Task[Any]):
    __slots__ = ("_number",)

    def __init__(self, loop: HandlerLoop, coro: Any, name: str | None, context: contextvars.Context) -> None:
        number = loop.tasks_count = loop.tasks_count + 1
        self._number = loop.number * HASH_FACTOR + number  # asyncio has all tasks of the process in one set
        super().__init__(coro, loop=loop, name=name or f"Task-{number}", context=context)


_OF_ENSURE_FUTURE = (asyncio.ensure_future.__code__, getattr(asyncio.tasks, "_ensure_future", asyncio.run).__code__)


def _is_of_a_set(frame: FrameType | None) -> bool:
    """Return True if asyncio.as_completed is among the three callers from ``frame`` up."""
    for _ in range(3):
        if frame is None:
            return False
        if frame.f_code.co_qualname in ("as_completed", "_AsCompletedIterator.__init__"):
            return str(frame.f_globals.get("__name__")) == "asyncio.tasks"
        frame = frame.f_back
    return False


class _TimerHandle(asyncio.TimerHandle):
    """Handle of a callback, with the timer of the journal that it waits for."""

    __slots__ = ("timer",)

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: Sequence[Any],
        loop: HandlerLoop,
        context: contextvars.Context | None,
    ) -> None:
        super().__init__(when, callback, args, loop, context)
        self.timer: LazyFuture[None] | None = None


class InlineExecutor(Executor):
    """Executor by which a handler's loop runs functions at once, in its own thread: for libraries that need one."""


async def _await(future: asyncio.Future[T]) -> T:
    return await future


# Methods of asyncio that each call needs: super() would cost more than what they do.
_make_future = asyncio.Future.__init__
_await_future = asyncio.Future.__await__
_call_when_done = asyncio.Future.add_done_callback


class LazyFuture(_Numbered, asyncio.Future[T]):
    """Future that begins when it is first awaited, or passed to asyncio.gather, wait, create_task, ..."""

    __slots__ = ("_is_begun", "_number", "task")

    def __init__(self, loop: HandlerLoop) -> None:
        _make_future(self, loop=loop)
        self._number = loop.futures_count = loop.futures_count + 1
        self.task = loop
        self._is_begun = False
        if loop.unawaited is _NO_FUTURES:
            loop.unawaited = {}
        loop.unawaited[self._number] = self

    def __str__(self) -> str:
        raise NotImplementedError

    def _is_no_value(self, *_: object) -> NoReturn:
        raise TypeError(f"{self} is to be awaited, and is no value yet: write '(await ...)' around it")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _is_no_value
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __and__ = __rand__ = __or__ = __ror__ = _is_no_value
    __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = __contains__ = _is_no_value

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            name
            if name == "what"
            else f"{self} has no {name!r}: it is to be awaited, and is no value yet: write '(await ...)' around it"
        )

    def __await__(self) -> Generator[Any, None, T]:
        if not self._is_begun:
            self.begin()
        return _await_future(self)

    __iter__ = __await__

    def add_done_callback(self, fn: Callable[..., object], /, *, context: contextvars.Context | None = None) -> None:
        if not self._is_begun:
            self.begin()
        _call_when_done(self, fn, context=context)

    def begin(self) -> None:
        """Begin, once. If that is not possible, the future ends with the error."""
        if self._is_begun or self.done():
            return
        task = self.task
        task.unawaited.pop(self._number, None)
        ready = task.ready
        is_own = ready.loop is task and ready.thread_id == threading.get_ident()
        if not is_own and events._get_running_loop() is not None:  # None: Python clears the coroutine away
            raise UsageError(
                f"{self} is awaited outside of {task.name}: only that handler's own run can await it, and no effect, "
                f"thread or other handler"
            )
        self._is_begun = True
        try:
            self._start()
        except Exception as error:  # arguments that can't be sent
            self.complete(None, error)
            self._drop()

    def _start(self) -> None:
        raise NotImplementedError

    def _drop(self) -> None:
        """Release the resources of a cancelled future."""

    def complete(self, value: Any, error: BaseException | None = None) -> None:
        """End with ``value``, or with ``error``, unless it has ended."""
        if self.done():
            return
        if isinstance(error, StopIteration):  # no future can have it
            replacement = RuntimeError("generator raised StopIteration")  # like Python
            replacement.__cause__ = error
            error = replacement
        if error is None:
            self.set_result(value)
        else:
            self.set_exception(error)

    def cancel(self, msg: Any | None = None) -> bool:
        if self.done():
            return False
        self.task.unawaited.pop(self._number, None)
        is_cancelled = super().cancel(msg)
        if self._is_begun:
            self._drop()
        return is_cancelled


@dataclass(frozen=True, slots=True)
class Winner(Generic[T_co]):
    """Result of a race: ``index`` (from 0) of the awaitable that was first, and its ``value``."""

    index: int
    value: T_co


class Together(LazyFuture[list[Any]]):
    """Gather that begins when it is awaited: an ordered multicast is sent when its last call begins."""

    __slots__ = ("_inner", "_parts")

    def __init__(self, loop: HandlerLoop, parts: Sequence[Awaitable[Any]]) -> None:
        super().__init__(loop)
        self._parts = parts
        self._inner: asyncio.Future[list[Any]] | None = None

    def __str__(self) -> str:
        return f"all of {', '.join(map(str, self._parts))}"

    def _start(self) -> None:
        self._inner = asyncio.gather(*self._parts)
        self._inner.add_done_callback(self._ended)

    def _ended(self, inner: asyncio.Future[list[Any]]) -> None:
        if inner.cancelled():
            super().cancel()
        else:
            self.complete(*((None, error) if (error := inner.exception()) else (inner.result(), None)))

    def _drop(self) -> None:
        if self._inner is not None:
            self._inner.cancel()


class Race(LazyFuture[Winner[Any]]):
    """Future that ends when the first of its parts has ended; it cancels the others, and waits until they have ended.

    If one of the others raises an error when it is cancelled, the race raises that.
    """

    __slots__ = ("_error", "_first", "_open", "_parts", "_reason")

    def __init__(self, loop: HandlerLoop, parts: Sequence[Awaitable[Any]]) -> None:
        super().__init__(loop)
        self._parts: list[Any] = list(parts)
        self._open: dict[asyncio.Future[Any], int] = {}  # begun and not ended, with their index
        self._first: tuple[int, asyncio.Future[Any]] | None = None
        self._error: BaseException | None = None  # of a part that lost
        self._reason: tuple[Any] | None = None  # the race was cancelled with this message

    def __str__(self) -> str:
        return f"race({', '.join(map(str, self._parts))})"

    def _start(self) -> None:
        parts, self._parts = self._parts, []
        for index, part in enumerate(parts):
            future: asyncio.Future[Any] = asyncio.ensure_future(part, loop=self.task)
            if self._first is not None:  # a part that was done at once has decided it
                future.cancel()
                continue
            self._open[future] = index
            future.add_done_callback(self._on_part_done)
            if future.done():
                self._decide(future)
        self._finish()

    def _on_part_done(self, future: asyncio.Future[Any]) -> None:
        if future in self._open:
            self._decide(future)
            self._finish()

    def _decide(self, future: asyncio.Future[Any]) -> None:
        index = self._open.pop(future)
        if self._first is None:
            self._first = index, future
            self._cancel_open(None)
        elif not future.cancelled():
            self._error = self._error or future.exception()

    def _cancel_open(self, msg: Any | None) -> None:
        for future in list(self._open):
            future.cancel(msg)
            if isinstance(future, LazyFuture) and future.done():
                del self._open[future]

    def _finish(self) -> None:
        if self._open or self.done():
            return
        if self._error is not None:
            self.complete(None, self._error)
        elif self._reason is not None:
            super().cancel(*self._reason)
        elif self._first is not None:
            index, future = self._first
            if future.cancelled():
                super().cancel()
            elif (error := future.exception()) is not None:
                self.complete(None, error)
            else:
                self.complete(Winner(index, future.result()))

    def cancel(self, msg: Any | None = None) -> bool:
        if self.done():
            return False
        if not self._is_begun:
            return super().cancel(msg)
        self._reason = (msg,)
        self._cancel_open(msg)
        self._finish()
        return True
