"""immortal.appsdk.calls.user_code: no run of user code sees or changes the context variables of another."""

from __future__ import annotations

import asyncio
import contextvars
import decimal
import gc
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import numpy
import pytest
import structlog

import immortal
from immortal import CalleeFailed, Immortal, impulse, query, rpc
from immortal.appsdk.calls.codec import encoder
from immortal.appsdk.calls.user_code import RunContexts, inherited_context
from immortal.appsdk.effects.effect import EffectFunction, EffectOptions, EffectRequest
from immortal.appsdk.effects.runner import LocalEffectRunner
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.patterns.harmony.batch import Run
from immortal.appsdk.patterns.harmony.worker import _Life, task_functions
from immortal.appsdk.patterns.pirate.server import Server
from immortal.appsdk.patterns.queue.model import Given
from immortal.appsdk.patterns.queue.worker import Worker
from immortal.appsdk.running.life import AppLife
from immortal.appsdk.running.options import RunOptions
from immortal.patterns.pirate import connect
from immortal.testing import Environment

RIGHT = str(decimal.Decimal(1) / 3)
tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")


def third() -> str:
    return str(decimal.Decimal(1) / 3)


def seen() -> str:
    """All that a run can find of another's."""
    bound = structlog.contextvars.get_contextvars()
    return f"{third()} {numpy.geterr()['divide']} {tenant.get()} {bound}"


CLEAN = f"{RIGHT} warn nobody {{}}"


def change(name: str) -> None:
    """All of it, and nothing is put back."""
    decimal.getcontext().prec = 4
    numpy.seterr(divide="ignore")
    tenant.set(name)
    structlog.contextvars.bind_contextvars(request=name)


def changed(name: str) -> str:
    return f"0.3333 ignore {name} {{'request': '{name}'}}"


def outside(number: int) -> str:
    return f"{number}"


class Desk(Immortal):
    notes: list[str]

    def __init__(self) -> None:
        self.notes = []
        change("init")
        self.notes.append(seen())

    @rpc
    def look(self) -> str:
        self.notes.append("look")
        return seen()

    @rpc
    def spoil(self, name: str) -> str:
        self.notes.append(name)
        change(name)
        return seen()

    @impulse
    def spoil_unasked(self, name: str) -> None:
        change(name)
        self.notes.append(seen())

    @impulse
    def look_unasked(self) -> None:
        self.notes.append(seen())

    @rpc
    def spoil_and_raise(self) -> None:
        change("raises")
        raise ValueError("spoilt")

    @query
    def ask(self) -> str:
        before = seen()
        change("query")
        return before

    @rpc
    async def wait(self, name: str, seconds: int) -> list[str]:
        found = [seen()]
        change(name)
        await immortal.sleep(timedelta(seconds=seconds))
        found.append(seen())
        await immortal.sleep(timedelta(seconds=seconds))
        return [*found, seen()]

    @rpc
    async def coarse(self, digits: int, seconds: int) -> str:
        with decimal.localcontext() as context, structlog.contextvars.bound_contextvars(digits=digits):
            context.prec = digits
            token = tenant.set(f"{digits}")
            try:
                await immortal.sleep(timedelta(seconds=seconds))
                return f"{third()} {tenant.get()} {structlog.contextvars.get_contextvars()}"
            finally:
                tenant.reset(token)

    @rpc
    async def steps(self) -> list[str]:
        change("parent")
        inner = await immortal.step(self.spoil, "step")  # type: ignore[misc] # a step: mypy needs the plugin
        return [inner, seen()]

    async def _branch(self, digits: int) -> list[str]:
        begun = third()
        decimal.getcontext().prec = digits
        await immortal.sleep(timedelta(seconds=digits))
        return [begun, third()]

    @rpc
    async def branches(self) -> list[Any]:
        decimal.getcontext().prec = 3
        both = await asyncio.gather(self._branch(4), self._branch(5))
        return [*both, third()]

    @rpc
    async def race_that_loses(self) -> str:
        decimal.getcontext().prec = 3
        await immortal.race(immortal.sleep(timedelta(seconds=1)), self.coarse_branch())
        return f"{third()} {tenant.get()}"

    async def coarse_branch(self) -> None:
        token = tenant.set("loser")
        try:
            with decimal.localcontext() as context:
                context.prec = 7
                await immortal.sleep(timedelta(days=1))
        finally:
            tenant.reset(token)  # a ValueError in any other context

    @rpc
    async def effect_of(self, name: str) -> list[str]:
        change(name)
        found = await immortal.effect(outside, 1)
        return [found, seen()]

    @rpc
    async def again(self, left: int) -> list[str]:
        begun = seen()
        if left:
            change("before")
            await immortal.sleep(timedelta(seconds=1))
            immortal.continue_as(left - 1)
        return [begun]


