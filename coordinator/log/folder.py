"""Making and opening the log folder of an instance."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import lmdb

from coordinator.core.errors import LogError, LogFormatError, require
from coordinator.fault_points import FaultPoint, reach
from coordinator.log import format as log_format
from coordinator.log.authentication import LogKey
from coordinator.log.environment import (
    DATA_FILE_NAME,
    LogIdentity,
    check_data_file,
    failure_of,
    log_exists,
    new_environment,
    open_environment,
    open_tables,
    read_identity,
    sync_folder,
)
from coordinator.log.lock import FolderLock
from coordinator.log.reader import LogReader
from coordinator.log.store import LmdbLogStore
from protocol.private_files import make_folder

MAP_SIZE_BYTES = 64 << 30  # sparse: costs address space, no disk
MAP_SIZE_BYTES_MAX = 1 << 40
_PARTIAL_FOLDER_NAME = ".new"

Folder = str | os.PathLike[str]


def create_log(
    folder: Folder,
    instance_name: str,
    *,
    committer_id: int | None = None,
    map_size_bytes: int = MAP_SIZE_BYTES,
    map_size_bytes_max: int = MAP_SIZE_BYTES_MAX,
    keys: Sequence[LogKey] = (),
) -> LmdbLogStore:
    """Make a new log and open it for writing; without ``committer_id`` a random one is drawn.

    The file has its name only once the log in it is complete: what a start leaves that was cut off does not count.
    ``keys``: it is authenticated with the first of them. Raises LogFormatError where there is a log already,
    LogFullError.
    """
    if committer_id is None:
        committer_id = secrets.randbelow(log_format.COMMITTER_ID_MAX) + 1
    require(0 < committer_id <= log_format.COMMITTER_ID_MAX, f"{committer_id} is no committer ID")
    require(bool(instance_name), "an instance needs a name")
    log_format.name_key(instance_name)
    path = Path(folder)
    make_folder(path)
    lock = FolderLock(path)
    try:
        if log_exists(path):
            check_data_file(path / DATA_FILE_NAME)
            raise LogFormatError(f"there is a log in {path} already: open it, or choose another folder")
        _make(path, LogIdentity(log_format.FORMAT_VERSION, instance_name, committer_id, time.time_ns()))
        reach(FaultPoint.LOG_CREATED)
    except BaseException:
        lock.release()
        raise
    return _open(path, lock, instance_name, map_size_bytes, map_size_bytes_max, keys, adopt=True)


def open_log(
    folder: Folder,
    instance_name: str,
    *,
    map_size_bytes: int = MAP_SIZE_BYTES,
    map_size_bytes_max: int = MAP_SIZE_BYTES_MAX,
    keys: Sequence[LogKey] = (),
    adopt: bool = False,
    accept: bool = False,
) -> LmdbLogStore:
    """Open a log for writing.

    ``keys``: those that it may be authenticated with, the one in use first; a log of another one of them gets that one.
    ``adopt``: a log that is not authenticated yet gets the key, as it is now. ``accept``: so does any other, by hand.

    Raises LogKeyError (no key for it, or none in it), ForgedLogError (written without the key), LogFormatError (no log,
    not a log, truncated, newer format), LogLockedError, LogIdentityError, DamagedLogError.
    """
    path = Path(folder)
    if not log_exists(path):
        raise LogFormatError(f"there is no log in {path}")
    return _open(
        path,
        FolderLock(path),
        instance_name,
        map_size_bytes,
        map_size_bytes_max,
        keys,
        adopt=adopt,
        accept=accept,
    )


def _open(
    path: Path,
    lock: FolderLock,
    instance_name: str,
    map_size_bytes: int,
    map_size_bytes_max: int,
    keys: Sequence[LogKey],
    *,
    adopt: bool = False,
    accept: bool = False,
) -> LmdbLogStore:
    """As open_log. The lock is the store's, or released."""
    environment = None
    mended: list[str] = []
    try:
        sync_names(path)
        environment = open_environment(path, readonly=False, map_size_bytes=map_size_bytes, mended=mended)
        tables = open_tables(environment, path, create=False)
        with environment.begin(buffers=True) as transaction:
            identity = read_identity(transaction, tables, path, instance_name)
        store = LmdbLogStore(
            path, environment, tables, lock, identity, map_size_bytes_max, keys, adopt=adopt, accept=accept
        )
        store.rebuilt[:0] = mended
        return store
    except BaseException as error:
        if environment is not None:
            environment.close()
        lock.release()
        if isinstance(error, OSError):
            raise failure_of(path, error) from error
        if isinstance(error, lmdb.Error):
            raise LogError(f"the log in {path} cannot be opened: {error}") from error
        raise


def open_reader(
    folder: Folder, instance_name: str | None = None, *, keys: Sequence[LogKey] | None = None, check: bool = True
) -> LogReader:
    """Open a log for reading only, also while a coordinator of another process writes it.

    ``keys``: those that it may be authenticated with; None: that is not looked at. ``check``: its small tables as well,
    now, beside each record and chunk when it is read.

    Raises LogKeyError and ForgedLogError as :func:`open_log`, LogFormatError, LogIdentityError, DamagedLogError,
    LogLockedError when this process has it open already.
    """
    path = Path(folder)
    environment = open_environment(path, readonly=True, map_size_bytes=0)
    try:
        tables = open_tables(environment, path, create=False)
        with environment.begin(buffers=True) as transaction:
            identity = read_identity(transaction, tables, path, instance_name)
        reader = LogReader(path, environment, tables, identity)
        if keys is not None:
            reader.authenticate(keys, check=check)
        return reader
    except lmdb.Error as error:
        environment.close()
        raise LogError(f"the log in {path} cannot be opened: {error}") from error
    except BaseException:
        environment.close()
        raise


def _make(folder: Path, identity: LogIdentity) -> None:
    """A new log's file, which gets its name once it is complete. Raises LogFullError, LogSyncError."""
    partial = folder / _PARTIAL_FOLDER_NAME
    shutil.rmtree(partial, ignore_errors=True)  # what was cut off
    values: dict[bytes, object] = {
        log_format.META_FORMAT: identity.format_version,
        log_format.META_INSTANCE: identity.instance_name,
        log_format.META_COMMITTER_ID: identity.committer_id,
        log_format.META_CREATED: identity.created_ns,
    }
    try:
        make_folder(partial)
        with new_environment(partial) as environment:
            tables = open_tables(environment, partial, create=True)
            with environment.begin(write=True) as transaction:
                for key, payload in values.items():
                    transaction.put(key, log_format.seal(b"meta", key, payload), db=tables.meta)
        (partial / DATA_FILE_NAME).replace(folder / DATA_FILE_NAME)
    except (lmdb.Error, OSError) as error:
        raise failure_of(folder, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync_names(path: Path) -> None:
    """LMDB syncs its files, but not the folders that name them; some of those may have been made just now."""
    path = path.absolute()
    device = path.stat().st_dev
    for folder in (path, *path.parents):
        if folder.stat().st_dev != device:
            return
        try:
            sync_folder(folder)
        except PermissionError:
            return  # who may not look into it has made nothing in it
