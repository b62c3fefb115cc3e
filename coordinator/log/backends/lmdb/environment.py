"""Opens the LMDB environment of a log, after checks that must succeed before its file is mapped."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import time
from collections import Counter
from pathlib import Path
from typing import Any

import lmdb

from immortal.coordinator.core.errors import (
    DamagedLogError,
    LogError,
    LogFormatError,
    LogFullError,
    LogLockedError,
    LogSyncError,
    LogUnavailableError,
)
from immortal.coordinator.log.backends.lmdb import files
from immortal.coordinator.log.backends.lmdb.pages import PageError, UnnamedTransaction, check_pages, name_transaction
from immortal.protocol.files import FILE_MODE, FOLDER_MODE, opened, restrict_mode

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ALMOST_FULL_BYTES = 1 << 20
MAP_SIZE_BYTES = 64 << 30  # sparse: costs address space, no disk
READERS_WAIT_S = 5.0  # timeout for a reader's place at a start
_READERS_POLL_INTERVAL_S = 0.05
_TEMPORARY = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOLCK)
DATABASES_MAX = 32  # more than this version has, so that those of a later version can be opened, too


def open_environment(
    folder: Path, *, readonly: bool, map_size_bytes: int, repairs: list[str] | None = None
) -> lmdb.Environment:
    """Open the LMDB environment in ``folder``. An existing file is checked before it is mapped.

    Messages about a writer's repairs are added to ``repairs``. Raises LogFormatError (not an LMDB file, or a truncated
    one), DamagedLogError (LMDB's own pages), LogLockedError (already open in this process), LogUnavailableError (a
    later attempt can succeed), LogError.
    """
    path = folder / files.DATA_FILE_NAME
    if path.exists():
        files.check_data_file(path)
        if not readonly or not files.is_locked(folder):
            unnamed = _check_pages(path, readonly=readonly)
            if unnamed is not None and not readonly:
                _name_last_transaction(path, unnamed)
                if repairs is not None:
                    repairs.append(f"{describe_unnamed(unnamed)}: it counts, and its meta page says so now")
    elif readonly:
        raise LogFormatError(f"there is no log in {folder}")
    try:
        _allocate_readers_table(folder)
        return _open_when_there_is_room(
            folder, map_size=map_size_bytes, readonly=readonly, create=not readonly, max_readers=files.READERS_MAX
        )
    except OSError as error:
        raise unavailable_error(folder, error) or error_of(folder, error) from error
    except lmdb.Error as error:
        if (unavailable := unavailable_error(folder, error)) is not None:
            raise unavailable from error
        if isinstance(error, lmdb.DiskError):
            raise error_of(folder, error) from error
        if "already open" in str(error):
            raise LogLockedError(f"the log in {folder} is open already in this process; use that one") from error
        if isinstance(error, lmdb.InvalidError | lmdb.VersionMismatchError | lmdb.CorruptedError):
            raise LogFormatError(f"{path} is not a log of this format: {error}") from error
        raise LogError(f"the log in {folder} cannot be opened: {error}") from error


def _open_when_there_is_room(folder: Path, **options: Any) -> lmdb.Environment:
    """Open an environment; wait while LMDB's table of readers, which opening needs for a moment, is full.

    Raises LogUnavailableError if it is full for READERS_WAIT_S, lmdb.Error, OSError.
    """
    until_s = time.monotonic() + READERS_WAIT_S
    while True:
        try:
            environment = open_lmdb(folder, **options)
        except lmdb.ReadersFullError as error:
            holders = files.clear_dead_readers(folder)
            if holders.total() >= files.READERS_MAX and time.monotonic() >= until_s:
                raise readers_full_error(folder, files.describe_readers(holders)) from error
            time.sleep(_READERS_POLL_INTERVAL_S)
        else:
            clear_dead_readers(environment, folder)
            return environment


def clear_dead_readers(environment: lmdb.Environment, folder: Path) -> None:
    """Clear the places of killed readers, which would keep freed pages from being reused."""
    with contextlib.suppress(OSError), files.clearing(folder):
        environment.reader_check()


def begin_read_transaction(environment: lmdb.Environment, folder: Path, *, buffers: bool) -> lmdb.Transaction[Any]:
    """Begin a read transaction. Raises lmdb.Error."""
    try:
        return environment.begin(buffers=buffers)  # type: ignore[call-overload,no-any-return]
    except lmdb.ReadersFullError:
        clear_dead_readers(environment, folder)
        return environment.begin(buffers=buffers)  # type: ignore[call-overload,no-any-return]


def readers_full_error(folder: Path, holders: str) -> LogUnavailableError:
    return LogUnavailableError(
        f"the log in {folder} can't be read for now: all {files.READERS_MAX} places for its readers are taken:"
        f" {holders}; end what is not needed, then try again"
    )


def unavailable_error(folder: Path, error: lmdb.Error | OSError) -> LogUnavailableError | None:
    """Return the error for a failure that is temporary, or no fault of the log. None: it is permanent."""
    if isinstance(error, lmdb.TlsFullError | lmdb.MemoryError) or _code_of(error) in _TEMPORARY:
        return LogUnavailableError(f"the log in {folder} can't be opened for now: {error}; end what is not needed")
    return files.no_access_error(folder, error)


def unreadable(folder: Path, error: lmdb.Error | struct.error, environment: lmdb.Environment) -> LogError:
    """Return the log's error for a failed read."""
    if isinstance(error, lmdb.ReadersFullError):
        lines = [line.split() for line in environment.readers().splitlines()]
        holders = Counter(int(line[0]) for line in lines if line and line[0].isdecimal())
        return readers_full_error(folder, files.describe_readers(holders))
    unavailable = unavailable_error(folder, error) if isinstance(error, lmdb.Error) else None
    return unavailable or DamagedLogError(f"the log in {folder} cannot be read: {error}", -1)


