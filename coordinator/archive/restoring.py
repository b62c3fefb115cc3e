"""A moment of an archive as a log again: all objects first, each checked, then the log in one step, then all of it
verified as any log is."""

from __future__ import annotations

import contextlib
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from coordinator.archive.archive import Archive
from coordinator.archive.chain import Needs, needs_of
from coordinator.archive.errors import ArchiveError
from coordinator.archive.manifests import Moment, Part
from coordinator.archive.packs import PackedRow
from coordinator.core.errors import LogError
from coordinator.log.authentication import LogKey, Macs, find_key, read_marker
from coordinator.log.backend import Place, TableSize, View
from coordinator.log.findings import Severity
from coordinator.log.format import SEQUENCE_KEY
from coordinator.log.meta import LogIdentity, read_identity
from coordinator.log.verify import verify_log
from coordinator.objects.errors import DamagedObjectError
from protocol.varint import Readable

_IN_SEGMENTS = ("records", "record_seals")
_Rows: TypeAlias = list[tuple[bytes, bytes]]
_RowsOf: TypeAlias = Callable[[Part], list[PackedRow]]


@dataclass(frozen=True, slots=True)
class Restored:
    first_sequence_id: int
    last_sequence_id: int
    checkpoints_count: int
    objects_count: int
    authenticated: bool


def restore(archive: Archive, moments: Sequence[Moment], index: int, place: Place, keys: Sequence[LogKey]) -> Restored:
    """Make the log of ``moments[index]`` in ``place``, where none is. ``keys``: those it may be authenticated with.

    What fails leaves no log. Raises ArchiveError, which names what is damaged; StoreError, LogError, OSError.
    """
    moment = moments[index]
    needs = needs_of(moments, index)
    encrypted = {part.name: one.encrypted for one in moments[: index + 1] for part in _parts_of(one)}
    with tempfile.TemporaryDirectory(prefix="immortal-restore-", dir=_beside(place)) as folder:
        spool = Path(folder)
        parts = needs.parts
        for number, data in enumerate(archive.stored(parts)):
            (spool / str(number)).write_bytes(data)
        files = {part.name: spool / str(number) for number, part in enumerate(parts)}

        def rows_of(part: Part) -> list[PackedRow]:
            return archive.rows_of(part, files[part.name].read_bytes(), encrypted=encrypted[part.name])

        view = _ArchivedView(needs, rows_of, moment)
        identity = read_identity(view, archive.objects.where, moment.instance)
        marker = read_marker(view)
        mac = None
        if marker is not None:
            mac = Macs(find_key(keys, marker, moment.instance), identity, marker).mark
        if place.exists():
            raise ArchiveError(f"there is a log in {place.where} already: nothing was written")
        place.copy(view, identity, mac)
    try:
        _check(place, moment, identity, keys)
    except LogError:
        with contextlib.suppress(LogError, OSError):
            place.remove()
        raise
    return Restored(
        moment.first_sequence_id, moment.last_sequence_id, len(moment.checkpoints), len(parts), marker is not None
    )


def _parts_of(moment: Moment) -> list[Part]:
    return [*moment.new_parts, *moment.checkpoint_parts]


def _beside(place: Place) -> Path | None:
    """Where there is room for a log: beside the one that is made, if that is in a folder."""
    if place.scheme != "lmdb":
        return None
    folder = Path(place.location).parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _check(place: Place, moment: Moment, identity: LogIdentity, keys: Sequence[LogKey]) -> None:
    """Raises LogError."""
    verification = verify_log(place, moment.instance, keys=keys)
    wrong = [str(finding.message) for finding in verification.findings() if finding.severity is not Severity.NOTE]
    if wrong:
        raise LogError(f"what came back of {moment.instance!r} is damaged, and was removed again: {wrong[0]}")
    found = verification.first_sequence_id, verification.last_sequence_id
    if found != (moment.first_sequence_id, moment.last_sequence_id):
        raise LogError(f"what came back of {moment.instance!r} has records {found[0]} to {found[1]}, and was removed")


class _ArchivedView(View):
    """The log of a moment. Records are read from their segments as they are asked for, all else is in memory."""

    def __init__(self, needs: Needs, rows_of: _RowsOf, moment: Moment) -> None:
        self._segments = needs.segments
        self._first, self._last = moment.first_sequence_id, moment.last_sequence_id
        state: dict[str, dict[bytes, bytes]] = {}
        for part in needs.states:
            for table, key, value in rows_of(part):
                if value is None:
                    state.setdefault(table, {}).pop(key, None)
                else:
                    state.setdefault(table, {})[key] = value
        self._tables = {table: sorted(rows.items()) for table, rows in state.items()}
        self._checkpoints = _CheckpointRows(needs.checkpoint_parts, rows_of)
        self._records = lru_cache(maxsize=2)(lambda at: _by_table(rows_of(self._segments[at].part)))

    def get(self, table: str, key: bytes) -> Readable | None:
        for found, value in self.scan(table, key):
            return value if bytes(found) == key else None
        return None

    def scan(self, table: str, first: bytes = b"") -> Iterator[tuple[Readable, Readable]]:
        rows = self._tables.get(table, [])
        yield from rows[bisect_left(rows, (first,)) :]
        if table in _IN_SEGMENTS:
            yield from self._scan_segments(table, first)
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
    """Each part is read once for each table that it has rows of."""

    _TABLES = ("checkpoints", "chunks", "outputs")

    def __init__(self, parts: Sequence[Part], rows_of: _RowsOf) -> None:
        self._parts = parts
        self._rows_of = lru_cache(maxsize=1)(lambda at: _by_table(rows_of(parts[at])))

    def scan(self, table: str, first: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The parts are in the order of their checkpoints, and of the chunks of each."""
        if table in self._TABLES:
            for at in range(len(self._parts)):
                yield from (row for row in self._rows_of(at).get(table, []) if row[0] >= first)


def _by_table(rows: Sequence[PackedRow]) -> dict[str, _Rows]:
    found: dict[str, _Rows] = {}
    for table, key, value in rows:
        if value is None:
            raise DamagedObjectError(f"a segment says that a row of {table!r} is gone")
        found.setdefault(table, []).append((key, value))
    return found
