"""What runs effects in an app's process: threads and an asyncio loop."""

from __future__ import annotations

import asyncio
import contextvars
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from queue import Queue
from typing import Any

import msgspec
import pytest

from immortal import EffectFailed, Retry, effect_context
from immortal.appsdk.calls.codec import encoder
from immortal.appsdk.effects.effect import EffectFunction, EffectOptions, EffectRequest
from immortal.appsdk.effects.runner import LocalEffectRunner, StubEffectRunner, load_stand_ins
from immortal.appsdk.running.options import OptionError, run_options
from immortal.errors import UsageError
from tests.helpers.sdk import WAIT_S

PLACES = 3
FAST = Retry(attempts=5, first_wait=timedelta(milliseconds=1))

seen: Queue[Any] = Queue()
go = threading.Event()
running: list[int] = []


class Known(Exception):  # noqa: N818
    pass


def plain(number: int) -> int:
    seen.put((effect_context(), threading.current_thread()))
    return number + 1


async def waiting(number: int) -> int:
    await asyncio.sleep(0)
    seen.put((effect_context(), threading.current_thread()))
    return number + 1


def fails(times: int, kind: str) -> str:
    attempt = effect_context().attempt
    seen.put(attempt)
    if attempt <= times:
        kinds = {"ValueError": ValueError, "Known": Known, "TimeoutError": TimeoutError, "KeyError": KeyError}
        raise kinds[kind](f"attempt {attempt}")
    return "done"


async def fails_beside(times: int) -> str:
    await asyncio.sleep(0)
    return fails(times, "ValueError")


async def raises(kind: str) -> None:
    await asyncio.sleep(0)
    _raise(kind)


def raises_in_thread(kind: str) -> None:
    _raise(kind)


def _raise(kind: str) -> None:
    raise {
        "exit": SystemExit(1),
        "cancelled": asyncio.CancelledError("by itself"),
        "stop": StopIteration(5),
        "interrupt": KeyboardInterrupt(),
    }[kind]


def wrong_type() -> int:
    seen.put("ran")
    return "text"  # type: ignore[return-value]


def holds(number: int) -> int:
    running.append(number)
    seen.put(len(running))
    assert go.wait(WAIT_S)
    running.remove(number)
    return number


async def hangs() -> None:
    seen.put("begun")
    try:
        await asyncio.Event().wait()
    finally:
        seen.put("given up")


async def clings() -> None:
    seen.put("begun")
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


async def instead(number: int) -> int:
    await asyncio.sleep(0)
    seen.put(effect_context().key)
    return number + 10


def of_another_type(number: int) -> str:
    return f"{number}"


