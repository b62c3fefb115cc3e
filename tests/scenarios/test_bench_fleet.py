"""A small fleet: it starts, works, is looked at while idle, and stops. 200 of them are measured by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from immortal.bench import fleet
from immortal.bench.fleet import measure_fleet

RESIDENT_MIB_MAX = 40
PROCESSOR_PERCENT_MAX = 0.5


def test_what_memory_has_no_room_for_is_registered_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_free_mib", lambda: 2 * fleet.PAIR_MIB)
    result = measure_fleet(50, calls=5, idle_s=1.0, home=tmp_path)
    assert (result.registered, result.instances, result.neighbours) == (50, 2, 1)


@pytest.mark.usefixtures("started_anew")
def test_a_small_fleet(tmp_path: Path) -> None:
    result = measure_fleet(6, neighbours=4, calls=50, idle_s=5.0, curve=True, home=tmp_path)
    assert result.calls == 6 * 4 * 50
    mean_mib, most_mib = result.coordinators.resident_mib
    assert 10 < mean_mib <= most_mib < RESIDENT_MIB_MAX
    assert result.coordinators.own_mib[0] < result.coordinators.proportional_mib[0] < mean_mib
    assert result.coordinators.processor_percent[0] < PROCESSOR_PERCENT_MAX
    assert (result.registered, result.instances) == (6, 6)
    assert result.idle_percent < PROCESSOR_PERCENT_MAX
    assert result.alone_percent < PROCESSOR_PERCENT_MAX
