from __future__ import annotations

from immortal.coordinator.service.process import SIGNAL_COALESCE_S, StopRequests


def test_signals_of_one_moment_are_one_wish() -> None:
    now_s = 10.0
    requests = StopRequests(clock_s=lambda: now_s)
    assert requests.count == 0
    requests.signalled()
    requests.signalled()
    now_s += SIGNAL_COALESCE_S - 0.01
    requests.signalled()
    assert requests.count == 1
    now_s += 0.02
    requests.signalled()
    assert requests.count == 2
