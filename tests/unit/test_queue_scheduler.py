"""The rules of the queue, one by one: workers, tries, lanes, limits, time."""

from __future__ import annotations

import msgspec
import pytest

from immortal.appsdk.patterns.queue import model, scheduler, tasks
from immortal.appsdk.patterns.queue.model import (
    DedupConflict,
    Limit,
    NotPossible,
    Offer,
    QueueFull,
    QueueState,
    Report,
    Submission,
    UnknownTask,
)
from immortal.appsdk.patterns.queue.scheduler import Scheduler

S = model.SECOND_NS
NOTHING = msgspec.msgpack.encode([])
ALL = ["f", "g"]


class Driven:
    """A scheduler, the time, and what workers have."""

    def __init__(self) -> None:
        self.records = QueueState()
        self.scheduler = Scheduler(self.records)
        self.now_ns = 1000 * S

    def submit(self, name: str = "f", **options: object) -> int:
        return self.scheduler.submit(Submission(name, NOTHING, **options), self.now_ns)  # type: ignore[arg-type]

    def ready(
        self, worker: str, report: Report | None = None, *, session: str = "", names: list[str] | None = None
    ) -> Offer:
        return self.scheduler.ready(worker, session or worker, names or ALL, 1.0, report, self.now_ns)

    def given(self, call: Offer) -> int:
        """The task that a worker's call has got; 0: none."""
        offer = self.scheduler.take_offer(call.call) if call.call in self.scheduler.woken else call
        return offer.given.task if offer.given else 0

    def done(self, worker: str, task: int, **said: object) -> Offer:
        attempt = self.records.tasks[task].attempt
        return self.ready(worker, Report(task, attempt, **said))  # type: ignore[arg-type]

    def heartbeats(self, *workers: str) -> None:
        for worker in workers:
            assert self.scheduler.heartbeat(worker, worker, self.now_ns)

    def advance(self, seconds: float) -> None:
        """Each timer at its own time."""
        until_ns = self.now_ns + round(seconds * S)
        while (due_ns := self.scheduler.next_due_ns()) is not None and due_ns <= until_ns:
            self.now_ns = max(self.now_ns, due_ns)
            self.scheduler.advance(self.now_ns)
        self.now_ns = until_ns

    def state(self, task: int) -> str:
        return self.records.tasks[task].state


@pytest.fixture
def driven() -> Driven:
    return Driven()


# --- who is next ------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_worker_is_next(driven: Driven) -> None:
    calls = {name: driven.ready(name) for name in ("a", "b", "c")}
    first = driven.submit()
    assert driven.given(calls["a"]) == first
    calls["a"] = driven.done("a", first)
    assert [driven.given(calls[name]) for name in "bca" if driven.submit()] == [2, 3, 4]


def test_higher_priorities_first_then_older_ones(driven: Driven) -> None:
    low, high, second = driven.submit(), driven.submit(priority=5), driven.submit(priority=5)
    order = []
    call = driven.ready("w")
    for _ in range(3):
        order.append(driven.given(call))
        call = driven.done("w", order[-1])
    assert order == [high, second, low]


def test_a_worker_gets_what_it_has_functions_for(driven: Driven) -> None:
    call = driven.ready("w", names=["g"])
    driven.submit("f", priority=9)
    assert call.waits
    assert not driven.scheduler.woken
    assert driven.given(call) == 0
    task = driven.submit("g")
    assert driven.given(call) == task


def test_a_task_that_nobody_can_do_waits_and_holds_up_no_other(driven: Driven) -> None:
    unknown = driven.submit("typo", priority=9)
    task = driven.submit()
    assert driven.given(driven.ready("w")) == task
    driven.advance(3600)
    assert driven.state(unknown) == "waiting"


def test_a_delayed_task_is_given_when_its_time_has_come(driven: Driven) -> None:
    task = driven.submit(delay_s=3)
    call = driven.ready("w")
    for _ in range(3):
        assert driven.given(call) == 0
        driven.advance(1)
        driven.heartbeats("w")
    assert driven.given(call) == task


# --- limits by key ----------------------------------------------------------------------------------------------------


