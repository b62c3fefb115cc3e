"""Cluster: the instance to which ventilators send their batches, and which workers ask for tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import ClassVar

import immortal
from immortal.appsdk.handlers.decorators import query, rpc
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.handlers.proxy import make_fork
from immortal.appsdk.immortal import Immortal
from immortal.appsdk.patterns.harmony.batch import Progress
from immortal.appsdk.patterns.harmony.collector import BaseCollector
from immortal.appsdk.patterns.harmony.dispatch import Begun, Dispatch
from immortal.appsdk.patterns.harmony.runs import (
    DEATHS_MAX,
    IDLE_S,
    SILENCE_S,
    BatchConflict,
    BatchError,
    Life,
    Response,
    Run,
)

ROLES = {
    "submitter": ["start", "begin", "put", "end", "room", "progress"],
    "worker": ["work", "idle", "leave"],
    "reader": ["progress", "batches"],
}


class Cluster(Immortal, roles=ROLES):
    """Cluster of workers. ``silence_s``: a worker that is silent for so long is lost, and others get its tasks.
    ``deaths_max``: a task that so many workers had alone when they were lost is set aside.
    """

    silence_s: ClassVar[float] = SILENCE_S
    deaths_max: ClassVar[int] = DEATHS_MAX

    dispatch: Dispatch

    def __init__(self) -> None:
        self.dispatch = Dispatch(compares=True)

    # --- for ventilators ---------------------------------------------------------------------------------------------

    @rpc(raises=[BatchError, BatchConflict])
    def start(self, batch: str, function: str, collector: str) -> int:
        """Begin a batch without ``again`` and return the number of the task that is expected next."""
        return self.dispatch.start(batch, function, collector, self._immortal_context.instance_name)

    @rpc(raises=[BatchError, BatchConflict])
    def begin(self, batch: str, function: str, collector: str, again: bool = False) -> Begun:
        """Begin ``batch``: its tasks are arguments of ``function``, its results go to the instance ``collector``.

        One that has that name goes on, if it is the same. ``again``: if it has ended, another one takes its name.
        """
        name = self._immortal_context.instance_name
        return self.dispatch.begin(batch, function, collector, name, again=again)

    @rpc(raises=[BatchError, BatchConflict])
    def put(
        self, batch: str, first: int, tasks: bytes, before: bytes = b"", behind: bytes = b"", life: Life | None = None
    ) -> bool:
        """Add tasks from number ``first`` on, a MessagePack array. Returns whether there is room for more, see
        ``room``.

        ``before``, ``behind``: the digests of all tasks in front of them, and with them.
        """
        has_room = self.dispatch.put(batch, first, tasks, before, behind, life)
        self._call()
        return has_room

    @rpc(raises=[BatchError, BatchConflict])
    def end(self, batch: str, size: int, digest: bytes = b"", life: Life | None = None) -> None:
        """End the batch with ``size`` tasks. ``digest``: of all of them."""
        collector = self.dispatch.end(batch, size, digest, life)
        if collector is not None:
            contents = self.dispatch.batches[batch].contents
            if contents.life is None:
                fork_by_name(self, collector, BaseCollector, "end")(batch, size)
            else:
                fork_by_name(self, collector, BaseCollector, "end_of")(batch, contents)
        self.dispatch.close(batch)

    @rpc
    async def room(self, batch: str) -> bool:
        """Wait until there is room for more tasks, some seconds at most. Returns whether there is."""
        if not await immortal.step(self.wait_for_room, batch):
            return True
        came = await immortal.race(immortal.event(f"room {batch}"), immortal.sleep(timedelta(seconds=IDLE_S)))
        if came.index == 1:
            await immortal.step(self.stop_waiting, batch)
        return came.index == 0

    @rpc
    def wait_for_room(self, batch: str) -> bool:
        """Tell whether the batch is full, and note the wait. A step of :meth:`room`."""
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
        return self.dispatch.names()

    # --- for workers -------------------------------------------------------------------------------------------------

    @rpc(raises=[BatchError])
    def work(
        self, worker: str, limits: dict[str, int], response: Response | None = None, life: Life | None = None
    ) -> Run | None:
        """Take in results of a worker, and return more tasks of one function: ``limits`` says how many of each it
        wants.

        ``life``: of the batch that the results are of, as its run said. None: there is nothing to do, see ``idle``; or
        it has asked for nothing, and is still at work.
        """
        self._listen(worker)
        if response is not None:
            new = self.dispatch.respond(worker, response, life)
            self._pass_on(new)
        run = self.dispatch.take(worker, limits) if limits else None
        self._call()
        return run

    @rpc
    async def idle(self, worker: str, functions: list[str]) -> None:
        """Wait until there may be work for the worker, or some seconds are over."""
        wait_s = await immortal.step(self.rest, worker, functions)
        if wait_s:
            came = await immortal.race(immortal.event(f"work {worker}"), immortal.sleep(timedelta(seconds=wait_s)))
            if came.index == 1:
                await immortal.step(self.stop_resting, worker)

    @rpc(raises=[BatchError])
    def rest(self, worker: str, functions: list[str]) -> float:
        """Return for how many seconds the worker may wait. A step of :meth:`idle`."""
        self._listen(worker)
        return self.dispatch.rest(worker, functions)

    @rpc
    def stop_resting(self, worker: str) -> None:
        """End a worker's wait. A step of :meth:`idle`."""
        self.dispatch.resting.pop(worker, None)

    @rpc
    def leave(self, worker: str, died: bool = False) -> None:
        """Remove a worker; ``died``: another process has seen it die. Others get its tasks."""
        if died:
            self._pass_on(self.dispatch.lose(worker, self.deaths_max))
        else:
            self.dispatch.leave(worker)
        self._call()

    # -----------------------------------------------------------------------------------------------------------------

    def _listen(self, worker: str) -> None:
        self.dispatch.hear(worker)
        self._pass_on(self.dispatch.listen(immortal.now_ns(), self.silence_s, self.deaths_max))

    def _pass_on(self, responses: Sequence[Response]) -> None:
        """Send results to the collectors."""
        for response in responses:
            batch = self.dispatch.batches[response.batch]
            if batch.life is None:
                fork_by_name(self, batch.collector, BaseCollector, "accept")(response)
            else:
                fork_by_name(self, batch.collector, BaseCollector, "accept_of")(response, batch.function, batch.life)
        for name in dict.fromkeys(response.batch for response in responses):
            self.dispatch.close(name)

    def _call(self) -> None:
        """Wake the workers and ventilators for which there is work or room now."""
        for worker in self.dispatch.called():
            immortal.signal(f"work {worker}")
        for batch in self.dispatch.roomy():
            immortal.signal(f"room {batch}")


# Calls to an instance whose name is known only at run time: a batch names its collector.


def fork_by_name(app: Immortal, name: str, cls: type[Immortal], method: str) -> Callable[..., None]:
    """Return the ``fork`` of a handler of the instance ``name``, whose class is ``cls`` or has such a handler."""
    return make_fork(app._immortal_context, name, definition_of(cls).handlers[method])
