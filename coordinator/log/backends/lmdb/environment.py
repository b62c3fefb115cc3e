"""Opening the LMDB environment of a log, and what must hold before its file is mapped."""

from __future__ import annotations

import contextlib
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
from immortal.coordinator.log.backends.lmdb import readers
from immortal.coordinator.log.backends.lmdb.data_file import DATA_FILE_NAME, check_data_file
from immortal.coordinator.log.backends.lmdb.lock import is_locked
from immortal.coordinator.log.backends.lmdb.pages import PageError, Unnamed, check_pages, name_transaction
from immortal.coordinator.log.backends.lmdb.readers import READERS_MAX
from immortal.protocol.private_files import FILE_MODE

READERS_FILE_NAME = readers.FILE_NAME
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ALMOST_FULL_BYTES = 1 << 20
MAP_SIZE_BYTES = 64 << 30  # sparse: costs address space, no disk
READERS_WAIT_S = 5.0  # for one of its rows, at a start
_READERS_LOOK_S = 0.05
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOLCK)
DATABASES_MAX = 32  # more than this version has, so that a later version's can be opened beside them


def open_environment(
    folder: Path, *, readonly: bool, map_size_bytes: int, mended: list[str] | None = None
) -> lmdb.Environment:
    """Open the LMDB environment in ``folder``; a file that is there is checked before it is mapped.

    ``mended`` gets, in words, what a writer has put right in it.
    Raises LogFormatError (no LMDB file, or a truncated one), DamagedLogError (LMDB's own pages), LogLockedError (open
    already in this process), LogUnavailableError (the next time it may be otherwise), LogError.
    """
    path = folder / DATA_FILE_NAME
    if path.exists():
        check_data_file(path)
        if not readonly or not is_locked(folder):
            unnamed = _check_pages(path, readonly=readonly)
            if unnamed is not None and not readonly:
                _name_last_transaction(path, unnamed)
                if mended is not None:
                    mended.append(f"{said_of(unnamed)}: it counts, and its meta page says so now")
    elif readonly:
        raise LogFormatError(f"there is no log in {folder}")
    try:
        _allocate_readers_table(folder)
        return _open_when_there_is_room(
            folder, map_size=map_size_bytes, readonly=readonly, create=not readonly, max_readers=READERS_MAX
        )
    except OSError as error:
        raise passing(folder, error) or failure_of(folder, error) from error
    except lmdb.Error as error:
        if (unavailable := passing(folder, error)) is not None:
            raise unavailable from error
        if isinstance(error, lmdb.DiskError):
            raise failure_of(folder, error) from error
        if "already open" in str(error):
            raise LogLockedError(f"the log in {folder} is open already in this process; use that one") from error
        if isinstance(error, lmdb.InvalidError | lmdb.VersionMismatchError | lmdb.CorruptedError):
            raise LogFormatError(f"{path} is not a log of this format: {error}") from error
        raise LogError(f"the log in {folder} cannot be opened: {error}") from error


def _open_when_there_is_room(folder: Path, **options: Any) -> lmdb.Environment:
    """To open it takes a place in the table of readers for a moment.

    Raises LogUnavailableError where there is none for READERS_WAIT_S, lmdb.Error, OSError.
    """
    until_s = time.monotonic() + READERS_WAIT_S
    while True:
        try:
            environment = _open_lmdb(folder, **options)
        except lmdb.ReadersFullError as error:
            holders = readers.clear_dead(folder)
            if holders.total() >= READERS_MAX and time.monotonic() >= until_s:
                raise full(folder, readers.said_of(holders)) from error
            time.sleep(_READERS_LOOK_S)
        else:
            clear_dead(environment, folder)
            return environment


def clear_dead(environment: lmdb.Environment, folder: Path) -> None:
    """The places of readers that were killed: they would keep freed pages from being used again."""
    with contextlib.suppress(OSError), readers.clearing(folder):
        environment.reader_check()


def begin_reading(environment: lmdb.Environment, folder: Path, *, buffers: bool) -> lmdb.Transaction[Any]:
    """A read transaction. Raises lmdb.Error."""
    try:
        return environment.begin(buffers=buffers)  # type: ignore[call-overload,no-any-return]
    except lmdb.ReadersFullError:
        clear_dead(environment, folder)
        return environment.begin(buffers=buffers)  # type: ignore[call-overload,no-any-return]


def full(folder: Path, holders: str) -> LogUnavailableError:
    return LogUnavailableError(
        f"the log in {folder} can't be read for now: all {READERS_MAX} places for its readers are taken: {holders};"
        " end what is not needed, then try again"
    )


