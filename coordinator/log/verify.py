"""A walk over all that a log holds: what is damaged, where, and what that means for recovery."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from coordinator.core.errors import DamagedCheckpointError, DamagedLogError, LogError, LogLockedError
from coordinator.core.interfaces import ClientPosition
from coordinator.log import format as log_format
from coordinator.log import reading, spilled, verdicts
from coordinator.log.authentication import ForgedLogError, LogKey, LogKeyError, not_authenticated
from coordinator.log.environment import (
    DATA_FILE_NAME,
    LogIdentity,
    Tables,
    check_data_file,
    log_exists,
    said_of,
    structure_problems,
)
from coordinator.log.findings import Finding, Severity
from coordinator.log.folder import open_reader
from coordinator.log.format import StoredHeader
from coordinator.log.high_water import HighWaterMark
from coordinator.log.lock import is_locked
from coordinator.log.pages import PageError, check_pages
from coordinator.log.reader import LogReader, TrimmedError
from coordinator.log.rebuild import plan_rebuilding
from coordinator.log.stream_positions import StreamPositions
from coordinator.log.values import verify_value
from protocol.client import caller_of

_READ_SIZE_BYTES = 1 << 20
_READ_SIZE_BYTES_MIN = 4096  # to name the place


@dataclass(slots=True)
class LogVerification:
    """A verification under way: iterate :meth:`findings` to its end, then read the figures."""

    folder: Path
    instance_name: str | None = None
    lock_held: bool = False  # by the caller: no coordinator writes the log
    keys: Sequence[LogKey] | None = None  # that it may be authenticated with; None: that is not looked at
    must_be_authentic: bool = False  # it was authenticated once
    authenticity: str = ""  # in words
    identity: LogIdentity | None = None
    records_checked: int = 0
    size_bytes_checked: int = 0
    checkpoints_checked: int = 0
    first_sequence_id: int = 0
    last_sequence_id: int = -1
    recovery_checkpoint_id: int | None = None  # the newest one that is whole: recovery starts from it
    recovery_sequence_id: int = -1
    whole_checkpoints: list[tuple[int, int]] = field(default_factory=list)  # (ID, sequence ID), oldest first
    damaged_records: list[tuple[int, int]] = field(default_factory=list)  # first and last, missing ones as well
    damaged: int = 0
    fatal: int = 0
    _positions: StreamPositions = field(default_factory=StreamPositions)

    @property
    def is_sound(self) -> bool:
        """Whether nothing was found but notes; valid once the findings were iterated."""
        return not (self.damaged or self.fatal)

    def first_damage(self, first_sequence_id: int) -> int | None:
        """The first record from ``first_sequence_id`` on that is damaged or missing; valid as :attr:`is_sound`."""
        return min(
            (max(first, first_sequence_id) for first, last in self.damaged_records if last >= first_sequence_id),
            default=None,
        )

    def findings(self) -> Iterator[Finding]:
        """Every finding, as it is found. Raises nothing for damage; LogLockedError if this process has the log open."""
        for finding in self._walk():
            self.damaged += finding.severity is Severity.DAMAGE
            self.fatal += finding.severity is Severity.FATAL
            if finding.records is not None:
                self.damaged_records.append(finding.records)
            yield finding

    def _walk(self) -> Iterator[Finding]:
        if not log_exists(self.folder):
            yield Finding(Severity.FATAL, "file", f"there is no log in {self.folder}")
            return
        path = self.folder / DATA_FILE_NAME
        try:
            check_data_file(path)
        except LogError as error:
            yield Finding(Severity.FATAL, "file", str(error))
            return
        unreadable = _first_unreadable(path)
        if unreadable is not None:
            yield Finding(Severity.FATAL, "file", unreadable)
            return  # a mapped page that the disk does not give would kill this process
        if not self.lock_held and is_locked(self.folder):
            yield Finding(
                Severity.NOTE, "file", "a coordinator writes this log: the structure of its pages is not checked"
            )
        else:
            problems = structure_problems(path)
            if problems is None:
                yield Finding(Severity.NOTE, "file", "the installed py-lmdb cannot check the structure of the pages")
            for problem in problems or ():
                yield Finding(
                    Severity.FATAL, "file", f"LMDB's page structure is damaged: {problem}; restore a copy of the log"
                )
            with contextlib.suppress(PageError, OSError):  # open_reader names these
                unnamed = check_pages(path)
                if unnamed is not None:
                    yield Finding(Severity.NOTE, "file", f"{said_of(unnamed)}: the next start takes it in")
            if problems:
                return  # LMDB follows page numbers without checking them: what comes next could kill this process
        try:
            reader = open_reader(self.folder, self.instance_name)
        except DamagedLogError as error:
            yield Finding(Severity.FATAL, "meta", f"{error}; the log cannot be opened")
            return
        except LogLockedError:
            raise
        except LogError as error:
            yield Finding(Severity.FATAL, "file", str(error))
            return
        with reader:
            self.identity = reader.identity
            try:
                yield from self._verify_journal(reader)
                yield from self._verify_authenticity(reader)
            except DamagedLogError as error:
                yield Finding(Severity.FATAL, "journal", f"{error}; the log cannot be opened")
                return
            yield from self._verify_high_water_mark(reader)
            yield from self._verify_checkpoints(reader)
            yield from self._verify_records(reader)
            yield from self._verify_tables(reader)

    def _verify_journal(self, reader: LogReader) -> Iterator[Finding]:
        """Raises DamagedLogError for what keeps everybody from reading."""
        mended, left_out = reader.journal_problems()
        for problem in mended:
            yield Finding(Severity.DAMAGE, "journal", f"{problem}; the next start makes that last")
        for problem in left_out:
            yield Finding(Severity.NOTE, "journal", problem)

    def _verify_authenticity(self, reader: LogReader) -> Iterator[Finding]:
        if self.keys is not None:
            try:
                reader.authenticate(self.keys)
            except (ForgedLogError, LogKeyError) as error:
                yield Finding(Severity.FATAL, "authentication", str(error))
        self.authenticity = reader.authenticity
        if self.must_be_authentic and reader.marker is None:
            yield Finding(Severity.FATAL, "authentication", not_authenticated(reader.identity.instance_name))

    def _verify_high_water_mark(self, reader: LogReader) -> Iterator[Finding]:
        high_water_mark = HighWaterMark(self.folder, reader.identity, reader.macs)
        try:
            mark = high_water_mark.read()  # before the log: a live writer may go on
        except (OSError, ValueError) as error:
            severity = Severity.NOTE if reader.macs is None else Severity.DAMAGE
            yield Finding(severity, "high-water mark", str(error))
            return
        if mark is None and reader.macs is not None and reader.last_sequence_id() >= 0:
            what = f"{high_water_mark.path} is missing: records that were removed at the end would not be missed"
            yield Finding(Severity.NOTE, "high-water mark", what)
        lacking = reader.transact(partial(high_water_mark.lacking, mark=mark))
        if lacking is not None:
            yield Finding(Severity.FATAL, "high-water mark", f"{lacking}; the log cannot be opened")

    def _verify_checkpoints(self, reader: LogReader) -> Iterator[Finding]:
        damaged: list[tuple[int, str]] = []
        checked: set[int] = set()
        while True:
            try:
                headers = reader.transact(lambda transaction, tables: list(reading.stored_headers(transaction, tables)))
            except DamagedLogError as error:
                yield Finding(Severity.FATAL, "checkpoints", str(error))
                return
            unchecked = [one for one in headers if one[0] not in checked]
            for checkpoint_id, stored in unchecked:
                checked.add(checkpoint_id)
                self.checkpoints_checked += 1
                problem = str(stored) if isinstance(stored, DamagedLogError) else self._blob_problem(reader, stored)
                if problem is not None and not reader.transact(partial(_has_header, checkpoint_id=checkpoint_id)):
                    continue  # a live writer trimmed it meanwhile
                if problem is not None or isinstance(stored, DamagedLogError):
                    damaged.append((checkpoint_id, problem or ""))
                else:
                    self.recovery_checkpoint_id = checkpoint_id
                    self.recovery_sequence_id = stored.header.sequence_id
                    self.whole_checkpoints.append((checkpoint_id, stored.header.sequence_id))
            if self.whole_checkpoints or damaged or not unchecked:
                break  # else all were trimmed meanwhile: there are newer ones
        for checkpoint_id, problem in damaged:
            place = f"checkpoint {checkpoint_id}"
            if self.recovery_checkpoint_id is None:
                yield Finding(
                    Severity.FATAL, place, f"{place} is damaged: {problem}; there is no whole one to recover from"
                )
            else:
                yield Finding(Severity.DAMAGE, place, f"{place} is damaged: {problem}; {self._recovery_start()}")
        if not headers:
            yield Finding(Severity.NOTE, "checkpoints", "there is no checkpoint yet")

    def _recovery_start(self) -> str:
        return (
            f"recovery starts from checkpoint {self.recovery_checkpoint_id} (after record {self.recovery_sequence_id})"
        )

    def _blob_problem(self, reader: LogReader, stored: StoredHeader) -> str | None:
        try:
            for _ in reader.checkpoint_chunks(stored.header.checkpoint_id):
                pass
            reader.transact(lambda transaction, tables: reading.check_outputs(transaction, tables, stored))
        except (DamagedCheckpointError, DamagedLogError, TrimmedError) as error:
            return str(error)
        return None

    def _verify_records(self, reader: LogReader) -> Iterator[Finding]:
        try:
            self.first_sequence_id, self.last_sequence_id, trimmed = reader.transact(_ends)
            cuts = reader.transact(partial(reading.meta_value, key=log_format.META_CUTS, decoder=log_format.INTS))
        except DamagedLogError as error:
            yield Finding(Severity.FATAL, "meta", str(error))
            return
        self._positions = StreamPositions(cuts or ())
        first_expected = 0 if trimmed is None else trimmed + 1
        if self.first_sequence_id != first_expected:
            yield self._record_finding(
                first_expected,
                f"records {first_expected} to {self.first_sequence_id - 1} are missing",
                self.first_sequence_id - 1,
            )
        if self.last_sequence_id < self.recovery_sequence_id:
            yield Finding(
                Severity.FATAL,
                f"record {self.last_sequence_id + 1}",
                f"the last record is {self.last_sequence_id}, but {self._recovery_start()}:"
                " records at the end are missing",
                (self.last_sequence_id + 1, self.recovery_sequence_id),
            )
        if self.recovery_checkpoint_id is None and self.first_sequence_id > 0:
            yield Finding(
                Severity.FATAL,
                "checkpoints",
                f"recovery is impossible: no whole checkpoint, and the first record is {self.first_sequence_id}",
            )
        try:
            for row in reader.records(last_sequence_id=self.last_sequence_id):
                self.records_checked += 1
                self.size_bytes_checked += len(row.value)
                if row.problem is not None:
                    yield self._record_finding(row.sequence_id, row.problem, max(row.sequence_id, row.last_sequence_id))
                    self._positions.skip(row.sequence_id)
                    continue
                try:
                    _, trailer = verify_value(row.value, row.sequence_id, reader.identity.committer_id)
                except DamagedLogError as error:
                    yield self._record_finding(row.sequence_id, str(error), row.sequence_id)
                    self._positions.skip(row.sequence_id)
                    continue
                yield from self._positions.check(row.sequence_id, trailer)
        except DamagedLogError as error:
            yield Finding(Severity.FATAL, "records", f"{error}; recovery will stop there: restore a copy of the log")

    def _record_finding(self, sequence_id: int, problem: str, last_sequence_id: int) -> Finding:
        place = f"record {sequence_id}"
        records = (sequence_id, last_sequence_id)
        if self.recovery_checkpoint_id is not None and last_sequence_id <= self.recovery_sequence_id:
            return Finding(Severity.DAMAGE, place, f"{problem}; {self._recovery_start()} and does not need it", records)
        return Finding(
            Severity.FATAL,
            place,
            f"{problem}; recovery will stop there: the state after record {sequence_id - 1} is the last that can be"
            " rebuilt",
            records,
        )

    def _verify_tables(self, reader: LogReader) -> Iterator[Finding]:
        """Every small value's CRC; ``sources`` against the trailers; the payloads of all impulses."""
        try:
            # One transaction for the last record and the table: a live writer may have gone on.
            sources, clients, last = reader.transact(
                lambda transaction, tables: (
                    reading.named_rows(transaction, tables.sources, b"sources", log_format.SOURCE),
                    _client_positions(transaction, tables),
                    reading.first_and_last_sequence_id(transaction, tables)[1],
                )
            )
            if last == self.last_sequence_id:
                positions = {name: row[2] for name, row in sources.items()}
                positions |= {caller_of(client_id): known.number for client_id, known in clients.items()}
                yield from self._positions.compare(last, positions)
        except DamagedLogError:
            yield from self._verify_rebuilding(reader)
        yield from self._verify_clients(reader)
        yield from self._verify_letters(reader)
        for place, check, meaning in (
            ("versions", _check_versions, "the log cannot be opened"),
            ("acknowledged", _check_acknowledged, "the log cannot be opened"),
            ("peers", _check_peers, "the log cannot be opened"),
            ("impulses", reading.check_impulses, "impulses that were accepted may be lost"),
            ("spilled", spilled.check, "calls that wait for a peer may be lost"),
            ("verdicts", verdicts.load_verdicts, "the log cannot be opened"),
            ("meta", _check_meta, "the log cannot be opened"),
        ):
            try:
                reader.transact(check)
            except DamagedLogError as error:
                yield Finding(Severity.FATAL, place, f"{error}; {meaning}")

    def _verify_clients(self, reader: LogReader) -> Iterator[Finding]:
        problems: list[str] = []
        try:
            reader.transact(lambda transaction, tables: reading.load_clients(transaction, tables, problems))
        except DamagedLogError as error:
            yield Finding(Severity.FATAL, "clients", f"{error}; the log cannot be opened")
        for problem in problems:
            yield Finding(Severity.DAMAGE, "replies", f"{problem}, and the client is told so if it asks again")

    def _verify_letters(self, reader: LogReader) -> Iterator[Finding]:
        for _ in reader.letters():
            pass
        for problem in reader.problems:
            yield Finding(Severity.DAMAGE, "letters", f"{problem}, and can only be dropped")
        reader.audit()
        for problem in reader.problems:
            yield Finding(Severity.DAMAGE, "audit", problem)

    def _verify_rebuilding(self, reader: LogReader) -> Iterator[Finding]:
        """Of a table of sources that is damaged: whether the next start can put it right."""
        committer_id = reader.identity.committer_id
        try:
            plan = reader.transact(lambda transaction, tables: plan_rebuilding(transaction, tables, committer_id))
        except DamagedLogError as error:
            yield Finding(Severity.FATAL, "sources", f"{error}; the log cannot be opened")
            return
        for row in plan:
            yield Finding(Severity.DAMAGE, "sources", f"{row.how}, at the next start")


