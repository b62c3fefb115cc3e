"""View of the log of a moment. Each object is fetched when one of its rows is first read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import TypeAlias

from immortal.coordinator.archive.chain import NeededObjects
from immortal.coordinator.archive.format import ArchivedCheckpoint, Moment, PackedRow, Part
from immortal.coordinator.log.backend import TableSize, View
from immortal.coordinator.log.format import SEQUENCE_KEY
from immortal.coordinator.objects import DamagedObjectError
from immortal.protocol.varint import Readable

_IN_SEGMENTS = ("records", "record_seals")
_IN_CHECKPOINTS = ("checkpoints", "chunks", "outputs")
_Rows: TypeAlias = list[tuple[bytes, bytes]]
_RowsOf: TypeAlias = Callable[[Part], list[PackedRow]]


class ArchivedView(View):
    """Two segments and one part of a checkpoint are in memory at most, and the other tables once one is asked for."""

    def __init__(self, needs: NeededObjects, rows_of: _RowsOf, moment: Moment) -> None:
        self._segments = needs.segments
        self._states = needs.states
        self._rows_of = rows_of
        self._first, self._last = moment.first_sequence_id, moment.last_sequence_id
        self._checkpoints = _CheckpointRows(moment.checkpoints, rows_of)
        self._records = lru_cache(maxsize=2)(lambda at: _by_table(rows_of(self._segments[at].part)))

    @cached_property
    def _tables(self) -> dict[str, _Rows]:
        state: dict[str, dict[bytes, bytes]] = {}
        for part in self._states:
            for table, key, value in self._rows_of(part):
                if value is None:
                    state.setdefault(table, {}).pop(key, None)
                else:
                    state.setdefault(table, {})[key] = value
        return {table: sorted(rows.items()) for table, rows in state.items()}

    def get(self, table: str, key: bytes) -> Readable | None:
        for found, value in self.scan(table, key):
            return value if bytes(found) == key else None
        return None

    def scan(self, table: str, first: bytes = b"") -> Iterator[tuple[Readable, Readable]]:
        if table != "records":  # of a log with a key, the seal of the record before the first is in the state
            rows = self._tables.get(table, [])
            yield from rows[bisect_left(rows, (first,)) :]
        if table in _IN_SEGMENTS:
            yield from self._scan_segments(table, first)
        if table in _IN_CHECKPOINTS:
            yield from self._checkpoints.scan(table, first)

    def scan_back(self, table: str, last: bytes | None = None) -> Iterator[tuple[Readable, Readable]]:
        if table not in _IN_SEGMENTS:
            rows = [row for row in self.scan(table) if last is None or bytes(row[0]) <= last]
            yield from reversed(rows)
            return
        for at in range(len(self._segments) - 1, -1, -1):
            for key, value in reversed(self._records(at).get(table, [])):
                if self._is_kept(key) and (last is None or key <= last):
                    yield key, value

    def size(self, table: str) -> TableSize:
        if table == "records":  # as stored: more would need all of it to be fetched
            size_bytes = sum(segment.part.size_bytes for segment in self._segments)
            return TableSize(size_bytes, self._last - self._first + 1)
        rows = [len(key) + len(value) for key, value in self.scan(table)]
        return TableSize(sum(rows), len(rows))

    def _scan_segments(self, table: str, first: bytes) -> Iterator[tuple[bytes, bytes]]:
        for at, segment in enumerate(self._segments):
            if SEQUENCE_KEY.pack(segment.last_sequence_id) >= first:
                for key, value in self._records(at).get(table, []):
                    if key >= first and self._is_kept(key):
                        yield key, value

    def _is_kept(self, key: bytes) -> bool:
        return bool(self._first <= SEQUENCE_KEY.unpack(key)[0] <= self._last)


class _CheckpointRows:
    """Rows of checkpoints. The names of the rows of each part read are remembered, so that no part is read in vain."""

    def __init__(self, checkpoints: Sequence[ArchivedCheckpoint], rows_of: _RowsOf) -> None:
        self._parts = [part for checkpoint in checkpoints for part in checkpoint.parts]
        self._with_headers = {checkpoint.parts[0].name for checkpoint in checkpoints if checkpoint.parts}
        self._ids = [SEQUENCE_KEY.pack(one.checkpoint_id) for one in checkpoints for _ in one.parts]
        self._last_keys: dict[int, dict[str, bytes]] = {}
        self._rows_of = lru_cache(maxsize=1)(lambda at: self._read(at, rows_of))

    def _read(self, at: int, rows_of: _RowsOf) -> dict[str, _Rows]:
        found = _by_table(rows_of(self._parts[at]))
        self._last_keys[at] = {table: rows[-1][0] for table, rows in found.items()}
        return found

    def scan(self, table: str, first: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield rows in the order of their checkpoints, and of the chunks of each; the header comes first."""
        for at, part in enumerate(self._parts):
            if self._may_have(at, part, table, first):
                yield from (row for row in self._rows_of(at).get(table, []) if row[0] >= first)

    def _may_have(self, at: int, part: Part, table: str, first: bytes) -> bool:
        if self._ids[at] < first[: SEQUENCE_KEY.size]:
            return False
        if table == "checkpoints" and part.name not in self._with_headers:
            return False
        known = self._last_keys.get(at)
        return known is None or (table in known and known[table] >= first)


def _by_table(rows: Sequence[PackedRow]) -> dict[str, _Rows]:
    found: dict[str, _Rows] = {}
    for table, key, value in rows:
        if value is None:
            raise DamagedObjectError(f"a segment says that a row of {table!r} is gone")
        found.setdefault(table, []).append((key, value))
    return found
