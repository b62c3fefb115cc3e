"""Tasks that have ended: how many are kept, for how long, and which go first."""

from __future__ import annotations

from collections import OrderedDict

from immortal.appsdk.patterns.queue import limits
from immortal.appsdk.patterns.queue.records import Records, Task


class Ended:
    """Oldest first. Dead letters have limits of their own: no time ends them."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._kept: OrderedDict[int, int] = OrderedDict()  # size in bytes by task
        self._dead: OrderedDict[int, int] = OrderedDict()
        self._kept_size_bytes = self._dead_size_bytes = 0
        for task in sorted((one for one in records.tasks.values() if one.ended), key=lambda one: one.ended):
            self._put(task)

    def add(self, task: Task, now_ns: int) -> list[Task]:
        """Those that are kept no longer, since this one is."""
        self._records.ended += 1
        task.ended = self._records.ended
        task.ended_ns = now_ns
        self._put(task)
        gone: list[Task] = []
        while (
            len(self._kept) > limits.ENDED_TASKS_MAX
            or self._kept_size_bytes > limits.ENDED_SIZE_BYTES_MAX
            or len(self._dead) > limits.DEAD_TASKS_MAX
            or self._dead_size_bytes > limits.DEAD_SIZE_BYTES_MAX
        ):
            dead = len(self._dead) > limits.DEAD_TASKS_MAX or self._dead_size_bytes > limits.DEAD_SIZE_BYTES_MAX
            self._records.dead_forgotten += dead
            gone.append(self._records.tasks[next(iter(self._dead if dead else self._kept))])
            self.remove(gone[-1])
        return gone

    def remove(self, task: Task) -> None:
        if task.state == "dead":
            self._dead_size_bytes -= self._dead.pop(task.id)
        else:
            self._kept_size_bytes -= self._kept.pop(task.id)

    def due_ns(self) -> int | None:
        """When the oldest is too old."""
        first = next(iter(self._kept), None)
        return None if first is None else self._records.tasks[first].ended_ns + limits.ENDED_AGE_NS

    def too_old(self, now_ns: int) -> Task | None:
        """The oldest, where that is so."""
        due_ns = self.due_ns()
        if due_ns is None or due_ns > now_ns:
            return None
        return self._records.tasks[next(iter(self._kept))]

    def _put(self, task: Task) -> None:
        size_bytes = len(task.arguments) + len(task.result)
        if task.state == "dead":
            self._dead[task.id] = size_bytes
            self._dead_size_bytes += size_bytes
        else:
            self._kept[task.id] = size_bytes
            self._kept_size_bytes += size_bytes
