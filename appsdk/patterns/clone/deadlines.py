"""When the time of which key is over. No I/O, no clock."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import msgspec


class Deadlines(msgspec.Struct):
    """``at_ns``: by key. The heap may have old ones, which count for nothing."""

    at_ns: dict[str, int] = {}
    heap: list[tuple[int, str]] = []

    def set(self, key: str, at_ns: int) -> None:
        """0: none."""
        if not at_ns:
            self.at_ns.pop(key, None)
            return
        self.at_ns[key] = at_ns
        heappush(self.heap, (at_ns, key))
        if len(self.heap) > 2 * len(self.at_ns) + 100:
            self.heap = [(at_ns, key) for key, at_ns in self.at_ns.items()]
            heapify(self.heap)

    def next_ns(self) -> int:
        """0: there is none."""
        heap = self.heap
        while heap and self.at_ns.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else 0

    def take_due(self, now_ns: int, count_max: int) -> list[str]:
        """The keys whose time is over, the first ones first."""
        due: list[str] = []
        while len(due) < count_max and 0 < self.next_ns() <= now_ns:
            _, key = heappop(self.heap)
            del self.at_ns[key]
            due.append(key)
        return due
