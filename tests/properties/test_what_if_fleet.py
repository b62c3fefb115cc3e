"""What-if for a fleet against the truth: recorded fleets run for real under the new code, with the same inputs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar
from unittest import mock

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import immortal
from immortal import Immortal, peer, rpc
from immortal.errors import CalleeFailed
from immortal.replay.fleet.outcome import FleetOutcome
from immortal.replay.fleet.report import outcome_lines
from immortal.replay.plan import ReplayError
from immortal.testing import Environment, Instance

NAMES = ("a", "b", "c", "d")

Op = tuple[str, int, int]
"""What is done, with which service, with which number."""


def measure(number: int) -> int:
    return number * 3


class Node(Immortal):
    """What it ends with does not depend on the order in which it is called: sums, and counts by value."""

    total: int
    counts: dict[int, int]
    program: ClassVar[Sequence[Op]] = ()
    a = peer(lambda: Node, "a")
    b = peer(lambda: Node, "b")
    c = peer(lambda: Node, "c")
    d = peer(lambda: Node, "d")

    def __init__(self) -> None:
        self.total = 0
        self.counts = {}

    @rpc
    def add(self, number: int) -> int:
        for what, _, value in self.program:
            if what == "refuse" and number % 5 == value % 5:
                raise ValueError(f"not {number}")
        self.total += number
        self.counts[number] = self.counts.get(number, 0) + 1
        for what, index, value in self.program:
            if what == "pass on" and number % 3 == value % 3 and abs(number) < 40:
                getattr(self, NAMES[index]).note.fork(number + value)
        return number * 2

    @rpc
    def note(self, number: int) -> None:
        self.total += number

    @rpc
    async def work(self, number: int, depth: int) -> int:
        found = number
        for what, index, value in self.program:
            other = getattr(self, NAMES[index])
            if what == "call":
                try:
                    found += await other.add(found % 17 + value)
                except CalleeFailed:
                    found += 1
            elif what == "work" and depth:
                found += await other.work(found % 7 + value, depth - 1)
            elif what == "sleep":
                await immortal.sleep(timedelta(milliseconds=50 * value + 10))
            elif what == "effect":
                found += await immortal.effect(measure, value + number % 3)
            elif what == "both":
                one, two = await asyncio.gather(other.add(value * 5 + 1), self.a.add(number * 5 + 2))
                found += one - two
            elif what == "fork":
                other.add.fork(value * 5 + 3)
        await immortal.step(self.note, found % 11)
        return found


def variant(program: Sequence[Op]) -> type[Node]:
    return type("Node", (Node,), {"program": tuple(program), "__module__": __name__, "__annotations__": {}})


def programs(count: int) -> st.SearchStrategy[list[Op]]:
    kinds = ["call", "call", "work", "sleep", "effect", "both", "fork", "pass on", "refuse"]
    return st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, count - 1), st.integers(0, 4)), max_size=4)


Call = tuple[int, int, int]
"""After how many 100 ms, to which service, with which number."""

Fleet = tuple[list[list[Op]], dict[int, list[Op]], list[Call], dict[int, int]]
"""Programs, those that are changed, calls, and which service is killed behind which call."""


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    count = draw(st.integers(2, 4))
    made = [draw(programs(count)) for _ in range(count)]
    changed = draw(st.dictionaries(st.integers(0, count - 1), programs(count), min_size=1, max_size=2))
    call = st.tuples(st.integers(0, 30) | st.just(0), st.integers(0, count - 1), st.integers(0, 30))
    kills = draw(st.dictionaries(st.integers(0, 5), st.integers(0, count - 1), max_size=1))
    return made, changed, draw(st.lists(call, min_size=1, max_size=6)), kills


class Run:
    """A fleet of such classes, at the end of these calls."""

    def __init__(self, classes: Sequence[type[Node]], calls: Sequence[Call], kills: Mapping[int, int]) -> None:
        self.env = Environment(fail_alone=True)
        self.services: list[Instance[Node]] = [
            self.env.start(cls, name, effects={measure: lambda number: number * 3})
            for name, cls in zip(NAMES, classes, strict=False)
        ]
        pending = []
        for at, (after, index, number) in enumerate(calls):
            self.env.advance(milliseconds=100 * after)
            pending.append(self.services[index].begin(Node.work, number, 2))
            if calls[at + 1 : at + 2] and not calls[at + 1][0]:
                continue  # it comes together with the next one
            self.env.run()
            if at in kills:
                self.services[kills[at]].crash()
                self.services[kills[at]].recover()
        self.env.advance(hours=1)
        for service in self.services:
            service.send(Node.note, 0)  # so that all logs end late
        self.env.run()
        self.answers = [self._answer(one) for one in pending]
        self.states = {one.name: {"total": one.state.total, "counts": one.state.counts} for one in self.services}

    @staticmethod
    def _answer(pending: Any) -> Any:
        try:
            return pending.result()
        except Exception as error:
            return type(error).__name__


def flat(state: dict[str, Any]) -> dict[str, Any]:
    return {"total": state["total"], **{f"counts[{key!r}]": value for key, value in state["counts"].items()}}


def differences(then: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    old, new = flat(then), flat(now)
    return {path: (old.get(path), new.get(path)) for path in old | new if old.get(path) != new.get(path)}


def said(outcome: FleetOutcome) -> dict[str, dict[str, tuple[Any, Any]]]:
    return {
        one.name: {each["path"]: (each.get("old"), each.get("new")) for each in one.state} for one in outcome.services
    }


def compare(made: list[list[Op]], changed: dict[int, list[Op]], calls: list[Call], kills: dict[int, int]) -> None:
    old = [variant(program) for program in made]
    new = [variant(changed.get(index, program)) for index, program in enumerate(made)]
    then = Run(old, calls, kills)
    same = then.env.what_if(everything := {NAMES[index]: old[index] for index in range(len(old))})
    assert not same.is_different, "\n".join(outcome_lines(same))
    changes = {NAMES[index]: new[index] for index in changed}
    outcome = then.env.what_if(changes, effects=lambda call: call.arguments[0] * 3)
    with mock.patch("immortal.replay.fleet.outcome.screen", side_effect=ReplayError("not screened")):
        assert then.env.what_if(everything) == same
        assert then.env.what_if(changes, effects=lambda call: call.arguments[0] * 3) == outcome
    now = Run(new, calls, {})
    shown = "\n".join(outcome_lines(outcome))
    found = said(outcome)
    for name, state in then.states.items():
        assert found.get(name, {}) == differences(state, now.states[name]), f"{name}\n{shown}"
    others = sum(was != is_now for was, is_now in zip(then.answers, now.answers, strict=True))
    clients = outcome.client_answers
    assert (clients.added, clients.missing) == (0, 0), shown
    assert clients.changed >= others, shown  # the texts of failures name the record
    assert others or not clients.changed or "CalleeFailed" in now.answers, shown


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(fleets())
def test_it_says_what_the_fleet_does_under_the_new_code(fleet: Fleet) -> None:
    compare(*fleet)
