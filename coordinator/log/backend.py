"""Interface between a log and the storage that keeps it: tables of rows, read as a snapshot, changed atomically.

A row is a key and a value in a table, all bytes. rows.py and view_queries.py give the bytes their meaning; this module
does not know it. The keys of the table ``records`` are sequence IDs, packed by SEQUENCE_KEY. Records follow one another
without a gap. They are only removed at the beginning or, by an operator's cut, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from msgspec import Struct

from immortal.coordinator.core.errors import LogError, fail
from immortal.coordinator.core.interfaces import LogSpace, Standby
from immortal.coordinator.fault_points import FaultPoint
from immortal.coordinator.log.format import CHUNK_KEY, SEQUENCE_KEY
from immortal.coordinator.log.identity import LogIdentity
from immortal.protocol.varint import Readable

Row: TypeAlias = tuple[str, bytes, Readable]  # table, key, value
Mac: TypeAlias = Callable[[bytes], bytes]

ENCRYPTION_KEY_VARIABLE = "IMMORTAL_ENCRYPTION_KEY"
"""Environment variable with the source of the key of logs that are read by their folder or URL alone."""


class Span(NamedTuple):
    """Rows of ``table`` with ``first`` <= key < ``end``; None: to the table's end."""

    table: str
    first: bytes = b""
    end: bytes | None = None

    @classmethod
    def of_key(cls, table: str, key: bytes) -> Span:
        return cls(table, key, key + b"\0")

    @classmethod
    def of_checkpoint(cls, table: str, checkpoint_id: int) -> Span:
        """Return the rows of one checkpoint: of its chunks, or of its outputs."""
        return cls(table, CHUNK_KEY.pack(checkpoint_id, 0), CHUNK_KEY.pack(checkpoint_id + 1, 0))

    @property
    def is_one(self) -> bool:
        return self.end == self.first + b"\0"

    def has(self, key: bytes) -> bool:
        return self.first <= key and (self.end is None or key < self.end)

    def rows(self, view: View) -> Iterator[tuple[bytes, Readable]]:
        """Yield the rows of the span in ``view``, ordered by key."""
        for key_view, value in view.scan(self.table, self.first):
            key = bytes(key_view)
            if self.end is not None and key >= self.end:
                return
            yield key, value


class Append(Struct):
    """Changes that become durable together or not at all: first deletes, then records and puts.

    ``expected_last_sequence_id``: the last record that the writer knows. ``fence``: its term. A backend that two
    processes could write compares both with its own in the same step, and raises FencedError if they differ.
    """

    expected_last_sequence_id: int
    fence: int = 0
    records: Sequence[tuple[int, Readable]] = ()  # (sequence ID, value), after the last one and without a gap
    puts: Iterable[Row] = ()  # each key once; it can be iterated several times
    deletes: Sequence[Span] = ()
    points: Sequence[FaultPoint] = (FaultPoint.DURING_COMMIT,)  # reached when all is put and nothing is durable


class TableSize(NamedTuple):
    """Approximate size of a table while its writer runs, wherever its rows are stored."""

    size_bytes: int
    rows_count: int


class View(Protocol):
    """Snapshot of a log. Its results can be the backend's memory: copy what must outlive the view."""

    def get(self, table: str, key: bytes) -> Readable | None: ...

    def scan(self, table: str, first: bytes = b"") -> Iterator[tuple[Readable, Readable]]:
        """Yield the rows from the key ``first`` on, ordered by key; none if the log has no such table."""

    def scan_back(self, table: str, last: bytes | None = None) -> Iterator[tuple[Readable, Readable]]:
        """Yield the rows from the key ``last`` (None: the last one) back to the first."""

    def sizes(self, table: str, first: bytes = b"") -> Iterator[tuple[Readable, int]]:
        """Yield the keys like :meth:`scan`, each with its value's size in bytes.

        The value itself is not read, since it can be far away.
        """
        return ((key, len(value)) for key, value in self.scan(table, first))

    def size(self, table: str) -> TableSize: ...

    @property
    def stored(self) -> View:
        """The same snapshot with its values as they are stored: encrypted, if the log is."""
        return self


