"""Any handlers that wait, and any change of them: each call of the new code gets the answer of its counterpart."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

import immortal
from immortal import Immortal, impulse, peer, rpc
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.running.inspection import unanswered
from immortal.appsdk.testing.replay_check import LocalReplay
from immortal.coordinator.log.reader import RecordSource
from immortal.coordinator.log.record_contents import rpcs
from immortal.log import open_reader
from immortal.protocol.extensions import RandomDraw, decode_numbers
from immortal.protocol.messages import RpcKind, RpcType
from immortal.protocol.record import decode_header
from immortal.replay.findings import DrawnNumbersQueue
from immortal.replay.plan import ReplayPlan
from immortal.replay.result import Sink
from immortal.replay.session import Event, NumbersDrawn, Outputs
from tests.helpers.effort import effort
from tests.helpers.memory import in_memory
from tests.helpers.waiting import EffectsByHand, WaitingInstances

Op = tuple[str, int]  # what, and its argument
Stages = list[list[Op]]  # those of one stage are done at the same time

changed: dict[int, Stages] = {}
"""What the new code does for an order in place of what the order says; empty for the old code."""


def outside(value: int) -> str:
    return ""


class Peer(Immortal):
    answered: int

    def __init__(self) -> None:
        self.answered = 0

    @rpc
    def one(self, value: int) -> str:
        return self._answer("one", value)

    @rpc
    def two(self, value: int) -> str:
        return self._answer("two", value)

    def _answer(self, method: str, value: int) -> str:
        self.answered += 1
        return f"{method} {value} #{self.answered}"


class Orders(Immortal):
    peer = peer(Peer, "peer")
    done: dict[int, list[Any]]
    own: int

    def __init__(self) -> None:
        self.done = {}
        self.own = 0

    @impulse
    async def place(self, order: int, stages: Stages) -> None:
        said: list[Any] = []
        for stage in changed.get(order, stages):
            said += await asyncio.gather(*(self._begin(what, value) for what, value in stage))
        await immortal.step(self.finish, order, [*said, immortal.random.random() if order not in changed else 0])

    def _begin(self, what: str, value: int) -> Any:
        if what == "effect":
            return immortal.effect(outside, value)
        return self.itself(value) if what == "itself" else getattr(self.peer, what)(value)

    @rpc
    async def itself(self, value: int) -> str:
        return f"itself {value} #{await immortal.step(self.counted)} {await self.peer.one(value)}"

    @rpc
    def counted(self) -> int:
        self.own += 1
        return self.own

    @rpc
    def finish(self, order: int, said: list[Any]) -> None:
        self.done[order] = said


class Calls(Sink):
    """Those that wait for their answers, by number."""

    def __init__(self) -> None:
        self.by_number: dict[int, bytes] = {}

    def outputs(self, made: Outputs) -> None:
        for message, rpc_ in rpcs(made.payload):
            if (rpc_.kind, rpc_.rpc_type) == (RpcKind.CALL, RpcType.ASYNC):
                number = msgspec.msgpack.decode(rpc_.arguments)[1]
                assert number not in self.by_number
                self.by_number[number] = message


class Side(LocalReplay):
    """One replay; ``told``: what the other one has drawn."""

    def __init__(self, source: RecordSource, told: DrawnNumbersQueue | None = None) -> None:
        self.calls = Calls()
        super().__init__(source, ReplayPlan(1), definition_of(Orders), self.calls)
        self.told = told
        self.tells = DrawnNumbersQueue()
        self.draws: list[tuple[int, RandomDraw]] = []

    def give(self, value: bytes) -> None:
        if self.told is not None:
            numbers = self.told.pop_until(decode_header(value).sequence_id)
            assert numbers is not None
            self.session.give_numbers(numbers)
        super().give(value)

    def handle_event(self, event: Event) -> None:
        if isinstance(event, NumbersDrawn):
            assert event.sequence_id is not None
            self.tells.add(event.sequence_id, event.data, complete=event.complete)
            self.draws += [(event.sequence_id, draw) for draw in decode_numbers(event.data).draws] if event.data else []
        super().handle_event(event)


ops = st.tuples(st.sampled_from(["one", "two", "effect", "itself"]), st.integers(0, 2))
orders = st.lists(st.lists(st.lists(ops, min_size=1, max_size=3), min_size=1, max_size=4), min_size=2, max_size=5)


def in_stages(choice: random.Random, some: list[Op]) -> Stages:
    stages: Stages = []
    while some:
        size = choice.randint(1, 3)
        stages.append(some[:size])
        some = some[size:]
    return stages


@settings(max_examples=effort(10), deadline=None)
@given(orders, st.randoms(use_true_random=False))
def test_each_call_gets_the_answer_of_its_counterpart(scripts: list[Stages], choice: random.Random) -> None:
    changed.clear()
    with tempfile.TemporaryDirectory(dir=in_memory()) as folder:
        effects = EffectsByHand()
        instances = WaitingInstances(Path(folder), {"orders": Orders, "peer": Peer}, effects)
        instances["orders"].impulses([("place", (order, stages)) for order, stages in enumerate(scripts)])
        given_count = 0
        while (waiting := effects.waiting) or instances.settle() or (waiting := effects.waiting):
            given_count += 1
            choice.choice(waiting).returned(f"effect #{given_count}")
            if choice.random() < 0.5:
                instances.settle()
        done = dict(instances.app("orders").done)
        assert sorted(done) == list(range(len(scripts)))
        instances.close()

        waits: dict[int, Op] = {}  # for what no log has
        for order in choice.sample(range(len(scripts)), choice.randint(0, len(scripts))):
            kept = [op for stage in scripts[order] for op in stage if choice.random() < 0.7]
            choice.shuffle(kept)
            if choice.random() < 0.3:
                waits[order] = (choice.choice(["one", "two", "effect", "itself"]), 7)
                kept.append(waits[order])
            changed[order] = in_stages(choice, kept)

        with open_reader(Path(folder) / "orders" / "log", "orders") as reader:
            plans = dict(changed)
            changed.clear()
            old = Side(reader)
            old.run()
            assert old.app.instance.done == done
            changed.update(plans)
            new = Side(reader, old.tells)
            result = new.run()
        assert result.failure is None

    for order, stages in enumerate(scripts):
        if order in waits:
            assert order not in new.app.instance.done
            continue
        if order not in changed:
            assert new.app.instance.done[order] == done[order]
            continue
        answers: dict[Op, deque[Any]] = defaultdict(deque)
        for op, answer in zip((op for stage in stages for op in stage), done[order], strict=False):
            answers[op].append(answer)
        said = new.app.instance.done[order][:-1]
        for op, answer in zip((op for stage in changed[order] for op in stage), said, strict=True):
            assert answer == answers[op].popleft()

    first_sequence_id = old.draws[0][0]
    starts = [draw.number for sequence_id, draw in old.draws if sequence_id == first_sequence_id and not draw.task]
    unchanged = {number for order, number in enumerate(starts) if order not in changed}
    for _, draw in old.draws:
        if draw.task in unchanged and draw.number in old.calls.by_number:
            assert new.calls.by_number[draw.number] == old.calls.by_number[draw.number]
    waiting = [(one["handler"], one["waits_for"].split(" (")[0]) for one in unanswered(definition_of(Orders), new.blob)]
    words = {"effect": "effect outside", "itself": "call self.itself"}
    assert sorted(waiting) == sorted(("place", words.get(what, f"call peer.{what}")) for what, _ in waits.values())
