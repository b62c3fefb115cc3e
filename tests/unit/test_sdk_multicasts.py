"""Ordered multicasts between real instances: their apps, their coordinators' machines and logs, in one process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import immortal
from immortal import CalleeFailed, Immortal, impulse, peer, rpc, upgrades
from immortal.appsdk.ordering.messages import Propose
from immortal.appsdk.ordering.multicasts import Multicasts
from immortal.testing import Environment, Instance, crash_everywhere
from tests.helpers.effort import effort


class Book(Immortal):
    seen: list[str]

    def __init__(self) -> None:
        self.seen = []

    @rpc
    def add(self, text: str) -> int:
        self.seen.append(text)
        if text == "bad":
            raise ValueError(text)
        return len(self.seen)


class Sender(Immortal):
    a = peer(Book, "a")
    b = peer(Book, "b")
    c = peer(Book, "c")
    answers: list[int]

    def __init__(self) -> None:
        self.answers = []

    @impulse
    def send(self, text: str) -> None:
        immortal.multicast([self.a, self.b, self.c]).add.fork(text)

    @impulse
    def send_and_tell(self, text: str) -> None:
        immortal.multicast([self.a, self.b]).add.fork(text)
        self.c.add.fork(f"after {text}")

    @rpc
    def keep(self, got: tuple[int, ...]) -> None:
        self.answers.extend(got)

    @rpc
    async def ask(self, text: str) -> int:
        got = await immortal.multicast([self.c, self.a, self.b]).add.all(text)
        await immortal.step(self.keep, got)
        return sum(got)


def start(env: Environment) -> tuple[list[Instance[Book]], list[Instance[Sender]]]:
    return [env.start(Book, name) for name in "abc"], [env.start(Sender, name) for name in "xyz"]


def test_all_destinations_see_one_order() -> None:
    for order in range(effort(4)):
        with Environment(order=order) as env:
            books, senders = start(env)
            for number in range(8):
                for sender in senders:
                    sender.send(Sender.send, f"{sender.name}{number}")
            env.run()
            seen = [book.state.seen for book in books]
            assert seen[0] == seen[1] == seen[2]
            assert len(seen[0]) == 24
            for sender in senders:
                mine = [text for text in seen[0] if text.startswith(sender.name)]
                assert mine == [f"{sender.name}{number}" for number in range(8)]


def test_awaiting_gives_all_answers_in_the_order_of_the_destinations() -> None:
    with Environment() as env:
        books, senders = start(env)
        books[2].call(Book.add, "before")
        assert senders[0].call(Sender.ask, "one") == 4
        assert senders[0].state.answers == [2, 1, 1]


def test_one_that_raises_fails_there_alone_and_for_who_waits() -> None:
    with Environment(fail_alone=True) as env:
        books, senders = start(env)
        with pytest.raises(CalleeFailed, match="ValueError"):
            senders[0].call(Sender.ask, "bad")
        senders[1].send(Sender.send, "good")
        env.run()
        assert [book.state.seen for book in books] == [["good"]] * 3


def test_what_the_sender_says_next_waits_until_its_multicast_stands() -> None:
    with Environment() as env:
        books, senders = start(env)
        books[1].crash()
        senders[0].send(Sender.send_and_tell, "news")
        env.run()
        assert books[2].state.seen == []
        assert books[0].state.seen == []
        books[1].recover()
        assert books[2].state.seen == ["after news"]
        assert books[0].state.seen == books[1].state.seen == ["news"]


@pytest.mark.slow
def test_a_crash_anywhere_changes_nothing() -> None:
    for env in crash_everywhere(runs_max=effort(20)):
        with env:
            books, senders = start(env)
            for number in range(2):
                for sender in senders[:2]:
                    sender.send(Sender.send, f"{sender.name}{number}")
            senders[2].send(Sender.send_and_tell, "news")
            pending = senders[0].begin(Sender.ask, "asked")
            env.run()
            assert pending.done
            assert books[0].state.seen == books[1].state.seen
            assert [len(book.state.seen) for book in books] == [6, 6, 6]


# --- plain input that has to wait -------------------------------------------------------------------------------------


def fetch(number: int) -> int:
    raise AssertionError("a stand-in takes its place")


class Teller(Immortal):
    """Sends to x and y; what comes back to it by other ways comes behind."""

    x = peer(lambda: Node, "x")
    y = peer(lambda: Node, "y")

    @impulse
    def tell(self, text: str) -> None:
        immortal.multicast([self.x, self.y]).hear.fork(text)


class Node(Immortal):
    x = peer(lambda: Node, "x")
    y = peer(lambda: Node, "y")
    z = peer(lambda: Node, "z")
    heard: list[str]

    def __init__(self) -> None:
        self.heard = []

    @rpc
    def hear(self, text: str) -> None:
        self.heard.append(text)
        if text.startswith("loud"):
            self.z.echo.fork(text)

    @rpc
    def echo(self, text: str) -> None:
        """Somebody who got no multicast tells the others of what happened because of it."""
        self.x.note.fork(f"echo {text}")
        self.y.note.fork(f"echo {text}")

    @rpc
    def note(self, text: str) -> str:
        self.heard.append(text)
        return text

    @impulse
    def happen(self, text: str) -> None:
        self.heard.append(text)

    @impulse
    async def look(self, number: int) -> None:
        await immortal.step(self.note, f"fetched {await immortal.effect(fetch, number)}")

    @impulse
    def fail_after(self, text: str) -> None:
        immortal.multicast([self.x, self.y]).hear.fork(text)
        raise ValueError(text)

    @impulse
    def to_all(self, text: str) -> None:
        immortal.multicast([self.x, self.y, self.z]).hear.fork(text)

    @impulse
    def to_all_with_me(self, text: str) -> None:
        immortal.multicast([self.x, type(self), self.z]).hear.fork(text)

    @rpc
    async def ask_all_with_me(self, text: str) -> int:
        return len(await immortal.multicast([self.x, type(self), self.z]).note.all(text))


def blocked(env: Environment) -> tuple[Instance[Node], Instance[Node], Instance[Teller]]:
    """x has a block of a multicast that can't go on, as y is down."""
    x, y = env.start(Node, "x", effects={fetch: lambda number: number}), env.start(Node, "y")
    env.start(Node, "z")
    teller = env.start(Teller, "teller")
    y.crash()
    teller.send(Teller.tell, "first")
    env.run()
    return x, y, teller