class ReadBackend(Protocol):
    """Log open for reading, beside its writer. For one thread."""

    identity: LogIdentity
    label: str
    """Name of the log for messages, such as its folder."""

    def view(self, *, copies: bool = False) -> AbstractContextManager[View]:
        """Open a snapshot of the log as it is now. The writer can't reuse freed space meanwhile, so close it soon.

        ``copies``: its results are copies, which is faster if values are small. Raises DamagedLogError if the backend
        can't read.
        """

    def is_live(self) -> bool:
        """True while a process writes this log."""
        return False

    def findings(self, mac: Mac | None) -> Iterator[Finding]:
        """Find damage in the backend's data beside the rows. ``mac``: as in :meth:`Backend.check_end`.

        Raises DamagedLogError for damage that makes the log unreadable.
        """
        return iter(())

    def count_bytes_touched(self, size_bytes: int) -> None:
        """Report that ``size_bytes`` of a view were read, so that the backend can free mapped memory in time."""
        return

    def release(self) -> None:
        """Free the memory that reading took. Call it before a pause in reading."""
        return

    def close(self) -> None: ...


class Backend(ReadBackend, Protocol):
    """Log open for writing. One thread writes at a time, others can read beside it.

    After LogFullError, LogSyncError or FencedError every call except :meth:`close` and :meth:`close_uncleanly` raises
    it again: it is unknown what is durable until the log is opened again.
    """

    failure: LogError | None = None
    """Error after which it accepts no further writes."""
    is_remote: bool = False
    """True if appends and reads wait for another machine: too slow for the event loop."""
    appends_max: int = 1
    """Limit of small appends in flight.

    More than 1: begin_append, finish_oldest, poll_target and resolve work.
    """
    fence: int
    """The writer's term, for its appends; 0 if a lock alone excludes other writers."""
    repairs: list[str]
    """Messages about damage that was repaired when the log was opened."""
    synced: Callable[[float], None] | None = None
    """Callback that gets the duration of each sync in seconds."""
    must_append: bool = False
    """True if the backend has rows of its own that the next :meth:`append` adds to its own."""
    problem: str = ""
    """Message about a current limitation of the backend; "": none. Any thread."""
    standbys: Sequence[Standby] = ()
    """Processes that follow the log, updated from time to time. Any thread."""
    successor: str = ""
    """Standby for which :meth:`release_lease` reserves the log for a moment; "": the first process to ask gets it."""

    @property
    def fenced_by(self) -> LogError | None:
        """Error if another process has taken the log over, as seen without an append; otherwise None. Any thread."""
        return None

    def require_write_lease(self) -> None:
        """Check that this process still holds the log. A row can look damaged because a new holder has trimmed it.

        Raises FencedError if it does not, LogUnavailableError if that is unknown.
        """
        return

    def raise_failure(self) -> None:
        """Raise :attr:`failure` again, if there is one."""
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args)

    def append(self, append: Append) -> None:
        """Make the append durable as a whole. Raises LogFullError, LogSyncError, FencedError.

        Raises LogUnavailableError if the outcome is unknown: call :meth:`resolve` next.
        """

    def begin_append(self, append: Append) -> bool:
        """Send an append after those in flight, without waiting.

        False: it can't be sent this way, so use :meth:`append` once the others are finished. Raises like
        :meth:`append`; if the outcome is unknown, the append counts as begun.
        """
        return False

    def finish_oldest(self, *, wait: bool) -> bool:
        """Finish the oldest append in flight; return True if it is durable now. ``wait``: block until it is.

        Raises like :meth:`append`, about that append; later ones share its outcome, known or unknown.
        """
        fail("nothing was begun")

    def poll_target(self) -> tuple[int, int]:
        """Return a file descriptor and events of select.poll that tell when to call :meth:`finish_oldest`."""
        fail("nothing was begun")

    def resolve(self) -> int:
        """Find out how many of the appends without an answer are durable; the others never will be.

        These are the append that raised LogUnavailableError and those in flight with it. They become durable oldest
        first. Returns 0 if there are none. The fence can change. Raises LogUnavailableError, FencedError, LogError.
        """
        return 0

    def space(self) -> LogSpace: ...

    def renew_key(self) -> None:
        """Begin a new data key with the next append, which wraps all by the operator's present key. Raises LogError."""
        raise LogError(f"the log {self.label} is not encrypted")

    def check_end(self, mac: Mac | None) -> list[str]:
        """Check that all committed data is there, if the backend can tell. Return messages about the check itself.

        ``mac``: computes MACs with the log's key, or None; data beside the rows is checked and written with it. Raises
        DamagedLogError.
        """
        return []

    def mark_end(self, mac: Mac | None) -> None:
        """Note that the log has another key from here on, or none: its current end is valid."""
        return

    def export_cut_rows(self, name: str, rows: Iterable[Row]) -> Path:
        """Write ``rows``, ordered by table and key, into a separate log; return its path."""
        raise only_in_folders(self.label, "cut")

    def request_standby_checkpoint(self, name: str, checkpoint_id: int, epoch: int) -> None:
        """Ask the standby ``name`` for that checkpoint. Answers to earlier requests are then rejected.

        Raises LogUnavailableError, LogError; so do :meth:`cancel_standby_request` and :meth:`poll_standby_offer`.
        """
        raise LogError(f"nobody else writes chunks into {self.label}")

    def cancel_standby_request(self) -> None:
        """Cancel the request for a standby's checkpoint, if there is one."""
        return

    def poll_standby_offer(self) -> bytes | None:
        """Return the latest standby's encoded answer; None: there is none yet."""
        return None

    def flush(self) -> None:
        """Move durable data from where appends put it to its final place, such as from a journal to the tables."""
        return

    def release_lease(self) -> None:
        """Release the write lease before :meth:`close`, if the backend can. No append follows."""
        return

    def close_uncleanly(self) -> None:
        """Close the log like the end of the process would. Does nothing if it is already closed."""
        self.close()


