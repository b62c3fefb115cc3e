"""Reads a log beside its live writer: for ``immortal log show``, status, time travel and the pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from msgspec import Struct

from immortal.coordinator.core.errors import DamagedCheckpointError, DamagedLogError, LogError
from immortal.coordinator.core.interfaces import AuditEntry, Letter, LogSummary
from immortal.coordinator.log import verdicts, view_queries
from immortal.coordinator.log.authentication import (
    LogKey,
    Macs,
    Marker,
    authentic_prefix,
    authenticate_records,
    check_state,
    find_key,
    forged_record,
    read_chunk,
    read_marker,
)
from immortal.coordinator.log.backend import Finding, ReadBackend, View
from immortal.coordinator.log.format import INT, META_TRIMMED, SEQUENCE_KEY, StoredHeader, decode_header
from immortal.coordinator.log.identity import (
    LogIdentity,
    check_value,
    checked_prefix,
    first_and_last_sequence_id,
    meta_value,
)
from immortal.protocol.checksum import crc64
from immortal.protocol.verdicts import MessageKey, Verdict

# Limits of one view: the writer cannot reuse space freed while a view is open.
SCAN_ROWS_MAX = 4096
SCAN_SIZE_BYTES_MAX = 8 << 20


class TrimmedError(LogError):
    """Raised if a requested record was trimmed, perhaps after the reader was opened."""


class LoggedValue(Struct, frozen=True):
    """Stored record with its trailer. ``problem``: its damage; None if there is none.

    ``value`` is empty if the record is missing; then ``last_sequence_id`` is the last one of the gap.
    """

    sequence_id: int
    value: bytes
    problem: str | None
    last_sequence_id: int = -1


class LogReader:
    """Reader of one log, from :func:`immortal.coordinator.log.open_reader`. No view stays open between calls."""

    def __init__(self, backend: ReadBackend) -> None:
        self.where = backend.label
        self.identity = backend.identity
        self.problems: list[str] = []
        self.macs: Macs | None = None
        """MACs of the log; None: it is not authenticated, or its authenticity is not checked."""
        self.trusts_pickle = False
        """True if a state written by pickle can be read, which runs code in it (instances.own_logs)."""
        self.sequence_id_read_max = -1
        """Highest record ID that :meth:`last_sequence_id` has returned."""
        self._backend = backend

    def __enter__(self) -> LogReader:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def authenticate(self, keys: Sequence[LogKey], *, check: bool = True) -> None:
        """Check MACs from here on: if the log has a key, a record or chunk written without it counts as damage.

        ``check``: also check the other tables now. Raises LogKeyError if the key is not among ``keys``, ForgedLogError.
        """
        marker = self.marker
        if marker is None:
            return
        self.macs = macs = Macs(find_key(keys, marker, self.identity.instance_name), self.identity, marker)
        if check:
            with self.view() as view:
                check_state(view, macs, self.identity.instance_name)
            self.release()

    @property
    def marker(self) -> Marker | None:
        """Marker of the log's authentication, checked or not; None if it has none."""
        with self.view() as view:
            return read_marker(view)

    @property
    def authenticity(self) -> str:
        """Describe how far the log is authenticated."""
        if self.macs is None:
            return "authenticated, which was not checked" if self.marker is not None else "not authenticated"
        marker = self.macs.marker
        since = f"; records before {marker.first_sequence_id} as they were when it got a key"
        return f"authenticated with key {marker.key_id}{since if marker.first_sequence_id > 0 else ''}"

    def summary(self) -> LogSummary:
        """Read the log's state as it is now, like :meth:`RowLogStore.summary`."""
        problems: list[str] = []
        with self.view() as view:
            summary = view_queries.load_summary(view, self.identity.committer_id, self.view, problems)
        self.problems = problems
        self.release()  # only heads of rows were read, but whole rows are mapped
        return summary

    def ends(self) -> tuple[int, int]:
        """Read the IDs of the first and last kept record; the first is last + 1 if there is none."""
        with self.view() as view:
            return first_and_last_sequence_id(view)

    def last_sequence_id(self) -> int:
        """Read the last record's ID; -1 in a new log. Cheap enough to poll a live log."""
        last = self.ends()[1]
        self.sequence_id_read_max = max(self.sequence_id_read_max, last)
        return last

    def read(self, first_sequence_id: int, size_bytes_max: int) -> list[bytes]:
        """Read checked values, like :meth:`RowLogStore.read`; an empty list after the last record."""
        with self.view() as view:
            values, gap = view_queries.collect_values(view, first_sequence_id, size_bytes_max)
            are = authenticate_records(view, self.macs, enumerate(values, first_sequence_id))
        if not values and gap is not None:
            raise gap
        checked = checked_prefix(values, first_sequence_id, self.identity.committer_id)
        return authentic_prefix(checked, are[: len(checked)], first_sequence_id)

    def values(self, first_sequence_id: int, last_sequence_id: int | None = None) -> Iterator[bytes]:
        """Yield the checked values (record + trailer) of the range, both ends included, in order and without a gap.

        It ends after ``last_sequence_id``, or after the log's last record at that time: to follow a live log, call it
        again from there. Raises TrimmedError for a record that is no longer kept, DamagedLogError for one that is
        damaged or missing. Like :meth:`records` it never delays the writer.
        """
        expected = max(first_sequence_id, 0)
        while True:
            rows, are, last_there = self._scan_to_last(expected, last_sequence_id)
            if not rows:
                if expected <= last_there and (last_sequence_id is None or expected <= last_sequence_id):
                    raise self._not_there(expected)
                return
            self.count_bytes_touched(sum(len(value) for _, value in rows))
            for (sequence_id, value), is_authentic in zip(rows, are, strict=True):
                if sequence_id != expected:
                    raise self._not_there(expected)
                check_value(value, sequence_id, self.identity.committer_id)
                if not is_authentic:
                    raise forged_record(sequence_id)
                yield value
                expected += 1

    def records(
        self, first_sequence_id: int | None = None, last_sequence_id: int | None = None
    ) -> Iterator[LoggedValue]:
        """Yield the records of the range, both ends included (None: the log's own), and markers for damage and gaps.

        A scan never delays the writer: its view is renewed every SCAN_ROWS_MAX records or SCAN_SIZE_BYTES_MAX. Without
        ``last_sequence_id`` it continues to the log's last record at that time.
        """
        first, _ = self.ends()
        expected = first if first_sequence_id is None else max(first_sequence_id, first)
        while True:
            rows, are, _ = self._scan_to_last(expected, last_sequence_id)
            if not rows:
                return
            self.count_bytes_touched(sum(len(value) for _, value in rows))
            for (sequence_id, value), is_authentic in zip(rows, are, strict=True):
                if sequence_id > expected and not self._trimmed(sequence_id - 1):
                    yield _missing(expected, sequence_id - 1)
                problem = self._problem(sequence_id, value)
                if problem is None and not is_authentic:
                    problem = str(forged_record(sequence_id))
                yield LoggedValue(sequence_id, value, problem)
                expected = sequence_id + 1

    def read_checkpoint_chunk(self, checkpoint_id: int, index: int) -> bytes:
        """Read chunk ``index``; b"" after the last. Raises DamagedCheckpointError."""
        with self.view() as view:
            return read_chunk(view, self.macs, checkpoint_id, index)

    def checkpoint_chunks(self, checkpoint_id: int) -> Iterator[bytes]:
        """Read and check the chunks of a blob in order; after the last one, check the whole blob.

        Raises TrimmedError for a checkpoint that is no longer kept, or never was; DamagedCheckpointError.
        """
        stored = self._stored_header(checkpoint_id)
        size_bytes = check = 0
        for index in range(stored.chunk_count):
            try:
                chunk = self.read_checkpoint_chunk(checkpoint_id, index)
            except DamagedCheckpointError:
                self._stored_header(checkpoint_id)  # is it damaged, or was it trimmed meanwhile?
                raise
            size_bytes += len(chunk)
            check = crc64(chunk, check)
            self.count_bytes_touched(len(chunk))
            yield chunk
        header = stored.header
        if (size_bytes, check) != (header.size_bytes, header.check):
            raise DamagedCheckpointError(
                f"the blob of checkpoint {checkpoint_id} has {size_bytes} bytes with CRC {check:016x},"
                f" its header says {header.size_bytes} with {header.check:016x}",
                checkpoint_id,
            )

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts on the kept records, in order. Raises DamagedLogError."""
        with self.view() as view:
            return verdicts.load_verdicts(view, first_and_last_sequence_id(view)[0])

    def last_verdicts(self, count_max: int) -> list[Verdict]:
        """Read the last verdicts on kept records, newest first. Raises DamagedLogError."""
        with self.view() as view:
            return verdicts.load_last_verdicts(view, count_max)

    def letter(self, key: MessageKey) -> Letter | None:
        """Return a dead letter; None if there is none. Raises DamagedLogError."""
        with self.view() as view:
            return verdicts.load_dead_letter(view, key)

    def letters(self) -> Iterator[Letter]:
        """Read dead letters in the order of their records; damaged ones are described in :attr:`problems`."""
        self.problems = []
        with self.view() as view:
            keys = list(verdicts.dead_letter_sizes(view))
        for key in keys:
            try:
                letter = self.letter(key)
            except DamagedLogError as error:
                self.problems.append(f"{error}: it is left out")
                continue
            if letter is not None:  # otherwise it was retried or dropped since then
                yield letter

    def audit(self) -> list[AuditEntry]:
        """Return operators' actions, oldest first; leave out damaged ones and describe them in :attr:`problems`."""
        self.problems = []
        with self.view() as view:
            return verdicts.load_audit(view, self.problems)

    def view(self, *, copies: bool = False) -> AbstractContextManager[View]:
        """Open a snapshot of the log as it is now, see :meth:`ReadBackend.view`."""
        return self._backend.view(copies=copies)

    def is_live(self) -> bool:
        """Return True while a process writes this log."""
        return self._backend.is_live()

    def findings(self) -> Iterator[Finding]:
        """Find damage in the backend's data beside the rows. Raises DamagedLogError if the log is unreadable."""
        return self._backend.findings(None if self.macs is None else self.macs.mark)

    def count_bytes_touched(self, size_bytes: int) -> None:
        """Report that ``size_bytes`` were read, so that a scan of a large log does not fill this process's memory."""
        self._backend.count_bytes_touched(size_bytes)

    def release(self) -> None:
        """Free the memory that reading took. Call it before a pause in reading."""
        self._backend.release()

    def close(self) -> None:
        self._backend.close()

    def _scan_to_last(self, first: int, last: int | None) -> tuple[list[tuple[int, bytes]], list[bool], int]:
        """Return rows, whether each is authentic, and the last record's ID then, to tell the log's end from a gap."""
        with self.view() as view:
            rows = _scan(view, first, last)
            last_there = first_and_last_sequence_id(view)[1]
            return rows, authenticate_records(view, self.macs, rows), last_there

    def _stored_header(self, checkpoint_id: int) -> StoredHeader:
        """Read a checkpoint's header. Raises TrimmedError, DamagedCheckpointError."""
        key = SEQUENCE_KEY.pack(checkpoint_id)
        with self.view() as view:
            found = view.get("checkpoints", key)
            value = None if found is None else bytes(found)
        if value is None:
            raise TrimmedError(
                f"checkpoint {checkpoint_id} is not in the log in {self.where}: old ones are trimmed away"
                " ('--keep-log-days' and '--keep-log-mb' of the instance say how much is kept)"
            )
        try:
            return decode_header(key, value)
        except DamagedLogError as error:
            raise DamagedCheckpointError(
                f"the header of checkpoint {checkpoint_id} is damaged: {error}", checkpoint_id
            ) from None

    def _not_there(self, sequence_id: int) -> LogError:
        """Return the error that explains why a record before the last one is not in the log."""
        if self._trimmed(sequence_id):
            first, _ = self.ends()
            return TrimmedError(
                f"record {sequence_id} is not in the log in {self.where}: it begins with record {first}, what was"
                " before is trimmed away"
            )
        return DamagedLogError(f"record {sequence_id} is missing in the log in {self.where}", sequence_id)

    def _problem(self, sequence_id: int, value: bytes) -> str | None:
        try:
            check_value(value, sequence_id, self.identity.committer_id)
        except DamagedLogError as error:
            return str(error)
        return None

    def _trimmed(self, sequence_id: int) -> bool:
        """Return True if the writer has removed that record, perhaps after a scan began."""
        with self.view() as view:
            trimmed = meta_value(view, META_TRIMMED, INT)
        return trimmed is not None and sequence_id <= trimmed


