"""The feeding pattern of the README, by seed: a hook continues from the state, and each input is handled once.

Multicasts and messages to a group; partitions, crashes, checkpoints, an upgrade, a member that is expelled.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest

import immortal
from immortal import Immortal, Impulses, impulse, on_primary, peer, rpc, upgrades
from immortal.appsdk.dispatch.lifecycle import HookGate
from immortal.appsdk.handlers.proxy import Impulses as ImpulsesOf
from immortal.appsdk.testing.instance import HookQueue, as_thread
from immortal.appsdk.testing.world import NoAnswerError
from immortal.appsdk.waiting.tasks import describe_all
from immortal.coordinator.core import events as ev
from immortal.patterns.groups import Grouped, group
from immortal.protocol.system_methods import Order
from immortal.testing import Environment, Instance
from tests.helpers.effort import effort

GUESTS = 12
SEEDS = effort(8)
SEEDS_MAX = 200  # enough to find the planted bug


class Book(Grouped):
    guests = group(lambda: Book, "guests", members=["east", "west"])
    got: list[str]

    def __init__(self) -> None:
        self.got = []

    @rpc
    def place(self, name: str) -> None:
        self.got.append(name)


class Crowd(Grouped):
    east = peer(Book, "east")
    west = peer(Book, "west")
    guests = group(Book, "guests", members=["east", "west"])
    sent: int
    arrived: list[str]
    placed: list[str]

    def __init__(self) -> None:
        self.sent = 0
        self.arrived = []
        self.placed = []

    @impulse
    def arrive(self, name: str) -> None:
        self.sent += 1
        self.arrived.append(name)
        if self.sent % 4 == 0:
            self.guests.place.fork(name)
        elif self.sent % 4 == 1:
            immortal.multicast([self.east, type(self)]).place.fork(name)
        else:
            immortal.multicast([self.east, self.west, type(self)]).place.fork(name)

    @rpc
    def place(self, name: str) -> None:
        self.placed.append(name)

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        for number in range(self.sent, GUESTS):
            impulses.arrive(f"guest {number + 1}")


@upgrades(Crowd)
class CrowdTwo(Crowd):
    @classmethod
    def upgrade(cls, old: Crowd) -> CrowdTwo:
        new = cls()
        new.sent, new.arrived, new.placed = old.sent, old.arrived, old.placed
        new.groups_known = old.groups_known
        return new


class Feeder:
    """The hook's thread, a step at a time: one for each life of the app."""

    def __init__(self, env: Environment, crowd: Instance[Crowd]) -> None:
        self.crowd = crowd
        self._env = env
        self._app: object = None
        self._numbers: Iterator[int] = iter(())

    def step(self) -> None:
        app = self.crowd._node.local_app
        if app is None or not self.crowd._node.is_up or not app.dispatcher.may_start_hooks:
            return
        if app is not self._app:
            self._app, self._numbers = app, iter(range(app.instance.sent, GUESTS))
        number = next(self._numbers, None)
        if number is not None:
            dispatcher = app.dispatcher
            queue = HookQueue(dispatcher.context, dispatcher.outbox.impulses, lambda: None, lambda: True)
            with as_thread(dispatcher.context):
                ImpulsesOf(app.instance, dispatcher.definition, queue).arrive(f"guest {number + 1}")


def run_seed(seed: int) -> None:
    rng = random.Random(seed)
    with Environment(order=seed, seed=seed) as env:
        east, west = env.start(Book, "east"), env.start(Book, "west")
        feeder = Feeder(env, env.start(Crowd, "crowd"))
        world, expelled = env._world, False
        for _ in range(rng.randint(20, 60)):
            for _ in range(rng.randint(0, 12)):
                world.do(lambda: world._random_step(rng))  # type: ignore[func-returns-value, arg-type, return-value]
            feeder.step()
            what = rng.random()
            crowd = feeder.crowd
            if what < 0.1:
                world.network.parted.add(frozenset((crowd.name, rng.choice(("east", "west")))))
            elif what < 0.15:
                world.network.parted.clear()
            elif what < 0.25:
                _crash(rng, rng.choice((crowd, crowd, east)))
            elif what < 0.27:
                feeder.crowd = crowd.upgrade(CrowdTwo)
            elif what < 0.3:
                crowd.checkpoint()
            elif what < 0.33 and not expelled:
                expelled = True
                order = Order("expel", 0, "west", "ann", msgspec.Raw(msgspec.msgpack.encode("guests")))
                east._node.handle(ev.HandlerOrdered(order, "token"))
        env.heal()
        for _ in range(GUESTS + 1):
            feeder.step()
            env.advance(seconds=1)
        state, names = feeder.crowd.state, [f"guest {number + 1}" for number in range(GUESTS)]
        assert state.arrived == names
        assert state.placed == [name for number, name in enumerate(names, 1) if number % 4]
        assert sorted(east.state.got) == sorted(names)
        assert len(set(west.state.got)) == len(west.state.got)


def _crash(rng: random.Random, one: Instance[Crowd] | Instance[Book]) -> None:
    if rng.random() < 0.5:
        one.crash()
    else:
        one.crash_app()
    one.recover()


def _run_seeds(count: int) -> None:
    for seed in range(count):
        run_seed(seed)


def test_each_input_is_handled_exactly_once() -> None:
    _run_seeds(SEEDS)


def test_a_hook_that_starts_before_the_state_covers_the_log_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(gate: HookGate) -> bool:
        gate.is_open = True
        return True

    monkeypatch.setattr(HookGate, "poll", at_once)
    with pytest.raises(AssertionError):
        _run_seeds(SEEDS_MAX)


class Slow(Immortal):
    sent: int
    done: list[str]

    def __init__(self) -> None:
        self.sent = 0
        self.done = []

    @impulse(limit=1)
    async def arrive(self, name: str) -> None:
        await immortal.step(self.count)
        await immortal.event("go", bool)
        await immortal.step(self.end, name)

    @rpc
    def count(self) -> None:
        self.sent += 1

    @rpc
    def end(self, name: str) -> None:
        self.done.append(name)

    @rpc
    def go(self) -> None:
        immortal.signal("go", True)

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        for number in range(self.sent, 3):
            impulses.arrive(f"guest {number + 1}")


def test_a_hook_waits_for_impulses_whose_handlers_wait_for_their_turn() -> None:
    with Environment() as env:
        slow = env.start(Slow, "slow")
        slow.run_hook(Slow.feed)
        assert slow.state.sent == 1
        slow.crash_app()
        slow.recover()
        with pytest.raises(NoAnswerError, match="hook"):
            slow.run_hook(Slow.feed)
        app = slow._node.local_app
        assert app is not None
        waits = describe_all(app.dispatcher.tasks, app.dispatcher.describe_hooks())["multicasts"]
        assert [(one["for"], one["count"]) for one in waits] == [("slow", 2)]
        assert "before its @on_primary hooks start" in waits[0]["what"]
        for _ in range(3):
            slow.call(Slow.go)
        slow.run_hook(Slow.feed)  # now all three have begun
        assert slow.state.done == ["guest 1", "guest 2", "guest 3"]
