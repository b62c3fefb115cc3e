"""Children that do not outlive their parent, even when that is killed with SIGKILL."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

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
