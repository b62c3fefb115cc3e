"""What-if for fleets whose end depends on timing: what really happens under the new code is among what its orders list.

Senders race for an account: what is not there yet is refused, and the last writer wins. Messages take times that are
drawn. Those of the record keep theirs; what the new code does beside that is drawn anew, and run for real.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from msgspec.structs import replace

import immortal
from immortal import Immortal, peer, rpc
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.testing.instance import MemorySource
from immortal.appsdk.testing.outside import OUTSIDERS
from immortal.appsdk.testing.world import Network, Node, World
from immortal.coordinator.core import effects as ef
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.log.record_contents import rpcs
from immortal.protocol import decoding
from immortal.protocol.messages import RpcKind, RpcType
from immortal.protocol.peer_frames import FrameType
from immortal.replay.fleet.model import Logs, Rules
from immortal.replay.fleet.outcome import FleetOutcome, what_if_fleet
from immortal.testing import Environment
from tests.helpers.effort import effort

DELAYS_NS = [5_000_000, 20_000_000, 40_000_000, 70_000_000, 100_000_000]
ORDERS = 50
TRUTHS = 10
MISSED_SHARE_MAX = 0.02  # of runs whose end no order has
KINDS = ("put", "put", "take", "take", "write")

Op = tuple[int, str, int]
"""Call of the account: its tag, the method, an amount. The first tags are those of the warm-up, one for each delay."""

Program = Mapping[int, Sequence[Op]]
"""What a sender does for each input."""


class Account(Immortal):
    balance: int
    refused: int
    last: int

    def __init__(self) -> None:
        self.balance = self.refused = self.last = 0

    @rpc
    def put(self, tag: int, amount: int) -> None:
        self.balance += amount

    @rpc
    def write(self, tag: int, amount: int) -> None:
        self.last = amount

    @rpc
    def take(self, tag: int, amount: int) -> tuple[int, bool]:
        if self.balance < amount:
            self.refused += 1
            return tag, False
        self.balance -= amount
        return tag, True


class Sender(Immortal):
    failed: int
    program: ClassVar[Program] = {}
    account = peer(Account, "account")

    def __init__(self) -> None:
        self.failed = 0

    @rpc
    async def go(self, number: int) -> None:
        for tag, what, amount in self.program.get(number, ()):
            if what == "take":
                _, is_done = await self.account.take(tag, amount)
                if not is_done:
                    await immortal.step(self.fail)
            elif what == "put":
                self.account.put.fork(tag, amount)
            else:
                self.account.write.fork(tag, amount)

    def fail(self) -> None:
        self.failed += 1


def sender(program: Program) -> type[Sender]:
    return type("Sender", (Sender,), {"program": program, "__module__": __name__, "__annotations__": {}})


Message = tuple[str, str, int]
"""Message: sender, receiver, tag."""


class Timing:
    """Delays of messages, drawn from ``seed``; those that ``then`` had are drawn from the seed of that."""

    def __init__(self, seed: int, then: Timing | None = None) -> None:
        self._seed = seed
        self._then = then
        self._drawn: set[Message] = set()

    def delay_ns(self, message: Message) -> int:
        if self._then is not None and message in self._then._drawn:
            return self._then.delay_ns(message)
        self._drawn.add(message)
        tag = message[2]
        return DELAYS_NS[tag] if tag < len(DELAYS_NS) else random.Random(f"{self._seed} {message}").choice(DELAYS_NS)


class LateNetwork(Network):
    """Network in which each message between services takes its time; streams keep their order."""

    def __init__(self, world: World, timing: Timing) -> None:
        super().__init__(world.nodes)
        self._world = world
        self._timing = timing
        self._late: list[tuple[int, Node, ef.SendToPeer]] = []
        self._last_ns: Counter[tuple[str, str]] = Counter()
        self._due_of_nodes = world.next_due_ns
        world.next_due_ns = self._next_due_ns  # type: ignore[method-assign]
        world.network = self

    def send(self, sender: Node, effect: ef.SendToPeer) -> None:
        stream, frame = (sender.name, effect.destination), effect.frame
        if frame.frame_type != FrameType.BATCH or sender.name == World.outside_name:
            super().send(sender, effect)
            return
        for at, (payload, call) in enumerate(rpcs(frame.payload)):
            arguments = decoding.decode(call.arguments)
            is_call = call.kind == RpcKind.CALL
            tag = arguments[2 if call.rpc_type == RpcType.ASYNC else 0] if is_call else arguments[1][0]
            due_ns = self._world.now_ns + self._timing.delay_ns((*stream, tag))
            self._last_ns[stream] = max(self._last_ns[stream], due_ns)
            one = replace(frame, position=frame.position + at, count=1, payload=payload)
            self._late.append((self._last_ns[stream], sender, replace(effect, frame=one)))

    def _next_due_ns(self) -> int | None:
        dues = [self._due_of_nodes(), *(due_ns for due_ns, _, _ in self._late)]
        return min((one for one in dues if one is not None), default=None)

    def step(self) -> bool:
        for one in [one for one in self._late if one[0] <= self._world.now_ns]:
            self._late.remove(one)
            super().send(*one[1:])
        return super().step()


States = dict[str, dict[str, Any]]


class Run:
    """A fleet at the end of these inputs: (milliseconds after the one before, sender)."""

    def __init__(self, programs: Mapping[str, Program], inputs: Sequence[tuple[int, str]], timing: Timing) -> None:
        self.env = Environment()
        self.env._world.limits = Limits(hold_off_ns_min=0, peer_gather_bytes=0)  # messages wait for no acknowledgement
        LateNetwork(self.env._world, timing)
        self.classes: dict[str, type[Immortal]] = {"account": Account}
        self.classes |= {name: sender(program) for name, program in programs.items()}
        services: dict[str, Any] = {name: self.env.start(cls, name) for name, cls in self.classes.items()}
        for number in range(len(DELAYS_NS)):  # the warm-up: each stream has had each delay
            for name in programs:
                services[name].send(Sender.go, -1 - number)
            self.env.advance(seconds=1)
        for number, (after_ms, name) in enumerate(inputs):
            self.env.advance(milliseconds=after_ms)
            services[name].send(Sender.go, number)
        self.env.advance(hours=1)
        for name in programs:
            services[name].send(Sender.go, len(inputs))  # so that all logs end late
        self.env.run()
        self.states: States = {name: dict(vars(one.state)) for name, one in services.items()}

    def logs(self, changes: Mapping[str, type[Immortal]]) -> Logs:
        return Logs(
            {name: MemorySource(name, self.env._world.nodes[name].store) for name in self.classes},
            lambda name: definition_of(self.classes[name]),
            {name: definition_of(cls) for name, cls in changes.items()},
            outsiders=OUTSIDERS,
        )

    def states_of(self, outcome: FleetOutcome) -> States:
        """Return the states at the end that a what-if says."""
        found = {name: dict(state) for name, state in self.states.items()}
        for one in outcome.services:
            found[one.name] |= {each["path"]: each["new"] for each in one.state}
        return found


class Race:
    """A fleet, and other programs for one of its senders, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = random.Random(f"race {seed}")
        self._tags = itertools.count(len(DELAYS_NS))
        self.seed = seed
        names = ["b", "c", "d"][: rng.randint(2, 3)]
        self.inputs = [(rng.choice([0, 10, 30]), rng.choice(names)) for _ in range(20)]
        warm_up: Program = {-1 - tag: [(tag, "take", 0)] for tag in range(len(DELAYS_NS))}
        self.old = {name: {**warm_up, **self._programs(name)} for name in names}
        self.changed = names[0]
        self.new = {**self.old, self.changed: dict(self.old[self.changed])}
        own = [number for number, one in enumerate(self.inputs) if one[1] == self.changed]
        for number in rng.sample(own, min(len(own), 3)):
            self.new[self.changed][number] = self._other(self.old[self.changed][number])

    def _programs(self, name: str) -> dict[int, Sequence[Op]]:
        own = [number for number, one in enumerate(self.inputs) if one[1] == name]
        return {number: [self._op() for _ in range(self._rng.randint(0, 2))] for number in own}

    def _op(self) -> Op:
        return next(self._tags), self._rng.choice(KINDS), self._rng.randint(1, 9)

    def _other(self, ops: Sequence[Op]) -> list[Op]:
        """Return the program with an amount or a method changed, or with a call more or less."""
        found, way = list(ops), self._rng.choice(["add", "add", "drop", "change"])
        at = self._rng.randint(0, len(found))
        if way == "add" or at == len(found):
            found.insert(at, self._op())
        elif way == "drop":
            del found[at]
        else:
            found[at] = (found[at][0], self._rng.choice(KINDS), self._rng.randint(1, 9))
        return found

    def run(self) -> tuple[Counter[str], Counter[str]]:
        """Return how often which states are at the end: as the what-if lists them, and in truth."""
        timing = Timing(self.seed)
        then = Run(self.old, self.inputs, timing)
        logs = then.logs({self.changed: sender(self.new[self.changed])})
        listed: Counter[str] = Counter()
        for end in what_if_fleet(logs, Rules(), seeds=ORDERS).seeds.ends:
            states = then.states_of(what_if_fleet(logs, Rules(), orders=[end.seed]))
            listed[str(states)] += end.count
        truths = [Run(self.new, self.inputs, Timing(1000 + number, timing)) for number in range(TRUTHS)]
        return listed, Counter(str(one.states) for one in truths)


def test_what_happens_under_the_new_code_is_what_an_order_says() -> None:
    missed, ends, races = Counter[int](), 0, effort(2)
    for seed in range(races):
        listed, truth = Race(seed).run()
        ends += len(truth)
        missed[seed] += sum(count for states, count in truth.items() if states not in listed)
    assert missed.total() <= MISSED_SHARE_MAX * races * TRUTHS, missed
    assert ends > races  # timing makes a difference
