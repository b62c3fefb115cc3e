"""The lock that keeps a second coordinator off a log."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from immortal.coordinator.core.errors import LogLockedError
from immortal.protocol.file_lock import holder_of, open_lock, take

LOCK_FILE_NAME = "lock"
_TIMEOUT_S = 0.03  # :func:`is_locked` of a reader holds the lock for some microseconds: not worth a failed start


class FolderLock:
    """Holds the folder's lock file until :meth:`release`, or until the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        """Take the lock. Raises LogLockedError, which names the folder and the process that holds it."""
        path = folder / LOCK_FILE_NAME
        self._descriptor = open_lock(path)
        try:
            take(self._descriptor, _TIMEOUT_S)
        except OSError as error:
            holder = holder_of(self._descriptor)
            os.close(self._descriptor)
            if not isinstance(error, BlockingIOError):
                raise LogLockedError(f"the log folder {folder} cannot be locked: {error}") from error
            raise LogLockedError(
                f"the log folder {folder} is in use by {holder}: two coordinators must not write one log; stop that"
                " process first"
            ) from None
        with contextlib.suppress(OSError):  # a full disk: the lock is held without its text as well
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def named_holder(folder: Path) -> str | None:
    """The process that has the lock, in words; None where the lock's file does not name it yet."""
    try:
        descriptor = os.open(folder / LOCK_FILE_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = holder_of(descriptor)
    finally:
        os.close(descriptor)
    return found if found.startswith("process") else None


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