def _first_unreadable(path: Path) -> str | None:
    """What the disk does not give of the file, in words."""
    offset_bytes, size_bytes = 0, _READ_SIZE_BYTES
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while True:
            try:
                data = os.pread(descriptor, size_bytes, offset_bytes)
            except OSError as error:
                if size_bytes == _READ_SIZE_BYTES_MIN:
                    problem = f"{path} cannot be read at byte {offset_bytes}: {error.strerror}"
                    return f"{problem}; restore the log from a copy"
                size_bytes = _READ_SIZE_BYTES_MIN
                continue
            if not data:
                return None
            offset_bytes += len(data)
    finally:
        os.close(descriptor)


def _ends(transaction: reading.ReadTransaction, tables: Tables) -> tuple[int, int, int | None]:
    """The first and the last record, and the last that was trimmed: as of one moment, since a live writer goes on."""
    trimmed = reading.meta_value(transaction, tables, log_format.META_TRIMMED, log_format.INT)
    return *reading.first_and_last_sequence_id(transaction, tables), trimmed


def _has_header(transaction: reading.ReadTransaction, tables: Tables, checkpoint_id: int) -> bool:
    return transaction.get(log_format.SEQUENCE_KEY.pack(checkpoint_id), db=tables.checkpoints) is not None


def _client_positions(transaction: reading.ReadTransaction, tables: Tables) -> dict[str, ClientPosition]:
    """None where the table is damaged, which is a finding of its own."""
    try:
        return reading.client_positions(transaction, tables)
    except DamagedLogError:
        return {}


