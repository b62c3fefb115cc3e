"""Archiver of a log: makes the next moment of its archive. A new archiver needs only what the store holds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator

from blake3 import blake3
from msgspec import Struct

from immortal.coordinator.archive.archive import Archive
from immortal.coordinator.archive.format import (
    ArchivedCheckpoint,
    ArchiveError,
    ConflictError,
    Moment,
    PackedRow,
    Part,
    Segment,
    digest,
    digest_of_rows,
)
from immortal.coordinator.core.errors import DamagedCheckpointError, DamagedLogError
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.authentication import authenticate_records, forged_record, read_marker
from immortal.coordinator.log.backend import Span, View, batches
from immortal.coordinator.log.format import ALL_TABLES, CHUNK_KEY, META_EPOCH, META_JOURNAL, SEQUENCE_KEY, StoredHeader
from immortal.coordinator.log.identity import check_value, first_and_last_sequence_id, meta_value
from immortal.coordinator.log.reader import LogReader, TrimmedError
from immortal.coordinator.log.view_queries import record_time_ns

SEGMENT_SIZE_BYTES = 16 << 20
_WHOLE_STATE_EVERY = 100  # moments: a restore reads at most so many states
_TRIES_MAX = 5  # reads of the log until less than a segment of records is left


class _NextMoment(Struct):
    """Starting point of the next moment: the moment before it, and True in ``begins`` if a new history begins."""

    before: Moment | None
    before_digest: str
    begins: bool
    next_sequence_id: int


class UnarchivedRecords(Struct, frozen=True):
    """Number of records that are in no moment yet, and the age of the oldest in s. A loss of the log loses them."""

    records_count: int
    seconds: float


def unarchived(reader: LogReader, archived_sequence_id: int, now_ns: int) -> UnarchivedRecords:
    """Count the records that a loss of the log would lose now. Raises LogError."""
    with reader.view() as view:
        end = log_end(view)
        first = max(archived_sequence_id + 1, end.first_sequence_id)
        time_ns = record_time_ns(view, first, reader.identity.committer_id)
    count = max(0, end.last_sequence_id - archived_sequence_id)
    return UnarchivedRecords(count, max(0.0, (now_ns - time_ns) / 1e9) if count and time_ns else 0.0)


class Archiver:
    """Archiver of one log into one archive. Another log or archive needs a new Archiver.

    ``new_history``: if the archive does not continue with this log, begin a new history after the stored moments.
    ``report``: receives messages for the operator.
    """

    def __init__(
        self,
        archive: Archive,
        reader: LogReader,
        *,
        new_history: bool = False,
        segment_size_bytes: int = SEGMENT_SIZE_BYTES,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Find where to continue. Raises ArchiveError if the archive is of another log or another history of it;
        StoreError, LogError."""
        self._archive = archive
        self._reader = reader
        self._segment_size_bytes = segment_size_bytes
        self._report = report
        with reader.view() as view:
            self._end = log_end(view)
            self._place = _place(archive, reader, view, self._end, new_history, report)
        self._segments: list[Segment] = []  # stored, and not yet in a manifest
        self._checkpoints = {} if self._place.before is None or self._place.begins else {
            one.checkpoint_id: one for one in self._place.before.checkpoints
        }  # fmt: skip
        self._state: StateDigests = {}
        self._deltas_left = 0

    @property
    def last(self) -> Moment | None:
        """Newest moment of the archive; None if it is empty."""
        return self._place.before

    def unarchived(self) -> UnarchivedRecords:
        """Count the records that a loss of the log would lose now. Raises LogError."""
        before = None if self._place.begins else self._place.before
        return unarchived(self._reader, -1 if before is None else before.last_sequence_id, time.time_ns())

    def ship_full_segments(self) -> bool:
        """Store records while they fill a segment; return True if any were stored. Raises StoreError, LogError."""
        sent = False
        while True:
            with self._reader.view() as view:
                records = records_from(view, self._reader, self._place.next_sequence_id, self._segment_size_bytes)
            self._reader.count_bytes_touched(records.size_bytes)
            if records.size_bytes < self._segment_size_bytes:
                return sent
            self._put_records(records)
            sent = True

    def store_moment(self) -> Moment | None:
        """Store a moment of the log as it is now; return None if nothing has changed.

        Raises ConflictError if another archiver was first, StoreError, LogError. Objects stored before stay valid.
        """
        damaged_ids: set[int] = set()
        for tries in range(_TRIES_MAX + 1):
            self.ship_full_segments()
            self._ship_checkpoints(damaged_ids)
            with self._reader.view() as view:
                taken_ns = time.time_ns()
                headers = {key: one for key, one in checkpoint_headers(view).items() if key not in damaged_ids}
                if any(not self._has(key, value) for key, (value, _) in headers.items()):
                    continue
                limit = self._segment_size_bytes if tries < _TRIES_MAX else None
                records = records_from(view, self._reader, self._place.next_sequence_id, limit)
                if limit is not None and records.size_bytes >= limit:
                    continue
                end = log_end(view)
                if (end.epoch, end.nonce) != (self._end.epoch, self._end.nonce):
                    raise ConflictError("the instance was started anew")  # or has another key
                if end.last_sequence_id < self._place.next_sequence_id - 1:
                    raise ConflictError("the end of the log was cut off")
                changed, state = state_rows(view, self._state if self._deltas_left else {})
                last_digest = record_digest(view, end.last_sequence_id)
                time_ns = record_time_ns(view, end.last_sequence_id, self._reader.identity.committer_id)
            break
        else:
            return None  # checkpoints arrive faster than they can be stored: the next call tries again
        self._reader.release()
        checkpoints = [self._checkpoints[key] for key in sorted(headers)]
        state_digest = digest_of_rows(state.items())
        before = self._place.before
        if (
            before is not None
            and not self._place.begins
            and not self._segments
            and not records.rows
            and before.state_digest == state_digest
            and before.checkpoints == checkpoints
        ):
            return None
        if records.rows:
            self._put_records(records)
        number = 1 if before is None else before.number + 1
        is_whole = not self._deltas_left
        part = None
        if changed or is_whole:
            part = self._archive.put("states/", f"{number:012}", end.epoch, changed)
        identity = self._reader.identity
        moment = Moment(
            number=number,
            instance=identity.instance_name,
            committer_id=identity.committer_id,
            created_ns=identity.created_ns,
            format_version=identity.format_version,
            nonce=end.nonce,
            epoch=end.epoch,
            taken_ns=taken_ns,
            time_ns=time_ns or (0 if before is None else before.time_ns),
            first_sequence_id=end.first_sequence_id,
            last_sequence_id=end.last_sequence_id,
            last_digest=last_digest or ("" if before is None or self._place.begins else before.last_digest),
            begins=self._place.begins,
            segments=self._segments,
            state=part,
            state_is_whole=is_whole,
            state_digest=state_digest,
            checkpoints=checkpoints,
            encrypted=self._archive.cipher is not None,
            before_digest=self._place.before_digest,
        )
        its_digest = self._archive.put_moment(moment)
        if its_digest is None:
            raise ConflictError(f"another archiver has written moment {number} of {moment.instance!r}")
        self._place = _NextMoment(moment, its_digest, False, self._place.next_sequence_id)
        self._segments = []
        self._state = state
        self._deltas_left = _WHOLE_STATE_EVERY if is_whole else self._deltas_left - 1
        self._checkpoints = {one.checkpoint_id: one for one in checkpoints}
        return moment

    def _put_records(self, records: Records) -> None:
        label = f"{records.first_sequence_id:019}-{records.last_sequence_id:019}"
        part = self._archive.put("segments/", label, self._end.epoch, records.rows)
        self._segments.append(Segment(records.first_sequence_id, records.last_sequence_id, part))
        self._place.next_sequence_id = records.last_sequence_id + 1

    def _has(self, checkpoint_id: int, value: bytes) -> bool:
        known = self._checkpoints.get(checkpoint_id)
        return known is not None and known.header_digest == digest(value)

    def _ship_checkpoints(self, damaged_ids: set[int]) -> None:
        """Store new checkpoints. Add the IDs of damaged ones to ``damaged_ids``."""
        with self._reader.view() as view:
            headers = checkpoint_headers(view)
        for checkpoint_id, (value, stored) in headers.items():
            if checkpoint_id in damaged_ids or self._has(checkpoint_id, value):
                continue
            try:
                parts = self._put_checkpoint(checkpoint_rows(self._reader, value, stored), stored)
            except DamagedCheckpointError as error:
                with self._reader.view() as view:
                    is_there = checkpoint_id in checkpoint_headers(view)
                if is_there:  # else it was trimmed meanwhile
                    damaged_ids.add(checkpoint_id)
                    self._report(f"checkpoint {checkpoint_id} is left out: {error}")
                continue
            header = stored.header
            self._checkpoints[checkpoint_id] = ArchivedCheckpoint(
                checkpoint_id, header.sequence_id, header.time_ns, digest(value), parts
            )

    def _put_checkpoint(self, rows: Iterable[PackedRow], stored: StoredHeader) -> list[Part]:
        checkpoint_id = stored.header.checkpoint_id
        return [
            self._archive.put("checkpoints/", f"{checkpoint_id:012}-{index:06}", self._end.epoch, batch)
            for index, batch in enumerate(batches(rows, self._segment_size_bytes))
        ]


