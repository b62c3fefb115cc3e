"""Rules of a queue: which worker gets which task, and when a worker is disabled. No I/O, no clock.

A worker says *ready* and waits. The worker that has waited longest gets the next task. The queue disables a worker

- after some heartbeats without a message from it, whether it waits or works;
- after it has had a task for longer than the task's timeout.

A disabled worker's task goes to the next worker, and its reply is dropped. A worker that still waits is enabled by its
next heartbeat, any other by its next ready. A process that says ready under the ID of another one takes its place.

All durable data is in the :class:`QueueState`; the rest is an index, built again after a recovery.
Times are nanoseconds and never decrease.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from immortal.appsdk.patterns.queue.model import (
    NOTHING,
    RESULT_SIZE_BYTES_MAX,
    SECOND_NS,
    SUPERSEDED,
    Given,
    IndexedPriorityQueue,
    Limit,
    Offer,
    QueueFull,
    QueueState,
    Report,
    Submission,
    Timer,
    Worker,
    check_name,
    check_worker,
    nanoseconds,
)
from immortal.appsdk.patterns.queue.tasks import Rank, Tasks

WORKERS_MAX = 2000  # each sends a heartbeat per second, which is logged
LIMITED_MAX = 1000  # functions with limits
STARTS_MAX = 1000  # of a rate: each start in the period is kept
PERIOD_S_MAX = 24 * 3600.0
SILENT_HEARTBEATS = 5  # missed heartbeats that disable a worker: longer than the pauses of a busy machine
FORGET_NS = 60 * SECOND_NS  # then a disabled worker is removed and its call, which nobody may wait for, ends
LATE_NS = SECOND_NS  # a later timer means that the queue itself was down, which counts against no worker
EXCUSED_NS = 5 * SECOND_NS  # added to that: time for messages sent to it meanwhile to arrive


class Scheduler:
    """Rules over the state of a queue. ``woken``: the numbers of calls and waits that have ended; the service must
    signal and clear them. ``tasks`` answers questions about a task.
    """

    def __init__(self, records: QueueState) -> None:
        self._records = records
        self.woken: list[int] = []
        self._timers: IndexedPriorityQueue[Timer] = IndexedPriorityQueue()
        self.tasks = Tasks(records, self._timers, self.woken)
        self._workers = Workers(records, self._timers, self.woken)

    def next_due_ns(self) -> int | None:
        """Return the time of the next timer for :meth:`advance`; None: there is no timer."""
        found = self._timers.first()
        return None if found is None else found[0]

    # --- clients -----------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission, now_ns: int) -> int:
        """Add a task; see :meth:`Tasks.submit`."""
        with self._advanced_to(now_ns):
            return self.tasks.submit(submission, now_ns)

    # --- workers -----------------------------------------------------------------------------------------------------

    def ready(
        self, worker_id: str, session: str, names: list[str], heartbeat_s: float, report: Report | None, now_ns: int
    ) -> Offer:
        """Process a worker's call for a task, with its report on the last one. ``session``: a secret of its process.

        Raises ValueError, QueueFull.
        """
        self._workers.check(worker_id, session, names, heartbeat_s)
        self.advance(now_ns)
        self._report(worker_id, session, report, now_ns)
        worker = self._records.workers.get(worker_id)
        if worker is not None and worker.session != session:
            self._remove_worker(worker, f"another process has said ready as worker {worker_id!r}", now_ns, SUPERSEDED)
        elif worker is not None:
            self._workers.end_call(worker, NOTHING)
            self._revoke_task(worker, f"worker {worker_id!r} has said ready without a reply", now_ns)
        call = self._workers.ready(worker_id, session, names, heartbeat_s, now_ns)
        self._dispatch(now_ns, names)
        if call in self._records.offers:  # answered at once: no signal is needed
            self.woken.remove(call)
            return self.take_offer(call)
        return Offer(call, waits=True)

    def take_offer(self, call: int) -> Offer:
        """Return the outcome of a worker's call, once."""
        task_id, attempt = offer = self._records.offers.pop(call, NOTHING)
        task = self._records.tasks.get(task_id)
        given = None
        if task is not None and task.state == "running" and task.attempt == attempt:
            given = Given(task.id, task.attempt, task.name, task.arguments)
        return Offer(call, given=given, superseded=offer == SUPERSEDED)

    def withdraw(self, call: int, now_ns: int) -> bool:
        """End a worker's call without a task; return False if its end was signalled already."""
        self.advance(now_ns)
        task_id, _ = self._records.offers.pop(call, NOTHING)
        waited = False
        for worker in list(self._records.workers.values()):
            if worker.call == call or (task_id > 0 and worker.task == task_id):
                waited = worker.call == call
                self._remove_worker(worker, f"the call of worker {worker.id!r} was cancelled", now_ns)
        if waited:
            self.woken.remove(call)
            del self._records.offers[call]
        self._dispatch(now_ns)
        return waited

    def heartbeat(self, worker_id: str, session: str, now_ns: int) -> bool:
        """Note a worker's heartbeat; return False if it is unknown, or has another session."""
        self.advance(now_ns)
        worker = self._workers.get(worker_id, session)
        if worker is not None:
            self._workers.heartbeat(worker, now_ns)
        self._dispatch(now_ns, worker.names if worker is not None and worker.call else ())
        return worker is not None

    def leave(self, worker_id: str, session: str, report: Report | None, now_ns: int) -> None:
        """Remove a worker, with its last report. Without a report, only if it has no task: a task may be on its way to
        it.
        """
        self.advance(now_ns)
        self._report(worker_id, session, report, now_ns)
        worker = self._workers.get(worker_id, session)
        if worker is not None and report is None and worker.task:
            self._workers.heartbeat(worker, now_ns)
        elif worker is not None:
            self._remove_worker(worker, f"worker {worker_id!r} has left without a reply", now_ns)
        self._dispatch(now_ns)

    # --- operators ---------------------------------------------------------------------------------------------------

    def set_limit(self, name: str, limit: Limit, now_ns: int) -> None:
        """Set the limit for each key of a function. Raises ValueError."""
        check_name("function", name)
        if limit.running_max < 0:
            raise ValueError(f"{limit.running_max} running at once: 0 (without limit) or more were expected")
        if not 0 <= limit.starts_max <= STARTS_MAX:
            raise ValueError(f"{limit.starts_max} starts in a period: 0 to {STARTS_MAX} were expected")
        if limit.starts_max and not 0 < limit.period_ns <= nanoseconds(PERIOD_S_MAX):
            raise ValueError(
                f"a period of {limit.period_ns / SECOND_NS:g} s: more than 0 and at most "
                f"{PERIOD_S_MAX:g} s were expected"
            )
        if not limit.starts_max and limit.period_ns:
            raise ValueError("a period without a number of starts: how many may start in it?")
        if name not in self._records.limits and len(self._records.limits) >= LIMITED_MAX:
            raise ValueError(f"{LIMITED_MAX} functions have limits, and no more can: lift another one's first")
        with self._advanced_to(now_ns):
            self.tasks.lanes.set_limit(name, limit, now_ns)

    def retry(self, task_ids: Iterable[int], now_ns: int) -> int:
        """Make dead letters wait again; see :meth:`Tasks.retry`."""
        with self._advanced_to(now_ns):
            return self.tasks.retry(task_ids, now_ns)

    def drop(self, task_ids: Iterable[int], reason: str, now_ns: int) -> int:
        """End open tasks and dead letters; see :meth:`Tasks.drop`."""
        with self._advanced_to(now_ns):
            return self.tasks.drop(task_ids, reason, now_ns)

    # --- time --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _advanced_to(self, now_ns: int) -> Iterator[None]:
        """Do all that is due before a request, and give waiting workers tasks after it."""
        self.advance(now_ns)
        yield
        self._dispatch(now_ns)

    def advance(self, now_ns: int) -> None:
        """Do all that is due by now. It runs before each request, so a late alarm changes no outcome.

        A timer that is very late means that the queue itself was down. That time counts neither as silence of workers
        nor as their work.
        """
        due_ns = self.next_due_ns()
        if due_ns is not None and now_ns - due_ns > LATE_NS:
            late_ns = now_ns - due_ns + EXCUSED_NS
            self._workers.excuse(late_ns, now_ns)
            self.tasks.extend_deadlines(late_ns, now_ns)
        while (found := self._timers.first()) is not None and found[0] <= now_ns:
            (kind, what, key) = timer = found[1]
            self._timers.remove(timer)
            if kind == "delay":
                self.tasks.delay_is_over(int(what))
            elif kind == "timeout":
                task = self._records.tasks[int(what)]
                why = f"no reply to task {task.id} within {task.timeout_ns / SECOND_NS:g} s"
                self._disable(self._records.workers[task.worker], why, now_ns)
            elif kind == "worker":
                worker = self._records.workers[str(what)]
                if worker.disabled:
                    self._remove_worker(worker, "", now_ns)
                elif silent_ns := self._workers.silent_ns(worker, now_ns):
                    self._disable(worker, f"nothing was heard of it for {silent_ns / SECOND_NS:.3g} s", now_ns)
            elif kind == "start":
                self.tasks.lanes.refresh(str(what), key, now_ns)
            else:
                self.tasks.forget_old(now_ns)
        self._dispatch(now_ns)

    # --- workers and their tasks -------------------------------------------------------------------------------------

    def _report(self, worker_id: str, session: str, report: Report | None, now_ns: int) -> None:
        """Process a worker's report. It counts only if the worker has the task now."""
        if report is None:
            return
        worker = self._workers.get(worker_id, session)
        task = self._records.tasks.get(report.task)
        if (
            worker is None
            or task is None
            or task.state != "running"
            or worker.task != task.id
            or task.attempt != report.attempt
        ):
            self._records.late_replies += 1
            return
        worker.task = 0
        if report.error:
            self.tasks.failed(task, report.error, now_ns, again=report.again, pause=True)
        elif len(report.result) > RESULT_SIZE_BYTES_MAX:
            why = (
                f"its result takes {len(report.result)} bytes, at most {RESULT_SIZE_BYTES_MAX} are possible: "
                f"keep it elsewhere, and return where it is"
            )
            self.tasks.failed(task, why, now_ns, again=False)
        else:
            worker.done += 1
            self.tasks.done(task, report.result, now_ns)

    def _disable(self, worker: Worker, why: str, now_ns: int) -> None:
        self._workers.disable(worker, why, now_ns)
        self._revoke_task(worker, f"worker {worker.id!r}: {why}", now_ns)

    def _remove_worker(self, worker: Worker, why: str, now_ns: int, outcome: tuple[int, int] = NOTHING) -> None:
        self._revoke_task(worker, why, now_ns)
        self._workers.forget(worker, outcome)

    def _revoke_task(self, worker: Worker, why: str, now_ns: int) -> None:
        """Take the worker's task away, if it has one, for the next worker."""
        task = self._records.tasks.get(worker.task)
        worker.task = 0
        if task is not None and task.state == "running" and task.worker == worker.id:
            self.tasks.failed(task, why, now_ns)

    def _dispatch(self, now_ns: int, names: Iterable[str] = ()) -> None:
        """Give waiting workers the best tasks. ``names``: functions for which a new worker waits."""
        lanes = self.tasks.lanes
        candidates = sorted(lanes.changed.union(names))
        lanes.changed.clear()
        while candidates:
            best: tuple[Rank, str, Worker] | None = None
            for name in tuple(candidates):
                worker = self._workers.longest_idle(name)
                head = None if worker is None else lanes.first(name, now_ns)
                if worker is None or head is None:
                    candidates.remove(name)
                elif best is None or (head, name) < best[:2]:
                    best = head, name, worker
            if best is not None:
                (_, task_id), _, worker = best
                task = self._records.tasks[task_id]
                self.tasks.start(task, worker.id, now_ns)
                worker.task = task.id
                self._workers.end_call(worker, (task.id, task.attempt))


