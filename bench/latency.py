"""Latencies in numbers that people compare."""

from __future__ import annotations

from collections.abc import Sequence


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in ascending order; at least one."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent // 100))]
