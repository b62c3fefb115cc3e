"""A descriptor that any thread can make readable, with as few system calls as possible."""

from __future__ import annotations

import contextlib
import os
import threading


class Wake:
    """Wakes whoever waits for ``descriptor``.

    Whoever leaves work calls signal() after it; whoever does the work calls clear(), or hold() and
    release(), before it looks.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._signalled = False  # a look at the work is certain to follow, nothing needs to be written
        self._closed = False
        self._closing = threading.Lock()  # a closed descriptor's number may be another's by now

    def signal(self) -> None:
        if not self._signalled:
            self._signalled = True
            with self._closing:
                if not self._closed:
                    os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable, and the next signal() readable again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        self._signalled = False

    def hold(self) -> None:
        """Make signals free of cost: the caller is going to look for work, after release() too."""
        self._signalled = True

    def release(self) -> None:
        self._signalled = False

    @property
    def signalled(self) -> bool:
        return self._signalled

    def close(self) -> None:
        with self._closing:
            if not self._closed:
                self._closed = True
                os.close(self.descriptor)