def test_so_many_of_a_key_run_at_once(driven: Driven) -> None:
    driven.scheduler.set_limit("f", Limit(running_max=1), driven.now_ns)
    first, second, other = driven.submit(key="x"), driven.submit(key="x"), driven.submit(key="y")
    calls = [driven.ready(name) for name in "abc"]
    assert [driven.given(call) for call in calls] == [first, other, 0]
    driven.done("a", first)
    assert driven.given(calls[2]) == second


def test_a_limit_holds_up_no_other_function(driven: Driven) -> None:
    driven.scheduler.set_limit("f", Limit(running_max=1), driven.now_ns)
    driven.submit("f")
    driven.submit("f", priority=9)
    other = driven.submit("g")
    driven.ready("a")
    assert driven.given(driven.ready("b")) == other


def test_so_many_of_a_key_start_in_a_period(driven: Driven) -> None:
    driven.scheduler.set_limit("f", Limit(starts_max=2, period_ns=10 * S), driven.now_ns)
    for _ in range(3):
        driven.submit(key="x")
    call = driven.ready("w")
    assert driven.given(call) == 1
    driven.advance(3)
    assert driven.given(driven.done("w", 1)) == 2
    call = driven.done("w", 2)
    for _ in range(6):
        driven.advance(1)
        driven.heartbeats("w")
    assert driven.given(call) == 0
    driven.advance(1)
    assert driven.given(call) == 3


def test_starts_that_are_over_are_forgotten(driven: Driven) -> None:
    driven.scheduler.set_limit("f", Limit(starts_max=2, period_ns=10 * S), driven.now_ns)
    for number in range(50):
        driven.submit(key=f"customer {number}")
        driven.ready(f"w{number}")
    assert len(driven.records.starts["f"]) == 50
    driven.advance(10)
    assert driven.records.starts == {}


def test_a_dropped_task_makes_room_in_its_lane(driven: Driven) -> None:
    driven.scheduler.set_limit("f", Limit(running_max=1), driven.now_ns)
    running, waiting = driven.submit(), driven.submit()
    driven.ready("a")
    call = driven.ready("b")
    driven.scheduler.drop([running], "", driven.now_ns)
    assert driven.given(call) == waiting


def test_a_limit_that_is_lifted_lets_tasks_go_on(driven: Driven) -> None:
    driven.scheduler.set_limit("f", Limit(running_max=1), driven.now_ns)
    tasks = [driven.submit() for _ in range(3)]
    calls = [driven.ready(name) for name in "abc"]
    assert [driven.given(call) for call in calls] == [tasks[0], 0, 0]
    driven.scheduler.set_limit("f", Limit(), driven.now_ns)
    assert [driven.given(call) for call in calls[1:]] == tasks[1:]


# --- workers that are silent, slow, or lie ----------------------------------------------------------------------------


def test_a_silent_idle_worker_is_disabled_and_back_with_a_heartbeat(driven: Driven) -> None:
    call = driven.ready("w")
    driven.advance(scheduler.SILENT_HEARTBEATS)
    assert driven.records.workers["w"].disabled
    task = driven.submit()
    assert driven.given(call) == 0
    driven.heartbeats("w")
    assert driven.given(call) == task


def test_heartbeats_keep_a_worker(driven: Driven) -> None:
    call = driven.ready("w")
    for _ in range(60):
        driven.advance(1)
        driven.heartbeats("w")
    assert driven.given(call) == 0
    driven.submit()
    assert driven.given(call) == 1


def test_the_task_of_a_silent_worker_goes_to_the_next(driven: Driven) -> None:
    driven.ready("a")
    task = driven.submit()
    for _ in range(4):
        driven.advance(1)
    call = driven.ready("b")
    driven.advance(1)
    assert driven.given(call) == task
    assert "nothing was heard of it" in driven.records.tasks[task].failures[0].reason


