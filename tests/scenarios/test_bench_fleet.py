"""A small fleet: it starts, works, is looked at while idle, and stops. 200 of them are measured by hand."""

from __future__ import annotations

from pathlib import Path

from immortal.bench.fleet import measure_fleet

RESIDENT_MIB_MAX = 40  # wanted of an idle coordinator
PROCESSOR_PERCENT_MAX = 0.5


def test_a_small_fleet(tmp_path: Path) -> None:
    result = measure_fleet(6, neighbours=4, calls=50, idle_s=5.0, curve=True, folder=tmp_path)
    assert result.calls == 6 * 4 * 50
    mean_mib, most_mib = result.coordinators.resident_mib
    assert 10 < mean_mib <= most_mib < RESIDENT_MIB_MAX
    assert result.coordinators.own_mib[0] < result.coordinators.proportional_mib[0] < mean_mib
    assert result.coordinators.processor_percent[0] < PROCESSOR_PERCENT_MAX
    assert list(tmp_path.iterdir()) == []
