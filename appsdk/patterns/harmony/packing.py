"""Tasks of a ventilator become runs of a size that a message may have. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from immortal.appsdk.calls.codec import encode_value
from immortal.appsdk.patterns.harmony.limits import RUN_SIZE_BYTES_MAX, RUN_TASKS_MAX, TASK_SIZE_BYTES_MAX
from immortal.appsdk.patterns.harmony.runs import array
from immortal.protocol.identity import OF_NOTHING, digest_behind


class Packer:
    """``first``: the number of the first task that has not left."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.before = OF_NOTHING if first == 0 else b""  # digest of the tasks before ``first``; empty: not known here
        self.behind = self.before  # ... of all so far
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
        encoded = _encoded(task, self.next)
        if len(encoded) > TASK_SIZE_BYTES_MAX - RUN_SIZE_BYTES_MAX:
            raise ValueError(
                f"task {self.next} has {len(encoded)} bytes, at most {TASK_SIZE_BYTES_MAX - RUN_SIZE_BYTES_MAX} were "
                f"expected: send where it is instead"
            )
        self._tasks.append(encoded)
        if self.behind:
            self.behind = digest_behind(self.behind, (encoded,))
        self._size_bytes += len(encoded)

    def run(self) -> bytes:
        """All that has not left; it is there until :meth:`left`."""
        return array(self._tasks)

    def left(self) -> None:
        self.first, self.before = self.next, self.behind
        self._tasks, self._size_bytes = [], 0

    def know(self, digest: bytes) -> None:
        """It is that of all tasks so far, none of which waits here."""
        self.before = self.behind = digest


def digest_of(tasks: Iterable[Any]) -> bytes:
    """Of those that are the first ones of a batch. Raises TypeError."""
    return digest_behind(OF_NOTHING, (_encoded(task, number) for number, task in enumerate(tasks)))


def _encoded(task: Any, number: int) -> bytes:
    """Raises TypeError."""
    try:
        return encode_value(task)
    except Exception as error:
        raise TypeError(f"task {number}, a {type(task).__qualname__}, can't be encoded: {error}") from None
