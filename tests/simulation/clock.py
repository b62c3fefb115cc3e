"""Simulated time: actions in the order of their moments."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

START_NS = 1_700_000_000_000_000_000  # since the Unix epoch
US, MS = 1_000, 1_000_000


class Clock:
    """Clock with the true time ``now_ns``, ns since the Unix epoch; a machine's clock can differ from it."""

    def __init__(self) -> None:
        self.now_ns = START_NS
        self._due: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0  # of two actions at the same moment the one added first is first

    def after(self, delay_ns: float, action: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heappush(self._due, (self.now_ns + int(delay_ns), self._count, action, arguments))

    @property
    def is_empty(self) -> bool:
        return not self._due

    def run_next(self) -> bool:
        """Run the next action; return False if there is none."""
        if not self._due:
            return False
        self.now_ns, _, action, arguments = heappop(self._due)
        action(*arguments)
        return True
