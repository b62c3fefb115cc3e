"""Verifies logs, and makes backups, which are verified copies of a log.

A verification checks records, tables, checkpoints, and that the positions of each incoming stream are consecutive.

A backup is a copy as of one moment, made beside the writer. A later backup copies only new data. It is a log itself:
any command reads it, and an instance can start from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field

from immortal.coordinator.core.errors import (
    DamagedCheckpointError,
    DamagedLogError,
    LogError,
    LogIdentityError,
    LogLockedError,
    LogUnavailableError,
)
from immortal.coordinator.core.interfaces import IMPULSES, ClientPosition
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log import verdicts, view_queries
from immortal.coordinator.log.authentication import ForgedLogError, LogKey, LogKeyError, not_authenticated_message
from immortal.coordinator.log.backend import Finding, Place, Severity, View
from immortal.coordinator.log.format import StoredHeader
from immortal.coordinator.log.identity import LogIdentity, first_and_last_sequence_id, meta_value, verify_value
from immortal.coordinator.log.open import Log, open_log, open_reader, place_of
from immortal.coordinator.log.reader import LogReader, TrimmedError
from immortal.coordinator.log.repair import plan_source_repair
from immortal.coordinator.log.view_queries import stored_headers
from immortal.protocol.client_frames import CLIENTS, caller_of
from immortal.protocol.trailer import BatchKind, Trailer

_CUT_OFF = "an operator cut off the records between"


class StreamPositions:
    """Checker that the positions of each stream are consecutive from record to record.

    ``cuts``: sequence IDs at which an operator cut off the log's end."""

    def __init__(self, cuts: Iterable[int] = ()) -> None:
        self._expected: dict[str, int] = {}  # by source
        self._cuts = sorted(cuts)  # cuts not passed yet
        self._cut_sources: set[str] = set()  # sources without a batch since the last cut

    def skip(self, sequence_id: int) -> None:
        """Skip an unreadable record: its messages and streams are unknown."""
        self._pass_cuts(sequence_id)
        self._expected.clear()

    def check(self, sequence_id: int, trailer: Trailer) -> Iterator[Finding]:
        """Check that each stream's positions continue in a record; position 1 begins a stream anew."""
        self._pass_cuts(sequence_id)
        place = f"record {sequence_id}"
        for batch in trailer.batches:
            if batch.kind == BatchKind.INITIAL:
                continue
            source = IMPULSES if batch.kind == BatchKind.IMPULSES else batch.name
            expected = self._expected.get(source)
            self._expected[source] = batch.last_position + 1
            behind_cut = source in self._cut_sources
            self._cut_sources.discard(source)
            if expected is None or batch.first_position == expected:
                continue
            message = f"{place}: {_label(source)} continues at position {batch.first_position}, expected {expected}"
            if behind_cut and batch.first_position > expected:
                yield Finding(Severity.NOTE, place, f"{message}: {_CUT_OFF}")
            elif batch.first_position == 1:
                yield Finding(Severity.NOTE, place, f"{message}: that stream started again")
            else:
                yield Finding(Severity.FATAL, place, f"{message}: messages were lost or executed twice")

    def compare(self, last_sequence_id: int, sources: Mapping[str, int]) -> Iterator[Finding]:
        """Compare the last position of each source in the tables with the trailers up to the last record.

        ``sources``: positions in the table ``sources``, and those of clients by their callers' names.
        """
        self._pass_cuts(last_sequence_id + 1)
        for source, expected in sorted(self._expected.items()):
            position = sources.get(source, 0)
            if position == expected - 1 or (source.startswith(CLIENTS) and source not in sources):  # forgotten
                continue
            table = "clients" if source.startswith(CLIENTS) else "sources"
            message = f"{_label(source)}: table {table!r} says {position}, the trailers end at {expected - 1}"
            if source in self._cut_sources and position >= expected:
                yield Finding(Severity.NOTE, table, f"{message}: {_CUT_OFF}")
            elif position == 0 and source in sources:
                yield Finding(Severity.NOTE, table, f"{message}: the stream was reset")
            else:
                yield Finding(Severity.FATAL, table, f"{message}: messages would be lost or executed twice")

    def _pass_cuts(self, sequence_id: int) -> None:
        """Note the cuts up to a record: each stream may jump ahead once, as the removed messages count as received."""
        while self._cuts and self._cuts[0] <= sequence_id:
            self._cuts.pop(0)
            self._cut_sources = set(self._expected)


