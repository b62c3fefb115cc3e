"""Workers as a queue knows them: who waits for a task, and who was silent for too long.

What lasts is in the :class:`Records`; the rest is an index of it.
"""

from __future__ import annotations

from collections import OrderedDict

from immortal.appsdk.patterns.queue import limits
from immortal.appsdk.patterns.queue.agenda import Agenda
from immortal.appsdk.patterns.queue.errors import QueueFull
from immortal.appsdk.patterns.queue.records import Records, Timer, Worker, check_name, nanoseconds


class Workers:
    """``woken``: gets the numbers of calls that have ended."""

    def __init__(self, records: Records, timers: Agenda[Timer], woken: list[int]) -> None:
        self._records = records
        self._timers = timers
        self._woken = woken
        self._idle: dict[str, OrderedDict[str, None]] = {}  # by function: who waits, the longest first
        for worker in sorted(records.workers.values(), key=lambda one: one.idle_order):
            timers.put(("worker", worker.id, ""), worker.check_ns)
            if worker.call and not worker.disabled:
                self._into_idle(worker)

    def check(self, worker_id: str, session: str, names: list[str], heartbeat_s: float) -> None:
        """What a worker says of itself. Raises ValueError, QueueFull."""
        check_name("worker", worker_id)
        check_name("session", session)
        if not 1 <= len(names) <= limits.NAMES_MAX:
            raise ValueError(f"a worker of {len(names)} functions; 1 to {limits.NAMES_MAX} were expected")
        for name in names:
            check_name("function", name)
        if not limits.HEARTBEAT_S_MIN <= heartbeat_s <= limits.HEARTBEAT_S_MAX:
            raise ValueError(
                f"a heartbeat each {heartbeat_s:g} s; {limits.HEARTBEAT_S_MIN:g} to {limits.HEARTBEAT_S_MAX:g} s were "
                f"expected"
            )
        if worker_id not in self._records.workers and len(self._records.workers) >= limits.WORKERS_MAX:
            raise QueueFull(f"{limits.WORKERS_MAX} workers are known, and no more can be")

    def get(self, worker_id: str, session: str) -> Worker | None:
        """Only if it is that very process."""
        worker = self._records.workers.get(worker_id)
        return worker if worker is not None and worker.session == session else None

    def ready(self, worker_id: str, session: str, names: list[str], heartbeat_s: float, now_ns: int) -> int:
        """It waits for a task: the number of its call."""
        worker = self._records.workers.get(worker_id)
        if worker is None:
            worker = self._records.workers[worker_id] = Worker(worker_id, session, [], 0, 0, 0)
        worker.names = list(dict.fromkeys(names))
        worker.heartbeat_ns = nanoseconds(heartbeat_s)
        self._records.call += 1
        worker.call = self._records.call
        self._enable(worker, now_ns)
        return worker.call

    def heartbeat(self, worker: Worker, now_ns: int) -> None:
        """One that is disabled, and waits for no task, stays so: it is at work for nothing."""
        if not worker.disabled:
            worker.heard_ns = now_ns  # this moves no timer: it is looked at when that is over
        elif worker.call:
            self._enable(worker, now_ns)

    def longest_idle(self, name: str) -> Worker | None:
        """Of those that have that function."""
        waiting = self._idle.get(name)
        return self._records.workers[next(iter(waiting))] if waiting else None

    def end_call(self, worker: Worker, ends_with: tuple[int, int]) -> None:
        """It waits for no task any more."""
        self._out_of_idle(worker)
        if worker.call:
            self._records.offers[worker.call] = ends_with
            self._woken.append(worker.call)
            worker.call = 0

    def silent_ns(self, worker: Worker, now_ns: int) -> int:
        """For how long, where that is too long; else 0, and it is looked at later."""
        if worker.heard_ns + self._patience_ns(worker) <= now_ns:
            return now_ns - worker.heard_ns
        self._time(worker, worker.heard_ns)
        return 0

    def disable(self, worker: Worker, why: str, now_ns: int) -> None:
        worker.disabled = why
        worker.disabled_count += 1
        self._out_of_idle(worker)
        self._time(worker, now_ns)

    def forget(self, worker: Worker, ends_with: tuple[int, int]) -> None:
        """``ends_with``: what the call gets in which it waits."""
        self.end_call(worker, ends_with)
        del self._records.workers[worker.id]
        self._timers.remove(("worker", worker.id, ""))

    def excuse(self, late_ns: int, now_ns: int) -> None:
        for worker in self._records.workers.values():
            worker.heard_ns = min(now_ns, worker.heard_ns + late_ns)
            worker.check_ns = min(now_ns + self._patience_ns(worker), worker.check_ns + late_ns)
            self._timers.put(("worker", worker.id, ""), worker.check_ns)

    # -----------------------------------------------------------------------------------------------------------------

    @staticmethod
    def _patience_ns(worker: Worker) -> int:
        """How long it may be silent; disabled, until it is forgotten."""
        return limits.FORGET_NS if worker.disabled else limits.SILENT_HEARTBEATS * worker.heartbeat_ns

    def _time(self, worker: Worker, from_ns: int) -> None:
        worker.check_ns = from_ns + self._patience_ns(worker)
        self._timers.put(("worker", worker.id, ""), worker.check_ns)

    def _enable(self, worker: Worker, now_ns: int) -> None:
        """It waits, behind all others that do."""
        worker.disabled = ""
        worker.heard_ns = now_ns
        self._time(worker, now_ns)
        self._records.idle_order += 1
        worker.idle_order = self._records.idle_order
        self._into_idle(worker)

    def _into_idle(self, worker: Worker) -> None:
        for name in worker.names:
            self._idle.setdefault(name, OrderedDict())[worker.id] = None

    def _out_of_idle(self, worker: Worker) -> None:
        for name in worker.names:
            waiting = self._idle.get(name)
            if waiting is not None:
                waiting.pop(worker.id, None)
                if not waiting:
                    del self._idle[name]