class Place(Protocol):
    """Location of a log that exists or can be created.

    Each backend has one class; :mod:`coordinator.log.open` chooses it by the URL's scheme.
    """

    scheme: str
    location: str
    """The part of the URL after the scheme."""
    is_shared: bool = False
    """True if other machines can reach it: a process that finds it held becomes a follower."""
    encryption_key: str = ""
    """Source of the key that encrypts the log (:mod:`immortal.coordinator.log.encryption`); "": none is given."""
    sequence_id_required_min: int = -1
    """Record that the log once had: a shared log that ends before it is not opened for writing."""

    def __init__(self, location: str) -> None:
        self.location = location

    @property
    def label(self) -> str:
        """Name of the log for messages."""
        return f"{self.scheme}:{self.location}"

    @property
    def key(self) -> tuple[str, str]:
        """Key that is equal for equal logs."""
        return self.scheme, self.location

    def exists(self) -> bool:
        """Return True if something is stored there. To open it tells whether it is one of our logs."""

    def instances(self) -> list[str] | None:
        """Return the instances with logs in a place without a name, such as a database; None: it is one log.

        Raises LogError.
        """
        return None

    def create(self, identity: LogIdentity, rows: Sequence[Row], options: Options) -> Backend:
        """Create a log with ``rows``, whole or not at all. Raises LogFormatError, LogFullError."""

    def open(self, instance_name: str, options: Options) -> Backend:
        """Open the log for writing.

        Raises LogFormatError, LogLockedError, LogIdentityError, DamagedLogError, LogError.
        """

    def open_reader(self, instance_name: str | None) -> ReadBackend:
        """Open the log for reading. Raises like :meth:`open`."""

    def is_live(self) -> bool:
        """Return True while a process writes this log, as far as the backend can tell."""
        return False

    def holder(self) -> str | None:
        """Return a description of the process that writes the log; None: none does, or the backend can't tell."""
        return "another process" if self.is_live() else None

    def follow(self, options: Options, nudge: Callable[[], None]) -> StandbyRegistration | None:
        """Register as a standby. ``nudge`` is called, from any thread, when the writer may have changed.

        Returns None if the backend has no such registration: then the caller polls.
        """
        return None

    def watch(self) -> EndpointWatch | None:
        """Return a watch on the endpoint where peers reach the writer; None if the backend can't tell."""
        return None

    def is_followed(self) -> bool:
        """Return True if a standby could take the log over at once, as far as the backend can tell. Raises LogError."""
        return False

    def endpoint(self) -> str | None:
        """Return the endpoint where peers reach the writer; None: none, or the backend can't tell. Raises LogError."""
        return None

    def version(self) -> object:
        """Return a value that changes when another log replaces this one; None if the backend can't tell."""
        return None

    def remove(self) -> None:
        """Remove the log for good. Raises LogError, OSError."""
        raise only_in_folders(self.label, "removed from here")

    def durability(self) -> list[str]:
        """Return the losses that failures of one machine would cause, one sentence each."""
        return ["the machine crashes: nothing is lost", "its disk is lost: the log is lost since its last backup"]

    def migrate(self) -> str:
        """Migrate the storage to this program's version; return a message, empty if all are read. Raises LogError."""
        return ""

    def restrict(self, role: str, instances: Sequence[str], *, allowed: bool) -> None:
        """Let ``role`` of the database read and write only ``instances`` (not ``allowed``: not even these).

        Raises LogError.
        """
        raise LogError(f"{self.label} has no roles: a log or registry in PostgreSQL was expected")

    def restrict_access(self) -> str | None:
        """Remove other users' access; return a message if they had any."""
        return None

    def findings(self, *, lock_held: bool) -> Iterator[Finding]:
        """Find damage in a log's files before it is opened. ``lock_held``: by the caller, see :meth:`lock`."""
        return iter(())

    def lock(self) -> Callable[[], None]:
        """Exclude other processes that write the log, until the returned function is called. Raises LogLockedError."""
        raise only_in_folders(self.label, "cut")

    def open_locked(self, instance_name: str) -> Backend:
        """Open for writing a log that this process has locked, see :meth:`lock`. Raises like :meth:`open`."""
        raise only_in_folders(self.label, "cut")

    def copy(self, source: View, identity: LogIdentity, mac: Mac | None) -> int:
        """Copy ``source`` here, over an earlier copy if there is one; return the number of records copied.

        Raises ValueError if something else is here.
        """
        raise LogError(f"the log {self.label} can't be made as a copy: in a folder or in PostgreSQL it can")


