"""Process limits, death with the parent, stop requests by signals, and turns if many processes start at once."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from immortal.protocol.files import open_lock

STATUS_NO_RECOVERY = 3  # of a coordinator whose log can't be replayed: the next start would find the same
STATUS_FENCED = 4  # of a coordinator whose log another process writes by now

DESCRIPTORS_WANTED = 1 << 16  # more than the ports of one stranger's address


def raise_descriptor_limit() -> None:
    """Raise the limit on open files to what the system allows, up to DESCRIPTORS_WANTED; it often starts at 1024.

    Silent connections take a descriptor each until their time is up.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(DESCRIPTORS_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded before any fork: a child must not call the loader


def die_with_parent(parent_pid: int) -> Callable[[], None]:
    """Return a ``preexec_fn`` that lets a child die with its parent, even when that is killed with SIGKILL.

    It makes only two system calls, so that threads of the parent do no harm.
    """
    prctl = _LIBC.prctl

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL.value, 0, 0, 0)
        if os.getppid() != parent_pid:  # it died before the call
            os._exit(1)

    return arrange


SIGNAL_COALESCE_S = 0.5


class StopRequests:
    """Counter of stop requests by signals. ``count``: 0 for none, 1 for a clean stop, more for an immediate one.

    One request can be several signals at the same moment: a terminal or `timeout` signals a whole process group, and a
    supervisor forwards its signals. So only a signal at least SIGNAL_COALESCE_S later counts as another request.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._clock_s = clock_s
        self._last_s = float("-inf")

    def signalled(self) -> None:
        """Count a signal, unless it belongs to the last request."""
        now_s = self._clock_s()
        if now_s - self._last_s >= SIGNAL_COALESCE_S:
            self.count += 1
            self._last_s = now_s


STARTS_PER_PROCESSOR = 2
START_TURN_S = 60.0


def acquire_start_slot(home: Path) -> Callable[[], None]:
    """Wait for a turn to start if many others of the registry ``home`` start; return a function that ends the turn.

    A start takes about a second of a processor: of hundreds at once each would take minutes, and its app would give its
    coordinator up meanwhile. A turn ends after START_TURN_S in any case.
    """
    count = STARTS_PER_PROCESSOR * (os.cpu_count() or 1)
    places = (home / f".start-{number}" for number in (*range(count), os.getpid() % count))
    locks: list[int] = []
    try:
        for tried, place in enumerate(places):
            locks.append(open_lock(place))
            try:
                fcntl.flock(locks[0], fcntl.LOCK_EX | (fcntl.LOCK_NB if tried < count else 0))
                break
            except BlockingIOError:
                os.close(locks.pop())
    except OSError:  # a process that can't write there starts without a turn
        return lambda: None

    def done() -> None:
        with contextlib.suppress(IndexError):
            os.close(locks.pop())

    timer = threading.Timer(START_TURN_S, done)
    timer.daemon = True
    timer.start()
    return done