# Workers known to a queue: those that wait for a task, and those that were silent for too long.
#
# All durable data is in the :class:`QueueState`; the rest is an index of it.


class Workers:
    """Workers of a queue. ``woken``: receives the numbers of calls that have ended."""

    def __init__(self, records: QueueState, timers: IndexedPriorityQueue[Timer], woken: list[int]) -> None:
        self._records = records
        self._timers = timers
        self._woken = woken
        self._idle: dict[str, OrderedDict[str, None]] = {}  # by function: waiting workers, the longest wait first
        for worker in sorted(records.workers.values(), key=lambda one: one.idle_order):
            timers.put(("worker", worker.id, ""), worker.check_ns)
            if worker.call and not worker.disabled:
                self._add_idle(worker)

    def check(self, worker_id: str, session: str, names: list[str], heartbeat_s: float) -> None:
        """Check a worker's data. Raises ValueError, QueueFull."""
        check_worker(worker_id, names, heartbeat_s)
        check_name("session", session)
        if worker_id not in self._records.workers and len(self._records.workers) >= WORKERS_MAX:
            raise QueueFull(f"{WORKERS_MAX} workers are known, and no more can be")

    def get(self, worker_id: str, session: str) -> Worker | None:
        """Return the worker if it has that session, and so is the same process."""
        worker = self._records.workers.get(worker_id)
        return worker if worker is not None and worker.session == session else None

    def ready(self, worker_id: str, session: str, names: list[str], heartbeat_s: float, now_ns: int) -> int:
        """Let a worker wait for a task, and return the number of its call."""
        worker = self._records.workers.get(worker_id)
        if worker is None:
            worker = self._records.workers[worker_id] = Worker(worker_id, session, [], 0, 0, 0)
        worker.names = list(dict.fromkeys(names))
        worker.heartbeat_ns = nanoseconds(heartbeat_s)
        self._records.call += 1
        worker.call = self._records.call
        self._enable(worker, now_ns)
        return worker.call

    def heartbeat(self, worker: Worker, now_ns: int) -> None:
        """Note a heartbeat. A disabled worker that waits for no task stays disabled: another one has its task."""
        if not worker.disabled:
            worker.heard_ns = now_ns  # the timer stays: its end checks this time
        elif worker.call:
            self._enable(worker, now_ns)

    def longest_idle(self, name: str) -> Worker | None:
        """Return the worker with that function that has waited longest; None if none waits."""
        waiting = self._idle.get(name)
        return self._records.workers[next(iter(waiting))] if waiting else None

    def end_call(self, worker: Worker, outcome: tuple[int, int]) -> None:
        """End the call in which the worker waits for a task."""
        self._remove_idle(worker)
        if worker.call:
            self._records.offers[worker.call] = outcome
            self._woken.append(worker.call)
            worker.call = 0

    def silent_ns(self, worker: Worker, now_ns: int) -> int:
        """Return the worker's time of silence if it is too long; else set the timer to check later, and return 0."""
        if worker.heard_ns + self._allowed_silence_ns(worker) <= now_ns:
            return now_ns - worker.heard_ns
        self._set_timer(worker, worker.heard_ns)
        return 0

    def disable(self, worker: Worker, why: str, now_ns: int) -> None:
        worker.disabled = why
        worker.disabled_count += 1
        self._remove_idle(worker)
        self._set_timer(worker, now_ns)

    def forget(self, worker: Worker, outcome: tuple[int, int]) -> None:
        """Remove the worker. ``outcome``: the outcome of the call in which it waits."""
        self.end_call(worker, outcome)
        del self._records.workers[worker.id]
        self._timers.remove(("worker", worker.id, ""))

    def excuse(self, late_ns: int, now_ns: int) -> None:
        for worker in self._records.workers.values():
            worker.heard_ns = min(now_ns, worker.heard_ns + late_ns)
            worker.check_ns = min(now_ns + self._allowed_silence_ns(worker), worker.check_ns + late_ns)
            self._timers.put(("worker", worker.id, ""), worker.check_ns)

    @staticmethod
    def _allowed_silence_ns(worker: Worker) -> int:
        """Return the allowed silence of the worker; for a disabled one the time until it is removed."""
        return FORGET_NS if worker.disabled else SILENT_HEARTBEATS * worker.heartbeat_ns

    def _set_timer(self, worker: Worker, from_ns: int) -> None:
        worker.check_ns = from_ns + self._allowed_silence_ns(worker)
        self._timers.put(("worker", worker.id, ""), worker.check_ns)

    def _enable(self, worker: Worker, now_ns: int) -> None:
        """Enable the worker: it waits after all others that wait."""
        worker.disabled = ""
        worker.heard_ns = now_ns
        self._set_timer(worker, now_ns)
        self._records.idle_order += 1
        worker.idle_order = self._records.idle_order
        self._add_idle(worker)

    def _add_idle(self, worker: Worker) -> None:
        for name in worker.names:
            self._idle.setdefault(name, OrderedDict())[worker.id] = None

    def _remove_idle(self, worker: Worker) -> None:
        for name in worker.names:
            waiting = self._idle.get(name)
            if waiting is not None:
                waiting.pop(worker.id, None)
                if not waiting:
                    del self._idle[name]