@pytest.fixture
def env() -> Iterator[Environment]:
    with contextvars_unchanged(), Environment(fail_alone=True) as made:
        yield made


class contextvars_unchanged:  # noqa: N801 (used as a function)
    """The test's own context is what nobody touches."""

    def __enter__(self) -> None:
        assert seen() == CLEAN

    def __exit__(self, *_: object) -> None:
        assert seen() == CLEAN


def kill(desk: Any) -> None:
    desk.crash()
    gc.collect()
    desk.recover()


def test_what_a_handler_leaves_ends_with_it(env: Environment) -> None:
    desk = env.start(Desk, "desk")
    assert desk.call(Desk.spoil, "one") == changed("one")
    assert desk.call(Desk.look) == CLEAN
    with pytest.raises(Exception, match="spoilt"):
        desk.call(Desk.spoil_and_raise)
    assert desk.call(Desk.look) == CLEAN
    assert desk.call(Desk.ask) == CLEAN
    assert desk.call(Desk.ask) == CLEAN


def test_so_it_is_within_one_record(env: Environment) -> None:
    desk = env.start(Desk, "desk")
    for name in ("one", "two"):
        desk.send(Desk.spoil_unasked, name)
        desk.send(Desk.look_unasked)
    env.run()
    expected = [changed("init"), changed("one"), CLEAN, changed("two"), CLEAN]
    assert desk.state.notes == expected
    kill(desk)
    assert desk.state.notes == expected


def test_what_init_changes_is_seen_by_itself_alone(env: Environment) -> None:
    desk = env.start(Desk, "desk")
    assert desk.state.notes == [changed("init")]
    assert desk.call(Desk.look) == CLEAN
    kill(desk)
    assert desk.call(Desk.look) == CLEAN


@pytest.mark.parametrize("break_it", [lambda desk: None, kill, lambda desk: desk.checkpoint()])
def test_a_handler_keeps_its_own_over_its_waits(env: Environment, break_it: Callable[[Any], None]) -> None:
    desk = env.start(Desk, "desk")
    waiting = [desk.begin(Desk.wait, name, seconds) for name, seconds in (("one", 10), ("two", 7))]
    coarse = desk.begin(Desk.coarse, 5, 12)
    env.run()
    assert desk.call(Desk.look) == CLEAN
    break_it(desk)
    env.advance(seconds=11)
    assert desk.call(Desk.look) == CLEAN
    break_it(desk)
    assert coarse.result() == "0.33333 5 {'digits': 5}"
    assert [one.result() for one in waiting] == [[CLEAN, changed(name), changed(name)] for name in ("one", "two")]
    assert desk.call(Desk.look) == CLEAN


def test_an_app_that_is_killed_takes_what_its_handlers_had_open_along(env: Environment) -> None:
    desk = env.start(Desk, "desk")
    desk.begin(Desk.coarse, 5, 1000)
    desk.begin(Desk.race_that_loses)
    env.run()
    desk.crash_app()
    gc.collect()
    desk.recover()
    assert desk.call(Desk.look) == CLEAN


def test_a_step_has_a_copy(env: Environment) -> None:
    desk = env.start(Desk, "desk")
    assert desk.call(Desk.steps) == [changed("step"), changed("parent")]


def test_each_branch_has_a_copy(env: Environment) -> None:
    desk = env.start(Desk, "desk")
    assert desk.call(Desk.branches) == [["0.333", "0.3333"], ["0.333", "0.33333"], "0.333"]
    assert desk.call(Desk.race_that_loses) == "0.333 nobody"


