"""How many descriptors a coordinator may have: connections that say nothing take one each until their time is up."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable

DESCRIPTORS_WANTED = 1 << 16  # more than one stranger's address has ports


def raise_descriptor_limit() -> None:
    """Take what the system allows this process, up to DESCRIPTORS_WANTED: what it starts with is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(DESCRIPTORS_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# Children that do not outlive their parent, even when that is killed with SIGKILL.


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded before any fork: a child must not call the loader


def die_with_parent(parent_pid: int) -> Callable[[], None]:
    """For ``preexec_fn``. It makes nothing but two system calls, so that threads of the parent do no harm."""
    prctl = _LIBC.prctl

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL.value, 0, 0, 0)
        if os.getppid() != parent_pid:  # it died before the call
            os._exit(1)

    return arrange


# Being asked to stop, by signals: once for a clean stop, again for an immediate one.
#
# One wish may come as several signals at the same moment: a terminal or `timeout` signals a whole process group, and a
# supervisor hands on what it got. So only a signal that comes later than that counts as asking again.


SIGNAL_COALESCE_S = 0.5


class StopRequests:
    """``count``: 0 for none, 1 for a clean stop, more for at once."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._clock_s = clock_s
        self._last_s = float("-inf")

    def signalled(self) -> None:
        """A signal has come."""
        now_s = self._clock_s()
        if now_s - self._last_s >= SIGNAL_COALESCE_S:
            self.count += 1
            self._last_s = now_s
