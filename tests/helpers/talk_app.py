"""Services for fleets of tests: one asks, another answers, and one has no peers."""

from __future__ import annotations

from immortal import Immortal, impulse, peer, rpc


class Asker(Immortal):
    helper = peer(lambda: Helper, "helper")
    count: int

    def __init__(self) -> None:
        self.count = 0

    @impulse
    def ask(self, number: int) -> None:
        self.helper.help.fork(number)

    @rpc
    def answer(self, number: int) -> None:
        self.count += number


class Helper(Immortal):
    asker = peer(Asker, "asker")
    seen: int

    def __init__(self) -> None:
        self.seen = 0

    @rpc
    def help(self, number: int) -> None:
        self.seen += 1
        self.asker.answer.fork(number * 2)


class Tally(Immortal):
    total: int

    def __init__(self) -> None:
        self.total = 0

    @impulse
    def add(self, number: int) -> None:
        self.total += number