def test_continue_as_begins_with_nothing(env: Environment) -> None:
    desk = env.start(Desk, "desk")
    assert desk.call(Desk.again, 2) == [CLEAN]


def test_an_effect_has_a_copy_of_its_handlers(env: Environment) -> None:
    found: list[str] = []

    def stand_in(number: int) -> str:
        found.append(seen())
        change("effect")
        return "done"

    desk = env.start(Desk, "desk", effects={outside: stand_in})
    assert desk.call(Desk.effect_of, "one") == ["done", changed("one")]
    assert found == [changed("one")]


def test_all_runs_begin_with_what_the_process_had_after_its_imports() -> None:
    def run() -> list[str]:
        decimal.getcontext().prec = 6  # as a module may, as it is imported
        tenant.set("import")
        with Environment() as env:
            desk = env.start(Desk, "desk")
            decimal.getcontext().prec = 9
            found = [desk.call(Desk.look), desk.call(Desk.spoil, "one"), desk.call(Desk.look)]
            kill(desk)
            return [*found, desk.call(Desk.look)]

    first = "0.333333 warn import {}"
    assert contextvars.Context().run(run) == [first, changed("one"), first, first]


def test_numbers_of_a_module_are_no_setting() -> None:
    def run() -> tuple[int, int]:
        third()
        usual = len(RunContexts().new())
        decimal.getcontext().traps[decimal.Inexact] = True
        return usual, len(RunContexts().new())

    assert contextvars.Context().run(run) == (1, 2)


def test_decimals_flags_are_each_runs_own() -> None:
    def run() -> list[bool]:
        decimal.getcontext().prec = 6
        contexts = RunContexts()
        flag = decimal.Inexact

        def use() -> bool:
            before = decimal.getcontext().flags[flag]
            third()
            return bool(before)

        return [contexts.run(use), contexts.run(use), bool(decimal.getcontext().flags[flag])]

    assert contextvars.Context().run(run) == [False, False, False]


def test_opentelemetrys_context_is_one_of_them(env: Environment) -> None:
    otel = pytest.importorskip("opentelemetry.context")
    made = otel.create_key("tenant")

    class Traced(Immortal):
        @rpc
        async def wait(self, name: str) -> list[str]:
            otel.attach(otel.set_value(made, name))
            await immortal.sleep(timedelta(seconds=5))
            return [str(otel.get_value(made))]

        @rpc
        def look(self) -> str:
            return str(otel.get_value(made))

    traced = env.start(Traced, "traced")
    one = traced.begin(Traced.wait, "one")
    env.run()
    assert traced.call(Traced.look) == "None"
    kill(traced)
    assert one.result() == ["one"]


class Drawer(Immortal, keyed=str):
    begun: str

    def __init__(self) -> None:
        self.begun = seen()
        change("init")

    @rpc
    def look(self) -> list[str]:
        return [self.begun, seen()]

    @rpc
    async def wait(self, name: str) -> list[str]:
        found = [self.begun, seen()]
        change(name)
        await immortal.sleep(timedelta(seconds=1))
        return [*found, seen()]


def test_what_init_of_a_key_changes_is_seen_by_itself_alone(env: Environment) -> None:
    drawers = env.start(Drawer, "drawers")
    assert drawers["one"].call(Drawer.look) == [CLEAN] * 2
    assert drawers["two"].call(Drawer.wait, "it") == [CLEAN, CLEAN, changed("it")]


class Careful(Immortal):
    """Each of its runs notes which exception is being handled where it begins: none."""

    handled: list[str]
    large: dict[str, list[Any]]

    def __init__(self) -> None:
        self.handled, self.large = [], {"texts": ["text" * 10] * 200}

    @rpc
    def note(self) -> None:
        try:
            raise KeyError("its own")
        except KeyError as error:
            self.handled.append(f"{error.__context__!r}")

    @rpc
    def fail(self) -> None:
        raise ValueError("undone")

    @impulse
    def spoil(self) -> None:
        self.large["texts"][0] = object()

    @rpc(on_error="keep")
    def wake(self) -> None:
        immortal.signal("woken")
        raise ValueError("kept")

    @rpc
    async def wait(self) -> str:
        await immortal.event("woken")
        await immortal.step(self.note)
        try:
            await immortal.step(self.fail)
        except CalleeFailed as error:
            return f"{error.message} {sys.exc_info()[0]} {error.__context__!r}"
        return ""