def _place(
    archive: Archive, reader: LogReader, view: View, end: LogEnd, new_history: bool, report: Callable[[str], None]
) -> _NextMoment:
    found = archive.last()
    if found is None:
        return _NextMoment(None, "", True, end.first_sequence_id)
    before, its_digest = found
    location, identity = archive.objects.location, reader.identity
    if (before.instance, before.committer_id, before.created_ns) != (
        identity.instance_name, identity.committer_id, identity.created_ns,
    ):  # fmt: skip
        raise ArchiveError(
            f"{location} is the archive of another log: of {before.instance!r}, committer {before.committer_id}; this"
            f" one is of {identity.instance_name!r}, committer {identity.committer_id}: give another URL"
        )
    if before.encrypted and archive.cipher is None:
        raise ArchiveError(
            f"the archive {location} is encrypted: give the key file (--key-file), public keys are enough"
        )
    begins = _NextMoment(before, its_digest, True, end.first_sequence_id)
    problem = _problem(before, view, end)
    if problem is not None:
        if not new_history:
            raise ArchiveError(
                f"the archive {location} does not go on with this log: {problem}. If another copy of the log runs, stop"
                " the one that is stale; if this log is the right one, --anew archives it from its beginning, behind"
                " what is there"
            )
        report(f"begins anew: {problem}")
        return begins
    if before.nonce != end.nonce:
        report("begins anew: the log has another key than before")
        return begins
    if before.last_sequence_id + 1 < end.first_sequence_id:
        report(
            f"begins anew: the log has trimmed records {before.last_sequence_id + 1} to {end.first_sequence_id - 1}"
            " before they were archived: no moment among them can be brought back"
        )
        return begins
    return _NextMoment(before, its_digest, False, before.last_sequence_id + 1)


