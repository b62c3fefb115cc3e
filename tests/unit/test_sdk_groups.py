"""Named groups of ordered multicast between real instances: their apps, machines and logs, in one process."""

from __future__ import annotations

import pytest

import immortal
from immortal import CalleeFailed, impulse, rpc
from immortal.errors import DefinitionError
from immortal.patterns.groups import Grouped, group
from immortal.testing import Environment, Instance, crash_everywhere
from tests.helpers.effort import effort


class Book(Grouped):
    prices = group(lambda: Book, "prices", members=["a", "b"])
    seen: list[str]

    def __init__(self) -> None:
        self.seen = []

    @rpc
    def place(self, order: str) -> int:
        if order == "bad":
            raise ValueError(order)
        self.seen.append(order)
        return len(self.seen)

    @rpc
    async def wait(self, order: str) -> None:
        await immortal.step(self.place, order)

    @rpc
    async def enter(self) -> None:
        await self.prices.join()

    @rpc
    async def exit(self) -> None:
        await self.prices.leave()

    @impulse
    def send(self, order: str) -> None:
        self.prices.place.fork(order)


def test_a_name_is_of_one_group_in_a_class_and_those_that_it_inherits() -> None:
    with pytest.raises(DefinitionError, match="group 'prices' is of a, c, not of a, b: give another"):

        class Other(Book):
            others = group(Book, "prices", members=["a", "c"])

    class Same(Book):
        again = group(Book, "prices", members=["a", "b"])

    assert Same


class Trader(Grouped):
    prices = group(Book, "prices", members=["a", "b"])

    @impulse
    def send(self, order: str) -> None:
        self.prices.place.fork(order)

    @rpc
    async def ask(self, order: str) -> tuple[int, ...]:
        found: tuple[int, ...] = await self.prices.place.all(order)
        return found

    @impulse
    async def send_from_async(self, order: str) -> None:
        self.prices.place.fork(order)

    @rpc
    async def enter(self) -> None:
        await self.prices.join()

    @rpc
    def wrong(self) -> None:
        self.prices.wait.fork("x")

    @rpc
    def waits(self) -> None:
        self.prices.place.all("x")


def start(env: Environment) -> tuple[list[Instance[Book]], list[Instance[Trader]]]:
    return [env.start(Book, name) for name in "abc"], [env.start(Trader, name) for name in "xy"]


def test_a_new_member_sees_what_is_ordered_after_its_join_and_nothing_before() -> None:
    with Environment() as env:
        (a, b, c), (x, _) = start(env)
        assert x.call(Trader.ask, "one") == (1, 1)
        c.call(Book.enter)
        assert x.call(Trader.ask, "two") == (2, 2, 1)
        x.send(Trader.send_from_async, "three")
        env.run()
        a.call(Book.exit)
        x.send(Trader.send, "four")
        env.run()
        assert a.state.seen == ["one", "two", "three"]
        assert b.state.seen == ["one", "two", "three", "four"]
        assert c.state.seen == ["two", "three", "four"]


def check(books: list[Instance[Book]], sent: dict[str, int]) -> None:
    """``books``: one that was a member all the time, then others, which joined or left."""
    whole = books[0].state.seen
    assert len(whole) == len(set(whole)) == sum(sent.values())
    for sender, count in sent.items():
        assert [text for text in whole if text[0] == sender] == [f"{sender}{number}" for number in range(count)]
    for book in books[1:]:
        seen = book.state.seen
        at = whole.index(seen[0]) if seen else 0
        assert whole[at : at + len(seen)] == seen


