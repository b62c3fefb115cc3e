"""A worker: a plain process that asks a cluster for tasks and gives back their results. It may die at any time."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from immortal.appsdk.calls.run_contexts import RunContexts
from immortal.appsdk.calls.run_failures import interrupts_known
from immortal.appsdk.client import ClientError, NotConnectable, connect, with_timeout
from immortal.appsdk.patterns.harmony.cluster import Cluster
from immortal.appsdk.patterns.harmony.doing import Function, Results, Skill, skills
from immortal.appsdk.patterns.harmony.errors import BatchError
from immortal.appsdk.patterns.harmony.limits import BEAT_S, RUN_S, RUN_SIZE_BYTES_MAX
from immortal.appsdk.patterns.harmony.pace import Pace
from immortal.appsdk.patterns.harmony.runs import Life, Response, Run
from immortal.appsdk.patterns.harmony.saying import complain

TOO_LONG_STATUS = 75  # of a process whose task took longer than it may
_LEAVE_S = 2.0  # for the last word; without it the cluster finds out by itself
_RETRY_S = 1.0  # between two looks for a cluster that is not there


class _Stopped(BaseException):
    """SIGTERM came while the worker waited."""


def worker(
    cluster: str,
    functions: Mapping[str, Function],
    *,
    task_timeout_s: float | None = None,
    name: str | None = None,
    endpoints: Sequence[str] = (),
    home: str | os.PathLike[str] | None = None,
    identity: str | None = None,
    server_keys: Sequence[str] = (),
    insecure: bool = False,
) -> None:
    """Do tasks of the cluster called so, until SIGTERM or Ctrl-C: ``worker("cluster", {"square": square})``.

    ``functions``: by the names that batches say; each takes a task and returns its result. A cluster that is not there
    (yet) is waited for. ``task_timeout_s``: a task that takes longer ends this process, with status 75. ``name``: of
    this worker, a random one unless it is given; no two may have one. The rest as in :func:`appsdk.client.connect`.

    Raises TypeError, ClientError.
    """
    known = skills(functions)
    if task_timeout_s is not None and not task_timeout_s > 0:
        raise TypeError(f"task_timeout_s={task_timeout_s!r}: seconds above 0, or None, were expected")
    life = _Life(name or f"{os.uname().nodename[:64]}-{os.getpid()}-{uuid.uuid4().hex[:8]}", known, task_timeout_s)
    connector = {"home": home, "endpoints": endpoints, "identity": identity, "server_keys": server_keys}
    before = None
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, life.terminate)
    try:
        while not life.stopping:
            try:
                with (
                    interrupts_known(),
                    connect(Cluster, cluster, timeout=None, insecure=insecure, **connector) as proxy,  # type: ignore[arg-type]
                ):
                    life.run(proxy)
            except NotConnectable as error:
                life.say(f"waits for cluster {cluster!r}: {error}")
                life.pause(_RETRY_S)
    except _Stopped:
        pass
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


class _Life:
    def __init__(self, name: str, known: dict[str, Skill], task_timeout_s: float | None) -> None:
        self.name = name
        self.stopping = False
        self._skills = known
        self._contexts = RunContexts()
        self._response: Response | None = None  # what is done and not taken yet
        self._response_of: Life | None = None
        self._paces = {name: Pace() for name in known}
        self._task_timeout_s = task_timeout_s
        self._waits = False
        self._spoke_s = time.monotonic()
        self._began_s: float | None = None  # when the task at work was
        self._said = ""

    def say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            complain(f"worker {self.name}: {text}")

    def terminate(self, number: int, frame: FrameType | None) -> None:
        """The task at work is ended, and its result given back."""
        self.stopping = True
        if self._waits:
            self._waits = False
            raise _Stopped

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """SIGTERM need not wait here."""
        self._waits = True
        try:
            if self.stopping:
                raise _Stopped
            yield
        finally:
            self._waits = False

    def pause(self, seconds: float) -> None:
        with self._waiting():
            time.sleep(seconds)

    def run(self, cluster: Cluster) -> None:
        ended = threading.Event()
        threading.Thread(target=self._beat, args=(cluster, ended), name="beats", daemon=True).start()
        try:
            while not self.stopping:
                run = self._ask(cluster, {name: pace.limit for name, pace in self._paces.items()})
                if run is not None:
                    self._do(cluster, run)
                    continue
                waits: Any = cluster  # to a checker something to await
                with self._waiting():
                    waits.idle(self.name, list(self._skills))
            self._ask(cluster, {})
        finally:
            ended.set()
            with suppress(ClientError):
                with_timeout(cluster, _LEAVE_S).leave(self.name)

    def _ask(self, cluster: Cluster, limits: dict[str, int]) -> Run | None:
        """Give what is done, and ask for more. What was not taken is given again, also to who is connected next."""
        try:
            with self._waiting():
                run = cluster.work(self.name, limits, self._response, self._response_of)
        except BatchError as error:
            self.say(f"{error}; these results are dropped")
            run = None
        self._response = None
        self._spoke_s = time.monotonic()
        return run

    def _do(self, cluster: Cluster, run: Run) -> None:
        skill = self._skills[run.function]
        results = Results(run.batch, run.first)
        self._response_of = run.life
        function, count = skill.function, 0
        began_s = self._spoke_s = time.monotonic()
        for task in skill.tasks(run):
            self._began_s = time.monotonic()
            if self._began_s - self._spoke_s >= 2 * RUN_S or results.size_bytes >= RUN_SIZE_BYTES_MAX:
                self._response = results.take()
                self._ask(cluster, {})
            self._contexts.run(results.do, function, task)
            self._began_s = None
            count += 1
            if self.stopping:
                break
        self._paces[run.function].took(count, time.monotonic() - began_s)
        self._response = results.take()

    def _beat(self, cluster: Cluster, ended: threading.Event) -> None:
        """Beside the tasks: a word for the cluster now and then, an end for a task that takes too long."""
        while not ended.wait(BEAT_S / 2):
            now_s, began_s = time.monotonic(), self._began_s
            if began_s is not None and self._task_timeout_s is not None and now_s - began_s > self._task_timeout_s:
                self.say(f"a task takes longer than {self._task_timeout_s:g} s: the process ends")
                os._exit(TOO_LONG_STATUS)
            if began_s is not None and now_s - self._spoke_s >= BEAT_S:
                with suppress(ClientError):
                    with_timeout(cluster, BEAT_S).work(self.name, {})
