"""What a collector knows of one batch, and what the ready-made one keeps of it. No I/O, no clock."""

from __future__ import annotations

from bisect import bisect_right, insort

import msgspec

from immortal.appsdk.patterns.harmony.batch import Contents
from immortal.appsdk.patterns.harmony.ranges import Ranges
from immortal.appsdk.patterns.harmony.runs import Life, Response


class Gathered(msgspec.Struct):
    """``failed``: so many of its results are failures. ``lives``: the batch's number at each cluster that has brought
    some. ``contents``: as far as they have said.
    """

    done: Ranges = msgspec.field(default_factory=Ranges)
    size: int | None = None
    failed: int = 0
    lives: dict[str, int] = {}
    contents: Contents | None = None

    def is_replaced_by(self, life: Life | None) -> bool:
        """Whether another batch has taken the name of this one."""
        if life is None:
            return False
        known = self.lives.get(life.cluster)
        return life.again if known is None else known < life.number

    def is_older(self, life: Life | None) -> bool:
        """Whether the batch ``life`` had the name before this one."""
        return life is not None and life.number < self.lives.get(life.cluster, 0)

    def belongs_to(self, name: str, life: Life | None, contents: Contents) -> None:
        """Results of that come. Raises BatchConflict: what has come under its name is another batch's."""
        known = self.contents or contents
        if self.is_older(life):
            known.check_life(name, life)
        known.check_target(name, contents.function, known.collector)
        if known.ended and contents.ended:
            if contents.count != known.count:
                raise known.conflict(name, contents)
            known.check_tasks(name, contents.digest)
        if life is not None:
            self.lives[life.cluster] = life.number
        self.contents = contents if contents.ended or self.contents is None else self.contents

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