@pytest.mark.parametrize("order", range(12))
def test_members_agree_while_others_join_and_leave(order: int) -> None:
    with Environment(order=order) as env:
        (a, b, c), traders = start(env)
        d = env.start(Book, "d")
        for number in range(6):
            for trader in traders:
                trader.send(Trader.send, f"{trader.name}{number}")
            a.send(Book.send, f"a{number}")
            if number == 1:
                begun = [c.begin(Book.enter), d.begin(Book.enter), b.begin(Book.exit)]
        env.run()
        assert all(one.done for one in begun)
        check([a, b, c, d], {"x": 6, "y": 6, "a": 6})
        x = traders[0]
        assert len(x.call(Trader.ask, "last")) == 3
        assert a.state.seen[-1] == c.state.seen[-1] == d.state.seen[-1] == "last"
        assert b.state.seen[-1:] != ["last"]


@pytest.mark.slow
def test_a_crash_anywhere_changes_nothing() -> None:
    for env in crash_everywhere(runs_max=effort(20)):
        with env:
            (a, b, c), (x, y) = start(env)
            for number in range(3):
                x.send(Trader.send, f"x{number}")
                y.send(Trader.send_from_async, f"y{number}")
                if number == 0:
                    begun = [c.begin(Book.enter), b.begin(Book.exit)]
            asked = x.begin(Trader.ask, "q0")
            env.run()
            assert asked.done
            assert all(one.done for one in begun)
            check([a, b, c], {"x": 3, "y": 3, "q": 1})


def test_a_member_that_is_down_delays_and_loses_nothing() -> None:
    with Environment() as env:
        (a, b, c), (x, y) = start(env)
        for number in range(3):
            x.send(Trader.send, f"x{number}")
        b.crash()
        entered = c.begin(Book.enter)
        for number in range(3):
            y.send(Trader.send, f"y{number}")
            x.send(Trader.send, f"x{number + 3}")
        env.run()
        assert not entered.done
        y.checkpoint()
        y.crash()
        y.recover()
        b.recover()
        env.run()
        assert entered.done
        y.send(Trader.send, "y3")
        env.run()
        check([a, b, c], {"x": 6, "y": 4})
        assert a.state.seen == b.state.seen
        assert c.state.seen[-1] == "y3"


def test_one_that_raises_fails_there_and_what_follows_goes_on() -> None:
    with Environment(fail_alone=True) as env:
        (a, b, c), (x, _) = start(env)
        x.send(Trader.send, "bad")
        x.send(Trader.send, "x0")
        env.run()
        with pytest.raises(CalleeFailed, match="ValueError"):
            x.call(Trader.ask, "bad")
        c.call(Book.enter)
        x.send(Trader.send, "x1")
        env.run()
        assert a.state.seen == b.state.seen == ["x0", "x1"]
        assert c.state.seen == ["x1"]


def test_joining_and_leaving_once_more_changes_nothing() -> None:
    with Environment() as env:
        (a, b, c), (x, _) = start(env)
        a.call(Book.enter)
        c.call(Book.exit)
        for _ in range(3):
            c.call(Book.enter)
            c.call(Book.enter)
            assert len(x.call(Trader.ask, "in")) == 3
            c.call(Book.exit)
            assert len(x.call(Trader.ask, "out")) == 2
        assert c.state.seen == ["in"] * 3
        assert a.state.seen == b.state.seen == ["in", "out"] * 3


def test_wrong_uses_are_said() -> None:
    with Environment(fail_alone=True) as env:
        (a, b, _), (x, _) = start(env)
        with pytest.raises(CalleeFailed, match=r"Book\.wait can't be called in a group"):
            x.call(Trader.wrong)
        with pytest.raises(CalleeFailed, match="only async handlers wait"):
            x.call(Trader.waits)
        with pytest.raises(CalleeFailed, match="Trader can't join"):
            x.call(Trader.enter)
        a.call(Book.exit)
        with pytest.raises(CalleeFailed, match="last member"):
            b.call(Book.exit)
    with pytest.raises(DefinitionError, match="its first members were expected"):
        group(Book, "prices", members="ab")
    with pytest.raises(DefinitionError, match="its first members were expected"):
        group(Book, "prices", members=[])
