"""Cluster and collectors as instances in one process: real coordinators and handlers, a clock of the test's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from immortal import rpc
from immortal.appsdk.patterns.harmony.batch import (
    SILENCE_S,
    WAITING_TASKS_MAX,
    Contents,
    Life,
    Response,
    Run,
    array,
    results,
)
from immortal.appsdk.patterns.harmony.collector import CollectedBatch
from immortal.appsdk.patterns.harmony.ventilator import digest_of
from immortal.appsdk.testing.instance import Instance
from immortal.patterns.harmony import (
    BaseCollector,
    Batch,
    BatchConflict,
    BatchError,
    Cluster,
    Collector,
    Result,
    Ventilator,
)
from immortal.protocol.identity import chained_digest
from immortal.testing import Environment

PER_CALL = 100


def pack(numbers: range) -> bytes:
    return msgspec.msgpack.encode(list(numbers))


def done(run: Run, count: int | None = None, failures: dict[int, str] | None = None) -> Response:
    """What a worker that squares gives back of the first ``count`` tasks of ``run``."""
    tasks = msgspec.msgpack.decode(run.tasks)[: run.count if count is None else count]
    return Response(
        run.batch, run.first, len(tasks), msgspec.msgpack.encode([task**2 for task in tasks]), failures or {}
    )


class Pipeline:
    def __init__(self, env: Environment) -> None:
        self.env = env
        self.cluster = env.start(Cluster, "cluster")
        self.collector: Instance[Collector] = env.start(Collector, "results")

    def start(self, batch: str = "squares", function: str = "square", size: int | None = None) -> int:
        first = self.cluster.call(Cluster.begin, batch, function, "results").next
        if size is not None:
            self.cluster.call(Cluster.put, batch, 0, pack(range(size)))
            self.cluster.call(Cluster.end, batch, size)
        return first

    def work(self, worker: str, limit: int = PER_CALL, response: Response | None = None) -> Run | None:
        limits = {"square": limit} if limit else {}
        return self.cluster.call(Cluster.work, worker, limits, response)

    def run(self, worker: str, limit: int = PER_CALL) -> Run:
        run = self.work(worker, limit)
        assert run is not None
        return run

    def finish(self, worker: str = "late") -> None:
        """This worker does all that is left."""
        response = None
        while (run := self.work(worker, PER_CALL, response)) is not None:
            response = done(run)

    def read(self, batch: str = "squares") -> list[Result]:
        found: list[Result] = []
        while (page := self.collector.call(Collector.page, batch, len(found))) is not None and page.count:
            found += results(page)
        return found


@pytest.fixture
def pipeline(immortal_env: Environment) -> Pipeline:
    return Pipeline(immortal_env)


def squares(count: int) -> list[Result]:
    return [Result(number, number**2) for number in range(count)]


def test_tasks_in_results_out(pipeline: Pipeline) -> None:
    pipeline.start(size=250)
    one, two = pipeline.run("one"), pipeline.run("two")
    assert [(run.first, run.count) for run in (one, two)] == [(0, 100), (100, 100)]
    pipeline.work("two", 0, done(two))
    assert pipeline.read() == [], "in order: the first has not come"
    pipeline.work("one", 0, done(one))
    pipeline.finish()
    assert pipeline.read() == squares(250)
    received = pipeline.collector.call(Collector.received, "squares")
    assert (received.done, received.size, received.is_complete) == (250, 250, True)
    assert pipeline.cluster.call(Cluster.progress, "squares").is_complete
    assert not pipeline.cluster.state.dispatch.batches, "of a batch that is done nothing but its progress is kept"


def test_a_silent_workers_tasks_go_to_others_from_its_last_response_on(pipeline: Pipeline) -> None:
    pipeline.start(size=100)
    lost = pipeline.run("lost")
    pipeline.work("lost", 0, done(lost, 40))
    for _ in range(int(SILENCE_S) + 1):
        assert pipeline.work("other") is None
        pipeline.env.advance(seconds=1)
    again = pipeline.run("other", 7)
    assert (again.first, again.count) == (40, 60 // 16), "in small runs: one of these may have killed it"
    progress = pipeline.cluster.call(Cluster.progress, "squares")
    assert (progress.resent, progress.workers) == (60, 1)
    pipeline.finish("other")
    assert pipeline.read() == squares(100)


def test_one_that_was_only_slow_brings_nothing_twice(pipeline: Pipeline) -> None:
    pipeline.start(size=100)
    slow = pipeline.run("slow")
    pipeline.cluster.call(Cluster.leave, "slow", True)
    again = pipeline.run("other")
    pipeline.work("slow", 0, done(slow, 5))
    pipeline.work("other", 0, done(again))
    pipeline.work("slow", 0, done(slow))
    assert pipeline.read() == squares(100)
    assert pipeline.collector.state.gathered["squares"].failed == 0
    assert pipeline.work("other") is None


def test_nobody_gets_what_a_late_one_has_done(pipeline: Pipeline) -> None:
    pipeline.start(size=150)
    slow = pipeline.run("slow")
    pipeline.cluster.call(Cluster.leave, "slow", True)
    pipeline.work("slow", 0, done(slow, 90))
    assert pipeline.run("other").first == 90
    pipeline.work("slow", 0, done(slow))
    assert pipeline.run("other").first == 100
    pipeline.finish("other")
    assert pipeline.read() == squares(150)


def test_while_the_cluster_is_down_nobody_is_silent(pipeline: Pipeline) -> None:
    pipeline.start(size=100)
    pipeline.run("one")
    pipeline.cluster.crash()
    pipeline.env.advance(seconds=10 * SILENCE_S)
    pipeline.cluster.recover()
    assert pipeline.work("two") is None
    assert pipeline.cluster.call(Cluster.progress, "squares").given == 100


def test_who_was_silent_is_no_worker_also_if_nobody_is_left_to_find_it_lost(pipeline: Pipeline) -> None:
    pipeline.start(size=100)
    pipeline.run("one")
    assert pipeline.cluster.call(Cluster.progress, "squares").workers == 1
    pipeline.env.advance(seconds=SILENCE_S + 1)
    progress = pipeline.cluster.call(Cluster.progress, "squares")
    assert (progress.workers, progress.given) == (0, 100)


def test_a_task_that_kills_is_set_aside_and_the_others_are_done(pipeline: Pipeline) -> None:
    pipeline.start(size=100)
    deaths = 0
    while (run := pipeline.work("worker")) is not None:
        if run.first <= 37 < run.first + run.count:
            pipeline.cluster.call(Cluster.leave, "worker", True)
            deaths += 1
        else:
            pipeline.work("worker", 0, done(run))
    assert deaths == 2 + 3, "a run of 100, one of 6, and three times alone"
    found = pipeline.read()
    assert [result.number for result in found if result.error is not None] == [37]
    assert found[37].error == "set aside: 3 workers ended or fell silent while they had this task alone"
    assert [result.value for result in found] == [None if number == 37 else number**2 for number in range(100)]
    assert pipeline.cluster.call(Cluster.progress, "squares").failed == 1


def test_a_worker_that_leaves_has_killed_nobody(pipeline: Pipeline) -> None:
    pipeline.start(size=50)
    pipeline.run("one")
    pipeline.cluster.call(Cluster.leave, "one")
    assert pipeline.run("two").count == 50
    assert pipeline.cluster.call(Cluster.progress, "squares").resent == 0


def test_a_failure_is_a_result(pipeline: Pipeline) -> None:
    pipeline.start(size=3)
    run = pipeline.run("one")
    pipeline.work("one", 0, done(run, failures={1: "ValueError: no"}))
    assert pipeline.read()[1].error == "ValueError: no"


def test_a_ventilator_that_died_goes_on_where_the_cluster_is(pipeline: Pipeline) -> None:
    pipeline.start()
    pipeline.cluster.call(Cluster.put, "squares", 0, pack(range(60)))
    assert pipeline.start() == 60
    pipeline.cluster.call(Cluster.put, "squares", 30, pack(range(30, 90)))
    assert pipeline.start() == 90
    pipeline.cluster.call(Cluster.end, "squares", 90)
    pipeline.cluster.call(Cluster.end, "squares", 90)
    pipeline.finish()
    assert pipeline.read() == squares(90)
    assert pipeline.start() == 90, "also of a batch that is done"
    pipeline.cluster.call(Cluster.put, "squares", 0, pack(range(60)))
    pipeline.cluster.call(Cluster.end, "squares", 90)
    assert pipeline.work("one") is None


def test_what_a_ventilator_gets_wrong(pipeline: Pipeline) -> None:
    pipeline.start()
    call = pipeline.cluster.call
    for wrong, text in (
        (lambda: call(Cluster.begin, "squares", "cube", "results"), "not for 'cube'"),
        (lambda: call(Cluster.begin, "", "cube", "results"), "1 to 128 bytes"),
        (lambda: call(Cluster.put, "other", 0, pack(range(1))), "there is no batch 'other'"),
        (lambda: call(Cluster.put, "squares", 5, pack(range(1))), "0 was expected: send from there"),
        (lambda: call(Cluster.put, "squares", -1, pack(range(1))), "tasks from -1 on came"),
        (lambda: call(Cluster.put, "squares", 0, b"\xff"), "a MessagePack array was expected"),
        (lambda: call(Cluster.put, "squares", 0, pack(range(5000))), "at most 4096"),
        (lambda: call(Cluster.end, "squares", 7), "can't end with 7 tasks: 0 came"),
        (lambda: call(Cluster.progress, "other"), "there is no batch 'other'"),
    ):
        with pytest.raises(BatchError, match=text):
            wrong()
    pipeline.cluster.call(Cluster.put, "squares", 0, pack(range(4)))
    pipeline.cluster.call(Cluster.end, "squares", 4)
    with pytest.raises(BatchError, match="has ended with 4 tasks, and task 8 came"):
        call(Cluster.put, "squares", 4, pack(range(5)))
    for response in (Response("squares", 0, 9, pack(range(9))), Response("squares", 0, 3, pack(range(2)))):
        with pytest.raises(BatchError, match="4 tasks are known"):
            call(Cluster.work, "one", {}, response)


def test_a_full_batch_makes_its_ventilator_wait(pipeline: Pipeline) -> None:
    pipeline.start()
    sent = 0
    while pipeline.cluster.call(Cluster.put, "squares", sent, pack(range(4096))):
        sent += 4096
    assert sent + 4096 == WAITING_TASKS_MAX
    waits = pipeline.cluster.begin(Cluster.room, "squares")
    pipeline.env.run()
    while pipeline.cluster.call(Cluster.progress, "squares").given < WAITING_TASKS_MAX // 2:
        assert not waits.done, "not for each run anew"
        pipeline.run(f"worker {pipeline.cluster.call(Cluster.progress, 'squares').workers}", 4096)
    pipeline.run("one more", 4096)
    pipeline.env.run()
    assert waits.result() is True


def test_a_worker_without_work_is_called(pipeline: Pipeline) -> None:
    idle = [pipeline.cluster.begin(Cluster.idle, name, ["square"]) for name in ("one", "two")]
    other = pipeline.cluster.begin(Cluster.idle, "cubes", ["cube"])
    pipeline.env.run()
    assert not any(one.done for one in idle)
    pipeline.start(size=10)
    pipeline.env.run()
    assert [one.done for one in idle] == [True, False], "one is enough"
    pipeline.run("one", 5)
    pipeline.env.run()
    assert idle[1].done, "who takes something and leaves something calls the next"
    assert not other.done
    pipeline.env.advance(seconds=10)
    assert other.done
    assert not pipeline.cluster.state.dispatch.resting


def test_ventilators_share_the_workers(pipeline: Pipeline) -> None:
    for batch in ("first", "second", "cubes"):
        pipeline.start(batch, "cube" if batch == "cubes" else "square", size=200)
    taken = [pipeline.run(f"worker {index}", 50).batch for index in range(4)]
    assert taken == ["first", "second", "first", "second"]


def test_results_can_be_waited_for(pipeline: Pipeline) -> None:
    pipeline.start(size=10)
    first = pipeline.collector.begin(Collector.watch, "squares", 0)
    last = pipeline.collector.begin(Collector.watch, "squares", 9)
    end = pipeline.collector.begin(Collector.watch, "squares", 10)
    pipeline.env.run()
    assert end.done, "there is no such task"
    run = pipeline.run("one")
    pipeline.work("one", 0, done(run, 5))
    pipeline.env.run()
    assert (first.done, last.done) == (True, False)
    pipeline.env.advance(seconds=10)
    assert last.done, "it gives up after some seconds, and is asked again"
    assert not pipeline.collector.state.readers


def test_the_collector_counts_a_number_once_whoever_brings_it(pipeline: Pipeline) -> None:
    """The whole batch once more by way of another cluster, as when the first one's machine is lost."""
    pipeline.start(size=100)
    run = pipeline.run("one")
    pipeline.work("one", 0, done(run, 10))
    pipeline.work("one", 0, done(run, 30))
    spare = pipeline.env.start(Cluster, "spare")
    pipeline.cluster = spare
    pipeline.start(size=100)
    pipeline.finish("two")
    assert pipeline.read() == squares(100)
    gathered = pipeline.collector.state.gathered["squares"]
    assert (gathered.done.starts, gathered.done.stops) == ([0], [100])
    assert sum(run.count for run in pipeline.collector.state.kept["squares"].runs.values()) == 100
    assert pipeline.collector.call(Collector.forget, "squares") is True
    assert pipeline.collector.call(Collector.forget, "squares") is False
    assert not pipeline.collector.state.kept


