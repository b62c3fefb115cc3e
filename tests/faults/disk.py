"""A disk that fails on demand: the library of disk_shim.c in front of libc; and what a loss of power leaves."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from tests.faults.shims import library

SECTOR_SIZE_BYTES = 512  # what a disk writes whole or not at all

_ENTRY = struct.Struct("=IIQQQQQQ")
_UNDO, _DONE, _SYNC_DONE = 1, 2, 4
Unsynced = dict[int, list["Write"]]  # by inode, oldest first


class Disk:
    """Processes that are started with :attr:`environment` meet it at files whose path contains ``match``."""

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
        """What the power may take is noted by each process for itself: :func:`lose_power`."""
        self.journal.mkdir()
        self.environment["DISK_SHIM_JOURNAL"] = str(self.journal)

    def fail(self, call: str, errno: int, *, once: bool = False) -> None:
        """``call``: write, sync, read or any, or one kind of sync (disk_shim.c). From now on, until :meth:`work`."""
        self._say(f"{call} error {errno}{' once' * once}")

    def fail_late(self, call: str, errno: int, *, once: bool = False) -> None:
        """As :meth:`fail`, and what was to be written is there to be read."""
        self._say(f"{call} late {errno}{' once' * once}")

    def kill_at(self, call: str, count: int, *, once: bool = False) -> None:
        """The process is gone right before its ``count``-th such call."""
        self._say(f"{call} kill {count}{' once' * once}")

    def cannot_read_from(self, offset_bytes: int) -> None:
        """Reads of bytes from there on fail with EIO."""
        self._say(f"read from {offset_bytes}")

    def delay(self, call: str, delay_ms: int) -> None:
        self._say(f"{call} delay {delay_ms}")

    def work(self) -> bool:
        """All goes well again; False where what was to happen once has happened."""
        try:
            self._control.unlink()
        except FileNotFoundError:
            return False
        return True

    @property
    def waits(self) -> bool:
        """Whether what was to happen once has not happened yet."""
        return self._control.exists()

    def _say(self, text: str) -> None:
        temporary = self._control.with_suffix(".new")
        temporary.write_text(text + "\n")
        temporary.replace(self._control)


# --- loss of power ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Write:
    """What a write replaced, and where."""

    number: int
    path: str
    offset_bytes: int
    size_bytes: int
    old: bytes
    file_size_bytes: int  # before it
    inode: int


@dataclass(slots=True)
class Moment:
    """One step of a journal: the writes that no sync had reached by then, oldest first."""

    writes_done: int
    pending: list[Write] = field(default_factory=list)


def _entries(path: Path) -> Iterator[tuple[int, Write]]:
    """Kind and contents of each entry of a journal; there is none before the first write or sync."""
    data = path.read_bytes() if path.exists() else b""
    position = 0
    while position + _ENTRY.size <= len(data):
        kind, path_size, number, offset, size, old_size, file_size, inode = _ENTRY.unpack_from(data, position)
        position += _ENTRY.size
        if position + old_size + path_size > len(data):
            return  # its process was killed while it noted that; it has not written yet
        old = data[position : position + old_size]
        name = data[position + old_size : position + old_size + path_size].decode()
        position += old_size + path_size
        yield kind, Write(number, name, offset, size, old, file_size, inode)


def read_journal(path: Path) -> tuple[list[Write], list[Moment]]:
    """All writes of one process, and the moments right after each write and each sync."""
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
    """Of files and folders, in the order in which their syncs ended."""
    return [entry.path for kind, entry in _entries(path) if kind == _SYNC_DONE]


def unsynced(journals: Path) -> Unsynced:
    """The writes that no sync has reached in the end, from a folder with the journals of processes."""
    pending: Unsynced = {}
    for kind, entry in chain.from_iterable(_entries(path) for path in sorted(journals.iterdir())):
        writes = pending.setdefault(entry.inode, [])
        if kind == _UNDO:
            if entry.file_size_bytes == 0:
                writes.clear()  # a new file, perhaps with the number of one that is gone
            writes.append(entry)
        elif kind == _DONE:
            pending[entry.inode] = [one for one in writes if one.number != entry.number]
        elif kind == _SYNC_DONE:
            pending[entry.inode] = [one for one in writes if one.number > entry.number]
    return pending


def lose_power(folder: Path, journals: Path, rng: random.Random) -> list[str]:
    """Put each file of ``folder`` back to what was synced, with some of the rest, as a disk may; those that changed.

    Nobody may have one of them open. Their names stay as they are now. New journals begin with this.
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
    """``data`` as it was before ``writes``, which are its last ones."""
    for write in reversed(writes):
        data[write.offset_bytes : write.offset_bytes + len(write.old)] = write.old
        del data[max(write.file_size_bytes, 0) :]
    return data


def without_power(data: bytearray, pending: list[Write], rng: random.Random) -> bytearray:
    """What may be left of ``data`` when the power fails: of each pending write all, nothing, or some of its sectors."""
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
    if rng.random() < 0.5:  # the file's length is written apart from its bytes: it may lag behind them, or not
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
