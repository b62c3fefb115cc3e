"""Seeded runs of plain calls and multicasts among the same instances, with random delays, and a count of inversions."""

from __future__ import annotations

import random

import immortal
from immortal import Immortal, impulse, peer, rpc
from immortal.testing import Environment, Instance
from tests.helpers.ordering_runs import _crash, _some_steps

NAMES = ("m0", "m1", "m2", "m3")


class Member(Immortal):
    """Instance that keeps ``heard``: labels in order of arrival. A label's causes happened at its sender before."""

    m0 = peer(lambda: Member, "m0")
    m1 = peer(lambda: Member, "m1")
    m2 = peer(lambda: Member, "m2")
    m3 = peer(lambda: Member, "m3")
    heard: list[str]
    sent: list[tuple[str, list[str], list[str]]]
    before: list[str]

    def __init__(self) -> None:
        self.heard, self.sent, self.before = [], [], []

    def name(self) -> str:
        return self._immortal_context.instance_name

    def say(self, plan: list[list[str]]) -> None:
        """Send the messages of ``plan``, lists of receivers; a single one gets a plain call. The last one continues."""
        if not plan:
            return
        to, *rest = plan
        peers = [{"m0": self.m0, "m1": self.m1, "m2": self.m2, "m3": self.m3}[one] for one in to]
        label = f"{self.name()}.{len(self.sent)}"
        self.sent.append((label, to, list(self.before)))
        self.before.append(label)
        known = list(self.before)
        if len(peers) == 1:
            peers[0].hear.fork(label, known, rest)
        else:
            immortal.multicast(peers).hear.fork(label, known, rest)

    @impulse
    def begin(self, plans: list[list[list[str]]]) -> None:
        for plan in plans:
            self.say(plan)

    @rpc
    def act(self, plans: list[list[list[str]]], known: list[str]) -> list[str]:
        """Act for a client that awaits each call, and passes on the labels that it knows."""
        self.before = list(dict.fromkeys([*self.before, *known]))
        for plan in plans:
            self.say(plan)
        return self.before

    @rpc
    def hear(self, label: str, known: list[str], plan: list[list[str]]) -> None:
        self.heard.append(label)
        self.before = list(dict.fromkeys([*self.before, *known]))
        self.say(plan)


def _plan(rng: random.Random) -> list[list[str]]:
    return [rng.sample(NAMES, rng.choice((1, 1, 1, 2, 3))) for _ in range(rng.randint(1, 3))]


def _plans(rng: random.Random) -> list[list[list[str]]]:
    return [_plan(rng) for _ in range(rng.randint(1, 3))]


def run_seed(seed: int) -> tuple[int, list[str]]:
    """Return how many pairs of cause and effect reached one receiver, and which of them arrived inverted."""
    rng = random.Random(seed)
    with Environment(order=seed, seed=seed) as env:
        members = {name: env.start(Member, name) for name in NAMES}
        for member in members.values():  # from now on all take part in ordered traffic
            member.send(Member.begin, [[list(NAMES)]])
        env.run()
        known: list[str] = []
        for _ in range(rng.randint(6, 14)):
            member = rng.choice(list(members.values()))
            if rng.random() < 0.5:
                member.send(Member.begin, _plans(rng))
            else:
                known = _awaited(env, rng, member, known)
            env._world.network.parted.clear()
            for _ in range(rng.randint(0, 3)):
                env._world.network.parted.add(frozenset(rng.sample(NAMES, 2)))
            _some_steps(env, rng)
            if rng.random() < 0.1:
                _crash(rng, rng.choice(list(members.values())))  # type: ignore[arg-type]
        env.heal()
        env.advance(seconds=5)
        return inversions({name: member.state for name, member in members.items()})


def _awaited(env: Environment, rng: random.Random, member: Instance[Member], known: list[str]) -> list[str]:
    """Make a client's call, if its answer arrives while some instances are parted; return the known labels."""
    pending = member.begin(Member.act, _plans(rng), known)
    for _ in range(20):
        _some_steps(env, rng)
        if pending.done:
            return pending.result()
    return known


def inversions(states: dict[str, Member]) -> tuple[int, list[str]]:
    causes: dict[str, set[str]] = {}
    to: dict[str, list[str]] = {}
    for state in states.values():
        for label, receivers, before in state.sent:
            causes[label], to[label] = set(before), receivers
    pairs, wrong = 0, []
    for name, state in states.items():
        heard = state.heard
        for index, label in enumerate(heard):
            pairs += sum(other in causes[label] for other in heard[:index])
            for late in heard[index + 1 :]:
                if late in causes[label]:
                    wrong.append(f"{name} heard {label} to {to[label]} before {late} to {to[late]}")
    return pairs, wrong
