"""The functions of the SDK: they know which handler calls them, and leave a class its names and its keywords."""

from __future__ import annotations

import asyncio
import gc
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import immortal
from immortal import CalleeFailed, Handle, Immortal, Impulses, Node, impulse, on_primary, peer, query, rpc
from immortal.appsdk import functions
from immortal.appsdk.client.methods import typed_method
from immortal.appsdk.handlers.definition import definition_of
from immortal.errors import DefinitionError, UsageError
from immortal.testing import Environment
from tests.helpers.waiting import WaitingInstances


@pytest.fixture
def env() -> Iterator[Environment]:
    with Environment(fail_alone=True) as made:
        yield made


# --- names ------------------------------------------------------------------------------------------------------------


NAMES = [
    *sorted(functions.NAMES),
    "log",
    "immortal",
    "main_loop",
    "query",
    "checkpoint",
    "restore",
    "prepare",
    "on_destroyed",
]


def made_class(name: str, source: str) -> Any:
    """A class of a program with one attribute or method for each name that the SDK once had taken."""
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(f"import immortal\nfrom immortal import Immortal, impulse, query, rpc\n{source}", namespace)
    return namespace[name]


STATES = made_class(
    "States",
    "class States(Immortal):\n"
    + "".join(f"    {name}: int\n" for name in NAMES)
    + "    def __init__(self) -> None:\n"
    + "".join(f"        self.{name} = 0\n" for name in NAMES)
    + "    @rpc\n    def add(self, name: str) -> int:\n"
    + "        setattr(self, name, getattr(self, name) + 1)\n        return getattr(self, name)\n"
    + "    @query\n    def all(self) -> list[int]:\n"
    + f"        return [getattr(self, name) for name in {NAMES!r}]\n"
    + "    @rpc\n    async def look(self, name: str) -> int:\n        return getattr(self, name)\n",
)
METHODS = made_class(
    "Methods",
    "class Methods(Immortal):\n"
    + "".join(f"    @rpc\n    def {name}(self, number: int) -> int:\n        return number\n" for name in NAMES)
    + "    @rpc\n    async def all(self) -> list[int]:\n"
    + f"        return [await immortal.step(getattr(self, name), index) for index, name in enumerate({NAMES!r})]\n",
)


def test_a_state_may_have_any_name(env: Environment) -> None:
    one = env.start(STATES, "one")
    for name in NAMES:
        assert one.call(STATES.add, name) == 1
    one.checkpoint()
    one.crash()
    one.recover()
    assert one.call(STATES.all) == [1] * len(NAMES)
    assert one.call(STATES.look, "event") == 1


def test_a_handler_may_have_any_name(env: Environment) -> None:
    one = env.start(METHODS, "one")
    assert one.call(METHODS.all) == list(range(len(NAMES)))
    assert [one.call(getattr(METHODS, name), 5) for name in NAMES] == [5] * len(NAMES)
    assert METHODS().event(3) == 3


def test_main_and_the_sdks_own_names_are_kept() -> None:
    with pytest.raises(DefinitionError, match=r"App\.main: 'main' is one of Immortal's own names"):

        class App(Immortal):
            main: int  # type: ignore[assignment]


def test_the_functions_are_public_and_share_no_name_with_a_module() -> None:
    modules = {path.stem for path in Path(immortal.__file__).parent.iterdir()}
    assert not modules & set(functions.NAMES)
    assert set(functions.NAMES) < set(immortal.__all__)
    assert all(getattr(immortal, name) is getattr(functions, name) for name in functions.NAMES)


def test_what_was_a_method_says_where_it_is(env: Environment) -> None:
    class Plain(Immortal):
        @rpc
        def ask(self, name: str) -> None:
            getattr(self, name)

        @rpc
        async def wait(self, name: str) -> None:
            getattr(self, name)

    one = env.start(Plain, "one")
    for function in functions.NAMES:
        name = "log" if function == "logger" else function
        for handler in (Plain.ask, Plain.wait):
            with pytest.raises(CalleeFailed, match=rf"no attribute '{name}': handlers use immortal\.{function}$"):
                one.call(handler, name)
        assert not hasattr(Plain(), name)


# --- where they are called --------------------------------------------------------------------------------------------


