"""Services under random calls, most of them wrong in some way, processes that their handlers kill, upgrades, and
crashes: all goes on, and the state is that of a plain model in which failed calls never happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

import immortal
from immortal import CalleeFailed, CallRefused, Immortal, peer, rpc, upgrades
from immortal.appsdk.testing.world import CrashPlan, Victim
from immortal.protocol.verdicts import VerdictKind
from immortal.testing import Environment, Instance, ProcessDies
from tests.helpers.effort import effort


class Book(Immortal):
    entries: list[int]

    def __init__(self) -> None:
        self.entries = []

    @rpc(id=1)
    def add(self, number: int) -> int:
        self.entries.append(number)
        self.reader.read.fork(number)
        return number

    @rpc(id=2)
    def bad(self, number: int) -> int:
        self.entries.append(-number)
        self.reader.read.fork(-number)
        raise ValueError(number)

    @rpc(id=3, on_error="keep")
    def push(self, number: int) -> int:
        self.entries.append(number)
        raise ValueError(number)

    @rpc(id=4)
    def kill(self, number: int) -> int:
        self.entries.append(-number)
        raise ProcessDies

    @rpc(id=5)
    async def steps(self, number: int) -> int:
        caught = 0
        for one in range(number % 4):
            try:
                await (immortal.step(self.bad, one) if one % 2 else immortal.step(self.add, one))
            except CalleeFailed:
                caught += 1
        return caught

    reader = peer(lambda: Reader, "reader")


@upgrades(Book, retry_refused=True)
class Book2(Immortal):
    """Knows one method more, which is what a caller of another age calls."""

    entries: list[int]

    @classmethod
    def upgrade(cls, old: Book) -> Book2:
        new = cls()
        new.entries = list(old.entries)
        return new

    add = Book.add
    bad = Book.bad
    push = Book.push
    kill = Book.kill
    steps = Book.steps
    reader = peer(lambda: Reader, "reader")


class Reader(Immortal):
    numbers: list[int]

    def __init__(self) -> None:
        self.numbers = []

    @rpc(id=1)
    def read(self, number: int) -> None:
        self.numbers.append(number)


class Strange(Immortal):
    """What the book looks like to a caller of another age."""

    @rpc(id=1)
    def add(self, number: str) -> int: ...  # type: ignore[empty-body]

    @rpc(id=77)
    def unknown(self, number: int) -> int: ...  # type: ignore[empty-body]


class Caller(Immortal):
    """Waits for what it calls, or not."""

    outcomes: list[str]

    def __init__(self) -> None:
        self.outcomes = []

    @rpc(id=1)
    async def ask(self, kind: str, number: int) -> None:
        try:
            outcome = str(await self.call(kind, number))
        except (CalleeFailed, CallRefused) as error:
            outcome = type(error).__name__
        await immortal.step(self.note, f"{kind} {number} {outcome}")

    async def call(self, kind: str, number: int) -> int:
        if kind == "argument":
            return await self.strange.add("no number")
        if kind == "unknown":
            return await self.strange.unknown(number)
        calls: dict[str, Any] = {
            "add": self.book.add,
            "bad": self.book.bad,
            "push": self.book.push,
            "kill": self.book.kill,
            "steps": self.book.steps,
        }
        value: int = await calls[kind](number)
        return value

    @rpc(id=2)
    def note(self, text: str) -> None:
        self.outcomes.append(text)

    @rpc(id=3)
    def tell(self, kind: str, number: int) -> None:
        if kind == "argument":
            self.strange.add.fork("no number")
        elif kind == "unknown":
            self.strange.unknown.fork(number)
        else:
            getattr(self.book, kind).fork(number)

    book = peer(Book, "book")
    strange = peer(Strange, "book")


@dataclass
class Model:
    entries: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    letters: int = 0
    outcomes: list[str] = field(default_factory=list)

    def handle(self, kind: str, number: int, *, waits: bool) -> None:
        outcome = "CallRefused" if kind in ("argument", "unknown") else "CalleeFailed"
        if kind in ("add", "push"):
            self.entries.append(number)
        if kind == "add":
            self.read.append(number)
            outcome = str(number)
        if kind == "steps":
            added = [one for one in range(number % 4) if one % 2 == 0]
            self.entries += added
            self.read += added
            outcome = str(number % 4 // 2)
        if waits:
            self.outcomes.append(f"{kind} {number} {outcome}")
        elif kind not in ("add", "steps"):
            self.letters += 1


KINDS = ["add", "add", "bad", "push", "kill", "steps", "argument", "unknown"]
calls = st.tuples(st.sampled_from(KINDS), st.integers(1, 30), st.booleans())
actions = st.one_of(
    st.lists(calls, min_size=1, max_size=6),
    st.sampled_from(["checkpoint", "crash", "crash app", "stop", "upgrade"]),
)


victims: list[Victim] = ["instance", "app"]
crashes = st.one_of(st.builds(CrashPlan), st.builds(CrashPlan, st.integers(1, 600), st.sampled_from(victims)))


def settle(env: Environment, instances: list[Instance[Any]]) -> None:
    env.run()  # who has crashed just now is on the way back by itself
    for one in instances:
        if not one.is_up:
            one.recover()
    env.run()


@settings(deadline=None, max_examples=effort(25))
@given(steps=st.lists(actions, max_size=8), order=st.one_of(st.none(), st.integers(0, 99)), crash=crashes)
def test_whatever_is_called_it_goes_on_and_failed_calls_never_happened(
    steps: list[Any], order: int | None, crash: CrashPlan
) -> None:
    model = Model()
    with Environment(order=order, crashes=crash, fail_alone=True) as env:
        reader, book, caller = env.start(Reader, "reader"), env.start(Book, "book"), env.start(Caller, "caller")
        instances: list[Instance[Any]] = [reader, book, caller]
        for step in steps:
            one = instances[1]
            if step == "checkpoint":
                one.checkpoint()
            elif step == "crash":
                one.crash()
            elif step == "crash app":
                one.crash_app()
            elif step == "stop":
                one.stop()
            elif step == "upgrade" and one.definition.version == 1:
                instances[1] = one.upgrade(Book2)
            elif isinstance(step, list):
                for kind, number, waits in step:
                    caller.send(Caller.ask if waits else Caller.tell, kind, number)
                    model.handle(kind, number, waits=waits)
                    if order is None:  # the order of the calls is that of the model
                        env.run()
            settle(env, instances)
        state = instances[1].state
        assert sorted(state.entries) == sorted(model.entries)
        assert sorted(reader.state.numbers) == sorted(model.read)
        if order is None:
            assert state.entries == model.entries
            assert reader.state.numbers == model.read
        assert sorted(caller.state.outcomes) == sorted(model.outcomes)
        letters = instances[1].dead_letters
        if "upgrade" not in steps:
            assert len(letters) == model.letters
        event("killed" if any(one.kind is VerdictKind.KILLED for one in letters) else "not killed")
        assert caller.dead_letters == reader.dead_letters == []
