"""Queue as an instance: ``immortal run jobs immortal.patterns.queue:Queue``. The scheduler has its rules."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import immortal
from immortal.appsdk.errors import Cancelled
from immortal.appsdk.handlers.decorators import initial, query, rpc
from immortal.appsdk.immortal import Immortal
from immortal.appsdk.patterns.queue.model import (
    WAIT_S_MAX,
    DedupConflict,
    FunctionView,
    Given,
    Limit,
    NotPossible,
    Offer,
    Outcome,
    Overview,
    QueueFull,
    QueueState,
    Report,
    State,
    Submission,
    Superseded,
    Task,
    TaskDetail,
    TaskView,
    UnknownTask,
    Worker,
    WorkerView,
    nanoseconds,
)
from immortal.appsdk.patterns.queue.scheduler import Scheduler
from immortal.appsdk.state.schema import Transient

ALARMS_MAX = 100  # alarms in one journal of the handler that waits for them
SHOWN_MAX = 1000  # tasks in one answer
_ALARM = "alarm"
_LOOKS = -1  # instead of the alarm's time: the alarm handler is about to check what is due


ROLES = {
    "submitter": ["submit", "wait", "task"],
    "worker": ["ready", "heartbeat", "leave"],
    "reader": ["overview", "task"],
    "administrator": ["limit", "retry", "drop", "overview", "task"],
}
"""Roles of callers. All other handlers are steps of these, and only the queue itself may call them."""


class Queue(Immortal, roles=ROLES):
    """Durable queue of clients' tasks for workers: `docs/patterns/queue.md`. Clients and workers use the functions of
    this package.
    """

    records: QueueState
    alarm_ns: int  # time of the alarm; 0: it is not set
    scheduler: Transient[Scheduler]

    def __init__(self) -> None:
        self.records = QueueState()
        self.alarm_ns = _LOOKS

    def prepare(self) -> None:
        self.scheduler = Scheduler(self.records)

    # --- clients -----------------------------------------------------------------------------------------------------

    @rpc(raises=[QueueFull, DedupConflict])
    def submit(self, submission: Submission) -> int:
        """Add a task and return its ID."""
        with self._now() as now_ns:
            return self.scheduler.submit(submission, now_ns)

    @rpc(raises=[UnknownTask])
    async def wait(self, task: int, seconds: float) -> Outcome:
        """Return the task's state once it has ended, or after ``seconds`` (at most 20)."""
        outcome = await immortal.step(self.look, task, seconds > 0)
        if not outcome.wait:
            return outcome
        was_signalled = False
        try:
            duration = timedelta(seconds=min(seconds, WAIT_S_MAX))
            was_signalled = (
                await immortal.race(immortal.event(_call(outcome.wait)), immortal.sleep(duration))
            ).index == 0
        finally:
            if not was_signalled and not await immortal.step(self.look_no_more, task, outcome.wait):
                await immortal.event(_call(outcome.wait))  # the signal came at the same moment, and would be kept
        return await immortal.step(self.look, task, False)

    @rpc(raises=[UnknownTask])
    def look(self, task: int, wait: bool) -> Outcome:
        return self.scheduler.tasks.outcome(task, wait=wait)

    @rpc
    def look_no_more(self, task: int, number: int) -> bool:
        return self.scheduler.tasks.forget_wait(task, number)

    # --- workers -----------------------------------------------------------------------------------------------------

    @rpc(raises=[Superseded, QueueFull, ValueError])
    async def ready(
        self, worker: str, session: str, functions: list[str], heartbeat_s: float, report: Report | None
    ) -> Given | None:
        """Wait for a task for a worker; ``report``: its last task's reply. Returns None: the worker must ask again."""
        offer = await immortal.step(self.say_ready, worker, session, functions, heartbeat_s, report)
        if offer.waits:
            try:
                await immortal.event(_call(offer.call))
            except Cancelled:
                if not await immortal.step(self.withdraw, offer.call):
                    await immortal.event(_call(offer.call))  # the signal came at the same moment, and would be kept
                raise
            offer = await immortal.step(self.take_offer, offer.call)
        if offer.superseded:
            raise Superseded(
                f"another process has said ready as worker {worker!r}: give each worker an ID of its own, or none"
            )
        return offer.given

    @rpc(raises=[QueueFull, ValueError])
    def say_ready(
        self, worker: str, session: str, functions: list[str], heartbeat_s: float, report: Report | None
    ) -> Offer:
        with self._now() as now_ns:
            return self.scheduler.ready(worker, session, functions, heartbeat_s, report, now_ns)

    @rpc
    def take_offer(self, call: int) -> Offer:
        return self.scheduler.take_offer(call)

    @rpc
    def withdraw(self, call: int) -> bool:
        with self._now() as now_ns:
            return self.scheduler.withdraw(call, now_ns)

    @rpc
    def heartbeat(self, worker: str, session: str) -> bool:
        """Note a worker's sign of life, at work or not. Returns False if it is unknown, and must say ready."""
        with self._now() as now_ns:
            return self.scheduler.heartbeat(worker, session, now_ns)

    @rpc
    def leave(self, worker: str, session: str, report: Report | None) -> None:
        """Remove a worker, with its last reply."""
        with self._now() as now_ns:
            self.scheduler.leave(worker, session, report, now_ns)

    # --- operators ---------------------------------------------------------------------------------------------------

    @rpc(raises=[ValueError])
    def limit(self, function: str, running: int, starts: int, seconds: float) -> None:
        """Limit each key of a function: ``running`` tasks at once, ``starts`` in any ``seconds``. 0: no limit."""
        with self._now() as now_ns:
            self.scheduler.set_limit(function, Limit(running, starts, nanoseconds(seconds)), now_ns)

    @rpc(raises=[UnknownTask, NotPossible])
    def retry(self, tasks: list[int] | None) -> int:
        """Make dead letters wait again (None: all of them), and return their number."""
        with self._now() as now_ns:
            return self.scheduler.retry(self._dead() if tasks is None else tasks, now_ns)

    @rpc(raises=[UnknownTask, NotPossible])
    def drop(self, tasks: list[int] | None, reason: str) -> int:
        """End open tasks or dead letters (None: all dead letters) without a result, and return their number."""
        with self._now() as now_ns:
            return self.scheduler.drop(self._dead() if tasks is None else tasks, reason, now_ns)

    @query
    def overview(self, state: State) -> Overview:
        return _overview(self.records, state, immortal.now_ns())

    @query(raises=[UnknownTask])
    def task(self, task: int) -> TaskDetail:
        one = self.scheduler.tasks.get(task)
        counts = one.tries, one.tries_left, one.timeout_ns
        return TaskDetail(_task_view(one), one.arguments, one.result, one.failures, *counts)

    def _dead(self) -> list[int]:
        return [task.id for task in self.records.tasks.values() if task.state == "dead"]

    # --- time --------------------------------------------------------------------------------------------------------

    @initial
    def begin(self) -> None:
        self.alarm.fork()

    @rpc(limit=1)
    async def alarm(self) -> None:
        """Sleep until something is due, then do it, in an endless loop."""
        for _ in range(ALARMS_MAX):
            try:
                sleep_ns = await immortal.step(self.advance)
                if sleep_ns:
                    duration = timedelta(microseconds=-(-sleep_ns // 1000))
                    await immortal.race(immortal.event(_ALARM), immortal.sleep(duration))
                else:
                    await immortal.event(_ALARM)
            except Cancelled:
                continue  # without this handler no timer would ever fire
        immortal.continue_as()

    @rpc
    def advance(self) -> int:
        """Do all that is due, and return the nanoseconds until the next timer; 0: there is no timer."""
        now_ns = immortal.now_ns()
        self.alarm_ns = _LOOKS
        self.scheduler.advance(now_ns)
        self._signal_waiters()
        self.alarm_ns = self.scheduler.next_due_ns() or 0
        return max(1, self.alarm_ns - now_ns) if self.alarm_ns else 0

    @contextmanager
    def _now(self) -> Iterator[int]:
        """Yield the time of a handler. At its end, also if it raises, signal the calls and waits that have ended."""
        try:
            yield immortal.now_ns()
        finally:
            self._signal_waiters()

    def _signal_waiters(self) -> None:
        for number in self.scheduler.woken:
            immortal.signal(_call(number))
        self.scheduler.woken.clear()
        due_ns = self.scheduler.next_due_ns()
        if due_ns is not None and self.alarm_ns != _LOOKS and (not self.alarm_ns or due_ns < self.alarm_ns):
            self.alarm_ns = _LOOKS
            immortal.signal(_ALARM)


def _call(number: int) -> str:
    return f"call {number}"


# Views of a queue for operators.


def _overview(records: QueueState, state: State, now_ns: int) -> Overview:
    """Return the overview with the first SHOWN_MAX tasks of ``state``: ended ones newest first, open ones oldest."""
    counts: Counter[str] = Counter()
    by_function: dict[str, Counter[str]] = defaultdict(Counter)
    for task in records.tasks.values():
        counts[task.state] += 1
        if not task.ended:
            by_function[task.name][task.state] += 1
    for worker in records.workers.values():
        for name in worker.names:
            by_function[name]["workers"] += not worker.disabled
    for name in records.limits:
        by_function[name]["workers"] += 0
    tasks = [task for task in records.tasks.values() if task.state == state]
    tasks.sort(key=lambda task: (-task.ended, task.id))
    return Overview(
        now_ns=now_ns,
        counts={kind: counts[kind] for kind in ("waiting", "delayed", "running", "done", "dead", "dropped")},
        functions=[
            FunctionView(
                name,
                one["waiting"],
                one["delayed"],
                one["running"],
                one["workers"],
                records.limits.get(name),
            )
            for name, one in sorted(by_function.items())
        ],
        workers=[_worker_view(worker) for _, worker in sorted(records.workers.items())],
        tasks=[_task_view(task) for task in tasks[:SHOWN_MAX]],
        late_replies=records.late_replies,
        dead_forgotten=records.dead_forgotten,
    )


def _task_view(task: Task) -> TaskView:
    return TaskView(
        id=task.id,
        function=task.name,
        state=task.state,
        key=task.key,
        priority=task.priority,
        dedup=task.dedup,
        attempts=task.attempt,
        worker=task.worker,
        reason=task.reason,
        submitted_ns=task.submitted_ns,
        due_ns=task.due_ns,
        ended_ns=task.ended_ns,
    )


def _worker_view(worker: Worker) -> WorkerView:
    state = "disabled" if worker.disabled else "idle" if worker.call else "busy"
    return WorkerView(
        id=worker.id,
        state=state,
        why=worker.disabled,
        functions=worker.names,
        task=worker.task,
        done=worker.done,
        disabled_count=worker.disabled_count,
        heard_ns=worker.heard_ns,
    )
