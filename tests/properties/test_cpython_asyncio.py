"""CPython's own tests of asyncio, on the loop of handlers: what of asyncio stays inside a process does the same there.

Left out: what is about threads, sockets, the loop's own policy and debug mode, and mocks of a loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import importlib
import unittest
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from immortal.appsdk.waiting.loop import HandlerLoop, LazyFuture

MODULES = ["test_locks", "test_queues", "test_taskgroups", "test_timeouts", "test_waitfor"]
LEFT_OUT = ("test_nested_timeouts",)  # two timers of one moment wake a handler one after the other, each in its turn


class _Timer(LazyFuture[None]):
    __slots__ = ()

    def __str__(self) -> str:
        return "a timer"

    def _start(self) -> None:
        pass


class DrivenLoop(HandlerLoop):
    """A handler's loop that a test runs, with a virtual clock in place of a log."""

    def __init__(self) -> None:
        super().__init__(deque())
        self.number = 1
        self.left = []  # it has no task of a handler, behind which it would stop
        self._now_ns = 10**18
        self._timers: list[tuple[int, int, asyncio.TimerHandle]] = []
        self._is_closed = False

    @property
    def name(self) -> str:
        return "a test"

    def now_ns(self) -> int:
        return self._now_ns

    def start_timer(self, due_ns: int, handle: asyncio.TimerHandle) -> LazyFuture[None]:
        heapq.heappush(self._timers, (due_ns, self.next_future_number(), handle))
        return _Timer(self)

    def report(self, text: str, error: BaseException | None) -> None:
        pass

    def run_until_complete(self, future: Any) -> Any:
        task = asyncio.ensure_future(future, loop=self)
        while not task.done():
            self.run_ready(None, ())
            if task.done():
                break
            assert self._timers, "nothing would wake it"
            self._now_ns, _, handle = heapq.heappop(self._timers)
            if not handle.cancelled():
                self.ready.append(handle)
        return task.result()

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self.ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def set_debug(self, enabled: bool) -> None:
        pass

    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self._is_closed = True

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        pass


DrivenLoop.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


class Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return DrivenLoop()  # type: ignore[abstract]


def cases(module: str) -> list[Any]:
    found = importlib.import_module(f"test.test_asyncio.{module}")
    suites: Any = unittest.defaultTestLoader.loadTestsFromModule(found)
    tests = [test for suite in suites for test in suite if isinstance(test, unittest.IsolatedAsyncioTestCase)]
    return [test for test in tests if not test.id().rpartition(".")[2].startswith(LEFT_OUT)]


@pytest.mark.parametrize("module", MODULES)
def test_cpythons_own_tests_pass_on_a_handlers_loop(module: str) -> None:
    pytest.importorskip(f"test.test_asyncio.{module}", reason="this Python is installed without its tests")
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(Policy())
    try:
        result = unittest.TestResult()
        tests = cases(module)
        unittest.TestSuite(tests).run(result)
    finally:
        asyncio.set_event_loop_policy(before)
    said = {
        test.id().partition(f"{module}.")[2]: text.splitlines()[-1] for test, text in result.failures + result.errors
    }
    assert said == {}
    assert result.testsRun >= len(tests) > 10
