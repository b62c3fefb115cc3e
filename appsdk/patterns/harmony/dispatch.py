"""Rules of a cluster: batches of several ventilators, the workers, and who has which tasks. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from immortal.appsdk.patterns.harmony.batch import Batch, Contents, Progress, TaskSlice, tasks_of
from immortal.appsdk.patterns.harmony.runs import (
    BATCHES_ENDED_MAX,
    BATCHES_OPEN_MAX,
    BEAT_S,
    IDLE_S,
    NAME_SIZE_BYTES_MAX,
    BatchError,
    Life,
    Response,
    Run,
)
from immortal.protocol.identity import EMPTY_DIGEST

_NS = 1_000_000_000


class Lease(msgspec.Struct, frozen=True):
    """Tasks that a worker has in hand."""

    batch: str
    piece: TaskSlice


class Begun(msgspec.Struct, frozen=True):
    """Answer to a ventilator. ``next``: the number of the task that is expected next: 0, or where a ventilator that
    died has come to.
    """

    next: int
    life: Life | None


class Worker(msgspec.Struct):
    heard_ns: int
    lease: Lease | None = None


class Dispatch(msgspec.Struct):
    """State of a cluster. ``time_ns``: for how long it has listened; its down time makes no worker silent, since
    between two messages at most BEAT_S count. ``ended_contents``: of those of ``ended`` that this version has begun.
    """

    batches: dict[str, Batch] = {}
    ended: dict[str, Progress] = {}
    ended_contents: dict[str, Contents] = {}
    lives: int = 0  # begun batches
    compares: bool = False  # also what ventilators of earlier versions begin; not in a log that these have begun
    workers: dict[str, Worker] = {}
    resting: dict[str, list[str]] = {}  # workers without work that wait, and their functions
    time_ns: int = 0
    last_ns: int | None = None

    # --- time --------------------------------------------------------------------------------------------------------

    def listen(self, now_ns: int, silence_s: float, deaths_max: int) -> list[Response]:
        """Set the time: workers that were silent for too long are lost. Returns results that are to be passed on."""
        if self.last_ns is not None:
            self.time_ns += min(max(0, now_ns - self.last_ns), int(BEAT_S * _NS))
        self.last_ns = now_ns
        heard_since_ns = self.time_ns - int(silence_s * _NS)
        silent = [name for name, worker in self.workers.items() if worker.heard_ns < heard_since_ns]
        return [response for name in silent for response in self.lose(name, deaths_max)]

    # --- ventilators -------------------------------------------------------------------------------------------------

    def start(self, name: str, function: str, collector: str, cluster: str = "") -> int:
        """Begin a batch as :meth:`begin` does, and return the number of the next task. Raises BatchError,
        BatchConflict.
        """
        if self.compares:
            return self.begin(name, function, collector, cluster).next
        if name in self.ended:
            return self.ended[name].put
        batch = self.batches.get(name) or self._add(name, Batch(function, collector))
        if (batch.function, batch.collector) != (function, collector):
            raise BatchError(
                f"batch {name!r} is for {batch.function!r} and collector {batch.collector!r}, not for {function!r} and "
                f"{collector!r}: give another batch another name"
            )
        return batch.put_count

    def begin(self, name: str, function: str, collector: str, cluster: str, *, again: bool = False) -> Begun:
        """Begin a new batch, or return to the one of that name. ``again``: a new one, if that has ended. ``cluster``:
        this one's name.

        Raises BatchError, BatchConflict.
        """
        if again:
            self._forget(name)
        if name in self.ended:
            known = self.ended_contents.get(name)
            if known is not None:
                known.check_target(name, function, collector)
            return Begun(self.ended[name].put, known.life if known is not None else None)
        batch = self.batches.get(name)
        if batch is None:
            self.lives += 1
            life = Life(cluster, self.lives, again)
            for worker in self.workers.values():
                if worker.lease is not None and worker.lease.batch == name:
                    worker.lease = None  # of the one that had the name
            batch = self._add(name, Batch(function, collector, digest=EMPTY_DIGEST, life=life))
        batch.contents.check_target(name, function, collector)
        return Begun(batch.put_count, batch.life)

    def _add(self, name: str, batch: Batch) -> Batch:
        """Add a batch. Raises BatchError."""
        for what, text in (("batch", name), ("function", batch.function), ("collector", batch.collector)):
            _check_name(what, text)
        if len(self.batches) >= BATCHES_OPEN_MAX:
            raise BatchError(f"batch {name!r}: {BATCHES_OPEN_MAX} batches are open, that is all a cluster takes")
        self.batches[name] = batch
        return batch

    def put(
        self, name: str, first: int, tasks: bytes, before: bytes = b"", behind: bytes = b"", life: Life | None = None
    ) -> bool:
        """Add tasks to a batch and return whether there is room for more. Raises BatchError, BatchConflict."""
        self._check_life(name, life)
        ended = self.ended.get(name)
        if ended is not None:
            if name in self.ended_contents:
                self._check_put(name, first, tasks, behind, ended)
            return True
        batch = self.batch(name)
        batch.put(name, first, tasks, before, behind)
        return not batch.is_full

    def _check_put(self, name: str, first: int, tasks: bytes, behind: bytes, ended: Progress) -> None:
        """Check tasks that a restarted ventilator sends again to an ended batch. Raises BatchError, BatchConflict."""
        stop = first + len(tasks_of(name, first, tasks))
        if stop > ended.put:
            raise BatchError(f"batch {name!r} has ended with {ended.put} tasks, and task {stop - 1} came")
        if stop == ended.put:
            self.ended_contents[name].check_tasks(name, behind)

    def end(self, name: str, size: int, digest: bytes = b"", life: Life | None = None) -> str | None:
        """End a batch and return the collector to be told; None: it was. Raises BatchError, BatchConflict."""
        self._check_life(name, life)
        ended = self.ended.get(name)
        if ended is not None:
            if ended.size != size:
                raise BatchError(f"batch {name!r} has ended with {ended.size} tasks, not {size}")
            if name in self.ended_contents:
                self.ended_contents[name].check_tasks(name, digest)
            return None
        batch = self.batch(name)
        is_new = batch.size is None
        batch.end(name, size, digest)
        return batch.collector if is_new else None

    def _check_life(self, name: str, life: Life | None) -> None:
        """Check that a message is for this batch, not an earlier one of its name. Raises BatchConflict."""
        known = self.batches[name].contents if name in self.batches else self.ended_contents.get(name)
        if known is not None:
            known.check_life(name, life)

    def _forget(self, name: str) -> None:
        self.ended.pop(name, None)
        self.ended_contents.pop(name, None)

    def batch(self, name: str) -> Batch:
        """Return the batch. Raises BatchError."""
        try:
            return self.batches[name]
        except KeyError:
            raise BatchError(f"there is no batch {name!r} here: start it first") from None

    # --- workers -----------------------------------------------------------------------------------------------------

    def hear(self, worker: str) -> Worker:
        """Note a message of a worker, and return the worker. Raises BatchError."""
        _check_name("worker", worker)
        self.resting.pop(worker, None)
        known = self.workers.setdefault(worker, Worker(self.time_ns))
        known.heard_ns = self.time_ns
        return known

    def respond(self, worker: str, response: Response, life: Life | None = None) -> list[Response]:
        """Take in a worker's results and return the new ones; none for a batch that is done. ``life``: of the batch, as
        the worker was told.

        Raises BatchError.
        """
        batch = self.batches.get(response.batch)
        known = self.workers[worker]
        if batch is None or not _may_be_of(response, life, batch, known):
            return []  # of one that is done, or had the name before
        new = batch.respond(response)
        if known.lease is not None and known.lease.batch == response.batch:
            piece = known.lease.piece
            rest = next(batch.done.missing(piece.first, piece.stop), None)
            known.lease = None if rest is None else Lease(response.batch, piece.part(rest[0], piece.stop))
        return new

    def take(self, worker: str, limits: Mapping[str, int]) -> Run | None:
        """Return tasks of one function, at most as many as ``limits`` says, of the batch that was served least
        recently.
        """
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
        """Note that the worker is idle, and return for how many seconds it may wait to be called; 0: there is work.

        While others have work it looks after them: a lost one is found when somebody comes.
        """
        if any(batch.has_waiting and batch.function in functions for batch in self.batches.values()):
            return 0.0
        self.resting[worker] = list(functions)
        return BEAT_S if any(known.lease for known in self.workers.values()) else IDLE_S

    def called(self) -> list[str]:
        """Return the idle workers to call: one for each batch with work. Each that takes something calls the next."""
        names = []
        for batch in self.batches.values():
            if batch.has_waiting:
                names += [name for name, functions in self.resting.items() if batch.function in functions][:1]
        return [name for name in dict.fromkeys(names) if self.resting.pop(name, None) is not None]

    def roomy(self) -> list[str]:
        """Return the batches whose ventilators wait, and may continue."""
        names = [name for name, batch in self.batches.items() if batch.ventilator_waits and batch.has_room]
        for name in names:
            self.batches[name].ventilator_waits = False
        return names

    def lose(self, worker: str, deaths_max: int) -> list[Response]:
        """Remove a lost worker and requeue its tasks. Returns the results of tasks that are set aside."""
        self.resting.pop(worker, None)
        known = self.workers.pop(worker, None)
        if known is None or known.lease is None:
            return []
        name = known.lease.batch
        batch = self.batches.get(name)
        return [] if batch is None else batch.lose(name, known.lease.piece, deaths_max)

    def leave(self, worker: str) -> None:
        """Remove a worker that has returned its results; others get the rest of its tasks."""
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
        """Reduce a batch to its progress, if all is done and its end has come."""
        batch = self.batches.get(name)
        if batch is None or not batch.is_complete:
            return
        self.ended[name] = self._progress(name, batch, 0)
        if self.compares or batch.life is not None:
            self.ended_contents[name] = batch.contents
        del self.batches[name]
        while len(self.ended) > BATCHES_ENDED_MAX:
            self._forget(next(iter(self.ended)))

    def progress(self, name: str, now_ns: int, silence_s: float) -> Progress:
        """Return the batch's progress at ``now_ns``; workers that were silent for so long are not counted. Raises
        BatchError.
        """
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
        """Return the names of all known batches, the open ones last."""
        return [*self.ended, *self.batches]


def _may_be_of(response: Response, life: Life | None, batch: Batch, worker: Worker) -> bool:
    """Tell whether results may be of ``batch``: workers of earlier versions do not say of which batch of that name, so
    that only tasks they were given count where there were several.
    """
    if life is not None or batch.life is None or not batch.life.again:
        return life in (None, batch.life)
    return worker.lease is not None and worker.lease.batch == response.batch


def _check_name(what: str, name: str) -> None:
    if not 1 <= len(name.encode()) <= NAME_SIZE_BYTES_MAX:
        raise BatchError(f"a {what} called {name!r}: 1 to {NAME_SIZE_BYTES_MAX} bytes were expected")
