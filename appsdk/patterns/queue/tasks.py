"""Tasks from submission to end: the order of waiting tasks, and the limits on kept ended tasks and dead letters.

All durable data is in the :class:`QueueState`; the rest is an index of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeVar

from immortal.appsdk.patterns.queue.model import (
    REASON_LENGTH_MAX,
    RETRY_DELAY_NS_MAX,
    SECOND_NS,
    DedupConflict,
    Failure,
    IndexedPriorityQueue,
    Key,
    Limit,
    NotPossible,
    Outcome,
    QueueFull,
    QueueState,
    State,
    Submission,
    Task,
    Timer,
    UnknownTask,
    nanoseconds,
)
from immortal.protocol.identity import digest_prefix

FAILURES_KEPT = 3  # of one task, the last ones

# Open tasks wait or run. Above these limits a submission is refused, and the client decides what to do.
OPEN_TASKS_MAX = 100_000
OPEN_SIZE_BYTES_MAX = 64 << 20
STARTS_KEPT_MAX = 100_000  # under a rate, of all functions and keys; above it nothing can be submitted

# Ended tasks are kept, with their deduplication keys; the oldest are removed first.
ENDED_TASKS_MAX = 10_000
ENDED_SIZE_BYTES_MAX = 64 << 20
ENDED_AGE_NS = 24 * 3600 * SECOND_NS
# Dead letters wait for a person: no time limit removes them.
DEAD_TASKS_MAX = 10_000
DEAD_SIZE_BYTES_MAX = 64 << 20

_AGE: Timer = ("age", 0, "")


class Tasks:
    """Tasks of a queue. ``woken``: receives the numbers of waits for tasks that have ended."""

    def __init__(self, records: QueueState, timers: IndexedPriorityQueue[Timer], woken: list[int]) -> None:
        self._records = records
        self._timers = timers
        self._woken = woken
        self.lanes = ReadyQueue(records, timers)
        self._ended_tasks = EndedTasks(records)
        self._by_dedup: dict[str, int] = {}
        self._open = self._open_size_bytes = 0
        for task in records.tasks.values():
            if task.dedup and task.state != "dropped":
                self._by_dedup[task.dedup] = max(task.id, self._by_dedup.get(task.dedup, 0))
            if not task.ended:
                self._open += 1
                self._open_size_bytes += len(task.arguments)
            if task.state == "delayed":
                timers.put(("delay", task.id, ""), task.due_ns)
            elif task.state == "running":
                timers.put(("timeout", task.id, ""), task.deadline_ns)
        self._time_age()

    def get(self, task_id: int) -> Task:
        """Return the task. Raises UnknownTask."""
        task = self._records.tasks.get(task_id)
        if task is None:
            raise UnknownTask(
                f"there is no task {task_id}; or it has ended, and is not kept any more"
                if task_id <= self._records.task_id
                else f"there is no task {task_id}: the last one is {self._records.task_id}"
            )
        return task

    # --- clients -----------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission, now_ns: int) -> int:
        """Add a task and return its ID, or that of an earlier one with the same deduplication key. Raises QueueFull,
        DedupConflict.
        """
        digest = submission.digest()
        known = self._known(submission)
        if known is not None:
            if known.digest != digest:
                given = f"{submission.name!r} with {len(submission.arguments)} bytes of arguments"
                raise DedupConflict(
                    f"dedup key {submission.dedup!r}",
                    f"that of task {known.id}, {known.name!r} (digest {digest_prefix(known.digest)}, {known.state})",
                    f"of another function or with other arguments, {given} (digest {digest_prefix(digest)})",
                    "use another key" + (", or again=True" if known.ended else ""),
                )
            return known.id
        self._require_room(len(submission.arguments))
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
            timeout_ns=nanoseconds(submission.timeout_s),
            retry_delay_ns=nanoseconds(submission.retry_delay_s),
            submitted_ns=now_ns,
            state="waiting",
            due_ns=now_ns + nanoseconds(submission.delay_s),
            tries_left=submission.tries,
        )
        self._records.tasks[task.id] = task
        if task.dedup:
            self._by_dedup[task.dedup] = task.id
        self._open_again(task, now_ns)
        return task.id

    def _known(self, submission: Submission) -> Task | None:
        """Return the task with the same deduplication key; with ``again`` only an open one."""
        known = self._by_dedup.get(submission.dedup) if submission.dedup else None
        if known is None or (submission.again and self._records.tasks[known].ended):
            return None
        return self._records.tasks[known]

    def _require_room(self, size_bytes: int) -> None:
        if self._open >= OPEN_TASKS_MAX or self._open_size_bytes + size_bytes > OPEN_SIZE_BYTES_MAX:
            raise QueueFull(
                f"{self._open} tasks with {self._open_size_bytes} bytes of arguments are open, at most "
                f"{OPEN_TASKS_MAX} with {OPEN_SIZE_BYTES_MAX} bytes can be: nothing was submitted, try "
                f"again later"
            )
        if self.lanes.starts_kept >= STARTS_KEPT_MAX:
            raise QueueFull(
                f"{self.lanes.starts_kept} starts under a rate are remembered, and no more can be: nothing was "
                f"submitted; shorten the periods of limits, or try again later"
            )

    def outcome(self, task_id: int, *, wait: bool = False) -> Outcome:
        """Return the task's state; with ``wait``, for an open task, also the number under which its end is signalled.
        Raises UnknownTask.
        """
        task = self.get(task_id)
        if task.ended:
            return Outcome(task.state, 0, task.result, task.reason, task.attempt)
        number = 0
        if wait:
            self._records.call += 1
            number = self._records.call
            task.waits.append(number)
        return Outcome(task.state, number)

    def forget_wait(self, task_id: int, number: int) -> bool:
        """Drop a wait for the task's end; return False if its end was signalled already."""
        task = self._records.tasks.get(task_id)
        if task is None or number not in task.waits:
            return False
        task.waits.remove(number)
        return True

    # --- operators ---------------------------------------------------------------------------------------------------

    def retry(self, task_ids: Iterable[int], now_ns: int) -> int:
        """Make dead letters wait again, with all their tries, and return their number. Raises UnknownTask, NotPossible:
        then none was changed.
        """
        tasks = [self.get(task_id) for task_id in dict.fromkeys(task_ids)]
        for task in tasks:
            if task.state != "dead":
                raise NotPossible(f"task {task.id} is {task.state}: only dead letters can be retried")
        for task in tasks:
            self._ended_tasks.remove(task)
            task.ended = task.ended_ns = 0
            task.reason = ""
            task.tries_left = task.tries
            task.due_ns = now_ns
            self._open_again(task, now_ns)
        return len(tasks)

    def drop(self, task_ids: Iterable[int], reason: str, now_ns: int) -> int:
        """End open tasks and dead letters without a result, and return their number. Raises UnknownTask, NotPossible:
        then none was changed.

        A worker that has one of these tasks continues, and its reply is dropped.
        """
        tasks = [self.get(task_id) for task_id in dict.fromkeys(task_ids)]
        for task in tasks:
            if task.state in ("done", "dropped"):
                raise NotPossible(f"task {task.id} is {task.state}: there is nothing to drop")
        for task in tasks:
            if task.state == "dead":
                self._ended_tasks.remove(task)
            self._end(task, "dropped", reason[:REASON_LENGTH_MAX] or "dropped", now_ns)
        return len(tasks)

    # --- tries -------------------------------------------------------------------------------------------------------

    def start(self, task: Task, worker_id: str, now_ns: int) -> None:
        """Start the task that the ready queue returned."""
        task.state, task.worker, task.began_ns = "running", worker_id, now_ns
        task.attempt += 1
        task.tries_left -= 1
        task.deadline_ns = now_ns + task.timeout_ns
        self._timers.put(("timeout", task.id, ""), task.deadline_ns)
        self.lanes.started(task, now_ns)

    def done(self, task: Task, result: bytes, now_ns: int) -> None:
        """End a running task with its result."""
        task.result = result
        self._end(task, "done", "", now_ns)

    def failed(self, task: Task, reason: str, now_ns: int, *, again: bool = True, pause: bool = False) -> None:
        """Process a failed try of a running task. ``again``: another try can help; ``pause``: wait before it."""
        reason = reason[:REASON_LENGTH_MAX]
        task.failures = [*task.failures, Failure(task.attempt, task.worker, now_ns, reason)][-FAILURES_KEPT:]
        if not again or task.tries_left == 0:
            tried = "" if again else "not tried again: "
            self._end(task, "dead", f"{tried}{reason}", now_ns)
            return
        self._stop(task, now_ns)
        failed = task.tries - task.tries_left  # since its submission or its retry
        delay_ns = min(task.retry_delay_ns << min(failed - 1, 60), RETRY_DELAY_NS_MAX) if pause else 0
        task.due_ns = now_ns + delay_ns
        self._place(task, now_ns)

    # --- time --------------------------------------------------------------------------------------------------------

    def delay_is_over(self, task_id: int) -> None:
        task = self._records.tasks[task_id]
        task.state = "waiting"
        self.lanes.put(task)

    def forget_old(self, now_ns: int) -> None:
        while (old := self._ended_tasks.too_old(now_ns)) is not None:
            self._ended_tasks.remove(old)
            self._forget(old)
        self._time_age()

    def extend_deadlines(self, late_ns: int, now_ns: int) -> None:
        """Extend the deadlines of all running tasks; none gets more than a whole timeout."""
        for task in self._records.tasks.values():
            if task.state == "running":
                task.deadline_ns = min(now_ns + task.timeout_ns, task.deadline_ns + late_ns)
                self._timers.put(("timeout", task.id, ""), task.deadline_ns)

    def _open_again(self, task: Task, now_ns: int) -> None:
        self._open += 1
        self._open_size_bytes += len(task.arguments)
        self._place(task, now_ns)

    def _place(self, task: Task, now_ns: int) -> None:
        """Make the task wait, from now on or after its delay."""
        if task.due_ns > now_ns:
            task.state = "delayed"
            self._timers.put(("delay", task.id, ""), task.due_ns)
        else:
            task.state = "waiting"
            self.lanes.put(task)

    def _stop(self, task: Task, now_ns: int) -> None:
        """Stop the task's timeout and free its place in the lane."""
        self._timers.remove(("timeout", task.id, ""))
        task.worker = ""
        self.lanes.ended(task, now_ns)

    def _end(self, task: Task, state: State, reason: str, now_ns: int) -> None:
        """End an open task, or a dead letter that is being dropped."""
        if not task.ended:
            self._open -= 1
            self._open_size_bytes -= len(task.arguments)
        if task.state == "running":
            self._stop(task, now_ns)
        elif task.state == "waiting":
            self.lanes.remove(task, now_ns)
        elif task.state == "delayed":
            self._timers.remove(("delay", task.id, ""))
        task.state, task.reason = state, reason
        if state != "dead":
            task.arguments = b""
        if state == "dropped" and self._by_dedup.get(task.dedup) == task.id:
            del self._by_dedup[task.dedup]
        self._woken += task.waits
        task.waits = []
        for gone in self._ended_tasks.add(task, now_ns):
            self._forget(gone)
        self._time_age()

    def _forget(self, task: Task) -> None:
        del self._records.tasks[task.id]
        if self._by_dedup.get(task.dedup) == task.id:
            del self._by_dedup[task.dedup]

    def _time_age(self) -> None:
        due_ns = self._ended_tasks.due_ns()
        if due_ns is None:
            self._timers.remove(_AGE)
        else:
            self._timers.put(_AGE, due_ns)


