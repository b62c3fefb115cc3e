"""Awaitables of ``async def`` handlers, and the small loop that runs their coroutines: first in, first out, no clock.

A :class:`Wait` begins when it is awaited, or given to ``gather`` or ``race``. The coroutines of one handler, itself and
those that it gives to ``gather`` and ``race``, are its :class:`Fiber`\\ s. Which of them goes on next follows from the
order in which waits are done, and that from the log.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from types import CodeType, CoroutineType, FrameType
from typing import Any, Generic, TypeVar

from immortal.appsdk.calls.user_code import inherited_context, is_user_failure
from immortal.appsdk.errors import UsageError

T = TypeVar("T")


class _State(Enum):
    NEW = auto()
    BEGUN = auto()
    DONE = auto()
    CANCELLED = auto()


_NEW, _BEGUN, _DONE, _CANCELLED = _State  # found faster than an enum's attributes


class Fibers:
    """The coroutines of one handler: those that can go on, and the waits that were made and not begun."""

    __slots__ = ("ready", "unbegun")

    def __init__(self, ready: deque[Fiber[Any]]) -> None:
        self.ready = ready  # shared by all handlers of an instance, of which one runs at a time: a deque is large
        self.unbegun: dict[int, Wait[Any]] = {}  # by identity, oldest first

    def run(self) -> None:
        """Run until all coroutines wait. A raised exception ends the handler."""
        while self.ready:
            self.ready.popleft().step()


class Wait(Generic[T]):
    """Something that an ``async def`` handler awaits: it is done with a value or an error, or cancelled."""

    __slots__ = ("_error", "_fibers", "_state", "_value", "_watchers")

    def __init__(self, fibers: Fibers) -> None:
        self._fibers = fibers
        self._state = _NEW
        self._value: Any = None
        self._error: BaseException | None = None
        self._watchers: list[Callable[[], None]] | None = None  # made for the first: most waits have one
        fibers.unbegun[id(self)] = self

    def __str__(self) -> str:
        raise NotImplementedError

    def __await__(self) -> Generator[Wait[Any], None, T]:
        self.begin()
        if self._state is not _DONE:
            yield self
        if self._error is not None:
            raise self._error
        value: T = self._value
        return value

    @property
    def is_done(self) -> bool:
        return self._state is _DONE

    @property
    def is_over(self) -> bool:
        state = self._state
        return state is _DONE or state is _CANCELLED

    @property
    def error(self) -> BaseException | None:
        return self._error

    @property
    def value(self) -> Any:
        return self._value

    @property
    def parts(self) -> Sequence[Wait[Any]]:
        """The waits that it is for."""
        return ()

    def belongs_to(self, fibers: Fibers) -> bool:
        return self._fibers is fibers

    def begin(self) -> None:
        """Once: a wait that has begun goes on."""
        if self._state is _NEW:
            self._state = _BEGUN
            del self._fibers.unbegun[id(self)]
            try:
                self._start()
            except Exception as error:  # arguments that can't be sent
                self.complete(error=error)
                self._drop()
        elif self._state is _CANCELLED:
            raise UsageError(f"{self} was cancelled, by a race or gather that is over: it can't be awaited any more")

    def _start(self) -> None:
        raise NotImplementedError

    def watch(self, watcher: Callable[[], None]) -> None:
        if self._watchers is None:
            self._watchers = [watcher]
        else:
            self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[], None]) -> None:
        """Whoever waits last takes the wait with it."""
        if self._watchers is not None and watcher in self._watchers:
            self._watchers.remove(watcher)
            if not self._watchers:
                self.cancel()

    def complete(self, value: Any = None, error: BaseException | None = None) -> None:
        state = self._state
        if state is _BEGUN or state is _NEW:
            self._state = _DONE
            self._value, self._error = value, error
            watchers, self._watchers = self._watchers, None
            if watchers is not None:
                for watcher in watchers:
                    watcher()

    def cancel(self) -> None:
        """Cancel the wait: nobody learns how it ends."""
        if not self.is_over:
            if self._state is _NEW:
                self._fibers.unbegun.pop(id(self), None)
            self._state = _CANCELLED
            self._watchers = None
            self._drop()

    def _drop(self) -> None:
        """Release what a cancelled wait waits for."""


class Fiber(Wait[T]):
    """A coroutine that runs beside the others of its handler, in the context ``variables`` from its first line to its
    last, also where it is closed."""

    __slots__ = ("_coroutine", "_thrown", "_variables", "_waits_for")

    def __init__(self, fibers: Fibers, coroutine: Coroutine[Any, Any, T], variables: contextvars.Context) -> None:
        super().__init__(fibers)
        self._coroutine = coroutine
        self._variables = variables
        self._waits_for: Wait[Any] | None = None
        self._thrown: BaseException | None = None  # in place of what it waits for

    def __str__(self) -> str:
        return getattr(self._coroutine, "__qualname__", "a coroutine")

    def _start(self) -> None:
        self._fibers.ready.append(self)

    @property
    def waits_for(self) -> Wait[Any] | None:
        return self._waits_for

    def frames(self) -> Iterator[FrameType]:
        """Yield the frames where the fiber waits: its coroutine and those that it awaits, the innermost last."""
        coroutine: Any = self._coroutine
        while isinstance(coroutine, CoroutineType) and coroutine.cr_frame is not None:
            yield coroutine.cr_frame
            coroutine = coroutine.cr_await

    def clear_away(self) -> None:
        """Close it, and those that it waits for, without a word to anybody: Python would do so at any time, in
        whatever context runs then."""
        with contextlib.suppress(BaseException):
            self._variables.run(self._coroutine.close)
        waiting = [self._waits_for]
        while waiting:
            if isinstance(wait := waiting.pop(), Fiber):
                wait.clear_away()
            elif wait is not None:
                waiting += wait.parts

    def give_up(self, error: BaseException) -> None:
        """End the fiber here with ``error``; it runs no more."""
        waits_for, self._waits_for = self._waits_for, None
        if waits_for is not None:
            waits_for.unwatch(self._resume)
        with contextlib.suppress(BaseException):  # what it does about that is of no interest any more
            self._variables.run(self._coroutine.close)
        self.complete(error=error)

    def throw(self, error: BaseException) -> None:
        """Raise ``error`` where it waits: what it waits for is given up, unless somebody else waits for that too."""
        waits_for, self._waits_for = self._waits_for, None
        self._thrown = error
        self._fibers.ready.append(self)
        if waits_for is not None:
            waits_for.unwatch(self._resume)

    def _resume(self) -> None:
        self._waits_for = None
        self._fibers.ready.append(self)

    def step(self) -> None:
        """Run up to the next wait. Raises what is meant for no coroutine (see :class:`Fibers`)."""
        if self._state is not _BEGUN:
            return
        try:
            thrown, self._thrown = self._thrown, None
            if thrown is None:
                awaited = self._variables.run(self._coroutine.send, None)
            else:
                awaited = self._variables.run(self._coroutine.throw, thrown)
        except StopIteration as stop:
            self.complete(stop.value)
        except BaseException as error:
            if not is_user_failure(error):
                raise
            self.complete(error=error)
        else:
            if isinstance(awaited, Wait) and awaited._fibers is self._fibers:
                self._waits_for = awaited
                awaited.watch(self._resume)
            else:
                refusal = misused_await(awaited, self.frames()) or foreign(awaited)
                self._variables.run(self._coroutine.close)
                self.complete(error=refusal)

    def _drop(self) -> None:
        waits_for, self._waits_for = self._waits_for, None
        if waits_for is not None:
            waits_for.unwatch(self._resume)
        try:
            self._variables.run(self._coroutine.close)
        except RuntimeError as error:
            if str(error) != "coroutine ignored GeneratorExit":
                raise
            raise UsageError(
                f"{self} has lost a race, or its gather has failed, and it goes on waiting in a 'finally' or 'except': "
                f"nobody would wait for that: use .fork(...) there"
            ) from error


def foreign(awaited: object) -> UsageError:
    what = "a bare 'yield', such as asyncio.sleep(0)," if awaited is None else f"a {type(awaited).__qualname__}"
    return UsageError(f"an async handler awaits {what} which no log would wake it from: {CAN_AWAIT}")


def as_wait(fibers: Fibers, awaitable: Awaitable[T]) -> Wait[T]:
    """Convert an argument of ``gather`` or ``race`` to a Wait. Raises UsageError."""
    if isinstance(awaitable, Wait) and awaitable.belongs_to(fibers):
        return awaitable
    if isinstance(awaitable, Coroutine):
        return Fiber(fibers, awaitable, inherited_context())
    raise foreign(awaitable)


class _Several(Wait[T]):
    """A wait for others, which has them to itself unless somebody else awaits them too."""

    __slots__ = ("_waits", "_watchers_of")

    def __init__(self, fibers: Fibers, waits: Sequence[Wait[Any]]) -> None:
        super().__init__(fibers)
        self._waits = waits
        self._watchers_of: list[Callable[[], None]] = []

    @property
    def parts(self) -> Sequence[Wait[Any]]:
        return self._waits

    def _start(self) -> None:
        for index, wait in enumerate(self._waits):
            if self.is_over:  # one that was done at once has decided it
                break
            wait.begin()
            watcher = partial(self._one_done, index)
            self._watchers_of.append(watcher)
            if wait.is_done:
                watcher()
            else:
                wait.watch(watcher)

    def _one_done(self, index: int) -> None:
        raise NotImplementedError

    def _drop(self) -> None:
        for index, wait in enumerate(self._waits):
            if index < len(self._watchers_of):
                wait.unwatch(self._watchers_of[index])
            else:  # not begun
                wait.cancel()


class Gather(_Several[tuple[Any, ...]]):
    """Done when all are, with their values; at the first error with that, and the others are cancelled."""

    __slots__ = ("_done_count",)

    def __init__(self, fibers: Fibers, waits: Sequence[Wait[Any]]) -> None:
        super().__init__(fibers, waits)
        self._done_count = 0

    def __str__(self) -> str:
        return f"gather({', '.join(map(str, self._waits))})"

    def _start(self) -> None:
        super()._start()
        if not self._waits:
            self.complete(())

    def _one_done(self, index: int) -> None:
        self._done_count += 1
        if (error := self._waits[index].error) is not None:
            self.complete(error=error)
            self._drop()
        elif self._done_count == len(self._waits):
            self.complete(tuple(each.value for each in self._waits))


@dataclass(frozen=True, slots=True)
class Winner(Generic[T]):
    """Result of a race: ``index`` (from 0) of the awaitable that was first, and its ``value``."""

    index: int
    value: T


class Race(_Several[Winner[Any]]):
    """Done when the first is, with its index and value, or its error; the others are cancelled."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"race({', '.join(map(str, self._waits))})"

    def _one_done(self, index: int) -> None:
        wait = self._waits[index]
        if wait.error is not None:
            self.complete(error=wait.error)
        else:
            self.complete(Winner(index, wait.value))
        self._drop()


