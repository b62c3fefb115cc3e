"""Checks LMDB's data file without mapping it: that it is one, and is complete."""

from __future__ import annotations

import errno
import importlib
import os
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

from immortal.coordinator.core.errors import LogError, LogFormatError
from immortal.coordinator.log.backends.lmdb.pages import decode_meta
from immortal.protocol.files import sync_folder

DATA_FILE_NAME = "data.mdb"
FILES_BESIDE = ("journal", "high-water-mark")  # only a complete log has them

# LMDB 0.9's meta pages: a page header of 16 bytes, then MDB_meta (64-bit): magic, version, address, map size, two
# MDB_db of 48 bytes (the first begins with the page size), last page, transaction ID.
_META_OFFSET_BYTES = 16
_META_START = struct.Struct("=IIQQI")
_META_END = struct.Struct("=QQ")
_META_END_OFFSET_BYTES = 24 + 2 * 48
_MAGIC = 0xBEEFC0DE
_META_SIZE_BYTES = _META_OFFSET_BYTES + _META_END_OFFSET_BYTES + _META_END.size
_DATA_VERSION = 1
_READ_SIZE_BYTES = 1 << 20
_READ_SIZE_BYTES_MIN = 4096  # granularity of the reported place


def log_exists(folder: str | os.PathLike[str]) -> bool:
    """True if ``folder`` holds an LMDB file. Opening it tells whether it is one of our logs."""
    path = Path(folder) / DATA_FILE_NAME
    try:
        return path.exists() and not _is_unfinished(path)
    except OSError:  # opening it reports the error
        return True


def _is_unfinished(path: Path) -> bool:
    """True for a file left by an interrupted first backup, which is made in place, in two transactions.

    Page 0 is then as LMDB initializes it, and page 1 is missing, or has at most the first transaction. No complete log
    has such a page 0, and an unfinished one has no other files.
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


def extend_data_file(path: Path) -> None:
    """Give the file every page that LMDB counts, as a hole: LMDB may count free pages that it never wrote."""
    needed_bytes = _needed_size_bytes(path)
    if path.stat().st_size < needed_bytes:
        with path.open("r+b") as file:
            if os.fstat(file.fileno()).st_size < needed_bytes:
                os.ftruncate(file.fileno(), needed_bytes)


def _needed_size_bytes(path: Path) -> int:
    """Return the size that the newest meta page asks for. Raises LogFormatError for anything but an LMDB 0.9 file."""
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
    """True if only free pages are missing at the file's end; False also where the installed py-lmdb cannot tell."""
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
    """Make a walk of the module ``verify`` over a file's pages.

    Its rule for overflow pages is stricter than LMDB: a large value that was replaced by a smaller one in the same
    transaction keeps its pages, and so does a list of free pages that became shorter (mdb_cursor_put reuses pages that
    are dirty). These pages count as pages of the value.
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
    """Find problems of the file's pages by a walk in plain Python, which damage cannot crash.

    None where the installed py-lmdb has no such walk. Only for a log that no process writes.
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
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
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
    finally:
        os.close(descriptor)


# Syncing folders: which files exist, and under which names.


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
            return  # a folder that we can't read has nothing of ours in it
