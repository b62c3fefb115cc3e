"""Order of the waiting tasks of each function: priorities, and concurrency and rate limits by key.

A lane is a function and a key. A task whose lane is closed is parked when its turn comes, and is back in the order once
the lane opens, so a dispatch looks at no task twice in vain.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from typing import Any, Generic, TypeVar

from immortal.appsdk.patterns.queue.model import Key, Limit, QueueState, Task, Timer

Rank = tuple[int, int]
"""(-priority, ID): the higher priority first, then the older task."""

K = TypeVar("K")


def rank_of(task: Task) -> Rank:
    return -task.priority, task.id


class ReadyQueue:
    """Waiting tasks in order. ``changed``: functions with a task that is new in the order, for the dispatcher to read
    and clear.

    ``starts_kept``: how many starts under a rate are remembered.
    """

    def __init__(self, records: QueueState, timers: IndexedPriorityQueue[Timer]) -> None:
        self._records = records
        self._timers = timers
        self._ready: dict[str, IndexedPriorityQueue[int]] = {}
        self._parked: dict[Key, IndexedPriorityQueue[int]] = {}
        self._running: dict[Key, int] = {}
        self.changed: set[str] = set()
        self.starts_kept = 0
        for task in records.tasks.values():
            if task.state == "waiting":
                self.put(task)
            elif task.state == "running":
                self._count(task, 1)
        for name, by_key in records.starts.items():
            for key, starts in by_key.items():
                self.starts_kept += len(starts)
                self._time(name, key)

    def put(self, task: Task) -> None:
        self._enter(task.name, task.id, rank_of(task))

    def remove(self, task: Task, now_ns: int) -> None:
        """Remove a waiting task, which will not run."""
        _out(self._ready, task.name, task.id)
        _out(self._parked, (task.name, task.key), task.id)
        self._reopen(task.name, task.key, now_ns)

    def first(self, name: str, now_ns: int) -> Rank | None:
        """Return the rank of the next task of that function that may start now."""
        ready = self._ready.get(name)
        while ready:
            found = ready.first()
            assert found is not None
            rank: Rank = found[0]
            task = self._records.tasks[rank[1]]
            if self._free(name, task.key, now_ns) > 0:
                return rank
            ready.remove(task.id)
            self._parked.setdefault((name, task.key), IndexedPriorityQueue()).put(task.id, rank)
        self._ready.pop(name, None)
        return None

    def started(self, task: Task, now_ns: int) -> None:
        """Count the task that ``first`` returned as running."""
        _out(self._ready, task.name, task.id)
        self._count(task, 1)
        limit = self._records.limits.get(task.name)
        if limit is not None and limit.starts_max:
            self._records.starts.setdefault(task.name, {}).setdefault(task.key, []).append(now_ns)
            self.starts_kept += 1
            self._prune(task.name, task.key, limit.period_ns, now_ns)

    def ended(self, task: Task, now_ns: int) -> None:
        """Count the task as running no more."""
        self._count(task, -1)
        self._reopen(task.name, task.key, now_ns)

    def set_limit(self, name: str, limit: Limit, now_ns: int) -> None:
        """Set the limit for later starts; starts under an earlier rate count for the new one."""
        if limit == Limit():
            self._records.limits.pop(name, None)
        else:
            self._records.limits[name] = limit
        for key in list(self._records.starts.get(name, ())):
            self._prune(name, key, limit.period_ns if limit.starts_max else 0, now_ns)
        for lane in [lane for lane in self._parked if lane[0] == name]:
            self._reopen(*lane, now_ns)

    def refresh(self, name: str, key: str, now_ns: int) -> None:
        """Update a key's lane after a start has left the period."""
        self._prune(name, key, self._records.limits[name].period_ns, now_ns)
        self._reopen(name, key, now_ns)

    def waiting(self, name: str) -> set[int]:
        """Return the IDs of a function's waiting tasks, in the order or parked."""
        found = set(self._ready[name].ranks()) if name in self._ready else set()
        for lane, parked in self._parked.items():
            if lane[0] == name:
                found |= set(parked.ranks())
        return found

    def _enter(self, name: str, task_id: int, rank: Rank) -> None:
        self._ready.setdefault(name, IndexedPriorityQueue()).put(task_id, rank)
        self.changed.add(name)

    def _reopen(self, name: str, key: str, now_ns: int) -> None:
        """Put parked tasks of that lane back into the order, as far as there is room."""
        parked = self._parked.get((name, key))
        if parked is None:
            return
        for _ in range(min(len(parked), self._free(name, key, now_ns))):
            found = parked.pop()
            assert found is not None
            self._enter(name, found[1], found[0])
        if not parked:
            del self._parked[name, key]

    def _free(self, name: str, key: str, now_ns: int) -> int:
        """Return how many tasks of the lane may start now."""
        limit = self._records.limits.get(name)
        free = len(self._records.tasks)
        if limit is None:
            return free
        if limit.running_max:
            free = min(free, limit.running_max - self._running.get((name, key), 0))
        if limit.starts_max:
            starts = self._records.starts.get(name, {}).get(key, [])
            in_period = len(starts) - bisect_right(starts, now_ns - limit.period_ns)
            free = min(free, limit.starts_max - in_period)
        return max(0, free)

    def _prune(self, name: str, key: str, period_ns: int, now_ns: int) -> None:
        """Forget the starts that no later moment has to know."""
        by_key = self._records.starts[name]
        starts = by_key[key]
        kept = starts[bisect_right(starts, now_ns - period_ns) :]
        self.starts_kept -= len(starts) - len(kept)
        if kept:
            by_key[key] = kept
        else:
            del by_key[key]
            if not by_key:
                del self._records.starts[name]
        self._time(name, key)

    def _time(self, name: str, key: str) -> None:
        """Set the timer for the moment at which the lane's oldest start leaves the period."""
        timer: Timer = ("start", name, key)
        starts = self._records.starts.get(name, {}).get(key)
        if starts:
            self._timers.put(timer, starts[0] + self._records.limits[name].period_ns)
        else:
            self._timers.remove(timer)

    def _count(self, task: Task, change: int) -> None:
        lane = task.name, task.key
        count = self._running.get(lane, 0) + change
        if count:
            self._running[lane] = count
        else:
            self._running.pop(lane, None)


