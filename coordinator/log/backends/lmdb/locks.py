"""Locks of a log's folder: one keeps a second coordinator off, the others are LMDB's table of readers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from immortal.coordinator.core.errors import LogLockedError
from immortal.protocol.files import acquire_lock, describe_lock_holder, open_lock

LOCK_FILE_NAME = "lock"
_TIMEOUT_S = 0.03  # :func:`is_locked` of a reader holds the lock for some microseconds: not worth a failed start


class FolderLock:
    """Holds the folder's lock file until :meth:`release`, or until the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        """Take the lock. Raises LogLockedError, which names the folder and the process that holds it."""
        path = folder / LOCK_FILE_NAME
        self._descriptor = open_lock(path)
        try:
            acquire_lock(self._descriptor, _TIMEOUT_S)
        except OSError as error:
            holder = describe_lock_holder(self._descriptor)
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


def lock_holder(folder: Path) -> str | None:
    """Describe the process that holds the lock; None where the lock's file does not name it yet."""
    try:
        descriptor = os.open(folder / LOCK_FILE_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = describe_lock_holder(descriptor)
    finally:
        os.close(descriptor)
    return found if found.startswith("process") else None


def is_locked(folder: Path) -> bool:
    """True while a process writes this log."""
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


# The table of readers of a log's LMDB environment (lock.mdb), cleaned when it has no free place left.
#
# LMDB clears the places of killed processes only in an open environment, which itself needs a place. So this clears
# them from outside, as LMDB does: a live process has a lock on the byte with its number. It holds a lock of ours on
# the log's folder meanwhile: a place that two processes clear could belong to a third one in between.


READERS_FILE_NAME = "lock.mdb"
READERS_MAX = 512  # the first opener's value counts for all, so every opener passes the same
_LOCK_WAIT_S = 1.0  # it is held for a millisecond
_HEAD_SIZE_BYTES = 128
_PLACE_SIZE_BYTES = 64
TABLE_SIZE_BYTES = _HEAD_SIZE_BYTES + _PLACE_SIZE_BYTES * READERS_MAX  # as LMDB lays it out
_PID_OFFSET_BYTES = 8
_PID = struct.Struct("=i")
_FLOCK = struct.Struct("hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid
_descriptors: dict[Path, int] = {}  # never closed: that would drop the locks that this process has on the file by then


@contextlib.contextmanager
def clearing(folder: Path) -> Iterator[None]:
    """Lock out others that would clear readers' places meanwhile. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        acquire_lock(descriptor, _LOCK_WAIT_S)
        yield
    finally:
        os.close(descriptor)


def clear_dead_readers(folder: Path) -> Counter[int]:
    """Free the places of ended processes; returns the number of places of each other process. Raises OSError."""
    with clearing(folder):
        descriptor = _descriptors.get(folder)
        if descriptor is None:
            descriptor = _descriptors[folder] = os.open(folder / READERS_FILE_NAME, os.O_RDWR | os.O_CLOEXEC)
        table = os.pread(descriptor, TABLE_SIZE_BYTES, 0)
        living: dict[int, bool] = {}
        found: Counter[int] = Counter()
        for start in range(_HEAD_SIZE_BYTES, len(table) - _PLACE_SIZE_BYTES + 1, _PLACE_SIZE_BYTES):
            (pid,) = _PID.unpack_from(table, start + _PID_OFFSET_BYTES)
            if pid <= 0:
                continue
            if pid not in living:
                living[pid] = _is_living(descriptor, pid)
            if living[pid]:
                found[pid] += 1
            else:
                os.pwrite(descriptor, bytes(_PID.size), start + _PID_OFFSET_BYTES)
        return found


def _is_living(descriptor: int, pid: int) -> bool:
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, pid, 1, 0)
    kind = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))[0]
    return pid == os.getpid() or kind != fcntl.F_UNLCK


def describe_readers(readers: Counter[int]) -> str:
    """Describe the processes that hold readers' places, largest number first."""
    found = [f"process {pid}{_named(pid)} has {count}" for pid, count in readers.most_common(3)]
    return ", ".join(found) + (", others the rest" if len(readers) > len(found) else "")


def _named(pid: int) -> str:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f" ({' '.join(command.split())[:80]})"
    return ""