def _problem(before: Moment, view: View, end: LogEnd) -> str | None:
    """Return why the archive does not continue with this log; None if it does."""
    if end.epoch < before.epoch:
        return f"it is in epoch {end.epoch}, the archive has epoch {before.epoch}: a stale copy, or restored to earlier"
    if end.last_sequence_id < before.last_sequence_id:
        return f"it ends with record {end.last_sequence_id}, the archive with record {before.last_sequence_id}"
    here = record_digest(view, before.last_sequence_id)
    if here and before.last_digest and here != before.last_digest:
        return f"it has another record {before.last_sequence_id} than the archive"
    return None


# Reads of what the archive lacks: records, checkpoints and the rows of other tables.
#
# No view of the log stays open while objects are sent: the writer could not reuse the space that it frees meanwhile.


BY_THEMSELVES = ("records", "record_seals", "checkpoints", "chunks", "outputs")
STATE_TABLES = tuple(table for table in ALL_TABLES if table not in BY_THEMSELVES)
_DIGEST_SIZE_BYTES = 16

StateDigests = dict[tuple[str, bytes], bytes]


class Records(Struct, frozen=True):
    """Consecutive records read from a log, from the requested one on, up to a size limit."""

    first_sequence_id: int
    last_sequence_id: int
    size_bytes: int
    rows: list[PackedRow]


class LogEnd(Struct, frozen=True):
    """First and last record of a log, its epoch, and the nonce of its key ("": it has none)."""

    first_sequence_id: int
    last_sequence_id: int
    epoch: int
    nonce: str


def log_end(view: View) -> LogEnd:
    """Read the first and last record, the epoch and the nonce of a log. Raises DamagedLogError."""
    marker = read_marker(view)
    epoch = meta_value(view, META_EPOCH, log_format.INT) or 0
    return LogEnd(*first_and_last_sequence_id(view), epoch, "" if marker is None else marker.nonce.hex())


