"""Collectors of a batch's results, each once. :class:`Collector` keeps them; subclass BaseCollector to do without."""

from __future__ import annotations

from bisect import bisect_right, insort
from datetime import timedelta

import msgspec

import immortal
from immortal.appsdk.handlers.decorators import query, rpc
from immortal.appsdk.handlers.definition import ANY_INSTANCE
from immortal.appsdk.immortal import Immortal
from immortal.appsdk.patterns.harmony.batch import (
    IDLE_S,
    BatchConflict,
    BatchError,
    Contents,
    Life,
    Ranges,
    Response,
    Result,
    results,
)


class Received(msgspec.Struct, frozen=True):
    """Results that have come: ``done``, of which ``failed`` are failures. ``size``: None until the batch's end has
    come.
    """

    batch: str
    done: int
    failed: int
    size: int | None

    @property
    def is_complete(self) -> bool:
        return self.done == self.size


ROLES = {
    ANY_INSTANCE: ["accept_of", "end_of"],  # clusters
    "reader": ["received"],
    "administrator": ["forget", "received"],
}


class BaseCollector(Immortal, roles=ROLES):
    """Base of collectors: write ``collect``, and ``complete`` if you like. They run in a handler, so state and calls
    are exactly once.
    """

    gathered: dict[str, CollectedBatch]

    def __init__(self) -> None:
        self.gathered = {}

    def collect(self, batch: str, results: list[Result]) -> None:
        """Take new results, in the order of their numbers; runs come in any order."""
        raise NotImplementedError

    def complete(self, batch: str, size: int) -> None:
        """Called when all ``size`` results of the batch have been collected."""

    def keep(self, response: Response) -> None:
        """Take new results undecoded; by default decodes them for ``collect``."""
        self.collect(response.batch, results(response))

    def replaced(self, batch: str) -> None:
        """Called when another batch has taken the name of the one that was collected; its results come now."""

    @rpc
    def accept_of(self, response: Response, function: str, life: Life) -> None:
        """Take results from a cluster."""
        contents = Contents(function, self._immortal_context.instance_name)
        gathered = self._gathered(response.batch, life, contents)
        for new in gathered.take(response):
            self.keep(new)
        self._look(response.batch, gathered)

    @rpc
    def end_of(self, batch: str, contents: Contents) -> None:
        """Take the end from a cluster: the batch has all its tasks."""
        gathered = self._gathered(batch, contents.life, contents)
        if gathered.size is None:
            gathered.size = contents.count
            self._look(batch, gathered)

    def _gathered(self, batch: str, life: Life | None, contents: Contents) -> CollectedBatch:
        """Return what has come of the batch. ``contents``: the cluster's description of it. Raises BatchConflict."""
        known = self.gathered.get(batch)
        if known is not None and known.is_replaced_by(life):
            self.replaced(batch)
            known = None
        if known is None:
            known = self.gathered[batch] = CollectedBatch()
        known.belongs_to(batch, life, contents)
        return known

    def _look(self, batch: str, gathered: CollectedBatch) -> None:
        if gathered.is_complete and gathered.size is not None:
            self.complete(batch, gathered.size)

    @query
    def received(self, batch: str) -> Received:
        known = self.gathered.get(batch, CollectedBatch())
        return Received(batch, len(known.done), known.failed, known.size)

    @rpc
    def forget(self, batch: str) -> bool:
        """Keep nothing more of the batch; False: nothing was known. Under the same name all would be collected
        again.
        """
        return self.gathered.pop(batch, None) is not None


