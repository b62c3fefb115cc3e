"""Two instances with logs and settings, one of which waits for the other: for tests of tools that show logs."""

from __future__ import annotations

from pathlib import Path

from immortal.coordinator.instances.registry import Registry
from tests.helpers.cli import HOME
from tests.helpers.recorded import load_module, write_module
from tests.helpers.waiting import EffectsByHand, WaitingInstances

SOURCE = """
from dataclasses import dataclass
from datetime import timedelta

import immortal
from immortal import Immortal, impulse, peer, rpc


def rate(word: str) -> float:
    return 0.0


@dataclass
class Word:
    text: str
    times: int


class Counter(Immortal):
    words: dict[str, Word]
    total: int

    def __init__(self) -> None:
        self.words = {}
        self.total = 0

    @rpc
    def count(self, word: str) -> int:
        found = self.words.setdefault(word, Word(word, 0))
        found.times += 1
        self.total += 1
        return found.times

    @rpc
    def note(self, word: str) -> None: ...


class Reader(Immortal):
    counter = peer(Counter, "counter")
    seen: list[str]

    def __init__(self) -> None:
        self.seen = []

    @rpc
    def saw(self, word: str) -> None:
        self.seen.append(word)

    @impulse
    async def line(self, word: str) -> None:
        await immortal.step(self.saw, word)
        await self.counter.count(word)
        self.counter.note.fork(word)

    @impulse
    async def rated(self, word: str) -> None:
        await immortal.effect(rate, word)

    @impulse
    async def later(self, word: str) -> None:
        await immortal.sleep(timedelta(days=1))
"""


def make_fleet(folder: Path, words: list[str]) -> str:
    """Make the registry in ``folder``/HOME; return the name of the app's module in ``folder``.

    Each word is a record of its own; at the end one handler waits for an effect, and one for a timer.
    """
    name = write_module(folder, SOURCE)
    module = load_module(folder, name)
    classes = {"reader": module.Reader, "counter": module.Counter}
    instances = WaitingInstances(folder / "logs", classes, EffectsByHand())
    for word in words:
        instances["reader"].impulse("line", word)
    instances["reader"].impulse("rated", "slow")
    instances["reader"].impulse("later", "sleepy")
    instances.settle()
    instances.close()
    registry = Registry(folder / HOME)
    for instance, cls in classes.items():
        registry.register(instance, "tcp://127.0.0.1:*", log=folder / "logs" / instance / "log")
        registry.remember_app(instance, f"{name}:{cls.__name__}")
    return name