class Outside:
    """A runner and what it has answered."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.runner = LocalEffectRunner(PLACES, self.said.append)
        self.answers: Queue[tuple[int, Any]] = Queue()
        self._number = 0

    def request(self, function: Any, *arguments: Any, **options: Any) -> EffectRequest:
        self._number += 1
        number, made = self._number, EffectFunction(function)
        known = EffectOptions(**options)

        def send(raised: bool, value: bytes) -> None:
            decoded = made.decode_error(value, known.raises) if raised else msgspec.msgpack.decode(value)
            self.answers.put((number, decoded))

        return EffectRequest(number, made, encoder.encode(arguments), known, lambda: f"key {number}", send)

    def start(self, function: Any, *arguments: Any, **options: Any) -> EffectRequest:
        request = self.request(function, *arguments, **options)
        self.runner.start(request)
        return request

    def answer(self) -> tuple[int, Any]:
        return self.answers.get(timeout=WAIT_S)


@pytest.fixture
def outside() -> Iterator[Outside]:
    go.clear()
    running.clear()
    seen.queue.clear()
    made = Outside()
    yield made
    go.set()
    made.runner.stop()


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.001)


HOUR = Retry(first_wait=timedelta(hours=1), max_wait=timedelta(hours=1))


def test_an_attempt_that_would_come_in_an_hour_is_made_now_and_counts(outside: Outside) -> None:
    request = outside.start(fails, 2, "ValueError", retry=HOUR)
    for attempt in (1, 2):
        assert seen.get(timeout=WAIT_S) == attempt
        until(lambda attempt=attempt: request.failure == f"ValueError: attempt {attempt}")
        until(lambda: request.try_now is not None and request.try_now())
    assert outside.answer() == (1, "done")
    assert seen.get_nowait() == 3
    assert request.try_now is not None
    assert not request.try_now()


def test_an_async_attempt_is_made_now(outside: Outside) -> None:
    request = outside.start(fails_beside, 1, retry=HOUR, timeout=timedelta(hours=2))
    assert seen.get(timeout=WAIT_S) == 1
    until(lambda: request.try_now is not None and request.try_now())
    assert outside.answer() == (1, "done")


def test_functions_run_beside_the_caller(outside: Outside) -> None:
    outside.start(plain, 1)
    assert outside.answer() == (1, 2)
    in_thread, thread = seen.get_nowait()
    outside.start(waiting, 2)
    assert outside.answer() == (2, 3)
    on_loop, loop_thread = seen.get_nowait()
    assert [(context.key, context.attempt) for context in (in_thread, on_loop)] == [("key 1", 1), ("key 2", 1)]
    assert threading.current_thread() not in (thread, loop_thread)
    assert thread is not loop_thread
    assert thread.daemon
    outside.start(plain, 3)
    outside.answer()
    assert seen.get_nowait()[1] is thread  # threads are kept


def test_attempts(outside: Outside) -> None:
    outside.start(fails, 2, "ValueError", retry=FAST)
    assert outside.answer() == (1, "done")
    assert [seen.get_nowait() for _ in range(3)] == [1, 2, 3]
    outside.start(fails, 99, "ValueError", retry=Retry(attempts=3, first_wait=timedelta()))
    number, failed = outside.answer()
    assert (number, failed.attempts, failed.type_name, failed.message) == (2, 3, "ValueError", "attempt 3")
    assert "in fails\n" in failed.traceback
    assert "/appsdk/" not in failed.traceback
    outside.start(fails, 99, "KeyError")  # the program's own
    assert outside.answer()[1].attempts == 1
    outside.start(fails, 30, "ValueError", retry=Retry(first_wait=timedelta()))
    assert outside.answer() == (4, "done")
    outside.start(fails, 1, "ValueError")
    assert outside.answer() == (5, "done")


def test_it_gives_up_after_a_time_that_outlives_the_app(outside: Outside) -> None:
    retry = Retry(first_wait=timedelta(seconds=8), give_up_after=timedelta(hours=1))
    request = outside.request(fails, 99, "ValueError", retry=retry)
    request.since_ns = 5
    waits = [request.wait_s(ValueError(), 1, int(now_s * 1e9) + 5) for now_s in (0, 3592, 3593, 9999)]
    assert waits == [8, 8, None, None]
    outside.runner.start(request)  # it was asked for long ago
    assert outside.answer()[1].attempts == 1


def test_what_is_not_tried_again(outside: Outside) -> None:
    outside.start(fails, 99, "ValueError", retry=Retry(on=(ConnectionError, TimeoutError)))
    assert outside.answer()[1].attempts == 1
    outside.start(fails, 1, "TimeoutError", retry=Retry(first_wait=timedelta(), on=(ConnectionError, TimeoutError)))
    assert outside.answer() == (2, "done")
    outside.start(fails, 99, "Known", retry=FAST, raises={"Known": Known})
    assert outside.answer()[1].args == ("attempt 1",)


def test_failed_attempts_are_told_of_now_and_then(outside: Outside) -> None:
    outside.start(fails, 4, "ValueError", retry=FAST)
    outside.answer()
    (said,) = outside.said
    pattern = r"warning: attempt 3 at the effect fails has failed \(ValueError: attempt 3\); the next in (\S+) s\. "
    found = re.match(pattern, said)
    assert found is not None
    assert 0.002 <= float(found[1]) <= 0.004


@pytest.mark.parametrize("function", [raises, raises_in_thread])
@pytest.mark.parametrize(
    ("kind", "type_name"),
    [
        ("exit", "SystemExit"),
        ("cancelled", "CancelledError"),
        ("stop", "RuntimeError"),
        ("interrupt", "KeyboardInterrup"),
    ],
)
def test_what_is_no_exception_fails_too(outside: Outside, function: Any, kind: str, type_name: str) -> None:
    outside.start(function, kind, retry=FAST)
    failed = outside.answer()[1]
    assert isinstance(failed, EffectFailed)
    assert failed.type_name.startswith(type_name)
    outside.start(plain, 1)
    assert outside.answer() == (2, 2)  # the runner goes on


def test_a_result_that_does_not_fit_is_a_failed_attempt(outside: Outside) -> None:
    outside.start(wrong_type, retry=Retry(attempts=2, first_wait=timedelta(), on=(TypeError,)))
    failed = outside.answer()[1]
    assert (failed.type_name, failed.attempts, seen.qsize()) == ("TypeError", 2, 2)
    assert "wrong_type returned a str that can't be kept" in failed.message


def test_timeouts(outside: Outside) -> None:
    short = timedelta(milliseconds=20)
    outside.start(hangs, timeout=short, retry=Retry(attempts=2, first_wait=timedelta()))
    failed = outside.answer()[1]
    assert (failed.type_name, failed.message, failed.attempts) == ("TimeoutError", "nothing returned within 0.02 s", 2)
    assert "await asyncio.Event().wait()" in failed.traceback
    assert [seen.get_nowait() for _ in range(4)] == ["begun", "given up"] * 2
    for number in range(2, 2 + PLACES):
        outside.start(holds, number, timeout=short, retry=Retry(attempts=1))
        assert outside.answer()[1].message == "nothing returned within 0.02 s"
    warnings = [said for said in outside.said if "past its timeout" in said]
    assert len(warnings) == 1
    assert f"one of {PLACES} places" in warnings[0]
    outside.start(plain, 1)  # all places are taken by threads that can't be ended
    assert outside.answers.empty()
    go.set()
    assert outside.answer() == (5, 2)


def test_only_so_many_run_at_once_and_the_rest_in_order(outside: Outside) -> None:
    for number in range(10):
        outside.start(holds, number)
    for _ in range(PLACES):
        seen.get(timeout=WAIT_S)
    assert sorted(running) == [0, 1, 2]
    go.set()
    assert sorted(outside.answer() for _ in range(10)) == [(number + 1, number) for number in range(10)]
    assert max([PLACES, *(seen.get_nowait() for _ in range(seen.qsize()))]) == PLACES


def test_while_it_waits_for_the_next_attempt_it_takes_no_place(outside: Outside) -> None:
    for _ in range(PLACES):
        outside.start(fails, 1, "ValueError", retry=Retry(first_wait=timedelta(hours=1), max_wait=timedelta(hours=1)))
    outside.start(plain, 1)
    assert outside.answer() == (PLACES + 1, 2)


def test_what_nobody_waits_for_any_more(outside: Outside) -> None:
    hanging = outside.start(hangs)
    assert seen.get(timeout=WAIT_S) == "begun"
    cancel(outside, hanging)
    assert seen.get(timeout=WAIT_S) == "given up"
    held = [outside.start(holds, number) for number in range(PLACES)]
    for _ in held:
        seen.get(timeout=WAIT_S)
    queued = outside.start(plain, 1)
    cancel(outside, queued)
    for request in held:
        cancel(outside, request)
    go.set()
    outside.start(plain, 5)
    assert outside.answer() == (PLACES + 3, 6)
    assert outside.answers.empty()


def cancel(outside: Outside, request: EffectRequest) -> None:
    request.is_cancelled = True
    outside.runner.cancel(request)


def test_the_end_waits_for_nobody_for_long() -> None:
    until(lambda: not running)  # what other tests have let go may not have ended yet
    seen.queue.clear()
    go.clear()
    outside = Outside()
    outside.start(hangs)
    outside.start(clings)
    outside.start(holds, 1)
    assert {seen.get(timeout=WAIT_S) for _ in range(3)} == {"begun", 1}
    ended = threading.Thread(target=outside.runner.stop)
    ended.start()
    ended.join(WAIT_S)
    assert not ended.is_alive()
    assert seen.get_nowait() == "given up"
    go.set()
    LocalEffectRunner(1, print).stop()  # one that never ran anything


def test_what_does_not_let_go_may_be_closed_in_another_context(outside: Outside) -> None:
    held = outside.request(waiting, 1).call_async()
    contextvars.copy_context().run(held.send, None)
    held.close()  # as the interpreter does with what is left at its end


ENDS = """
from tests.unit.test_sdk_effect_runner import Outside, clings, seen

