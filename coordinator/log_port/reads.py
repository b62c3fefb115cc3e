"""What is read of the log beside the loop: on one thread, in the order in which it was asked for.

A whole checkpoint takes seconds to read and to check, with gigabytes of state; peers and operators want their answers
meanwhile. Before each chunk of it, what was asked for since is done.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable

from coordinator.core.events import Event

Work = Callable[[], Event | None]


class LogReads:
    """``fileno()`` is readable when there is something in :meth:`take_done`."""

    def __init__(self) -> None:
        self.closing = False
        self._works: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._done: deque[Event] = deque()  # appended to by the thread
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        return self._wake

    def submit(self, work: Work) -> None:
        """Have ``work`` done, which raises nothing; the event that it returns arrives in :meth:`take_done`."""
        self._works.put(work)
        if self._thread is None:  # most instances have small checkpoints, and recover seldom
            self._thread = threading.Thread(target=self._run, name="log-reads", daemon=True)
            self._thread.start()

    def done(self, event: Event) -> None:
        """For the thread itself: something that is no answer to :meth:`submit`."""
        self._done.append(event)
        os.eventfd_write(self._wake, 1)

    def do_waiting(self) -> None:
        """For a work that takes long: do those that wait behind it."""
        while not self.closing:
            try:
                work = self._works.get_nowait()
            except queue.Empty:
                return
            if work is None:
                self._works.put(None)
                return
            self._do(work)

    def take_done(self) -> list[Event]:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        events = []
        while self._done:
            events.append(self._done.popleft())
        return events

    def close(self) -> None:
        """What is under way is given up where it looks for that; the rest is not done any more."""
        self.closing = True
        self._works.put(None)
        if self._thread is not None:
            self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        while (work := self._works.get()) is not None and not self.closing:
            self._do(work)

    def _do(self, work: Work) -> None:
        event = work()
        if event is not None and not self.closing:
            self.done(event)
