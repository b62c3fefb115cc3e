"""Opening the LMDB environment of a log, and what must hold before its file is mapped."""

from __future__ import annotations

import errno
import fcntl
import importlib
import os
import struct
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lmdb
import msgspec

from coordinator.core.errors import (
    DamagedLogError,
    LogError,
    LogFormatError,
    LogFullError,
    LogIdentityError,
    LogLockedError,
    LogSyncError,
)
from coordinator.log import format as log_format
from coordinator.log.lock import is_locked
from coordinator.log.pages import PageError, Unnamed, check_pages, decode_meta, name_transaction
from protocol.checksum import crc64
from protocol.private_files import FILE_MODE

DATA_FILE_NAME = "data.mdb"
READERS_FILE_NAME = "lock.mdb"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ALMOST_FULL_BYTES = 1 << 20
READERS_MAX = 512  # what the first opener sets counts for all: every opener passes the same
READERS_SIZE_BYTES = 128 + 64 * READERS_MAX  # of their table, as LMDB makes it
DATABASES_MAX = 32  # more than this version has, so that a later version's can be opened beside them

# LMDB 0.9's meta pages: a page header of 16 bytes, then MDB_meta (64-bit): magic, version, address, map size, two
# MDB_db of 48 bytes (the first begins with the page size), last page, transaction ID.
_META_OFFSET_BYTES = 16
_META_START = struct.Struct("=IIQQI")
_META_END = struct.Struct("=QQ")
_META_END_OFFSET_BYTES = 24 + 2 * 48
_MAGIC = 0xBEEFC0DE
_META_SIZE_BYTES = _META_OFFSET_BYTES + _META_END_OFFSET_BYTES + _META_END.size
_DATA_VERSION = 1
_IDENTITY = struct.Struct("<QQ")  # committer ID, when the log was made
FILES_BESIDE = ("journal", "high-water-mark")  # that only a complete log has


@dataclass(frozen=True, slots=True)
class Tables:
    """The handles of the named databases of docs/LOG_FORMAT.md."""

    records: lmdb._Database
    checkpoints: lmdb._Database
    chunks: lmdb._Database
    outputs: lmdb._Database
    sources: lmdb._Database
    acknowledged: lmdb._Database
    peers: lmdb._Database
    impulses: lmdb._Database
    clients: lmdb._Database
    replies: lmdb._Database
    spilled: lmdb._Database
    versions: lmdb._Database
    meta: lmdb._Database
    # None: the log was begun without them, and has not been opened for writing since.
    verdicts: lmdb._Database | None
    letters: lmdb._Database | None
    audit: lmdb._Database | None
    # None: the log is not authenticated.
    record_seals: lmdb._Database | None
    checkpoint_seals: lmdb._Database | None


_SINCE_VERDICTS = ("verdicts", "letters", "audit")
_SEALS = ("record_seals", "checkpoint_seals")


@dataclass(frozen=True, slots=True)
class LogIdentity:
    """Whose log it is."""

    format_version: int
    instance_name: str
    committer_id: int
    created_ns: int

    @property
    def check(self) -> int:
        """With what the CRCs of files beside the tables begin: nothing of another log counts."""
        return crc64(_IDENTITY.pack(self.committer_id, self.created_ns))


def log_exists(folder: str | os.PathLike[str]) -> bool:
    """Whether ``folder`` holds an LMDB file; whether that is a log of ours shows when it is opened."""
    path = Path(folder) / DATA_FILE_NAME
    try:
        return path.exists() and not _is_unfinished(path)
    except OSError:  # who opens it says why it cannot be read
        return True


