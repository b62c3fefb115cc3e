"""Files of a log's folder: LMDB's data file, checked without mapping it, the locks, and the high-water mark.

One lock excludes a second coordinator; the others are LMDB's table of readers.

The high-water mark is the log's last committed record, in a separate file, which damage to the log does not affect. It
is written after the commit and without a sync, so it can only be older than the log. docs/decisions/0014 has the
reasons.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import os
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct

from immortal.coordinator.core.errors import (
    DamagedLogError,
    LogError,
    LogFormatError,
    LogLockedError,
    LogUnavailableError,
)
from immortal.coordinator.log.backend import Mac, View
from immortal.coordinator.log.backends.lmdb.pages import META, PAGE_HEADER_SIZE_BYTES, decode_meta
from immortal.coordinator.log.format import MAC_SIZE_BYTES, SEQUENCE_KEY
from immortal.coordinator.log.identity import LogIdentity, check_value, first_and_last_sequence_id
from immortal.protocol.checksum import crc64
from immortal.protocol.files import FILE_MODE, acquire_lock, describe_lock_holder, open_lock, opened, sync_folder
from immortal.protocol.varint import Readable

DATA_FILE_NAME = "data.mdb"
FILES_BESIDE = ("journal", "high-water-mark")  # only a complete log has them
PARTIAL_FILE_NAME = "journal.new"  # the journal's until it has all its blocks: a shorter journal is a truncated one

_MAGIC = 0xBEEFC0DE
_DATA_VERSION = 1
_META_SIZE_BYTES = PAGE_HEADER_SIZE_BYTES + META.size
_META_START_SIZE_BYTES = PAGE_HEADER_SIZE_BYTES + 28  # to the page size
_READ_SIZE_BYTES = 1 << 20
_READ_SIZE_BYTES_MIN = 4096  # granularity of the reported place


def log_exists(folder: str | os.PathLike[str]) -> bool:
    """Return True if ``folder`` has an LMDB file. To open it tells whether it is one of our logs."""
    path = Path(folder) / DATA_FILE_NAME
    try:
        return path.exists() and not _is_unfinished(path)
    except OSError:  # opening it reports the error
        return True


def no_access_error(folder: Path, error: Exception) -> LogUnavailableError | None:
    """Return the error for a log that this user may not read, which is no damage; None if ``error`` is another one."""
    if isinstance(error, PermissionError) or getattr(error, "code", 0) in (errno.EACCES, errno.EPERM):
        who = f"user {os.geteuid()} may not use the log in {folder}"
        return LogUnavailableError(f"{who}: {error}; be the user whose instance it is, or see its modes")
    return None


def _is_unfinished(path: Path) -> bool:
    """Return True for a file left by an interrupted first backup, which is made in place, in two transactions.

    Page 0 is then as LMDB initializes it, and page 1 is missing, or has at most the first transaction. No complete log
    has such a page 0, and an unfinished one has no other files.
    """
    if any(path.with_name(name).exists() for name in FILES_BESIDE):
        return False
    with path.open("rb") as file:
        first = file.read(_META_SIZE_BYTES)
        if len(first) < _META_SIZE_BYTES:
            return False
        meta = decode_meta(first[PAGE_HEADER_SIZE_BYTES:])
        file.seek(meta.page_size_bytes)
        second = file.read(_META_SIZE_BYTES).ljust(_META_SIZE_BYTES, b"\0")
    return (
        (meta.magic, meta.version, meta.transaction_id) == (_MAGIC, _DATA_VERSION, 0)
        and meta.main.is_empty
        and meta.free.is_empty
        and decode_meta(second[PAGE_HEADER_SIZE_BYTES:]).transaction_id <= 1
    )


def check_data_file(path: Path) -> None:
    """Check, without mapping it, that ``path`` is an LMDB 0.9 file with all the pages that it counts.

    A page beyond the end of a mapped file kills the process that touches it. Raises LogFormatError.
    """
    needed_bytes = _needed_size_bytes(path)
    size_bytes = path.stat().st_size  # read after the meta pages: a live writer only makes the file longer
    if size_bytes < needed_bytes and not _all_used_pages_exist(path):
        raise LogFormatError(
            f"{path} is truncated: it has {size_bytes} bytes, its pages need {needed_bytes};"
            " restore it from a copy, or start this instance with a new, empty log"
        )


def extend_data_file(path: Path) -> None:
    """Extend the file to every page that LMDB counts, as a hole: LMDB can count free pages that it never wrote."""
    needed_bytes = _needed_size_bytes(path)
    if path.stat().st_size < needed_bytes:
        with path.open("r+b") as file:
            if os.fstat(file.fileno()).st_size < needed_bytes:
                os.ftruncate(file.fileno(), needed_bytes)


def _needed_size_bytes(path: Path) -> int:
    """Return the size by the newest meta page. Raises LogFormatError if ``path`` is not an LMDB 0.9 file."""
    try:
        with path.open("rb") as file:
            pages = [file.read(_META_SIZE_BYTES)]
            if len(pages[0]) < _META_START_SIZE_BYTES:
                raise LogFormatError(
                    f"{path} is not an LMDB file: it has {len(pages[0])} bytes; restore it from a copy, or, where this"
                    " instance never did anything, remove it and start again"
                )
            padded = pages[0].ljust(_META_SIZE_BYTES, b"\0")
            page_size_bytes = decode_meta(padded[PAGE_HEADER_SIZE_BYTES:]).page_size_bytes
            if not 256 <= page_size_bytes <= 65536 or page_size_bytes & (page_size_bytes - 1):
                raise LogFormatError(f"{path} is not an LMDB file of this kind of machine")
            file.seek(page_size_bytes)
            pages.append(file.read(_META_SIZE_BYTES))
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise LogFormatError(f"there is no log in {path.parent}") from None
        raise no_access_error(path.parent, error) or LogError(f"{path} cannot be read: {error}") from error
    metas = [decode_meta(page[PAGE_HEADER_SIZE_BYTES:]) for page in pages if len(page) == _META_SIZE_BYTES]
    for meta in metas:
        if meta.magic != _MAGIC:
            raise LogFormatError(f"{path} is not an LMDB file: its first bytes are not LMDB's")
        if meta.version != _DATA_VERSION:
            raise LogFormatError(f"{path} has LMDB data version {meta.version}, this program reads {_DATA_VERSION}")
    if len(metas) < 2:
        raise LogFormatError(f"{path} is truncated: it has not even LMDB's two meta pages")
    newest = max(metas, key=lambda meta: (meta.transaction_id, meta.last_page))
    return (newest.last_page + 1) * page_size_bytes


def _all_used_pages_exist(path: Path) -> bool:
    """Return True if only free pages are missing at the file's end; False also if the py-lmdb can't tell."""
    try:
        with path.open("rb") as file:
            walker = _page_walk(_structure_walk(), file)
            problems = walker.verify()
            last_used_page = bytes(walker.live).rfind(1)
            return not problems and (last_used_page + 1) * walker.psize <= path.stat().st_size
    except Exception:  # another version of py-lmdb, or a file that it cannot walk: then it counts as truncated
        return False


def _structure_walk() -> Any:
    """Import py-lmdb's page walk, which exists from version 3.0 on. Raises ImportError."""
    return importlib.import_module("lmdb.verify")