def test_a_slow_worker_is_disabled_until_it_says_ready_and_its_late_reply_is_dropped(driven: Driven) -> None:
    task = driven.submit(timeout_s=0.5)
    driven.ready("a")
    call = driven.ready("b")
    driven.advance(0.5)
    assert driven.given(call) == task
    assert "no reply to task 1 within 0.5 s" in driven.records.workers["a"].disabled
    driven.heartbeats("a")
    assert driven.records.workers["a"].disabled, "it is still at work for nothing"
    late = driven.ready("a", Report(task, 1, b"late"))
    assert driven.records.late_replies == 1
    assert not driven.records.workers["a"].disabled
    driven.ready("b", Report(task, 2, b"right"))
    assert driven.records.tasks[task].result == b"right"
    driven.submit()
    assert driven.given(late) == 2


def test_a_reply_counts_if_it_is_of_who_has_the_task(driven: Driven) -> None:
    task = driven.submit()
    driven.ready("a")
    driven.ready("b", Report(task, 1, b"of another worker"))
    driven.ready("c", Report(99, 1, b"of no task"))
    driven.scheduler.leave("a", "another session", Report(task, 1, b"of another session"), driven.now_ns)
    driven.scheduler.leave("a", "a", Report(task, 2, b"of another attempt"), driven.now_ns)
    assert driven.records.late_replies == 4
    assert driven.records.tasks[task].result == b""
    assert driven.state(task) == "running", "the next one has it"


def test_two_workers_with_one_id(driven: Driven) -> None:
    task = driven.submit()
    driven.ready("w", session="first")
    second = driven.ready("w", session="second")
    assert driven.given(second) == task, "the older one is out, and its task is tried again"
    driven.ready("other", Report(task, 1, b"of the first"))
    assert driven.records.late_replies == 1
    assert not driven.scheduler.heartbeat("w", "first", driven.now_ns)


def test_an_idle_worker_is_told_that_it_is_superseded(driven: Driven) -> None:
    first = driven.ready("w", session="first")
    driven.ready("w", session="second")
    assert driven.scheduler.take_offer(first.call).superseded
    assert list(driven.records.workers) == ["w"]


def test_ready_without_a_reply_gives_the_task_back(driven: Driven) -> None:
    task = driven.submit("f")
    driven.ready("a")
    call = driven.ready("b", names=["f"])
    driven.ready("a", names=["g"])
    assert driven.given(call) == task


def test_a_worker_that_leaves_gets_no_task(driven: Driven) -> None:
    call = driven.ready("w")
    driven.scheduler.leave("w", "w", None, driven.now_ns)
    assert not driven.scheduler.take_offer(call.call).given
    driven.submit()
    assert driven.records.workers == {}
    assert driven.state(1) == "waiting"


def test_leaving_does_not_take_a_task_that_is_on_its_way_to_the_worker(driven: Driven) -> None:
    task = driven.submit()
    driven.ready("w")
    driven.scheduler.leave("w", "w", None, driven.now_ns)
    assert driven.state(task) == "running"
    driven.scheduler.leave("w", "w", Report(task, 1, b"r"), driven.now_ns)
    assert driven.state(task) == "done"
    assert driven.records.workers == {}


def test_a_withdrawn_call_gives_back_what_it_got(driven: Driven) -> None:
    call = driven.ready("w")
    task = driven.submit()
    driven.scheduler.withdraw(call.call, driven.now_ns)
    assert driven.state(task) == "waiting"
    assert driven.records.workers == {}
    assert driven.records.offers == {}


def test_dead_workers_are_forgotten_and_so_are_their_calls(driven: Driven) -> None:
    calls = [driven.ready(f"w{number}") for number in range(20)]
    driven.advance(scheduler.SILENT_HEARTBEATS + scheduler.FORGET_NS / S)
    assert driven.records.workers == {}
    assert sorted(driven.scheduler.woken) == [call.call for call in calls]
    assert not any(driven.given(call) for call in calls)
    assert driven.records.offers == {}
    assert driven.scheduler._timers.ranks == {}


# --- tries ------------------------------------------------------------------------------------------------------------


def test_a_poisonous_task_is_a_dead_letter_with_its_reason(driven: Driven) -> None:
    task = driven.submit(tries=3, timeout_s=0.5)
    for attempt in range(1, 4):
        assert driven.given(driven.ready(f"w{attempt}")) == task
        driven.advance(0.5)
    assert driven.state(task) == "dead"
    found = driven.records.tasks[task]
    assert "worker 'w3': no reply to task 1 within 0.5 s" in found.reason
    assert [(failure.attempt, failure.worker) for failure in found.failures] == [(1, "w1"), (2, "w2"), (3, "w3")]


