"""Seeded runs of ordered multicasts over real instances, with faults, and checkers of the promises."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import immortal
from immortal import Immortal, impulse, peer, rpc
from immortal.testing import Environment, Instance

NAMES = ("m0", "m1", "m2", "m3")


class BrokenOrderError(AssertionError):
    """Raised when one of the three properties does not hold."""


class Member(Immortal):
    """Instance. ``seen``: its messages in order, as ("sent" or "got", message, "run" or "call")."""

    m0 = peer(lambda: Member, "m0")
    m1 = peer(lambda: Member, "m1")
    m2 = peer(lambda: Member, "m2")
    m3 = peer(lambda: Member, "m3")
    seen: list[tuple[str, str, str]]

    def __init__(self) -> None:
        self.seen = []

    @impulse
    def begin(self, plan: list[str]) -> None:
        self.go_on(plan)

    def go_on(self, plan: list[str]) -> None:
        """Send the first step of a chain, "name:run:m0,m1" or "name:call:m2"; its receivers continue with the rest."""
        if not plan:
            return
        name, kind, to = plan[0].split(":")
        self.seen.append(("sent", name, kind))
        peers = [self.peer_of(one) for one in to.split(",")]
        if kind == "run":
            immortal.multicast(peers).hear.fork(name, kind, plan[1:])
        else:
            peers[0].hear.fork(name, kind, plan[1:])

    def peer_of(self, name: str) -> type[Member]:
        return {"m0": self.m0, "m1": self.m1, "m2": self.m2, "m3": self.m3}[name]

    @rpc
    def hear(self, name: str, kind: str, plan: list[str]) -> None:
        self.seen.append(("got", name, kind))
        if plan:
            first, *rest = plan
            _, what, to = first.split(":")
            own = f"{name}>{self._immortal_context.instance_name}"  # each receiver continues with a message of its own
            self.go_on([f"{own}:{what}:{to}", *rest])


def chains(rng: random.Random) -> Iterator[tuple[str, list[str]]]:
    """Yield who begins which chain. Clocks differ, and often a third party sends a plain call back to a receiver."""
    ahead = rng.choice(NAMES)
    for number in range(rng.randint(0, 4)):
        yield rng.choice(NAMES), [f"ahead{number}:run:{ahead}"]
    for number in range(rng.randint(2, 6)):
        sender, second, third = rng.sample([one for one in NAMES if one != ahead], 3)
        if rng.random() < 0.4:
            yield sender, [f"{number}:run:{ahead},{second}", f"{number}:call:{third}", f"{number}:run:{second}"]
            continue
        plan = []
        for _ in range(rng.randint(1, 3)):
            if rng.random() < 0.65:
                to = ",".join(rng.sample(NAMES, rng.choice((1, 2, 2, 3))))
                plan.append(f"{number}:run:{to}")
            else:
                plan.append(f"{number}:call:{rng.choice(NAMES)}")
        yield rng.choice(NAMES), plan


def run_seed(seed: int) -> None:
    """Run a seed. Raises BrokenOrderError, and the errors of an instance or a replay."""
    rng = random.Random(seed)
    with Environment(order=seed, seed=seed) as env:
        members = {name: env.start(Member, name) for name in NAMES}
        for name, plan in chains(rng):
            members[name].send(Member.begin, plan)
            _some_steps(env, rng)
            if rng.random() < 0.2:
                _crash(rng, rng.choice(list(members.values())))
        for _ in range(rng.randint(0, 15)):
            env._world.network.parted.clear()  # as env.heal(), but without a run to the end
            for _ in range(rng.randint(0, 4)):
                one, other = rng.sample(NAMES, 2)
                env._world.network.parted.add(frozenset((one, other)))
            _some_steps(env, rng)
        env.heal()
        env.run()
        check({name: member.state.seen for name, member in members.items()})


def _some_steps(env: Environment, rng: random.Random) -> None:
    world = env._world
    for _ in range(rng.randint(0, 40)):
        world.do(lambda: world._random_step(rng))  # type: ignore[func-returns-value, arg-type, return-value]


def _crash(rng: random.Random, member: Instance[Member]) -> None:
    if rng.random() < 0.3:
        member.checkpoint()
    if rng.random() < 0.5:
        member.crash()
    else:
        member.crash_app()
    member.recover()


# --- promises ---------------------------------------------------------------------------------------------------------


def check(seen: dict[str, list[tuple[str, str, str]]]) -> None:
    """Check consistency (one order of all runs fits what each got), causality (no run after its consequences), and
    exactly once."""
    causes = _causes(seen)
    order: dict[str, set[str]] = defaultdict(set)
    for name, events in seen.items():
        got = [message for what, message, _ in events if what == "got"]
        runs = [message for what, message, kind in events if what == "got" and kind == "run"]
        if len(set(got)) < len(got):
            raise BrokenOrderError(f"{name} got something twice: {got}")
        for first, second in pairwise(runs):
            order[first].add(second)
        for index, message in enumerate(got):
            late = causes[message].intersection(runs).difference(got[:index])
            if late:
                raise BrokenOrderError(f"causality: {name} got {message} before its cause {sorted(late)}: {got}")
    _check_acyclic(order)


def _causes(seen: dict[str, list[tuple[str, str, str]]]) -> dict[str, set[str]]:
    """Return the messages that each message follows from."""
    causes: dict[str, set[str]] = defaultdict(set)
    changed = True
    while changed:
        changed = False
        for events in seen.values():
            known: set[str] = set()
            for what, message, _ in events:
                if what == "got":
                    known |= {message} | causes[message]
                else:
                    changed = changed or not known <= causes[message]
                    causes[message] |= known
                    known.add(message)
    return causes


def _check_acyclic(order: dict[str, set[str]]) -> None:
    done: set[str] = set()
    open_: set[str] = set()

    def visit(one: str) -> None:
        if one in open_:
            raise BrokenOrderError(f"consistency: no order of all runs fits what was seen: {dict(order)}")
        if one not in done:
            open_.add(one)
            for other in order.get(one, ()):
                visit(other)
            open_.discard(one)
            done.add(one)

    for one in list(order):
        visit(one)