def run():
    outside = Outside()
    outside.start(clings)
    seen.get()
    outside.runner.stop()

run()
"""


def test_a_process_ends_silently_whatever_does_not_let_go() -> None:
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", ENDS], cwd=root, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


# --- others in their place --------------------------------------------------------------------------------------------


def test_what_stands_in_for_a_function_is_called_in_its_place_with_its_key(outside: Outside) -> None:
    runner = StubEffectRunner(outside.runner, {plain: instead, waiting: instead})
    for number, function in ((1, plain), (2, waiting)):
        runner.start(outside.request(function, number))
        assert outside.answer() == (number, number + 10)
        assert seen.get(timeout=WAIT_S) == f"key {number}"
    runner.start(outside.request(fails, 0, ""))
    assert outside.answer() == (3, "done")


def test_what_stands_in_for_a_function_returns_what_that_is_declared_to(outside: Outside) -> None:
    runner = StubEffectRunner(outside.runner, {plain: of_another_type})
    runner.start(outside.request(plain, 1))
    _, error = outside.answer()
    assert isinstance(error, EffectFailed)
    assert error.type_name == "TypeError"
    assert error.message.startswith("plain returned a str that can't be kept")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("json", "'json': a function is given as module:function, such as shop:charge"),
        ("json:", "'json:': a function is given as module:function, such as shop:charge"),
        ("jsn:dumps", "'jsn:dumps': there is no module 'jsn'"),
        ("json.x:dumps", "'json.x:dumps': there is no module 'json.x'"),
        ("json:dmps", "'json:dmps': the module has nothing of that name"),
        ("json:JSONDecoder", "'json:JSONDecoder': the module has a type of that name, and no function"),
    ],
)
def test_who_stands_in_has_to_be_a_function(function: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        load_stand_ins({"json:dumps": function})
    assert str(error.value) == said


@pytest.mark.parametrize("text", ["{", "[]", '{"json:dumps": 1}'])
def test_who_stands_in_is_said_in_json(text: str) -> None:
    with pytest.raises(OptionError, match=r"IMMORTAL_EFFECTS=.*: a JSON object was expected, such as"):
        run_options(environment={"IMMORTAL_EFFECTS": text})