def test_a_function_that_raises_is_tried_again_after_a_pause_that_doubles(driven: Driven) -> None:
    task = driven.submit(tries=4, retry_delay_s=1)
    call = driven.ready("w")
    for pause_s in (1, 2, 4):
        assert driven.given(call) == task
        call = driven.done("w", task, error="ValueError: no")
        assert driven.state(task) == "delayed"
        assert driven.records.tasks[task].due_ns == driven.now_ns + pause_s * S
        driven.advance(pause_s)
    assert driven.given(call) == task
    driven.done("w", task, error="ValueError: no")
    assert driven.state(task) == "dead"
    assert driven.records.tasks[task].reason == "ValueError: no"


def test_a_rejected_task_is_not_tried_again(driven: Driven) -> None:
    task = driven.submit()
    driven.ready("w")
    driven.done("w", task, error="no such picture", again=False)
    assert driven.records.tasks[task].reason == "not tried again: no such picture"


def test_a_result_that_is_too_large_is_a_dead_letter(driven: Driven) -> None:
    task = driven.submit()
    driven.ready("w")
    driven.done("w", task, result=bytes(model.RESULT_SIZE_BYTES_MAX + 1))
    assert driven.state(task) == "dead"
    assert f"takes {model.RESULT_SIZE_BYTES_MAX + 1} bytes" in driven.records.tasks[task].reason
    assert driven.records.tasks[task].result == b""


def test_a_retried_dead_letter_has_all_its_tries_and_takes_no_reply_of_before(driven: Driven) -> None:
    task = driven.submit(tries=1, timeout_s=0.5)
    driven.ready("w")
    driven.advance(0.5)
    assert driven.scheduler.retry([task], driven.now_ns) == 1
    assert driven.given(driven.ready("w", Report(task, 1, b"of before"))) == task
    assert driven.records.tasks[task].attempt == 2
    driven.done("w", task, result=b"right")
    assert driven.records.tasks[task].result == b"right"
    with pytest.raises(NotPossible, match="task 1 is done: only dead letters"):
        driven.scheduler.retry([task], driven.now_ns)


def test_dropped_tasks(driven: Driven) -> None:
    waiting, delayed, running = driven.submit("g"), driven.submit("g", delay_s=5), driven.submit("f")
    wait = driven.scheduler.tasks.outcome(waiting, wait=True).wait
    driven.ready("w", names=["f"])
    assert driven.scheduler.drop([waiting, delayed, running], "not needed", driven.now_ns) == 3
    assert wait in driven.scheduler.woken
    assert driven.scheduler.tasks.outcome(waiting).reason == "not needed"
    driven.ready("w", Report(running, 1, b"r"), names=["f", "g"])
    driven.advance(4)
    assert {driven.state(task) for task in (waiting, delayed, running)} == {"dropped"}
    with pytest.raises(NotPossible, match="is dropped: there is nothing to drop"):
        driven.scheduler.drop([waiting], "", driven.now_ns)
    with pytest.raises(UnknownTask, match="there is no task 99: the last one is 3"):
        driven.scheduler.drop([99], "", driven.now_ns)


# --- deduplication, and what is kept ----------------------------------------------------------------------------------


def test_a_dedup_key_is_one_task_as_long_as_it_is_known(driven: Driven) -> None:
    task = driven.submit(dedup="order-17")
    assert driven.submit(dedup="order-17") == task
    driven.ready("w")
    driven.done("w", task, result=b"r")
    assert driven.submit(dedup="order-17") == task
    with pytest.raises(DedupConflict, match="dedup key 'order-17' is that of task 1"):
        driven.submit("g", dedup="order-17")
    driven.advance(tasks.ENDED_AGE_NS / S)
    assert driven.submit(dedup="order-17") == 2


