"""The second version of an app of the golden logs."""

from __future__ import annotations

import golden_apps

import immortal
from immortal import Immortal, query, rpc, upgrades


@upgrades(golden_apps.Counter)
class Counter(Immortal):
    words: dict[str, int]
    lines: int

    def __init__(self) -> None:
        self.words = {}
        self.lines = 0

    @classmethod
    def upgrade(cls, old: golden_apps.Counter) -> Counter:
        new = cls()
        new.words = {word.upper(): count for word, count in old.words.items()}
        new.lines = immortal.random.randrange(100)
        return new

    @rpc
    def count(self, line: str) -> None:
        self.lines += 1
        for word in line.upper().split():
            self.words[word] = self.words.get(word, 0) + 1

    @rpc
    async def waits(self, name: str) -> None:
        await immortal.event(name, type(None))
        await immortal.step(self.count, f"{name} came")

    @rpc
    def signals(self, name: str) -> None:
        immortal.signal(name, None)

    @query
    def show(self) -> str:
        return f"2: {sorted(self.words.items())} {self.lines}"
