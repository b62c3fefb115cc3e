"""A dead and a stalled peer beside eight others, briefly: the eight go on. How well, is measured by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from immortal.bench import isolation as measured
from immortal.bench.harness import Amounts, Context

SECONDS = 1.5


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_a_dead_and_a_stalled_peer_do_not_hold_up_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Calls are made as fast as they can be: for two thirds of the time they fill half of the memory.
    monkeypatch.setattr(measured, "SETTLE_S", 0.4)
    monkeypatch.setattr(measured, "TUNING", measured.TUNING.replace("8", "4"))
    rate, _, p99_ms = measured.isolation(Context(Amounts(), tmp_path), seconds=SECONDS, rounds=1)
    (healthy,), (faulty,) = rate.samples[measured.HEALTHY], rate.samples[measured.FAULTY]
    assert healthy > 0
    # Held up, they had nothing of the first and all of the window of the second; the machine may be busy with others.
    assert faulty > 0.3 * healthy
    assert p99_ms.samples[measured.FAULTY][0] < 1000 * SECONDS