def test_no_run_sees_an_exception_that_others_are_handled_for(env: Environment) -> None:
    careful = env.start(Careful, "careful")
    careful.call(Careful.note)
    with pytest.raises(CalleeFailed, match="undone"):
        careful.call(Careful.fail)  # what was before runs again
    waiting = careful.begin(Careful.wait)
    env.run()
    with pytest.raises(CalleeFailed, match="kept"):
        careful.call(Careful.wake)
    assert waiting.result() == "undone <class 'immortal.appsdk.errors.CalleeFailed'> None"
    careful.send(Careful.note)
    careful.send(Careful.spoil)
    env.run()
    careful.checkpoint()  # which finds that, and lets all others run again
    assert careful.state.handled == ["None"] * 3
    assert [letter.type_name for letter in careful.dead_letters] == ["StateError"]


# --- beside the handlers ----------------------------------------------------------------------------------------------


def spoil_task(name: str) -> str:
    before = seen()
    change(name)
    return before


async def spoil_task_async(name: str) -> str:
    before = spoil_task(name)
    await asyncio.sleep(0)
    return f"{before} {seen()}"


def test_an_effect_that_runs_outside_has_a_copy_as_well() -> None:
    answers: queue.Queue[Any] = queue.Queue()
    runner = LocalEffectRunner(2, lambda said: None)

    def begin(function: Callable[..., Any], name: str) -> Any:
        made = EffectFunction(function)

        def send(raised: bool, value: bytes) -> None:
            answers.put(msgspec.msgpack.decode(value))

        variables = inherited_context()
        variables.run(change, "handler")
        runner.start(EffectRequest(1, made, encoder.encode((name,)), EffectOptions(), lambda: "", send, variables))
        return answers.get(timeout=20)

    try:
        for _ in range(2):
            assert begin(spoil_task, "effect") == changed("handler")
            assert begin(spoil_task_async, "effect") == f"{changed('handler')} {changed('effect')}"
    finally:
        runner.stop()


def test_each_task_of_a_worker_has_its_own(tmp_path: Any) -> None:
    worker = Worker("tasks", {"one": spoil_task, "two": spoil_task_async}, home=tmp_path)
    worker._contexts = RunContexts()
    arguments = msgspec.msgpack.encode(["task"])
    for _ in range(2):
        assert msgspec.msgpack.decode(worker._done(Given(1, 1, "one", arguments)).result) == CLEAN
        both = msgspec.msgpack.decode(worker._done(Given(1, 1, "two", arguments)).result)
        assert both == f"{CLEAN} {changed('task')}"
    life = _Life("worker", task_functions({"spoil": spoil_task}), None)
    run = Run("batch", "spoil", 0, 2, msgspec.msgpack.encode(["one", "two"]))
    life._execute_run(None, run)  # type: ignore[arg-type]
    assert life._response is not None
    assert msgspec.msgpack.decode(life._response.values) == [CLEAN, CLEAN]
    assert seen() == CLEAN


def test_each_request_to_a_pirate_has_its_own(tmp_path: Any) -> None:
    server = Server(lambda request: spoil_task("request").encode(), f"ipc://{tmp_path}/socket")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        with connect([server.endpoint]) as pool:
            assert [pool.request(b""), pool.request(b"")] == [CLEAN.encode()] * 2
    finally:
        server.close()
        thread.join(20)


def test_a_hook_begins_with_what_the_process_had() -> None:
    found: list[str] = []

    class Hooked(Immortal):
        def hook(self, impulses: object) -> None:
            found.append(seen())

    def run() -> None:
        decimal.getcontext().prec = 6
        life = AppLife(definition_of(Hooked), RunOptions(), lambda: None)
        thread = threading.Thread(target=life._run_hook, args=(Hooked(), "Hooked.hook", "hook", None))
        thread.start()
        thread.join(20)
        life.close("over")

    contextvars.Context().run(run)
    assert found == ["0.333333 warn nobody {}"]
