"""Anything may happen to a queue, in any order: what must hold afterwards, always."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from immortal.appsdk.patterns.queue import model
from immortal.appsdk.patterns.queue.model import (
    DedupConflict,
    Limit,
    NotPossible,
    Offer,
    QueueState,
    Report,
    Submission,
    Task,
)
from immortal.appsdk.patterns.queue.scheduler import Scheduler
from immortal.appsdk.patterns.queue.tasks import rank_of
from tests.helpers.effort import effort

S = model.SECOND_NS
FUNCTIONS = ["f", "g", "h"]
T = TypeVar("T")
functions = st.sampled_from(FUNCTIONS)
worker_ids = st.sampled_from(["a", "b", "c", "d"])
sessions = st.sampled_from(["1", "2"])


def waiting(scheduler: Scheduler, name: str) -> set[int]:
    """The IDs of a function's waiting tasks, in the order or parked."""
    lanes = scheduler.tasks.lanes
    queues = [lanes._ready.get(name), *(parked for lane, parked in lanes._parked.items() if lane[0] == name)]
    return {task for one in queues if one is not None for task in one.ranks}


class AnyQueue(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.records = QueueState()
        self.scheduler = Scheduler(self.records)
        self.now_ns = 1000 * S
        self.given: list[tuple[str, str, int, int]] = []  # all that ever were: worker, session, task, attempt
        self.calls: dict[int, tuple[str, str]] = {}  # those that wait
        self.waits: set[int] = set()
        self.submitted = 0
        self.accepted: Counter[int] = Counter()  # results, by task
        self.starts: list[tuple[str, str, int]] = []

    # --- what may happen ---------------------------------------------------------------------------------------------

    @rule(
        name=functions,
        key=st.sampled_from(["", "x", "y"]),
        priority=st.integers(-1, 1),
        delay_s=st.sampled_from([0.0, 0.0, 2.0]),
        dedup=st.sampled_from(["", "", "k"]),
        tries=st.integers(1, 3),
        timeout_s=st.sampled_from([0.5, 20.0]),
        wait=st.booleans(),
    )
    def submit(
        self, name: str, key: str, priority: int, delay_s: float, dedup: str, tries: int, timeout_s: float, wait: bool
    ) -> None:
        arguments = msgspec.msgpack.encode([])
        made = Submission(name, arguments, key, priority, delay_s, dedup, tries, timeout_s)
        self.catch_up()
        try:
            task = self.do(lambda one: one.submit(made, self.now_ns))
        except DedupConflict:
            assert dedup
            return
        self.submitted = max(self.submitted, task)
        if wait and (number := self.scheduler.tasks.outcome(task, wait=True).wait):
            self.waits.add(number)
        self.look()

    @rule(worker=worker_ids, session=sessions, names=st.lists(functions, min_size=1, max_size=3))
    def ready(self, worker: str, session: str, names: list[str]) -> None:
        self.say_ready(worker, session, names, None)

    @precondition(lambda self: self.given)
    @rule(data=st.data(), fails=st.sampled_from(["", "", "raised"]), again=st.booleans(), lies=st.booleans())
    def reply(self, data: st.DataObject, fails: str, again: bool, lies: bool) -> None:
        """Of a try that was given at some time, now or long ago; maybe by somebody else."""
        worker, session, task, attempt = data.draw(st.sampled_from(self.given[-6:]))
        if lies:
            worker, session = data.draw(worker_ids), data.draw(sessions)
        self.catch_up()
        right = self.holds(worker, session, task, attempt)
        late = self.records.late_replies
        self.say_ready(worker, session, FUNCTIONS[:2], Report(task, attempt, b"r", fails, again))
        assert self.records.late_replies == late + (not right)
        if right and not fails:
            self.accepted[task] += 1

    @rule(worker=worker_ids, session=sessions)
    def heartbeat(self, worker: str, session: str) -> None:
        self.do(lambda one: one.heartbeat(worker, session, self.now_ns))
        self.look()

    @rule(worker=worker_ids, session=sessions)
    def leave(self, worker: str, session: str) -> None:
        self.do(lambda one: one.leave(worker, session, None, self.now_ns))
        self.look()

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        self.catch_up()
        if not self.calls:
            return
        call = data.draw(st.sampled_from(sorted(self.calls)))
        self.do(lambda one: one.withdraw(call, self.now_ns))
        del self.calls[call]
        self.look()

    @rule(name=functions, running_max=st.integers(0, 2), starts_max=st.integers(0, 2))
    def set_limit(self, name: str, running_max: int, starts_max: int) -> None:
        self.catch_up()
        before = self.records.limits.get(name, Limit())
        self.do(
            lambda one: one.set_limit(name, Limit(running_max, starts_max, 3 * S if starts_max else 0), self.now_ns)
        )
        if not (before.starts_max and starts_max):  # only starts under a rate are counted
            self.starts = [start for start in self.starts if start[0] != name]
        self.look()

    @rule(data=st.data(), drop=st.booleans())
    def operate(self, data: st.DataObject, drop: bool) -> None:
        if not self.records.tasks:
            return
        task = data.draw(st.sampled_from(sorted(self.records.tasks)))
        self.catch_up()
        before = msgspec.msgpack.encode(self.records)
        try:
            if drop:
                self.do(lambda one: one.drop([task], "why", self.now_ns))
            else:
                self.do(lambda one: one.retry([task], self.now_ns))
        except NotPossible:
            assert msgspec.msgpack.encode(self.records) == before
        self.look()

    @rule(seconds=st.sampled_from([0.1, 0.5, 3.0, 6.0, 70.0]))
    def time_goes_by(self, seconds: float) -> None:
        until_ns = self.now_ns + round(seconds * S)
        while (due_ns := self.scheduler.next_due_ns()) is not None and due_ns <= until_ns:
            self.now_ns = max(self.now_ns, due_ns)
            self.do(lambda one: one.advance(self.now_ns))
            self.look()
        self.now_ns = until_ns

    @rule(seconds=st.sampled_from([2, 100]))
    def the_queue_is_away(self, seconds: int) -> None:
        due_ns = self.scheduler.next_due_ns()
        if due_ns is None or due_ns > self.now_ns + 100 * S:
            return
        self.now_ns = max(self.now_ns, due_ns) + seconds * S
        tried = {task.id: task.attempt for task in self.records.tasks.values() if task.state == "running"}
        self.do(lambda one: one.advance(self.now_ns))
        self.look()
        for task_id, attempt in tried.items():
            task = self.records.tasks[task_id]
            assert (task.state, task.attempt) == ("running", attempt), "nobody loses a task by it"

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0]))
    def the_alarm_is_late(self, seconds: float) -> None:
        self.now_ns += round(seconds * S)

    @rule()
    def recover(self) -> None:
        """From a checkpoint."""
        self.records = msgspec.msgpack.decode(msgspec.msgpack.encode(self.records), type=QueueState)
        self.scheduler = Scheduler(self.records)

    def catch_up(self) -> None:
        self.do(lambda one: one.advance(self.now_ns))
        self.look()

    def do(self, what: Callable[[Scheduler], T]) -> T:
        """And whoever has recovered from a checkpoint right before it does the same."""
        records = msgspec.msgpack.decode(msgspec.msgpack.encode(self.records), type=QueueState)
        again = Scheduler(records)
        try:
            expected = what(again)
        except Exception:
            what(self.scheduler)
            raise AssertionError("it raises after a recovery alone") from None
        found = what(self.scheduler)
        assert found == expected
        assert msgspec.msgpack.encode(records) == msgspec.msgpack.encode(self.records)
        assert again.woken == self.scheduler.woken
        return found

    # --- what comes of it --------------------------------------------------------------------------------------------

    def say_ready(self, worker: str, session: str, names: list[str], report: Report | None) -> None:
        offer = self.do(lambda one: one.ready(worker, session, names, 1.0, report, self.now_ns))
        if offer.waits:
            self.calls[offer.call] = (worker, session)
        else:
            self.got(offer, worker, session)
        self.look()

    def look(self) -> None:
        """At what is told: to workers and to those who wait for tasks."""
        assert len(set(self.scheduler.woken)) == len(self.scheduler.woken)
        for number in self.scheduler.woken:
            if number in self.waits:
                self.waits.remove(number)
            else:
                self.got(self.scheduler.take_offer(number), *self.calls.pop(number))
        self.scheduler.woken.clear()

    def got(self, offer: Offer, worker: str, session: str) -> None:
        if offer.given is None:
            return
        task = self.records.tasks[offer.given.task]
        known = (worker, session, task.id, offer.given.attempt)
        assert [one[2:] for one in self.given].count((task.id, offer.given.attempt)) == 0, "an attempt is given once"
        self.given.append(known)
        assert task.name in self.records.workers[worker].names
        self.starts.append((task.name, task.key, self.now_ns))
        lane = [one for one in self.records.tasks.values() if (one.name, one.key) == (task.name, task.key)]
        better = [one for one in lane if one.state == "waiting" and rank_of(one) < rank_of(task)]
        assert not better, "the best of its lane"
        limit = self.records.limits.get(task.name)
        if limit is None:
            return
        if limit.running_max:
            assert sum(one.state == "running" for one in lane) <= limit.running_max
        if limit.starts_max:
            in_period = [
                start_ns
                for name, key, start_ns in self.starts
                if (name, key) == (task.name, task.key) and start_ns + limit.period_ns > self.now_ns
            ]
            assert len(in_period) <= limit.starts_max

    def holds(self, worker: str, session: str, task_id: int, attempt: int) -> bool:
        task = self.records.tasks.get(task_id)
        known = self.records.workers.get(worker)
        return (
            task is not None
            and known is not None
            and (known.session, known.task) == (session, task_id)
            and (task.state, task.worker, task.attempt) == ("running", worker, attempt)
        )

    def is_late(self) -> bool:
        due_ns = self.scheduler.next_due_ns()
        return due_ns is not None and due_ns <= self.now_ns

    # --- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost(self) -> None:
        assert sorted(self.records.tasks) == list(range(1, self.submitted + 1))
        for task in self.records.tasks.values():
            assert (task.state in ("done", "dead", "dropped")) == bool(task.ended)
            assert task.waits == [] or not task.ended
            assert task.attempt >= task.tries - task.tries_left >= 0
        assert all(count == 1 for count in self.accepted.values())
        done = {task.id for task in self.records.tasks.values() if task.state == "done"}
        assert done == set(self.accepted)

    @invariant()
    def who_waits_is_told(self) -> None:
        assert self.waits == {number for task in self.records.tasks.values() for number in task.waits}
        assert set(self.calls) == {worker.call for worker in self.records.workers.values() if worker.call}
        assert self.records.offers == {}

    @invariant()
    def workers_and_tasks_agree(self) -> None:
        running = {task.id: task for task in self.records.tasks.values() if task.state == "running"}
        for worker in self.records.workers.values():
            has = running.get(worker.task)
            if has is not None and has.worker == worker.id:
                assert not worker.disabled
                del running[worker.task]
            assert not (worker.task and worker.call)
            assert worker.call or worker.task or worker.disabled, "it waits, works, or is out"
        assert running == {}

    @invariant()
    def nobody_idles_beside_a_task(self) -> None:
        if self.is_late():
            return
        idle = {
            name
            for worker in self.records.workers.values()
            if worker.call and not worker.disabled
            for name in worker.names
        }
        for task in self.records.tasks.values():
            if task.state == "waiting" and task.name in idle:
                assert not self.may_start(task), f"{task} waits, and a worker for it does"

    def may_start(self, task: Task) -> bool:
        limit = self.records.limits.get(task.name)
        if limit is None:
            return True
        lane = [one for one in self.records.tasks.values() if (one.name, one.key) == (task.name, task.key)]
        if limit.running_max and sum(one.state == "running" for one in lane) >= limit.running_max:
            return False
        if not limit.starts_max:
            return True
        starts = self.records.starts.get(task.name, {}).get(task.key, [])
        # Where a start has just left the period, its timer is about to say so.
        return sum(start_ns + limit.period_ns >= self.now_ns for start_ns in starts) < limit.starts_max

    @invariant()
    def a_recovery_goes_on_alike(self) -> None:
        """What is not kept follows from what is."""
        again = Scheduler(copy.deepcopy(self.records))
        assert again._timers.ranks == self.scheduler._timers.ranks
        for name in FUNCTIONS:
            assert waiting(again, name) == waiting(self.scheduler, name)
            if not self.is_late():
                assert again.tasks.lanes.first(name, self.now_ns) == self.scheduler.tasks.lanes.first(name, self.now_ns)
            assert list(again._workers._idle.get(name, ())) == list(self.scheduler._workers._idle.get(name, ()))
        assert (again.tasks._open, again.tasks._open_size_bytes) == (
            self.scheduler.tasks._open,
            self.scheduler.tasks._open_size_bytes,
        )
        assert again.tasks._by_dedup == self.scheduler.tasks._by_dedup


AnyQueue.TestCase.settings = settings(max_examples=effort(40), stateful_step_count=40, deadline=None)
TestAnyQueue = AnyQueue.TestCase
