"""Frames to peers whose answer could not be read: sent again, at once the first time, then after longer and longer."""

from __future__ import annotations

import heapq
import itertools

from immortal.coordinator.core.effects import SendToPeer

DELAY_NS_MIN = 100_000_000  # before the second time that a frame is sent again
DELAY_NS_MAX = 5_000_000_000


class PeerRetries:
    """What waits to be sent again. Times are monotonic, in ns."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, SendToPeer, int]] = []  # a heap: (due, number, effect, attempt)
        self._numbers = itertools.count()

    def add(self, effect: SendToPeer, attempt: int, now_ns: int) -> None:
        """``attempt``: how often it has been sent, from 1."""
        delay_ns = 0 if attempt == 1 else min(DELAY_NS_MIN << min(attempt - 2, 32), DELAY_NS_MAX)
        heapq.heappush(self._waiting, (now_ns + delay_ns, next(self._numbers), effect, attempt + 1))

    def next_deadline_ns(self) -> int | None:
        """When there is something due."""
        return self._waiting[0][0] if self._waiting else None

    def take_due(self, now_ns: int) -> list[tuple[SendToPeer, int]]:
        """What is to be sent now, and the how-manyeth time that is."""
        due = []
        while self._waiting and self._waiting[0][0] <= now_ns:
            _, _, effect, attempt = heapq.heappop(self._waiting)
            due.append((effect, attempt))
        return due

    def forget(self, destination: str) -> None:
        """Its stream begins anew."""
        self._waiting = [one for one in self._waiting if one[2].destination != destination]
        heapq.heapify(self._waiting)
