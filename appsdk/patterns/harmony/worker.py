"""Worker: a plain process that takes tasks from a cluster and returns results; WorkerProcesses keeps several alive."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Unpack

import msgspec

from immortal.appsdk.calls.codec import ValueDecoder, encode_value, resolve_hints
from immortal.appsdk.calls.failures import text_of
from immortal.appsdk.calls.user_code import RunContexts, is_user_failure, mark_interrupts
from immortal.appsdk.client import ClientError, NotConnectable, ReachOptions, connect, with_timeout
from immortal.appsdk.patterns.harmony.batch import (
    BEAT_S,
    REASON_SIZE_CHARS_MAX,
    RUN_S,
    RUN_SIZE_BYTES_MAX,
    RUN_TASKS_MAX,
    TASK_SIZE_BYTES_MAX,
    BatchError,
    Life,
    Response,
    Run,
    array,
    split,
)
from immortal.appsdk.patterns.harmony.cluster import Cluster
from immortal.protocol.command_line import echo

TOO_LONG_STATUS = 75  # exit status of a process whose task exceeded its time limit
_LEAVE_S = 2.0  # for the last message; without it the cluster detects the end by itself
_RETRY_S = 1.0  # between two attempts to reach a cluster
# A worker requests as many tasks as it does in RUN_S, by its measured pace.
_FIRST_TASKS = 8
_GROWTH = 8  # limit from one run to the next: a few quick tasks prove little


class _Stopped(BaseException):
    """Raised if SIGTERM arrives while the worker waits."""


def worker(
    cluster: str,
    functions: Mapping[str, Function],
    *,
    task_timeout_s: float | None = None,
    name: str | None = None,
    **options: Unpack[ReachOptions],
) -> None:
    """Do tasks of the named cluster until SIGTERM or Ctrl-C: ``worker("cluster", {"square": square})``.

    ``functions``: by the names in batches; each takes a task and returns its result. The worker waits for a cluster
    that is unreachable. ``task_timeout_s``: a longer task ends this process, with status 75. ``name``: of this worker,
    unique; by default a random one. The rest as in :func:`immortal.client.connect`.

    Raises TypeError, ClientError.
    """
    known = task_functions(functions)
    if task_timeout_s is not None and not task_timeout_s > 0:
        raise TypeError(f"task_timeout_s={task_timeout_s!r}: seconds above 0, or None, were expected")
    life = _Life(name or f"{os.uname().nodename[:64]}-{os.getpid()}-{uuid.uuid4().hex[:8]}", known, task_timeout_s)
    connector = connect(Cluster, cluster, timeout=None, **options)
    before = None
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, life.terminate)
    try:
        while not life.stopping:
            try:
                with mark_interrupts(), connector as proxy:
                    life.run(proxy)
            except NotConnectable as error:
                life.report(f"waits for cluster {cluster!r}: {error}")
                life.pause(_RETRY_S)
    except _Stopped:
        pass
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


class _Life:
    def __init__(self, name: str, known: dict[str, TaskFunction], task_timeout_s: float | None) -> None:
        self.name = name
        self.stopping = False
        self._functions = known
        self._contexts = RunContexts()
        self._response: Response | None = None  # results that the cluster has not taken yet
        self._response_life: Life | None = None
        self._limits = dict.fromkeys(known, _FIRST_TASKS)  # of tasks to request, by function
        self._task_timeout_s = task_timeout_s
        self._is_waiting = False
        self._last_contact_s = time.monotonic()
        self._task_started_s: float | None = None  # start of the present task
        self._reported = ""

    def report(self, text: str) -> None:
        if text != self._reported:
            self._reported = text
            echo(f"worker {self.name}: {text}", err=True)

    def terminate(self, number: int, frame: FrameType | None) -> None:
        """End after the present task and return its result, on SIGTERM."""
        self.stopping = True
        if self._is_waiting:
            self._is_waiting = False
            raise _Stopped

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Let SIGTERM interrupt the block at once."""
        self._is_waiting = True
        try:
            if self.stopping:
                raise _Stopped
            yield
        finally:
            self._is_waiting = False

    def pause(self, seconds: float) -> None:
        with self._waiting():
            time.sleep(seconds)

    def run(self, cluster: Cluster) -> None:
        ended = threading.Event()
        threading.Thread(target=self._beat, args=(cluster, ended), name="beats", daemon=True).start()
        try:
            while not self.stopping:
                run = self._exchange_work(cluster, self._limits)
                if run is not None:
                    self._execute_run(cluster, run)
                    continue
                waits: Any = cluster  # to a type checker its handlers are awaitable
                with self._waiting():
                    waits.idle(self.name, list(self._functions))
            self._exchange_work(cluster, {})
        finally:
            ended.set()
            with suppress(ClientError):
                with_timeout(cluster, _LEAVE_S).leave(self.name)

    def _exchange_work(self, cluster: Cluster, limits: dict[str, int]) -> Run | None:
        """Send results, and request more tasks. Results that were not taken are sent again, also on the next
        connection.
        """
        try:
            with self._waiting():
                run = cluster.work(self.name, limits, self._response, self._response_life)
        except BatchError as error:
            self.report(f"{error}; these results are dropped")
            run = None
        self._response = None
        self._last_contact_s = time.monotonic()
        return run

    def _execute_run(self, cluster: Cluster, run: Run) -> None:
        skill = self._functions[run.function]
        results = Results(run.batch, run.first)
        self._response_life = run.life
        function, count = skill.function, 0
        began_s = self._last_contact_s = time.monotonic()
        for task in skill.tasks(run):
            self._task_started_s = time.monotonic()
            if self._task_started_s - self._last_contact_s >= 2 * RUN_S or results.size_bytes >= RUN_SIZE_BYTES_MAX:
                self._response = results.drain()
                self._exchange_work(cluster, {})
            self._contexts.run(results.execute, function, task)
            self._task_started_s = None
            count += 1
            if self.stopping:
                break
        fits = int(RUN_S * count / max(time.monotonic() - began_s, 1e-6))
        self._limits[run.function] = max(1, min(fits, self._limits[run.function] * _GROWTH, RUN_TASKS_MAX))
        self._response = results.drain()

    def _beat(self, cluster: Cluster, ended: threading.Event) -> None:
        """Send heartbeats during the tasks, and end the process if a task takes too long."""
        while not ended.wait(BEAT_S / 2):
            now_s, began_s = time.monotonic(), self._task_started_s
            if began_s is not None and self._task_timeout_s is not None and now_s - began_s > self._task_timeout_s:
                self.report(f"a task takes longer than {self._task_timeout_s:g} s: the process ends")
                os._exit(TOO_LONG_STATUS)
            if began_s is not None and now_s - self._last_contact_s >= BEAT_S:
                with suppress(ClientError):
                    with_timeout(cluster, BEAT_S).work(self.name, {})