def _is_unfinished(path: Path) -> bool:
    """Whether it is what versions up to 4 left of a log where they ended while they made it.

    They made it in place, in two transactions: page 0 is then as LMDB begins it, and page 1 is not there, or has at
    most the first transaction. No log that was ever complete has such a page 0, and a first start has no other files.
    """
    if any(path.with_name(name).exists() for name in FILES_BESIDE):
        return False
    with path.open("rb") as file:
        first = file.read(_META_SIZE_BYTES)
        if len(first) < _META_SIZE_BYTES:
            return False
        magic, version, _, _, page_size_bytes = _META_START.unpack_from(first, _META_OFFSET_BYTES)
        file.seek(page_size_bytes)
        second = file.read(_META_SIZE_BYTES).ljust(_META_SIZE_BYTES, b"\0")
    meta = decode_meta(first[_META_OFFSET_BYTES:])
    return (
        (magic, version, meta.transaction_id) == (_MAGIC, _DATA_VERSION, 0)
        and meta.main.is_empty
        and meta.free.is_empty
        and decode_meta(second[_META_OFFSET_BYTES:]).transaction_id <= 1
    )


def open_environment(
    folder: Path, *, readonly: bool, map_size_bytes: int, mended: list[str] | None = None
) -> lmdb.Environment:
    """Open the LMDB environment in ``folder``; a file that is there is checked before it is mapped.

    ``mended`` gets, in words, what a writer has put right in it.
    Raises LogFormatError (no LMDB file, or a truncated one), DamagedLogError (LMDB's own pages), LogLockedError (open
    already in this process), LogError.
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
        return _open_lmdb(
            folder, map_size=map_size_bytes, readonly=readonly, create=not readonly, max_readers=READERS_MAX
        )
    except OSError as error:
        raise failure_of(folder, error) from error
    except lmdb.Error as error:
        if isinstance(error, lmdb.DiskError):
            raise failure_of(folder, error) from error
        if "already open" in str(error):
            raise LogLockedError(f"the log in {folder} is open already in this process; use that one") from error
        if isinstance(error, lmdb.InvalidError | lmdb.VersionMismatchError | lmdb.CorruptedError):
            raise LogFormatError(f"{path} is not a log of this format: {error}") from error
        raise LogError(f"the log in {folder} cannot be opened: {error}") from error


def _allocate_readers_table(folder: Path) -> None:
    """LMDB makes it as a hole, and maps it: on a full disk the first touch would kill the process. Raises OSError."""
    path = folder / READERS_FILE_NAME
    # To close a file drops the locks that this process has on it, and LMDB's would be: it is opened when there is need.
    if path.exists() and path.stat().st_blocks * 512 >= READERS_SIZE_BYTES:
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return  # a reader that may not write there gets along, or LMDB says what is wrong
        raise
    try:
        os.posix_fallocate(descriptor, 0, READERS_SIZE_BYTES)
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


def open_tables(environment: lmdb.Environment, folder: Path, *, create: bool) -> Tables:
    """Open every named database.

    Without ``create`` it raises LogFormatError when one is missing or the log is of another format version, and
    DamagedLogError; with it lmdb.Error.
    """
    names = Tables.__dataclass_fields__
    if create:
        with environment.begin(write=True) as transaction:
            made = {name: environment.open_db(name.encode(), txn=transaction) for name in names if name not in _SEALS}
            return Tables(**made, record_seals=None, checkpoint_seals=None)
    try:
        meta = environment.open_db(b"meta", create=False)
        with environment.begin(buffers=True) as transaction:
            version = _check_format(transaction, meta, folder)  # first: another version may have other databases
        # Logs of version 3 were begun that have it not. To make a table is a transaction, which would have to take
        # in what a journal has.
        if version < log_format.JOURNAL_VERSION and not environment.flags()["readonly"]:
            environment.open_db(b"spilled")
        may_miss = _SEALS if version >= log_format.VERDICTS_VERSION else (*_SINCE_VERDICTS, *_SEALS)
        return Tables(*(_open_table(environment, name, may_miss) for name in names))
    except (lmdb.NotFoundError, lmdb.ReadonlyError) as error:
        raise LogFormatError(f"there is no complete log in {folder}: {error}") from None
    except lmdb.Error as error:
        raise LogFormatError(f"the log in {folder} is damaged: {error}") from error


def _open_table(environment: lmdb.Environment, name: str, may_miss: Collection[str]) -> Any:
    """Raises lmdb.NotFoundError for a missing one that may not miss."""
    try:
        return environment.open_db(name.encode(), create=False)
    except lmdb.NotFoundError:
        if name not in may_miss:
            raise
        return None


def make_missing_tables(environment: lmdb.Environment, tables: Tables, write: lmdb.Transaction[memoryview]) -> Tables:
    """``tables`` with those that an older log has not, made within ``write``, which takes in the journal."""
    missing = [name for name in _SINCE_VERDICTS if getattr(tables, name) is None]
    return replace(tables, **{name: environment.open_db(name.encode(), txn=write) for name in missing})


def make_seal_tables(environment: lmdb.Environment, tables: Tables, write: lmdb.Transaction[memoryview]) -> Tables:
    """``tables`` with those of an authenticated log, made within ``write``."""
    missing = [name for name in _SEALS if getattr(tables, name) is None]
    return replace(tables, **{name: environment.open_db(name.encode(), txn=write) for name in missing})


def last_transaction_id(environment: lmdb.Environment) -> int:
    """Of the last one that changed anything."""
    return int(environment.info()["last_txnid"])


def read_identity(
    transaction: lmdb.Transaction[memoryview], tables: Tables, folder: Path, instance_name: str | None
) -> LogIdentity:
    """Whose log this is. Raises LogFormatError (none, or a newer version), LogIdentityError, DamagedLogError."""
    version = _check_format(transaction, tables.meta, folder)
    name = _required(transaction, tables.meta, folder, log_format.META_INSTANCE, log_format.TEXT)
    if instance_name is not None and name != instance_name:
        raise LogIdentityError(
            f"the log in {folder} belongs to instance {name!r}, not to {instance_name!r}: check the log folder's path"
        )
    committer_id = _required(transaction, tables.meta, folder, log_format.META_COMMITTER_ID, log_format.INT)
    created_ns = _required(transaction, tables.meta, folder, log_format.META_CREATED, log_format.INT)
    return LogIdentity(version, name, committer_id, created_ns)


def _check_format(transaction: lmdb.Transaction[memoryview], meta: lmdb._Database, folder: Path) -> int:
    """The format version, one that this program reads. Raises LogFormatError for another one, DamagedLogError."""
    version = _required(transaction, meta, folder, log_format.META_FORMAT, log_format.INT)
    if version in log_format.FORMAT_VERSIONS_READ:
        return version
    if version > log_format.AUTHENTICATED_VERSION:
        remedy = "use the newer version of the program that wrote it"
    else:
        remedy = "no release wrote it, and none reads it; move that folder away to start with a new, empty log"
    raise LogFormatError(
        f"the log in {folder} has format version {version}, this program reads version"
        f" {log_format.AUTHENTICATED_VERSION}: {remedy}"
    )


def _required(
    transaction: lmdb.Transaction[memoryview],
    meta: lmdb._Database,
    folder: Path,
    key: bytes,
    decoder: msgspec.msgpack.Decoder[log_format.Decoded],
) -> log_format.Decoded:
    value = transaction.get(key, db=meta)
    if value is None:
        raise LogFormatError(f"there is no complete log in {folder}: its meta table has no {key.decode()!r}")
    return log_format.unseal(b"meta", key, bytes(value), decoder)


def check_data_file(path: Path) -> None:
    """Check that ``path`` is an LMDB 0.9 file with all the pages that it counts, without mapping it.

    A page beyond the end of a mapped file kills the process that touches it. Raises LogFormatError.
    """
    needed_bytes = _needed_size_bytes(path)
    size_bytes = path.stat().st_size  # after the meta pages: a live writer only ever makes the file longer
    if size_bytes < needed_bytes and not _all_used_pages_exist(path):
        raise LogFormatError(
            f"{path} is truncated: it has {size_bytes} bytes, its pages need {needed_bytes};"
            " restore it from a copy, or start this instance with a new, empty log"
        )


def failure_of(folder: Path, error: lmdb.Error | OSError) -> LogError:
    """What a write that failed with ``error`` means to a log in ``folder``."""
    code = error.errno if isinstance(error, OSError) else getattr(error, "code", 0)
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


def sync_folder(path: Path) -> None:
    """Make durable which files ``path`` holds, and under which names. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def extend_data_file(path: Path) -> None:
    """Give the file every page that LMDB counts, as a hole: LMDB may count free pages that it never wrote."""
    needed_bytes = _needed_size_bytes(path)
    if path.stat().st_size < needed_bytes:
        with path.open("r+b") as file:
            if os.fstat(file.fileno()).st_size < needed_bytes:
                os.ftruncate(file.fileno(), needed_bytes)