def _out(agendas: dict[K, IndexedPriorityQueue[int]], key: K, task_id: int) -> None:
    agenda = agendas.get(key)
    if agenda is not None:
        agenda.remove(task_id)
        if not agenda:
            del agendas[key]


# A priority queue whose entries can be moved and taken out.


E = TypeVar("E")

_STALE_MAX = 64  # beside as many as there are live ones


class IndexedPriorityQueue(Generic[E]):
    """Entries by rank, lowest first; of one rank by the entries themselves, so that the order never depends on
    history.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, E]] = []
        self._ranks: dict[E, Any] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, entry: E) -> bool:
        return entry in self._ranks

    def ranks(self) -> dict[E, Any]:
        return dict(self._ranks)

    def put(self, entry: E, rank: Any) -> None:
        """Add an entry, or move it."""
        if self._ranks.get(entry) == rank:
            return
        self._ranks[entry] = rank
        heapq.heappush(self._heap, (rank, entry))
        if len(self._heap) > 2 * len(self._ranks) + _STALE_MAX:
            self._heap = [(rank, entry) for entry, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def remove(self, entry: E) -> None:
        self._ranks.pop(entry, None)

    def first(self) -> tuple[Any, E] | None:
        """Return (rank, entry) of the first entry; None: there is none."""
        heap = self._heap
        while heap:
            rank, entry = heap[0]
            if self._ranks.get(entry) == rank:
                return rank, entry
            heapq.heappop(heap)
        return None

    def pop(self) -> tuple[Any, E] | None:
        found = self.first()
        if found is not None:
            del self._ranks[found[1]]
        return found
