"""Mailbox in which a thread leaves results for the loop, and a thread for slow reads."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from immortal.coordinator.core.events import Event

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Results of a thread for the loop. ``fileno()`` is readable when :meth:`take` has something."""

    def __init__(self) -> None:
        self._left: deque[T] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._wake

    def put(self, done: Iterable[T]) -> None:
        """Add results and wake the loop, also without results. Called by the thread."""
        self._left.extend(done)
        os.eventfd_write(self._wake, 1)

    def take(self) -> list[T]:
        """Take the results added since the last call, in order. Called by the loop."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        taken = []
        while self._left:
            taken.append(self._left.popleft())
        return taken

    def close(self) -> None:
        """Close the mailbox once its thread has ended."""
        os.close(self._wake)


# Reads beside the loop: on one thread, in the order of the requests.
#
# Reading and checking a checkpoint with gigabytes of state takes seconds, and peers and operators want their answers
# meanwhile. So requests that arrive meanwhile are done before each chunk of it.


Work = Callable[[], Event | None]


class ReadThread(Mailbox[Event]):
    def __init__(self) -> None:
        super().__init__()
        self.closing = False
        self._works: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Work) -> None:
        """Run ``work`` on the thread. It must not raise; the event that it returns arrives in :meth:`take`."""
        self._works.put(work)
        if self._thread is None:  # most instances have small checkpoints, and recover seldom
            self._thread = threading.Thread(target=self._run, name="log-reads", daemon=True)
            self._thread.start()

    def run_pending(self) -> None:
        """Run the works that wait. Called now and then by a work that takes long."""
        while not self.closing:
            try:
                work = self._works.get_nowait()
            except queue.Empty:
                return
            if work is None:
                self._works.put(None)
                return
            self._do(work)

    def close(self) -> None:
        """End the thread. A long work stops where it checks ``closing``; waiting works are dropped."""
        self.closing = True
        self._works.put(None)
        if self._thread is not None:
            self._thread.join()
        super().close()

    def _run(self) -> None:
        while (work := self._works.get()) is not None and not self.closing:
            self._do(work)

    def _do(self, work: Work) -> None:
        event = work()
        if event is not None and not self.closing:
            self.put([event])