def test_calls_impulses_answers_and_results_of_effects_wait_behind_a_block() -> None:
    with Environment() as env:
        x, y, _ = blocked(env)
        x.send(Node.happen, "impulse")
        x.send(Node.look, 7)
        answer = x.begin(Node.note, "call")
        env.run()
        assert x.state.heard == []
        assert not answer.done
        y.recover()
        assert x.state.heard == ["first", "impulse", "call", "fetched 7"]
        assert answer.result() == "call"
        assert x.call(Node.note, "at once") == "at once"


@pytest.mark.parametrize("how", ["crash", "crash_app", "checkpoint"])
def test_what_waits_outlives_the_instance(how: str) -> None:
    with Environment() as env:
        x, y, teller = blocked(env)
        answer = x.begin(Node.note, "call")
        env.run()
        for instance in (x, teller):
            if how != "crash_app":
                instance.checkpoint()
            if how != "crash_app":
                instance.crash()
            else:
                instance.crash_app()
            instance.recover()
        x.send(Node.happen, "impulse")
        y.recover()
        assert answer.result() == "call"
        assert x.state.heard == ["first", "call", "impulse"]
        assert y.state.heard == ["first"]


def test_an_effect_never_comes_before_its_cause_by_a_third_party() -> None:
    for order in range(effort(12)):
        with Environment(order=order) as env:
            x, y = env.start(Node, "x"), env.start(Node, "y")
            env.start(Node, "z")
            teller, other = env.start(Teller, "teller"), env.start(Teller, "other")
            teller.send(Teller.tell, "loud one")
            other.send(Teller.tell, "loud two")
            env.run()
            for node in (x, y):
                heard = node.state.heard
                assert len(heard) == 6
                for text in ("loud one", "loud two"):
                    assert heard.index(text) < heard.index(f"echo {text}")
            runs = [[text for text in node.state.heard if text.startswith("loud")] for node in (x, y)]
            assert runs[0] == runs[1]


