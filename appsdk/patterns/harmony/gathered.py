"""What a collector knows of one batch, and what the ready-made one keeps of it. No I/O, no clock."""

from __future__ import annotations

from bisect import bisect_right, insort

import msgspec

from appsdk.patterns.harmony.ranges import Ranges
from appsdk.patterns.harmony.runs import Response


class Gathered(msgspec.Struct):
    """``failed``: so many of its results are failures."""

    done: Ranges = msgspec.field(default_factory=Ranges)
    size: int | None = None
    failed: int = 0

    def take(self, response: Response) -> list[Response]:
        """What of it is new: a number counts once."""
        stop = response.first + response.count
        new = [response.part(*gap) for gap in self.done.missing(response.first, stop)]
        self.done.add(response.first, stop)
        self.failed += sum(len(part.failures) for part in new)
        return new

    @property
    def is_complete(self) -> bool:
        return self.size is not None and self.done.covers(0, self.size)


class Kept(msgspec.Struct):
    """Results as they came, found by number."""

    firsts: list[int] = []
    runs: dict[int, Response] = {}  # by their first number

    def add(self, response: Response) -> None:
        if response.count:
            insort(self.firsts, response.first)
            self.runs[response.first] = response

    def page(self, number: int) -> Response | None:
        """The results from ``number`` on, as far as one run has them; None: that one has not come."""
        index = bisect_right(self.firsts, number) - 1
        if index < 0:
            return None
        run = self.runs[self.firsts[index]]
        stop = run.first + run.count
        return run.part(number, stop) if number < stop else None
