"""A dead and a stalled peer beside eight others, briefly: the eight go on. How well, is measured by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from immortal.bench.isolation import OTHERS, RATE, measure_isolation

SECONDS = 1.5


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_a_dead_and_a_stalled_peer_do_not_hold_up_the_others(tmp_path: Path) -> None:
    result = measure_isolation(seconds=SECONDS, rounds=1, home=tmp_path)
    assert [window.faulty for window in result.windows] == [False, True]
    assert [window.samples for window in result.windows] == [len(OTHERS) * int(SECONDS * RATE)] * 2
    assert result.windows[0].calls_per_s > 0
    # Held up, they had nothing of the first and all of the window of the second; the machine may be busy with others.
    assert result.throughput_ratio > 0.3
    assert result.windows[1].p99_ms < 1000 * SECONDS
