"""Asyncio loop in its own thread, for ``async def`` effects and delayed calls."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Hashable
from functools import partial
from typing import Any

STOP_TIMEOUT_S = 1.0  # for the clean-up of an async effect that is cancelled at the end


class EffectLoop:
    """Runs coroutines and timers by key, so that they can be cancelled. Any thread can call it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}
        self._timers: dict[Hashable, asyncio.TimerHandle] = {}
        self._actions: deque[Callable[[], object]] = deque()
        self._is_woken = self._has_ended = False
        self._thread = threading.Thread(target=self._serve, name="effects", daemon=True)
        self._thread.start()

    def run(
        self, key: Hashable, function: Callable[[], Coroutine[Any, Any, None]], context: contextvars.Context
    ) -> None:
        """Run a coroutine as a task in ``context``."""

        def start() -> None:
            task = self._tasks[key] = self._loop.create_task(function(), context=context)
            task.add_done_callback(partial(self._forget_task, key))

        self._enqueue(start)

    def call_later(self, wait_s: float, key: Hashable, function: Callable[[], None]) -> None:
        """Call ``function`` on the loop after ``wait_s`` seconds."""

        def fire() -> None:
            del self._timers[key]
            function()

        def start() -> None:
            self._timers[key] = self._loop.call_later(wait_s, fire)

        self._enqueue(start)

    def cancel(self, key: Hashable) -> None:
        """Cancel the task of ``key``, and remove its timer; do nothing if there is neither."""

        def cancel() -> None:
            if (timer := self._timers.pop(key, None)) is not None:
                timer.cancel()
            if (task := self._tasks.get(key)) is not None:
                task.cancel()

        self._enqueue(cancel)

    def stop(self) -> None:
        """Cancel all tasks, and wait a moment until they have ended."""
        self._enqueue(lambda: asyncio.ensure_future(self._end()))
        self._thread.join(2 * STOP_TIMEOUT_S)

    def _enqueue(self, action: Callable[[], object]) -> None:
        self._actions.append(action)
        if not self._is_woken:  # a call of the loop from another thread is a system call
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: the app ends
                self._loop.call_soon_threadsafe(self._run_actions)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._has_ended:
            try:
                self._loop.run_forever()
            except BaseException:  # noqa: S112 (of a task that an effect has made: asyncio raises some here as well)
                continue
        if not self._tasks:  # else a task does not end: it ends with the process
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _run_actions(self) -> None:
        self._is_woken = False  # first, so that later requests wake the loop again
        while self._actions:
            self._actions.popleft()()

    def _forget_task(self, key: Hashable, task: asyncio.Task[None]) -> None:
        if self._tasks[key] is task:  # not the next attempt's
            del self._tasks[key]

    async def _end(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=STOP_TIMEOUT_S)
        # No more reports of tasks that do not end.
        self._loop.set_exception_handler(lambda loop, problem: None)
        self._has_ended = True
        self._loop.stop()
