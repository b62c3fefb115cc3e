"""The smallest correct backend: every append is an entry at the end of one file, synced.

A process that opens it for writing first appends an entry. A writer compares, under a lock, the end of the file with
the end that it knows. So an earlier writer can write no more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from immortal.coordinator.core.errors import FencedError, LogError, LogFormatError, LogSyncError, require
from immortal.coordinator.core.interfaces import LogSpace
from immortal.coordinator.fault_points import reach
from immortal.coordinator.log.backend import Append, Backend, Options, Place, Row, Span
from immortal.coordinator.log.backends.memory import MemoryTables
from immortal.coordinator.log.format import SEQUENCE_KEY
from immortal.coordinator.log.identity import LogIdentity, first_and_last_sequence_id, read_identity
from immortal.protocol.checksum import crc64

HEAD_SIZE_BYTES = 16  # size, CRC


class Entry(msgspec.Struct, array_like=True):
    term: int
    deletes: list[tuple[str, bytes, bytes | None]] = []
    puts: list[tuple[str, bytes, bytes]] = []


def encode(entry: Entry) -> bytes:
    data = msgspec.msgpack.encode(entry)
    return struct.pack("<QQ", len(data), crc64(data)) + data


class ToyBackend(Backend):
    def __init__(self, path: Path, instance_name: str | None, *, writes: bool) -> None:
        self.label = f"toy:{path}"
        self.repairs: list[str] = []
        self.fence = self._term = self._end = 0
        self._tables = MemoryTables()
        try:
            self._file = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            raise LogFormatError(f"there is no log in {self.label}") from None
        self._read_on()
        self.identity = read_identity(self._tables, self.label, instance_name)
        if writes:
            with self._locked():
                self._read_on()  # entries that were appended meanwhile
                self.fence = self._term + 1
                self._write(Entry(self.fence))

    @contextlib.contextmanager
    def view(self, *, copies: bool = False) -> Iterator[MemoryTables]:
        with self._tables.lock:
            self.raise_failure()
            if not self.fence:  # a writer has read all, since all new entries are its own
                self._read_on()
            yield self._tables

    def append(self, append: Append) -> None:
        self.raise_failure()
        with self._tables.lock, self._locked():
            if os.fstat(self._file).st_size != self._end or append.fence != self._term:
                self.failure = FencedError(self.label, f"{self.label} has another writer since")
                raise self.failure
            last = first_and_last_sequence_id(self._tables)[1]
            require(append.expected_last_sequence_id == last, f"the log ends with {last}")
            puts = [("records", SEQUENCE_KEY.pack(number), bytes(value)) for number, value in append.records]
            puts += [(table, key, bytes(value)) for table, key, value in append.puts]
            for point in append.points:
                reach(point)
            self._write(Entry(append.fence, list(append.deletes), puts))

    def space(self) -> LogSpace:
        state = os.fstatvfs(self._file)
        return LogSpace(self._end, state.f_bavail * state.f_frsize)

    def close(self) -> None:
        self.failure = self.failure or LogError(f"{self.label} is closed")
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, entry: Entry) -> None:
        data = encode(entry)
        try:
            os.ftruncate(self._file, self._end)  # remove an incomplete entry
            require(os.pwrite(self._file, data, self._end) == len(data), "a short write")
            os.fsync(self._file)
        except OSError as error:
            self.failure = LogSyncError(f"{self.label} cannot be written: {error}")
            raise self.failure from error
        self._take(entry, len(data))

    def _read_on(self) -> None:
        while head := os.pread(self._file, HEAD_SIZE_BYTES, self._end):
            size_bytes, check = struct.unpack("<QQ", head.ljust(HEAD_SIZE_BYTES, b"\0"))
            data = os.pread(self._file, size_bytes, self._end + HEAD_SIZE_BYTES)
            if len(data) < size_bytes or crc64(data) != check:
                return  # being written, or cut off
            self._take(msgspec.msgpack.decode(data, type=Entry), HEAD_SIZE_BYTES + size_bytes)

    def _take(self, entry: Entry, size_bytes: int) -> None:
        for deleted in entry.deletes:
            self._tables.delete(Span(*deleted))
        for row in entry.puts:
            self._tables.put(*row)
        self._term, self._end = entry.term, self._end + size_bytes

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


class ToyPlace(Place):
    """Place whose location is the path of the file."""

    scheme = "toy"

    def exists(self) -> bool:
        return Path(self.location).exists()

    def remove(self) -> None:
        Path(self.location).unlink(missing_ok=True)

    def create(self, identity: LogIdentity, rows: Sequence[Row], options: Options) -> ToyBackend:
        if self.exists():
            raise LogFormatError(f"there is a log in {self.label} already")
        partial = Path(f"{self.location}.new")
        partial.write_bytes(encode(Entry(0, [], [(table, key, bytes(value)) for table, key, value in rows])))
        partial.rename(self.location)
        return self.open(identity.instance_name, options)

    def open(self, instance_name: str, options: Options) -> ToyBackend:
        return ToyBackend(Path(self.location), instance_name, writes=True)

    def open_reader(self, instance_name: str | None) -> ToyBackend:
        return ToyBackend(Path(self.location), instance_name, writes=False)