class StandbyCheckpointRequest(Struct, frozen=True):
    """Request of the writer with this ``fence`` for a standby's checkpoint; ``epoch``: the core's."""

    fence: int
    checkpoint_id: int
    epoch: int


class StandbyRegistration(Protocol):
    """Registration of a follower with the writer. For one thread."""

    request: StandbyCheckpointRequest | None
    """The latest known request of the writer for a checkpoint."""

    def put_chunk(self, request: StandbyCheckpointRequest, index: int, value: bytes) -> None:
        """Store a sealed chunk under its own new key. Raises LogError if the request was cancelled."""

    def offer(self, request: StandbyCheckpointRequest, offer: bytes) -> None:
        """Tell the writer that all chunks are written. Raises LogError."""

    def report_ready(self, *, is_ready: bool) -> None:
        """Report whether this standby's app is up to date, so that it could take over at once."""

    def close(self, wait_s: float) -> None:
        """Unregister, and wait for that at most ``wait_s``."""


class EndpointWatch(Protocol):
    """Watch on the endpoint of an instance. Any thread."""

    endpoint: str | None
    """Endpoint of the latest known writer; None: not known yet."""

    def close(self, wait_s: float) -> None: ...


LEASE_S = 3.0


class Options(Struct, frozen=True):
    """Options of a backend.

    ``map_size_bytes``: initial size of the log; ``map_size_bytes_max``: its limit. None: the backend's. ``lease_s``:
    how long a silent writer keeps a log that other machines reach. ``endpoint``: where peers reach this process.
    ``checkpoints_to``: the URL of a store for large checkpoints; "": they are in the log.
    """

    map_size_bytes: int | None = None
    map_size_bytes_max: int | None = None
    allow_data_loss: bool = False  # open the log even if a crash could lose acknowledged input
    lease_s: float = LEASE_S
    endpoint: str = ""
    checkpoints_to: str = ""


