"""A priority queue whose entries can be moved and taken out."""

from __future__ import annotations

import heapq
from typing import Any, Generic, TypeVar

E = TypeVar("E")

_STALE_MAX = 64  # beside as many as there are live ones


class Agenda(Generic[E]):
    """Entries by rank, lowest first; of one rank by the entries themselves. So the order never depends on history."""

    def __init__(self) -> None:
        self._heap: list[tuple[Any, E]] = []
        self._ranks: dict[E, Any] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, entry: E) -> bool:
        return entry in self._ranks

    def ranks(self) -> dict[E, Any]:
        return dict(self._ranks)

    def put(self, entry: E, rank: Any) -> None:
        """Also: move it."""
        if self._ranks.get(entry) == rank:
            return
        self._ranks[entry] = rank
        heapq.heappush(self._heap, (rank, entry))
        if len(self._heap) > 2 * len(self._ranks) + _STALE_MAX:
            self._heap = [(rank, entry) for entry, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def remove(self, entry: E) -> None:
        self._ranks.pop(entry, None)

    def first(self) -> tuple[Any, E] | None:
        """(rank, entry)"""
        heap = self._heap
        while heap:
            rank, entry = heap[0]
            if self._ranks.get(entry) == rank:
                return rank, entry
            heapq.heappop(heap)
        return None

    def pop(self) -> tuple[Any, E] | None:
        found = self.first()
        if found is not None:
            del self._ranks[found[1]]
        return found