def test_a_handler_that_fails_has_sent_no_multicast() -> None:
    with Environment(fail_alone=True) as env:
        x, y, z = (env.start(Node, name) for name in "xyz")
        z.send(Node.to_all, "one")
        z.send(Node.fail_after, "never")
        z.send(Node.to_all, "two")
        env.run()
        assert x.state.heard == y.state.heard == z.state.heard == ["one", "two"]
        assert len(z.dead_letters) == 1


def test_a_sender_can_be_a_destination() -> None:
    for order in range(effort(4)):
        with Environment(order=order) as env:
            nodes = [env.start(Node, name) for name in "xyz"]
            for number in range(3):
                for node in nodes:
                    node.send(Node.to_all, f"{node.name}{number}")
            env.run()
            assert nodes[0].state.heard == nodes[1].state.heard == nodes[2].state.heard
            assert len(nodes[0].state.heard) == 9
            nodes[1].send(Node.to_all_with_me, "me")
            assert nodes[1].call(Node.ask_all_with_me, "ask") == 3
            assert [node.state.heard[-2:] for node in nodes] == [["me", "ask"]] * 3


def test_who_waits_for_whom_is_told() -> None:
    with Environment() as env:
        x, y, teller = blocked(env)
        x.send(Node.happen, "impulse")
        env.run()

        def told(instance: Instance[Any]) -> list[tuple[str, int]]:
            described = instance._app().dispatcher.context.multicasts.describe()
            assert all(one["since_ns"] > 0 for one in described)
            return [(one["for"], one["count"]) for one in described]

        assert told(teller) == [("y", 1)]
        assert told(x) == [("teller", 2)]
        y.recover()
        assert told(teller) == told(x) == told(y) == []


def test_disjoint_multicasts_wait_for_nothing_of_each_other() -> None:
    with Environment() as env:
        x, y, _ = blocked(env)
        books, senders = start_books(env)
        senders[0].send(Sender.send, "on")
        env.run()
        assert [book.state.seen for book in books] == [["on"]] * 3
        assert x.state.heard == []
        y.recover()


def start_books(env: Environment) -> tuple[list[Instance[Book]], list[Instance[Sender]]]:
    return [env.start(Book, name) for name in "abc"], [env.start(Sender, "sender")]


def test_who_can_not_be_multicast_to_is_said() -> None:
    class Wrong(Immortal):
        a = peer(Book, "a")
        x = peer(Node, "x")

        @rpc
        def nobody(self) -> None:
            immortal.multicast([]).add.fork("x")

        @rpc
        def twice(self) -> None:
            immortal.multicast([self.a, self.a]).add.fork("x")

        @rpc
        def text(self) -> None:
            immortal.multicast(["a"]).add.fork("x")  # type: ignore[list-item]

        @rpc
        def different(self) -> None:
            immortal.multicast([self.a, self.x]).add.fork("x")  # type: ignore[attr-defined]

        @rpc
        def not_async(self) -> None:
            immortal.multicast([self.a]).add("x")

    with Environment(fail_alone=True) as env:
        wrong = env.start(Wrong, "wrong")
        for handler, text in [
            (Wrong.nobody, "nobody to send to"),
            (Wrong.twice, "'a' is in it twice"),
            (Wrong.text, r"peers .* were expected"),
            (Wrong.different, "has no handler 'add'"),
            (Wrong.not_async, "only async handlers wait"),
        ]:
            with pytest.raises(CalleeFailed, match=text):
                wrong.call(handler)


