"""Rates of counters over restarts, and the places of services on the map."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from immortal.coordinator.instances.registry import Registry
from immortal.presenters.fleet import RATE_SPAN_S, RECEIVED, RECORDS, SENT, Fleet, Rates, Row, StreamTimes, streams

SAMPLES = st.lists(
    st.tuples(st.floats(0.01, 3), st.integers(0, 2), st.dictionaries(st.sampled_from("abc"), st.integers(0, 50))),
    max_size=20,
)


@given(SAMPLES)
def test_no_rate_is_below_zero_and_none_comes_from_two_runs(samples: list[tuple[float, int, dict[str, int]]]) -> None:
    rates, now_s = Rates(), 0.0
    began_s: dict[int, float] = {}
    last_run = -1
    for pause_s, run, counts in samples:
        now_s += pause_s
        if run != last_run:
            began_s, last_run = {run: now_s}, run
        found = rates.sample("one", now_s, run, {(RECORDS, key): count for key, count in counts.items()})
        assert all(rate >= 0 for rate in found.values())
        assert not found or now_s > began_s[run], "a first sample has nothing to be compared with"
        assert all(rate <= counts[key] / 0.5 for (_, key), rate in found.items())


@given(st.integers(0, 1000), st.integers(1, 10), st.integers(0, 10**6))
def test_a_steady_rate_is_right_after_a_restart_too(per_s: int, runs: int, began: int) -> None:
    rates, now_s = Rates(), 0.0
    for run in range(runs):
        for second in range(int(RATE_SPAN_S) + 3):
            now_s += 1
            found = rates.sample("one", now_s, run, {(RECORDS, ""): began // (run + 1) + per_s * second})
            assert found == ({} if not second else {(RECORDS, ""): pytest.approx(per_s)})


def test_a_recovery_is_not_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now_s = iter(range(100))
    monkeypatch.setattr("immortal.presenters.fleet.time.monotonic", lambda: float(next(now_s)))
    fleet = Fleet(Registry(tmp_path), lambda *_: nullcontext())

    def measured(phase: str, epoch: int, made: int) -> dict[tuple[str, str], float]:
        outputs = {"to": {"position": made}}
        status = {"pid": 1, "phase": phase, "epoch": epoch, "sequence_id": 9, "outputs": outputs}
        return fleet._current_rates("one", status)

    assert measured("normal", 1, 100) == {}
    assert measured("normal", 1, 110)[SENT, "to"] == 10
    assert measured("recovering", 2, 20) == {}
    assert measured("recovering", 2, 90) == {}
    assert measured("normal", 2, 110) == {}
    assert measured("normal", 2, 113)[SENT, "to"] == 3


def test_streams_know_calls_from_answers_and_problems() -> None:
    """The sender tells of its stream; where it is of another home, the receiver does."""
    called = {"caller": StreamTimes(1, 2, True)}
    answered = {"callee": StreamTimes(3, 4, False)}
    outputs = {"callee": {"position": 9, "acknowledged": 4, "waiting_bytes": 7, "connected": False}}
    rows = [
        Row("caller", "running", "good", status={"outputs": outputs}, rates={(SENT, "callee"): 2.0}, times=answered),
        Row(
            "callee",
            "running",
            "good",
            status={"inputs": {"caller": {}, "far": {}, "callee": {}}, "outputs": {"caller": {"error": "refused"}}},
            rates={(RECEIVED, "caller"): 1.0, (RECEIVED, "far"): 5.0, (RECEIVED, "callee"): 8.0},
            times=called,
        ),
    ]
    far, call, answer = streams(rows)
    assert (far.source, far.to, far.rate, far.has_calls) == ("far", "callee", 5.0, None)
    assert (call.rate, call.unacknowledged, call.waiting_bytes, call.problem) == (2.0, 5, 7, "callee is not connected")
    assert (call.times, call.has_calls) == (called["caller"], True)
    assert (answer.source, answer.has_calls, answer.problem) == ("callee", False, "refused")
    assert rows[1].rate(RECEIVED) == 6.0, "without what it sends to itself"


NAMES = tuple("abcdefghijklmnop")
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)).filter(lambda call: call[0] != call[1]))


@given(CALLS)
def test_each_service_has_a_place_of_its_own(calls: list[tuple[str, str]]) -> None:
    map_pages = pytest.importorskip("immortal.web.map_pages")
    places = map_pages.layout(NAMES, tuple(sorted(set(calls))))
    assert sorted(places) == list(NAMES)
    assert len(set(places.values())) == len(NAMES)


@given(CALLS)
def test_callees_are_right_of_their_callers(calls: list[tuple[str, str]]) -> None:
    map_pages = pytest.importorskip("immortal.web.map_pages")
    without_circles = tuple(sorted({(min(call), max(call)) for call in calls}))
    places = map_pages.layout(NAMES, without_circles)
    assert all(places[caller][0] < places[callee][0] for caller, callee in without_circles)


@pytest.mark.parametrize("circle", ["ab", "abc", "cab"])
def test_a_circle_is_cut_once(circle: str) -> None:
    map_pages = pytest.importorskip("immortal.web.map_pages")
    calls = tuple(zip(circle, circle[1:] + circle[0], strict=True))
    places = map_pages.layout(NAMES, calls)
    assert sum(places[caller][0] >= places[callee][0] for caller, callee in calls) == 1