CALLS: dict[str, Callable[[], object]] = {
    "now()": immortal.now,
    "now_ns()": immortal.now_ns,
    "random": lambda: immortal.random.choice([1]),
    "uuid4()": immortal.uuid4,
    "sleep": lambda: immortal.sleep(timedelta(1)),
    "at": lambda: immortal.at(immortal.now()),
    "event": lambda: immortal.event("x"),
    "race": immortal.race,
    "effect": lambda: immortal.effect(outside),
    "continue_as": immortal.continue_as,
    "signal": lambda: immortal.signal("x"),
    "multicast": lambda: immortal.multicast([Plainest]),
    "create_node": lambda: immortal.create_node(Part),
}


class Plainest(Immortal):
    pass


class Part(Node):
    @rpc
    def when(self, *, after_s: int) -> float:
        return immortal.now().timestamp() + after_s


def outside() -> None:
    pass


def in_a_thread(function: Callable[[], object]) -> list[str]:
    said = []

    def run() -> None:
        try:
            function()
        except UsageError as error:
            said.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return said


@pytest.mark.parametrize("what", CALLS)
def test_outside_of_handlers_it_is_said_what_to_do(what: str) -> None:
    (said,) = in_a_thread(CALLS[what])
    assert said.startswith(f"immortal.{'now()' if what == 'at' else what}: no handler runs here: it is for handlers")


def clock_of_an_effect() -> str:
    try:
        return str(immortal.now())
    except UsageError as error:
        immortal.logger.info("in an effect")
        return str(error)


class Effecting(Immortal):
    @rpc
    async def ask(self) -> str:
        return await immortal.effect(clock_of_an_effect)

    @rpc
    async def draw_in_a_branch(self) -> bool:
        first, _ = await asyncio.gather(self.branch(), self.branch())
        return first == immortal.now_ns()

    async def branch(self) -> int:
        await immortal.sleep(timedelta(seconds=1))
        return immortal.now_ns()

    @rpc
    def say(self) -> None:
        immortal.logger.info("here")

    @query
    def drawn(self) -> float:
        return immortal.random.random()


def test_in_an_effect_and_in_a_query(env: Environment, capsys: pytest.CaptureFixture[str]) -> None:
    one = env.start(Effecting, "one", effects={clock_of_an_effect: clock_of_an_effect})
    assert one.call(Effecting.ask).startswith(
        "immortal.now(): an effect's function is no part of what a replay repeats"
    )
    assert "one> in an effect" in capsys.readouterr().err
    assert one.call(Effecting.draw_in_a_branch)
    with pytest.raises(CalleeFailed, match=r"QueryError: immortal\.random: a query only reads"):
        one.call(Effecting.drawn)


def test_a_hook_is_told_so(tmp_path: Path) -> None:
    one = WaitingInstances(tmp_path, {"one": Effecting})["one"]
    run = one.dispatcher.context.run_contexts.run
    (said,) = in_a_thread(lambda: run(immortal.now))
    assert said.startswith("immortal.now() is for handlers")


# --- several instances ------------------------------------------------------------------------------------------------


class Dice(Immortal):
    other = peer("tests.unit.test_sdk_functions:Dice", "other")
    drawn: list[uuid.UUID]

    def __init__(self) -> None:
        self.drawn = []

    @rpc
    def draw(self) -> uuid.UUID:
        self.drawn.append(immortal.uuid4())
        return self.drawn[-1]

    @rpc
    async def both(self) -> list[uuid.UUID]:
        one, two = await asyncio.gather(self.other.draw(), immortal.step(self.draw))
        await immortal.sleep(timedelta(seconds=1))
        return [one, two, immortal.uuid4()]


def test_two_instances_in_one_process_know_their_own(env: Environment) -> None:
    one, other = env.start(Dice, "one"), env.start(Dice, "other")
    drawn = one.call(Dice.both)
    assert len(set(drawn)) == 3
    assert (other.state.drawn, one.state.drawn) == ([drawn[0]], [drawn[1]])
    one.crash()
    one.recover()
    other.crash()
    other.recover()
    assert (other.state.drawn, one.state.drawn) == ([drawn[0]], [drawn[1]])


def test_plain_objects_know_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    one, _ = Effecting(), Dice()
    one.say()
    assert "Effecting> here" in capsys.readouterr().err


# --- by name ----------------------------------------------------------------------------------------------------------


def add_up(first: int, *, second: int = 2, third: int) -> list[int]:
    return [first, second, third]