# Ended tasks: limits on their number, size and age; the oldest are removed first.


class EndedTasks:
    """Ended tasks, oldest first. Dead letters have their own limits, without a limit of age."""

    def __init__(self, records: QueueState) -> None:
        self._records = records
        # Size in bytes by task, True: of dead letters. To find the first key of a dict takes long after many removals.
        self._sizes: dict[bool, OrderedDict[int, int]] = {False: OrderedDict(), True: OrderedDict()}
        self._size_bytes = {False: 0, True: 0}
        for task in sorted((one for one in records.tasks.values() if one.ended), key=lambda one: one.ended):
            self._put(task)

    def add(self, task: Task, now_ns: int) -> list[Task]:
        """Keep an ended task, and return the tasks removed because of it."""
        self._records.ended += 1
        task.ended = self._records.ended
        task.ended_ns = now_ns
        self._put(task)
        gone: list[Task] = []
        for dead, count_max, size_bytes_max in (
            (True, DEAD_TASKS_MAX, DEAD_SIZE_BYTES_MAX),
            (False, ENDED_TASKS_MAX, ENDED_SIZE_BYTES_MAX),
        ):
            kept = self._sizes[dead]
            while len(kept) > count_max or self._size_bytes[dead] > size_bytes_max:
                self._records.dead_forgotten += dead
                gone.append(self._records.tasks[next(iter(kept))])
                self.remove(gone[-1])
        return gone

    def remove(self, task: Task) -> None:
        dead = task.state == "dead"
        self._size_bytes[dead] -= self._sizes[dead].pop(task.id)

    def due_ns(self) -> int | None:
        """Return the time at which the oldest task is too old; None if there is none."""
        first = next(iter(self._sizes[False]), None)
        return None if first is None else self._records.tasks[first].ended_ns + ENDED_AGE_NS

    def too_old(self, now_ns: int) -> Task | None:
        """Return the oldest task if it is too old, else None."""
        due_ns = self.due_ns()
        if due_ns is None or due_ns > now_ns:
            return None
        return self._records.tasks[next(iter(self._sizes[False]))]

    def _put(self, task: Task) -> None:
        dead = task.state == "dead"
        self._sizes[dead][task.id] = size_bytes = len(task.arguments) + len(task.result)
        self._size_bytes[dead] += size_bytes


