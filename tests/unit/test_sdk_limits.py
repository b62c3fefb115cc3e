"""Handlers that may run for so long, and so many at once."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import immortal
from immortal import CallCancelled, Cancelled, Immortal, impulse, peer, rpc, upgrades
from immortal.coordinator.core import events as ev
from immortal.errors import DefinitionError
from immortal.testing import Environment, Pending, crash_everywhere
from tests.helpers.waiting import WaitingInstances

MINUTE = timedelta(minutes=1)


class Log(Immortal):
    lines: list[str]

    def __init__(self) -> None:
        self.lines = []

    @rpc
    def note(self, text: str) -> int:
        self.lines.append(text)
        return len(self.lines)


class Shop(Log, concurrent_handlers=4):
    @rpc(timeout=10 * MINUTE)
    async def place(self, item: str, minutes: int) -> str:
        try:
            await immortal.sleep(minutes * MINUTE)
        except Cancelled as cancelled:
            await immortal.sleep(MINUTE)
            await immortal.step(self.note, f"{item}: {cancelled}")
            raise
        await immortal.step(self.note, item)
        return item

    @rpc(limit=2)
    async def two(self, name: str) -> int:
        await immortal.sleep(MINUTE)
        return await immortal.step(self.note, name)

    @rpc(limit=1, limit_by="customer")
    async def one_each(self, name: str, customer: str = "nobody") -> int:
        await immortal.sleep(MINUTE)
        return await immortal.step(self.note, f"{customer} {name}")

    @impulse(timeout=5 * MINUTE, limit=1)
    async def round_again(self, left: int) -> None:
        await immortal.sleep(4 * MINUTE)
        await immortal.step(self.note, f"{left} left")
        if left:
            immortal.continue_as(left - 1)

    @rpc(limit=1)
    async def at_once(self, number: int) -> int:
        return number


class Buyer(Log):
    shop = peer(Shop, "shop")

    @impulse
    async def buy(self, item: str, minutes: int) -> None:
        try:
            said = await self.shop.place(item, minutes)
        except CallCancelled as cancelled:
            said = cancelled.message
        await immortal.step(self.note, said)


def test_what_takes_longer_than_its_timeout_is_cancelled_and_its_caller_told() -> None:
    with Environment() as env:
        shop, buyer = env.start(Shop, "shop"), env.start(Buyer, "buyer")
        began = env.now
        buyer.call(Buyer.buy, "tea", 60)
        assert env.now - began == 11 * MINUTE
        reason = "it has not ended within 0:10:00"
        assert shop.state.lines == [f"tea: {reason}"]
        assert buyer.state.lines == [reason]
        buyer.call(Buyer.buy, "nuts", 9)
        assert shop.state.lines[1:] == ["nuts"]


def test_time_that_a_call_waits_for_its_turn_is_not_its_own() -> None:
    with Environment() as env:
        shop = env.start(Shop, "shop")
        calls = [shop.begin(Shop.round_again, left) for left in (1, 0)]
        for call in calls:
            call.result()
        assert shop.state.lines == ["1 left", "0 left", "0 left"]  # and each run of continue_as has time of its own


def begun(shop: Any, handler: Any, *calls: tuple[Any, ...]) -> list[Pending[Any]]:
    return [shop.begin(handler, *arguments) for arguments in calls]


def test_calls_beyond_a_limit_wait_for_their_turn_in_their_order() -> None:
    for env in crash_everywhere():
        with env:
            shop = env.start(Shop, "shop")
            began = env.now
            calls = begun(shop, Shop.two, *((f"{number}",) for number in range(5)))
            assert [call.result() for call in calls] == [1, 2, 3, 4, 5]
            assert shop.state.lines == ["0", "1", "2", "3", "4"]
            assert env.now - began == 3 * MINUTE


def test_a_limit_by_a_parameter_is_one_for_each_of_its_values() -> None:
    for env in crash_everywhere():
        with env:
            shop = env.start(Shop, "shop")
            began = env.now
            calls = begun(shop, Shop.one_each, ("a", "ann"), ("b", "ann"), ("c", "bob"), ("d",), ("e", "ann"))
            for call in calls:
                call.result()
            assert shop.state.lines == ["ann a", "bob c", "nobody d", "ann b", "ann e"]
            assert env.now - began == 3 * MINUTE


def test_the_limit_of_the_class_is_one_for_all_of_its_handlers() -> None:
    for env in crash_everywhere():
        with env:
            shop = env.start(Shop, "shop")
            began = env.now
            calls = begun(shop, Shop.place, *((f"{number}", 1) for number in range(3)))
            calls += begun(shop, Shop.two, ("x",), ("y",), ("z",))
            assert len(shop.state.lines) == 0
            for call in calls:
                call.result()
            assert sorted(shop.state.lines) == ["0", "1", "2", "x", "y", "z"]
            assert env.now - began == 2 * MINUTE


def test_one_that_ends_at_once_lets_the_next_one_in() -> None:
    with Environment() as env:
        shop = env.start(Shop, "shop")
        assert [call.result() for call in begun(shop, Shop.at_once, *((number,) for number in range(2000)))] == [
            *range(2000)
        ]


def test_a_timeout_across_a_crash_and_a_checkpoint_is_the_same_moment() -> None:
    with Environment() as env:
        shop = env.start(Shop, "shop")
        began = env.now
        call = shop.begin(Shop.place, "tea", 60)
        waiting = shop.begin(Shop.two, "x")
        env.advance(minutes=5)
        shop.stop()
        shop.recover()
        env.advance(minutes=2)
        shop.crash()
        shop.recover()
        with pytest.raises(CallCancelled):
            call.result()
        waiting.result()
        assert env.now - began == 11 * MINUTE
        shop.stop()
        shop.recover()  # it is not cancelled once more
        assert len(shop.state.lines) == 2


@pytest.mark.slow
def test_a_timeout_and_its_clean_up_survive_a_crash_anywhere() -> None:
    for env in crash_everywhere():
        with env:
            shop, buyer = env.start(Shop, "shop"), env.start(Buyer, "buyer")
            buyer.call(Buyer.buy, "tea", 60)
            assert shop.state.lines == ["tea: it has not ended within 0:10:00"]
            assert buyer.state.lines == ["it has not ended within 0:10:00"]


class Narrow(Log):
    @rpc(limit=1)
    async def work(self, name: str) -> int:
        await immortal.sleep(MINUTE)
        return await immortal.step(self.note, name)


@upgrades(Narrow)
class Wide(Narrow):
    @rpc(limit=3)
    async def work(self, name: str) -> int:
        await immortal.sleep(MINUTE)
        return await immortal.step(self.note, name)

    @classmethod
    def upgrade(cls, old: Narrow) -> Wide:
        made = cls()
        made.lines = old.lines
        return made


@pytest.mark.slow
def test_a_new_version_with_another_limit_lets_more_begin() -> None:
    for env in crash_everywhere():
        with env:
            shop = env.start(Narrow, "shop")
            calls = begun(shop, Narrow.work, *((f"{number}",) for number in range(4)))
            env.run()
            shop = shop.upgrade(Wide)
            began = env.now
            for call in calls:
                call.result()
            assert shop.state.lines == ["0", "1", "2", "3"]
            assert env.now - began == 2 * MINUTE


@pytest.fixture
def clerk(tmp_path: Path) -> Iterator[WaitingInstances]:
    made = WaitingInstances(tmp_path, {"shop": Queue})
    yield made
    made.close()


class Queue(Log):
    @impulse(limit=1)
    async def wait(self, name: str) -> None:
        await immortal.event(name)
        await immortal.step(self.note, name)


def listed(shop: WaitingInstances) -> list[tuple[str, list[str]]]:
    found = shop.ask("shop", ev.HandlersAsked, 0)["handlers"]
    return [(one["arguments"], [wait["for"] for wait in one["waits"]]) for one in found]


def test_what_waits_for_its_turn_is_listed_and_can_be_cancelled(clerk: WaitingInstances) -> None:
    for name in ("a", "b", "c"):
        clerk["shop"].impulse("wait", name)
    turn = ["its turn: 1 run at once"]
    assert listed(clerk) == [("('a')", ["event a"]), ("('b')", turn), ("('c')", turn)]
    clerk["shop"].checkpoint()
    clerk.crash("shop")
    before = clerk.ask("shop", ev.HandlersAsked, 0)["handlers"]
    assert [one["arguments"] for one in before] == ["('a')", "('b')", "('c')"]
    second = clerk.ask("shop", ev.HandlersAsked, before[1]["id"])["handler"]
    assert (second["record"], second["steps"]) == (before[1]["record"], [])
    done = clerk.cancel("shop", before[1]["id"], "no more")
    assert done == {"done": True, "text": "Queue.wait was cancelled before its turn"} | {
        key: done[key] for key in done if key not in ("done", "text")
    }
    clerk.crash("shop")
    assert [arguments for arguments, _ in listed(clerk)] == ["('a')", "('c')"]
    clerk.cancel("shop", before[0]["id"])
    assert listed(clerk) == [("('c')", ["event c"])]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timeout": 5}, "work: @rpc(timeout=5): a timedelta was expected, such as timedelta(minutes=5)"),
        ({"timeout": timedelta()}, "work: @rpc(timeout=datetime.timedelta(0)): a timedelta was expected"),
        ({"limit": 0}, "work: @rpc(limit=0): a number from 1 was expected"),
        ({"limit": True}, "work: @rpc(limit=True): a number from 1 was expected"),
        ({"limit_by": "a"}, "work: @rpc(limit_by='a'): limit=... says how many of each"),
        ({"limit": 1, "limit_by": "b"}, "work: @rpc(limit_by='b'): a parameter was expected, of 'a'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: Any, said: str) -> None:
    with pytest.raises(DefinitionError) as error:

        class Wrong(Immortal):
            @rpc(**options)
            async def work(self, a: int) -> None: ...

    assert str(error.value).startswith(said)


def test_they_are_for_handlers_that_wait() -> None:
    with pytest.raises(DefinitionError, match="timeout and limit are for an 'async def'"):

        class Wrong(Immortal):
            @rpc(limit=3)
            def work(self, a: int) -> None: ...

    with pytest.raises(DefinitionError, match="concurrent_handlers=0: a number from 1 was expected"):

        class None_(Immortal, concurrent_handlers=0):  # noqa: N801
            pass
