"""CPython's own tests of asyncio, on the loop of handlers: what of asyncio stays inside a process does the same there.

Left out: what is about threads, sockets, a loop that its user makes, runs and stops, and what LEFT_OUT lists.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import heapq
import importlib
import sys
import unittest
from collections.abc import Callable
from typing import Any

import pytest

from immortal.appsdk.waiting.loop import HandlerLoop, LazyFuture, Ready

LEFT_OUT = {
    "two timers of one moment wake a handler one after the other, each in its turn": ["test_nested_timeouts"],
    "there is no debug mode": ["test_future_source_traceback", "test_future_repr", "test_task_source_traceback"],
    "failures that nobody looks at go to the handler's log": [
        "test_future_exception_never_retrieved",
        "test_tb_logger_exception_unretrieved",
        "test_log_destroyed_pending_task",
        "test_issue46672",
    ],
    "SystemExit ends a task, not the app": ["test_baseexception_during_cancel"],
    "they mock a loop, or count what it calls": [
        "test_error_in_call_soon",
        "test_set_exception_causes_invalid_state",
        "test_set_result_causes_invalid_state",
        "test_subclasses_",
    ],
    "nobody stops a handler's loop": ["test_stop_while_run_in_complete"],
    "there are no threads": ["test_run_coroutine_threadsafe"],
}
MODULES = {  # with the number of tests that pass at least
    "test_locks": 70,
    "test_queues": 40,
    "test_taskgroups": 25,
    "test_timeouts": 10,
    "test_waitfor": 10,
    "test_futures": 130,
    "test_futures2": 3,
    "test_tasks": 800,
}


class _Timer(LazyFuture[None]):
    __slots__ = ()

    def __str__(self) -> str:
        return "a timer"

    def _start(self) -> None:
        pass


class DrivenLoop(HandlerLoop):
    """A handler's loop that a test runs, with a virtual clock in place of a log."""

    def __init__(self) -> None:
        super().__init__(Ready())
        self.number = 1
        self.left = None  # it stops one turn behind the end of what it runs
        self._now_ns = 0
        self._task_factory: Any = None
        self.main: Any = None
        self._timers: list[tuple[int, int, asyncio.TimerHandle]] = []
        self._is_closed = False

    @property
    def _ready(self) -> Any:
        return self.ready

    @property
    def name(self) -> str:
        return "a test"

    def now_ns(self) -> int:
        return self._now_ns

    def start_timer(self, due_ns: int, handle: asyncio.TimerHandle) -> LazyFuture[None]:
        timer = _Timer(self)
        heapq.heappush(self._timers, (due_ns, timer._number, handle))
        return timer

    def report(self, text: str, error: BaseException | None) -> None:
        pass

    def run_until_complete(self, future: Any) -> Any:
        outer, self.main = self.main, asyncio.ensure_future(future, loop=self)
        task = self.main
        try:
            while not task.done():
                self.run_ready(None, ())
                if task.done():
                    break
                assert self._timers, "nothing would wake it"
                self._now_ns, _, handle = heapq.heappop(self._timers)
                if not handle.cancelled():
                    self.ready.append(handle)
        finally:
            self.main = outer
        return task.result()

    def run_forever(self) -> None:
        self._end = self.create_future()
        self.run_until_complete(self._end)

    def stop(self) -> None:
        self._end.set_result(None)

    def advance_time(self, duration_s: float) -> None:
        self._now_ns += int(duration_s * 1e9)

    def set_task_factory(self, factory: Any) -> None:
        self._task_factory = factory

    def create_task(self, coro: Any, **options: Any) -> Any:
        return self._task_factory(self, coro, **options) if self._task_factory else super().create_task(coro, **options)

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
    left_out = tuple(name for names in LEFT_OUT.values() for name in names)
    tests = [test for suite in suites for test in suite if not test.id().rpartition(".")[2].startswith(left_out)]
    if sys.version_info[:2] == (3, 11):
        return tests
    return [test for test in tests if isinstance(test, unittest.IsolatedAsyncioTestCase)]  # others drive 3.11's loops


def make_loop(case: Any, times: object = None) -> DrivenLoop:
    """Return the loop of a test, in place of asyncio's that expects to be asked to wait for these times."""
    loop = DrivenLoop()  # type: ignore[abstract]
    case.set_event_loop(loop, cleanup=False)
    return loop


@pytest.mark.parametrize("module", MODULES)
def test_cpythons_own_tests_pass_on_a_handlers_loop(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(f"test.test_asyncio.{module}", reason="this Python is installed without its tests")
    case = importlib.import_module("test.test_asyncio.utils").TestCase
    monkeypatch.setattr(case, "new_test_loop", make_loop)
    monkeypatch.setattr(case, "close_loop", staticmethod(DrivenLoop.close))
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(Policy())
    try:
        result = unittest.TestResult()
        tests = cases(module)
        gc.freeze()  # some tests collect garbage again and again, and need not look through all that pytest holds
        unittest.TestSuite(tests).run(result)
    finally:
        gc.unfreeze()
        asyncio.set_event_loop_policy(before)
    said = {
        test.id().partition(f"{module}.")[2]: text.splitlines()[-1] for test, text in result.failures + result.errors
    }
    assert said == {}
    assert result.testsRun >= len(tests)
    assert len(tests) >= MODULES[module] or sys.version_info[:2] != (3, 11)
