"""appsdk.calls.run_failures: whatever user code raises, its run fails alone; a signal still ends the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest

import immortal
from immortal import CalleeFailed, CallRefused, EffectFailed, Immortal, Node, Retry, impulse, query, rpc
from immortal.appsdk.calls.codec import encode_value
from immortal.appsdk.calls.user_code import RunContexts, interrupt, is_user_failure, mark_interrupts
from immortal.appsdk.client.errors import CalleeFailed as ClientCalleeFailed
from immortal.appsdk.dispatch.invocation import answer_query
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.patterns.harmony.batch import Run
from immortal.appsdk.patterns.harmony.worker import Results, task_functions
from immortal.appsdk.patterns.pirate.server import Server
from immortal.appsdk.patterns.queue.model import Given
from immortal.appsdk.patterns.queue.worker import Worker
from immortal.appsdk.running.life import AppLife
from immortal.appsdk.running.options import RunOptions
from immortal.errors import HookError, StateError
from immortal.protocol.client_frames import ReplyKind
from immortal.protocol.queries import QueryQuestion
from immortal.testing import Environment

WAIT_S = 20.0


class OwnError(BaseException):
    pass


class AwkwardError(Exception):
    """Its class fails wherever somebody describes one."""

    def _fail(self, *given: object) -> Any:
        raise RuntimeError("awkward")

    __str__ = __repr__ = __eq__ = _fail
    __hash__ = None  # type: ignore[assignment]
    args = __traceback__ = __cause__ = __context__ = __notes__ = property(_fail)  # type: ignore[assignment]


KINDS = ["SystemExit", "KeyboardInterrupt", "GeneratorExit", "CancelledError", "OwnError", "ValueError"]


def throw(kind: str) -> None:
    if kind == "SystemExit":
        sys.exit("enough")
    raise {
        "KeyboardInterrupt": KeyboardInterrupt,
        "GeneratorExit": GeneratorExit,
        "CancelledError": asyncio.CancelledError,
        "OwnError": OwnError,
        "AwkwardError": AwkwardError,
        "ValueError": ValueError,
    }[kind]("enough")


def outside(kind: str) -> None:
    throw(kind)


async def outside_async(kind: str) -> None:
    await asyncio.sleep(0)
    throw(kind)


class Part(Node):
    number: int

    def __init__(self) -> None:
        self.number = 0

    @rpc
    def fail(self, kind: str) -> None:
        throw(kind)


class Desk(Immortal):
    done: int

    def __init__(self) -> None:
        self.done = 0

    @rpc
    def count(self) -> int:
        self.done += 1
        return self.done

    @rpc
    def fail(self, kind: str) -> None:
        self.done += 100
        throw(kind)

    @impulse
    def fail_unasked(self, kind: str) -> None:
        self.done += 100
        throw(kind)

    @query
    def fail_query(self, kind: str) -> int:
        throw(kind)
        return 1

    @rpc
    async def fail_at_once(self, kind: str) -> None:
        throw(kind)

    @rpc
    async def fail_later(self, kind: str) -> None:
        await immortal.sleep(timedelta(seconds=1))
        throw(kind)

    async def _branch(self, kind: str) -> None:
        await immortal.sleep(timedelta(seconds=1))
        throw(kind)

    @rpc
    async def fail_in_a_branch(self, kind: str) -> None:
        await asyncio.gather(self._branch(kind), immortal.sleep(timedelta(days=1)))

    @rpc
    async def fail_cleaning_up(self, kind: str) -> None:
        async def loses() -> None:
            try:
                await immortal.sleep(timedelta(days=1))
            finally:
                throw(kind)

        await immortal.race(immortal.sleep(timedelta(seconds=1)), loses())

    @rpc
    async def fail_in_a_step(self, kind: str) -> str:
        try:
            await immortal.step(self.fail, kind)  # type: ignore[misc] # a step: mypy needs the plugin
        except CalleeFailed as error:
            return error.type_name
        return ""

    @rpc
    async def fail_in_an_effect(self, kind: str) -> tuple[str, int]:
        twice = immortal.effect.options(retry=Retry(attempts=2, first_wait=timedelta(seconds=1)))
        try:
            await twice(outside, kind)
        except EffectFailed as error:
            return error.type_name, error.attempts
        return "", 0


CALLS = [
    Desk.fail,
    Desk.fail_query,
    Desk.fail_at_once,
    Desk.fail_later,
    Desk.fail_in_a_branch,
    Desk.fail_cleaning_up,
]


@pytest.fixture
def desk() -> Iterator[Any]:
    with Environment(fail_alone=True) as env:
        yield env.start(Desk, "desk", effects={outside: outside})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("handler", CALLS, ids=[handler.name for handler in CALLS])
def test_a_call_fails_alone(desk: Any, handler: Any, kind: str) -> None:
    if handler is Desk.fail_cleaning_up and kind == "CancelledError":
        pytest.skip("a task that is cancelled ends so")
    waiting = desk.begin(handler, kind)
    with pytest.raises(CalleeFailed) as caught:
        waiting.result()
    assert (caught.value.type_name, caught.value.message) == (kind, "enough")
    assert desk.call(Desk.count) == 1
    desk.crash()
    desk.recover()
    assert desk.call(Desk.count) == 2


@pytest.mark.parametrize("handler", CALLS, ids=[handler.name for handler in CALLS])
def test_so_does_one_that_raises_what_nobody_can_describe(desk: Any, handler: Any) -> None:
    with pytest.raises(CalleeFailed) as caught:
        desk.call(handler, "AwkwardError")
    assert (caught.value.type_name, caught.value.message) == ("AwkwardError", "its str() raises RuntimeError")
    assert desk.call(Desk.fail_in_a_step, "AwkwardError") == "AwkwardError"
    assert desk.call(Desk.fail_in_an_effect, "AwkwardError") == ("AwkwardError", 2)
    desk.crash()
    desk.recover()
    assert desk.call(Desk.count) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_so_do_steps_effects_and_what_nobody_waits_for(desk: Any, kind: str) -> None:
    assert desk.call(Desk.fail_in_a_step, kind) == kind
    assert desk.call(Desk.fail_in_an_effect, kind) == (kind, 2)
    desk.send(Desk.fail_unasked, kind)
    assert desk.call(Desk.count) == 1
    assert [letter.type_name for letter in desk.dead_letters] == [kind]


@pytest.mark.parametrize("kind", KINDS)
def test_an_unlogged_query_fails_alone(desk: Any, kind: str) -> None:
    dispatcher = desk._app().dispatcher
    question = QueryQuestion(1, Desk.fail_query.method_id, msgspec.msgpack.encode((kind,)), 0)
    answer = answer_query(question, dispatcher.definition, dispatcher.instance, dispatcher.context, dispatcher.tasks)
    assert answer.kind == ReplyKind.RAISED
    assert kind.encode() in answer.value


@pytest.mark.parametrize("kind", KINDS)
def test_without_fail_alone_a_test_gets_what_its_handler_raised(kind: str) -> None:
    with Environment() as env:
        desk = env.start(Desk, "desk")
        with pytest.raises(BaseException, match="enough") as caught:
            desk.call(Desk.fail, kind)
        assert type(caught.value).__name__ == kind


@pytest.mark.parametrize("kind", KINDS)
def test_what_makes_an_app_stops_it_in_words(kind: str) -> None:
    class Never(Immortal):
        def __init__(self) -> None:
            throw(kind)

    from tests.helpers.sdk import TAKE_FIRST, Life

    with pytest.raises(StateError, match=f"Never.__init__ raised {kind}; the app stops"):
        Life.of(Never).give(TAKE_FIRST)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_stops_the_app_in_words(kind: str) -> None:
    failures: list[Any] = []

    class Hooked(Immortal):
        def hook(self, impulses: object) -> None:
            throw(kind)

    life = AppLife(definition_of(Hooked), RunOptions(), lambda: None)
    life.fail = failures.append  # type: ignore[method-assign]
    thread = threading.Thread(target=life._run_hook, args=(Hooked(), "Hooked.hook", "hook", None))
    thread.start()
    thread.join(WAIT_S)
    life.close("over")
    (failure,) = failures
    assert isinstance(failure, HookError)
    assert f"raised {kind}" in str(failure)


class Effects:
    """Real ones, in a thread and on a loop."""

    def __init__(self) -> None:
        from immortal.appsdk.effects.runner import LocalEffectRunner

        self.runner = LocalEffectRunner(2, lambda said: None)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        from immortal.appsdk.calls.codec import encoder
        from immortal.appsdk.effects.effect import EffectFunction, EffectOptions, EffectRequest

        answers: queue.Queue[Any] = queue.Queue()
        made, options = EffectFunction(function), EffectOptions(retry=Retry(attempts=1))

        def send(raised: bool, value: bytes) -> None:
            answers.put(made.decode_error(value, {}) if raised else msgspec.msgpack.decode(value))

        self.runner.start(EffectRequest(1, made, encoder.encode(arguments), options, lambda: "key", send))
        return answers.get(timeout=WAIT_S)


async def has_a_task_that_fails(kind: str) -> str:
    with contextlib.suppress(BaseException):
        await asyncio.create_task(outside_async(kind))
    return "went on"


async def works() -> str:
    await asyncio.sleep(0)
    return "works"


@pytest.mark.parametrize("kind", KINDS)
def test_an_effect_fails_alone(kind: str) -> None:
    effects = Effects()
    try:
        for function in (outside, outside_async):
            failed = effects.run(function, kind)
            assert isinstance(failed, EffectFailed)
            assert failed.type_name == kind
        if kind != "GeneratorExit":  # Python closes all coroutines down to who awaits the task
            assert effects.run(has_a_task_that_fails, kind) == "went on"
        assert effects.run(works) == "works"
    finally:
        effects.runner.stop()


# --- workers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def worker(tmp_path: Any) -> Worker:
    made = Worker("tasks", {"fail": throw, "fail_async": outside_async, "works": str.upper}, home=tmp_path)
    made._contexts = RunContexts()
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fail", "fail_async"])
def test_a_task_of_a_queue_fails_alone(worker: Worker, name: str, kind: str) -> None:
    report = worker._done(Given(1, 1, name, msgspec.msgpack.encode([kind])))
    assert (report.error, report.again) == (f"{kind}: enough", True)  # a failed attempt, as any other
    assert msgspec.msgpack.decode(worker._done(Given(2, 1, "works", msgspec.msgpack.encode(["a"]))).result) == "A"


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_of_harmony_fails_alone(kind: str) -> None:
    results = Results("batch", 0)
    results.execute(throw, kind)
    results.execute(str.upper, "a")
    response = results.drain()
    assert (response.count, response.failures) == (2, {0: f"{kind}: enough"})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_store", [False, True])
def test_a_request_to_a_pirate_fails_alone(tmp_path: Any, kind: str, has_store: bool) -> None:
    from immortal.patterns.pirate import connect

    def work(request: Any) -> bytes:
        if request.body:
            throw(request.body.decode())
        return b"works"

    server = Server(work, f"ipc://{tmp_path}/socket", store=tmp_path / "store" if has_store else None)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        with connect([server.endpoint]) as pool:
            with pytest.raises(ClientCalleeFailed, match="enough"):
                pool.request(kind.encode())
            assert pool.request(b"") == b"works"
    finally:
        server.close()
        thread.join(WAIT_S)


# --- what still ends the process --------------------------------------------------------------------------------------


def raise_signal(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    threading.Event().wait(WAIT_S)  # it comes up in here


class Interrupted(Immortal):
    @rpc
    def work(self) -> None:
        raise_signal(signal.SIGINT)

    @rpc
    async def work_later(self) -> None:
        await immortal.sleep(timedelta(seconds=1))
        raise_signal(signal.SIGINT)


@pytest.mark.parametrize("handler", [Interrupted.work, Interrupted.work_later])
def test_ctrl_c_is_no_failure_of_the_handler_that_it_finds(handler: Any) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        env = Environment(fail_alone=True)
        busy = env.start(Interrupted, "busy")
        with pytest.raises(KeyboardInterrupt):
            busy.begin(handler).result()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def exits(number: int, frame: object) -> None:
    sys.exit(0)


class Exits:
    def __call__(self, number: int, frame: object) -> None:
        sys.exit(0)

    def method(self, number: int, frame: object) -> None:
        sys.exit(0)


@pytest.mark.parametrize("handler", [exits, Exits(), Exits().method])
def test_what_a_process_does_at_sigterm_is_done(worker: Worker, handler: Any) -> None:
    before = signal.signal(signal.SIGTERM, handler)
    try:
        for name in ("stuck", "stuck_async"):
            worker._functions = Worker("tasks", {"stuck": stuck, "stuck_async": stuck_async})._functions
            with pytest.raises(SystemExit):
                worker._done(Given(1, 1, name, msgspec.msgpack.encode([])))
    finally:
        signal.signal(signal.SIGTERM, before)


def stuck() -> None:
    raise_signal(signal.SIGTERM)


async def stuck_async() -> None:
    await asyncio.sleep(0)
    raise_signal(signal.SIGTERM)


def test_only_the_default_of_ctrl_c_is_replaced() -> None:
    def own(number: int, frame: object) -> None:
        pass

    before = signal.signal(signal.SIGINT, own)
    try:
        with mark_interrupts():
            assert signal.getsignal(signal.SIGINT) is own
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with mark_interrupts(), mark_interrupts():
            assert signal.getsignal(signal.SIGINT) is interrupt
            with pytest.raises(KeyboardInterrupt) as caught:
                raise_signal(signal.SIGINT)
            assert not is_user_failure(caught.value)
            assert is_user_failure(KeyboardInterrupt())
    finally:
        signal.signal(signal.SIGINT, before)


# --- what is raised on the way to user code and back ------------------------------------------------------------------


class Picky(msgspec.Struct):
    kind: str

    def __post_init__(self) -> None:
        if self.kind:
            throw(self.kind)


class SilentError(Exception):
    def __str__(self) -> str:
        sys.exit("in __str__")


class Reads(Immortal):
    @rpc
    def take(self, given: Picky) -> None:
        pass

    @rpc
    def give(self, kind: str) -> Picky:
        given = Picky("")
        given.kind = kind
        return given

    @rpc
    def say(self) -> None:
        raise SilentError


@pytest.mark.parametrize("kind", KINDS)
def test_types_of_the_users_own_fail_alone(kind: str) -> None:
    with Environment(fail_alone=True) as env:
        reads = env.start(Reads, "reads")
        given = Picky("")
        given.kind = kind
        with pytest.raises(CallRefused, match="enough"):
            reads.call(Reads.take, given)
        with pytest.raises(CalleeFailed, match="enough"):
            reads.call(Reads.give, kind)
        with pytest.raises(CalleeFailed, match="its str\\(\\) raises SystemExit"):
            reads.call(Reads.say)
        assert reads.call(Reads.take, Picky("")) is None


def picky(given: Picky) -> str:
    return given.kind


def silent(name: str) -> str:
    raise SilentError


@pytest.mark.parametrize("kind", KINDS)
def test_so_they_do_for_workers(worker: Worker, kind: str) -> None:
    worker._functions = Worker("tasks", {"picky": picky, "silent": silent})._functions
    report = worker._done(Given(1, 1, "picky", msgspec.msgpack.encode([{"kind": kind}])))
    assert "enough" in report.error
    assert "its str() raises" in worker._done(Given(1, 1, "silent", msgspec.msgpack.encode(["a"]))).error
    skill = task_functions({"picky": picky})["picky"]
    run = Run("batch", "picky", 0, 2, msgspec.msgpack.encode([{"kind": ""}, {"kind": kind}]))
    results = Results("batch", 0)
    for task in skill.tasks(run):
        results.execute(picky, task)
    results.execute(silent, "a")
    failures = results.drain().failures
    assert sorted(failures) == [1, 2]
    assert "enough" in failures[1]


def named(error: TypeError) -> str:
    return f"{error}"


def test_a_task_can_be_an_exception() -> None:
    function = task_functions({"named": named})["named"]
    run = Run("batch", "named", 0, 2, msgspec.msgpack.encode([msgspec.Raw(encode_value(TypeError("a task"))), 5]))
    found, misfit = function.tasks(run)
    results = Results("batch", 0)
    results.execute(named, found)
    results.execute(named, misfit)
    response = results.drain()
    assert msgspec.msgpack.decode(response.values)[0] == "a task"
    assert list(response.failures) == [1]
    assert response.failures[1].startswith("TypeError: the task is not what the function takes: ")
