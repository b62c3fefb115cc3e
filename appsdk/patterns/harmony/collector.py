"""Collectors of a batch's results, each once. :class:`Collector` keeps them; a subclass of BaseCollector need not."""

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
    """Results received: ``done``, of which ``failed`` are failures. ``size``: None until the batch's end has
    arrived.
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
    """Base of collectors: implement ``collect``, and ``complete`` if needed. They run in a handler, so state and calls
    are exactly once.
    """

    gathered: dict[str, CollectedBatch]

    def __init__(self) -> None:
        self.gathered = {}

    def collect(self, batch: str, results: list[Result]) -> None:
        """Process new results, in the order of their numbers; runs arrive in any order."""
        raise NotImplementedError

    def complete(self, batch: str, size: int) -> None:
        """Called when all ``size`` results of the batch have been collected."""

    def keep(self, response: Response) -> None:
        """Process new results undecoded; the default decodes them for ``collect``."""
        self.collect(response.batch, results(response))

    def replaced(self, batch: str) -> None:
        """Called when another batch has taken the name of a collected one; its results follow."""

    @rpc
    def accept_of(self, response: Response, function: str, life: Life) -> None:
        """Receive results from a cluster."""
        contents = Contents(function, self._immortal_context.instance_name)
        gathered = self._gathered(response.batch, life, contents)
        for new in gathered.add_results(response):
            self.keep(new)
        self._check_complete(response.batch, gathered)

    @rpc
    def end_of(self, batch: str, contents: Contents) -> None:
        """Receive a batch's end from a cluster: all its tasks are known."""
        gathered = self._gathered(batch, contents.life, contents)
        if gathered.size is None:
            gathered.size = contents.count
            self._check_complete(batch, gathered)

    def _gathered(self, batch: str, life: Life | None, contents: Contents) -> CollectedBatch:
        """Return the results received of the batch. ``contents``: the cluster's data of it. Raises BatchConflict."""
        known = self.gathered.get(batch)
        if known is not None and known.is_replaced_by(life):
            self.replaced(batch)
            known = None
        if known is None:
            known = self.gathered[batch] = CollectedBatch()
        known.check_identity(batch, life, contents)
        return known

    def _check_complete(self, batch: str, gathered: CollectedBatch) -> None:
        if gathered.is_complete and gathered.size is not None:
            self.complete(batch, gathered.size)

    @query
    def received(self, batch: str) -> Received:
        known = self.gathered.get(batch, CollectedBatch())
        return Received(batch, len(known.done), known.failed, known.size)

    @rpc
    def forget(self, batch: str) -> bool:
        """Remove all data of the batch; return False if there was none. A batch of the same name would be collected
        again.
        """
        return self.gathered.pop(batch, None) is not None


class Collector(BaseCollector, roles={"reader": ["page", "watch"]}):
    """Collector that keeps all results of a batch until it is forgotten; readers can follow them in order."""

    kept: dict[str, KeptResults]
    readers: dict[str, dict[str, int]]  # waiting readers: by batch, their event and the awaited number

    def __init__(self) -> None:
        super().__init__()
        self.kept = {}
        self.readers = {}

    def keep(self, response: Response) -> None:
        self.kept.setdefault(response.batch, KeptResults()).add(response)

    def _check_complete(self, batch: str, gathered: CollectedBatch) -> None:
        super()._check_complete(batch, gathered)
        waiting = self.readers.get(batch, {})
        there = [event for event, number in waiting.items() if self._has_arrived(gathered, number)]
        for event in there:
            del waiting[event]
            immortal.signal(event)
        if not waiting:
            self.readers.pop(batch, None)

    def _has_arrived(self, gathered: CollectedBatch, number: int) -> bool:
        return gathered.done.covers(number, number + 1) or (gathered.size is not None and number >= gathered.size)

    def replaced(self, batch: str) -> None:
        self.kept.pop(batch, None)

    def _known(self, batch: str, life: Life | None) -> CollectedBatch:
        """Return the results received of the batch. Raises BatchConflict."""
        known = self.gathered.get(batch)
        if known is None or known.is_replaced_by(life):
            return CollectedBatch()  # nothing yet
        if known.is_older(life) and known.contents is not None:
            known.contents.check_life(batch, life)
        return known

    @query(raises=[BatchError, BatchConflict])
    def page(self, batch: str, number: int, life: Life | None = None) -> Response | None:
        """Return some results from ``number`` on; None: it has not arrived; ``count`` 0: there are no more."""
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
        """Return an event for the arrival of that result, or of the end before it; "": it has arrived. A step of
        :meth:`watch`.
        """
        gathered = self._known(batch, life)
        if self._has_arrived(gathered, number):
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
        """Wait until that result or the end before it has arrived, at most some seconds."""
        event = await immortal.step(self.wait_for, batch, number, life)
        if event:
            came = await immortal.race(immortal.event(event), immortal.sleep(timedelta(seconds=IDLE_S)))
            if came.index == 1:
                await immortal.step(self.stop_waiting, batch, event)


# Data of one batch: what every collector knows, and the results that a Collector keeps. No I/O, no clock.


class CollectedBatch(msgspec.Struct):
    """Received results of a batch. ``failed``: number of failures. ``lives``: the batch's number at each cluster that
    has sent results. ``contents``: as the clusters have described it.
    """

    done: Ranges = msgspec.field(default_factory=Ranges)
    size: int | None = None
    failed: int = 0
    lives: dict[str, int] = {}
    contents: Contents | None = None

    def is_replaced_by(self, life: Life | None) -> bool:
        """Return True if another batch has taken the name of this one."""
        if life is None:
            return False
        known = self.lives.get(life.cluster)
        return life.again if known is None else known < life.number

    def is_older(self, life: Life | None) -> bool:
        """Return True if the batch ``life`` had the name before this one."""
        return life is not None and life.number < self.lives.get(life.cluster, 0)

    def check_identity(self, name: str, life: Life | None, contents: Contents) -> None:
        """Check a cluster's results. Raises BatchConflict if earlier ones of the name are of another batch."""
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

    def add_results(self, response: Response) -> list[Response]:
        """Process results and return the new ones: each number counts once."""
        new = self.done.add_results(response)
        self.failed += sum(len(part.failures) for part in new)
        return new

    @property
    def is_complete(self) -> bool:
        return self.size is not None and self.done.covers(0, self.size)


class KeptResults(msgspec.Struct):
    """Results in the runs that arrived, found by number."""

    firsts: list[int] = []
    runs: dict[int, Response] = {}  # by their first number

    def add(self, response: Response) -> None:
        if response.count:
            insort(self.firsts, response.first)
            self.runs[response.first] = response

    def page(self, number: int) -> Response | None:
        """Return the results from ``number`` on that are in one run; None: that one has not arrived."""
        index = bisect_right(self.firsts, number) - 1
        if index < 0:
            return None
        run = self.runs[self.firsts[index]]
        stop = run.first + run.count
        return run.part(number, stop) if number < stop else None