class Notifier(Immortal):
    x = peer(Node, "x")
    y = peer(Node, "y")
    told: int

    def __init__(self) -> None:
        self.told = 0

    @rpc
    def note(self, number: int) -> None:
        self.told = number

    @impulse
    async def tell(self, number: int) -> None:
        immortal.multicast([self.x, self.y]).hear.fork(str(number))
        await immortal.step(self.note, await immortal.effect(fetch, number))


def test_a_destination_that_refuses_says_so_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle_propose(self: Multicasts, propose: Propose) -> None:
        if self._context.instance_name == "b":
            raise self._refused("not here")
        take(self, propose)

    take = Multicasts.handle_propose
    monkeypatch.setattr(Multicasts, "handle_propose", handle_propose)
    for env in crash_everywhere(runs_max=effort(10), fail_alone=True):
        with env:
            books, senders = start(env)
            asked = senders[0].begin(Sender.ask, "asked")
            senders[1].send(Sender.send, "sent")
            env.run()
            with pytest.raises(CalleeFailed, match=r"CallRefused: .* not here"):
                asked.result()
            assert [sorted(book.state.seen) for book in books] == [["asked", "sent"], [], ["asked", "sent"]]


@pytest.mark.parametrize("crashes", [False, True])
def test_an_effect_behind_a_multicast_begins_when_that_stands(crashes: bool) -> None:
    asked: list[int] = []

    def fetched(number: int) -> int:
        asked.append(number)
        return number

    with Environment() as env:
        env.start(Node, "x")
        y = env.start(Node, "y")
        notifier = env.start(Notifier, "notifier", effects={fetch: fetched})
        y.crash()
        notifier.send(Notifier.tell, 5)
        env.run()
        if crashes:
            notifier.checkpoint()
            notifier.crash()
            notifier.recover()
        assert asked == []
        y.recover()
        assert asked == [5]
        assert notifier.state.told == 5


@upgrades(Node)
class LaterNode(Immortal, formerly=("Node",)):
    heard: list[str]
    upgraded: bool

    @classmethod
    def upgrade(cls, old: Node) -> LaterNode:
        new = cls()
        new.heard, new.upgraded = [*old.heard, "upgraded"], True
        return new

    @rpc
    def hear(self, text: str) -> None:
        self.heard.append(f"later {text}")

    @rpc
    def note(self, text: str) -> str:
        self.heard.append(f"later {text}")
        return text


def test_an_upgrade_in_the_middle_of_a_multicast() -> None:
    with Environment() as env:
        x, y, _ = blocked(env)
        answer = x.begin(Node.note, "call")
        env.run()
        later = x.upgrade(LaterNode)
        y.recover()
        env.run()
        assert later.state.heard == ["upgraded", "later first", "later call"]
        assert answer.result() == "call"
        assert y.state.heard == ["first"]


def within_a_second(book: Instance[Book], text: str) -> int:
    return book.begin(Book.add, text).result(patience=timedelta(seconds=1))


def test_what_has_no_tie_to_a_multicast_that_is_late_passes_it() -> None:
    with Environment() as env:
        (a, b, c), (x, y, z) = start(env)
        env.partition(x, b)  # as one that is frozen
        x.send(Sender.send, "x1")
        env.run()
        assert within_a_second(a, "a client's") == 1
        y.send(Sender.send, "y1")
        z.send(Sender.send_and_tell, "z1")
        env.advance(seconds=1)
        assert a.state.seen[0] == "a client's"
        assert set(a.state.seen[1:]) == {"y1", "z1"}
        assert within_a_second(a, "another's") == 4
        a.crash()
        a.recover()
        assert within_a_second(c, "a third's") == 3
        assert "x1" not in b.state.seen
        env.heal()
        env.advance(seconds=1)
        runs = [[text for text in book.state.seen if text in ("x1", "y1", "z1")] for book in (a, b)]
        assert runs[0] == runs[1]
        assert runs[0][-1] == "x1"
        assert [text for text in c.state.seen if text in ("x1", "y1")] == ["y1", "x1"]
