"""The lock that keeps a second coordinator off a log."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from coordinator.core.errors import LogLockedError

LOCK_FILE_NAME = "lock"
_ATTEMPTS_MAX = 3  # :func:`is_locked` of a reader holds the lock for some microseconds: not worth a failed start
_PAUSE_S = 0.01


class FolderLock:
    """Holds the folder's lock file until :meth:`release`, or until the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        """Take the lock. Raises LogLockedError, which names the folder and the process that holds it."""
        path = folder / LOCK_FILE_NAME
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._take()
        except OSError as error:
            holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            if not isinstance(error, BlockingIOError):
                raise LogLockedError(f"the log folder {folder} cannot be locked: {error}") from error
            raise LogLockedError(
                f"the log folder {folder} is in use by process {holder or 'unknown'}:"
                " two coordinators must not write one log; stop that process first"
            ) from None
        with contextlib.suppress(OSError):  # a full disk: the lock is held without its text as well
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def _take(self) -> None:
        for attempts_left in range(_ATTEMPTS_MAX - 1, -1, -1):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not attempts_left:
                    raise
                time.sleep(_PAUSE_S)

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_locked(folder: Path) -> bool:
    """Whether a process writes this log now."""
    try:
        descriptor = os.open(folder / LOCK_FILE_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
