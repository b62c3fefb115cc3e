"""A slower disk than there is, for benchmarks: each commit of a log takes some milliseconds more.

IMMORTAL_BENCH_SYNC_DELAY_MS is looked at when a log is opened for writing. Nothing else knows of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from immortal.coordinator.core.errors import LogError

VARIABLE = "IMMORTAL_BENCH_SYNC_DELAY_MS"
DELAY_MS_MAX = 10_000.0


def sync_delay_s(environment: Mapping[str, str] = os.environ) -> float:
    """Seconds that each commit is to wait after its sync; 0 where nobody asks. Raises LogError for no such number."""
    given = environment.get(VARIABLE, "")
    if not given:
        return 0.0
    try:
        delay_ms = float(given)
    except ValueError:
        delay_ms = -1.0
    if not 0 <= delay_ms <= DELAY_MS_MAX:
        raise LogError(f"{VARIABLE} is {given!r}: milliseconds from 0 to {DELAY_MS_MAX:,.0f} were expected; unset it")
    return delay_ms / 1e3
