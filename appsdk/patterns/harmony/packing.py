"""Tasks of a ventilator become runs of a size that a message may have. No I/O, no clock."""

from __future__ import annotations

from typing import Any

from appsdk.calls.codec import encoder
from appsdk.patterns.harmony.limits import RUN_SIZE_BYTES_MAX, RUN_TASKS_MAX, TASK_SIZE_BYTES_MAX
from appsdk.patterns.harmony.runs import array


class Packer:
    """``first``: the number of the first task that has not left."""

    def __init__(self, first: int) -> None:
        self.first = first
        self._tasks: list[bytes] = []
        self._size_bytes = 0

    @property
    def next(self) -> int:
        """The number of the next task."""
        return self.first + len(self._tasks)

    @property
    def is_full(self) -> bool:
        return len(self._tasks) >= RUN_TASKS_MAX or self._size_bytes >= RUN_SIZE_BYTES_MAX

    def add(self, task: Any) -> None:
        """Raises TypeError, ValueError for what can't be sent."""
        try:
            encoded = encoder.encode(task)
        except Exception as error:
            raise TypeError(f"task {self.next}, a {type(task).__qualname__}, can't be encoded: {error}") from None
        if len(encoded) > TASK_SIZE_BYTES_MAX - RUN_SIZE_BYTES_MAX:
            raise ValueError(
                f"task {self.next} has {len(encoded)} bytes, at most {TASK_SIZE_BYTES_MAX - RUN_SIZE_BYTES_MAX} were "
                f"expected: send where it is instead"
            )
        self._tasks.append(encoded)
        self._size_bytes += len(encoded)

    def run(self) -> bytes:
        """All that has not left; it is there until :meth:`left`."""
        return array(self._tasks)

    def left(self) -> None:
        self.first = self.next
        self._tasks, self._size_bytes = [], 0
