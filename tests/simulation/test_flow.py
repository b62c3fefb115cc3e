"""Loops under full load, with windows and memory as small as possible: no message waits for itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.effort import effort
from tests.simulation.plan import SMALL, Fault, Plan
from tests.simulation.world import World

SMALLEST = replace(
    SMALL,
    group_size_bytes=1,
    output_memory_bytes=1,
    spill_row_bytes=1,
    peer_window_bytes=1,
    peer_window_frames=1,
    peer_frame_bytes=1,
    receive_budget_bytes=1,
    grant_bytes_min=1,
    app_window_bytes=1,
    read_size_bytes=1,
)


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c")], ids=["self-calls", "a cycle of three"])
@pytest.mark.parametrize("spill_limit_bytes", [0, 400])
@pytest.mark.parametrize("crashes", [0, 4])
def test_a_loop_under_full_load_goes_on(names: tuple[str, ...], spill_limit_bytes: int, crashes: int) -> None:
    for seed in range(effort(1)):
        limits = replace(SMALLEST, spill_limit_bytes=spill_limit_bytes)
        rng = Plan(seed).stream("crashes")
        at_effects = sorted(rng.randrange(20, 400) for _ in range(crashes))
        faults = tuple(Fault(at, rng.choice(("crash app", "crash both")), rng.random()) for at in at_effects)
        world = World(Plan(seed, names, work=10, loss_rate=0.05, faults=faults, limits=limits, hops=30))
        world.run()
        assert (world.crashes > 0) is (crashes > 0)