class Sums(BaseCollector):
    """A collector of a user's, with a handler of its own."""

    total: int
    complete_batches: list[str]

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.complete_batches = []

    def collect(self, batch: str, results: list[Result]) -> None:
        self.total += sum(result.value for result in results if isinstance(result.value, int))

    def complete(self, batch: str, size: int) -> None:
        self.complete_batches.append(f"{batch} {size}")

    @rpc
    def sum(self) -> int:
        return self.total


def test_a_collector_of_ones_own(immortal_env: Environment) -> None:
    pipeline = Pipeline(immortal_env)
    sums = immortal_env.start(Sums, "sums")
    pipeline.cluster.call(Cluster.begin, "squares", "square", "sums")
    pipeline.cluster.call(Cluster.put, "squares", 0, array([b"\x01", b"\x02", b"\x03"]))
    pipeline.cluster.call(Cluster.end, "squares", 3)
    pipeline.finish()
    assert sums.call(Sums.sum) == 14
    assert sums.state.complete_batches == ["squares 3"]


# --- names that are used again ----------------------------------------------------------------------------------------


def digest(numbers: range) -> bytes:
    return digest_of(numbers)


class Sender:
    """A ventilator, as its process has it: what it sends goes through the real one's code, to the real handlers."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self.pipeline.cluster.call(getattr(Cluster, name), *arguments)

    @contextmanager
    def collector(self, name: str) -> Iterator[Any]:
        handlers = self.pipeline.collector

        class Reader:
            def __getattr__(self, name: str) -> Callable[..., Any]:
                return lambda *arguments: handlers.call(getattr(Collector, name), *arguments)

        yield Reader()

    def batch(self, function: str = "square", *, again: bool = False, name: str = "squares") -> Batch:
        sender: Any = self
        return Ventilator(sender, self.collector).batch(name, function, collector="results", again=again)


def values(batch: Batch) -> list[object]:
    return [result.value for result in batch.results(timeout=0)]


def test_a_name_of_a_batch_that_has_ended_is_no_other_batchs(pipeline: Pipeline) -> None:
    sender = Sender(pipeline)
    sender.batch().send(range(4))
    pipeline.finish()
    with pytest.raises(BatchConflict, match="is for 'square' and collector 'results' with 4 tasks") as caught:
        sender.batch("cube")
    assert caught.value.given.startswith("for 'cube'")
    with pytest.raises(BatchConflict, match="4 tasks") as caught:
        sender.batch().send([0, 1, 2, 4])
    assert caught.value.known != caught.value.given
    for tasks in (range(3), range(5)):
        with pytest.raises(BatchError):
            sender.batch().send(tasks)
    sender.batch().send(range(4))
    assert values(sender.batch()) == [0, 1, 4, 9]


def test_again_makes_another_batch_of_the_name_and_nobody_gets_the_old_results(pipeline: Pipeline) -> None:
    sender = Sender(pipeline)
    first = sender.batch()
    first.send(range(4))
    pipeline.finish()
    again = sender.batch(again=True)
    with pytest.raises(TimeoutError):
        values(again)
    again.send(range(10, 14))
    with pytest.raises(TimeoutError):
        values(again)
    pipeline.finish()
    assert values(again) == [100, 121, 144, 169]
    with pytest.raises(BatchConflict, match="has ended"):
        values(first)
    with pytest.raises(BatchConflict, match="has ended"):
        first.end()


def test_again_goes_on_with_a_batch_that_has_not_ended(pipeline: Pipeline) -> None:
    sender = Sender(pipeline)
    begun = sender.batch(again=True)
    begun.put(0)
    begun.flush()
    resumed = sender.batch(again=True)
    assert resumed.sent == 1
    with pytest.raises(BatchConflict):
        sender.batch("cube", again=True)
    resumed.send(range(3))
    pipeline.finish()
    assert values(resumed) == [0, 1, 4]


def test_what_a_worker_still_has_of_the_earlier_batch_is_no_result_of_the_later_one(pipeline: Pipeline) -> None:
    sender = Sender(pipeline)
    sender.batch().send(range(4))
    slow = pipeline.run("slow")
    pipeline.cluster.call(Cluster.leave, "slow", True)
    pipeline.finish()
    sender.batch(again=True).send(range(10, 14))
    pipeline.cluster.call(Cluster.work, "slow", {}, done(slow), slow.life)
    pipeline.finish()
    assert values(sender.batch()) == [100, 121, 144, 169]


def test_what_a_worker_holds_of_a_batch_that_is_done_is_not_given_back_to_the_next(pipeline: Pipeline) -> None:
    sender = Sender(pipeline)
    sender.batch().send(range(4))
    run = pipeline.run("silent")
    pipeline.cluster.call(Cluster.work, "twin", {}, done(run))  # somebody else has done it as well
    assert pipeline.cluster.call(Cluster.progress, "squares").is_complete
    sender.batch(again=True).send(range(10, 12))
    pipeline.cluster.call(Cluster.leave, "silent", True)
    pipeline.finish()
    assert values(sender.batch()) == [100, 121]


def test_a_ventilator_that_comes_again_with_other_tasks_is_refused_before_any_is_put(pipeline: Pipeline) -> None:
    sender = Sender(pipeline)
    begun = sender.batch()
    for number in range(5):
        begun.put(number)
    begun.flush()
    with pytest.raises(BatchConflict, match="so far 5 tasks"):
        sender.batch().send([0, 1, 2, 3, 5, 6])
    assert pipeline.cluster.call(Cluster.progress, "squares").put == 5
    sender.batch().send(number for number in range(8))  # a generator: its beginning is made anew
    assert pipeline.cluster.call(Cluster.progress, "squares").put == 8


def test_two_ventilators_at_once_put_the_same_tasks_or_one_is_refused(pipeline: Pipeline) -> None:
    sender = Sender(pipeline)
    one, same, other = sender.batch(), sender.batch(), sender.batch()
    for number in range(6):
        one.put(number)
    one.flush()
    for number in range(9):
        same.put(number)
        other.put(number if number < 4 else 0)
    same.flush()  # begins before what is there, and ends behind it
    assert pipeline.cluster.call(Cluster.progress, "squares").put == 9
    with pytest.raises(BatchConflict):
        other.flush()
    one.put(6)
    one.flush()
    for number in (7, 8):
        one.put(number)
    one.end()
    pipeline.finish()
    assert values(one) == [number**2 for number in range(9)]


def test_the_pieces_in_which_tasks_come_make_no_difference(pipeline: Pipeline) -> None:
    assert digest(range(10)) == chained_digest(digest(range(4)), [msgspec.msgpack.encode(one) for one in range(4, 10)])
    sender = Sender(pipeline)
    begun = sender.batch()
    for number in range(7):
        begun.put(number)
        begun.flush()
    pipeline.cluster.call(Cluster.put, "squares", 7, pack(range(7, 9)))  # without digests
    sender.batch().send(range(12))
    assert pipeline.cluster.call(Cluster.progress, "squares").size == 12


def test_a_collector_takes_no_results_of_another_function_or_other_tasks_from_another_cluster(
    pipeline: Pipeline,
) -> None:
    sender = Sender(pipeline)
    sender.batch().send(range(4))
    pipeline.finish()
    gathered = CollectedBatch()
    mine = Contents("square", "results", 4, digest(range(4)), True, Life("cluster", 1))
    gathered.check_identity("squares", mine.life, mine)
    same = msgspec.structs.replace(mine, life=Life("spare", 1))
    gathered.check_identity("squares", same.life, same)
    for other in (
        msgspec.structs.replace(same, function="cube"),
        msgspec.structs.replace(same, digest=digest(range(1, 5))),
        msgspec.structs.replace(same, count=5),
    ):
        with pytest.raises(BatchConflict):
            gathered.check_identity("squares", other.life, other)
    assert not gathered.is_replaced_by(Life("spare", 1))
    assert gathered.is_replaced_by(Life("spare", 2))
    assert gathered.is_replaced_by(Life("third", 1, again=True))


def test_a_name_that_the_cluster_has_forgotten_brings_no_old_results(
    monkeypatch: pytest.MonkeyPatch, pipeline: Pipeline
) -> None:
    monkeypatch.setattr("immortal.appsdk.patterns.harmony.cluster.BATCHES_ENDED_MAX", 1)
    sender = Sender(pipeline)
    sender.batch().send(range(4))
    pipeline.finish()
    sender.batch(name="other").send(range(1))
    pipeline.finish()
    anew = sender.batch()
    anew.send(range(20, 22))
    pipeline.finish()
    assert values(anew) == [400, 441]
