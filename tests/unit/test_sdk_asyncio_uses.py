"""immortal.appsdk.waiting.waits: what of asyncio does not work in a handler is named, with what does."""

from __future__ import annotations

import asyncio
import concurrent.futures
import warnings
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from immortal import CalleeFailed, Immortal, rpc
from immortal.appsdk.determinism.check import check
from immortal.appsdk.handlers.definition import definition_of
from immortal.testing import Environment


async def sub() -> int:
    return 1


async def put() -> None:
    full: asyncio.Queue[int] = asyncio.Queue(1)
    await full.put(1)
    await full.put(2)


async def join() -> None:
    full: asyncio.Queue[int] = asyncio.Queue(1)
    await full.put(1)
    await full.join()


async def lock() -> None:
    taken = asyncio.Lock()
    async with taken, taken:
        pass


async def condition() -> None:
    made = asyncio.Condition()
    async with made:
        await made.wait()


async def semaphore() -> None:
    async with asyncio.Semaphore(0):
        pass


async def group() -> None:
    async with asyncio.TaskGroup() as made:
        made.create_task(sub())


async def timeout() -> None:
    async with asyncio.timeout(1):
        await sub()


async def completed() -> None:
    for one in asyncio.as_completed([sub()]):
        await one


async def wait() -> None:
    await asyncio.wait([sub()])  # type: ignore[type-var]


async def running() -> None:
    asyncio.get_running_loop()


async def wrapped() -> None:
    await asyncio.wrap_future(concurrent.futures.Future())


async def made_by_the_loop() -> None:
    await asyncio.get_event_loop().create_future()


Use = Callable[[], Awaitable[Any]]
USES: list[tuple[Use, str, str]] = [
    (lambda: asyncio.Queue[int]().get(), "asyncio.Queue.get", "immortal.event"),
    (lambda: asyncio.PriorityQueue[int]().get(), "asyncio.PriorityQueue.get", "keep the items in the state"),
    (put, "asyncio.Queue.put", "keep the items in the state"),
    (join, "asyncio.Queue.join", "immortal.event"),
    (lambda: asyncio.Event().wait(), "asyncio.Event.wait", "await immortal.event(...), which immortal.signal(...)"),
    (lambda: asyncio.Barrier(2).wait(), "asyncio.Barrier.wait", "immortal.event"),
    (condition, "asyncio.Condition.wait", "immortal.event"),
    (lock, "asyncio.Lock", "@rpc(limit=1)"),
    (semaphore, "asyncio.Semaphore", "@rpc(limit=1)"),
    (lambda: asyncio.sleep(1), "asyncio.sleep", "await immortal.sleep(...)"),
    (lambda: asyncio.sleep(0), "asyncio.sleep", "immortal.sleep"),
    (lambda: asyncio.wait_for(sub(), 1), "asyncio.wait_for", "@rpc(timeout=...)"),
    (timeout, "asyncio.timeout", "@rpc(timeout=...)"),
    (wait, "asyncio.wait", "immortal.gather"),
    (group, "asyncio.TaskGroup", "immortal.gather"),
    (completed, "asyncio.as_completed", "immortal.race"),
    (running, "asyncio.get_running_loop", "immortal.effect"),
    (wrapped, "asyncio.", "immortal.effect"),
    (made_by_the_loop, "asyncio.Future", "immortal.event"),
    (lambda: asyncio.to_thread(len, "a"), "asyncio.to_thread", "await immortal.effect(<function>, ...)"),
    (
        lambda: asyncio.open_connection("localhost", 1),
        "asyncio.open_connection",
        "await immortal.effect(<function>, ...)",
    ),
    (lambda: asyncio.create_subprocess_exec("true"), "asyncio.create_subprocess_exec", "await immortal.effect"),
    (lambda: asyncio.gather(sub(), sub()), "asyncio.gather", "immortal.gather"),
]


class Desk(Immortal):
    @rpc
    async def use(self, number: int) -> None:
        await USES[number][0]()

    @rpc
    async def own_error(self) -> None:
        raise AttributeError("'NoneType' object has no attribute 'create_future'")

    @rpc
    async def misused(self) -> None:
        asyncio.Queue[int]().get_nowait()


@pytest.fixture
def desk() -> Iterator[Any]:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)  # as a thread has that has used asyncio before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Environment(fail_alone=True) as env:
            yield env.start(Desk, "desk")
        asyncio.set_event_loop(None)
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()


@pytest.mark.parametrize(
    "number", range(len(USES)), ids=[f"{name} {number}" for number, (_, name, _) in enumerate(USES)]
)
def test_it_is_refused_by_name(desk: Any, number: int) -> None:
    _, name, instead = USES[number]
    with pytest.raises(CalleeFailed) as caught:
        desk.call(Desk.use, number)
    assert caught.value.type_name == "UsageError"
    assert name in caught.value.message
    assert instead in caught.value.message
    assert "NoneType" not in caught.value.message


def test_other_errors_stay_what_they_are(desk: Any) -> None:
    for handler, type_name in ((Desk.own_error, "AttributeError"), (Desk.misused, "QueueEmpty")):
        with pytest.raises(CalleeFailed) as caught:
            desk.call(handler)
        assert caught.value.type_name == type_name


class Locked(Immortal):
    @rpc
    async def use(self) -> None:
        async with asyncio.Lock():
            pass
        asyncio.Queue[int](3)
        asyncio.TaskGroup()


def test_what_would_work_until_somebody_waits_is_warned_of() -> None:
    found = [str(finding) for finding in check(definition_of(Locked))]
    for name, instead in (("asyncio.Lock", "immortal.event"), ("asyncio.TaskGroup", "immortal.gather")):
        assert [text for text in found if name in text and instead in text], found
