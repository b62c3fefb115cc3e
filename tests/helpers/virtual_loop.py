"""Plain asyncio loop with a virtual clock: shows what asyncio itself does with a program of timers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from immortal.appsdk.waiting.loop import HASH_FACTOR

T = TypeVar("T")


class WaitsForEverError(Exception):
    """Raised when all tasks of a program wait for each other."""


class NumberedTask(asyncio.Task[Any]):
    """Task with a fixed hash, as in a handler: a TaskGroup cancels its tasks in the order of a set."""

    def __init__(self, loop: VirtualLoop, coroutine: Any, **options: Any) -> None:
        loop.tasks_count += 1
        self.number = HASH_FACTOR + loop.tasks_count
        super().__init__(coroutine, loop=loop, **options)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class VirtualLoop(asyncio.SelectorEventLoop):
    """Loop whose time moves to the next timer as soon as nothing else is to do."""

    _scheduled: list[asyncio.TimerHandle]
    _ready: Any

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self.tasks_count = 0
        self.set_task_factory(NumberedTask)  # type: ignore[arg-type]

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        live = [handle.when() for handle in self._scheduled if not handle.cancelled()]
        if not self._ready and not live:
            raise WaitsForEverError
        if not self._ready:
            self._now_s = max(self._now_s, min(live))
        super()._run_once()  # type: ignore[misc]


def run_virtually(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run ``coroutine`` to its end on a loop of its own, as asyncio.run does; remaining tasks are cancelled in order.

    Raises WaitsForEverError where asyncio.run would hang.
    """
    loop = VirtualLoop()
    try:
        result = loop.run_until_complete(coroutine)
        left = sorted(asyncio.all_tasks(loop), key=lambda task: getattr(task, "number", 0))
        for task in left:
            task.cancel()
        if left:
            loop.tasks_count -= 1  # of the wait, which a handler lacks: cleanups of remaining tasks can create tasks
            loop.run_until_complete(asyncio.wait(left))
        loop.run_until_complete(loop.shutdown_asyncgens())
        return result
    finally:
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
