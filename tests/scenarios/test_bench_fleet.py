"""A small fleet: it starts, works, is looked at while idle, and stops. 200 of them are measured by hand."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from immortal.bench import fleet
from immortal.bench.harness import Amounts, Context

RESIDENT_MIB_MAX = 40
PROCESSOR_PERCENT_MAX = 0.5


def test_what_memory_has_no_room_for_is_registered_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_free_mib", lambda: 2 * fleet.PAIR_MIB)
    idle, steps, *_ = fleet.fleet(Context(Amounts(), tmp_path), 50, calls=5, idle_s=1.0)
    assert set(idle.samples) == {"beside 50 registered", "alone"}
    assert steps.name == "2 instances, each with its app"


@pytest.mark.usefixtures("started_anew")
def test_a_small_fleet(tmp_path: Path) -> None:
    idle, steps, *memory, cpu = fleet.fleet(
        Context(Amounts(), tmp_path), 6, neighbours=4, calls=50, idle_s=5.0, curve=True
    )
    assert "all 1,200 calls are counted, after that" in steps.samples
    resident_mib, proportional_mib, own_mib = (figure.samples["coordinator"] for figure in memory)
    assert len(resident_mib) == 6
    assert 10 < mean(resident_mib) <= max(resident_mib) < RESIDENT_MIB_MAX
    assert mean(own_mib) < mean(proportional_mib) < mean(resident_mib)
    assert mean(cpu.samples["coordinator"]) < PROCESSOR_PERCENT_MAX
    assert all(percent < PROCESSOR_PERCENT_MAX for some in idle.samples.values() for percent in some)
