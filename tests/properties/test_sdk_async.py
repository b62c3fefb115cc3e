"""Random programs of awaits on two instances: with crashes and checkpoints at any point they end as without."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import immortal
from immortal import EffectFailed, Immortal, impulse, peer, rpc
from immortal.appsdk.effects.effect import EffectRequest
from tests.helpers.effort import effort
from tests.helpers.memory import in_memory
from tests.helpers.waiting import EffectsByHand, WaitingInstances

Program = list[Any]  # of [operation, ...]
MS_MAX = 50


class TooMuch(Exception):  # noqa: N818
    pass


_outcomes = itertools.count()


def work_outside(number: int) -> int:
    """Returns something else each time that it is run."""
    if number > 17:
        raise ValueError(number)
    if number > 15:
        raise TooMuch(number)
    return next(_outcomes)


class Outside(EffectsByHand):
    """No effect is run again once its result is in the log."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: set[str] = set()

    def start(self, request: EffectRequest) -> None:
        assert request.key not in self.logged
        super().start(request)


class Worker(Immortal):
    """Runs programs. What it notes depends on the program alone, not on who is faster."""

    other = peer(lambda: Worker, "two")
    notes: dict[str, list[Any]]
    drawn: dict[str, float]
    calls_count: int

    def __init__(self) -> None:
        self.notes = {}
        self.drawn = {}
        self.calls_count = 0

    @rpc
    def note(self, key: str, value: Any) -> int:
        self.notes.setdefault(key, []).append(value)
        return len(self.notes[key])

    @rpc
    def keep(self, key: str, number: float) -> bool:
        return self.drawn.setdefault(key, number) == number

    @rpc(raises=[TooMuch])
    def double(self, number: int) -> int:
        self.calls_count += 1
        if number > 15:
            raise TooMuch(number)
        return number * 2

    @rpc
    def send_signal(self, name: str, value: int) -> None:
        immortal.signal(name, value)

    @rpc
    async def nested(self, key: str, program: Program) -> int:
        await self.play(key, program)
        return len(program)

    @impulse
    async def run(self, key: str, program: Program) -> None:
        await self.play(key, program)
        await immortal.step(self.note, key, "end")  # type: ignore[misc]

    async def play(self, key: str, program: Program) -> str:
        number = immortal.random.random()
        for index, (operation, *arguments) in enumerate(program):
            here = f"{key}.{index}"
            value: Any = None
            if operation == "call":
                try:
                    value = await self.other.double(arguments[0])
                except TooMuch as error:
                    value = f"TooMuch {error.args}"
            elif operation == "sleep":
                await immortal.sleep(timedelta(milliseconds=arguments[0]))
            elif operation == "gather":
                parts = [self.play(f"{here}.{part}", sub) for part, sub in enumerate(arguments[0])]
                value = list(await asyncio.gather(*parts))
            elif operation == "race":
                lost = self.lose(here)
                value = (await immortal.race(self.play(f"{here}.won", arguments[0]), lost)).index
            elif operation == "fork":
                self.other.double.fork(arguments[0] % 10)
            elif operation == "signal":
                self.send_signal.fork(here, arguments[0])
                value = await immortal.event(here, int)
            elif operation == "kept":
                immortal.signal(here, arguments[0])
                await immortal.sleep(timedelta(milliseconds=1))
                value = await immortal.event(here, int)
            elif operation == "effect":
                try:
                    outcome = await immortal.effect.options(raises=[TooMuch])(work_outside, arguments[0])
                    assert await immortal.step(self.keep, f"{here} outcome", outcome), (
                        "another result when it was run again"
                    )  # type: ignore[misc]
                except TooMuch as error:
                    value = f"TooMuch {error.args}"
                except EffectFailed as error:
                    value = f"{error}"
            elif operation == "nested":
                value = await self.nested(here, arguments[0])
            elif operation == "far":
                value = await self.other.nested(f"{here}.far", [["sleep", arguments[0]]])
            await immortal.step(self.note, key, [operation, value])  # type: ignore[misc]
            assert await immortal.step(self.keep, key, number), "another number when it was run again"  # type: ignore[misc]
        return key

    async def lose(self, here: str) -> None:
        await immortal.effect(work_outside, 1)
        await immortal.event(here)


