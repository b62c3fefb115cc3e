"""Authenticates a writer's appends: adds MACs for the changes of each append, over any backend."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct, field

from immortal.coordinator.core.errors import require
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.authentication import (
    NONCE_SIZE_BYTES,
    SUM_MODULUS,
    SUMMED_TABLES,
    LogKey,
    Macs,
    Marker,
    check_state,
    head_of,
    is_summed,
    summed_rows,
)
from immortal.coordinator.log.backend import Append, ReadBackend, Row, Span, View
from immortal.coordinator.log.format import CHUNK_KEY, MAC_SIZE_BYTES, SEQUENCE_KEY
from immortal.coordinator.log.identity import LogIdentity, first_and_last_sequence_id, meta_row

# Tables whose MACs stay in memory. Most appends change no other table, so nothing is read for them.
_KEPT_TABLES = frozenset(("sources", "acknowledged", "verdicts", "letters", "meta"))


class Change(Struct):
    """Authentication state after one append. It counts once the append is durable."""

    head: bytes
    sums: dict[str, int]
    tags: dict[str, bytes]
    chunks: dict[int, list[bytes]]  # for checkpoints without a header yet
    rows: dict[tuple[str, bytes], int | None] = field(default_factory=dict)  # in tables kept in memory; None: removed
    changed: set[str] = field(default_factory=set)

    def replace(self, table: str, key: bytes, old: int | None, new: int | None) -> None:
        self.sums[table] = (self.sums[table] - (old or 0) + (new or 0)) % SUM_MODULUS
        self.changed.add(table)
        if table in _KEPT_TABLES:
            self.rows[table, key] = new


class Sealer:
    """Adds MACs to appends. For the writing thread."""

    def __init__(self, macs: Macs, view: View, instance_name: str) -> None:
        """Load the state. Raises ForgedLogError if the tables are not as the last append left them, DamagedLogError."""
        self._macs = macs
        self._sums = check_state(view, macs, instance_name)
        self._tags = {table: macs.tag(table, total) for table, total in self._sums.items()}
        self._head = head_of(view, macs)
        self._rows = {
            (table, key): macs.row(table, key, value)
            for table in _KEPT_TABLES
            for key, value in summed_rows(view, table)
        }
        self._chunks: dict[int, list[bytes]] = {}

    def seal(self, append: Append, backend: ReadBackend) -> Change:
        """Add the MACs to ``append``; return the change for :meth:`adopt`."""
        change = Change(self._head, dict(self._sums), dict(self._tags), dict(self._chunks))
        puts = list(append.puts)
        if append.deletes or not _KEPT_TABLES.issuperset([table for table, _, _ in puts]):
            with backend.view() as view:
                self._count(change, append, puts, view)
        else:
            self._count(change, append, puts, None)
        for sequence_id, value in append.records:
            change.head = self._macs.record(change.head, value)
            puts.append(("record_seals", SEQUENCE_KEY.pack(sequence_id), change.head))
        if append.records or change.changed:
            for table in change.changed:
                change.tags[table] = self._macs.tag(table, change.sums[table])
            puts.append(_seal_row(self._macs, change.head, change.tags))
        append.puts = puts
        return change

    def _count(self, change: Change, append: Append, puts: list[Row], view: View | None) -> None:
        """Account for all deleted and added rows, and add their MACs."""
        asked = list(dict.fromkeys(append.deletes))
        append.deletes = [*asked]
        for span in asked:
            append.deletes += self._delete(change, span, view)
        for table, key, value in [*puts]:
            if table == "chunks":
                checkpoint_id, index = CHUNK_KEY.unpack(key)
                known = change.chunks.get(checkpoint_id, [])[:index]
                change.chunks[checkpoint_id] = [*known, self._macs.chunk(key, value)]
            elif is_summed(table, key):
                old = self._old(change, table, key, asked, view)
                change.replace(table, key, old, self._macs.row(table, key, value))
            if table == "checkpoints":  # the checkpoint and its chunks are complete now
                chunks = b"".join(change.chunks.pop(SEQUENCE_KEY.unpack(key)[0], ()))
                old = self._old(change, "checkpoint_seals", key, asked, view)
                change.replace("checkpoint_seals", key, old, self._macs.row("checkpoint_seals", key, chunks))
                puts.append(("checkpoint_seals", key, chunks))

    def adopt(self, change: Change) -> None:
        """Adopt the state of a durable append."""
        self._head, self._sums, self._tags, self._chunks = change.head, change.sums, change.tags, change.chunks
        for place, row in change.rows.items():
            if row is None:
                self._rows.pop(place, None)
            else:
                self._rows[place] = row

    def _old(self, change: Change, table: str, key: bytes, deletes: Sequence[Span], view: View | None) -> int | None:
        """Return the MAC of a row that will be replaced."""
        place = table, key
        if table in _KEPT_TABLES:
            return change.rows[place] if place in change.rows else self._rows.get(place)
        removed_in = "checkpoints" if table == "checkpoint_seals" else table
        value = None if view is None else view.get(table, key)
        if value is None or any(span.table == removed_in and span.has(key) for span in deletes):
            return None
        return self._macs.row(table, key, value)

    def _delete(self, change: Change, span: Span, view: View | None) -> list[Span]:
        """Account for the rows of a span; return spans of MACs to delete with it."""
        if span.table == "records":
            require(not span.first and span.end is not None, "only the first records of a log may go")
            (end,) = SEQUENCE_KEY.unpack(span.end or b"")  # the last one's MAC stays: the next one's covers it
            return [Span("record_seals", b"", SEQUENCE_KEY.pack(max(end - 1, 0)))]
        if span.table == "chunks":  # of a replaced attempt, or of a removed checkpoint
            for checkpoint_id in [each for each in change.chunks if span.has(CHUNK_KEY.pack(each, 0))]:
                del change.chunks[checkpoint_id]
            return []
        for key, value in () if view is None else span.rows(view):
            if is_summed(span.table, key):
                change.replace(span.table, key, self._macs.row(span.table, key, value), None)
        if span.table != "checkpoints":
            return []
        seals = Span("checkpoint_seals", span.first, span.end)
        return [seals, *self._delete(change, seals, view)]


def _seal_row(macs: Macs, head: bytes, tags: dict[str, bytes]) -> Row:
    """Return the row that seals the state of all tables."""
    return meta_row(log_format.META_SEAL, macs.seal(head, b"".join([tags[table] for table in SUMMED_TABLES])))


# --- giving a log a key, and removing it ------------------------------------------------------------------------------


class _AllSeals(Iterable[Row]):
    """Rows, and the MACs of all records, kept as bytes since there can be very many."""

    def __init__(self, rows: Sequence[Row], seals: bytearray) -> None:
        self._rows = rows
        self._seals = seals  # pairs of key and MAC

    def __iter__(self) -> Iterator[Row]:
        yield from self._rows
        size_bytes = SEQUENCE_KEY.size + MAC_SIZE_BYTES
        for offset in range(0, len(self._seals), size_bytes):
            middle = offset + SEQUENCE_KEY.size
            yield "record_seals", bytes(self._seals[offset:middle]), bytes(self._seals[middle : offset + size_bytes])


def seal_all(
    view: View, key: LogKey, identity: LogIdentity, first_sequence_id: int | None = None
) -> tuple[Macs, Append]:
    """Return the append that gives the whole log MACs of ``key``. Its current content is trusted from then on.

    ``first_sequence_id``: the first record that was authenticated before; None: none was.
    """
    first, last = first_and_last_sequence_id(view)
    nonce = secrets.token_bytes(NONCE_SIZE_BYTES)
    marker = Marker(key.id, nonce, last + 1 if first_sequence_id is None else first_sequence_id)
    macs = Macs(key, identity, marker)
    rows: list[Row] = [
        meta_row(log_format.META_FORMAT, max(identity.format_version, log_format.AUTHENTICATED_VERSION)),
        meta_row(log_format.META_AUTHENTICATED, marker),
    ]
    for checkpoint_key, _ in view.scan("checkpoints"):
        (checkpoint_id,) = SEQUENCE_KEY.unpack(checkpoint_key)
        rows.append(("checkpoint_seals", bytes(checkpoint_key), b"".join(_chunk_macs(view, macs, checkpoint_id))))
    head, seals = macs.genesis, bytearray()
    if first > 0:
        rows.append(("record_seals", SEQUENCE_KEY.pack(first - 1), head))
    for sequence_key, value in view.scan("records"):
        head = macs.record(head, value)
        seals += SEQUENCE_KEY.pack(*SEQUENCE_KEY.unpack(sequence_key)) + head
    deletes = [Span("record_seals"), Span("checkpoint_seals")]
    rows.append(seal_after(view, macs, rows, deletes, head))
    return macs, Append(last, puts=_AllSeals(rows, seals), deletes=deletes)


def seal_after(view: View, macs: Macs, puts: Sequence[Row], deletes: Sequence[Span], head: bytes) -> Row:
    """Return the seal of the log after these changes. ``head``: MAC of its last record at that time."""
    tags = {}
    for table in SUMMED_TABLES:
        gone = [span for span in deletes if span.table == table]
        rows = {key: value for name, key, value in puts if name == table and is_summed(name, key)}
        total = sum(macs.row(table, key, value) for key, value in rows.items())
        for key, value in summed_rows(view, table):
            if key not in rows and not any(span.has(key) for span in gone):
                total += macs.row(table, key, value)
        tags[table] = macs.tag(table, total % SUM_MODULUS)
    return _seal_row(macs, head, tags)


def unsealed(last_sequence_id: int, identity: LogIdentity) -> Append:
    """Return the append that removes the log's authentication."""
    version = identity.format_version if identity.is_encrypted else log_format.FORMAT_VERSION
    marks = (log_format.META_AUTHENTICATED, log_format.META_SEAL)
    deletes = [Span("record_seals"), Span("checkpoint_seals"), *(Span.of_key("meta", key) for key in marks)]
    return Append(last_sequence_id, puts=[meta_row(log_format.META_FORMAT, version)], deletes=deletes)


def _chunk_macs(view: View, macs: Macs, checkpoint_id: int) -> Iterator[bytes]:
    index = 0
    while (value := view.get("chunks", key := CHUNK_KEY.pack(checkpoint_id, index))) is not None:
        yield macs.chunk(key, value)
        index += 1