def _label(source: str) -> str:
    if source == IMPULSES:
        return "the impulses to oneself"
    if source.startswith(CLIENTS):
        return f"the requests of client {source[len(CLIENTS) :]!r}"
    return f"the stream from {source!r}" if source else "the stream from oneself"


class LogVerification(Struct):
    """Verification of a log: iterate :meth:`findings` to its end, then read the figures."""

    log: Place
    instance_name: str | None = None
    lock_held: bool = False  # by the caller, so no coordinator writes the log
    keys: Sequence[LogKey] | None = None  # keys to try; None: authenticity is not checked
    must_be_authentic: bool = False  # the log was authenticated before
    authenticity: str = ""  # whether the log is authentic, as a text for people
    identity: LogIdentity | None = None
    records_checked: int = 0
    size_bytes_checked: int = 0
    checkpoints_checked: int = 0
    first_sequence_id: int = 0
    last_sequence_id: int = -1
    recovery_checkpoint_id: int | None = None  # the newest undamaged one: recovery starts from it
    recovery_sequence_id: int = -1
    whole_checkpoints: list[tuple[int, int]] = field(default_factory=list)  # (ID, sequence ID), oldest first
    damaged_records: list[tuple[int, int]] = field(default_factory=list)  # (first, last) damaged or missing record
    damaged: int = 0  # number of findings with this severity
    fatal: int = 0
    _positions: StreamPositions = field(default_factory=StreamPositions)

    @property
    def is_sound(self) -> bool:
        """True if only notes were found. Valid once the findings were iterated."""
        return not (self.damaged or self.fatal)

    def first_damage(self, first_sequence_id: int) -> int | None:
        """Return the first damaged or missing record from ``first_sequence_id`` on. Valid like :attr:`is_sound`."""
        return min(
            (max(first, first_sequence_id) for first, last in self.damaged_records if last >= first_sequence_id),
            default=None,
        )

    def findings(self) -> Iterator[Finding]:
        """Yield each finding when it is found.

        Raises LogLockedError if the log is open in this process, LogKeyError without the key that encrypts it,
        LogUnavailableError if this user may not read it.
        """
        for finding in self._walk():
            self.damaged += finding.severity is Severity.DAMAGE
            self.fatal += finding.severity is Severity.FATAL
            if finding.records is not None:
                self.damaged_records.append(finding.records)
            yield finding

    def _walk(self) -> Iterator[Finding]:
        place = self.log
        if not place.exists():
            yield Finding(Severity.FATAL, "file", f"there is no log in {place.label}")
            return
        stops = False
        for finding in place.findings(lock_held=self.lock_held):
            stops = stops or finding.severity is Severity.FATAL
            yield finding
        if stops:
            return  # opening it could crash this process
        try:
            reader = open_reader(self.log, self.instance_name)
        except DamagedLogError as error:
            yield Finding(Severity.FATAL, "meta", f"{error}; the log cannot be opened")
            return
        except (LogLockedError, LogKeyError, LogUnavailableError, LogIdentityError):
            raise
        except LogError as error:
            yield Finding(Severity.FATAL, "file", str(error))
            return
        with reader:
            self.identity = reader.identity
            try:
                yield from self._verify_authenticity(reader)
                yield from reader.findings()
            except DamagedLogError as error:
                yield Finding(Severity.FATAL, "journal", f"{error}; the log cannot be opened")
                return
            yield from self._verify_checkpoints(reader)
            yield from self._verify_records(reader)
            yield from self._verify_tables(reader)

    def _verify_authenticity(self, reader: LogReader) -> Iterator[Finding]:
        if self.keys is not None:
            try:
                reader.authenticate(self.keys)
            except (ForgedLogError, LogKeyError) as error:
                yield Finding(Severity.FATAL, "authentication", str(error))
        self.authenticity = reader.authenticity
        if self.must_be_authentic and reader.marker is None:
            yield Finding(Severity.FATAL, "authentication", not_authenticated_message(reader.identity.instance_name))

    def _verify_checkpoints(self, reader: LogReader) -> Iterator[Finding]:
        damaged: list[tuple[int, str]] = []
        checked: set[int] = set()
        while True:
            try:
                with reader.view() as view:
                    headers = list(view_queries.stored_headers(view))
            except DamagedLogError as error:
                yield Finding(Severity.FATAL, "checkpoints", str(error))
                return
            unchecked = [one for one in headers if one[0] not in checked]
            for checkpoint_id, stored in unchecked:
                checked.add(checkpoint_id)
                self.checkpoints_checked += 1
                problem = str(stored) if isinstance(stored, DamagedLogError) else self._blob_problem(reader, stored)
                if problem is not None and not _has_header(reader, checkpoint_id):
                    continue  # a live writer has trimmed it
                if problem is not None or isinstance(stored, DamagedLogError):
                    damaged.append((checkpoint_id, problem or ""))
                else:
                    self.recovery_checkpoint_id = checkpoint_id
                    self.recovery_sequence_id = stored.header.sequence_id
                    self.whole_checkpoints.append((checkpoint_id, stored.header.sequence_id))
            if self.whole_checkpoints or damaged or not unchecked:
                break  # otherwise all were trimmed, and newer ones exist
        for checkpoint_id, problem in damaged:
            place = f"checkpoint {checkpoint_id}"
            severity, then = Severity.DAMAGE, self._recovery_start()
            if self.recovery_checkpoint_id is None:
                severity, then = Severity.FATAL, "there is no whole one to recover from"
            yield Finding(severity, place, f"{place} is damaged: {problem}; {then}")
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
            with reader.view() as view:
                view_queries.check_outputs(view, stored)
        except (DamagedCheckpointError, DamagedLogError, TrimmedError) as error:
            return str(error)
        return None

    def _verify_records(self, reader: LogReader) -> Iterator[Finding]:
        try:
            with reader.view() as view:  # a single view, since a live writer continues
                self.first_sequence_id, self.last_sequence_id = first_and_last_sequence_id(view)
                trimmed = meta_value(view, log_format.META_TRIMMED, log_format.INT)
                cuts = meta_value(view, log_format.META_CUTS, log_format.INTS)
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
        """Check the CRC of each small value, ``sources`` against the trailers, and the payloads of all impulses."""
        try:
            with reader.view() as view:  # one view for the last record and the tables, since a live writer continues
                sources = view_queries.named_rows(view, "sources", log_format.SOURCE)
                clients = _client_positions(view)
                last = first_and_last_sequence_id(view)[1]
            if last == self.last_sequence_id:
                positions = {name: row[2] for name, row in sources.items()}
                positions |= {caller_of(client_id): known.number for client_id, known in clients.items()}
                yield from self._positions.compare(last, positions)
        except DamagedLogError:
            yield from self._verify_rebuilding(reader)
        yield from self._verify_clients(reader)
        yield from self._verify_letters(reader)
        for place, check, meaning in (
            ("versions", view_queries.version_starts, "the log cannot be opened"),
            ("acknowledged", view_queries.acknowledged_positions, "the log cannot be opened"),
            ("peers", lambda view: view_queries.named_rows(view, "peers", log_format.INT), "the log cannot be opened"),
            ("impulses", view_queries.check_impulses, "impulses that were accepted may be lost"),
            ("spilled", view_queries.check, "calls that wait for a peer may be lost"),
            ("verdicts", verdicts.load_verdicts, "the log cannot be opened"),
            ("meta", _check_meta, "the log cannot be opened"),
        ):
            try:
                with reader.view() as view:
                    check(view)
            except DamagedLogError as error:
                yield Finding(Severity.FATAL, place, f"{error}; {meaning}")

    def _verify_clients(self, reader: LogReader) -> Iterator[Finding]:
        problems: list[str] = []
        try:
            with reader.view() as view:
                view_queries.load_clients(view, problems)
        except DamagedLogError as error:
            yield Finding(Severity.FATAL, "clients", f"{error}; the log cannot be opened")
        for problem in problems:
            yield Finding(Severity.DAMAGE, "replies", f"{problem}, and a client that asks for it gets an error")

    def _verify_letters(self, reader: LogReader) -> Iterator[Finding]:
        for _ in reader.letters():
            pass
        for problem in reader.problems:
            yield Finding(Severity.DAMAGE, "letters", f"{problem}, and can only be dropped")
        reader.audit()
        for problem in reader.problems:
            yield Finding(Severity.DAMAGE, "audit", problem)

    def _verify_rebuilding(self, reader: LogReader) -> Iterator[Finding]:
        """Report whether the next start can repair a damaged table of sources."""
        committer_id = reader.identity.committer_id
        try:
            with reader.view() as view:
                plan = plan_source_repair(view, committer_id)
        except DamagedLogError as error:
            yield Finding(Severity.FATAL, "sources", f"{error}; the log cannot be opened")
            return
        for row in plan:
            yield Finding(Severity.DAMAGE, "sources", f"{row.how}, at the next start")