def _check_versions(transaction: reading.ReadTransaction, tables: Tables) -> None:
    reading.version_starts(transaction, tables)


def _check_acknowledged(transaction: reading.ReadTransaction, tables: Tables) -> None:
    reading.acknowledged_positions(transaction, tables)


def _check_peers(transaction: reading.ReadTransaction, tables: Tables) -> None:
    reading.named_rows(transaction, tables.peers, b"peers", log_format.INT)


def _check_meta(transaction: reading.ReadTransaction, tables: Tables) -> None:
    reading.meta_value(transaction, tables, log_format.META_EPOCH, log_format.INT)
    reading.meta_value(transaction, tables, log_format.META_EXTENSIONS, log_format.INTS)
    reading.meta_value(transaction, tables, log_format.META_CUT, log_format.INT)
    reading.stream_starts(transaction, tables)
    verdicts.load_suspect(transaction, tables)


def verify_log(
    folder: str | os.PathLike[str],
    instance_name: str | None = None,
    *,
    lock_held: bool = False,
    keys: Sequence[LogKey] | None = None,
    must_be_authentic: bool = False,
) -> LogVerification:
    """A verification of the log in ``folder``: iterate its ``findings()``, then look at its figures.

    ``lock_held``: by the caller, who so knows that no coordinator writes the log. ``keys``: those that it may be
    authenticated with; None: that is not looked at. ``must_be_authentic``: one that is not is no sound one.
    """
    return LogVerification(Path(folder), instance_name, lock_held, keys, must_be_authentic)
