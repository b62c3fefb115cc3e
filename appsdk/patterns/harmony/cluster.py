"""Cluster: the instance that receives ventilators' batches and gives their tasks to workers; and its rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import ClassVar

import msgspec

import immortal
from immortal.appsdk.handlers.decorators import query, rpc
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.handlers.proxy import make_fork
from immortal.appsdk.immortal import Immortal
from immortal.appsdk.patterns.harmony.batch import (
    BATCHES_ENDED_MAX,
    BATCHES_OPEN_MAX,
    BEAT_S,
    DEATHS_MAX,
    IDLE_S,
    NAME_SIZE_BYTES_MAX,
    SILENCE_S,
    Batch,
    BatchConflict,
    BatchError,
    Contents,
    Life,
    Progress,
    Response,
    Run,
    TaskSlice,
    tasks_of,
)
from immortal.appsdk.patterns.harmony.collector import BaseCollector
from immortal.protocol.identity import EMPTY_DIGEST

_NS = 1_000_000_000

ROLES = {
    "submitter": ["begin", "put", "end", "room", "progress"],
    "worker": ["work", "idle", "leave"],
    "reader": ["progress", "batches"],
}


class Cluster(Immortal, roles=ROLES):
    """Cluster for workers and ventilators. ``silence_s``: a worker that is silent for so long is lost, and others get
    its tasks. ``deaths_max``: a task is set aside after so many workers were lost with it alone.
    """

    silence_s: ClassVar[float] = SILENCE_S
    deaths_max: ClassVar[int] = DEATHS_MAX

    dispatch: Dispatch

    def __init__(self) -> None:
        self.dispatch = Dispatch()

    # --- for ventilators ---------------------------------------------------------------------------------------------

    @rpc(raises=[BatchError, BatchConflict])
    def begin(self, batch: str, function: str, collector: str, again: bool = False) -> Begun:
        """Begin ``batch``: its tasks are arguments of ``function``, its results go to the instance ``collector``.

        An existing batch of that name continues if it is the same. ``again``: if it has ended, begin a new one.
        """
        name = self._immortal_context.instance_name
        return self.dispatch.begin(batch, function, collector, name, again=again)

    @rpc(raises=[BatchError, BatchConflict])
    def put(
        self, batch: str, first: int, tasks: bytes, before: bytes = b"", behind: bytes = b"", life: Life | None = None
    ) -> bool:
        """Add tasks from number ``first`` on, a MessagePack array. Returns True if there is room for more, see
        ``room``.

        ``before``, ``behind``: the digests of all tasks before them, and including them.
        """
        has_room = self.dispatch.put(batch, first, tasks, before, behind, life)
        self._wake_waiters()
        return has_room

    @rpc(raises=[BatchError, BatchConflict])
    def end(self, batch: str, size: int, digest: bytes = b"", life: Life | None = None) -> None:
        """End the batch with ``size`` tasks. ``digest``: of all tasks."""
        collector = self.dispatch.end(batch, size, digest, life)
        if collector is not None:
            self._to_collector(collector, "end_of")(batch, self.dispatch.batches[batch].contents)
        self.dispatch.close(batch)

    @rpc
    async def room(self, batch: str) -> bool:
        """Wait until there is room for more tasks, some seconds at most. Returns True if there is."""
        if not await immortal.step(self.wait_for_room, batch):
            return True
        came = await immortal.race(immortal.event(f"room {batch}"), immortal.sleep(timedelta(seconds=IDLE_S)))
        if came.index == 1:
            await immortal.step(self.stop_waiting, batch)
        return came.index == 0

    @rpc
    def wait_for_room(self, batch: str) -> bool:
        """Note a wait for room if the batch is full; return True if it is. A step of :meth:`room`."""
        known = self.dispatch.batches.get(batch)
        if known is None or not known.is_full:
            return False
        known.ventilator_waits = True
        return True

    @rpc
    def stop_waiting(self, batch: str) -> None:
        """End a wait for room. A step of :meth:`room`."""
        known = self.dispatch.batches.get(batch)
        if known is not None:
            known.ventilator_waits = False

    @query(raises=[BatchError])
    def progress(self, batch: str) -> Progress:
        return self.dispatch.progress(batch, immortal.now_ns(), self.silence_s)

    @query
    def batches(self) -> list[str]:
        """Return the names of all known batches, the open ones last."""
        return [*self.dispatch.ended, *self.dispatch.batches]

    # --- for workers -------------------------------------------------------------------------------------------------

    @rpc(raises=[BatchError])
    def work(
        self, worker: str, limits: dict[str, int], response: Response | None = None, life: Life | None = None
    ) -> Run | None:
        """Take results of a worker, and return more tasks of one function. ``limits``: the number of tasks that it
        wants, by function.

        ``life``: of the batch, as given with the tasks. Returns None if there is nothing to do (see ``idle``), or
        the worker has asked for nothing and is still at work.
        """
        self._note_contact(worker)
        if response is not None:
            new = self.dispatch.apply_results(worker, response, life)
            self._send_to_collectors(new)
        run = self.dispatch.next_run(worker, limits) if limits else None
        self._wake_waiters()
        return run

    @rpc
    async def idle(self, worker: str, functions: list[str]) -> None:
        """Wait until there may be work for the worker, at most some seconds."""
        wait_s = await immortal.step(self.rest, worker, functions)
        if wait_s:
            came = await immortal.race(immortal.event(f"work {worker}"), immortal.sleep(timedelta(seconds=wait_s)))
            if came.index == 1:
                await immortal.step(self.stop_resting, worker)

    @rpc(raises=[BatchError])
    def rest(self, worker: str, functions: list[str]) -> float:
        """Return the seconds that the worker can wait; 0 if there is work. A step of :meth:`idle`."""
        self._note_contact(worker)
        return self.dispatch.note_idle(worker, functions)

    @rpc
    def stop_resting(self, worker: str) -> None:
        """End a worker's wait. A step of :meth:`idle`."""
        self.dispatch.resting.pop(worker, None)

    @rpc
    def leave(self, worker: str, died: bool = False) -> None:
        """Remove a worker, so that others get its tasks; ``died``: another process has seen its death."""
        if died:
            self._send_to_collectors(self.dispatch.remove_lost(worker, self.deaths_max))
        else:
            self.dispatch.remove_worker(worker)
        self._wake_waiters()

    def _note_contact(self, worker: str) -> None:
        self.dispatch.note_contact(worker)
        self._send_to_collectors(self.dispatch.advance_time(immortal.now_ns(), self.silence_s, self.deaths_max))

    def _send_to_collectors(self, responses: Sequence[Response]) -> None:
        for response in responses:
            batch = self.dispatch.batches[response.batch]
            self._to_collector(batch.collector, "accept_of")(response, batch.function, batch.life)
        for name in dict.fromkeys(response.batch for response in responses):
            self.dispatch.close(name)

    def _wake_waiters(self) -> None:
        """Wake workers if there is work, and ventilators if there is room."""
        for worker in self.dispatch.workers_to_wake():
            immortal.signal(f"work {worker}")
        for batch in self.dispatch.batches_with_room():
            immortal.signal(f"room {batch}")

    def _to_collector(self, name: str, method: str) -> Callable[..., None]:
        """Return the ``fork`` of a collector's handler; the collector's name is known only at run time."""
        return make_fork(self._immortal_context, name, definition_of(BaseCollector).handlers[method])


