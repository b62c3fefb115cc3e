"""How long handlers take, sampled: some messages are timed each time that somebody has asked, and all others are not.

To time each message would cost each. So nothing is timed until the coordinator asks, which it does where it serves
metrics, about once a second; then the next :data:`TIMED_MAX` are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

TIMED_MAX = 32


class HandlerTimes:
    """``left``: so many of the next messages are to be timed, by ``clock_ns``. No replay depends on any of it."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.left = 0
        self.clock_ns = clock_ns
        self._taken: list[tuple[str, int]] = []

    def add(self, name: str, duration_ns: int) -> None:
        self.left -= 1
        self._taken.append((name, duration_ns))

    def answer(self) -> dict[str, Any]:
        """To the question for them: what was timed since the last one, [method, ns] each. The next ones are timed."""
        taken, self._taken = self._taken, []
        self.left = TIMED_MAX
        return {"handler": None, "times": taken}
