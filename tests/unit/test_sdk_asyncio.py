"""Asyncio in ``async def`` handlers: each tool of it does what it does on asyncio's own loop, and outlives a crash."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import anyio
import pytest

import immortal
from immortal import CalleeFailed, Immortal, rpc
from immortal.appsdk.determinism.check import check
from immortal.appsdk.handlers.definition import definition_of
from immortal.testing import Environment, crash_everywhere
from tests.helpers.effort import effort
from tests.helpers.virtual_loop import run_virtually

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="none")


async def later(seconds: float, value: Any) -> Any:
    await asyncio.sleep(seconds)
    if isinstance(value, BaseException):
        raise value
    return value


async def gathers() -> Any:
    return await asyncio.gather(later(2, "a"), later(1, ValueError("b")), later(3, "c"), return_exceptions=True)


async def gathers_and_fails() -> Any:
    slow = asyncio.create_task(later(5, "slow"))
    try:
        await asyncio.gather(slow, later(1, ValueError("b")))
    except ValueError as error:
        return str(error), await slow  # it goes on


async def times_out() -> Any:
    seen = []
    try:
        async with asyncio.timeout(2):
            try:
                await asyncio.sleep(10)
            finally:
                await asyncio.sleep(3)
                seen.append("cleaned up")
    except TimeoutError:
        seen.append("late")
    async with asyncio.timeout(2) as limit:
        limit.reschedule(asyncio.get_running_loop().time() + 20)
        await asyncio.sleep(10)
    seen.append(str(limit.expired()))
    return seen


async def sleeps_for_ever() -> Any:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1):
            await asyncio.sleep(math.inf)
    with anyio.move_on_after(1) as scope:
        await anyio.sleep_forever()
    return scope.cancelled_caught


async def waits_for() -> Any:
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(later(5, "late"), 2)
    return await asyncio.wait_for(later(1, "in time"), 2)


async def waits() -> Any:
    tasks = [asyncio.create_task(later(number, number), name=f"n{number}") for number in (3, 1, 2)]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    more, none = await asyncio.wait(pending, timeout=1.5)
    return [sorted(one.get_name() for one in group) for group in (done, more, none)]


async def as_completed() -> Any:
    tasks = [asyncio.create_task(later(seconds, seconds)) for seconds in (3, 1, 2)]
    return [await one for one in asyncio.as_completed(tasks)]


async def groups() -> Any:
    seen = []
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(later(number, number)) for number in (2, 1)]
    seen.append([task.result() for task in tasks])
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(later(1, ValueError("one")))
            group.create_task(later(1, KeyError("two")))
            lost = group.create_task(later(9, "lost"))
            await asyncio.sleep(10)
    except* ValueError as errors:
        seen.append([str(error) for error in errors.exceptions])
    except* KeyError:
        pass
    return seen, lost.cancelled()


async def shields() -> Any:
    inner = asyncio.create_task(later(5, "kept"))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1):
            await asyncio.shield(inner)
    return await inner


async def cancels() -> Any:
    async def stubborn() -> str:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            assert current is not None
            return f"{error} {current.cancelling()} {current.uncancel()}"
        return "never"

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(1)
    task.cancel("enough")
    return await task, task.cancelled()


async def locks() -> Any:
    lock, seen = asyncio.Lock(), []

    async def one(name: str) -> None:
        async with lock:
            seen.append(f"{name} in")
            await asyncio.sleep(1)
            seen.append(f"{name} out")

    await asyncio.gather(one("a"), one("b"))
    return seen


async def queues() -> Any:
    queue: asyncio.Queue[int] = asyncio.Queue(1)
    seen: list[int] = []

    async def consume() -> None:
        while True:
            seen.append(await queue.get())
            await asyncio.sleep(1)
            queue.task_done()

    consumer = asyncio.create_task(consume())
    for number in range(3):
        await queue.put(number)
    await queue.join()
    consumer.cancel()
    return seen


async def events() -> Any:
    event, condition, barrier = asyncio.Event(), asyncio.Condition(), asyncio.Barrier(2)
    seen = []

    async def one() -> None:
        await event.wait()
        async with condition:
            await condition.wait()
        seen.append(await barrier.wait())

    async def other() -> None:
        await asyncio.sleep(1)
        event.set()
        await asyncio.sleep(1)
        async with condition:
            condition.notify_all()
        seen.append(await barrier.wait())

    await asyncio.gather(one(), other())
    async with asyncio.Semaphore(1), asyncio.BoundedSemaphore(1):
        return sorted(seen)


async def generates() -> Any:
    seen = []

    async def numbers() -> AsyncIterator[int]:
        try:
            for number in range(10):
                await asyncio.sleep(1)
                yield number
        finally:
            await asyncio.sleep(1)
            seen.append(99)

    async for number in numbers():
        seen.append(number)
        if number == 2:
            break
    await asyncio.sleep(5)
    async with contextlib.aclosing(numbers()) as more, contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.sleep, 1)
        seen.append(await anext(more))
    return seen


async def has_contexts() -> Any:
    async def one(value: str) -> str:
        VARIABLE.set(value)
        await asyncio.sleep(1)
        return VARIABLE.get()

    return await asyncio.gather(one("a"), one("b")), VARIABLE.get()


async def leaves_tasks() -> Any:
    async def left() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(1)

    task = asyncio.create_task(left())
    await asyncio.sleep(1)
    return task.done()


async def sets() -> Any:
    tasks = [asyncio.create_task(later(1, number)) for number in range(100)]
    done, _ = await asyncio.wait(tasks)
    return len(asyncio.all_tasks()), [task.result() for task in sorted(done, key=tasks.index)]


async def yields() -> Any:
    seen = []

    async def count(name: str) -> None:
        for number in range(3):
            seen.append(f"{name}{number}")
            await asyncio.sleep(0)

    await asyncio.gather(count("a"), count("b"))
    return seen


async def uses_anyio() -> Any:
    seen = []
    send, receive = anyio.create_memory_object_stream[str](1)

    async def produce() -> None:
        async with send:
            for text in "abc":
                await send.send(text)
                await anyio.sleep(1)

    async with anyio.create_task_group() as group:
        group.start_soon(produce)
        async with receive:
            seen += [text async for text in receive]
    with anyio.move_on_after(1) as scope:
        await anyio.sleep(5)
    return seen, scope.cancelled_caught


PROGRAMS: list[Callable[[], Awaitable[Any]]] = [
    *(gathers, gathers_and_fails, times_out, sleeps_for_ever, waits_for, waits, as_completed, groups, shields),
    *(cancels, locks, queues, events, generates, has_contexts, leaves_tasks, sets, yields, uses_anyio),
]


class Desk(Immortal):
    seen: list[int]

    def __init__(self) -> None:
        self.seen = []

    @rpc
    def note(self, number: int) -> int:
        self.seen.append(number)
        return len(self.seen)

    @rpc
    async def ask(self, number: int) -> int:
        await asyncio.sleep(number)
        return await immortal.step(self.note, number)

    @rpc
    async def run(self, index: int) -> str:
        return str(await PROGRAMS[index]())

    @rpc
    async def waits_for_a_set(self) -> list[Any]:
        done, _ = await asyncio.wait(
            {self.ask(1), self.ask(2), immortal.step(self.note, 0), immortal.sleep(timedelta(1))}
        )
        return [one.result() for one in done]

    @rpc
    async def mixes(self) -> list[Any]:
        found: list[Any] = await asyncio.gather(
            self.ask(3), immortal.step(self.note, 0), immortal.sleep(timedelta(seconds=1))
        )
        async with asyncio.TaskGroup() as group:
            one = group.create_task(self.ask(2))
            two = group.create_task(self.ask(1))
        found += [one.result(), two.result()]
        try:
            async with asyncio.timeout(5):
                await immortal.event("never")
        except TimeoutError:
            found.append("late")
        winner = await immortal.race(asyncio.sleep(5), self.ask(1))
        return [*found, winner.index]

    @rpc
    async def forgets(self) -> None:
        async def fail() -> None:
            raise ValueError("forgotten")

        asyncio.create_task(fail())  # noqa: RUF006 (that is what is wrong here)
        await asyncio.sleep(1)

    @rpc
    async def refused(self, index: int) -> str:
        return str(await OUTSIDE[index][0]())


async def in_an_executor() -> None:
    await asyncio.get_running_loop().run_in_executor(None, len, "a")


async def on_a_signal() -> None:
    asyncio.get_running_loop().add_signal_handler(2, print)


async def from_a_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.get_running_loop().call_soon, print).result()


async def in_any_order() -> None:
    for one in asyncio.as_completed([later(1, "a"), later(2, "b")]):
        await one


async def never() -> None:
    await asyncio.Event().wait()


OUTSIDE: list[tuple[Callable[[], Awaitable[Any]], list[str]]] = [
    (lambda: asyncio.to_thread(len, "a"), ["run_in_executor", "await immortal.effect(<function>, ...)"]),
    (in_an_executor, ["run_in_executor", "immortal.effect"]),
    (lambda: asyncio.open_connection("localhost", 1), ["create_connection", "immortal.effect"]),
    (lambda: asyncio.start_server(print, "localhost", 1), ["create_server", "immortal.effect"]),
    (lambda: asyncio.create_subprocess_exec("true"), ["subprocess_exec", "immortal.effect"]),
    (on_a_signal, ["add_signal_handler", "immortal.effect"]),
    (from_a_thread, ["other code has touched", "immortal.signal"]),
    (in_any_order, ["as_completed", "asyncio.create_task"]),
    (never, ["wait for each other, and for nothing that could come", "test_sdk_asyncio.py, line ", "never"]),
]


@pytest.mark.parametrize("index", range(len(PROGRAMS)), ids=[program.__name__ for program in PROGRAMS])
def test_a_program_does_in_a_handler_what_it_does_on_asyncios_own_loop(index: int) -> None:
    async def program() -> str:
        return str(await PROGRAMS[index]())

    expected = run_virtually(program())
    for env in crash_everywhere(runs_max=6):
        with env:
            assert env.start(Desk, "desk").call(Desk.run, index) == expected


def test_what_the_sdk_offers_mixes_with_asyncio() -> None:
    for env in crash_everywhere(runs_max=effort(8)):
        with env:
            desk = env.start(Desk, "desk")
            assert desk.call(Desk.mixes) == [2, 1, None, 4, 3, "late", 1]
            assert desk.state.seen == [0, 3, 1, 2, 1]


def test_a_set_of_calls_begins_and_ends_in_one_order() -> None:
    found = set()
    for env in crash_everywhere(runs_max=10):
        with env:
            found.add(str(env.start(Desk, "desk").call(Desk.waits_for_a_set)))
    assert len(found) == 1


def test_a_failed_task_that_nobody_awaits_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    with Environment() as env:
        desk = env.start(Desk, "desk")
        desk.call(Desk.forgets)
        desk.crash()
        desk.recover()
    assert capfd.readouterr().err.count("Task exception was never retrieved") == 1


@pytest.mark.parametrize("index", range(len(OUTSIDE)))
def test_what_would_leave_the_log_is_refused_by_name(index: int) -> None:
    with Environment(fail_alone=True) as env, pytest.raises(CalleeFailed) as caught:
        env.start(Desk, "desk").call(Desk.refused, index)
    assert caught.value.type_name == "UsageError"
    for text in OUTSIDE[index][1]:
        assert text in caught.value.message


class Threads(Immortal):
    @rpc
    async def use(self) -> None:
        async with asyncio.Lock(), asyncio.timeout(5):
            await asyncio.to_thread(len, "a")


def test_threads_are_warned_of_before_they_run() -> None:
    (finding,) = map(str, check(definition_of(Threads)))
    assert "asyncio.to_thread" in finding
    assert "immortal.effect" in finding
