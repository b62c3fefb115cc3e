"""What a thread has done, left for the loop to collect."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """``fileno()`` is readable when there is something to :meth:`take`."""

    def __init__(self) -> None:
        self._left: deque[T] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._wake

    def put(self, done: Iterable[T]) -> None:
        """For the thread. Wakes the loop, also with nothing."""
        self._left.extend(done)
        os.eventfd_write(self._wake, 1)

    def take(self) -> list[T]:
        """For the loop: what was put there since the last call, in order."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        taken = []
        while self._left:
            taken.append(self._left.popleft())
        return taken

    def close(self) -> None:
        """Once the thread has ended."""
        os.close(self._wake)
