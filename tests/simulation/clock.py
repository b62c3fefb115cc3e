"""Simulated time: what is to happen, in the order of its moment."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

START_NS = 1_700_000_000_000_000_000  # since the Unix epoch
US, MS = 1_000, 1_000_000


class Clock:
    """``now_ns``: the true time, ns since the Unix epoch; the clock of a machine may differ from it."""

    def __init__(self) -> None:
        self.now_ns = START_NS
        self._due: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0  # of two at the same moment the first asked for comes first

    def after(self, delay_ns: float, action: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heappush(self._due, (self.now_ns + int(delay_ns), self._count, action, arguments))

    @property
    def is_empty(self) -> bool:
        return not self._due

    def run_next(self) -> bool:
        """Let the next thing happen; False where there is none."""
        if not self._due:
            return False
        self.now_ns, _, action, arguments = heappop(self._due)
        action(*arguments)
        return True