def test_a_conflict_says_what_both_are(driven: Driven) -> None:
    driven.records.describes = True
    driven.submit(dedup="order-17")
    with pytest.raises(DedupConflict, match="dedup key 'order-17' is that of task 1, 'f'") as caught:
        driven.submit("g", dedup="order-17")
    assert "'g' with" in caught.value.given
    assert "use another key" in str(caught.value)


def test_a_key_of_a_task_that_has_ended_may_be_used_again(driven: Driven) -> None:
    task = driven.submit(dedup="k")
    assert driven.submit(dedup="k", again=True) == task, "it is open"
    driven.ready("w")
    driven.done("w", task, result=b"r")
    assert driven.submit(dedup="k") == task
    other = driven.submit("g", dedup="k", again=True)
    assert other != task
    assert driven.submit("g", dedup="k") == other
    with pytest.raises(DedupConflict):
        driven.submit("f", dedup="k")


def test_a_dropped_task_frees_its_dedup_key(driven: Driven) -> None:
    task = driven.submit(dedup="k")
    driven.scheduler.drop([task], "", driven.now_ns)
    assert driven.submit(dedup="k") == 2
    driven.advance(tasks.ENDED_AGE_NS / S)
    assert driven.submit(dedup="k") == 2, "the dropped one's end is not its end"


def test_tasks_that_have_ended_are_kept_by_number_and_time(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "ENDED_TASKS_MAX", 3)
    call = driven.ready("w")
    for _ in range(5):
        task = driven.submit()
        assert driven.given(call) == task
        call = driven.done("w", task, result=b"r")
    assert list(driven.records.tasks) == [3, 4, 5]
    with pytest.raises(UnknownTask, match="not kept any more"):
        driven.scheduler.tasks.outcome(1)
    driven.advance(tasks.ENDED_AGE_NS / S)
    assert driven.records.tasks == {}


def test_tasks_that_have_ended_are_kept_by_size(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "ENDED_SIZE_BYTES_MAX", 25)
    call = driven.ready("w")
    for _ in range(5):
        task = driven.submit()
        assert driven.given(call) == task
        call = driven.done("w", task, result=bytes(10))
    assert list(driven.records.tasks) == [4, 5]


def test_dead_letters_are_kept_by_number(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "DEAD_TASKS_MAX", 2)
    call = driven.ready("w")
    for _ in range(3):
        task = driven.submit()
        assert driven.given(call) == task
        call = driven.done("w", task, error="no", again=False)
    assert list(driven.records.tasks) == [2, 3]
    assert driven.records.dead_forgotten == 1
    driven.advance(10 * tasks.ENDED_AGE_NS / S)
    assert list(driven.records.tasks) == [2, 3]


def test_a_full_queue_takes_no_more(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "OPEN_TASKS_MAX", 2)
    first = driven.submit(dedup="k")
    driven.submit()
    with pytest.raises(QueueFull, match="2 tasks with 2 bytes of arguments are open"):
        driven.submit()
    assert driven.submit(dedup="k") == first
    driven.ready("w")
    driven.done("w", first, result=b"r")
    driven.submit()


def test_a_full_queue_counts_bytes(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "OPEN_SIZE_BYTES_MAX", 2)
    driven.submit()
    driven.submit()
    with pytest.raises(QueueFull):
        driven.submit()


def test_no_more_workers_than_can_be(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "WORKERS_MAX", 1)
    driven.ready("a")
    driven.ready("a")
    with pytest.raises(QueueFull, match="1 workers are known"):
        driven.ready("b")


def test_a_full_queue_counts_starts_under_a_rate(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "STARTS_KEPT_MAX", 2)
    driven.scheduler.set_limit("f", Limit(starts_max=1, period_ns=10 * S), driven.now_ns)
    for key in "xy":
        driven.submit(key=key)
        driven.ready(key)
    with pytest.raises(QueueFull, match="2 starts under a rate are remembered"):
        driven.submit(key="z")
    driven.advance(10)
    driven.submit(key="z")


def test_no_more_limits_than_can_be(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "LIMITED_MAX", 1)
    driven.scheduler.set_limit("f", Limit(running_max=1), driven.now_ns)
    driven.scheduler.set_limit("f", Limit(running_max=2), driven.now_ns)
    with pytest.raises(ValueError, match="1 functions have limits"):
        driven.scheduler.set_limit("g", Limit(running_max=1), driven.now_ns)
    driven.scheduler.set_limit("f", Limit(), driven.now_ns)
    driven.scheduler.set_limit("g", Limit(running_max=1), driven.now_ns)