# Order of the waiting tasks of each function: priorities, and concurrency and rate limits by key.
#
# A lane is a function and a key. A task of a closed lane is parked when its turn comes, and re-enters the order when
# the lane opens, so a dispatch checks no task twice for nothing.


Rank = tuple[int, int]
"""Rank of a waiting task, (-priority, ID): the higher priority first, then the older task."""

K = TypeVar("K")


def rank_of(task: Task) -> Rank:
    return -task.priority, task.id


class ReadyQueue:
    """Waiting tasks in order. ``changed``: functions with a task that is new in the order; the dispatcher must read
    and clear it.

    ``starts_kept``: number of kept starts under a rate.
    """

    def __init__(self, records: QueueState, timers: IndexedPriorityQueue[Timer]) -> None:
        self._records = records
        self._timers = timers
        self._ready: dict[str, IndexedPriorityQueue[int]] = {}
        self._parked: dict[Key, IndexedPriorityQueue[int]] = {}
        self._running: dict[Key, int] = {}
        self.changed: set[str] = set()
        self.starts_kept = 0
        for task in records.tasks.values():
            if task.state == "waiting":
                self.put(task)
            elif task.state == "running":
                self._count(task, 1)
        for name, by_key in records.starts.items():
            for key, starts in by_key.items():
                self.starts_kept += len(starts)
                self._time(name, key)

    def put(self, task: Task) -> None:
        self._enter(task.name, task.id, rank_of(task))

    def remove(self, task: Task, now_ns: int) -> None:
        """Remove a waiting task, without running it."""
        _out(self._ready, task.name, task.id)
        _out(self._parked, (task.name, task.key), task.id)
        self._reopen(task.name, task.key, now_ns)

    def first(self, name: str, now_ns: int) -> Rank | None:
        """Return the rank of the next task of that function that can start now; None if there is none."""
        ready = self._ready.get(name)
        while ready:
            found = ready.first()
            assert found is not None
            rank: Rank = found[0]
            task = self._records.tasks[rank[1]]
            if self._free(name, task.key, now_ns) > 0:
                return rank
            ready.remove(task.id)
            self._parked.setdefault((name, task.key), IndexedPriorityQueue()).put(task.id, rank)
        self._ready.pop(name, None)
        return None

    def started(self, task: Task, now_ns: int) -> None:
        """Count the task that :meth:`first` returned as running."""
        _out(self._ready, task.name, task.id)
        self._count(task, 1)
        limit = self._records.limits.get(task.name)
        if limit is not None and limit.starts_max:
            self._records.starts.setdefault(task.name, {}).setdefault(task.key, []).append(now_ns)
            self.starts_kept += 1
            self._prune(task.name, task.key, limit.period_ns, now_ns)

    def ended(self, task: Task, now_ns: int) -> None:
        """Count the task as no longer running."""
        self._count(task, -1)
        self._reopen(task.name, task.key, now_ns)

    def set_limit(self, name: str, limit: Limit, now_ns: int) -> None:
        """Set the limit for later starts; starts under an earlier rate count for the new one."""
        if limit == Limit():
            self._records.limits.pop(name, None)
        else:
            self._records.limits[name] = limit
        for key in list(self._records.starts.get(name, ())):
            self._prune(name, key, limit.period_ns if limit.starts_max else 0, now_ns)
        for lane in [lane for lane in self._parked if lane[0] == name]:
            self._reopen(*lane, now_ns)

    def refresh(self, name: str, key: str, now_ns: int) -> None:
        """Update a key's lane after a start has left the period."""
        self._prune(name, key, self._records.limits[name].period_ns, now_ns)
        self._reopen(name, key, now_ns)

    def _enter(self, name: str, task_id: int, rank: Rank) -> None:
        self._ready.setdefault(name, IndexedPriorityQueue()).put(task_id, rank)
        self.changed.add(name)

    def _reopen(self, name: str, key: str, now_ns: int) -> None:
        """Return parked tasks of that lane to the order, as many as can start."""
        parked = self._parked.get((name, key))
        if parked is None:
            return
        for _ in range(min(len(parked), self._free(name, key, now_ns))):
            found = parked.pop()
            assert found is not None
            self._enter(name, found[1], found[0])
        if not parked:
            del self._parked[name, key]

    def _free(self, name: str, key: str, now_ns: int) -> int:
        """Return the number of tasks of the lane that can start now."""
        limit = self._records.limits.get(name)
        free = len(self._records.tasks)
        if limit is None:
            return free
        if limit.running_max:
            free = min(free, limit.running_max - self._running.get((name, key), 0))
        if limit.starts_max:
            starts = self._records.starts.get(name, {}).get(key, [])
            in_period = len(starts) - bisect_right(starts, now_ns - limit.period_ns)
            free = min(free, limit.starts_max - in_period)
        return max(0, free)

    def _prune(self, name: str, key: str, period_ns: int, now_ns: int) -> None:
        """Drop the starts that are too old for any later check."""
        by_key = self._records.starts[name]
        starts = by_key[key]
        kept = starts[bisect_right(starts, now_ns - period_ns) :]
        self.starts_kept -= len(starts) - len(kept)
        if kept:
            by_key[key] = kept
        else:
            del by_key[key]
            if not by_key:
                del self._records.starts[name]
        self._time(name, key)

    def _time(self, name: str, key: str) -> None:
        """Set the timer for the moment at which the lane's oldest start leaves the period."""
        timer: Timer = ("start", name, key)
        starts = self._records.starts.get(name, {}).get(key)
        if starts:
            self._timers.put(timer, starts[0] + self._records.limits[name].period_ns)
        else:
            self._timers.remove(timer)

    def _count(self, task: Task, change: int) -> None:
        lane = task.name, task.key
        count = self._running.get(lane, 0) + change
        if count:
            self._running[lane] = count
        else:
            self._running.pop(lane, None)


def _out(agendas: dict[K, IndexedPriorityQueue[int]], key: K, task_id: int) -> None:
    agenda = agendas.get(key)
    if agenda is not None:
        agenda.remove(task_id)
        if not agenda:
            del agendas[key]
