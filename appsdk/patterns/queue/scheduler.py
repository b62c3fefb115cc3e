"""The rules of a queue: which worker gets which task, who is disabled, what becomes of a task. No I/O, no clock.

A worker says *ready* and waits. The worker that has waited longest gets the task that is next. It is disabled

- when nothing was heard of it for some heartbeats, whether it waits or works;
- when it has had a task for longer than the task's timeout;
- when another process says ready under its ID.

A disabled worker's task goes to the next one, and its reply is dropped. A worker that still waits is back with its next
heartbeat, any other one with its next ready.

Everything that lasts is in the :class:`Records`; the rest is an index of it, and is made of it again after a recovery.
Times are nanoseconds and never go back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from appsdk.patterns.queue import limits
from appsdk.patterns.queue.agenda import Agenda
from appsdk.patterns.queue.ended import Ended
from appsdk.patterns.queue.errors import DedupConflict, NotPossible, QueueFull, UnknownTask
from appsdk.patterns.queue.lanes import Lanes, Rank
from appsdk.patterns.queue.records import (
    NOTHING,
    SUPERSEDED,
    Failure,
    Given,
    Limit,
    Offer,
    Outcome,
    Records,
    Report,
    State,
    Submission,
    Task,
    Worker,
    check_name,
)

Timer = tuple[str, str | int, str]
"""What is due: ("delay" or "timeout", task, ""), ("worker", ID, ""), ("start", function, key), ("age", 0, "")."""

_AGE: Timer = ("age", 0, "")


class Scheduler:
    """``woken``: the numbers of calls and waits that have ended, for who drives this to tell and to clear."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self.woken: list[int] = []
        self._timers: Agenda[Timer] = Agenda()
        self._lanes = Lanes(records)
        self._ended = Ended(records)
        self._idle: dict[str, OrderedDict[str, None]] = {}  # by function: who waits, the longest first
        self._by_dedup: dict[str, int] = {}
        self._open = self._open_size_bytes = 0
        for task in records.tasks.values():
            if task.dedup and task.state != "dropped":
                self._by_dedup[task.dedup] = task.id
            if not task.ended:
                self._open += 1
                self._open_size_bytes += len(task.arguments)
            if task.state == "delayed":
                self._timers.put(("delay", task.id, ""), task.due_ns)
            elif task.state == "running":
                self._timers.put(("timeout", task.id, ""), task.deadline_ns)
        for worker in sorted(records.workers.values(), key=lambda one: one.idle_order):
            self._timers.put(("worker", worker.id, ""), worker.check_ns)
            if worker.call and not worker.disabled:
                self._into_idle(worker)
        for name, by_key in records.starts.items():
            for key in by_key:
                self._time_start(name, key)
        self._time_age()

    def next_due_ns(self) -> int | None:
        """When :meth:`advance` has something to do; None: not before something else happens."""
        found = self._timers.first()
        return None if found is None else found[0]

    def timers(self) -> dict[Timer, int]:
        return self._timers.ranks()

    # --- clients -----------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission, now_ns: int) -> int:
        """The task's ID: that of an earlier one with the same deduplication key. Raises QueueFull, DedupConflict."""
        digest = submission.digest()
        known = self._by_dedup.get(submission.dedup) if submission.dedup else None
        if known is not None:
            if self._records.tasks[known].digest != digest:
                raise DedupConflict(
                    f"dedup key {submission.dedup!r} is that of task {known}, of another function or with other "
                    f"arguments: use another key"
                )
            return known
        size_bytes = len(submission.arguments)
        if self._open >= limits.OPEN_TASKS_MAX or self._open_size_bytes + size_bytes > limits.OPEN_SIZE_BYTES_MAX:
            raise QueueFull(
                f"{self._open} tasks with {self._open_size_bytes} bytes of arguments are open, at most "
                f"{limits.OPEN_TASKS_MAX} with {limits.OPEN_SIZE_BYTES_MAX} bytes can be: nothing was submitted, try "
                f"again later"
            )
        self._records.task_id += 1
        task = Task(
            id=self._records.task_id,
            name=submission.name,
            arguments=submission.arguments,
            key=submission.key,
            priority=submission.priority,
            dedup=submission.dedup,
            digest=digest,
            tries=submission.tries,
            timeout_ns=_ns(submission.timeout_s),
            retry_delay_ns=_ns(submission.retry_delay_s),
            submitted_ns=now_ns,
            state="waiting",
            due_ns=now_ns + _ns(submission.delay_s),
            tries_left=submission.tries,
        )
        self._records.tasks[task.id] = task
        if task.dedup:
            self._by_dedup[task.dedup] = task.id
        self._reopen(task, now_ns)
        return task.id

    def outcome(self, task_id: int, *, wait: bool = False) -> Outcome:
        """How it stands; with ``wait``, if it is open, under which number its end will be told. Raises UnknownTask."""
        task = self._task(task_id)
        if not task.ended:
            number = 0
            if wait:
                self._records.call += 1
                number = self._records.call
                task.waits.append(number)
            return Outcome(task.state, number)
        return Outcome(task.state, 0, task.result, task.reason, task.attempt)

    def forget_wait(self, task_id: int, number: int) -> None:
        """Nobody waits under that number any more."""
        task = self._records.tasks.get(task_id)
        if task is not None and number in task.waits:
            task.waits.remove(number)

    # --- workers -----------------------------------------------------------------------------------------------------

    def ready(
        self, worker_id: str, session: str, names: list[str], heartbeat_s: float, report: Report | None, now_ns: int
    ) -> Offer:
        """A worker asks for a task, and says what came of the one before. ``session``: a secret of its process.

        Raises ValueError, QueueFull.
        """
        check_name("worker", worker_id)
        check_name("session", session)
        if not 1 <= len(names) <= limits.NAMES_MAX:
            raise ValueError(f"a worker of {len(names)} functions; 1 to {limits.NAMES_MAX} were expected")
        for name in names:
            check_name("function", name)
        if not limits.HEARTBEAT_S_MIN <= heartbeat_s <= limits.HEARTBEAT_S_MAX:
            raise ValueError(
                f"a heartbeat each {heartbeat_s:g} s; {limits.HEARTBEAT_S_MIN:g} to {limits.HEARTBEAT_S_MAX:g} s were "
                f"expected"
            )
        worker = self._records.workers.get(worker_id)
        if worker is None and len(self._records.workers) >= limits.WORKERS_MAX:
            raise QueueFull(f"{limits.WORKERS_MAX} workers are known, and no more can be")
        changed = self._report(worker_id, session, report, now_ns)
        if worker is not None:
            if worker.session != session:
                self._leave(worker, SUPERSEDED, f"another process has said ready as worker {worker_id!r}", now_ns)
                worker = None
            else:
                self._end_call(worker, NOTHING)
                changed |= self._take_away(worker, f"worker {worker_id!r} has said ready without a reply", now_ns)
        if worker is None:
            worker = Worker(worker_id, session, [], 0, 0, 0)
            self._records.workers[worker_id] = worker
        worker.names = list(dict.fromkeys(names))
        worker.heartbeat_ns = _ns(heartbeat_s)
        worker.disabled = ""
        self._records.call += 1
        worker.call = self._records.call
        self._heard(worker, now_ns)
        self._make_idle(worker)
        self._dispatch((*worker.names, *changed), now_ns)
        call = self._records.call
        if call in self._records.offers:  # at once: nobody has to be told
            self.woken.remove(call)
            return self.take_offer(call)
        return Offer(call, waits=True)

    def take_offer(self, call: int) -> Offer:
        """What a worker's call has ended with, told once."""
        task_id = self._records.offers.pop(call, NOTHING)
        task = self._records.tasks.get(task_id)
        given = None
        if task is not None and task.state == "running":
            given = Given(task.id, task.attempt, task.name, task.arguments)
        return Offer(call, given=given, superseded=task_id == SUPERSEDED)

    def withdraw(self, call: int, now_ns: int) -> None:
        """A worker's call has ended by itself: it does not wait, and gets no task."""
        task_id = self._records.offers.pop(call, None)
        for worker in list(self._records.workers.values()):
            if worker.call == call or (task_id and worker.task == task_id):
                self._leave(worker, NOTHING, f"the call of worker {worker.id!r} was cancelled", now_ns)
        if call in self.woken:
            self.woken.remove(call)
        self._records.offers.pop(call, None)

    def heartbeat(self, worker_id: str, session: str, now_ns: int) -> bool:
        """Whether that worker is known, and by that session."""
        worker = self._records.workers.get(worker_id)
        if worker is None or worker.session != session:
            return False
        if not worker.disabled:
            worker.heard_ns = now_ns
        elif worker.call:
            worker.disabled = ""
            self._heard(worker, now_ns)
            self._make_idle(worker)
            self._dispatch(worker.names, now_ns)
        return True

    def leave(self, worker_id: str, session: str, report: Report | None, now_ns: int) -> None:
        """A worker ends, with its last reply. Without one, only if it has no task: a task may be on its way to it."""
        changed = self._report(worker_id, session, report, now_ns)
        worker = self._records.workers.get(worker_id)
        if worker is not None and worker.session == session:
            if report is None and worker.task:
                worker.heard_ns = now_ns
            else:
                self._leave(worker, NOTHING, f"worker {worker_id!r} has left without a reply", now_ns)
        self._dispatch(changed, now_ns)

    # --- operators ---------------------------------------------------------------------------------------------------

    def set_limit(self, name: str, limit: Limit, now_ns: int) -> None:
        """Raises ValueError."""
        check_name("function", name)
        if limit.running_max < 0:
            raise ValueError(f"{limit.running_max} running at once: 0 (without limit) or more were expected")
        if not 0 <= limit.starts_max <= limits.STARTS_MAX:
            raise ValueError(f"{limit.starts_max} starts in a period: 0 to {limits.STARTS_MAX} were expected")
        if limit.starts_max and not 0 < limit.period_ns <= _ns(limits.PERIOD_S_MAX):
            raise ValueError(
                f"a period of {limit.period_ns / limits.SECOND_NS:g} s: more than 0 and at most "
                f"{limits.PERIOD_S_MAX:g} s were expected"
            )
        keys = list(self._records.starts.get(name, ()))
        self._lanes.set_limit(name, limit, now_ns)
        for key in keys:
            self._time_start(name, key)
        self._dispatch((name,), now_ns)

    def retry(self, task_ids: Iterable[int], now_ns: int) -> int:
        """Dead letters wait again, with all their tries; so many. Raises UnknownTask, NotPossible: then none does."""
        tasks = [self._task(task_id) for task_id in dict.fromkeys(task_ids)]
        for task in tasks:
            if task.state != "dead":
                raise NotPossible(f"task {task.id} is {task.state}: only dead letters can be retried")
        for task in tasks:
            self._ended.remove(task)
            task.ended = task.ended_ns = 0
            task.reason = ""
            task.tries_left = task.tries
            task.due_ns = now_ns
            self._reopen(task, now_ns)
        return len(tasks)

    def drop(self, task_ids: Iterable[int], reason: str, now_ns: int) -> int:
        """Open tasks, and dead letters, end without a result; so many. Raises UnknownTask, NotPossible: then none does.

        A worker that has one goes on, and its reply is dropped.
        """
        tasks = [self._task(task_id) for task_id in dict.fromkeys(task_ids)]
        for task in tasks:
            if task.state in ("done", "dropped"):
                raise NotPossible(f"task {task.id} is {task.state}: there is nothing to drop")
        for task in tasks:
            if task.state == "dead":
                self._ended.remove(task)
            self._end(task, "dropped", reason[: limits.REASON_LENGTH_MAX] or "dropped", now_ns)
        self._dispatch({task.name for task in tasks}, now_ns)
        return len(tasks)

    # --- time --------------------------------------------------------------------------------------------------------

    def excuse(self, late_ns: int, now_ns: int) -> None:
        """The queue itself was away for so long: that counts neither as silence of workers nor as their work."""
        late_ns += limits.EXCUSED_NS
        for worker in self._records.workers.values():
            worker.heard_ns = min(now_ns, worker.heard_ns + late_ns)
            worker.check_ns = min(now_ns + self._patience_ns(worker), worker.check_ns + late_ns)
            self._timers.put(("worker", worker.id, ""), worker.check_ns)
        for timer in list(self._timers.ranks()):
            if timer[0] == "timeout":
                task = self._records.tasks[int(timer[1])]
                task.deadline_ns = min(now_ns + task.timeout_ns, task.deadline_ns + late_ns)
                self._timers.put(timer, task.deadline_ns)

    def advance(self, now_ns: int) -> None:
        """What is due by now happens."""
        changed: set[str] = set()
        while (found := self._timers.first()) is not None and found[0] <= now_ns:
            (kind, what, key) = timer = found[1]
            self._timers.remove(timer)
            if kind == "delay":
                task = self._records.tasks[int(what)]
                task.state = "waiting"
                self._lanes.put(task)
                changed.add(task.name)
            elif kind == "timeout":
                task = self._records.tasks[int(what)]
                worker = self._records.workers[task.worker]
                why = f"no reply to task {task.id} within {task.timeout_ns / limits.SECOND_NS:g} s"
                changed |= self._disable(worker, why, now_ns)
            elif kind == "worker":
                changed |= self._check(self._records.workers[str(what)], now_ns)
            elif kind == "start":
                self._lanes.refresh(str(what), key, now_ns)
                self._time_start(str(what), key)
                changed.add(str(what))
            else:
                while (old := self._ended.too_old(now_ns)) is not None:
                    self._ended.remove(old)
                    self._forget(old)
                self._time_age()
        self._dispatch(changed, now_ns)

    # --- what becomes of tasks ---------------------------------------------------------------------------------------

    def _task(self, task_id: int) -> Task:
        task = self._records.tasks.get(task_id)
        if task is None:
            raise UnknownTask(
                f"there is no task {task_id}; or it has ended, and is not kept any more"
                if task_id <= self._records.task_id
                else f"there is no task {task_id}: the last one is {self._records.task_id}"
            )
        return task

    def _reopen(self, task: Task, now_ns: int) -> None:
        self._open += 1
        self._open_size_bytes += len(task.arguments)
        self._place(task, now_ns)
        self._dispatch((task.name,), now_ns)

    def _place(self, task: Task, now_ns: int) -> None:
        """Among those that wait, or for later."""
        if task.due_ns > now_ns:
            task.state = "delayed"
            self._timers.put(("delay", task.id, ""), task.due_ns)
        else:
            task.state = "waiting"
            self._lanes.put(task)

    def _report(self, worker_id: str, session: str, report: Report | None, now_ns: int) -> set[str]:
        """A reply. It counts if it is of who has the task now. The functions of which more may run."""
        if report is None:
            return set()
        worker = self._records.workers.get(worker_id)
        task = self._records.tasks.get(report.task)
        if (
            worker is None
            or worker.session != session
            or task is None
            or task.state != "running"
            or worker.task != task.id
            or task.attempt != report.attempt
        ):
            self._records.late_replies += 1
            return set()
        worker.task = 0
        if report.error:
            self._failed(task, report.error, now_ns, again=report.again, pause=True)
        elif len(report.result) > limits.RESULT_SIZE_BYTES_MAX:
            why = (
                f"its result takes {len(report.result)} bytes, at most {limits.RESULT_SIZE_BYTES_MAX} are possible: "
                f"keep it elsewhere, and return where it is"
            )
            self._failed(task, why, now_ns, again=False)
        else:
            worker.done += 1
            task.result = report.result
            self._end(task, "done", "", now_ns)
        return {task.name}

    def _failed(self, task: Task, reason: str, now_ns: int, *, again: bool = True, pause: bool = False) -> None:
        """A try of a running task has failed. ``pause``: before the next one."""
        reason = reason[: limits.REASON_LENGTH_MAX]
        task.failures = [*task.failures, Failure(task.attempt, task.worker, now_ns, reason)][-limits.FAILURES_KEPT :]
        if not again or task.tries_left == 0:
            tried = "" if again else "not tried again: "
            self._end(task, "dead", f"{tried}{reason}", now_ns)
            return
        self._stop(task, now_ns)
        failed = task.tries - task.tries_left  # since it was submitted, or retried
        delay_ns = min(task.retry_delay_ns << min(failed - 1, 60), limits.RETRY_DELAY_NS_MAX) if pause else 0
        task.due_ns = now_ns + delay_ns
        self._place(task, now_ns)

    def _stop(self, task: Task, now_ns: int) -> None:
        """It runs no more."""
        self._timers.remove(("timeout", task.id, ""))
        task.state = "waiting"
        task.worker = ""
        self._lanes.ended(task, now_ns)

    def _end(self, task: Task, state: State, reason: str, now_ns: int) -> None:
        """Of an open task, or of a dead letter that is taken out of those."""
        if not task.ended:
            self._open -= 1
            self._open_size_bytes -= len(task.arguments)
        if task.state == "running":
            self._stop(task, now_ns)
        elif task.state == "waiting":
            self._lanes.remove(task, now_ns)
        elif task.state == "delayed":
            self._timers.remove(("delay", task.id, ""))
        task.state, task.reason = state, reason
        if state != "dead":
            task.arguments = b""
        if state == "dropped" and task.dedup:
            del self._by_dedup[task.dedup]
        self.woken += task.waits
        task.waits = []
        for gone in self._ended.add(task, now_ns):
            self._forget(gone)
        self._time_age()

    def _forget(self, task: Task) -> None:
        del self._records.tasks[task.id]
        if self._by_dedup.get(task.dedup) == task.id:
            del self._by_dedup[task.dedup]

    # --- what becomes of workers -------------------------------------------------------------------------------------

    @staticmethod
    def _patience_ns(worker: Worker) -> int:
        """How long it may be silent; disabled, until it is forgotten."""
        return limits.FORGET_NS if worker.disabled else limits.SILENT_HEARTBEATS * worker.heartbeat_ns

    def _heard(self, worker: Worker, now_ns: int) -> None:
        worker.heard_ns = now_ns
        self._time_worker(worker, now_ns)

    def _time_worker(self, worker: Worker, from_ns: int) -> None:
        worker.check_ns = from_ns + self._patience_ns(worker)
        self._timers.put(("worker", worker.id, ""), worker.check_ns)

    def _check(self, worker: Worker, now_ns: int) -> set[str]:
        """The functions of which more may run."""
        if worker.disabled:
            self._leave(worker, NOTHING, "", now_ns)
            return set()
        if worker.heard_ns + self._patience_ns(worker) > now_ns:  # heartbeats move no timer
            self._time_worker(worker, worker.heard_ns)
            return set()
        silent_s = (now_ns - worker.heard_ns) / limits.SECOND_NS
        return self._disable(worker, f"nothing was heard of it for {silent_s:.3g} s", now_ns)

    def _disable(self, worker: Worker, why: str, now_ns: int) -> set[str]:
        worker.disabled = why
        worker.disabled_count += 1
        self._out_of_idle(worker)
        self._time_worker(worker, now_ns)
        return self._take_away(worker, f"worker {worker.id!r}: {why}", now_ns)

    def _take_away(self, worker: Worker, why: str, now_ns: int) -> set[str]:
        """Its task, if it has one, goes to the next worker."""
        task = self._records.tasks.get(worker.task)
        has_it = task is not None and task.state == "running" and task.worker == worker.id
        worker.task = 0
        if task is None or not has_it:
            return set()
        self._failed(task, why, now_ns)
        return {task.name}

    def _leave(self, worker: Worker, ends_with: int, why: str, now_ns: int) -> None:
        """It is known no more. ``ends_with``: what the call gets in which it waits."""
        changed = self._take_away(worker, why, now_ns)
        self._end_call(worker, ends_with)
        del self._records.workers[worker.id]
        self._timers.remove(("worker", worker.id, ""))
        self._dispatch(changed, now_ns)

    def _end_call(self, worker: Worker, ends_with: int) -> None:
        self._out_of_idle(worker)
        if worker.call:
            self._records.offers[worker.call] = ends_with
            self.woken.append(worker.call)
            worker.call = 0

    def _make_idle(self, worker: Worker) -> None:
        self._records.idle_order += 1
        worker.idle_order = self._records.idle_order
        self._into_idle(worker)

    def _into_idle(self, worker: Worker) -> None:
        for name in worker.names:
            self._idle.setdefault(name, OrderedDict())[worker.id] = None

    def _out_of_idle(self, worker: Worker) -> None:
        for name in worker.names:
            waiting = self._idle.get(name)
            if waiting is not None:
                waiting.pop(worker.id, None)
                if not waiting:
                    del self._idle[name]

    # --- who gets what -----------------------------------------------------------------------------------------------

    def _dispatch(self, names: Iterable[str], now_ns: int) -> None:
        """Of these functions, the only ones of which a worker and a task can both wait: best tasks first."""
        candidates = sorted(set(names))
        while candidates:
            best: tuple[Rank, str] | None = None
            for name in tuple(candidates):
                head = self._lanes.first(name, now_ns) if name in self._idle else None
                if head is None:
                    candidates.remove(name)
                elif best is None or (head, name) < best:
                    best = head, name
            if best is not None:
                worker_id = next(iter(self._idle[best[1]]))
                self._assign(self._records.tasks[best[0][1]], self._records.workers[worker_id], now_ns)

    def _assign(self, task: Task, worker: Worker, now_ns: int) -> None:
        task.state, task.worker, task.began_ns = "running", worker.id, now_ns
        task.attempt += 1
        task.tries_left -= 1
        task.deadline_ns = now_ns + task.timeout_ns
        self._timers.put(("timeout", task.id, ""), task.deadline_ns)
        self._lanes.started(task, now_ns)
        self._time_start(task.name, task.key)
        worker.task = task.id
        self._end_call(worker, task.id)

    def _time_start(self, name: str, key: str) -> None:
        self._time(("start", name, key), self._lanes.due_ns(name, key))

    def _time_age(self) -> None:
        self._time(_AGE, self._ended.due_ns())

    def _time(self, timer: Timer, due_ns: int | None) -> None:
        if due_ns is None:
            self._timers.remove(timer)
        else:
            self._timers.put(timer, due_ns)


def _ns(seconds: float) -> int:
    return round(seconds * limits.SECOND_NS)