def only_in_folders(label: str, action: str) -> LogError:
    return LogError(f"the log {label} can't be {action}: only a log in a folder (lmdb:) can")


# Rows in groups: appends, objects and transactions have a limited size.


AnyRow = TypeVar("AnyRow", bound=tuple[Any, ...])


def batches(
    rows: Iterable[AnyRow], size_bytes_max: int, rows_max: int | None = None, *, counts: int = 1
) -> Iterator[list[AnyRow]]:
    """Split rows into lists of limited size, by the rows' last ``counts`` fields, and of limited length."""
    batch: list[AnyRow] = []
    size_bytes = 0
    for row in rows:
        row_size_bytes = sum(map(len, row[-counts:]))
        if batch and (size_bytes + row_size_bytes > size_bytes_max or len(batch) == rows_max):
            yield batch
            batch, size_bytes = [], 0
        batch.append(row)
        size_bytes += row_size_bytes
    if batch:
        yield batch


# Findings of a verification.


class Severity(Enum):
    NOTE = "note"  # nothing is lost
    DAMAGE = "damage"  # data differs from what was written, and recovery does not need it
    FATAL = "fatal"  # recovery will stop there, or go wrong


class Finding(Struct, frozen=True):
    """Problem found in a log. ``message`` names it, its place and its consequence."""

    severity: Severity
    place: str  # "file", "meta", "checkpoint 3", "record 812", "sources", ...
    message: str
    records: tuple[int, int] | None = None  # the first and last damaged or missing record


# Limits of one removal step: a commit can wait for it.


STEP_ROWS_MAX = 1024  # a millisecond or two
STEP_SIZE_BYTES_MAX = 16 << 20


class RemovalBudget(Struct):
    """Rows and bytes that one step can still remove; the row that exceeds the limit is removed too."""

    rows_left: int
    bytes_left: int

    @classmethod
    def step(cls) -> RemovalBudget:
        return cls(STEP_ROWS_MAX, STEP_SIZE_BYTES_MAX)

    @property
    def exhausted(self) -> bool:
        return self.rows_left <= 0 or self.bytes_left <= 0

    def spend(self, size_bytes: int) -> None:
        self.rows_left -= 1
        self.bytes_left -= size_bytes

    def spend_span(self, view: View, table: str, end: bytes, first: bytes = b"") -> list[Span]:
        """Return the span of rows of ``table`` before the key ``end``, as far as the budget lasts, or no span."""
        last_key = None
        for key_view, size_bytes in view.sizes(table, first):
            key = bytes(key_view)
            if self.exhausted or key >= end:
                break
            self.spend(size_bytes)
            last_key = key
        if last_key is None:
            return []
        # Spans of records end at an ID, for code that needs to know the last removed record.
        stop = SEQUENCE_KEY.pack(SEQUENCE_KEY.unpack(last_key)[0] + 1) if table == "records" else last_key + b"\0"
        return [Span(table, first, stop)]