class Named(Immortal, nodes=(Part,)):
    other = peer("tests.unit.test_sdk_functions:Named", "other")
    seen: list[list[Any]]

    def __init__(self) -> None:
        self.seen = []

    @rpc
    def take(self, first: int, *, second: int = 2, third: int) -> list[int]:
        self.seen.append([first, second, third])
        return self.seen[-1]

    @rpc
    def take_any(self, first: int, *, second: Any = "b", third: Any) -> None:
        self.seen.append([first, second, third])

    @impulse
    def put(self, *, first: int) -> None:
        self.take(third=3, first=first)
        self.take.fork(4, third=6, second=5)
        self.other.take.fork(third=9, first=7)
        self.other.take_any.fork(third=9, first=7)
        immortal.multicast([self.other, type(self)]).take.fork(0, third=1)

    @rpc
    async def wait(self, *, first: int) -> list[list[int]]:
        self.take_any.fork(1, third=3)
        return [
            await immortal.step(self.take, third=3, first=first),
            await self.other.take(third=6, second=5, first=4),
            await immortal.effect(add_up, 7, third=9),
            await self.again(left=1),
        ]

    @rpc(limit=1, limit_by="left")
    async def again(self, *, left: int) -> list[int]:
        if left:
            immortal.continue_as(left=left - 1)
        return [left]

    @query
    def count(self, *, more: int = 0) -> int:
        return len(self.seen) + more

    @rpc
    def make(self) -> Handle[Part]:
        return immortal.create_node(Part)

    @on_primary
    def feed(self, impulses: Impulses) -> None: ...


def test_arguments_by_name(env: Environment) -> None:
    one, other = env.start(Named, "one", effects={add_up: add_up}), env.start(Named, "other")
    assert one.call(Named.take, 1, third=3) == [1, 2, 3]
    one.send(Named.put, first=0)
    env.run()
    assert one.state.seen == [[1, 2, 3], [0, 2, 3], [4, 5, 6], [0, 2, 1]]
    assert other.state.seen == [[7, 2, 9], [7, "b", 9], [0, 2, 1]]
    assert one.call(Named.wait, first=8) == [[8, 2, 3], [4, 5, 6], [7, 2, 9], [0]]
    assert one.call(Named.count, more=10) == 16
    for call in (lambda: one.call(Named.take, 1, 2, 3), lambda: one.call(Named.take, 1)):
        with pytest.raises(TypeError, match=r"Named\.take\(.*(too many positional|missing a required)"):
            call()
    one.crash()
    one.recover()
    assert one.call(Named.count) == 6


class Holder(Immortal, nodes=(Part,)):
    asked: list[float]

    def __init__(self) -> None:
        self.asked = []

    @rpc
    def make(self) -> Handle[Part]:
        return immortal.create_node(Part)

    @rpc
    async def ask(self) -> float:
        part: Any = await immortal.step(self.make)
        part.when.fork(after_s=1)
        one: float = await part.when(after_s=5)
        return one - immortal.now().timestamp()


def test_a_nodes_handler_by_name(env: Environment) -> None:
    assert env.start(Holder, "one").call(Holder.ask) == 5


@pytest.mark.parametrize(("given", "names"), [((1,), {"third": 3}), ((), {"third": 3, "first": 1, "second": 2})])
def test_a_clients_arguments_by_name_travel_by_position(given: tuple[int, ...], names: dict[str, int]) -> None:
    method = typed_method(definition_of(Named), "take")
    assert method.encode(given, names) == b"\x93\1\2\3"
    with pytest.raises(TypeError, match="too many positional"):
        method.encode((1, 2, 3), {})


# --- coroutines that the garbage collector closes ---------------------------------------------------------------------


class _Never:
    def __await__(self) -> Iterator[None]:
        yield


class Collecting(Immortal):
    def __init__(self) -> None: ...

    @rpc
    async def collect(self) -> int:
        gc.collect()
        await immortal.sleep(timedelta(seconds=1))
        return 7


CLOSED: list[str] = []


async def _cleans_up() -> None:
    """A handler of another life of the instance, which nobody closed: it waits, and cleans up when it is collected."""
    try:
        await _Never()
    finally:
        CLOSED.append("closed")
        await immortal.sleep(timedelta(hours=1))


@pytest.mark.parametrize("count", [1, 3])
def test_what_the_collector_closes_does_nothing_in_the_handler_that_runs(env: Environment, count: int) -> None:
    instance = env.start(Collecting, "collecting")
    gc.disable()
    try:
        for _ in range(count):
            coroutine = _cleans_up()
            coroutine.send(None)
            cycle: list[Any] = [coroutine]
            cycle.append(cycle)
        del coroutine, cycle
        CLOSED.clear()
        answer = instance.begin(Collecting.collect)
        env.run()
        assert len(CLOSED) == count
        instance.checkpoint()
        instance.crash()
        instance.recover()
        assert answer.result() == 7
    finally:
        gc.enable()
