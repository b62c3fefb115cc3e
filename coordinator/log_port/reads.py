"""What is read of the log beside the loop: on one thread, in the order in which it was asked for.

A whole checkpoint takes seconds to read and to check, with gigabytes of state; peers and operators want their answers
meanwhile. Before each chunk of it, what was asked for since is done.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from immortal.coordinator.core.events import Event
from immortal.coordinator.log_port.mailbox import Mailbox

Work = Callable[[], Event | None]


class LogReads(Mailbox[Event]):
    def __init__(self) -> None:
        super().__init__()
        self.closing = False
        self._works: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Work) -> None:
        """Have ``work`` done, which raises nothing; the event that it returns arrives in :meth:`take`."""
        self._works.put(work)
        if self._thread is None:  # most instances have small checkpoints, and recover seldom
            self._thread = threading.Thread(target=self._run, name="log-reads", daemon=True)
            self._thread.start()

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

    def close(self) -> None:
        """What is under way is given up where it looks for that; the rest is not done any more."""
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