def _code_of(error: lmdb.Error | OSError) -> int:
    return (error.errno or 0) if isinstance(error, OSError) else getattr(error, "code", 0)


def _allocate_readers_table(folder: Path) -> None:
    """Allocate LMDB's table of readers, a mapped hole: on a full disk it would kill the process. Raises OSError."""
    path = folder / files.READERS_FILE_NAME
    # Closing a file drops all locks of this process on it, LMDB's among them: so it is opened only if needed.
    if path.exists() and path.stat().st_blocks * 512 >= files.TABLE_SIZE_BYTES:
        return
    try:
        with opened(path, os.O_RDWR | os.O_CREAT) as descriptor:
            os.posix_fallocate(descriptor, 0, files.TABLE_SIZE_BYTES)
    except OSError as error:
        # A reader without write access may still work; otherwise LMDB reports the problem.
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise


def open_lmdb(folder: Path, **options: Any) -> lmdb.Environment:
    """Open an environment without checks, with further options of lmdb.open. Raises lmdb.Error."""
    # Engine 0 (LMDB 0.9): py-lmdb 3 has two engines with different file formats; earlier versions have no choice.
    if _has_engines():
        options["lib_version"] = 0
    return lmdb.open(str(folder), max_dbs=DATABASES_MAX, mode=FILE_MODE, **options)


def _check_pages(path: Path, *, readonly: bool) -> UnnamedTransaction | None:
    """Run check_pages; a writer may be at work. Raises DamagedLogError, LogError."""
    try:
        return check_pages(path)
    except PageError as error:
        if readonly and files.is_locked(path.parent):
            return None  # a coordinator has begun to write
        raise DamagedLogError(
            f"{path} is damaged, in LMDB's own pages: {error}; restore the log from a copy", -1
        ) from error
    except OSError as error:
        raise LogError(f"{path} cannot be read: {error}") from error


def describe_unnamed(unnamed: UnnamedTransaction) -> str:
    number = unnamed.transaction_id
    return f"LMDB's transaction {number} is whole, and its meta page says {number - 2}, as after a sync that failed"


def _name_last_transaction(path: Path, unnamed: UnnamedTransaction) -> None:
    """Repair the meta page of a last transaction that no meta page names. Raises LogError, LogSyncError."""
    try:
        with opened(path.with_name(files.READERS_FILE_NAME), os.O_RDWR | os.O_CREAT) as descriptor:
            # The first process that opens the log tells others its last transaction: a process that still has it open
            # would make LMDB here believe in the transaction before. LMDB locks this byte until it closes.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
            name_transaction(path, unnamed)
    except BlockingIOError:
        raise LogError(
            f"{path} must be put right before it is written ({describe_unnamed(unnamed)}), and a process has it open"
            " for reading: end that one, then start again"
        ) from None
    except OSError as error:
        what = describe_unnamed(unnamed)
        raise LogSyncError(f"{path} cannot be put right ({what}): {error}; mend the disk") from error


