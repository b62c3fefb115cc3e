"""The rules of a cluster: batches of several ventilators, the workers, and who has which tasks. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from appsdk.patterns.harmony.batch import Batch, Piece, Progress
from appsdk.patterns.harmony.errors import BatchError
from appsdk.patterns.harmony.limits import (
    BATCHES_ENDED_MAX,
    BATCHES_OPEN_MAX,
    BEAT_S,
    IDLE_S,
    NAME_SIZE_BYTES_MAX,
)
from appsdk.patterns.harmony.runs import Response, Run

_NS = 1_000_000_000


class Lease(msgspec.Struct, frozen=True):
    """What a worker has in hand."""

    batch: str
    piece: Piece


class Worker(msgspec.Struct):
    heard_ns: int
    lease: Lease | None = None


class Dispatch(msgspec.Struct):
    """``time_ns``: for how long the cluster has listened. What it does not hear while it is down makes nobody silent:
    between two words at most BEAT_S go by.
    """

    batches: dict[str, Batch] = {}
    ended: dict[str, Progress] = {}
    workers: dict[str, Worker] = {}
    resting: dict[str, list[str]] = {}  # workers without work that wait, and their functions
    time_ns: int = 0
    last_ns: int | None = None

    # --- time --------------------------------------------------------------------------------------------------------

    def listen(self, now_ns: int, silence_s: float, deaths_max: int) -> list[Response]:
        """It is ``now_ns``: who is silent is lost. Returns results that are to be passed on."""
        if self.last_ns is not None:
            self.time_ns += min(max(0, now_ns - self.last_ns), int(BEAT_S * _NS))
        self.last_ns = now_ns
        heard_since_ns = self.time_ns - int(silence_s * _NS)
        silent = [name for name, worker in self.workers.items() if worker.heard_ns < heard_since_ns]
        return [response for name in silent for response in self.lose(name, deaths_max)]

    # --- ventilators -------------------------------------------------------------------------------------------------

    def start(self, name: str, function: str, collector: str) -> int:
        """The number of the next task: 0, or behind what came before a ventilator died. Raises BatchError."""
        for what, text in (("batch", name), ("function", function), ("collector", collector)):
            _check_name(what, text)
        if name in self.ended:
            return self.ended[name].put
        batch = self.batches.get(name)
        if batch is None:
            if len(self.batches) >= BATCHES_OPEN_MAX:
                raise BatchError(f"batch {name!r}: {BATCHES_OPEN_MAX} batches are open, that is all a cluster takes")
            batch = self.batches[name] = Batch(function, collector)
        if (batch.function, batch.collector) != (function, collector):
            raise BatchError(
                f"batch {name!r} is for {batch.function!r} and collector {batch.collector!r}, not for {function!r} and "
                f"{collector!r}: give another batch another name"
            )
        return batch.put_count

    def put(self, name: str, first: int, tasks: bytes) -> bool:
        """Whether there is room for more. Raises BatchError."""
        if name in self.ended:
            return True
        batch = self.batch(name)
        batch.put(name, first, tasks)
        return not batch.is_full

    def end(self, name: str, size: int) -> str | None:
        """The collector, which is to hear of it; None: it has. Raises BatchError."""
        ended = self.ended.get(name)
        if ended is not None:
            if ended.size != size:
                raise BatchError(f"batch {name!r} has ended with {ended.size} tasks, not {size}")
            return None
        batch = self.batch(name)
        is_new = batch.size is None
        batch.end(name, size)
        return batch.collector if is_new else None

    def batch(self, name: str) -> Batch:
        """Raises BatchError."""
        try:
            return self.batches[name]
        except KeyError:
            raise BatchError(f"there is no batch {name!r} here: start it first") from None

    # --- workers -----------------------------------------------------------------------------------------------------

    def hear(self, worker: str) -> Worker:
        """Raises BatchError."""
        _check_name("worker", worker)
        self.resting.pop(worker, None)
        known = self.workers.setdefault(worker, Worker(self.time_ns))
        known.heard_ns = self.time_ns
        return known

    def respond(self, worker: str, response: Response) -> list[Response]:
        """What of it is new; of a batch that is done nothing is. Raises BatchError."""
        batch = self.batches.get(response.batch)
        if batch is None:
            return []
        new = batch.respond(response)
        known = self.workers[worker]
        if known.lease is not None and known.lease.batch == response.batch:
            piece = known.lease.piece
            rest = next(batch.done.missing(piece.first, piece.stop), None)
            known.lease = None if rest is None else Lease(response.batch, piece.part(rest[0], piece.stop))
        return new

    def take(self, worker: str, limits: Mapping[str, int]) -> Run | None:
        """Tasks of one function, at most as many as ``limits`` says, of the batch that was served least recently."""
        known = self.workers[worker]
        self._give_back(known)  # one that asks for more has nothing in hand
        for name, batch in self.batches.items():
            limit = limits.get(batch.function, 0)
            if limit > 0 and (piece := batch.take(limit)) is not None:
                known.lease = Lease(name, piece)
                self.batches[name] = self.batches.pop(name)
                return batch.run(name, piece)
        return None

    def rest(self, worker: str, functions: Sequence[str]) -> float:
        """It has nothing to do: for how many seconds it may wait to be called; 0: there is work.

        While others have work it looks after them: a lost one is found when somebody comes.
        """
        if any(batch.has_waiting and batch.function in functions for batch in self.batches.values()):
            return 0.0
        self.resting[worker] = list(functions)
        return BEAT_S if any(known.lease for known in self.workers.values()) else IDLE_S

    def called(self) -> list[str]:
        """Those at rest for whom there is work: one for each batch. Each that takes something calls the next."""
        names = []
        for batch in self.batches.values():
            if batch.has_waiting:
                names += [name for name, functions in self.resting.items() if batch.function in functions][:1]
        return [name for name in dict.fromkeys(names) if self.resting.pop(name, None) is not None]

    def roomy(self) -> list[str]:
        """Batches whose ventilators wait, and need not any more."""
        names = [name for name, batch in self.batches.items() if batch.ventilator_waits and batch.has_room]
        for name in names:
            self.batches[name].ventilator_waits = False
        return names

    def lose(self, worker: str, deaths_max: int) -> list[Response]:
        """It is lost with all that it has in hand. Returns results that are to be passed on: of what is set aside."""
        self.resting.pop(worker, None)
        known = self.workers.pop(worker, None)
        if known is None or known.lease is None:
            return []
        name = known.lease.batch
        batch = self.batches.get(name)
        return [] if batch is None else batch.lose(name, known.lease.piece, deaths_max)

    def leave(self, worker: str) -> None:
        """It ends, and has given back its results: others get the rest."""
        self.resting.pop(worker, None)
        known = self.workers.pop(worker, None)
        if known is not None:
            self._give_back(known)

    def _give_back(self, known: Worker) -> None:
        if known.lease is not None and (batch := self.batches.get(known.lease.batch)) is not None:
            batch.give_back(known.lease.piece)
        known.lease = None

    # --- what becomes of it ------------------------------------------------------------------------------------------

    def close(self, name: str) -> None:
        """If all is done and its end has come, no more is kept of it than its progress."""
        batch = self.batches.get(name)
        if batch is None or not batch.is_complete:
            return
        self.ended[name] = self._progress(name, batch, 0)
        del self.batches[name]
        while len(self.ended) > BATCHES_ENDED_MAX:
            del self.ended[next(iter(self.ended))]

    def progress(self, name: str, now_ns: int, silence_s: float) -> Progress:
        """At ``now_ns``: who was silent for so long is counted as no worker, found lost or not. Raises BatchError."""
        passed_ns = max(0, now_ns - self.last_ns) if self.last_ns is not None else 0
        heard_since_ns = self.time_ns + passed_ns - int(silence_s * _NS)
        workers = sum(worker.heard_ns >= heard_since_ns for worker in self.workers.values())
        if name in self.ended:
            return msgspec.structs.replace(self.ended[name], workers=workers)
        return self._progress(name, self.batch(name), workers)

    def _progress(self, name: str, batch: Batch, workers: int) -> Progress:
        given = sum(
            known.lease.piece.count
            for known in self.workers.values()
            if known.lease is not None and known.lease.batch == name
        )
        return Progress(name, batch.put_count, batch.size, given, len(batch.done), batch.failed, batch.resent, workers)

    def names(self) -> list[str]:
        """Of all batches that are known, the open ones last."""
        return [*self.ended, *self.batches]


def _check_name(what: str, name: str) -> None:
    if not 1 <= len(name.encode()) <= NAME_SIZE_BYTES_MAX:
        raise BatchError(f"a {what} called {name!r}: 1 to {NAME_SIZE_BYTES_MAX} bytes were expected")
