"""Runner of effects in the app's process, in threads or on an asyncio loop; and stand-ins for effects.

Each attempt waits for a place in order, runs and answers, or gives its place to others until the next attempt. A
``def`` goes from the handlers' thread straight to the thread that runs it, and its result back from there: no third
thread is woken. All threads are daemons: the process never waits for them, whatever the user's code does. The loop is
created when the first effect needs it.
"""

from __future__ import annotations

import importlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from immortal.appsdk.calls.user_code import is_user_failure
from immortal.appsdk.effects.effect import EffectRequest, EffectRunner, encodable
from immortal.appsdk.errors import UsageError

if TYPE_CHECKING:
    from immortal.appsdk.effects.loop import EffectLoop


REPORT_INTERVAL_S = 10.0  # between two lines about failed attempts of one function
REPORT_FROM_ATTEMPT = 3  # the first ones are not shown: if the next attempt succeeds, nobody needs to know


@dataclass(slots=True, eq=False)
class _Attempt:
    """Attempt at an effect. ``number`` counts from 1. ``is_over``: an attempt with a timeout has ended. ``is_due``: an
    attempt after another one no longer waits for its time."""

    request: EffectRequest
    number: int
    is_due: bool = False
    is_over: bool = False

    @property
    def timeout_s(self) -> float | None:
        timeout = self.request.options.timeout
        return None if timeout is None else timeout.total_seconds()


