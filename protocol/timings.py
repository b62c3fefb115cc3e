"""Notes of times beside the log: their files, their format, and a process's writer.

A coordinator and its app have their own segments in one folder. Only the newest are kept. They are never synced: a
crash may lose notes.
"""

from __future__ import annotations

import os
import re
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from enum import IntEnum
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from immortal.protocol.files import FILE_MODE, make_folder
from immortal.protocol.record import COMMITTER_ID_MAX

FOLDER_NAME = "timings"
COORDINATOR, APP = "coordinator", "app"
"""Owners of segments."""

SEGMENTS_MAX = 8  # of each process, within the limit of bytes
FILES_MAX = 64  # of each process: a process that often restarts writes small segments
FLUSH_S = 0.2
WAITING_MAX = 200_000  # rows that wait for the disk: beyond this number the oldest are dropped

_NAME = re.compile(r"(coordinator|app)-(\d{8})\.times")

T = TypeVar("T")


def segments(folder: Path, process: str) -> list[Path]:
    """Return the segments' paths, oldest first; an empty list if the folder is missing or unreadable."""
    try:
        names = [name for name in os.listdir(folder) if (found := _NAME.fullmatch(name)) and found[1] == process]
    except OSError:
        return []
    return [folder / name for name in sorted(names)]


class SegmentWriter:
    """Writer of one process's segments in ``folder``, each of ``limit_bytes`` / SEGMENTS_MAX. For one thread.

    ``warn``: called once with the reason if writing fails; the writer then drops all rows.
    """

    def __init__(self, folder: Path, process: str, limit_bytes: int, warn: Callable[[str], None]) -> None:
        self._folder, self._process, self._limit_bytes, self._warn = folder, process, limit_bytes, warn
        self._segment_bytes = max(limit_bytes // SEGMENTS_MAX, HEADER_SIZE_BYTES + ROW_SIZE_BYTES)
        self._descriptor: int | None = None
        self._committer_id = 0
        self._last_sequence_id = -1
        self._size_bytes = self._header_crc = 0
        self._failed = False

    def write(self, committer_id: int, rows: Iterable[PlainRow]) -> None:
        """Write rows of the log of ``committer_id``, in the order of their records."""
        encoded: list[bytes] = []
        room = self._room if committer_id == self._committer_id else 0  # rows that still fit
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
            self._warn(f"no times are noted any more in {self._folder}: {error}")

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
            existing = segments(self._folder, self._process)
            number = int(existing[-1].stem.rpartition("-")[2]) + 1 if existing else 1
            try:
                self._descriptor = os.open(self._folder / f"{self._process}-{number:08}.times", flags, FILE_MODE)
            except FileExistsError:  # another process of the instance created it first
                continue
        self._forget_old(existing)
        header = encode_segment_header(committer_id)
        self._header_crc = zlib.crc32(header)
        self._committer_id, self._size_bytes = committer_id, 0
        self._append([header])

    def _forget_old(self, existing: list[Path]) -> None:
        sizes_bytes = {path: path.lstat().st_size for path in existing}
        while existing and (
            len(existing) >= FILES_MAX
            or sum(sizes_bytes[path] for path in existing) + self._segment_bytes > self._limit_bytes
        ):
            existing.pop(0).unlink(missing_ok=True)


class BackgroundWriter(Generic[T]):
    """Thread that passes items to ``handle`` every FLUSH_S, so that ``put`` never waits for a disk."""

    def __init__(self, handle: Callable[[list[T]], None]) -> None:
        self._handle = handle
        self._waiting: deque[T] = deque(maxlen=WAITING_MAX)
        self.put = self._waiting.append
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="timings", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Handle the remaining items, then end the thread."""
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed.wait(FLUSH_S):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        waiting = self._waiting
        items = [waiting.popleft() for _ in range(len(waiting))]
        if items:
            self._handle(items)


# Format of timing notes: files beside a log with times of events, for tools. No replay depends on them.
#
# A segment belongs to one process and one log: a header, then rows of one size, in the order of records. Times are ns
# of the machine's monotonic clock, which all its processes share; a record's own time, in its log, gives the time of
# day.
#
#     header  magic (8) · committer ID (4) · nothing (4)
#     row     record (8) · message (4) · kind (1) · nothing (3) · three times (8 each) · CRC-32 of header and row (4)


MAGIC = b"IMTIMES1"
_HEADER = struct.Struct("<8sii")
HEADER_SIZE_BYTES = _HEADER.size
_ROW = struct.Struct("<qiBxxxqqq")
_CRC = struct.Struct("<I")
ROW_SIZE_BYTES = _ROW.size + _CRC.size


class TimingKind(IntEnum):
    """Meaning of the three times of a row. A time of 0 is unknown."""

    COMMIT = 1  # for a record: submitted to the log, durable, given to the app
    ARRIVED = 2  # for a batch, ``message`` is its first: time of arrival
    HANDLED = 3  # for a message: its handler began, and returned or waits


class TimingRow(NamedTuple):
    """Row of a segment. ``message``: its index in the record. Times are ns, monotonic."""

    sequence_id: int
    message: int
    kind: int
    first_ns: int
    second_ns: int = 0
    third_ns: int = 0


def encode_segment_header(committer_id: int) -> bytes:
    return _HEADER.pack(MAGIC, committer_id, 0)


def decode_segment_header(data: bytes) -> int | None:
    """Return the committer ID of the log; None if ``data`` is no segment's header."""
    if len(data) < HEADER_SIZE_BYTES:
        return None
    magic, committer_id, nothing = _HEADER.unpack_from(data)
    return committer_id if magic == MAGIC and not nothing and 1 <= committer_id <= COMMITTER_ID_MAX else None


PlainRow = tuple[int, int, int, int, int, int]
"""Fields of a :class:`TimingRow` as a plain tuple, which takes a third of the time to create."""


def encode_row(row: PlainRow, header_crc: int) -> bytes:
    """Encode a row. ``header_crc``: the CRC-32 of the segment's header."""
    body = _ROW.pack(*row)
    return body + _CRC.pack(zlib.crc32(body, header_crc))


def decode_row(data: bytes, header_crc: int) -> TimingRow | None:
    """Decode a row; None if it is damaged."""
    body = data[: _ROW.size]
    if len(data) != ROW_SIZE_BYTES or _CRC.unpack_from(data, _ROW.size)[0] != zlib.crc32(body, header_crc):
        return None
    return TimingRow(*_ROW.unpack(body))
