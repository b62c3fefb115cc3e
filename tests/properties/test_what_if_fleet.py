"""What-if for a fleet against the truth: recorded fleets run for real under the new code, with the same inputs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar
from unittest import mock

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import immortal
from immortal import Immortal, Retry, peer, rpc, upgrades
from immortal.errors import CalleeFailed, EffectFailed
from immortal.replay.fleet.outcome import FleetOutcome
from immortal.replay.fleet.report import outcome_lines
from immortal.replay.plan import ReplayError
from immortal.testing import Environment, Instance
from tests.helpers.effort import effort

NAMES = ("a", "b", "c", "d")

Op = tuple[str, int, int]
"""What is done, with which service, with which number."""


RAN: list[int] = []
"""Effects that ran outside."""


def measure(number: int) -> int:
    RAN.append(number)
    return 0


def measured(number: int) -> int:
    if number % 4 == 3:
        raise ValueError(f"no {number}")
    return number * 3


ONCE = immortal.effect.options(retry=Retry(attempts=1))


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
                await immortal.sleep(timedelta(seconds=value, milliseconds=10))
            elif what == "effect":
                try:
                    found += await ONCE(measure, value + number % 3)
                except EffectFailed:
                    found += 2
            elif what == "in time" and depth:  # no sleep ends at a moment at which this one does
                try:
                    found += await asyncio.wait_for(other.work(found % 5 + value, depth - 1), value + 0.5)
                except (TimeoutError, CalleeFailed):
                    found += 3
            elif what == "to all":
                try:
                    found += sum(await immortal.multicast([self.a, other][index == 0 :]).add.all(found % 13 + value))
                except CalleeFailed:
                    found += 4
            elif what == "both":
                one, two = await asyncio.gather(other.add(value * 5 + 1), self.a.add(number * 5 + 2))
                found += one - two
            elif what == "fork":
                other.add.fork(value * 5 + 3)
        await immortal.step(self.note, found % 11)
        return found


def variant(program: Sequence[Op], before: type[Node] | None = None) -> type[Node]:
    """Return a class; its version is 2 if it upgrades the state of ``before``."""
    own = {"program": tuple(program), "__module__": __name__, "__annotations__": {}}
    if before is None:
        return type("Node", (Node,), own)

    def upgrade(cls: type[Node], old: Node) -> Node:
        new = cls.__new__(cls)
        new.total, new.counts = old.total, old.counts
        return new

    return upgrades(before)(type("Node", (Node,), own | {"upgrade": classmethod(upgrade)}))


def programs(count: int) -> st.SearchStrategy[list[Op]]:
    kinds = ["call", "call", "work", "sleep", "effect", "in time", "to all", "both", "fork", "pass on", "refuse"]
    return st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, count - 1), st.integers(0, 4)), max_size=4)


Call = tuple[int, int, int]
"""After how many 100 ms, to which service, with which number."""

Events = dict[int, tuple[str, int]]
"""Behind which call a service is killed, or its app alone, or it is upgraded to a class of version 2; and which one."""

Fleet = tuple[list[list[Op]], dict[int, list[Op]], list[Call], Events]
"""Programs, those that are changed, calls, and what happens behind them."""


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    count = draw(st.integers(2, 4))
    made = [draw(programs(count)) for _ in range(count)]
    changed = draw(st.dictionaries(st.integers(0, count - 1), programs(count), min_size=1, max_size=2))
    call = st.tuples(st.integers(0, 30) | st.just(0), st.integers(0, count - 1), st.integers(0, 30))
    event = st.tuples(st.sampled_from(["kill", "kill the app", "upgrade"]), st.integers(0, count - 1))
    events = draw(st.dictionaries(st.integers(0, 5), event, max_size=2))
    return made, changed, draw(st.lists(call, min_size=1, max_size=6)), events


class Run:
    """A fleet of such classes, at the end of these calls. ``later``: those of version 2, for services that get them."""

    def __init__(
        self, classes: Sequence[type[Node]], later: Mapping[int, type[Node]], calls: Sequence[Call], events: Events
    ) -> None:
        self.env = Environment(fail_alone=True)
        self.services: list[Instance[Node]] = [
            self.env.start(cls, name, effects={measure: measured}) for name, cls in zip(NAMES, classes, strict=False)
        ]
        pending = []
        for at, (after, index, number) in enumerate(calls):
            self.env.advance(milliseconds=100 * after)
            pending.append(self.services[index].begin(Node.work, number, 2))
            if calls[at + 1 : at + 2] and not calls[at + 1][0] and at not in events:
                continue  # it comes together with the next one
            self.env.run()
            if at in events:
                self._happens(*events[at], later)
        self.env.advance(hours=1)
        for service in self.services:
            service.send(Node.note, 0)  # so that all logs end late
        self.env.run()
        self.answers = [self._answer(one) for one in pending]
        self.states = {one.name: {"total": one.state.total, "counts": one.state.counts} for one in self.services}

    def _happens(self, what: str, index: int, later: Mapping[int, type[Node]]) -> None:
        service = self.services[index]
        if what == "upgrade":
            self.env.advance(hours=1)  # no handler waits for code that is another one then
            service.send(Node.note, 0)  # an upgrade has no time: a what-if makes it behind the record before
            self.env.run()
            self.services[index] = service.upgrade(later[index])
            return
        if what == "kill":
            service.crash()
        else:
            service.crash_app()
        service.recover()

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


def compare(made: list[list[Op]], changed: dict[int, list[Op]], calls: list[Call], events: Events) -> None:
    old = [variant(program) for program in made]
    # A service is upgraded once, behind a call that is made: what came before has the code of then.
    happens = {index: at for at, (what, index) in sorted(events.items(), reverse=True) if what == "upgrade"}
    happens = {index: at for index, at in happens.items() if at < len(calls)}
    events = {at: one for at, one in events.items() if one[0] != "upgrade" or happens.get(one[1]) == at}
    later = {index: variant(made[index], old[index]) for index in happens}
    programs = [changed.get(index, program) for index, program in enumerate(made)]
    new = [old[index] if index in happens else variant(program) for index, program in enumerate(programs)]
    new_later = {index: variant(programs[index], old[index]) for index in happens}
    then = Run(old, later, calls, events)
    same = then.env.what_if(everything := {one.name: one.definition.cls for one in then.services})
    assert not same.is_different, "\n".join(outcome_lines(same))
    changes = {NAMES[index]: new_later.get(index, new[index]) for index in changed}
    outcome = then.env.what_if(changes, effects=lambda call: measured(*call.arguments))
    with mock.patch("immortal.replay.fleet.outcome.screen", side_effect=ReplayError("not screened")):
        assert then.env.what_if(everything) == same
        assert then.env.what_if(changes, effects=lambda call: measured(*call.arguments)) == outcome
    with mock.patch("immortal.replay.fleet.screening.can_fork", return_value=True):
        assert then.env.what_if(everything) == same
        assert then.env.what_if(changes, effects=lambda call: measured(*call.arguments)) == outcome
    assert not RAN
    now = Run(new, new_later, calls, {at: one for at, one in events.items() if one[0] == "upgrade"})
    shown = "\n".join(outcome_lines(outcome))
    found = said(outcome)
    for name, state in then.states.items():
        assert found.get(name, {}) == differences(state, now.states[name]), f"{name}\n{shown}"
    others = sum(was != is_now for was, is_now in zip(then.answers, now.answers, strict=True))
    clients = outcome.client_answers
    assert (clients.added, clients.missing) == (0, 0), shown
    assert clients.changed >= others, shown  # the texts of failures name the record
    assert others or not clients.changed or "CalleeFailed" in now.answers, shown


CALL = ("call", 0, 0)
CALL_THAT_IS_HELD_BACK: Fleet = (
    [[CALL] * 4, [CALL], [CALL] * 3, [CALL] * 4],
    {1: [("to all", 1, 2)]},
    [(1, 1, 0), (0, 1, 0)],
    {},
)
"""Its caller's number of it was taken for one of the receiver's own calls."""


@settings(max_examples=effort(10), deadline=None, suppress_health_check=list(HealthCheck))
@given(fleets())
@example(CALL_THAT_IS_HELD_BACK)
def test_it_says_what_the_fleet_does_under_the_new_code(fleet: Fleet) -> None:
    compare(*fleet)
