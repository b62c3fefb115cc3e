"""Runs effects in the app's process: an ``async def`` on an asyncio loop, a ``def`` in a thread.

The loop has a thread of its own, which is started with the first effect. There each effect is a task: it waits for one
of the places, runs an attempt, answers, or waits for the next attempt (and leaves its place to others meanwhile). All
threads are daemons: the process never waits for them, whatever the user's code is at.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from appsdk.effect_request import EffectRequest, encodable

SAY_INTERVAL_S = 10.0  # between two lines about failed attempts of one function
STOP_TIMEOUT_S = 1.0  # for what an async effect does when it is cancelled at the end

_OF_THE_FUNCTION = (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError)  # not: that the loop is no more


class OutsideRunner:
    """An EffectRunner. ``places``: how many attempts run at once. ``warn`` is told, by any thread, what people should
    know."""

    def __init__(self, places: int, warn: Callable[[str], None]) -> None:
        self._places_count = places
        self._warn = warn
        self._warned: set[str] = set()
        self._quiet_until_s: dict[str, float] = {}  # by name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: dict[EffectRequest, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(places)

    # --- the handlers' thread -----------------------------------------------------------------------------------------

    def start(self, request: EffectRequest) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._threads = _Threads(self._loop)
            self._thread = threading.Thread(target=self._run_loop, args=(self._loop,), name="effects", daemon=True)
            self._thread.start()
        self._loop.call_soon_threadsafe(self._begin, request)

    def cancel(self, request: EffectRequest) -> None:
        if self._loop is not None and not request.is_done:
            self._loop.call_soon_threadsafe(self._cancel, request)

    def stop(self) -> None:
        """The app ends: what still runs is cancelled, and for a moment waited for."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._end()))
            self._thread.join(2 * STOP_TIMEOUT_S)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        if not self._tasks:  # else one does not let go: it ends with the process
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    async def _end(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=STOP_TIMEOUT_S)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, problem: None)  # of tasks that do not let go there is no more to say
        loop.stop()

    def _begin(self, request: EffectRequest) -> None:
        if not request.is_cancelled:
            task = self._tasks[request] = asyncio.ensure_future(self._run(request))
            task.add_done_callback(lambda task: self._tasks.pop(request))

    def _cancel(self, request: EffectRequest) -> None:
        if (task := self._tasks.get(request)) is not None:
            task.cancel()

    async def _run(self, request: EffectRequest) -> None:
        attempt = 0
        while True:
            attempt += 1
            try:
                request.returned(await self._attempt(request, attempt))
                return
            except _OF_THE_FUNCTION as error:
                if self._tasks[request].cancelling():  # by us: nobody waits for it any more
                    return
                wait_s = request.wait_s(error, attempt)
                if wait_s is None:
                    request.raised(error, attempt)
                    return
                self._say_retry(request.name, attempt, error, wait_s)
            await asyncio.sleep(wait_s)

    async def _attempt(self, request: EffectRequest, attempt: int) -> Any:
        await self._places.acquire()
        timeout_s = None if request.options.timeout is None else request.options.timeout.total_seconds()
        timeout = asyncio.timeout(timeout_s)
        try:
            if request.is_async:
                try:
                    async with timeout:
                        return await request.call_async(attempt)
                finally:
                    self._places.release()
            done = self._threads.run(lambda: request.call(attempt))
            done.add_done_callback(lambda done: self._places.release())
            async with timeout:
                return await asyncio.shield(done)
        except TimeoutError as error:
            if not timeout.expired():
                raise
            if not request.is_async:
                self._warn_of(request.name)
            # Where an 'async def' waited is worth knowing; of a thread there is nothing to see.
            raise TimeoutError(f"nothing returned within {timeout_s:g} s") from (error if request.is_async else None)

    def _say_retry(self, name: str, attempt: int, error: BaseException, wait_s: float) -> None:
        now_s = time.monotonic()
        if now_s >= self._quiet_until_s.get(name, 0.0):
            self._quiet_until_s[name] = now_s + SAY_INTERVAL_S
            failure = f"{type(error).__name__}: {encodable(error)}"
            self._warn(
                f"warning: attempt {attempt} at the effect {name} has failed ({failure}); the next in {wait_s:g} s"
            )

    def _warn_of(self, name: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            self._warn(
                f"warning: the effect {name} is past its timeout, and its thread goes on, since no thread can be ended "
                f"from outside: it takes one of {self._places_count} places until it ends by itself; give what it "
                f"waits for a timeout of its own"
            )


class _Threads:
    """Threads that run one call after the other, made when all others are busy. To be used on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._idle: list[SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]]] = []

    def run(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        if self._idle:
            work = self._idle.pop()
        else:
            work = SimpleQueue()
            threading.Thread(target=self._work, args=(work,), name="effect", daemon=True).start()
        done: asyncio.Future[Any] = self._loop.create_future()
        work.put((function, done))
        return done

    def _work(self, work: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]]) -> None:
        while True:
            function, done = work.get()
            value, error = None, None
            try:
                value = function()
            except BaseException as raised:  # a thread has nobody else to tell
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: the app ends
                self._loop.call_soon_threadsafe(self._end, work, done, value, error)
            del function, done, value, error

    def _end(
        self,
        work: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]],
        done: asyncio.Future[Any],
        value: Any,
        error: BaseException | None,
    ) -> None:
        self._idle.append(work)
        if error is None:
            done.set_result(value)
        else:
            # A future takes no StopIteration.
            done.set_exception(RuntimeError(f"it raised {error!r}") if isinstance(error, StopIteration) else error)