# Tasks and results: the functions of a worker. No I/O but that of the functions, no clock.


Function = Callable[[Any], Any]
_NIL = b"\xc0"


class TaskFunction:
    """Function of a worker. Tasks are checked against the annotation of its parameter, if it has one.

    Its constructor raises TypeError for a function that can't take one task.
    """

    def __init__(self, name: str, function: Function) -> None:
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise TypeError(f"{name!r}: a function of one task was expected, not {function!r}")
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except ValueError:  # a built-in function without a signature
            parameters = []
        hint: Any = Any
        if parameters and parameters[0].annotation is not inspect.Parameter.empty:
            hint = resolve_hints(function)[parameters[0].name]
        try:
            self._task_decoder = ValueDecoder(hint)
            self._tasks_decoder = ValueDecoder(list[hint])
        except TypeError as error:
            raise TypeError(f"{name!r}: tasks of type {hint!r} can't be sent: {error}") from None
        self.function = function

    def tasks(self, run: Run) -> Sequence[Any]:
        """Decode the tasks of a run; an :class:`InvalidTask` replaces each that does not fit."""
        try:
            found: list[Any] = self._tasks_decoder.decode(run.tasks)
        except BaseException as error:  # one of them does not fit
            if not is_user_failure(error):
                raise
            return [self._task(raw) for raw in split(run.tasks)]
        return found

    def _task(self, raw: msgspec.Raw) -> Any:
        try:
            return self._task_decoder.decode(raw)
        except BaseException as error:
            if not is_user_failure(error):
                raise
            return InvalidTask(f"the task is not what the function takes: {text_of(error)}")


class InvalidTask(str):
    """Why a task does not fit the function's annotation. No task is decoded as one."""

    __slots__ = ()