# Rules of a cluster: batches of several ventilators, the workers, and the tasks of each. No I/O, no clock.


class Lease(msgspec.Struct, frozen=True):
    """Tasks that a worker has."""

    batch: str
    piece: TaskSlice


class Begun(msgspec.Struct, frozen=True):
    """Answer to a ventilator. ``next``: the number of the next expected task: 0, or the place that a ventilator which
    died has reached.
    """

    next: int
    life: Life | None


class Worker(msgspec.Struct):
    heard_ns: int
    lease: Lease | None = None


class Dispatch(msgspec.Struct):
    """State of a cluster. ``time_ns``: the time that it has listened. At most BEAT_S count between two messages, so its
    down time makes no worker silent. ``ended_contents``: contents of the batches in ``ended``.
    """

    batches: dict[str, Batch] = {}
    ended: dict[str, Progress] = {}
    ended_contents: dict[str, Contents] = {}
    lives: int = 0  # begun batches
    compares: bool = True  # always; a log of 0.1 has it
    workers: dict[str, Worker] = {}
    resting: dict[str, list[str]] = {}  # workers that wait for work, with their functions
    time_ns: int = 0
    last_ns: int | None = None

    # --- time --------------------------------------------------------------------------------------------------------

    def advance_time(self, now_ns: int, silence_s: float, deaths_max: int) -> list[Response]:
        """Set the time, and remove workers that were silent for too long. Returns results to pass on."""
        if self.last_ns is not None:
            self.time_ns += min(max(0, now_ns - self.last_ns), int(BEAT_S * _NS))
        self.last_ns = now_ns
        heard_since_ns = self.time_ns - int(silence_s * _NS)
        silent = [name for name, worker in self.workers.items() if worker.heard_ns < heard_since_ns]
        return [response for name in silent for response in self.remove_lost(name, deaths_max)]

    # --- ventilators -------------------------------------------------------------------------------------------------

    def begin(self, name: str, function: str, collector: str, cluster: str, *, again: bool = False) -> Begun:
        """Begin a new batch, or continue the batch ``name``. ``again``: begin a new one if that has ended.
        ``cluster``: this cluster's name.

        Raises BatchError, BatchConflict.
        """
        if again:
            self._forget(name)
        if name in self.ended:
            known = self.ended_contents[name]
            known.check_target(name, function, collector)
            return Begun(self.ended[name].put, known.life)
        batch = self.batches.get(name)
        if batch is None:
            for what, text in (("batch", name), ("function", function), ("collector", collector)):
                _check_name(what, text)
            if len(self.batches) >= BATCHES_OPEN_MAX:
                raise BatchError(f"batch {name!r}: {BATCHES_OPEN_MAX} batches are open, that is all a cluster takes")
            self.lives += 1
            life = Life(cluster, self.lives, again)
            for worker in self.workers.values():
                if worker.lease is not None and worker.lease.batch == name:
                    worker.lease = None  # of the earlier batch with the name
            batch = self.batches[name] = Batch(function, collector, digest=EMPTY_DIGEST, life=life)
        batch.contents.check_target(name, function, collector)
        return Begun(batch.put_count, batch.life)

    def put(
        self, name: str, first: int, tasks: bytes, before: bytes = b"", behind: bytes = b"", life: Life | None = None
    ) -> bool:
        """Add tasks to a batch and return True if there is room for more. Raises BatchError, BatchConflict."""
        self._check_life(name, life)
        ended = self.ended.get(name)
        if ended is not None:  # a restarted ventilator sends them again
            stop = first + len(tasks_of(name, first, tasks))
            if stop > ended.put:
                raise BatchError(f"batch {name!r} has ended with {ended.put} tasks, and task {stop - 1} came")
            if stop == ended.put:
                self.ended_contents[name].check_tasks(name, behind)
            return True
        batch = self.batch(name)
        batch.put(name, first, tasks, before, behind)
        return not batch.is_full

    def end(self, name: str, size: int, digest: bytes = b"", life: Life | None = None) -> str | None:
        """End a batch and return the collector to notify; None: it had ended. Raises BatchError, BatchConflict."""
        self._check_life(name, life)
        ended = self.ended.get(name)
        if ended is not None:
            if ended.size != size:
                raise BatchError(f"batch {name!r} has ended with {ended.size} tasks, not {size}")
            self.ended_contents[name].check_tasks(name, digest)
            return None
        batch = self.batch(name)
        is_new = batch.size is None
        batch.end(name, size, digest)
        return batch.collector if is_new else None

    def _check_life(self, name: str, life: Life | None) -> None:
        """Check that a message is for the batch ``life``, not an earlier one with its name. Raises BatchConflict."""
        known = self.batches[name].contents if name in self.batches else self.ended_contents.get(name)
        if known is not None:
            known.check_life(name, life)

    def _forget(self, name: str) -> None:
        self.ended.pop(name, None)
        self.ended_contents.pop(name, None)

    def batch(self, name: str) -> Batch:
        """Return the open batch ``name``. Raises BatchError."""
        try:
            return self.batches[name]
        except KeyError:
            raise BatchError(f"there is no batch {name!r} here: start it first") from None

    # --- workers -----------------------------------------------------------------------------------------------------

    def note_contact(self, worker: str) -> Worker:
        """Note a message of a worker, and return the worker. Raises BatchError."""
        _check_name("worker", worker)
        self.resting.pop(worker, None)
        known = self.workers.setdefault(worker, Worker(self.time_ns))
        known.heard_ns = self.time_ns
        return known

    def apply_results(self, worker: str, response: Response, life: Life | None = None) -> list[Response]:
        """Process a worker's results and return the new ones; none for an ended batch. ``life``: of the batch, as the
        worker got it with its tasks.

        Raises BatchError.
        """
        batch = self.batches.get(response.batch)
        known = self.workers[worker]
        if batch is None or life not in (None, batch.life):
            return []  # results of an ended batch, or of an earlier one with this name
        new = batch.apply_results(response)
        if known.lease is not None and known.lease.batch == response.batch:
            piece = known.lease.piece
            rest = next(batch.done.missing(piece.first, piece.stop), None)
            known.lease = None if rest is None else Lease(response.batch, piece.part(rest[0], piece.stop))
        return new

    def next_run(self, worker: str, limits: Mapping[str, int]) -> Run | None:
        """Return tasks of one function, at most as many as ``limits`` allows, from the batch that was served least
        recently; None if there are none.
        """
        known = self.workers[worker]
        self._requeue(known)  # a worker that asks for more has no tasks left
        for name, batch in self.batches.items():
            limit = limits.get(batch.function, 0)
            if limit > 0 and (piece := batch.next_slice(limit)) is not None:
                known.lease = Lease(name, piece)
                self.batches[name] = self.batches.pop(name)
                return batch.run(name, piece)
        return None

    def note_idle(self, worker: str, functions: Sequence[str]) -> float:
        """Note that the worker is idle, and return the seconds that it can wait to be woken; 0: there is work.

        While other workers have tasks, idle ones ask more often: a request is what detects a lost worker.
        """
        if any(batch.has_waiting and batch.function in functions for batch in self.batches.values()):
            return 0.0
        self.resting[worker] = list(functions)
        return BEAT_S if any(known.lease for known in self.workers.values()) else IDLE_S

    def workers_to_wake(self) -> list[str]:
        """Return the idle workers to wake: one for each batch with work. A worker that takes tasks wakes the next."""
        names = []
        for batch in self.batches.values():
            if batch.has_waiting:
                names += [name for name, functions in self.resting.items() if batch.function in functions][:1]
        return [name for name in dict.fromkeys(names) if self.resting.pop(name, None) is not None]

    def batches_with_room(self) -> list[str]:
        """Return the batches whose waiting ventilators can continue."""
        names = [name for name, batch in self.batches.items() if batch.ventilator_waits and batch.has_room]
        for name in names:
            self.batches[name].ventilator_waits = False
        return names

    def remove_lost(self, worker: str, deaths_max: int) -> list[Response]:
        """Remove a lost worker and requeue its tasks. Returns the results of tasks set aside."""
        self.resting.pop(worker, None)
        known = self.workers.pop(worker, None)
        if known is None or known.lease is None:
            return []
        name = known.lease.batch
        batch = self.batches.get(name)
        return [] if batch is None else batch.requeue_lost(name, known.lease.piece, deaths_max)

    def remove_worker(self, worker: str) -> None:
        """Remove a worker that has returned its results; others get the rest of its tasks."""
        self.resting.pop(worker, None)
        known = self.workers.pop(worker, None)
        if known is not None:
            self._requeue(known)

    def _requeue(self, worker: Worker) -> None:
        if worker.lease is not None and (batch := self.batches.get(worker.lease.batch)) is not None:
            batch.requeue(worker.lease.piece)
        worker.lease = None

    # --- ends and progress -------------------------------------------------------------------------------------------

    def close(self, name: str) -> None:
        """Reduce a batch to its progress, if its end has arrived and all its tasks are done."""
        batch = self.batches.get(name)
        if batch is None or not batch.is_complete:
            return
        self.ended[name] = self._progress(name, batch, 0)
        self.ended_contents[name] = batch.contents
        del self.batches[name]
        while len(self.ended) > BATCHES_ENDED_MAX:
            self._forget(next(iter(self.ended)))

    def progress(self, name: str, now_ns: int, silence_s: float) -> Progress:
        """Return the batch's progress at ``now_ns``; it counts no workers that were silent for ``silence_s``. Raises
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


def _check_name(role: str, name: str) -> None:
    if not 1 <= len(name.encode()) <= NAME_SIZE_BYTES_MAX:
        raise BatchError(f"a {role} called {name!r}: 1 to {NAME_SIZE_BYTES_MAX} bytes were expected")