def _page_walk(verify: Any, file: BinaryIO) -> Any:
    """Create a walk of the module ``verify`` over a file's pages.

    Its rule for overflow pages is stricter than LMDB: a large value that was replaced by a smaller one in the same
    transaction keeps its pages, and so does a list of free pages that became shorter (mdb_cursor_put reuses dirty
    pages). These pages count as pages of the value.
    """

    class PageWalk(verify._Verifier):  # type: ignore[misc]
        def _bigdata(
            self, ctx: Any, pgno: int, i: int, buf: bytes, doff: int, dsize: int, want_bytes: bool
        ) -> bytes | None:
            size_bytes = dsize
            if doff + 8 <= len(buf):
                first_page = int.from_bytes(buf[doff : doff + 8], sys.byteorder)
                first = self.read_page(first_page) if 2 <= first_page < self.next_pgno else None
                pages = self._pg_pages(first, 0) if first is not None else 0
                if first_page + pages <= self.next_pgno:
                    size_bytes = max(dsize, pages * self.psize - self.hdrsz)
            data = super()._bigdata(ctx, pgno, i, buf, doff, size_bytes, want_bytes=want_bytes)
            return None if data is None else bytes(data[:dsize])

    return PageWalk(file, os.fstat(file.fileno()).st_size)


