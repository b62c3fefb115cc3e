"""Coordinators killed with -9 and apps cut off, at random, while calls flow: each is executed once, in order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.processes import CoordinatorProcess, House, SocketApp

KILLS = 5
NUMBERS_PER_LIFE = 40


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "home")
    yield made
    made.close()


class Pair:
    """alice forwards numbers to bob. Both are brought back when they are killed, and alice goes on where she was."""

    def __init__(self, house: House, extended: bool) -> None:
        house.register("alice", "bob")
        self.house, self.extended = house, extended
        self.coordinators: dict[str, CoordinatorProcess] = {}
        self.apps: dict[str, SocketApp] = {}
        self.sent = 0
        for name in ("bob", "alice"):
            self.bring_back(name)

    def bring_back(self, name: str) -> None:
        coordinator = self.coordinators.get(name)
        if coordinator is None or coordinator.process.poll() is not None:
            self.coordinators[name] = self.house.start(name)
        peer = "bob" if name == "alice" else ""
        self.apps[name] = self.house.app(name, peer=peer, extended=self.extended).ready()
        if name == "alice":
            # All that was logged is replayed by now: what is missing never got into the log.
            known = self.apps["alice"].state["forwarded"]
            assert known == list(range(1, len(known) + 1))
            self.sent = len(known)

    def feed(self, count: int) -> None:
        for _ in range(count):
            self.sent += 1
            self.apps["alice"].impulse(self.sent)

    def kill(self, name: str, *, whole: bool) -> None:
        coordinator, app = self.coordinators[name], self.apps[name]
        if whole:
            coordinator.kill()
            app.until_closed()
        else:
            gone = coordinator.count("the app disconnected")
            app.close()
            coordinator.line("the app disconnected", gone + 1)
        self.bring_back(name)


@pytest.mark.parametrize("extended", [False, True], ids=["base", "extended"])
@pytest.mark.parametrize("seed", [1, 2])
def test_kills_at_random(house: House, seed: int, extended: bool) -> None:
    rng = random.Random(seed)
    pair = Pair(house, extended)
    for _ in range(KILLS):
        pair.feed(NUMBERS_PER_LIFE)
        name = rng.choice(("alice", "bob"))
        app = pair.apps[name]
        done = "forwarded" if name == "alice" else "told"
        at = pair.sent - rng.randrange(NUMBERS_PER_LIFE)
        app.until(lambda: len(app.state[done]) >= at)  # noqa: B023
        pair.kill(name, whole=rng.random() < 0.7)
    pair.feed(10)
    alice, bob = pair.apps["alice"], pair.apps["bob"]
    bob.until(lambda: len(bob.state["told"]) >= pair.sent)
    alice.until(lambda: len(alice.state["forwarded"]) >= pair.sent)
    pair.coordinators["alice"].until(lambda status: status["outputs"]["bob"]["acknowledged"] >= pair.sent)
    assert alice.state["forwarded"] == bob.state["told"] == list(range(1, pair.sent + 1))
    for coordinator in pair.coordinators.values():
        assert coordinator.count(" error ") == 0, coordinator.lines
