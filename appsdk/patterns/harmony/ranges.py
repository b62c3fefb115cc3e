"""A set of task numbers that takes as much memory as it has gaps."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

import msgspec


class Ranges(msgspec.Struct):
    """``starts[i]`` up to, not including, ``stops[i]``: sorted, none touches the next."""

    starts: list[int] = msgspec.field(default_factory=list)
    stops: list[int] = msgspec.field(default_factory=list)

    def add(self, start: int, stop: int) -> None:
        """All numbers from ``start`` up to, not including, ``stop``."""
        if start >= stop:
            return
        low = bisect_left(self.stops, start)  # the first that touches or lies behind
        high = bisect_right(self.starts, stop)  # the first that lies wholly behind
        if low < high:
            start, stop = min(start, self.starts[low]), max(stop, self.stops[high - 1])
        self.starts[low:high] = [start]
        self.stops[low:high] = [stop]

    def missing(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """What of ``start`` up to ``stop`` is not in here, in order."""
        for index in range(bisect_right(self.stops, start), len(self.starts)):
            if self.starts[index] >= stop:
                break
            if start < self.starts[index]:
                yield start, self.starts[index]
            start = self.stops[index]
        if start < stop:
            yield start, stop

    def covers(self, start: int, stop: int) -> bool:
        return next(self.missing(start, stop), None) is None

    def first_missing(self, start: int = 0) -> int:
        """The lowest number from ``start`` on that is not in here."""
        index = bisect_right(self.starts, start) - 1
        return self.stops[index] if index >= 0 and start < self.stops[index] else start

    def __len__(self) -> int:
        return sum(self.stops) - sum(self.starts)
