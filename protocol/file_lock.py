"""Locks on files, by flock: waiting for one has an end, and who holds it is what the kernel says.

A stranger who can open a file can hold its lock for ever: lock files are for their owner alone.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from immortal.protocol.private_files import FILE_MODE, tighten

_PAUSE_S = 0.01


def open_lock(path: Path) -> int:
    """A descriptor of the lock file, which is made where it is missing. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        tighten(descriptor, FILE_MODE)
    except PermissionError:
        pass  # some file systems have no modes
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def take(descriptor: int, timeout_s: float) -> None:
    """Raises BlockingIOError where another process has it for all of that time, OSError."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_PAUSE_S)


def holder_of(descriptor: int) -> str:
    """Who holds the lock, in words: "process 1815", of which user where that is another one.

    The text of a lock file may be old, or of somebody who has not got it: it is not asked.
    """
    status = os.fstat(descriptor)
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        # 1: FLOCK  ADVISORY  WRITE 1815 fe:00:5424377 0 EOF
        found = next(int(lock[4]) for lock in locks if lock[1] == "FLOCK" and lock[5] == place)
        uid = Path(f"/proc/{found}").stat().st_uid
    except (OSError, StopIteration, ValueError, IndexError):
        return "a process that can't be named here"  # of another container; or on btrfs, whose numbers differ
    return f"process {found}" if uid == os.geteuid() else f"process {found} of user {uid}"
