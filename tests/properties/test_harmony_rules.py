"""The pipeline's rules under any order of events: workers that die, fall silent and come back late, two ventilators."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from immortal.appsdk.patterns.harmony.batch import Ranges, Response, Run, results
from immortal.appsdk.patterns.harmony.cluster import Dispatch
from immortal.appsdk.patterns.harmony.collector import CollectedBatch, KeptResults
from tests.helpers.effort import effort

NUMBERS = st.integers(0, 60)
SILENCE_S, DEATHS_MAX, STEP_NS = 3.0, 3, 1_000_000_000
BATCHES = {"one": 150, "two": 40}
WORKERS = st.sampled_from("abcd")
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=12), NUMBERS, NUMBERS)
def test_ranges_are_a_set(added: list[tuple[int, int]], start: int, stop: int) -> None:
    ranges, expected = Ranges(), set[int]()
    for one, other in added:
        ranges.add(one, other)
        expected |= set(range(one, other))
    assert {number for pair in zip(ranges.starts, ranges.stops, strict=True) for number in range(*pair)} == expected
    assert all(before < after for before, after in zip(ranges.stops, ranges.starts[1:], strict=False)), "none touch"
    missing = [number for pair in ranges.missing(start, stop) for number in range(*pair)]
    assert missing == [number for number in range(start, stop) if number not in expected]
    assert ranges.covers(start, stop) == (not missing)
    assert len(ranges) == len(expected)


@given(st.permutations([(0, 3), (3, 4), (4, 9), (12, 20)]), NUMBERS)
def test_what_is_kept_is_found_by_number(runs: list[tuple[int, int]], number: int) -> None:
    kept = KeptResults()
    for first, stop in runs:
        kept.add(Response("b", first, stop - first, encode(list(range(first, stop))), {}))
    page = kept.page(number)
    owner = next((run for run in runs if run[0] <= number < run[1]), None)
    if owner is None:
        assert page is None
    else:
        assert page is not None
        assert [(result.number, result.value) for result in results(page)] == [(n, n) for n in range(number, owner[1])]


class Pipeline(RuleBasedStateMachine):
    """A worker may do its run at any later time, however long it was thought lost. Each result reaches the collector
    once, has its task's value, and all are there in the end."""

    @initialize()
    def begin(self) -> None:
        self.dispatch = Dispatch()
        self.now_ns = 0
        self.in_hand: dict[str, list[Run]] = {}  # by worker: what it was given, and has not given back yet
        self.gathered = {name: CollectedBatch() for name in BATCHES}
        self.values: dict[str, dict[int, object]] = {name: {} for name in BATCHES}
        for name in BATCHES:
            assert self.dispatch.begin(name, "f", "results", "cluster").next == 0

    def deliver(self, responses: list[Response]) -> None:
        for response in responses:
            for new in self.gathered[response.batch].add_results(response):
                assert new is response, "the cluster passes nothing on twice"
                for result in results(new):
                    assert result.number not in self.values[response.batch]
                    self.values[response.batch][result.number] = result.error or result.value
            self.dispatch.close(response.batch)

    def hear(self, worker: str) -> None:
        self.dispatch.note_contact(worker)
        self.deliver(self.dispatch.advance_time(self.now_ns, SILENCE_S, DEATHS_MAX))

    @rule(name=st.sampled_from(sorted(BATCHES)), back=st.integers(0, 20), count=st.integers(1, 40))
    def put(self, name: str, back: int, count: int) -> None:
        """Also some that were put before, as a ventilator that was killed may do."""
        first = max(0, self.dispatch.begin(name, "f", "results", "cluster").next - back)
        stop = min(first + count, BATCHES[name])
        self.dispatch.put(name, first, encode([2 * number for number in range(first, stop)]))
        if stop == BATCHES[name]:
            self.dispatch.end(name, BATCHES[name])
            self.dispatch.close(name)

    @rule(worker=WORKERS, limit=st.integers(1, 50))
    def take(self, worker: str, limit: int) -> None:
        self.hear(worker)
        run = self.dispatch.next_run(worker, {"f": limit})
        if run is not None:
            assert run.count <= limit
            assert decode(run.tasks) == [2 * number for number in range(run.first, run.first + run.count)]
            self.in_hand.setdefault(worker, []).append(run)

    @rule(worker=WORKERS, which=st.integers(0, 5), share=st.integers(1, 100))
    def apply_results(self, worker: str, which: int, share: int) -> None:
        """With what it was given last, or long ago; with all of it, or the first tasks."""
        runs = self.in_hand.get(worker, [])
        if runs:
            run = runs[-1 - which % len(runs)]
            count = -(-run.count * share // 100)
            self.hear(worker)
            tasks = decode(run.tasks)[:count]
            response = Response(run.batch, run.first, count, encode([task + 1 for task in tasks]), {})
            self.deliver(self.dispatch.apply_results(worker, response))

    @rule(worker=WORKERS)
    def die(self, worker: str) -> None:
        self.deliver(self.dispatch.remove_lost(worker, DEATHS_MAX))

    @rule(worker=WORKERS)
    def leave(self, worker: str) -> None:
        self.dispatch.remove_worker(worker)

    @rule(seconds=st.integers(1, 100))
    def wait(self, seconds: int) -> None:
        self.now_ns += seconds * STEP_NS

    @rule()
    def checkpoint(self) -> None:
        self.dispatch = decode(encode(self.dispatch), type=Dispatch)

    @invariant()
    def nothing_is_forgotten(self) -> None:
        """Each task that came is done, waits, or is in somebody's hands; what is remembered of done ones is small."""
        for name, batch in self.dispatch.batches.items():
            known = set[int]()
            leases = [worker.lease for worker in self.dispatch.workers.values() if worker.lease is not None]
            pieces = [*batch.fresh, *batch.lost, *(lease.piece for lease in leases if lease.batch == name)]
            for piece in pieces:
                known |= set(range(piece.first, piece.stop))
            assert all(set(range(*gap)) <= known for gap in batch.done.missing(0, batch.put_count))
            assert len(batch.done.starts) <= len(pieces) + 1

    def teardown(self) -> None:
        if not hasattr(self, "dispatch"):
            return
        for name, size in BATCHES.items():
            first = self.dispatch.begin(name, "f", "results", "cluster").next
            self.dispatch.put(name, first, encode([2 * number for number in range(first, size)]))
            self.dispatch.end(name, size)
            self.dispatch.close(name)
        for worker in "abcd":
            self.deliver(self.dispatch.remove_lost(worker, DEATHS_MAX))
        self.dispatch.note_contact("last")
        while (run := self.dispatch.next_run("last", {"f": 1000})) is not None:
            values = encode([task + 1 for task in decode(run.tasks)])
            self.deliver(self.dispatch.apply_results("last", Response(run.batch, run.first, run.count, values, {})))
        for name, size in BATCHES.items():
            found = self.values[name]
            assert sorted(found) == list(range(size))
            assert all(value == 2 * n + 1 or str(value).startswith("set aside") for n, value in found.items())
            assert (self.gathered[name].done.starts, self.gathered[name].done.stops) == ([0], [size])
        assert not self.dispatch.batches


def test_each_result_once_whatever_happens() -> None:
    run_state_machine_as_test(
        Pipeline, settings=settings(max_examples=effort(25), stateful_step_count=60, deadline=None)
    )
