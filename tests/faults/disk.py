"""Disk that fails on demand, by the library of disk_shim.c, preloaded before libc; and losses of power."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from tests.faults.shims import library

SECTOR_SIZE_BYTES = 512  # a disk writes a sector whole or not at all

_ENTRY = struct.Struct("=IIQQQQQQ")
_UNDO, _DONE, _SYNC_DONE = 1, 2, 4
Unsynced = dict[int, list["Write"]]  # by inode, oldest first


class Disk:
    """Disk of processes that are started with :attr:`environment`, for files whose path contains ``match``."""

    def __init__(self, folder: Path, match: Path | str, *, journal: bool = False) -> None:
        self._control = folder / "disk-control"
        self.journal = folder / "disk-journal"
        self.environment = {
            "LD_PRELOAD": library("disk_shim"),
            "DISK_SHIM_MATCH": str(match),
            "DISK_SHIM_CONTROL": str(self._control),
        }
        if journal:
            self.environment["DISK_SHIM_JOURNAL"] = str(self.journal)

    def keep_journals(self) -> None:
        """Let each process keep a journal of writes that a loss of power can take: :func:`lose_power`."""
        self.journal.mkdir()
        self.environment["DISK_SHIM_JOURNAL"] = str(self.journal)

    def fail(self, call: str, errno: int, *, once: bool = False) -> None:
        """Let calls fail until :meth:`work`. ``call``: write, sync, read or any, or one kind of sync (disk_shim.c)."""
        self._say(f"{call} error {errno}{' once' * once}")

    def fail_late(self, call: str, errno: int, *, once: bool = False) -> None:
        """Let calls fail as :meth:`fail`, but after their bytes are there to be read."""
        self._say(f"{call} late {errno}{' once' * once}")

    def kill_at(self, call: str, count: int, *, once: bool = False) -> None:
        """Kill the process right before its ``count``-th such call."""
        self._say(f"{call} kill {count}{' once' * once}")

    def cannot_read_from(self, offset_bytes: int) -> None:
        """Let reads of bytes from ``offset_bytes`` on fail with EIO."""
        self._say(f"read from {offset_bytes}")

    def delay(self, call: str, delay_ms: int) -> None:
        self._say(f"{call} delay {delay_ms}")

    def work(self) -> bool:
        """End the failures; return False if a one-time failure has already occurred."""
        try:
            self._control.unlink()
        except FileNotFoundError:
            return False
        return True

    @property
    def waits(self) -> bool:
        """Return True if a one-time failure has not occurred yet."""
        return self._control.exists()

    def _say(self, text: str) -> None:
        temporary = self._control.with_suffix(".new")
        temporary.write_text(text + "\n")
        temporary.replace(self._control)


# --- loss of power ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Write:
    """Write of a journal: its place, and the bytes that it replaced."""

    number: int
    path: str
    offset_bytes: int
    size_bytes: int
    old: bytes
    file_size_bytes: int  # before the write
    inode: int


@dataclass(slots=True)
class Moment:
    """Step of a journal: the writes that no sync had reached by then, oldest first."""

    writes_done: int
    pending: list[Write] = field(default_factory=list)


def _entries(path: Path) -> Iterator[tuple[int, Write]]:
    """Yield kind and contents of each entry of a journal; none before the first write or sync."""
    data = path.read_bytes() if path.exists() else b""
    position = 0
    while position + _ENTRY.size <= len(data):
        kind, path_size, number, offset, size, old_size, file_size, inode = _ENTRY.unpack_from(data, position)
        position += _ENTRY.size
        if position + old_size + path_size > len(data):
            return  # the process was killed while it noted the write, which was not done yet
        old = data[position : position + old_size]
        name = data[position + old_size : position + old_size + path_size].decode()
        position += old_size + path_size
        yield kind, Write(number, name, offset, size, old, file_size, inode)


def read_journal(path: Path) -> tuple[list[Write], list[Moment]]:
    """Return all writes of one process, and the moments right after each write and each sync."""
    writes: list[Write] = []
    moments = [Moment(0)]
    pending: list[Write] = []
    for kind, entry in _entries(path):
        if kind == _UNDO:
            writes.append(entry)
            pending.append(entry)
        elif kind == _DONE:
            pending = [one for one in pending if one.number != entry.number]
        elif kind == _SYNC_DONE:
            pending = [one for one in pending if one.path != entry.path or one.number > entry.number]
        moments.append(Moment(len(writes), list(pending)))
    return writes, moments


def synced_paths(path: Path) -> list[str]:
    """Return the paths of synced files and folders, in the order in which their syncs ended."""
    return [entry.path for kind, entry in _entries(path) if kind == _SYNC_DONE]


def unsynced(journals: Path) -> Unsynced:
    """Return the writes that no sync has reached at the end, from a folder with journals of processes."""
    pending: Unsynced = {}
    for kind, entry in chain.from_iterable(_entries(path) for path in sorted(journals.iterdir())):
        writes = pending.setdefault(entry.inode, [])
        if kind == _UNDO:
            if entry.file_size_bytes == 0:
                writes.clear()  # a new file, perhaps with the inode of a removed one
            writes.append(entry)
        elif kind == _DONE:
            pending[entry.inode] = [one for one in writes if one.number != entry.number]
        elif kind == _SYNC_DONE:
            pending[entry.inode] = [one for one in writes if one.number > entry.number]
    return pending


def lose_power(folder: Path, journals: Path, rng: random.Random) -> list[str]:
    """Set each file of ``folder`` back to its synced bytes and some of the rest, as a disk can; return changed ones.

    No process can have one of them open. Their names stay unchanged. Journals begin anew.
    """
    pending = unsynced(journals)
    changed = []
    for file in sorted(folder.iterdir() if folder.exists() else ()):
        writes = pending.get(file.stat().st_ino, []) if file.is_file() else []
        before = file.read_bytes() if writes else b""
        after = without_power(bytearray(before), writes, rng) if writes else before
        if after != before:
            changed.append(file.name)
            with file.open("r+b") as same:  # its inode stays
                same.truncate(len(after))
                same.write(after)
    for path in journals.iterdir():
        path.unlink()
    return changed


def undone(data: bytearray, writes: list[Write]) -> bytearray:
    """Return ``data`` as it was before ``writes``, which are its last ones."""
    for write in reversed(writes):
        data[write.offset_bytes : write.offset_bytes + len(write.old)] = write.old
        del data[max(write.file_size_bytes, 0) :]
    return data


def without_power(data: bytearray, pending: list[Write], rng: random.Random) -> bytearray:
    """Return what a loss of power can leave of ``data``: of each pending write all, nothing, or some of its sectors."""
    size_bytes = len(data)
    lost_share = rng.choice((0.1, 0.5, 0.9, 1.0))
    by_sector = rng.random() < 0.5
    kept_end = min((write.file_size_bytes for write in pending), default=size_bytes)
    for write in reversed(pending):
        for start, end in _pieces(write, by_sector):
            if rng.random() >= lost_share:
                kept_end = max(kept_end, end)
                continue
            for_old = write.old[start - write.offset_bytes : end - write.offset_bytes]
            data[start:end] = for_old + bytes(end - start - len(for_old))
    if rng.random() < 0.5:  # a file's length is written separately from its bytes: it can be older, or not
        del data[kept_end:]
    return data


def _pieces(write: Write, by_sector: bool) -> Iterator[tuple[int, int]]:
    start, end = write.offset_bytes, write.offset_bytes + write.size_bytes
    while start < end:
        stop = min(end, (start // SECTOR_SIZE_BYTES + 1) * SECTOR_SIZE_BYTES) if by_sector else end
        yield start, stop
        start = stop


def shimmed(disk: Disk) -> dict[str, str]:
    return {**os.environ, **disk.environment}
