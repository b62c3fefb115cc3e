"""An asyncio loop that runs inside one ``async def`` handler, for libraries that are written for asyncio.

It is as deterministic as its handler: callbacks run first in, first out. Its clock is ``immortal.now()``, and a delay
is a timer of the handler, in its journal. There is no selector and no thread. What comes from outside comes
through :meth:`HandlerLoop.future_of`, from something that the handler could await itself: an effect, a call, an event.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from asyncio import events
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, TypeVarTuple, cast

from immortal.appsdk.errors import UsageError
from immortal.appsdk.functions import sleep
from immortal.appsdk.immortal import Immortal
from immortal.appsdk.waiting.task import Task
from immortal.appsdk.waiting.task_self import TaskSelf
from immortal.appsdk.waiting.waits import Wait, as_wait

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_WITHOUT = (
    "add_reader",
    "add_signal_handler",
    "connect_accepted_socket",
    "connect_read_pipe",
    "connect_write_pipe",
    "create_connection",
    "create_datagram_endpoint",
    "create_server",
    "create_unix_connection",
    "create_unix_server",
    "getaddrinfo",
    "getnameinfo",
    "sendfile",
    "sock_accept",
    "sock_connect",
    "sock_recv",
    "sock_recv_into",
    "sock_recvfrom",
    "sock_recvfrom_into",
    "sock_sendall",
    "sock_sendfile",
    "sock_sendto",
    "start_tls",
    "subprocess_exec",
    "subprocess_shell",
)
"""What libraries ask a loop for that this one does not have."""


def task_of(handler_self: Immortal, what: str) -> Task:
    """Return the run of the ``async def`` handler whose ``self`` is given. Raises UsageError."""
    given: Any = handler_self  # it says that it is of the app's class
    if type(given) is not TaskSelf:
        raise UsageError(f"{what}: the first argument is the self of an 'async def' handler, not {given!r}")
    return given._immortal_task


class _Woken(Wait[None]):
    """Wait that ends when the loop has something to do. It is not in the journal: what woke the loop is."""

    __slots__ = ()

    def __str__(self) -> str:
        return "what its asyncio tasks wait for"

    def _start(self) -> None:
        pass


class HandlerLoop(asyncio.AbstractEventLoop):
    """asyncio loop for one coroutine of one handler: ``await HandlerLoop(self).run(coroutine)``. Raises UsageError."""

    def __init__(self, handler_self: Immortal) -> None:
        self.handler_self = handler_self
        self.handler_task = task_of(handler_self, "HandlerLoop")
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: dict[asyncio.TimerHandle, Wait[None]] = {}
        self._tasks: list[asyncio.Task[Any]] = []  # that are not done
        self._woken: _Woken | None = None
        self._is_closed = False
        self.stamped: dict[int, object] = {}  # by identity: what was given the handler's time already

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` and return what it returns. Tasks that it left unfinished are cancelled with it."""
        main = self.create_task(coroutine)
        try:
            while True:
                self._turn()
                if main.done():
                    return cast(T, main.result())
                self._woken = _Woken(self.handler_task)
                await self._woken
        finally:
            self.close()

    def future_of(self, awaitable: Awaitable[T]) -> asyncio.Future[T]:
        """Return a future, for this loop's coroutines, of what a handler gets for ``awaitable``. Raises UsageError.

        Where the future is cancelled, nobody waits any more.
        """
        if self._is_closed:
            raise asyncio.CancelledError("the coroutine that this loop was made for has ended")
        wait = as_wait(self.handler_task, awaitable)
        future: asyncio.Future[T] = self.create_future()

        def done() -> None:
            if not future.done():
                if wait.error is None:
                    future.set_result(wait.value)
                else:
                    future.set_exception(wait.error)
            self._wake()

        def let_go(ended: asyncio.Future[T]) -> None:
            if ended.cancelled():
                wait.unwatch(done)

        wait.begin()
        if wait.is_done:
            done()
        else:
            wait.watch(done)
            future.add_done_callback(let_go)
        return future

    def _wake(self) -> None:
        woken, self._woken = self._woken, None
        if woken is not None:
            woken.complete()

    def _turn(self) -> None:
        """Run the ready callbacks, and those that they make ready."""
        outer = events._get_running_loop()  # of a test, or of who runs the handlers
        events._set_running_loop(self)
        try:
            while self._ready:
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            events._set_running_loop(outer)

    # --- asyncio's side -----------------------------------------------------------------------------------------------

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        self._wake()
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> NoReturn:
        # NotImplementedError is what libraries expect of a loop that no other thread may disturb.
        raise NotImplementedError(
            "a handler's loop is woken by the log alone: another thread can't give it anything, as no replay would"
        )

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Set a timer of the handler, ``delay`` seconds from now: it outlives crashes."""
        handle = asyncio.TimerHandle(self.time() + delay, callback, args, self, context)
        if delay <= 0:
            self._ready.append(handle)
            self._wake()
            return handle
        wait: Any = sleep(timedelta(seconds=delay))
        self._timers[handle] = wait
        handle._scheduled = True  # type: ignore[attr-defined]  # asyncio's mark: cancel() then tells of it below

        def due() -> None:
            self._timers.pop(handle, None)
            self._ready.append(handle)
            self._wake()

        wait.begin()
        wait.watch(due)
        return handle

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_later(when - self.time(), callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if (wait := self._timers.pop(handle, None)) is not None:
            wait.cancel()

    def time(self) -> float:
        """Return the handler's clock, in seconds."""
        return self.handler_task.now_ns() / 1e9

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, **options)
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)
        return task

    def get_task_factory(self) -> None:
        return None

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Run the function at once and here: what a thread does is in no log."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._is_closed

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._is_closed:
            logging.getLogger("asyncio").error(
                "%s", context.get("message", "an asyncio task failed"), exc_info=context.get("exception")
            )

    async def shutdown_asyncgens(self) -> None:
        pass

    def close(self) -> None:
        """Cancel all tasks that have not ended, and wait for nothing more."""
        if self._is_closed:
            return
        self._is_closed = True
        self._woken = None
        for task in list(self._tasks):
            task.cancel()
        self._turn()
        for task in self._tasks:  # those that do not let go
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        for wait in list(self._timers.values()):
            wait.cancel()
        self._timers.clear()
        self._ready.clear()


def _without(name: str) -> Callable[..., NoReturn]:
    def refuse(self: HandlerLoop, *args: Any, **options: Any) -> NoReturn:
        raise UsageError(
            f"{self.handler_task.name}: its asyncio code asks for {name}, and handlers do not reach the outside world: "
            f"what does belongs into an effect"
        )

    return refuse


for _name in _WITHOUT:
    setattr(HandlerLoop, _name, _without(_name))
