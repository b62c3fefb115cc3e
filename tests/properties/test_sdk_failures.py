"""A service under random calls, most of them wrong in some way, and crashes at any point: it always goes on, its state
is that of a plain model in which failed calls never happened, and each call leaves once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

import immortal
from immortal import CalleeFailed, Immortal, peer, rpc
from immortal.appsdk.calls.codec import encoder
from immortal.protocol.messages import RpcKind, RpcType, encode_incoming_rpc
from immortal.protocol.verdicts import VerdictKind
from tests.helpers.sdk import TAKE, Life, first_start_with_verdicts, recover
from tests.helpers.wire import call, initial_record, logged

ADD, BAD, PUSH, TALK, MANY, STEPS = 1, 2, 3, 4, 5, 6


class Book(Immortal):
    entries: list[int]

    def __init__(self) -> None:
        self.entries = []

    @rpc(id=ADD)
    def add(self, number: int) -> int:
        self.entries.append(number)
        self.reader.add.fork(number)
        return len(self.entries)

    @rpc(id=BAD)
    def bad(self, number: int) -> None:
        self.entries.append(-number)
        self.reader.add.fork(-number)
        raise ValueError(number)

    @rpc(id=PUSH, on_error="keep")
    def push(self, number: int) -> None:
        self.entries.append(number)
        raise ValueError(number)

    @rpc(id=TALK)
    def wrong(self, number: int) -> int:
        self.entries.append(-number)
        return "text"  # type: ignore[return-value]

    @rpc(id=MANY)
    def many(self, number: int) -> None:
        """Enough for batches to close while it runs."""
        for _ in range(30):
            self.wide.store.fork(bytes(4096))
        self.entries.append(number)
        if number % 2:
            raise ValueError(number)

    @rpc(id=STEPS)
    async def steps(self, numbers: list[int]) -> int:
        caught = 0
        for number in numbers:
            try:
                await (immortal.step(self.bad, number) if number % 3 == 0 else immortal.step(self.add, number))
            except CalleeFailed:
                caught += 1
        return caught

    reader = peer(lambda: Book, "reader")
    wide = peer(lambda: Wide, "wide")


class Wide(Immortal):
    @rpc(id=9)
    def store(self, data: bytes) -> None: ...


@dataclass
class Model:
    """What should have happened."""

    entries: list[int] = field(default_factory=list)
    forked: list[int] = field(default_factory=list)
    stored: int = 0
    letters: int = 0
    answers: list[tuple[int, str]] = field(default_factory=list)  # number of the call, how it ended

    def _end(self, caller: int | None, outcome: str) -> None:
        if caller is not None:
            self.answers.append((caller, outcome))
        elif outcome not in ("value", "nothing"):
            self.letters += 1

    def handle(self, kind: str, number: int, caller: int | None) -> None:
        outcome = "~failed"
        if kind == "add":
            self.entries.append(number)
            self.forked.append(number)
            outcome = "value"
        elif kind == "push":
            self.entries.append(number)
        elif kind == "wrong" and caller is None:
            self.entries.append(-number)  # nobody looks at what it returns
            outcome = "nothing"
        elif kind == "many" and number % 2 == 0:
            self.entries.append(number)
            self.stored += 30
            outcome = "nothing"
        elif kind == "steps":
            for one in range(number % 7):
                if one % 3:
                    self.entries.append(one)
                    self.forked.append(one)
            outcome = "value"
        elif kind in ("unknown", "argument"):
            outcome = "~refused"
        self._end(caller, outcome)


METHODS = {"add": ADD, "bad": BAD, "push": PUSH, "wrong": TALK, "many": MANY, "steps": STEPS, "unknown": 77}
KINDS = [*METHODS, "argument", "garbage", "kind"]


@st.composite
def a_message(draw: st.DrawFn) -> tuple[str, int, bool]:
    return draw(st.sampled_from(KINDS)), draw(st.integers(0, 50)), draw(st.booleans())


class World:
    """The app, and as much of a coordinator as keeps its log, its verdicts and what its receivers have."""

    def __init__(self) -> None:
        self.model = Model()
        self.records: list[bytes] = []
        self.checkpoint_at = 0  # records before it are in the checkpoint
        self.number = 0
        self.verdicts: list[Any] = []
        self.received: dict[str, list[Any]] = {}
        self.checkpointed: dict[str, int] = {}
        self._take(first_start_with_verdicts(Book, "book"), {})
        self.blob = self.life.output.blobs[0]
        self.records.append(initial_record(self.life.output.initial_message, "book"))

    def _take(self, life: Life, begin: dict[str, int]) -> None:
        self.life, self._begin = life, begin
        self._seen: dict[str, int] = {}

    def look(self) -> None:
        """What has left the app, each message at its position: those that come again are compared."""
        by_destination: dict[str, list[Any]] = {}
        for to, method_id, arguments in self.life.output.calls:
            by_destination.setdefault(to, []).append((method_id, arguments))
        for to, made in by_destination.items():
            begin, known = self._begin.get(to, 0), self.received.setdefault(to, [])
            for index, one in enumerate(made[self._seen.get(to, 0) :], begin + self._seen.get(to, 0)):
                if index < len(known):
                    assert known[index] == one
                else:
                    known.append(one)
            self._seen[to] = len(made)
        self.verdicts += [one for one in self.life.verdicts if one.key not in {each.key for each in self.verdicts}]

    def record(self, messages: list[tuple[str, int, bool]]) -> None:
        parts = []
        for kind, number, waits in messages:
            caller = None
            if waits or kind == "steps":
                self.number += 1
                caller = self.number
            front = () if caller is None else ("peer", caller)
            rpc_type = RpcType.FORK if caller is None else RpcType.ASYNC
            if kind == "garbage":
                parts.append(encode_incoming_rpc(ADD, RpcType.FORK, b"\xc1" * (number % 3)))
                self.model.letters += 1
                continue
            if kind == "kind":
                parts.append(encode_incoming_rpc(ADD, RpcType.ASYNC, b"\x90", RpcKind.RETURNED_VALUE))
                self.model.letters += 1
                continue
            argument: Any = list(range(number % 7)) if kind == "steps" else "x" if kind == "argument" else number
            parts.append(call(METHODS.get(kind, ADD), *front, argument, rpc_type=rpc_type))
            self.model.handle(kind, number, caller)
        self.records.append(logged(len(self.records), parts))
        self.life.give(self.records[-1])
        self.look()

    def checkpoint(self) -> None:
        self.life.give(TAKE)
        self.look()
        self.blob, self.checkpoint_at = self.life.output.blobs[-1], len(self.records)
        self.checkpointed = {to: len(made) for to, made in self.received.items()}

    def crash(self) -> None:
        records = self.records[self.checkpoint_at :]
        told = [one for one in self.verdicts if one.sequence_id >= self.checkpoint_at]
        life = recover(Book, self.blob, *records, verdicts=told)
        self._take(life, dict(self.checkpointed))
        assert life.verdicts == []
        self.look()
        self.blob, self.checkpoint_at = life.output.blobs[-1], len(self.records)
        self.checkpointed = {to: len(made) for to, made in self.received.items()}

    def check(self) -> None:
        model = self.model
        assert self.life.dispatcher.instance.entries == model.entries
        assert [arguments[0] for _, arguments in self.received.get("reader", [])] == model.forked
        assert len(self.received.get("wide", [])) == model.stored
        assert sum(one.is_dead_letter for one in self.verdicts) == model.letters
        answers = []
        for _, (number, *rest) in self.received.get("peer", []):
            answers.append((number, "nothing" if not rest else rest[0] if len(rest) == 3 else "value"))
        assert sorted(answers) == sorted(model.answers)
        assert len({one.key for one in self.verdicts}) == len(self.verdicts)
        assert all(one.kind in (VerdictKind.REFUSED, VerdictKind.UNDONE, VerdictKind.KEPT) for one in self.verdicts)


steps = st.lists(
    st.one_of(st.lists(a_message(), min_size=1, max_size=12), st.sampled_from(["checkpoint", "crash"])), max_size=12
)


@settings(deadline=None)
@given(steps=steps)
def test_failed_calls_never_happened(steps: list[Any]) -> None:
    world = World()
    for step in steps:
        if step == "checkpoint":
            world.checkpoint()
        elif step == "crash":
            world.crash()
        else:
            world.record(step)
    event(f"{len(world.verdicts) // 10}x10 verdicts")
    world.check()
    assert encoder.encode(world.life.dispatcher.instance.entries) == encoder.encode(world.model.entries)