def _missing(first: int, last: int) -> LoggedValue:
    """Return one marker for a whole gap of records: a damaged key can make it look 2^63 records wide."""
    what = f"record {first} is missing" if first == last else f"records {first} to {last} are missing"
    return LoggedValue(first, b"", what, last)


def _scan(view: View, first: int, last: int | None) -> list[tuple[int, bytes]]:
    rows: list[tuple[int, bytes]] = []
    rest_bytes = SCAN_SIZE_BYTES_MAX
    for key, value in view.scan("records", SEQUENCE_KEY.pack(max(first, 0))):
        (sequence_id,) = SEQUENCE_KEY.unpack(key)
        if last is not None and sequence_id > last:
            break
        rows.append((sequence_id, bytes(value)))
        rest_bytes -= len(value)
        if rest_bytes <= 0 or len(rows) >= SCAN_ROWS_MAX:
            break
    return rows


# The part of a LogReader that a replay needs.


class RecordSource(Protocol):
    """Log open for reading, as a replay needs it: :class:`immortal.coordinator.log.LogReader` is one."""

    identity: LogIdentity
    problems: list[str]
    """Messages about data that the last summary left out."""
    trusts_pickle: bool
    """True if a state written by pickle can be read, which runs code in it."""

    def summary(self) -> LogSummary: ...

    def values(self, first_sequence_id: int, last_sequence_id: int | None = None) -> Iterator[bytes]: ...

    def checkpoint_chunks(self, checkpoint_id: int) -> Iterator[bytes]: ...