def _has_engines() -> bool:
    try:
        lmdb.version(lib_version=0)
    except (TypeError, lmdb.Error):
        return False
    return True


def last_transaction_id(environment: lmdb.Environment) -> int:
    """Return the ID of the last transaction that changed something."""
    return int(environment.info()["last_txnid"])


def error_of(folder: Path, error: lmdb.Error | OSError) -> LogError:
    """Return the log's error for a failed write to the log in ``folder``."""
    code = _code_of(error)
    # LMDB reports a partial write as EIO: on a full disk that is no fault of the disk.
    if code in _FULL or isinstance(error, lmdb.DiskError) or (code == errno.EIO and _disk_is_full(folder)):
        return LogFullError(
            f"the disk of the log folder {folder} is full: the transaction was not written;"
            f" make room, then start again ({error})"
        )
    return LogSyncError(
        f"a write to the log in {folder} failed: what is on disk is unknown until it is opened again ({error})"
    )


def _disk_is_full(folder: Path) -> bool:
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize < _ALMOST_FULL_BYTES


# A log belongs to its owner alone. An earlier version's log, or a copy, can be accessible to others.


FILE_NAMES = (
    files.DATA_FILE_NAME,
    files.READERS_FILE_NAME,
    files.LOCK_FILE_NAME,
    files.PARTIAL_FILE_NAME,
    *files.FILES_BESIDE,
)


def restrict_log_modes(folder: Path) -> str | None:
    """Remove other users' access to the log in ``folder``; return a message, None if they had none.

    Only the log's files, parts that were cut off it, and their folders are changed.
    """
    found = []
    try:
        for place in (folder, *folder.glob("cut-*")):
            modes = {place / name: FILE_MODE for name in FILE_NAMES if (place / name).is_file()}
            for path, mode in (modes | {place: FOLDER_MODE}).items():
                before = restrict_mode(path, mode)
                if before is not None:
                    found.append(f"{path.name} {before}")
    except OSError as error:
        return f"the log in {folder} is open to others, and that can't be changed: {error}"
    if not found:
        return None
    return f"the log in {folder} was open to others ({', '.join(found)}): now only its owner can read it"


def remove_log(folder: Path) -> None:
    """Remove the log's files, and its folder if nothing else is in it: an operator may have chosen a shared folder."""
    for name in FILE_NAMES:
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


# Releasing mapped memory.
#
# LMDB reads through a shared mapping of its file. A page that was once touched stays mapped and counts as this
# process's memory, although the kernel could drop it at any time: a coordinator would seem to grow with its log. So
# from time to time the mapping's pages are unmapped. They stay in the page cache, and a later read maps them again:
# nothing is lost.


RELEASE_INTERVAL_BYTES = 32 << 20  # read or written since the last release
_RELEASED_SIZE_BYTES_MIN = 1 << 20  # of a smaller file, finding its mapping costs more than it gives back

_MADV_DONTNEED = 4  # on a shared file mapping: unmap the pages, keep the data


def _madvise() -> ctypes._NamedFuncPointer | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


class MappedPages:
    """Mapping of one file in this process. Does nothing without /proc or madvise."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._touched_bytes = 0
        self._madvise = _madvise()

    def count_bytes_touched(self, size_bytes: int) -> None:
        """Count bytes read or written, and release memory from time to time.

        The caller must keep the map from moving meanwhile.
        """
        self._touched_bytes += size_bytes
        if self._touched_bytes >= RELEASE_INTERVAL_BYTES:
            self._touched_bytes = 0
            self.release()

    def release(self) -> None:
        if self._madvise is None:
            return
        for start, end in self._mappings():
            self._madvise(start, end - start, _MADV_DONTNEED)

    def _mappings(self) -> list[tuple[int, int]]:
        """Return start and end of each shared mapping of the file."""
        try:
            status = os.stat(self._path)
            if status.st_size < _RELEASED_SIZE_BYTES_MIN:
                return []
            lines = Path("/proc/self/maps").read_text().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            addresses, permissions, _, _, mapped_inode, *_ = line.split(maxsplit=5)
            if int(mapped_inode) == status.st_ino and permissions.endswith("s"):
                start, _, end = addresses.partition("-")
                found.append((int(start, 16), int(end, 16)))
        return found
