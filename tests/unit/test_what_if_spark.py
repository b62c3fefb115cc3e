"""Parts of a fleet's what-if on Spark are put together as one process puts them."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from immortal.cli.what_if_spark import merged
from immortal.pipeline.cli import Progress
from immortal.replay.fleet.outcome import BrokenCheck, ClientAnswers, End, FleetOutcome, Seeds

BROKEN = BrokenCheck("shop", 1, 0, "", "sold too much", "", 1, {})
Ends = list[tuple[str, bool]]
"""Digest of the end by order, and whether the check is broken in it."""


def outcome(ends: Ends, orders: list[int]) -> FleetOutcome:
    """What a process finds that runs these orders."""
    found: dict[str, End] = {}
    for order in orders:
        digest, is_broken = ends[order]
        end = found.setdefault(digest, End(order, 0, 0, f"as in {digest}", digest))
        end.count += 1
        end.broken += is_broken
    broken = BROKEN if ends[0][1] else None
    seeds = Seeds.of(list(found.values()))
    return FleetOutcome(True, [], [], [], ClientAnswers(), [], [], broken, None, None, seeds, [])


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.booleans()), min_size=1, max_size=9), st.data())
def test_orders_in_parts_are_orders_of_one_process(ends: Ends, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(2, len(ends) - 1)))) if len(ends) > 2 else []
    parts = [list(range(*part)) for part in zip([1, *cuts], [*cuts, len(ends)], strict=True)]
    whole = outcome(ends, list(range(len(ends))))
    assert merged([outcome(ends, [0, *part]) for part in parts]) == whole


@dataclass
class _Stage:
    numTasks: int = 20  # noqa: N815 (Spark's name)
    numCompletedTasks: int = 7  # noqa: N815


def test_progress_names_the_round_and_who_ended_last() -> None:
    class Tracker:
        def getActiveStageIds(self) -> list[int]:  # noqa: N802
            return [1]

        def getStageInfo(self, stage: int) -> _Stage:  # noqa: N802
            return _Stage()

    shown = Progress()
    shown.watch(type("Spark", (), {"sparkContext": type("Context", (), {"statusTracker": Tracker})}))  # type: ignore[arg-type]
    shown.show_step("round 0, services", lambda: [f"s{number}" for number in range(7)])
    assert shown.__rich__() == "round 0, services: 7 of 20 tasks (s2, s3, s4, s5, s6)"
    shown.show_step("exporting")
    assert shown.__rich__() == "exporting: 7 of 20 tasks"