def passing(folder: Path, error: lmdb.Error | OSError) -> LogUnavailableError | None:
    """What ``error`` means where another time may be better: nothing is wrong with the log. None: it does not pass."""
    if isinstance(error, lmdb.TlsFullError | lmdb.MemoryError) or _code_of(error) in _PASSING:
        return LogUnavailableError(f"the log in {folder} can't be opened for now: {error}; end what is not needed")
    return None


def unreadable(folder: Path, error: lmdb.Error | struct.error, environment: lmdb.Environment) -> LogError:
    """What a read that failed with ``error`` means."""
    if isinstance(error, lmdb.ReadersFullError):
        lines = [line.split() for line in environment.readers().splitlines()]
        return full(folder, readers.said_of(Counter(int(line[0]) for line in lines if line and line[0].isdecimal())))
    unavailable = passing(folder, error) if isinstance(error, lmdb.Error) else None
    return unavailable or DamagedLogError(f"the log in {folder} cannot be read: {error}", -1)


def _code_of(error: lmdb.Error | OSError) -> int:
    return (error.errno or 0) if isinstance(error, OSError) else getattr(error, "code", 0)


def _allocate_readers_table(folder: Path) -> None:
    """LMDB makes it as a hole, and maps it: on a full disk the first touch would kill the process. Raises OSError."""
    path = folder / READERS_FILE_NAME
    # To close a file drops the locks that this process has on it, and LMDB's would be: it is opened when there is need.
    if path.exists() and path.stat().st_blocks * 512 >= readers.TABLE_SIZE_BYTES:
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return  # a reader that may not write there gets along, or LMDB says what is wrong
        raise
    try:
        os.posix_fallocate(descriptor, 0, readers.TABLE_SIZE_BYTES)
    finally:
        os.close(descriptor)


def new_environment(folder: Path) -> lmdb.Environment:
    """For the first transactions of a log that nobody else knows of. Raises lmdb.Error."""
    return _open_lmdb(folder, map_size=1 << 26, lock=False)


def _open_lmdb(folder: Path, **options: Any) -> lmdb.Environment:
    # Engine 0 (LMDB 0.9): py-lmdb 3 has two engines with different file formats; before that there is no choice.
    if _has_engines():
        options["lib_version"] = 0
    return lmdb.open(str(folder), max_dbs=DATABASES_MAX, mode=FILE_MODE, **options)


def _check_pages(path: Path, *, readonly: bool) -> Unnamed | None:
    """As check_pages. Raises DamagedLogError, LogError."""
    try:
        return check_pages(path)
    except PageError as error:
        if readonly and is_locked(path.parent):
            return None  # a coordinator began to write meanwhile
        raise DamagedLogError(
            f"{path} is damaged, in LMDB's own pages: {error}; restore the log from a copy", -1
        ) from error
    except OSError as error:
        raise LogError(f"{path} cannot be read: {error}") from error


def said_of(unnamed: Unnamed) -> str:
    number = unnamed.transaction_id
    return f"LMDB's transaction {number} is whole, and its meta page says {number - 2}, as after a sync that failed"


def _name_last_transaction(path: Path, unnamed: Unnamed) -> None:
    """Raises LogError, LogSyncError."""
    try:
        descriptor = os.open(path.with_name(READERS_FILE_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            # Who opens the log first tells the others which transaction is the last: a process that has it open still
            # believes in the one before, and so would LMDB in this one. LMDB has a lock on this byte until it closes.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
            name_transaction(path, unnamed)
        finally:
            os.close(descriptor)
    except BlockingIOError:
        raise LogError(
            f"{path} must be put right before it is written ({said_of(unnamed)}), and a process has it open for"
            " reading: end that one, then start again"
        ) from None
    except OSError as error:
        raise LogSyncError(f"{path} cannot be put right ({said_of(unnamed)}): {error}; mend the disk") from error


def _has_engines() -> bool:
    try:
        lmdb.version(lib_version=0)
    except (TypeError, lmdb.Error):
        return False
    return True


def last_transaction_id(environment: lmdb.Environment) -> int:
    """Of the last one that changed anything."""
    return int(environment.info()["last_txnid"])


def failure_of(folder: Path, error: lmdb.Error | OSError) -> LogError:
    """What a write that failed with ``error`` means to a log in ``folder``."""
    code = _code_of(error)
    # LMDB reports a write that the disk took only in part as EIO: on a full disk that is no fault of the disk.
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
