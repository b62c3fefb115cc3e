"""A handler that ends the app's process as a message lets it go on is found by itself: others that go on with it do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import immortal
from immortal import CalleeFailed, Cancelled, Immortal, impulse, peer, rpc
from immortal.testing import Environment, ProcessDies


def tick(seconds: int) -> str:
    raise AssertionError("the outside world")


class Book(Immortal):
    notes: list[str]

    def __init__(self) -> None:
        self.notes = []

    @rpc
    def note(self, text: str) -> None:
        self.notes.append(text)

    @rpc
    async def later(self, text: str) -> str:
        await immortal.sleep(timedelta(seconds=5))
        return text


class Desk(Immortal):
    book = peer(Book, "book")
    notes: list[str]

    def __init__(self) -> None:
        self.notes = []

    @rpc
    def note(self, name: str) -> None:
        if name == "poison":
            raise ProcessDies
        self.notes.append(name)

    @rpc
    def tell_all(self, name: str, times: int) -> None:
        for _ in range(times):
            immortal.signal("go", name)

    async def _end(self, name: str) -> str:
        self.book.note.fork(f"{name} goes on")
        await immortal.step(self.note, name)  # type: ignore[misc] # a step: mypy needs the plugin
        return name

    @rpc
    async def remind(self, name: str, seconds: int) -> str:
        await immortal.sleep(timedelta(seconds=seconds))
        return await self._end(name)

    @impulse
    async def remind_unasked(self, name: str, seconds: int) -> None:
        await immortal.sleep(timedelta(seconds=seconds))
        await self._end(name)

    @rpc
    async def dies_again(self, seconds: int) -> None:
        try:
            await immortal.sleep(timedelta(seconds=seconds))
            raise ProcessDies
        except Exception:
            raise ProcessDies from None
        finally:
            raise ProcessDies

    @rpc
    async def dies_at_the_second(self, seconds: int) -> None:
        await asyncio.gather(self._tells(seconds), self.remind_beside("poison", seconds))

    async def _tells(self, seconds: int) -> None:
        await immortal.sleep(timedelta(seconds=seconds))
        self.book.note.fork("first")
        await immortal.step(self.note, "first")  # type: ignore[misc] # a step

    async def remind_beside(self, name: str, seconds: int) -> str:
        await immortal.sleep(timedelta(seconds=seconds))
        return await self._end(name)

    @rpc
    async def hear(self, name: str) -> str:
        await immortal.event("go", str)
        return await self._end(name)

    @rpc(limit=1)
    async def one_at_a_time(self, name: str, seconds: int) -> str:
        if name == "poison":
            raise ProcessDies
        await immortal.sleep(timedelta(seconds=seconds))
        return await self._end(name)

    @rpc(timeout=timedelta(seconds=10))
    async def expires(self, name: str) -> str:
        try:
            await immortal.sleep(timedelta(days=1))
        except Cancelled:
            await self._end(name)
        return name

    @rpc
    async def ask(self, name: str) -> str:
        await self.book.later(name)
        await immortal.step(self.tell_all, "go", 1)  # type: ignore[misc] # a step
        return await self._end(name)

    @rpc
    async def effect_of(self, name: str, seconds: int) -> str:
        await immortal.effect(tick, seconds)
        return await self._end(name)


Begun = dict[str, Any]


class Run:
    """What began, and what became of it."""

    def __init__(self, env: Environment) -> None:
        self.env = env
        self.book = env.start(Book, "book")
        self.desk = env.start(Desk, "desk", effects={tick: lambda seconds: "tick"})
        self.begun: Begun = {}

    def begin(self, name: str, handler: Any, *arguments: Any) -> None:
        self.begun[name] = self.desk.begin(handler, *arguments)

    def failed(self) -> set[str]:
        """Who failed, with what ended the process; all others returned."""
        self.env.run()
        found = set()
        for name, waiting in self.begun.items():
            try:
                waiting.result()
            except CalleeFailed as error:
                found.add(name if error.type_name == "ProcessEnded" else f"{name}: {error}")
        return found


@pytest.fixture
def run() -> Any:
    with Environment(fail_alone=True) as env:  # at its end all is replayed, and compared
        yield Run(env)


@pytest.mark.parametrize("poisons", [1, 2])
@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("pause", [False, True])
def test_timers_of_one_moment(run: Run, place: int, pause: bool, poisons: int) -> None:
    names = [f"guest {number}" for number in range(3)]
    for number in range(poisons):
        names.insert(place, f"poison {number}")
    for number, name in enumerate(names):
        run.begin(name, Desk.remind, name.split(" ")[0] if "poison" in name else name, 10 + pause * number)
    (run.env.skip if pause else run.env.advance)(seconds=600)
    assert run.failed() == {f"poison {number}" for number in range(poisons)}
    assert run.desk.state.notes == ["guest 0", "guest 1", "guest 2"]
    assert run.book.state.notes == [f"guest {number} goes on" for number in range(3)]
    run.desk.crash()
    run.desk.recover()
    assert run.desk.state.notes == ["guest 0", "guest 1", "guest 2"]


def test_one_that_nobody_waits_for_is_a_dead_letter_by_itself(run: Run) -> None:
    run.desk.send(Desk.remind_unasked, "poison", 10)
    run.begin("guest", Desk.remind, "guest", 10)
    run.env.advance(seconds=600)
    assert run.failed() == set()
    (letter,) = run.desk.dead_letters
    assert (letter.type_name, letter.method, letter.task) == ("ProcessEnded", "Desk.remind_unasked", 1)
    assert letter.message


def test_none_of_its_code_runs_any_more(run: Run) -> None:
    run.begin("poison", Desk.dies_again, 10)
    run.begin("guest", Desk.remind, "guest", 10)
    run.env.advance(seconds=600)
    assert run.failed() == {"poison"}


def test_what_it_had_called_in_that_message_is_taken_back(run: Run) -> None:
    run.begin("guest 0", Desk.remind, "guest 0", 10)
    run.begin("poison", Desk.dies_at_the_second, 10)
    run.begin("guest 1", Desk.remind, "guest 1", 10)
    run.env.advance(seconds=600)
    assert run.failed() == {"poison"}
    assert run.desk.state.notes == ["guest 0", "guest 1"]
    assert run.book.state.notes == ["guest 0 goes on", "guest 1 goes on"]


def test_those_who_wait_for_one_event(run: Run) -> None:
    for name in ("guest 0", "poison", "guest 1"):
        run.begin(name, Desk.hear, name)
    run.env.run()
    run.desk.call(Desk.tell_all, "all", 3)
    assert run.failed() == {"poison"}
    assert run.desk.state.notes == ["guest 0", "guest 1"]


def test_one_whose_turn_it_is(run: Run) -> None:
    for name in ("guest 0", "poison", "guest 1"):
        run.begin(name, Desk.one_at_a_time, name, 10)
    run.env.advance(seconds=600)
    assert run.failed() == {"poison"}
    assert run.desk.state.notes == ["guest 0", "guest 1"]


def test_deadlines_of_one_moment(run: Run) -> None:
    for name in ("guest 0", "poison", "guest 1"):
        run.begin(name, Desk.expires, name)
    run.begin("sleeper", Desk.remind, "sleeper", 10)
    run.env.advance(seconds=600)
    assert run.failed() == {"poison"}
    assert run.desk.state.notes == ["guest 0", "guest 1", "sleeper"]


def test_one_that_another_ones_answer_has_woken(run: Run) -> None:
    run.begin("poison", Desk.hear, "poison")
    run.begin("guest", Desk.ask, "guest")
    run.env.advance(seconds=600)
    assert run.failed() == {"poison"}
    assert run.desk.state.notes == ["guest"]


@pytest.mark.parametrize(("handler", "arguments"), [(Desk.ask, ()), (Desk.effect_of, (1,))])
def test_one_that_its_own_answer_has_woken(run: Run, handler: Any, arguments: tuple[Any, ...]) -> None:
    run.begin("poison", handler, "poison", *arguments)
    run.env.advance(seconds=600)
    assert run.failed() == {"poison"}


@pytest.mark.parametrize("begin", [lambda run: run.desk.checkpoint(), lambda run: run.desk.crash_app()])
def test_over_checkpoints_and_deaths_of_other_causes(run: Run, begin: Callable[[Run], None]) -> None:
    for name in ("guest 0", "poison", "guest 1"):
        run.begin(name, Desk.remind, name, 10)
    run.env.run()
    begin(run)
    if not run.desk.is_up:
        run.desk.recover()
    run.env.advance(seconds=600)
    assert run.failed() == {"poison"}
    assert run.desk.state.notes == ["guest 0", "guest 1"]


def test_what_takes_long_is_said_of_the_handler_itself() -> None:
    said: list[Any] = []

    class Slow(Immortal):
        @rpc
        async def work(self, seconds: int) -> None:
            await immortal.sleep(timedelta(seconds=seconds))
            said.append(slow._app().dispatcher.records.current_handling)

    with Environment(fail_alone=True) as env:
        slow = env.start(Slow, "slow")
        one, two = slow.begin(Slow.work, 5), slow.begin(Slow.work, 5)
        one.result()
        two.result()
        assert [(one.method[-9:], one.caller, one.task) for one in said] == [
            ("Slow.work", "test", 1),
            ("Slow.work", "test", 3),
        ]


class Defaults(Immortal):
    log: list[list[int]]

    def __init__(self) -> None:
        self.log = []

    @rpc
    def take(self, number: int, numbers: list[int] = [], *, more: set[int] = set()) -> list[int]:  # noqa: B006
        numbers.append(number)
        more.add(number)
        self.log.append([*numbers, *more])
        return numbers

    @rpc
    async def wait(self, number: int, numbers: list[int] = []) -> list[int]:  # noqa: B006
        numbers.append(number)
        return await immortal.step(self.take, number) + numbers

    @rpc
    def twice(self) -> list[list[int]]:
        return [self.take(1), self.take(2)]


def test_defaults_that_can_change_belong_to_one_call() -> None:
    """Each log is replayed at the end: with one list for all calls the replay would send and keep others."""
    with Environment() as env:
        one = env.start(Defaults, "one")
        assert one.call(Defaults.twice) == [[1], [2]]
        assert [one.call(Defaults.wait, number) for number in (3, 4)] == [[3, 3], [4, 4]]
        assert one.state.log == [[1, 1], [2, 2], [3, 3], [4, 4]]