def records_from(view: View, reader: LogReader, first_sequence_id: int, size_bytes_max: int | None) -> Records:
    """Read records and check each: a damaged log never reaches its archive. Raises DamagedLogError, TrimmedError."""
    rows: list[PackedRow] = []
    values: list[tuple[int, bytes]] = []
    size_bytes, expected = 0, first_sequence_id
    for key_view, value_view in view.scan("records", SEQUENCE_KEY.pack(first_sequence_id)):
        key, value = bytes(key_view), bytes(value_view)
        (sequence_id,) = SEQUENCE_KEY.unpack(key)
        if sequence_id != expected:
            if expected < first_and_last_sequence_id(view)[0]:
                raise TrimmedError(f"record {expected} was trimmed away before it was archived")
            raise DamagedLogError(f"record {expected} is missing: the next one is record {sequence_id}", expected)
        check_value(value, sequence_id, reader.identity.committer_id)
        values.append((sequence_id, value))
        rows += [row for table in ("records", "record_seals") if (row := _stored(view, table, key)) is not None]
        expected += 1
        size_bytes += len(value)
        if size_bytes_max is not None and size_bytes >= size_bytes_max:
            break
    for (sequence_id, _), is_authentic in zip(values, authenticate_records(view, reader.macs, values), strict=True):
        if not is_authentic:
            raise forged_record(sequence_id)
    return Records(first_sequence_id, expected - 1, size_bytes, rows)


def record_digest(view: View, sequence_id: int) -> str:
    """Return the digest of a record; "" if the log does not keep it."""
    value = None if sequence_id < 0 else view.stored.get("records", SEQUENCE_KEY.pack(sequence_id))
    return "" if value is None else digest(bytes(value))


def state_rows(view: View, known: StateDigests) -> tuple[list[PackedRow], StateDigests]:
    """Return the rows of all other tables that differ from ``known``, deletions included, and the new digests."""
    changed: list[PackedRow] = []
    found: StateDigests = {}
    for table, key, value in _state(view):
        its_digest = blake3(value).digest(_DIGEST_SIZE_BYTES)
        found[table, key] = its_digest
        if known.get((table, key)) != its_digest:
            changed.append((table, key, value))
    changed += [(table, key, None) for table, key in known.keys() - found.keys()]
    return changed, found


def _stored(view: View, table: str, key: bytes) -> tuple[str, bytes, bytes] | None:
    """Return a row as it is stored: an archive of an encrypted log has its rows encrypted."""
    value = view.stored.get(table, key)
    return None if value is None else (table, key, bytes(value))


def _state(view: View) -> Iterator[tuple[str, bytes, bytes]]:
    for table in STATE_TABLES:
        for key, value in Span(table).rows(view.stored):
            if table != "meta" or key != META_JOURNAL:  # an archive's tables include the journal's rows
                yield table, key, bytes(value)
    before = first_and_last_sequence_id(view)[0] - 1  # with a key, the first record's MAC needs it
    if before >= 0 and (seal := _stored(view, "record_seals", SEQUENCE_KEY.pack(before))) is not None:
        yield seal


def checkpoint_headers(view: View) -> dict[int, tuple[bytes, StoredHeader]]:
    """Return the undamaged checkpoint headers by ID: (stored value, decoded header)."""
    headers = {}
    for key, value in Span("checkpoints").rows(view):
        with contextlib.suppress(DamagedLogError):
            stored = log_format.decode_header(key, bytes(value))
            if (row := _stored(view, "checkpoints", key)) is not None:
                headers[SEQUENCE_KEY.unpack(key)[0]] = row[2], stored
    return headers


def checkpoint_rows(reader: LogReader, value: bytes, stored: StoredHeader) -> Iterator[PackedRow]:
    """Yield the checked header, chunks and outputs of a checkpoint. Raises DamagedCheckpointError, also if trimmed."""
    checkpoint_id = stored.header.checkpoint_id
    yield "checkpoints", SEQUENCE_KEY.pack(checkpoint_id), value
    for index in range(stored.chunk_count):
        reader.read_checkpoint_chunk(checkpoint_id, index)
        key = CHUNK_KEY.pack(checkpoint_id, index)
        with reader.view() as view:
            row = _stored(view, "chunks", key)
        if row is None:
            raise DamagedCheckpointError(f"chunk {index} of checkpoint {checkpoint_id} was trimmed", checkpoint_id)
        yield row
    size_bytes = index = 0
    while size_bytes < stored.outputs_size_bytes:
        key = CHUNK_KEY.pack(checkpoint_id, index)
        with reader.view() as view:
            found, row = view.get("outputs", key), _stored(view, "outputs", key)
            data = None if found is None else log_format.unseal_chunk(key, found)
        if row is None or data is None:
            raise DamagedCheckpointError(f"piece {index} of the outputs of checkpoint {checkpoint_id}", checkpoint_id)
        yield row
        size_bytes += len(data)
        index += 1
