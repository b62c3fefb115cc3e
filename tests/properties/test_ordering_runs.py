"""Ordered multicasts over real instances, by seed: crashes, partitions, checkpoints; planted bugs are found."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from immortal.appsdk.calls.outbox import Outbox
from immortal.appsdk.ordering import multicasts
from immortal.appsdk.ordering.groups import QueuedRun, Sent
from immortal.appsdk.ordering.machine import Key, Ordering
from immortal.appsdk.ordering.messages import Timestamp
from immortal.appsdk.ordering.multicasts import Multicasts
from immortal.appsdk.ordering.send_queue import SendQueue
from immortal.coordinator.core.errors import DivergenceError
from tests.helpers import causal_runs
from tests.helpers.effort import effort
from tests.helpers.ordering_runs import BrokenOrderError, run_seed

SEEDS = effort(10)
CAUSAL_SEEDS = effort(4)
SEEDS_MAX = 1000  # within which each planted bug is found

_arrivals = count()


def test_the_order_holds_under_faults() -> None:
    for seed in range(SEEDS):
        run_seed(seed)


def test_the_order_holds_where_each_run_that_holds_others_up_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multicasts, "LATE_NS", 0)
    for seed in range(SEEDS):
        run_seed(seed)


def test_plain_calls_and_multicasts_are_never_heard_before_their_causes() -> None:
    pairs = 0
    for seed in range(CAUSAL_SEEDS):
        found, wrong = causal_runs.run_seed(seed)
        assert wrong == []
        pairs += found
    assert pairs > 1000 * CAUSAL_SEEDS / 2


def _without_own(*arguments: Any, own_name: str) -> SendQueue:
    return SendQueue(*arguments)


@pytest.mark.parametrize(
    ("owner", "name", "broken", "first"),  # the last: as in BUGS below
    [(Outbox, "_order", lambda outbox, batch: None, 28), (multicasts, "SendQueue", _without_own, 0)],
)
def test_inversions_are_found(
    owner: object, name: str, broken: object, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken)
    assert any(causal_runs.run_seed(seed)[1] for seed in range(first, first + SEEDS_MAX))


def _no_tick(self: Ordering, estimate: Timestamp) -> Timestamp:
    return max(self.state.clock, estimate)


def _no_sync(self: Ordering, sent: Sent) -> list[str]:
    return []


def _never_busy(self: Multicasts) -> bool:
    return False


def _by_arrival(filed: QueuedRun) -> Key:
    arrived = getattr(_by_arrival, "known", {})
    return filed.timestamp, not filed.sender, "", arrived.setdefault((id(filed), filed.number), next(_arrivals))


_by_arrival.known = {}  # type: ignore[attr-defined]

BUGS = {  # the last: where the search begins, as the seeds before it are known not to find it
    "tick forgotten": (Ordering, "_propose", _no_tick, 60),
    "unblock before sync": (Ordering, "_destinations_before_final", _no_sync, 455),
    "unicast past a block": (Multicasts, "is_busy", property(_never_busy), 0),
    "ties by arrival": (Ordering, "_key", staticmethod(_by_arrival), 0),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken, first = BUGS[bug]
    monkeypatch.setattr(owner, name, broken)
    for seed in range(first, SEEDS_MAX):
        try:
            run_seed(seed)
        except (BrokenOrderError, DivergenceError):  # by arrival: a replay may find another order
            return
    raise AssertionError(f"{bug} was not found within {SEEDS_MAX} seeds")