def _needed_size_bytes(path: Path) -> int:
    """The size that the newest meta page asks for. Raises LogFormatError for anything but an LMDB 0.9 file."""
    try:
        with path.open("rb") as file:
            start = file.read(_META_OFFSET_BYTES + _META_END_OFFSET_BYTES + _META_END.size)
            if len(start) < _META_OFFSET_BYTES + _META_START.size:
                raise LogFormatError(
                    f"{path} is not an LMDB file: it has {len(start)} bytes; restore it from a copy, or, where this"
                    " instance never did anything, remove it and start again"
                )
            page_size_bytes = _META_START.unpack_from(start, _META_OFFSET_BYTES)[4]
            if not 256 <= page_size_bytes <= 65536 or page_size_bytes & (page_size_bytes - 1):
                raise LogFormatError(f"{path} is not an LMDB file of this kind of machine")
            metas = []
            for page in range(2):
                file.seek(page * page_size_bytes + _META_OFFSET_BYTES)
                meta = file.read(_META_END_OFFSET_BYTES + _META_END.size)
                if len(meta) == _META_END_OFFSET_BYTES + _META_END.size:
                    metas.append(meta)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise LogFormatError(f"there is no log in {path.parent}") from None
        raise LogError(f"{path} cannot be read: {error}") from error
    newest: tuple[int, int] | None = None
    for meta in metas:
        magic, version, _, _, _ = _META_START.unpack_from(meta)
        if magic != _MAGIC:
            raise LogFormatError(f"{path} is not an LMDB file: its first bytes are not LMDB's")
        if version != _DATA_VERSION:
            raise LogFormatError(f"{path} has LMDB data version {version}, this program reads {_DATA_VERSION}")
        last_page, transaction_id = _META_END.unpack_from(meta, _META_END_OFFSET_BYTES)
        newest = max(newest or (0, 0), (transaction_id, last_page))
    if newest is None or len(metas) < 2:
        raise LogFormatError(f"{path} is truncated: it has not even LMDB's two meta pages")
    return (newest[1] + 1) * int(page_size_bytes)


def _all_used_pages_exist(path: Path) -> bool:
    """Whether only free pages are missing at the file's end; False where the installed py-lmdb cannot tell."""
    try:
        verify = _structure_walk()
        with path.open("rb") as file:
            walker = verify._Verifier(file, path.stat().st_size)
            problems = walker.verify()
            last_used_page = bytes(walker.live).rfind(1)
            return not problems and (last_used_page + 1) * walker.psize <= path.stat().st_size
    except Exception:  # another version of py-lmdb, or a file that it cannot walk: then it counts as truncated
        return False


def _structure_walk() -> Any:
    """py-lmdb's walk over a file's pages, from version 3.0 on. Raises ImportError."""
    return importlib.import_module("lmdb.verify")


def structure_problems(path: Path) -> list[str] | None:
    """What is wrong with the file's pages, by a walk in plain Python that nothing in the file can crash.

    None where the installed py-lmdb has no such walk. Only for a log that no process writes.
    """
    try:
        verify = _structure_walk()
    except ImportError:
        return None
    try:
        return list(verify.verify(str(path.parent)))
    except verify.VerifyError as error:
        return [str(error)]
    except OSError as error:
        return [f"{path} cannot be read: {error.strerror}"]