def structure_problems(path: Path) -> list[str] | None:
    """Find problems of the file's pages by a walk in plain Python, which damage can't crash.

    Returns None if the installed py-lmdb has no such walk. Only for a log that no process writes.
    """
    try:
        verify = _structure_walk()
    except ImportError:
        return None
    try:
        with path.open("rb") as file:
            return list(_page_walk(verify, file).verify())
    except verify.VerifyError as error:
        return [str(error)]
    except OSError as error:
        return [f"{path} cannot be read: {error.strerror}"]


def first_unreadable(path: Path) -> str | None:
    """Read the whole file; describe the first range that the disk fails to read, if any."""
    offset_bytes, size_bytes = 0, _READ_SIZE_BYTES
    with opened(path, os.O_RDONLY) as descriptor:
        while True:
            try:
                data = os.pread(descriptor, size_bytes, offset_bytes)
            except OSError as error:
                if size_bytes == _READ_SIZE_BYTES_MIN:
                    problem = f"{path} cannot be read at byte {offset_bytes}: {error.strerror}"
                    return f"{problem}; restore the log from a copy"
                size_bytes = _READ_SIZE_BYTES_MIN
                continue
            if not data:
                return None
            offset_bytes += len(data)


# Syncing folders, which have the names of files.


def sync_names(path: Path) -> None:
    """Sync the folders that name the log's files, which may be new: LMDB syncs only the files."""
    path = path.absolute()
    device = path.stat().st_dev
    for folder in (path, *path.parents):
        if folder.stat().st_dev != device:
            return
        try:
            sync_folder(folder)
        except PermissionError:
            return  # a folder that we can't read has none of our files


LOCK_FILE_NAME = "lock"
_TIMEOUT_S = 0.03  # a reader's :func:`is_locked` holds the lock for some microseconds: not worth a failed start


class FolderLock:
    """Lock on a log's folder, held until :meth:`release`, or until the process ends in any way."""

    def __init__(self, folder: Path) -> None:
        """Acquire the lock. Raises LogLockedError, which names the folder and the process that holds it."""
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
        with contextlib.suppress(OSError):  # on a full disk the lock is held without its text
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def lock_holder(folder: Path) -> str | None:
    """Describe the process that holds the lock; None if the lock's file does not name it yet."""
    try:
        with opened(folder / LOCK_FILE_NAME, os.O_RDONLY) as descriptor:
            found = describe_lock_holder(descriptor)
    except OSError:
        return None
    return found if found.startswith("process") else None


def is_locked(folder: Path) -> bool:
    """Return True while a process writes this log."""
    try:
        with opened(folder / LOCK_FILE_NAME, os.O_RDONLY) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


# Table of readers of a log's LMDB environment (lock.mdb). It is cleaned when it is full.
#
# LMDB clears the places of killed processes only in an open environment, which itself needs a place. So this code
# clears them from outside, by LMDB's rule: a live process has a lock on the byte with its number. It holds a lock on
# the log's folder meanwhile: otherwise a place that two processes clear could belong to a third one in between.