# asyncio in an ``async def`` handler: no loop of its runs there, and its errors say so in words of its own.
#
# They are told by where they come from, and said with the name of what was used and what is used in its place.


_SEVERAL = (
    "await immortal.gather(...) or immortal.race(...) for several at once, and .fork(...) for what nobody waits for"
)
_EVENT = "wait with await immortal.event(...), which immortal.signal(...) in a 'def' handler ends"
_TIME = "await immortal.race(..., immortal.sleep(...)), or give the whole handler @rpc(timeout=...)"
_ALONE = (
    "nothing comes between two awaits: put what must not be disturbed into one 'def' handler (@rpc), or let one run at "
    "once with @rpc(limit=1)"
)
_ROWS = (
    ("sleep", "await immortal.sleep(...) or immortal.at(...)"),
    ("wait_for timeout timeout_at Timeout", _TIME),
    ("gather wait as_completed shield ensure_future create_task Task TaskGroup _GatheringFuture", _SEVERAL),
    ("Queue PriorityQueue LifoQueue", f"keep the items in the state, changed by 'def' handlers (@rpc), and {_EVENT}"),
    ("Event Condition Barrier create_future", _EVENT),
    ("Future wrap_future", f"{_EVENT}; what is done outside is an effect: await immortal.effect(<function>, ...)"),
    ("Lock Semaphore BoundedSemaphore", _ALONE),
)
_INSTEAD = {name: instead for names, instead in _ROWS for name in names.split()}
_EFFECT = "do it in an effect: await immortal.effect(<function>, ...)"
CAN_AWAIT = (
    "it can await calls (await self.<peer>.<method>(...)), its own handlers, immortal.effect, immortal.sleep, "
    "immortal.at, immortal.event, immortal.gather and immortal.race"
)
_TELLING = (  # in what asyncio raises where no loop runs
    "event loop",
    "'NoneType' object has no attribute",
    "inside a task",
    "parent task",
    "Passing coroutines is forbidden",
)


