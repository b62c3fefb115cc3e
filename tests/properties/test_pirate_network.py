"""Pools on a simulated network that loses and delays, with servers that die: what is promised holds for each seed.

The pool is the real one. A server is what docs/patterns/pirate.md says of one: it does what it is asked in order, keeps
the reply together with the effect where it has a store, and can die before, and behind that.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from immortal.appsdk.patterns.pirate.pool import GiveUp, Ping, Policy, Pool, Send, State, Why
from tests.helpers.effort import effort

POLICY = Policy(tries=3, try_timeout_s=2.0, heartbeat_s=1.0, silence_s=2.5, removal_s=20.0)
REQUESTS = 12
ENDS_S = 200.0


@dataclass
class Store:
    """Durable; of one server or more. ``done``: how often each request had its effect."""

    name: bytes
    replies: dict[int, str] = field(default_factory=dict)
    done: Counter[int] = field(default_factory=Counter)
    locked_until_s: float = 0.0


@dataclass
class Host:
    """A server and its place. ``life``: counted up when it dies."""

    name: str
    store: Store
    keeps: bool
    up: bool = True
    life: int = 0
    busy_until_s: float = 0.0


class World:
    """A client and its servers. All that happens is drawn from ``seed``."""

    def __init__(self, seed: int, stores: list[bytes], loss: float, deaths: float) -> None:
        self.chance = random.Random(seed)
        self.loss, self.deaths = loss, deaths
        self.now_s = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = count()
        by_name = {name: Store(name) for name in stores if name}
        self.hosts: dict[str, Host] = {}
        for index, name in enumerate(stores):
            store = by_name.get(name) or Store(b"")
            self.hosts[f"s{index}"] = Host(f"s{index}", store, bool(name))
        self.pool = Pool(self.hosts, POLICY, 0.0)
        self.open: dict[int, float] = {}  # deadline
        self.asked: Counter[tuple[str, int]] = Counter()
        self.ended: dict[int, object] = {}

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        heappush(self.events, (self.now_s + delay_s, next(self.order), what))

    def run(self) -> None:
        for number in range(1, REQUESTS + 1):
            self.after(self.chance.uniform(0, 30), lambda number=number: self.submit(number))  # type: ignore[misc]
        for host in self.hosts.values():
            self.after(self.chance.expovariate(self.deaths), lambda host=host: self.die(host))  # type: ignore[misc]
        while self.now_s < ENDS_S and (len(self.ended) < REQUESTS or self.now_s < 35):
            due_s = self.pool.next_deadline_s()
            if self.events and self.events[0][0] <= due_s:
                self.now_s, _, what = heappop(self.events)
                what()
            else:
                assert due_s >= self.now_s, "it would never end"
                self.now_s = due_s
            for _ in range(100):
                actions = self.pool.actions(self.now_s)
                for action in actions:
                    self.do(action)
                if not actions:
                    break
            else:
                pytest.fail("the pool has more and more to do")
            assert self.pool.next_deadline_s() > self.now_s

    def submit(self, number: int) -> None:
        self.open[number] = self.now_s + self.chance.choice([3.0, 15.0, 60.0])
        self.pool.submit(number, self.open[number])

    # --- what the pool wants -----------------------------------------------------------------------------------------

    def do(self, action: Send | Ping | GiveUp) -> None:
        if isinstance(action, GiveUp):
            assert self.now_s >= self.open[action.number] or action.why is not Why.TIME
            self.check_tries(action)
            self.end(action.number, action)
            return
        host = self.hosts[action.server]
        if isinstance(action, Send):
            assert self.pool.servers[host.name] is State.LIVE
            assert action.number in self.open
            assert action.number not in self.ended
            self.asked[host.name, action.number] += 1
            if not host.up and self.chance.random() < 0.5:
                self.pool.unsent(host.name, action.number, self.now_s)
                self.asked[host.name, action.number] -= 1
                return
            self.over_the_network(lambda: self.request(host, action.number))
        else:
            assert not any(number for (name, number) in self.working() if name == host.name), "a working one is pinged"
            self.over_the_network(lambda: self.pong(host))

    def working(self) -> list[tuple[str, int]]:
        servers = self.pool._servers.values()
        return [(server.name, server.number) for server in servers if server.number is not None]

    def check_tries(self, action: GiveUp) -> None:
        """Nobody is asked more often than is said, and with several that may have it each once."""
        for name, tries in action.tries.items():
            assert tries == self.asked[name, action.number] <= POLICY.tries
        if action.why is Why.TRIES:
            domain = self.hosts[action.trail.asked[0]].store.name
            left = [
                name
                for name, host in self.hosts.items()
                if host.store.name == domain
                and self.pool._servers[name].domain == domain
                and self.pool.servers[name] is not State.REMOVED
            ]
            assert all(action.tries.get(name) for name in left)
            if len(left) == 1:
                assert action.tries[left[0]] == POLICY.tries

    def end(self, number: int, how: object) -> None:
        assert number not in self.ended
        self.ended[number] = how

    # --- the network and the servers ---------------------------------------------------------------------------------

    def over_the_network(self, what: Callable[[], None]) -> None:
        if self.chance.random() >= self.loss:
            self.after(self.chance.choice([0.001, 0.01, 0.5, 4.0]) * self.chance.random(), what)

    def die(self, host: Host) -> None:
        host.up = False
        host.life += 1
        host.busy_until_s = self.now_s
        if self.chance.random() < 0.5:
            self.pool.lost(host.name, self.now_s)
        self.after(self.chance.choice([0.1, 3.0, 40.0]), lambda: self.come_back(host))

    def come_back(self, host: Host) -> None:
        host.up = True
        self.pool.reached(host.name, self.now_s)
        self.after(self.chance.expovariate(self.deaths), lambda: self.die(host))

    def pong(self, host: Host) -> None:
        if host.up:
            working_s = max(0.0, host.busy_until_s - self.now_s)
            self.over_the_network(
                lambda: self.pool.ponged(host.name, host.store.name if host.keeps else b"", working_s, self.now_s)
            )

    def request(self, host: Host, number: int) -> None:
        """It is done behind what came before it, and behind whoever holds the store."""
        if not host.up:
            return
        life = host.life
        begins_s = max(self.now_s, host.busy_until_s, host.store.locked_until_s if host.keeps else 0.0)
        ends_s = begins_s + self.chance.choice([0.0, 0.1, 3.0])
        host.busy_until_s = ends_s
        if host.keeps:
            host.store.locked_until_s = ends_s

        def effect() -> None:
            if host.life != life:
                return  # it died before its transaction had ended
            if not host.keeps or number not in host.store.replies:
                host.store.done[number] += 1
                host.store.replies[number] = f"{number} done at {host.name}"
            reply = host.store.replies[number]
            if self.chance.random() < 0.2:
                self.die_in_between(host)  # with its reply on the way
            else:
                self.over_the_network(lambda: self.reply(host, number, reply))

        self.after(ends_s - self.now_s, effect)

    def die_in_between(self, host: Host) -> None:
        host.up = False
        host.life += 1
        self.after(0.5, lambda: setattr(host, "up", True))

    def reply(self, host: Host, number: int, reply: str) -> None:
        if self.pool.replied(host.name, number, self.now_s):
            self.end(number, reply)


def check(world: World) -> None:
    """Each request has ended once; a stored one was done once at most, and once where there is a reply."""
    assert sorted(world.ended) == list(range(1, REQUESTS + 1))
    stores = {id(host.store): host.store for host in world.hosts.values()}.values()
    keeping = {host.store.name for host in world.hosts.values() if host.keeps}
    for number, how in world.ended.items():
        done = [store.done[number] for store in stores if store.name in keeping]
        if all(host.keeps for host in world.hosts.values()):
            assert sum(done) <= 1, f"request {number} was done {sum(done)} times"
        if isinstance(how, str):
            assert any(store.replies.get(number) == how for store in stores)


def run_seeds(pool: str, seeds: range) -> None:
    for seed in seeds:
        world = World(seed, POOLS[pool], 0.2, 0.1)
        world.run()
        check(world)


POOLS = {
    "one server": [b"A"],
    "three with one store": [b"A", b"A", b"A"],
    "stores of their own": [b"A", b"B", b"C"],
    "two stores": [b"A", b"A", b"B", b"B"],
    "no stores": [b"", b"", b""],
}


@pytest.mark.parametrize("pool", POOLS)
@given(seed=st.integers(0, 2**32), loss=st.sampled_from([0.0, 0.1, 0.4]), deaths=st.sampled_from([0.01, 0.1, 0.5]))
@settings(max_examples=effort(10))
def test_each_request_ends_and_is_done_once(pool: str, seed: int, loss: float, deaths: float) -> None:
    world = World(seed, POOLS[pool], loss, deaths)
    world.run()
    check(world)


def test_the_simulation_finds_a_pool_that_does_not_look_at_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a test that is green says something."""
    monkeypatch.setattr(Pool, "_may_have", lambda self, request, server: True)
    with pytest.raises(AssertionError):
        run_seeds("stores of their own", range(40))


def test_on_a_good_day_nothing_is_given_up() -> None:
    world = World(1, POOLS["three with one store"], 0.0, 1e-9)
    world.chance.choice = lambda options: options[-1] if 60.0 in options else options[0]  # type: ignore
    world.chance.random = lambda: 0.5  # type: ignore[method-assign]
    world.run()
    check(world)
    assert all(isinstance(how, str) for how in world.ended.values())
    assert set(world.asked.values()) == {1}
