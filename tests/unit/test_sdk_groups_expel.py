"""A member that is expelled from a group, dead or alive, between real instances in one process."""

from __future__ import annotations

from datetime import timedelta
from random import Random

import msgspec
import pytest

from immortal import impulse, rpc, upgrades
from immortal.coordinator.core import events as ev
from immortal.errors import DefinitionError
from immortal.patterns.groups import Grouped, group
from immortal.protocol.system_methods import Order
from immortal.testing import Environment, Instance, crash_everywhere
from tests.helpers.effort import effort

FIRST = ["a", "b", "d"]


class Book(Grouped):
    prices = group(lambda: Book, "prices", members=FIRST)
    seen: list[str]
    expelled: int

    def __init__(self) -> None:
        self.seen = []
        self.expelled = 0

    @rpc
    def place(self, order: str) -> int:
        self.seen.append(order)
        return len(self.seen)

    @rpc
    async def enter(self) -> None:
        await self.prices.join()

    @rpc
    async def exit(self) -> None:
        await self.prices.leave()

    @impulse
    def send(self, order: str) -> None:
        self.prices.place.fork(order)

    @rpc
    async def ask(self, order: str) -> int:
        return len(await self.prices.place.all(order))

    def on_expelled(self, name: str) -> None:
        assert name == "prices"
        self.expelled += 1


class Trader(Grouped):
    prices = group(Book, "prices", members=FIRST)

    @impulse
    def send(self, order: str) -> None:
        self.prices.place.fork(order)

    @rpc
    async def ask(self, order: str) -> int:
        return len(await self.prices.place.all(order))


Books = dict[str, Instance[Book]]


def start(env: Environment) -> tuple[Books, list[Instance[Trader]]]:
    return {name: env.start(Book, name) for name in "abcd"}, [env.start(Trader, name) for name in "xy"]


def check(books: Books, sent: dict[str, int]) -> None:
    """ "a" was a member all the time. Of what it has had, all others have a part without gaps."""
    whole = books["a"].state.seen
    assert len(whole) == len(set(whole)) == sum(sent.values())
    for sender, count in sent.items():
        assert [text for text in whole if text[0] == sender] == [f"{sender}{number}" for number in range(count)]
    for book in books.values():
        seen = book.state.seen
        at = whole.index(seen[0]) if seen else 0
        assert whole[at : at + len(seen)] == seen, (book.name, seen, whole)


def expel(by: Instance[Book], member: str, group: str = "prices") -> Order:
    """As an operator does."""
    order = Order("expel", 0, member, "ann", msgspec.Raw(msgspec.msgpack.encode(group)))
    by._node.handle(ev.HandlerOrdered(order, "token"))
    return order


def test_the_others_go_on_without_a_dead_member() -> None:
    with Environment() as env:
        books, (x, y) = start(env)
        a, b, c, d = (books[name] for name in "abcd")
        x.send(Trader.send, "x0")
        env.run()
        d.crash()
        x.send(Trader.send, "x1")
        y.send(Trader.send, "y0")
        b.send(Book.send, "b0")
        asked, entered = y.begin(Trader.ask, "q0"), c.begin(Book.enter)
        env.run()
        assert (a.state.seen, asked.done, entered.done) == (["x0"], False, False)
        expel(a, "d")
        env.run()
        assert asked.done
        assert entered.done
        x.send(Trader.send, "x2")
        env.run()
        assert b.state.seen == a.state.seen
        d.recover()
        env.run()
        check(books, {"x": 3, "y": 1, "b": 1, "q": 1})
        assert (d.state.seen, d.state.expelled) == (["x0"], 1)
        d.send(Book.send, "d0")
        d.call(Book.enter)
        assert x.call(Trader.ask, "q1") == 4
        assert d.state.seen == ["x0", "q1"]
        assert a.state.seen[-2:] == ["d0", "q1"]


@pytest.mark.parametrize("seed", range(effort(16)))
def test_whenever_it_dies_and_comes_back(seed: int) -> None:
    with Environment(order=seed) as env:
        random = Random(seed)
        books, traders = start(env)
        world, steps = env._world, iter(random.choices(range(25), k=40))
        sent = dict.fromkeys(["x", "y", "b", "d"], 0)
        back = random.choice([2, 3, 99])
        begun = []
        for turn in range(4):
            for name in ("x", "y", "b", "d"):
                if turn and name == "d":
                    continue
                text = f"{name}{sent[name]}"
                sent[name] += 1
                if name in books:
                    books[name].send(Book.send, text)
                else:
                    traders["xy".index(name)].send(Trader.send, text)
                for _ in range(next(steps)):
                    world.do(lambda: world._random_step(random))  # type: ignore[arg-type]
            if turn == 0 and random.random() < 0.8:
                books["d"].crash()
            if turn == 1:
                expel(books["a"], "d")
                if random.random() < 0.3:
                    expel(books["b"], "d")
                begun.append(books["c"].begin(Book.enter))
            if turn == back and not books["d"].is_up:
                books["d"].recover()
        env.run()
        assert all(one.done for one in begun)
        if not books["d"].is_up:
            books["d"].recover()
            env.run()
        assert "d" not in books["a"].state.groups_known["prices"].membership.view.members  # type: ignore[index]
        check(books, sent)
        assert books["b"].state.seen == books["a"].state.seen
        assert traders[0].call(Trader.ask, "q0") == 3
        books["d"].call(Book.enter)
        assert traders[0].call(Trader.ask, "q1") == 4