numbers = st.integers(0, 20)
leaves = st.one_of(
    st.tuples(st.sampled_from(["call", "fork", "signal", "kept", "effect", "effect"]), numbers),
    st.tuples(st.sampled_from(["sleep", "far"]), st.integers(0, MS_MAX)),
)
programs = st.recursive(
    st.lists(leaves.map(list), min_size=1, max_size=3),
    lambda inner: st.lists(
        st.one_of(
            leaves.map(list),
            st.tuples(st.just("gather"), st.lists(inner, max_size=3)).map(list),
            st.tuples(st.sampled_from(["race", "nested"]), inner).map(list),
        ),
        min_size=2,
        max_size=4,
    ),
    max_leaves=12,
)
names = st.sampled_from(["one", "two"])
moves = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["crash", "checkpoint", "kill", "step", "crash"]), names),
        st.tuples(st.just("time"), st.integers(1, MS_MAX // 3)),
        st.tuples(st.just("settle"), st.none()),
        st.tuples(st.sampled_from(["work", "work and crash"]), st.integers(0, 5)),
    ),
    min_size=8,
    max_size=25,
)


def play(folder: Path, work: list[Program], moves: list[tuple[str, Any]]) -> Any:
    classes: dict[str, type] = {"one": Worker, "two": Worker}
    outside = Outside()
    both = WaitingInstances(folder, classes, outside)
    down: set[str] = set()
    if moves and moves[0][0] == "kill":  # so that the first calls wait
        both.kill("two")
        down.add("two")
    both["one"].impulses([("run", (str(index), program)) for index, program in enumerate(work)])
    for move, argument in moves:
        if move == "settle":
            both.settle()
        elif move == "time":
            both.pass_time(argument / 1000)
        elif move in ("work", "work and crash"):
            work_on(both, outside, down, argument, crash=move == "work and crash")
        elif argument in down:
            both.start(argument, Worker)
            down.discard(argument)
        elif move == "kill":
            both.kill(argument)
            down.add(argument)
        elif move == "crash":
            both.crash(argument)
        elif move == "checkpoint":
            both[argument].checkpoint()
        elif move == "step":
            both.step(argument)
    for name in sorted(down):
        both.start(name, Worker)
    both.pass_all_time()
    while work_on(both, outside, set(), 0):
        both.pass_all_time()
    found = []
    for name in classes:
        app, tasks = both.app(name), both[name].dispatcher.tasks
        assert tasks.count == 0
        assert (tasks.calls, tasks.events.kept, tasks.clock.next_due_ns()) == ({}, {}, None)
        assert tasks.effects.waiting == {}
        found.append((app.notes, app.calls_count, sorted(app.drawn)))
    both.close()
    return found


def work_on(both: WaitingInstances, outside: Outside, down: set[str], index: int, *, crash: bool = False) -> bool:
    """Run one of the effects that are asked for; False if there is none. ``crash``: before its result is in the log."""
    asked = [(name, r) for name in ("one", "two") if name not in down for r in both.effect_requests(name)]
    if not asked:
        return False
    name, request = asked[index % len(asked)]
    try:
        request.returned(request.call())
    except (TooMuch, ValueError) as error:
        request.raised(error)
    if crash:
        both.crash(name)
    else:
        both.settle()
        outside.logged.add(request.key)
    return True


@settings(max_examples=effort(15), deadline=None)
@given(work=st.lists(programs, min_size=1, max_size=3), moves=moves)
def test_programs_end_the_same_with_and_without_crashes(work: list[Program], moves: list[tuple[str, Any]]) -> None:
    with tempfile.TemporaryDirectory(dir=in_memory()) as folder:
        undisturbed = play(Path(folder) / "a", work, [])
        disturbed = play(Path(folder) / "b", work, moves)
    assert disturbed == undisturbed
    assert all(notes[-1] == "end" for notes in [undisturbed[0][0][str(index)] for index in range(len(work))])