class LocalEffectRunner:
    """EffectRunner of an app's process. ``places``: how many attempts run at once. ``warn``: called by any thread with
    texts for people. ``now_ns``: returns the instance's time."""

    def __init__(self, places: int, warn: Callable[[str], None], now_ns: Callable[[], int] = time.time_ns) -> None:
        self._now_ns = now_ns
        self._random = random.Random()  # noqa: S311 (spreads attempts; nothing of it is in a log)
        self._places_count = self._free_count = places
        self._warn = warn
        self._warned: set[str] = set()
        self._quiet_until_s: dict[str, float] = {}  # by name
        self._lock = threading.Lock()
        self._waiting: deque[_Attempt] = deque()  # for a place
        self._is_stopped = False
        self._threads = Threads(places, self._run_in_thread)
        self._loop: EffectLoop | None = None

    # --- the handlers' thread -----------------------------------------------------------------------------------------

    def start(self, request: EffectRequest) -> None:
        self._start_when_free(_Attempt(request, 1))

    def cancel(self, request: EffectRequest) -> None:
        if self._loop is not None and not request.is_done:
            self._loop.cancel(request)

    def stop(self) -> None:
        """Cancel all effects, and wait for them for a moment: the app ends."""
        with self._lock:
            self._is_stopped = True
            self._waiting.clear()
        self._threads.clear()
        if self._loop is not None:
            self._loop.stop()

    # --- places: any thread -------------------------------------------------------------------------------------------

    def _start_when_free(self, attempt: _Attempt) -> None:
        with self._lock:
            if not self._free_count:
                self._waiting.append(attempt)
                return
            self._free_count -= 1
        self._run(attempt)

    def _release_place(self) -> None:
        """Give the place to the attempt that has waited longest."""
        with self._lock:
            following = None
            while self._waiting and following is None:
                first = self._waiting.popleft()
                following = None if first.request.is_cancelled else first
            if following is None:
                self._free_count += 1
        if following is not None:
            self._run(following)

    def _run(self, attempt: _Attempt) -> None:
        attempt.request.attempt = attempt.number
        if attempt.request.is_async:
            run = partial(self._run_on_loop, attempt)
            self._use_loop().run(attempt.request, run, attempt.request.new_context())
        else:
            self._threads.add(attempt)

    def _use_loop(self) -> EffectLoop:
        with self._lock:
            if self._loop is None:
                from immortal.appsdk.effects.loop import EffectLoop

                self._loop = EffectLoop()
            return self._loop

    # --- a thread, or the loop ----------------------------------------------------------------------------------------

    def _run_in_thread(self, attempt: _Attempt) -> None:
        try:
            if not attempt.request.is_cancelled and not self._is_stopped:
                self._call(attempt)
        finally:
            self._release_place()

    def _call(self, attempt: _Attempt) -> None:
        request, timeout_s = attempt.request, attempt.timeout_s
        if timeout_s is not None:
            self._use_loop().call_later(timeout_s, request, partial(self._expire, attempt))
        value: object = None
        error: BaseException | None = None
        try:
            value = request.call(attempt.number)
        except StopIteration as raised:  # Python makes a RuntimeError of it in an 'async def'
            error = RuntimeError(f"it raised {raised!r}")
        except BaseException as raised:  # nobody else would see it in this thread
            error = raised
        if timeout_s is not None:
            if not self._mark_over(attempt):
                return
            self._use_loop().cancel(request)
        self._answer(attempt, value, error)

    async def _run_on_loop(self, attempt: _Attempt) -> None:
        import asyncio  # the loop exists, so it is imported

        request, timeout_s, task = attempt.request, attempt.timeout_s, asyncio.current_task()
        value: object = None
        error: BaseException | None = None
        try:
            if timeout_s is None:
                value = await request.call_async(attempt.number)
            else:
                async with asyncio.timeout(timeout_s) as timeout:
                    value = await request.call_async(attempt.number)
        except BaseException as raised:
            if isinstance(raised, GeneratorExit) and self._is_stopped:  # the loop has ended
                raise
            error = raised
            if isinstance(raised, TimeoutError) and timeout_s is not None and timeout.expired():
                error = _timeout_error(timeout_s)
                error.__cause__ = raised  # where it waited is useful to know
        if not (task and task.cancelling()):  # by us: nobody waits for it any more
            self._answer(attempt, value, error)
        self._release_place()

    def _mark_over(self, attempt: _Attempt) -> bool:
        """Mark an attempt as over; return False if it was over before."""
        with self._lock:
            was_over, attempt.is_over = attempt.is_over, True
        return not was_over

    def _expire(self, attempt: _Attempt) -> None:
        """Time out an attempt. It keeps its place: its thread continues."""
        timeout_s = attempt.timeout_s
        if timeout_s is not None and self._mark_over(attempt):
            self._warn_of_timeout(attempt.request.name)
            self._answer(attempt, None, _timeout_error(timeout_s))

    def _answer(self, attempt: _Attempt, value: object, error: BaseException | None) -> None:
        request = attempt.request
        if error is None:
            try:
                request.returned(value)
                return
            except BaseException as problem:  # the result does not fit its annotation
                if not is_user_failure(problem):
                    raise
                error = problem
        if request.is_cancelled or self._is_stopped:
            return
        wait_s = request.wait_s(error, attempt.number, self._now_ns())
        if wait_s is None:
            request.raised(error, attempt.number)
            return
        wait_s *= self._random.uniform(0.5, 1)  # else all attempts that failed with a service return at once
        request.failure = f"{type(error).__name__}: {encodable(error)}"
        self._report_retry(request.name, attempt.number, request.failure, wait_s)
        following = _Attempt(request, attempt.number + 1)
        self._use_loop().call_later(wait_s, request, partial(self._retry, following))
        request.try_now = partial(self._try_now, following)

    def _retry(self, attempt: _Attempt) -> None:
        if self._mark_due(attempt):
            self._start_when_free(attempt)

    def _try_now(self, attempt: _Attempt) -> bool:
        """Begin an attempt now, in the handlers' thread; return False if it is due already."""
        if not self._mark_due(attempt):
            return False
        self._use_loop().cancel(attempt.request)  # its timer; the loop executes requests in order
        self._start_when_free(attempt)
        return True

    def _mark_due(self, attempt: _Attempt) -> bool:
        """Mark an attempt as due; return False if it was due before."""
        with self._lock:
            was_due, attempt.is_due = attempt.is_due, True
        return not was_due

    # --- warnings for people ------------------------------------------------------------------------------------------

    def _report_retry(self, name: str, attempt: int, failure: str, wait_s: float) -> None:
        if attempt < REPORT_FROM_ATTEMPT:
            return
        now_s = time.monotonic()
        with self._lock:
            is_quiet = now_s < self._quiet_until_s.get(name, 0.0)
            if not is_quiet:
                self._quiet_until_s[name] = now_s + REPORT_INTERVAL_S
        if not is_quiet:
            self._warn(
                f"warning: attempt {attempt} at the effect {name} has failed ({failure}); the next in {wait_s:.3g} s. "
                f"'immortal handlers' shows what waits for it"
            )

    def _warn_of_timeout(self, name: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            self._warn(
                f"warning: the effect {name} is past its timeout, and its thread goes on, since no thread can be ended "
                f"from outside: it takes one of {self._places_count} places until it ends by itself; give what it "
                f"waits for a timeout of its own"
            )


def _timeout_error(timeout_s: float) -> TimeoutError:
    return TimeoutError(f"nothing returned within {timeout_s:g} s")


# Threads that take work in order. If no thread is free, a new one is started for the work.
#
# A woken thread must wait for the interpreter, which the running thread keeps for about 0.5 ms. So only one thread is
# woken at a time. If the work only computes and is done by then, the running thread does all of it. If it waits, it
# releases the interpreter at once, to the thread that takes the next piece and wakes one more.


W = TypeVar("W")


class Threads(Generic[W]):
    """Pool of at most ``count`` daemon threads, which never end. They call ``run`` with each piece of work."""

    def __init__(self, count: int, run: Callable[[W], None]) -> None:
        self._count = count
        self._run = run
        self._lock = threading.Lock()
        self._work: deque[W] = deque()
        self._idle: list[SimpleQueue[None]] = []  # bells of idle threads; the last one is used first: it is still warm
        self._threads_count = 0
        self._is_waking = False  # a thread was woken or started, and has not checked yet

    def add(self, work: W) -> None:
        """Queue a piece of work, from any thread; returns at once."""
        with self._lock:
            self._work.append(work)
            self._wake_one()

    def clear(self) -> None:
        """Drop all work that no thread has begun."""
        with self._lock:
            self._work.clear()

    def _wake_one(self) -> None:
        if self._is_waking:
            return  # it calls the next one
        if self._idle:
            self._is_waking = True
            self._idle.pop().put(None)
        elif self._threads_count < self._count:
            try:
                threading.Thread(target=self._serve, name="effect", daemon=True).start()
            except RuntimeError:  # no more threads: the existing ones take it when they are free
                if not self._threads_count:
                    raise
            else:
                self._threads_count += 1
                self._is_waking = True

    def _serve(self) -> None:
        bell: SimpleQueue[None] = SimpleQueue()
        is_woken = True
        while True:
            with self._lock:
                if is_woken:
                    self._is_waking = is_woken = False
                work = self._work.popleft() if self._work else None
                if work is None:
                    self._idle.append(bell)
                elif self._work:
                    self._wake_one()
            if work is None:
                bell.get()
                is_woken = True
            else:
                self._run(work)
                del work  # must not be kept until there is more


# Stand-ins for functions that work in the outside world, while a service is developed.
#
#     IMMORTAL_EFFECTS='{"shop:charge": "fakes:charge"}'
#
# in the environment of the app; `immortal dev` takes it from ``immortal.toml``. Tests have their own way
# (:mod:`immortal.appsdk.testing.outside`).


class StubEffectRunner:
    """EffectRunner that replaces functions by their ``stand_ins``, and gives the requests to ``runner``."""

    def __init__(self, runner: EffectRunner, stand_ins: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        self._runner = runner
        self._stand_ins = stand_ins

    def start(self, request: EffectRequest) -> None:
        request.stand_in = self._stand_ins.get(request.function)
        self._runner.start(request)

    def cancel(self, request: EffectRequest) -> None:
        self._runner.cancel(request)


def load_stand_ins(names: Mapping[str, str]) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Load stand-ins: "module:function" by "module:function". Raises UsageError, and what an import raises."""
    return {_load(function): _load(stand_in) for function, stand_in in names.items()}


def _load(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name.isidentifier():
        raise UsageError(f"{name!r}: a function is given as module:function, such as shop:charge")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that the module imports
        raise UsageError(f"{name!r}: there is no module {error.name!r}") from None
    found = getattr(module, function_name, None)
    if not callable(found) or isinstance(found, type):
        what = "nothing of that name" if found is None else f"a {type(found).__name__} of that name, and no function"
        raise UsageError(f"{name!r}: the module has {what}")
    function: Callable[..., Any] = found
    return function
