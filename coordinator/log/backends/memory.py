"""Backend for a log in memory, which tracks what is durable: for tests and the simulation.

``memory:NAME`` is a log in this process. Every append is durable when it returns; the log ends with the process.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from typing import ClassVar

from msgspec import Struct, field

from immortal.coordinator.core.errors import FencedError, LogError, LogFormatError, fail
from immortal.coordinator.core.interfaces import LogSpace
from immortal.coordinator.fault_points import reach
from immortal.coordinator.log.backend import Append, Backend, Options, Place, Row, Span, TableSize, View
from immortal.coordinator.log.format import SEQUENCE_KEY
from immortal.coordinator.log.identity import LogIdentity, first_and_last_sequence_id, read_identity
from immortal.protocol.varint import Readable


class Table(Struct):
    """Rows by key, and the sorted keys."""

    rows: dict[bytes, bytes] = field(default_factory=dict)
    keys: list[bytes] = field(default_factory=list)

    def put(self, key: bytes, value: bytes) -> None:
        if not self.keys or key > self.keys[-1]:  # the usual case: records ascend
            self.keys.append(key)
        elif key not in self.rows:
            insort(self.keys, key)
        self.rows[key] = value

    def delete(self, span: Span) -> None:
        first = bisect_left(self.keys, span.first)
        end = len(self.keys) if span.end is None else bisect_left(self.keys, span.end)
        for key in self.keys[first:end]:
            del self.rows[key]
        del self.keys[first:end]

    def copy(self) -> Table:
        return Table(self.rows.copy(), self.keys.copy())


class MemoryTables(View):
    """Durable tables of a log in memory, and a View of them. ``term``: term of the latest writer."""

    def __init__(self) -> None:
        self.tables: dict[str, Table] = {}
        self.term = 0
        self.lock = threading.RLock()

    def get(self, table: str, key: bytes) -> Readable | None:
        found = self.tables.get(table)
        return None if found is None else found.rows.get(bytes(key))

    def scan(self, table: str, first: bytes = b"") -> Iterator[tuple[Readable, Readable]]:
        found = self.tables.get(table, _EMPTY)
        for at in range(bisect_left(found.keys, first), len(found.keys)):
            yield found.keys[at], found.rows[found.keys[at]]

    def scan_back(self, table: str, last: bytes | None = None) -> Iterator[tuple[Readable, Readable]]:
        found = self.tables.get(table, _EMPTY)
        index = len(found.keys) if last is None else bisect_right(found.keys, last)
        for at in range(index - 1, -1, -1):
            yield found.keys[at], found.rows[found.keys[at]]

    def size(self, table: str) -> TableSize:
        rows = self.tables.get(table, _EMPTY).rows
        return TableSize(sum(map(len, rows.values())), len(rows))

    def put(self, table: str, key: bytes, value: Readable) -> None:
        if (found := self.tables.get(table)) is None:
            found = self.tables[table] = Table()
        found.put(bytes(key), bytes(value))

    def delete(self, span: Span) -> None:
        if (found := self.tables.get(span.table)) is not None:
            found.delete(span)

    def last_sequence_id(self) -> int:
        """Return the sequence ID of the last record, trimmed or not; -1 for a new log. Raises DamagedLogError."""
        records = self.tables.get("records", _EMPTY)
        if records.keys:
            last: int = SEQUENCE_KEY.unpack(records.keys[-1])[0]
            return last
        return first_and_last_sequence_id(self)[1]

    def copy(self) -> MemoryTables:
        copied = MemoryTables()
        copied.tables = {name: table.copy() for name, table in self.tables.items()}
        return copied


_EMPTY = Table()


class MemoryBackend(Backend):
    """Backend that keeps a log in memory.

    ``free_bytes``: free bytes of its simulated disk. ``fails_next``: error of the next append, and of all later ones.
    """

    def __init__(self, durable: MemoryTables, label: str, instance_name: str | None, *, writes: bool = True) -> None:
        self.label = label
        self.durable = durable
        self.repairs: list[str] = []
        self.free_bytes = 1 << 40
        self.fails_next: LogError | None = None
        self.identity = read_identity(durable, label, instance_name)
        durable.term += writes
        self.fence = durable.term

    @contextlib.contextmanager
    def view(self, *, copies: bool = False) -> Iterator[MemoryTables]:
        with self.durable.lock:
            self.raise_failure()
            yield self.durable

    def append(self, append: Append) -> None:
        with self.durable.lock:
            self.raise_failure()
            durable = self.durable
            if append.fence != durable.term:
                self.failure = FencedError(str(durable.term), f"{self.label} is written by another one since")
                raise self.failure
            if append.expected_last_sequence_id != (last := durable.last_sequence_id()):
                fail(f"an append follows record {append.expected_last_sequence_id}, the log ends with {last}")
            for point in append.points:
                reach(point)
            if self.fails_next is not None:
                self.failure, self.fails_next = self.fails_next, None
                raise self.failure
            for span in append.deletes:
                durable.delete(span)
            for sequence_id, value in append.records:
                durable.put("records", SEQUENCE_KEY.pack(sequence_id), value)
            for table, key, value in append.puts:
                durable.put(table, key, value)

    def space(self) -> LogSpace:
        with self.view() as view:
            return LogSpace(sum(view.size(table).size_bytes for table in view.tables), self.free_bytes)

    def close(self) -> None:
        self.failure = self.failure or LogError("this log is closed")


class MemoryPlace(Place):
    """Place of a log in memory. Its location is a name in this process."""

    scheme = "memory"
    _logs: ClassVar[dict[str, MemoryTables]] = {}

    def exists(self) -> bool:
        return self.location in self._logs

    def create(self, identity: LogIdentity, rows: Sequence[Row], options: Options) -> MemoryBackend:
        if self.exists():
            raise LogFormatError(f"there is a log {self.label} already: open it, or choose another name")
        durable = self._logs[self.location] = MemoryTables()
        for row in rows:
            durable.put(*row)
        return self.open(identity.instance_name, options)

    def open(self, instance_name: str, options: Options) -> MemoryBackend:
        return self._open_backend(instance_name, writes=True)

    def open_reader(self, instance_name: str | None) -> MemoryBackend:
        return self._open_backend(instance_name, writes=False)

    def remove(self) -> None:
        self._logs.pop(self.location, None)

    def _open_backend(self, instance_name: str | None, *, writes: bool) -> MemoryBackend:
        if not self.exists():
            raise LogFormatError(f"there is no log {self.label} in this process")
        return MemoryBackend(self._logs[self.location], self.label, instance_name, writes=writes)