# --- the queue's own absence ------------------------------------------------------------------------------------------


def test_the_absence_of_the_queue_counts_against_no_worker(driven: Driven) -> None:
    driven.submit(timeout_s=30)
    driven.ready("busy", names=["f"])
    call = driven.ready("idle", names=["g"])
    due_ns = driven.scheduler.next_due_ns()
    assert due_ns is not None
    driven.now_ns = due_ns + 3600 * S
    driven.scheduler.advance(driven.now_ns)
    assert driven.state(1) == "running"
    assert not any(worker.disabled for worker in driven.records.workers.values())
    task = driven.submit("g")
    assert driven.given(call) == task
    driven.advance(2 * scheduler.SILENT_HEARTBEATS)
    assert driven.records.workers["busy"].disabled, "from now on it counts"


def test_an_absence_gives_nobody_more_than_a_whole_time(driven: Driven) -> None:
    driven.submit(timeout_s=30)
    driven.ready("w")
    driven.now_ns += 3600 * S
    driven.scheduler.advance(driven.now_ns)
    assert driven.records.tasks[1].deadline_ns == driven.now_ns + 30 * S
    assert driven.records.workers["w"].heard_ns == driven.now_ns


def test_what_was_due_happens_before_what_is_asked(driven: Driven) -> None:
    """However late the alarm is: a replay from a checkpoint knows no more than the records."""
    driven.scheduler.set_limit("f", Limit(starts_max=1, period_ns=S), driven.now_ns)
    first, parked = driven.submit(), driven.submit()
    assert driven.given(driven.ready("a")) == first
    call = driven.ready("b")
    driven.now_ns += S
    driven.submit(priority=9)
    assert driven.given(call) == parked
    late = driven.submit("g", timeout_s=0.5)
    driven.ready("c", names=["g"])
    driven.now_ns += S // 2
    driven.ready("c", Report(late, 1, b"r"), names=["f"])
    assert driven.records.late_replies == 1


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "function '': 1 to 200 characters"),
        ({"name": "f" * 201}, "1 to 200 characters"),
        ({"key": "a\0b"}, "without zero bytes"),
        ({"priority": 1001}, "priority 1001: -1000 to 1000 were expected"),
        ({"delay_s": -1.0}, "delay -1 s: 0 to"),
        ({"delay_s": float("nan")}, "delay nan s"),
        ({"tries": 0}, "tries 0: 1 to 1000"),
        ({"timeout_s": 0.0}, "timeout 0 s: 0.001 to"),
        ({"arguments": bytes(model.ARGUMENTS_SIZE_BYTES_MAX + 1)}, "take 1048577 bytes, at most 1048576"),
    ],
)
def test_submissions_that_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Submission(**({"name": "f", "arguments": NOTHING} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (Limit(running_max=-1), "-1 running at once"),
        (Limit(starts_max=1001, period_ns=S), "1001 starts in a period"),
        (Limit(starts_max=1), "a period of 0 s"),
        (Limit(starts_max=1, period_ns=10**18), "at most 86400 s"),
        (Limit(period_ns=S), "a period without a number of starts"),
    ],
)
def test_limits_that_are_refused(driven: Driven, limit: Limit, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        driven.scheduler.set_limit("f", limit, driven.now_ns)


def test_workers_that_are_refused(driven: Driven) -> None:
    for worker, session, names, heartbeat_s in (
        ("", "s", ["f"], 1.0),
        ("w" * 201, "s", ["f"], 1.0),
        ("w", "s", [], 1.0),
        ("w", "s", [""], 1.0),
        ("w", "s", ["f"] * 101, 1.0),
        ("w", "s", ["f"], 0.0),
        ("w", "s", ["f"], float("nan")),
    ):
        with pytest.raises(ValueError, match="expected"):
            driven.scheduler.ready(worker, session, names, heartbeat_s, None, driven.now_ns)
    assert driven.records.workers == {}