class Collector(BaseCollector, roles={"reader": ["page", "watch"]}):
    """Collector that keeps all results of a batch until it is forgotten; they can be read in order while they come."""

    kept: dict[str, KeptResults]
    readers: dict[str, dict[str, int]]  # those that wait: by batch, their event and the number that they wait for

    def __init__(self) -> None:
        super().__init__()
        self.kept = {}
        self.readers = {}

    def keep(self, response: Response) -> None:
        self.kept.setdefault(response.batch, KeptResults()).add(response)

    def _look(self, batch: str, gathered: CollectedBatch) -> None:
        super()._look(batch, gathered)
        waiting = self.readers.get(batch, {})
        there = [event for event, number in waiting.items() if self._has_come(gathered, number)]
        for event in there:
            del waiting[event]
            immortal.signal(event)
        if not waiting:
            self.readers.pop(batch, None)

    def _has_come(self, gathered: CollectedBatch, number: int) -> bool:
        return gathered.done.covers(number, number + 1) or (gathered.size is not None and number >= gathered.size)

    def replaced(self, batch: str) -> None:
        self.kept.pop(batch, None)

    def _known(self, batch: str, life: Life | None) -> CollectedBatch:
        """Return what has come of the batch. Raises BatchConflict."""
        known = self.gathered.get(batch)
        if known is None or known.is_replaced_by(life):
            return CollectedBatch()  # nothing yet
        if known.is_older(life) and known.contents is not None:
            known.contents.check_life(batch, life)
        return known

    @query(raises=[BatchError, BatchConflict])
    def page(self, batch: str, number: int, life: Life | None = None) -> Response | None:
        """Return some results from ``number`` on; None: that one has not come; ``count`` 0: there are no more."""
        gathered = self._known(batch, life)
        kept = self.kept.get(batch) if gathered is self.gathered.get(batch) else None
        if kept is not None and (page := kept.page(number)) is not None:
            return page
        if gathered.size is not None and number >= gathered.size:
            if number > gathered.size:
                raise BatchError(f"batch {batch!r} has {gathered.size} tasks, there is no result {number}")
            return Response(batch, number, 0, b"\x90")
        return None

    @rpc
    def forget(self, batch: str) -> bool:
        self.kept.pop(batch, None)
        return super().forget(batch)

    @rpc(raises=[BatchConflict])
    def wait_for(self, batch: str, number: int, life: Life | None = None) -> str:
        """Return an event that comes with that result, or with the end before it; "": that is there. A step of
        :meth:`watch`.
        """
        gathered = self._known(batch, life)
        if self._has_come(gathered, number):
            return ""
        event = f"{batch} {immortal.uuid4()}"
        self.readers.setdefault(batch, {})[event] = number
        return event

    @rpc
    def stop_waiting(self, batch: str, event: str) -> None:
        """End a wait for a result. A step of :meth:`watch`."""
        waiting = self.readers.get(batch, {})
        waiting.pop(event, None)
        if not waiting:
            self.readers.pop(batch, None)

    @rpc(raises=[BatchConflict])
    async def watch(self, batch: str, number: int, life: Life | None = None) -> None:
        """Wait until that result or the end before it has come, or some seconds are over."""
        event = await immortal.step(self.wait_for, batch, number, life)
        if event:
            came = await immortal.race(immortal.event(event), immortal.sleep(timedelta(seconds=IDLE_S)))
            if came.index == 1:
                await immortal.step(self.stop_waiting, batch, event)


# What a collector knows of one batch, and what the ready-made one keeps of it. No I/O, no clock.


class CollectedBatch(msgspec.Struct):
    """Results that have come of a batch. ``failed``: how many are failures. ``lives``: the batch's number at each
    cluster that has sent some. ``contents``: as far as the clusters have said.
    """

    done: Ranges = msgspec.field(default_factory=Ranges)
    size: int | None = None
    failed: int = 0
    lives: dict[str, int] = {}
    contents: Contents | None = None

    def is_replaced_by(self, life: Life | None) -> bool:
        """Tell whether another batch has taken the name of this one."""
        if life is None:
            return False
        known = self.lives.get(life.cluster)
        return life.again if known is None else known < life.number

    def is_older(self, life: Life | None) -> bool:
        """Tell whether the batch ``life`` had the name before this one."""
        return life is not None and life.number < self.lives.get(life.cluster, 0)

    def belongs_to(self, name: str, life: Life | None, contents: Contents) -> None:
        """Check results of a cluster. Raises BatchConflict where earlier ones under the name are of another batch."""
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
        """Take in results and return the new ones: a number counts once."""
        new = self.done.take(response)
        self.failed += sum(len(part.failures) for part in new)
        return new

    @property
    def is_complete(self) -> bool:
        return self.size is not None and self.done.covers(0, self.size)


class KeptResults(msgspec.Struct):
    """Results as they came, found by number."""

    firsts: list[int] = []
    runs: dict[int, Response] = {}  # by their first number

    def add(self, response: Response) -> None:
        if response.count:
            insort(self.firsts, response.first)
            self.runs[response.first] = response

    def page(self, number: int) -> Response | None:
        """Return the results from ``number`` on, as far as one run has them; None: that one has not come."""
        index = bisect_right(self.firsts, number) - 1
        if index < 0:
            return None
        run = self.runs[self.firsts[index]]
        stop = run.first + run.count
        return run.part(number, stop) if number < stop else None