READERS_FILE_NAME = "lock.mdb"
READERS_MAX = 512  # the first opener's value counts for all, so every opener passes the same value
_LOCK_WAIT_S = 1.0  # it is held for a millisecond
_HEAD_SIZE_BYTES = 128
_PLACE_SIZE_BYTES = 64
TABLE_SIZE_BYTES = _HEAD_SIZE_BYTES + _PLACE_SIZE_BYTES * READERS_MAX  # LMDB's layout
_PID_OFFSET_BYTES = 8
_PID = struct.Struct("=i")
_FLOCK = struct.Struct("hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid
_descriptors: dict[Path, int] = {}  # never closed: that would drop all locks of this process on the file


@contextlib.contextmanager
def clearing(folder: Path) -> Iterator[None]:
    """Exclude other processes that clear readers' places. Raises OSError."""
    with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        acquire_lock(descriptor, _LOCK_WAIT_S)
        yield


def clear_dead_readers(folder: Path) -> Counter[int]:
    """Free the places of ended processes; return the number of places of each other process. Raises OSError."""
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
    """Describe the processes that hold readers' places, those with the most places first."""
    found = [f"process {pid}{_named(pid)} has {count}" for pid, count in readers.most_common(3)]
    return ", ".join(found) + (", others the rest" if len(readers) > len(found) else "")


def _named(pid: int) -> str:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f" ({' '.join(command.split())[:80]})"
    return ""


FILE_NAME = "high-water-mark"

_MARK_MAGIC = b"IMH1"

_MAGIC_AUTHENTICATED = b"IMH2"  # with a MAC instead of the CRC
_CHECKED = struct.Struct("<4sIQQ")  # magic, zero, sequence ID, check of the record
_CRC_SIZE_BYTES = 8


class Mark(Struct, frozen=True):
    sequence_id: int
    check: int  # the last 8 bytes of the record's value: the CRC of its trailer, which covers the record


class HighWaterMark:
    """High-water mark of the log in ``folder``; the first :meth:`put` opens the file."""

    def __init__(self, folder: Path, identity: LogIdentity, mac: Mac | None = None) -> None:
        """``mac``: MAC function of an authenticated log, if its key is available."""
        self.path = folder / FILE_NAME
        self._mac = mac
        self._seed = identity.check
        self._descriptor: int | None = None

    def read(self) -> Mark | None:
        """Read the mark; None if there is none, or it can't be checked without the log's key.

        Raises ValueError if it is damaged or was not written with the log's key, OSError.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        if not data:
            return None  # left by a process that ended right after creating it
        if len(data) >= _CHECKED.size:
            magic, _, sequence_id, check = _CHECKED.unpack_from(data)
            if data == self._encode(sequence_id, check):
                return Mark(sequence_id, check)
            if magic == _MAGIC_AUTHENTICATED and len(data) == _CHECKED.size + MAC_SIZE_BYTES and self._mac is None:
                return None
            if self._mac is not None:
                raise ValueError(
                    f"{self.path} is not authentic, or damaged: it is left out, and records that were removed at the"
                    " end of the log would not be missed"
                )
        raise ValueError(f"{self.path} is damaged, or of another log: it is left out")

    def missing_data(self, view: View, mark: Mark | None) -> str | None:
        """Describe committed data that the log lacks, according to ``mark``; None: nothing is missing."""
        if mark is None:
            return None
        _, last = first_and_last_sequence_id(view)
        if mark.sequence_id > last:
            what = f"record {mark.sequence_id} is missing"
            if mark.sequence_id > last + 1:
                what = f"records {last + 1} to {mark.sequence_id} are missing"
            return f"{what}: the log in {self.path.parent} ends with record {last}, {self._way_out(mark)}"
        value = view.get("records", SEQUENCE_KEY.pack(mark.sequence_id))
        if value is None or check_of(value) == mark.check or not _is_sound(value, mark.sequence_id):
            return None  # trimmed; equal; or damaged, which is reported when it is read
        return (
            f"record {mark.sequence_id} is not the one that was committed: the log in {self.path.parent} is another"
            f" copy, {self._way_out(mark)}"
        )

    def _way_out(self, mark: Mark) -> str:
        return (
            f"and record {mark.sequence_id} with check {mark.check:016x} was committed; restore data.mdb and journal"
            f" from a copy that has it (where there is none, 'rm {self.path}' lets the log go on without: others may"
            " have been told of what is lost then)"
        )

    def put(self, sequence_id: int, value: Readable) -> None:
        """Note that a record is durable. If the mark can't be written, it stays at an earlier record."""
        with contextlib.suppress(OSError):
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            os.pwrite(self._descriptor, self._encode(sequence_id, check_of(value)), 0)

    def remove(self) -> None:
        """Remove the mark after an operator has cut the log. Raises OSError."""
        self.close()
        self.path.unlink(missing_ok=True)
        sync_folder(self.path.parent)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _encode(self, sequence_id: int, check: int) -> bytes:
        if self._mac is not None:
            checked = _CHECKED.pack(_MAGIC_AUTHENTICATED, 0, sequence_id, check)
            return checked + self._mac(checked)
        checked = _CHECKED.pack(_MARK_MAGIC, 0, sequence_id, check)
        return checked + crc64(checked, self._seed).to_bytes(_CRC_SIZE_BYTES, "little")


def _is_sound(value: Readable, sequence_id: int) -> bool:
    try:
        check_value(bytes(value), sequence_id, int.from_bytes(value[:4], "little"))
    except DamagedLogError:
        return False
    return True


def check_of(value: Readable) -> int:
    return int.from_bytes(value[-_CRC_SIZE_BYTES:], "little")