@pytest.mark.slow
def test_a_crash_anywhere_changes_nothing() -> None:
    for env in crash_everywhere(runs_max=effort(20)):
        with env:
            books, (x, y) = start(env)
            x.send(Trader.send, "x0")
            books["b"].send(Book.send, "b0")
            expel(books["a"], "d")
            x.send(Trader.send, "x1")
            y.send(Trader.send, "y0")
            asked = y.begin(Trader.ask, "q0")
            env.run()
            assert asked.done
            check(books, {"x": 2, "y": 1, "b": 1, "q": 1})
            assert books["b"].state.seen == books["a"].state.seen
            assert books["d"].state.expelled == 1


@upgrades(Book)
class NextBook(Book):
    @classmethod
    def upgrade(cls, old: Book) -> NextBook:
        new = cls()
        new.seen, new.expelled, new.groups_known = old.seen, old.expelled, old.groups_known
        return new


def test_an_upgrade_of_members_and_of_who_expels_in_the_middle() -> None:
    with Environment() as env:
        books, (x, _) = start(env)
        a, b, d = (books[name] for name in "abd")
        d.crash()
        x.send(Trader.send, "x0")
        env.run()
        b.upgrade(NextBook)
        expel(a, "d")
        x.crash()
        x.recover()
        a.upgrade(NextBook)
        env.run()
        assert a.state.seen == b.state.seen == ["x0"]


def test_two_dead_members_are_expelled_one_after_the_other() -> None:
    with Environment() as env:
        books, (x, _) = start(env)
        books["c"].call(Book.enter)
        books["b"].crash()
        books["d"].crash()
        x.send(Trader.send, "x0")
        expel(books["a"], "b")
        env.run()
        assert books["a"].state.seen == []
        expel(books["c"], "d")
        env.run()
        assert books["a"].state.seen == books["c"].state.seen == ["x0"]
        assert x.call(Trader.ask, "q0") == 2


@pytest.mark.parametrize(
    ("by", "member", "problem"),
    [("a", "a", "does not expel itself"), ("a", "c", "'c' is no member of 'prices': a, b, d"), ("c", "d", "'c' is no")],
)
def test_what_can_not_be_expelled_is_said(by: str, member: str, problem: str) -> None:
    with Environment() as env:
        books, (x, _) = start(env)
        app = books[by]._app()
        expel(books[by], member)
        expel(books[by], member, "costs")
        env.run()
        first, second = app.dispatcher.tasks.orders._outcomes.values()
        assert (first["done"], second["done"]) == (False, False)
        assert problem in first["text"]
        assert "declares no group 'costs'" in second["text"]
        assert x.call(Trader.ask, "q0") == 3


class Watched(Grouped):
    prices = group(lambda: Watched, "prices", members=FIRST, expel_after=timedelta(seconds=10))
    seen: list[str]

    def __init__(self) -> None:
        self.seen = []

    @rpc
    def place(self, order: str) -> int:
        self.seen.append(order)
        return len(self.seen)

    @impulse
    def send(self, order: str) -> None:
        self.prices.place.fork(order)


class Dealer(Grouped):
    prices = group(Watched, "prices", members=FIRST, expel_after=timedelta(seconds=10))

    @impulse
    def send(self, order: str) -> None:
        self.prices.place.fork(order)


@pytest.mark.parametrize("sender", ["a", "x"])
def test_a_destination_that_is_silent_is_expelled_where_the_group_says_so(sender: str) -> None:
    with Environment() as env:
        books = {name: env.start(Watched, name) for name in FIRST}
        x = env.start(Dealer, "x")
        books["d"].crash()
        if sender == "a":
            books["a"].send(Watched.send, "1")
        else:
            x.send(Dealer.send, "1")
        env.advance(seconds=9)
        assert books["a"].state.seen == []
        env.advance(seconds=3)
        assert books["a"].state.seen == books["b"].state.seen == ["1"]
        x.send(Dealer.send, "2")
        env.advance(seconds=1)
        assert books["b"].state.seen == ["1", "2"]


def test_a_sender_that_is_silent_is_expelled_and_one_that_waits_itself_is_not() -> None:
    with Environment() as env:
        books = {name: env.start(Watched, name) for name in FIRST}
        a, b, d = (books[name] for name in FIRST)
        env.partition(d, b)
        d.send(Watched.send, "1")  # "a" has its block, "b" has not heard of it
        env.run()
        d.crash()
        a.send(Watched.send, "2")
        env.advance(seconds=12)
        assert a.state.seen == b.state.seen == ["2"]

    with Environment() as env:
        books = {name: env.start(Watched, name) for name in FIRST}
        a, b, d = (books[name] for name in FIRST)
        b.crash()
        d.send(Watched.send, "1")  # it is there, and says so: it is "b" that is silent
        env.advance(seconds=14)
        assert a.state.seen == d.state.seen == ["1"]
        b.recover()
        env.advance(seconds=1)
        assert b.state.seen == []


def test_without_the_option_nobody_is_expelled_by_itself() -> None:
    with Environment() as env:
        books, (x, _) = start(env)
        books["d"].crash()
        x.send(Trader.send, "1")
        env.advance(hours=1)
        assert books["a"].state.seen == []
        books["d"].recover()
        env.run()
        assert books["a"].state.seen == ["1"]


def test_a_time_that_is_none_is_refused() -> None:
    for wrong in (10, timedelta(0), timedelta(seconds=-5)):
        with pytest.raises(DefinitionError, match="expel_after"):
            group(Book, "prices", members=FIRST, expel_after=wrong)  # type: ignore[arg-type]
