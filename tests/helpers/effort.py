"""Effort of tests that draw examples. ``IMMORTAL_TEST_EFFORT=10 scripts/test`` draws ten times as many as CI."""

from __future__ import annotations

import os

EFFORT = float(os.environ.get("IMMORTAL_TEST_EFFORT", "1"))


def effort(count: int) -> int:
    """Return how many examples to draw where CI draws ``count``."""
    return max(1, round(count * EFFORT))
