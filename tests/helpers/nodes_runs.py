"""Seeded runs of nodes and handles over real instances, with faults, and a checker of the promises."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

import immortal
from immortal import Handle, Immortal, Node, impulse, peer, rpc
from immortal.appsdk.nodes.reference_counts import Owner
from immortal.testing import Environment, Instance
from tests.helpers.ordering_runs import _crash, _some_steps

NAMES = ("m0", "m1", "m2", "m3")


_moments = count()
MOMENTS: dict[Any, int] = {}
"""Order of first occurrences (replays do not count), by (instance, number), and of handles' ends, by key."""


def _key_of(handle: Handle[Any]) -> bytes:
    key: bytes = handle._immortal_of[1]  # type: ignore[attr-defined]
    return key


@contextmanager
def ends_noted() -> Iterator[None]:
    """Note the moment of each owner's end of a handle."""
    MOMENTS.clear()
    end = Owner.end

    def noted(owner: Owner, key: bytes, how: str) -> None:
        MOMENTS.setdefault(key.hex(), next(_moments))
        end(owner, key, how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Owner, "end", noted)
        yield


class BrokenHandlesError(AssertionError):
    """Raised when a promise about handles does not hold."""


class Part(Node):
    name: str

    def __init__(self, name: str) -> None:
        self.name = name

    @rpc
    def hear(self, text: str) -> None:
        self.owner.seen.append(f"{self.name} {text}")


class Member(Immortal, nodes=(Part,)):
    """Instance with nodes. ``seen``: the labels that it and its nodes got, and ends, in order. ``held``: others'
    handles, by name. ``passed``: names of handles that it has passed on, so that their owner can learn late of a
    holder."""

    m0 = peer(lambda: Member, "m0")
    m1 = peer(lambda: Member, "m1")
    m2 = peer(lambda: Member, "m2")
    m3 = peer(lambda: Member, "m3")
    made: dict[str, Handle[Part]]
    held: dict[str, Handle[Part]]
    ended: list[str]
    seen: list[str]
    free: list[str]
    passed: list[str]
    sent: int
    created: int
    told: list[tuple[str, str]]

    def __init__(self) -> None:
        self.told = []
        self.passed = []
        self.made, self.held, self.ended, self.seen, self.free, self.sent, self.created = {}, {}, [], [], [], 0, 0

    def peers(self, names: list[str]) -> list[Any]:
        known: dict[str, Any] = {"m0": self.m0, "m1": self.m1, "m2": self.m2, "m3": self.m3}
        return [known[name] for name in names]

    def name(self) -> str:
        return self._immortal_context.instance_name

    @impulse
    def create(self, to: list[str]) -> None:
        self.created += 1
        name = f"{self.name()}n{self.created}"
        self.made[name] = immortal.create_node(Part, name)
        for one in self.peers([name for name in to if name != self.name()]):
            one.take.fork(name, self.made[name])

    @rpc
    def take(self, name: str, handle: Handle[Part]) -> None:
        if not name.startswith(self.name()):
            self.note("got", handle)
        if handle in self.held.values() or name in self.ended or name.startswith(self.name()):
            return  # another copy, or the instance's own handle
        self.held[name] = handle

    @rpc
    def take_badly(self, name: str, handle: Handle[Part]) -> None:
        self.held[name] = handle
        raise ValueError("no")

    @impulse
    def pass_on(self, which: int, to: str, how: str) -> None:
        usable = sorted(self.held)
        if not usable or to == self.name():
            return
        name = usable[which % len(usable)]
        (one,) = self.peers([to])
        self.passed.append(name)
        if how == "badly":
            one.take_badly.fork(name, self.held[name])
        elif how == "multicast":
            immortal.multicast([one]).take.fork(name, self.held[name])
        else:
            one.take.fork(name, self.held[name])
        if which % 2:
            immortal.release_handle(self.held.pop(name))

    @impulse
    def drop(self) -> None:
        for name in sorted(self.held):
            immortal.release_handle(self.held.pop(name))

    @impulse
    def tell(self, which: int, to: list[str]) -> None:
        """Multicast to a node, or to two of different owners, and to other instances."""
        names = sorted(self.held)
        if not names:
            return
        nodes: dict[str, Any] = {}
        for index in range(2):
            name = names[(which + index) % len(names)]
            nodes.setdefault(name[:2], self.held[name])
        self.sent += 1
        others = self.peers([name for name in to if name not in nodes and name != self.name()])
        targets = "+".join(name for name, one in self.held.items() if one in nodes.values())
        immortal.multicast([*nodes.values(), *others]).hear.fork(f"{self.name()}t{self.sent}:{targets}")

    @rpc
    def hear(self, text: str) -> None:
        self.seen.append(f"- {text}")

    @impulse
    def close(self, which: int) -> None:
        names = sorted(self.made)
        if names:
            immortal.destroy(self.made.pop(names[which % len(names)]))

    def note(self, what: str, handle: Handle[Any]) -> None:
        self.told.append((what, _key_of(handle).hex()))
        MOMENTS.setdefault((self.name(), len(self.told)), next(_moments))

    def on_destroyed(self, handle: Handle[Any]) -> None:
        self.note("end", handle)
        for name in [name for name, one in self.held.items() if one == handle]:
            del self.held[name]
            self.ended.append(name)
            self.seen.append(f"end {name}")

    def on_last_release(self, handle: Handle[Any]) -> None:
        self.free += [name for name, one in self.made.items() if one == handle]


