"""A dead and a stalled peer beside eight others, briefly: the eight go on. How well, is measured by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from immortal.bench.harness import Amounts, Context
from immortal.bench.isolation import FAULTY, HEALTHY, isolation

SECONDS = 1.5


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_a_dead_and_a_stalled_peer_do_not_hold_up_the_others(tmp_path: Path) -> None:
    rate, _, p99_ms = isolation(Context(Amounts(), tmp_path), seconds=SECONDS, rounds=1)
    (healthy,), (faulty,) = rate.samples[HEALTHY], rate.samples[FAULTY]
    assert healthy > 0
    # Held up, they had nothing of the first and all of the window of the second; the machine may be busy with others.
    assert faulty > 0.3 * healthy
    assert p99_ms.samples[FAULTY][0] < 1000 * SECONDS