def _has_header(reader: LogReader, checkpoint_id: int) -> bool:
    with reader.view() as view:
        return view.get("checkpoints", log_format.SEQUENCE_KEY.pack(checkpoint_id)) is not None


def _client_positions(view: View) -> dict[str, ClientPosition]:
    """Return clients' positions; empty if the table is damaged, which is a finding of its own."""
    try:
        return view_queries.client_positions(view)
    except DamagedLogError:
        return {}


def _check_meta(view: View) -> None:
    meta_value(view, log_format.META_EPOCH, log_format.INT)
    meta_value(view, log_format.META_EXTENSIONS, log_format.INTS)
    meta_value(view, log_format.META_CUT, log_format.INT)
    view_queries.stream_starts(view)
    verdicts.load_suspect(view)


def verify_log(
    log: Log,
    instance_name: str | None = None,
    *,
    lock_held: bool = False,
    keys: Sequence[LogKey] | None = None,
    must_be_authentic: bool = False,
) -> LogVerification:
    """Return a verification of ``log``: iterate its ``findings()``, then read its figures.

    ``lock_held``: the caller holds the lock, so no coordinator writes the log. ``keys``: possible keys of the log;
    None: its authenticity is not checked. ``must_be_authentic``: a log without authentication is a fatal finding.
    """
    return LogVerification(place_of(log), instance_name, lock_held, keys, must_be_authentic)


