"""Ordered multicasts between real instances: their apps, their coordinators' machines and logs, in one process."""

from __future__ import annotations

import pytest

from appsdk import CalleeFailed, Immortal, impulse, peer, rpc
from appsdk.testing import Environment, Instance, crash_everywhere


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
        self.multicast([self.a, self.b, self.c]).add.fork(text)

    @impulse
    def send_and_tell(self, text: str) -> None:
        self.multicast([self.a, self.b]).add.fork(text)
        self.c.add.fork(f"after {text}")

    @rpc
    def keep(self, got: tuple[int, ...]) -> None:
        self.answers.extend(got)

    @rpc
    async def ask(self, text: str) -> int:
        got = await self.multicast([self.c, self.a, self.b]).add.all(text)
        await self.keep(got)
        return sum(got)


def start(env: Environment) -> tuple[list[Instance[Book]], list[Instance[Sender]]]:
    return [env.start(Book, name) for name in "abc"], [env.start(Sender, name) for name in "xyz"]


def test_all_destinations_see_one_order() -> None:
    for order in range(10):
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


def test_a_crash_anywhere_changes_nothing() -> None:
    for env in crash_everywhere(runs_max=60):
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