def task_functions(functions: Mapping[str, Function]) -> dict[str, TaskFunction]:
    """Return the functions by name. Raises TypeError."""
    if not isinstance(functions, Mapping) or not functions:
        raise TypeError(f'{functions!r}: functions by name were expected, such as {{"square": square}}')
    return {name: TaskFunction(name, function) for name, function in functions.items()}


class Results:
    """Results of consecutive tasks of a run, until they are sent."""

    def __init__(self, batch: str, first: int) -> None:
        self._batch = batch
        self._first = first
        self._values: list[bytes] = []
        self._failures: dict[int, str] = {}
        self.size_bytes = 0

    @property
    def count(self) -> int:
        return len(self._values)

    def execute(self, function: Function, task: Any) -> None:
        """Do a task. An exception is a result too: the task would raise it again."""
        try:
            if isinstance(task, InvalidTask):
                raise TypeError(task)
            value = encode_value(function(task))
            if len(value) > TASK_SIZE_BYTES_MAX:
                raise ValueError(f"a result of {len(value)} bytes, at most {TASK_SIZE_BYTES_MAX} were expected")
        except BaseException as error:
            if not is_user_failure(error):
                raise
            reason = f"{type(error).__name__}: {text_of(error)}"
            self._failures[self._first + self.count] = reason[:REASON_SIZE_CHARS_MAX]
            value = _NIL
        self._values.append(value)
        self.size_bytes += len(value)

    def drain(self) -> Response:
        """Return and clear the results so far; the next results follow them."""
        response = Response(self._batch, self._first, self.count, array(self._values), self._failures)
        self._first += self.count
        self._values, self._failures, self.size_bytes = [], {}, 0
        return response


# Several worker processes of one machine: a death is reported to the cluster at once, and a new process follows.


USAGE_STATUS = 2  # of a process that would end like this at each start
_PAUSE_MIN_S, _PAUSE_MAX_S = 0.1, 5.0
_SHORT_LIFE_S = 5.0  # after shorter lives the pauses before restarts grow
_TELL_S = 2.0


class WorkerProcesses:
    """Worker processes of one command, restarted when they die. ``arguments``: of the command, for one process. Raises
    NotConnectable.
    """

    def __init__(self, cluster: str, arguments: Sequence[str], processes: int) -> None:
        self._cluster = cluster
        self._command = [sys.executable, "-m", "immortal.appsdk.patterns.harmony", "work", cluster, *arguments]
        self._ending = threading.Event()
        self._lock = threading.RLock()  # a signal handler can run while its thread has the lock
        self._alive: set[subprocess.Popen[bytes]] = set()
        self._places = [
            threading.Thread(target=self._keep_running, name=f"place {index}") for index in range(processes)
        ]
        self._status = 0

    def run(self) -> int:
        """Run the processes until :meth:`end`, or until a worker reports that it can't run. Returns the exit status."""
        for place in self._places:
            place.start()
        try:
            for place in self._places:
                place.join()
        finally:
            self.end()
            for place in self._places:
                place.join()
        return self._status

    def end(self) -> None:
        """End the workers after their present tasks. A second call kills them, as one can hang: other workers do the
        tasks.
        """
        with self._lock:
            again = self._ending.is_set()
            self._ending.set()
            for process in self._alive:
                if again:
                    process.kill()
                else:
                    process.terminate()

    def _keep_running(self) -> None:
        pause_s = _PAUSE_MIN_S
        while not self._ending.is_set():
            name = f"worker-{uuid.uuid4().hex[:16]}"
            began_s = time.monotonic()
            with self._lock:
                if self._ending.is_set():
                    return
                process = subprocess.Popen([*self._command, "--name", name])
                self._alive.add(process)
            status = process.wait()
            with self._lock:
                self._alive.discard(process)
            if status == USAGE_STATUS:
                self._status = status
                self.end()
            if self._ending.is_set():
                return
            echo(f"harmony: {name} has ended with status {status}, another takes its place", err=True)
            with suppress(ClientError), connect(Cluster, self._cluster) as cluster:  # or it notices the silence
                with_timeout(cluster, _TELL_S).leave(name, died=True)
            short = time.monotonic() - began_s < _SHORT_LIFE_S
            pause_s = min(2 * pause_s, _PAUSE_MAX_S) if short else _PAUSE_MIN_S
            self._ending.wait(pause_s)
