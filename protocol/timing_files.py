"""Where notes of times are (:mod:`immortal.protocol.timings`), and how a process writes its own.

A coordinator and its app have segments of their own in one folder. Of each the newest are kept, and never synced: what
a crash loses is missed by nobody.
"""

from __future__ import annotations

import os
import re
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from immortal.protocol.private_files import FILE_MODE, make_folder
from immortal.protocol.timings import HEADER_SIZE_BYTES, ROW_SIZE_BYTES, PlainRow, encode_row, encode_segment_header

FOLDER_NAME = "timings"
COORDINATOR, APP = "coordinator", "app"
"""Whose segments."""
SEGMENTS_MAX = 8  # of each, that the limit has room for
FILES_MAX = 64  # of each: a process that is started again and again makes small ones
FLUSH_S = 0.2
WAITING_MAX = 200_000  # what a disk does not take meanwhile: more is forgotten, the oldest first

_NAME = re.compile(r"(coordinator|app)-(\d{8})\.times")

T = TypeVar("T")


def segments(folder: Path, whose: str) -> list[Path]:
    """The oldest first; none where there is no such folder, or it can't be read."""
    try:
        names = [name for name in os.listdir(folder) if (found := _NAME.fullmatch(name)) and found[1] == whose]
    except OSError:
        return []
    return [folder / name for name in sorted(names)]


class SegmentWriter:
    """Segments of one process in ``folder``, of SEGMENTS_MAX-th of ``limit_bytes`` each. For one thread.

    ``say``: is told, once, where they can't be written; nothing is noted from then on.
    """

    def __init__(self, folder: Path, whose: str, limit_bytes: int, say: Callable[[str], None]) -> None:
        self._folder, self._whose, self._limit_bytes, self._say = folder, whose, limit_bytes, say
        self._segment_bytes = max(limit_bytes // SEGMENTS_MAX, HEADER_SIZE_BYTES + ROW_SIZE_BYTES)
        self._descriptor: int | None = None
        self._committer_id = 0
        self._last_sequence_id = -1
        self._size_bytes = self._header_crc = 0
        self._failed = False

    def write(self, committer_id: int, rows: Iterable[PlainRow]) -> None:
        """Rows of the log of ``committer_id``, in the order of its records."""
        encoded: list[bytes] = []
        room = self._room if committer_id == self._committer_id else 0  # for so many rows
        last, header_crc = self._last_sequence_id, self._header_crc
        try:
            for row in () if self._failed else rows:
                if row[0] < last or len(encoded) >= room:
                    self._append(encoded)
                    self._begin(committer_id)
                    encoded.clear()
                    room, header_crc = self._room, self._header_crc
                last = row[0]
                encoded.append(encode_row(row, header_crc))
            self._last_sequence_id = last
            self._append(encoded)
        except (OSError, struct.error) as error:
            self._failed = True
            self._say(f"no times are noted any more in {self._folder}: {error}")

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def _room(self) -> int:
        return (self._segment_bytes - self._size_bytes) // ROW_SIZE_BYTES

    def _append(self, encoded: list[bytes]) -> None:
        data = memoryview(b"".join(encoded))
        self._size_bytes += len(data)
        while data and self._descriptor is not None:
            data = data[os.write(self._descriptor, data) :]

    def _begin(self, committer_id: int) -> None:
        self.close()
        make_folder(self._folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        while self._descriptor is None:
            there = segments(self._folder, self._whose)
            number = int(there[-1].stem.rpartition("-")[2]) + 1 if there else 1
            try:
                self._descriptor = os.open(self._folder / f"{self._whose}-{number:08}.times", flags, FILE_MODE)
            except FileExistsError:  # another process of the instance was there first
                continue
        self._forget_old(there)
        header = encode_segment_header(committer_id)
        self._header_crc = zlib.crc32(header)
        self._committer_id, self._size_bytes = committer_id, 0
        self._append([header])

    def _forget_old(self, there: list[Path]) -> None:
        """Of ``there``, what a new segment leaves no room for."""
        sizes_bytes = {path: path.lstat().st_size for path in there}
        while there and (
            len(there) >= FILES_MAX
            or sum(sizes_bytes[path] for path in there) + self._segment_bytes > self._limit_bytes
        ):
            there.pop(0).unlink(missing_ok=True)


class Noting(Generic[T]):
    """A thread that has ``take`` handle what is put here, now and then: whoever puts it never waits for a disk."""

    def __init__(self, take: Callable[[list[T]], None]) -> None:
        self._take = take
        self._waiting: deque[T] = deque(maxlen=WAITING_MAX)
        self.put = self._waiting.append
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="timings", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """What was put is handled first."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(FLUSH_S):
            self._handle()
        self._handle()

    def _handle(self) -> None:
        waiting = self._waiting
        some = [waiting.popleft() for _ in range(len(waiting))]
        if some:
            self._take(some)