class Backup(Struct, frozen=True):
    first_sequence_id: int
    last_sequence_id: int
    records_copied: int
    checkpoints: int


class BackupError(LogError):
    """Raised if no backup was made; an existing one is unchanged."""


def back_up(log: Log, instance_name: str, target: Log, keys: Sequence[LogKey] | None = None) -> Backup:
    """Update the backup ``target``, at first a new or empty folder, to the last commit of the log.

    ``keys``: possible keys of the log; the backup is authenticated with the same key. Log and backup are verified byte
    by byte. A target with an encryption key gets an encrypted copy of a log that is not encrypted. Raises BackupError,
    LogError, OSError.
    """
    _require_undamaged(verify_log(log, instance_name, keys=keys), f"the log of {instance_name!r}")
    place = place_of(target)
    encrypts = bool(place.encryption_key)
    place.encryption_key = place.encryption_key or place_of(log).encryption_key
    with open_reader(log, instance_name, keys=keys, check=False) as reader:
        mac = None if reader.macs is None else reader.macs.mark
        with reader.view() as view:
            first, last = first_and_last_sequence_id(view)
            checkpoints_count = len(list(stored_headers(view)))
            try:
                if encrypts and not reader.identity.is_encrypted:
                    if place.exists():
                        raise ValueError(
                            f"there is a log in {place.label} already: an encrypted copy needs an empty place"
                        )
                    from immortal.coordinator.log.encryption import EncryptingView

                    encrypted = EncryptingView(view, reader.identity, place.encryption_key)
                    copied = place.copy(encrypted, reader.identity, None)
                else:
                    encrypts = False
                    copied = place.copy(view.stored, reader.identity, mac)
            except ValueError as error:
                raise BackupError(str(error)) from None
    if encrypts and mac is not None:
        open_log(place, instance_name, keys=keys or (), adopt=True).close()
    _require_undamaged(verify_log(place, instance_name, keys=keys), f"the backup in {place.label}")
    return Backup(first, last, copied, checkpoints_count)


def _require_undamaged(verification: LogVerification, subject: str) -> None:
    wrong = [str(finding.message) for finding in verification.findings() if finding.severity is not Severity.NOTE]
    if wrong:
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise BackupError(f"{subject} is damaged: {wrong[0]}{others}")