ALL = ("create", "create", "pass", "pass", "pass", "tell", "tell", "tell", "drop", "close")
PASSING = ("create", *("pass",) * 8, "close", "close", "drop")
"""Acts of a run in which many copies are on their way while nodes are destroyed."""


def run_seed(seed: int, acts: tuple[str, ...] = ALL) -> tuple[int, int]:
    """Run a seed; return how many nodes were destroyed and how often a last release was reported. Raises
    BrokenHandlesError, and the errors of an instance or a replay."""
    rng = random.Random(seed)
    with ends_noted(), Environment(order=seed, seed=seed, fail_alone=True) as env:
        members = {name: env.start(Member, name) for name in NAMES}
        for _ in range(rng.randint(8, 25)):
            _act(rng, rng.choice(list(members.values())), acts)
            _some_steps(env, rng)
            if acts is ALL or rng.random() < 0.3:
                env._world.network.parted.clear()
            if rng.random() < 0.3:
                env._world.network.parted.add(frozenset(rng.sample(NAMES, 2)))
            if rng.random() < 0.1:
                _crash(rng, rng.choice(list(members.values())))  # type: ignore[arg-type]
        env.heal()
        env.run()
        return check(env, members)


def _act(rng: random.Random, member: Instance[Member], acts: tuple[str, ...]) -> None:
    to = rng.sample(NAMES, rng.choice((1, 2, 3)))
    what = rng.choice(acts)
    which = rng.randrange(6)
    if what == "create":
        member.send(Member.create, to)
    elif what == "pass":
        member.send(Member.pass_on, which, to[0], rng.choice(("plainly", "plainly", "badly", "multicast")))
    elif what == "tell":
        member.send(Member.tell, which, to)
    elif what == "drop":
        member.send(Member.drop)
    else:
        member.send(Member.close, which)


def check(env: Environment, members: dict[str, Instance[Member]]) -> tuple[int, int]:
    """Check at rest: each owner counts its holders, ended handles are forgotten, and the ends are in one order with all
    multicasts."""
    machines = {name: _machines(env, name) for name in members}
    destroyed = 0
    for name, (owner, _) in machines.items():
        for key, grant in owner.grants.items():
            held = {
                other: one.count
                for other, (_, holder) in machines.items()
                for one in holder.held.values()
                if (one.owner, one.key) == (name, key) and one.count
            }
            if grant.holders != held:
                raise BrokenHandlesError(f"{name} counts {grant.holders}, held are {held}")
            if grant.stage:
                raise BrokenHandlesError(f"{name} remembers a node that is over, for {grant.holders}")
    for name, (_, holder) in machines.items():
        for one in holder.held.values():
            if one.ended or one.key not in machines[one.owner][0].grants:
                raise BrokenHandlesError(f"{name} remembers a handle of {one.owner} that is over")
        usable = {(one.owner, one.key) for one in holder.held.values()}
        for handle in members[name].state.held.values():
            if handle._immortal_of[:2] not in usable:  # type: ignore[attr-defined]
                raise BrokenHandlesError(f"{name} was not told of the end of {handle!r}")
    for name, member in members.items():
        # A copy that arrived after the end stays in the state until the hook is called for it once more.
        letters = {one.text for one in member.dead_letters if "can't be passed on" not in one.text} - {"no"}
        if letters:
            raise BrokenHandlesError(f"{name} has refused or failed: {letters}")
    for name, member in members.items():
        _check_told(name, member.state.told)
    passed = {node for member in members.values() for node in member.state.passed}
    for name, member in members.items():
        destroyed += sum(item.startswith("end ") for item in member.state.seen)
        _check_order(name, member.state.seen, members, passed)
    return destroyed, sum(len(member.state.free) for member in members.values())


def _check_told(name: str, told: list[tuple[str, str]]) -> None:
    """Check that no dead handle reached a handler before its instance was told of the end."""
    known = set()
    for number, (what, key) in enumerate(told, 1):
        if what == "end":
            known.add(key)
        elif key not in known and MOMENTS.get(key, 1 << 60) < MOMENTS[name, number]:
            raise BrokenHandlesError(f"{name} got a dead handle before it was told of its end: {told[:number]}")


def _machines(env: Environment, name: str) -> tuple[Any, Any]:
    app = env._world.nodes[name].local_app
    assert app is not None
    nodes = app.dispatcher.context.nodes
    return nodes.accounts.owner, nodes.accounts.holder


def _check_order(name: str, seen: list[str], members: dict[str, Instance[Member]], passed: set[str]) -> None:
    """Check that a multicast that a holder got after a node's end did not reach the node, and one that it got before
    did, if the owner knew all holders (the node is not among ``passed``)."""
    for index, item in enumerate(seen):
        if not item.startswith("end "):
            continue
        node = item.removeprefix("end ")
        reached = {one.removeprefix(f"{node} ") for one in members[node[:2]].state.seen if one.startswith(f"{node} ")}
        late = {one.partition(" ")[2] for one in seen[index:] if not one.startswith("end ")}
        if reached & late:
            raise BrokenHandlesError(f"{name} got {reached & late} behind the end of {node}, which got it")
        early = {one.partition(" ")[2] for one in seen[:index] if node in one.partition(":")[2].split("+")}
        if node not in passed and early - reached:
            raise BrokenHandlesError(f"{name} got {early - reached} before the end of {node}, which did not get it")