def asyncio_refusal(error: BaseException) -> UsageError | None:
    """Return the error to raise in place of ``error`` if asyncio raised it for lack of a loop; else None."""
    if not isinstance(error, RuntimeError | AttributeError | TypeError) or not any(
        text in str(error) for text in _TELLING
    ):
        return None
    frames = list(_frames_of(error))
    used = _name_of(frames)
    if used is None and str(error) != "no running event loop":  # which functions in C raise as well
        return None
    return _refusal(used or "get_running_loop").with_traceback(error.__traceback__)


def misused_await(what: object, frames: Iterator[FrameType]) -> UsageError | None:
    """The same, of what one awaits in ``frames``, the innermost last; None: it is none of asyncio's, or a bare
    'yield'."""
    if what is None:
        return None
    used = _name_of(list(frames))
    if used is None and type(what).__module__.partition(".")[0] in ("asyncio", "_asyncio"):
        used = type(what).__name__
    return None if used is None else _refusal(used)


def _refusal(used: str) -> UsageError:
    instead = _INSTEAD.get(used.partition(".")[0]) or (_EFFECT if _is_outside(used) else CAN_AWAIT)
    name = "gather" if used == "_GatheringFuture" else used
    return UsageError(
        f"asyncio.{name} in an async handler: asyncio does not run async handlers, and no log would wake one from it: "
        f"{instead}"
    )


def _is_outside(used: str) -> bool:
    return any(part in used for part in ("thread", "executor", "connection", "server", "subprocess", "Stream"))


def _frames_of(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _name_of(frames: list[FrameType]) -> str | None:
    """Return the name of the asyncio function that was called innermost: its first frame after the user's last one."""
    found: str | None = None
    for frame in reversed(frames):
        if not _is_asyncios(frame):
            break
        found = _called(frame)
    return found


def _is_asyncios(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "asyncio"


def _called(frame: FrameType) -> str:
    """Such as ``Queue.get``, ``Lock`` (of ``async with``), ``sleep``, ``run_in_executor``."""
    code: CodeType = frame.f_code
    of = frame.f_locals.get("self")
    if of is None or "<locals>" in code.co_qualname:
        return code.co_qualname.partition(".")[0]
    name = type(of).__name__
    if name.endswith("EventLoop"):
        return code.co_name
    return name if code.co_name.startswith("__") else f"{name}.{code.co_name}"
