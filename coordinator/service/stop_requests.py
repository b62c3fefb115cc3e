"""Being asked to stop, by signals: once for a clean stop, again for an immediate one.

One wish may come as several signals at the same moment: a terminal or `timeout` signals a whole process group, and a
supervisor hands on what it got. So only a signal that comes later than that counts as asking again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SAME_WISH_S = 0.5


class StopRequests:
    """``count``: 0 for none, 1 for a clean stop, more for at once."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._clock_s = clock_s
        self._last_s = float("-inf")

    def signalled(self) -> None:
        """A signal has come."""
        now_s = self._clock_s()
        if now_s - self._last_s >= SAME_WISH_S:
            self.count += 1
            self._last_s = now_s
