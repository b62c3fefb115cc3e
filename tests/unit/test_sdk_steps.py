"""``async def`` handlers and the state: attributes that they read, and local functions that they run as steps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import immortal
from immortal import CalleeFailed, Immortal, Transient, peer, rpc
from immortal.testing import Environment, crash_everywhere
from tests.helpers.effort import effort

LOOKS: list[str] = []


class Bank(Immortal):
    def __init__(self) -> None:
        self.total = 0

    total: int

    @rpc
    def add(self, amount: int) -> int:
        self.total += amount
        return self.total


class Shop(Immortal):
    bank = peer(Bank, "bank")
    sold: int
    items: dict[str, list[int]]
    large: str
    cache: Transient[list[int]]

    def __init__(self) -> None:
        self.sold = 0
        self.items = {}
        self.large = ""

    def prepare(self) -> None:
        self.cache = [1]

    @rpc
    def fill(self) -> None:
        self.large = "x" * 100_000

    @rpc
    async def sell(self, name: str, count: int) -> list[Any]:
        before = self.sold

        def note(first: int, second: int = 0) -> tuple[int, ...]:
            self.sold += count
            self.items.setdefault(name, []).append(count)
            self.bank.add.fork(first + second)
            return self.sold, len(self.items)

        noted = await immortal.step(note, 1, second=2)
        await asyncio.sleep(10)
        read = self.items
        total = await self.bank.add(100)
        size = await immortal.step(lambda: len(self.items[name]))
        both = await asyncio.gather(immortal.step(lambda: {self.sold}), immortal.step(lambda: (self.sold,)))
        return [before, noted, read[name], total, size, self.sold, both]

    @rpc
    async def wrong(self, kind: str) -> None:
        if kind == "changes a copy":
            self.items["x"] = [1]
            await asyncio.sleep(1)
        elif kind == "sets":
            self.sold = 5
        elif kind == "transient":
            self.cache.append(5)
        elif kind == "too large":
            await immortal.step(self.fill)
            print(self.large)
        elif kind == "waits":
            await immortal.step(asyncio.sleep, 1)  # type: ignore[unused-coroutine]
        elif kind == "no function":
            await immortal.step(5)  # type: ignore[arg-type]
        elif kind == "calls a def handler":
            self.fill()
        elif kind == "an async handler":
            await immortal.step(self.sell, "hat", 1)  # type: ignore[unused-coroutine]
        elif kind == "a handler of a peer":
            await immortal.step(self.bank.add, 1)  # type: ignore[unused-awaitable]
        elif kind == "wrong arguments":
            await immortal.step(self.fill, 1)  # type: ignore[call-arg]
        elif kind == "calls a multicast":
            await immortal.multicast([self.bank]).add(1)
        elif kind == "asks for the loop":
            await immortal.step(asyncio.get_running_loop)
        elif kind == "not awaited":
            immortal.step(lambda: 5)

    @rpc
    async def is_debugged(self) -> int:
        if LOOKS:
            assert eval("self.items") == {}
        await asyncio.sleep(1)
        return self.sold

    @rpc
    async def fails(self) -> str:
        def fail() -> None:
            self.sold += 1000
            raise ValueError("a bug")

        try:
            await immortal.step(fail)
        except CalleeFailed as error:
            return f"{error.type_name}: {error.message}, {self.sold}"
        return "never"


class Outlet(Shop):
    @rpc
    def fill(self) -> None:
        self.large = "never"

    @rpc
    async def fill_as_a_shop(self) -> int:
        await immortal.step(super().fill)
        return await immortal.step(lambda: len(self.large))


def test_a_step_of_the_class_above_runs_what_is_overridden() -> None:
    for env in crash_everywhere(runs_max=10):
        with env:
            env.start(Bank, "bank")
            assert env.start(Outlet, "outlet").call(Outlet.fill_as_a_shop) == 100_000


def test_local_steps_and_reads_are_the_same_after_a_crash_anywhere() -> None:
    for env in crash_everywhere(runs_max=effort(15)):
        with env:
            bank, shop = env.start(Bank, "bank"), env.start(Shop, "shop")
            assert shop.call(Shop.sell, "hat", 2) == [0, (2, 1), [2], 103, 1, 2, [{2}, (2,)]]
            assert shop.call(Shop.sell, "hat", 3) == [2, (5, 1), [2, 3], 206, 2, 5, [{5}, (5,)]]
            assert (shop.state.sold, shop.state.items, bank.state.total) == (5, {"hat": [2, 3]}, 206)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("changes a copy", ["Shop.wrong has changed what it read as self.items", "immortal.step"]),
        ("sets", ["test_sdk_steps.py, line ", "Shop.wrong sets self.sold", "immortal.step"]),
        ("transient", ["Shop.wrong reads self.cache", "immortal.step"]),
        ("too large", ["self.large has 100,005 bytes", "at most 65,536", "immortal.step"]),
        ("waits", ["immortal.step(<function sleep", "a function was expected that does not wait"]),
        ("no function", ["immortal.step(5): a function was expected"]),
        ("calls a def handler", ["test_sdk_steps.py, line ", "await immortal.step(self.fill, ...)"]),
        ("an async handler", ["immortal.step(self.sell)", "await self.sell(...)"]),
        ("a handler of a peer", ["immortal.step(self.<peer>.add)", "await self.<peer>.add(...)"]),
        ("wrong arguments", ["Shop.fill"]),
        ("calls a multicast", ["await immortal.multicast([...]).add.all(...)"]),
        ("asks for the loop", ["no running event loop"]),
        ("not awaited", ["step Shop.wrong.<locals>.<lambda> was made and never awaited"]),
    ],
)
def test_what_is_wrong_is_said(kind: str, words: list[str]) -> None:
    with Environment(fail_alone=True) as env:
        env.start(Bank, "bank")
        shop = env.start(Shop, "shop")
        with pytest.raises(CalleeFailed) as caught:
            shop.call(Shop.wrong, kind)
    for word in words:
        assert word in caught.value.message


def test_a_step_that_fails_leaves_the_state_as_it_was() -> None:
    for env in crash_everywhere(runs_max=8, fail_alone=True):
        with env:
            env.start(Bank, "bank")
            shop = env.start(Shop, "shop")
            assert shop.call(Shop.fails) == "ValueError: a bug, 0"
            assert shop.state.sold == 0


def test_who_looks_with_a_debugger_leaves_nothing_in_the_journal() -> None:
    with Environment() as env:
        env.start(Bank, "bank")
        shop = env.start(Shop, "shop")
        LOOKS.append("once")
        pending = shop.begin(Shop.is_debugged)
        env.run()
        shop.checkpoint()
        LOOKS.clear()  # nobody looks as the handler is run again
        shop.crash()
        shop.recover()
        assert pending.result() == 0
