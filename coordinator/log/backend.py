"""What a log needs of the place that keeps it: tables of rows, read at one moment, changed whole or not at all.

A row is a key and a value of a table, all bytes; what they mean is said by rows.py and reading.py, and nothing of it
here. The table ``records`` has the sequence IDs as its keys, SEQUENCE_KEY each: records follow one another without a
gap, and are only ever removed at the beginning or, by hand, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from msgspec import Struct

from immortal.coordinator.core.errors import LogError, fail
from immortal.coordinator.core.interfaces import Standby
from immortal.coordinator.fault_points import FaultPoint
from immortal.coordinator.log.format import SEQUENCE_KEY
from immortal.coordinator.log.identity import LogIdentity
from immortal.protocol.varint import Readable

LEASE_S = 3.0
Row: TypeAlias = tuple[str, bytes, Readable]  # table, key, value
Mac: TypeAlias = Callable[[bytes], bytes]


class Span(NamedTuple):
    """The rows of ``table`` with ``first`` <= key < ``end``; None: to the table's end."""

    table: str
    first: bytes = b""
    end: bytes | None = None

    @classmethod
    def of_one(cls, table: str, key: bytes) -> Span:
        return cls(table, key, key + b"\0")

    @property
    def is_one(self) -> bool:
        return self.end == self.first + b"\0"

    def has(self, key: bytes) -> bool:
        return self.first <= key and (self.end is None or key < self.end)


class Append(Struct):
    """What becomes durable in one step, or not at all: rows go, then records and rows come.

    ``expected_last_sequence_id``: the last record that the writer knows of. ``fence``: its term. A backend that two
    processes could write compares both with what it has, in the step itself, and raises FencedError where they differ.
    """

    expected_last_sequence_id: int
    fence: int = 0
    records: Sequence[tuple[int, Readable]] = ()  # (sequence ID, value), behind the last one and without a gap
    puts: Iterable[Row] = ()  # each key once; it may be gone through more than once
    deletes: Sequence[Span] = ()
    points: Sequence[FaultPoint] = (FaultPoint.DURING_COMMIT,)  # reached when all is put and nothing is durable


class TableSize(NamedTuple):
    """About: of a table beside its writer. What its rows take in their file, or elsewhere."""

    size_bytes: int
    rows_count: int


class Space(NamedTuple):
    used_bytes: int  # by the log's rows; what is free for others of them again does not count
    free_bytes: int  # of what they lie on


class View(Protocol):
    """A log at one moment. What it gives may be memory of the backend's own: what is to stay is copied."""

    def get(self, table: str, key: bytes) -> Readable | None: ...

    def scan(self, table: str, first: bytes = b"") -> Iterator[tuple[Readable, Readable]]:
        """The rows from the key ``first`` on, in the order of their keys. None where the log has no such table."""

    def scan_back(self, table: str, last: bytes | None = None) -> Iterator[tuple[Readable, Readable]]:
        """The rows from the key ``last`` (None: the last one) back to the first."""

    def sizes(self, table: str, first: bytes = b"") -> Iterator[tuple[Readable, int]]:
        """As :meth:`scan`, with the size in bytes of each value: for who does not need it, as it may be far away."""
        return ((key, len(value)) for key, value in self.scan(table, first))

    def size(self, table: str) -> TableSize: ...


class ReadBackend(Protocol):
    """A log open for reading, beside its writer. For one thread."""

    identity: LogIdentity
    where: str
    """How people know it: a folder, say."""

    def view(self, *, copies: bool = False) -> AbstractContextManager[View]:
        """As the log is now. It holds the writer back from nothing but room: it is not to be kept open.

        ``copies``: what it gives is memory of its own, which is faster where values are small.
        Raises DamagedLogError where the backend cannot read.
        """

    def is_live(self) -> bool:
        """Whether a process writes it now."""
        return False

    def findings(self, mac: Mac | None) -> Iterator[Finding]:
        """What is wrong with what the backend keeps beside the rows. ``mac``: as in :meth:`Backend.check_end`.

        Raises DamagedLogError for what keeps everybody from reading.
        """
        return iter(())

    def count_bytes_touched(self, size_bytes: int) -> None:
        """So much of what views gave was looked at: memory may be given back now and then."""
        return

    def release(self) -> None:
        """Nothing is read for a while: give back the memory that reading took."""
        return

    def close(self) -> None: ...


class Backend(ReadBackend, Protocol):
    """A log open for writing. One thread writes at a time, others may read beside it.

    After a LogFullError, LogSyncError or FencedError all but :meth:`close` and :meth:`abandon` raises it again: what is
    durable is unknown until the log is opened anew.
    """

    failure: LogError | None = None
    """Why it accepts nothing more."""
    is_remote: bool = False
    """An append or a look may take as long as another machine likes: not for a loop that others wait for."""
    appends_max: int = 1
    """As many small appends are worth being under way at once. More than one: :meth:`begin` and what goes with it."""
    fence: int
    """The writer's term, for its appends; 0 where a lock alone keeps others off."""
    mended: list[str]
    """What was found damaged when it was opened and was put right, in words."""
    synced: Callable[[float], None] | None = None
    """Told how many seconds each write took of the disk."""
    problem: str = ""
    """What it can't do as it should, in words; "": it can. Any thread."""
    standbys: Sequence[Standby] = ()
    """Who follows the log, as of a moment ago. Any thread."""
    successor: str = ""
    """The standby for whom :meth:`give_up` keeps the log for a moment; "": it is whoever comes first."""

    @property
    def lost(self) -> LogError | None:
        """Set where another one has taken the log over since, as was seen without an append. Any thread."""
        return None

    def require_write_lease(self) -> None:
        """For who finds the log damaged: what is missing may have been trimmed by another one, who has taken it since.

        Raises FencedError then, LogUnavailableError where nobody can tell.
        """
        return

    def raise_failure(self) -> None:
        """Raises :attr:`failure`, if there is one."""
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args)

    def append(self, append: Append) -> None:
        """Make it durable, whole. Raises LogFullError, LogSyncError, FencedError.

        Raises LogUnavailableError where nobody knows whether it was done: :meth:`resolve` comes next.
        """

    def begin(self, append: Append) -> bool:
        """Send it, behind those that were begun and are not finished, and wait for nothing. False: that can't be, so
        it is for :meth:`append` once those are finished. Raises as that; it counts as begun where it is unknown."""
        return False

    def finish(self, *, wait: bool) -> bool:
        """Whether the oldest one that was begun is durable by now. ``wait``: for that. Raises as :meth:`append`.

        What is raised is of that one; those behind it are as unknown, or as little done, as it is.
        """
        fail("nothing was begun")

    def waits_for(self) -> tuple[int, int]:
        """A file descriptor and events of select.poll: when :meth:`finish` may have something to do."""
        fail("nothing was begun")

    def resolve(self) -> int:
        """How many were done, the oldest first, of the append that raised LogUnavailableError and of those that had
        been begun with it; the others never will be. 0 where none was open. The fence may be another one from here on.
        Raises LogUnavailableError, FencedError, LogError."""
        return 0

    def space(self) -> Space: ...

    def check_end(self, mac: Mac | None) -> list[str]:
        """Whether all that was committed is there, where the backend can tell; what is wrong with that way, in words.

        ``mac``: the log's key, or None: what is kept beside the rows is checked and made with it. Raises
        DamagedLogError.
        """
        return []

    def mark_end(self, mac: Mac | None) -> None:
        """The log has another key from here on, or none: its end is as it is now."""
        return

    def export_cut_rows(self, name: str, rows: Iterable[Row]) -> Path:
        """Write ``rows``, table by table and in the order of their keys, into a log of its own; where that is."""
        raise only_in_folders(self.where, "cut")

    def request_standby_checkpoint(self, name: str, checkpoint_id: int, epoch: int) -> None:
        """Ask the standby ``name`` for that checkpoint. What was asked for before is not taken any more.

        Raises LogUnavailableError, LogError, as :meth:`cancel_standby_request` and :meth:`take_offer` do.
        """
        raise LogError(f"nobody else writes chunks into {self.where}")

    def cancel_standby_request(self) -> None:
        """Nothing is asked of anybody."""
        return

    def take_offer(self) -> bytes | None:
        """What the standby has said that was asked last; None: nothing yet."""
        return None

    def settle(self) -> None:
        """Bring to its place what is durable and waits somewhere else for that."""
        return

    def give_up(self) -> None:
        """Let others write, where that can be before :meth:`close`: nothing is appended any more."""
        return

    def abandon(self) -> None:
        """Close it as it is, as the end of the process would. Harmless when closed already."""
        self.close()


class Place(Protocol):
    """Where a log is, or would be; one class for each backend, named by the table of :mod:`coordinator.log.open`."""

    scheme: str
    location: str
    """What a URL has behind the scheme."""
    is_shared: bool = False
    """Other machines reach it, too: who finds it held follows."""
    sequence_id_required_min: int = -1
    """A record that the log has had: where it is shared, one that ends before it is not opened for writing."""

    def __init__(self, location: str) -> None:
        self.location = location

    @property
    def where(self) -> str:
        """How people know it."""
        return f"{self.scheme}:{self.location}"

    @property
    def key(self) -> tuple[str, str]:
        """The same for all that name the same log."""
        return self.scheme, self.location

    def exists(self) -> bool:
        """Whether there is a log; whether it is one of ours shows when it is opened."""

    def instances(self) -> list[str] | None:
        """Whose logs are there, where the location is of many and does not say which; None: it is of one.

        Raises LogError.
        """
        return None

    def create(self, identity: LogIdentity, rows: Sequence[Row], options: Options) -> Backend:
        """A new log with ``rows``. What was not created whole does not exist. Raises LogFormatError, LogFullError."""

    def open(self, instance_name: str, options: Options) -> Backend:
        """For writing. Raises LogFormatError, LogLockedError, LogIdentityError, DamagedLogError, LogError."""

    def open_reader(self, instance_name: str | None) -> ReadBackend:
        """Raises as :meth:`open`."""

    def is_live(self) -> bool:
        """Whether a process writes it now, where that can be told."""
        return False

    def holder(self) -> str | None:
        """Who writes it now, in words; None: nobody does, or that can't be told."""
        return "another process" if self.is_live() else None

    def follow(self, options: Options, nudge: Callable[[], None]) -> Following | None:
        """Be known as one who follows, and have ``nudge`` called, from any thread, when the writer may have changed.

        None where a follower has to look by itself.
        """
        return None

    def watch(self) -> Watching | None:
        """Be told where peers reach who writes it, as that changes. None where that can't be told."""
        return None

    def is_followed(self) -> bool:
        """Whether a process follows it that could take it over at once, where that can be told. Raises LogError."""
        return False

    def endpoint(self) -> str | None:
        """Where peers reach who writes it now; None: nobody does, or that can't be told. Raises LogError."""
        return None

    def version(self) -> object:
        """Another one where another log has taken this one's place; None where that can't be told."""
        return None

    def remove(self) -> None:
        """Remove the log for good. Raises LogError, OSError."""
        raise only_in_folders(self.where, "removed from here")

    def durability(self) -> list[str]:
        """What the crash of one machine would lose, in words."""
        return ["the machine crashes: nothing is lost", "its disk is lost: the log is lost since its last backup"]

    def migrate(self) -> str:
        """Bring what it is kept in to this program's version; in words what was done. Raises LogError."""
        return "there is nothing to migrate"

    def make_private(self) -> str | None:
        """Take from others what they may do with it; in words what that was."""
        return None

    def findings(self, *, held: bool) -> Iterator[Finding]:
        """What is wrong with the files of a log before it is opened. ``held``: by the caller, see :meth:`hold`."""
        return iter(())

    def hold(self) -> Held:
        """Keep writers off. Raises LogLockedError."""
        raise only_in_folders(self.where, "cut")

    def copy(self, source: View, identity: LogIdentity, mac: Mac | None) -> int:
        """Make the log here, a copy of before or none yet, the one of ``source``; the records copied.

        Raises ValueError where something else is here.
        """
        raise LogError(f"the log {self.where} can't be made as a copy: in a folder or in PostgreSQL it can")


class Asked(Struct, frozen=True):
    """A checkpoint that the writer of ``fence`` has asked a standby for; ``epoch``: as the core counts them."""

    fence: int
    checkpoint_id: int
    epoch: int


class Following(Protocol):
    """A follower, as the writer knows of it. One thread."""

    asked: Asked | None
    """The checkpoint that the writer wants of it, as of a moment ago."""

    def put_chunk(self, asked: Asked, index: int, value: bytes) -> None:
        """Keep a sealed chunk under its own key, which is new. Raises LogError where nobody wants it any more."""

    def offer(self, asked: Asked, offer: bytes) -> None:
        """Tell the writer that all chunks are there. Raises LogError."""

    def say(self, *, is_ready: bool) -> None:
        """Whether its app has all that the log has, so that it could take over at once."""

    def close(self, wait_s: float) -> None:
        """Be known no more; wait for that to be so."""


class Watching(Protocol):
    """Who wants to know where an instance is. Any thread."""

    endpoint: str | None
    """Where peers reached the one who had the log when there was one last; None: that is not known yet."""

    def close(self, wait_s: float) -> None: ...


class Held(Protocol):
    """A log that nobody else can write until it is released."""

    def open(self, instance_name: str) -> Backend:
        """As Place.open."""

    def release(self) -> None: ...


class Options(Struct, frozen=True):
    """``size_bytes``: set aside for the log at first; ``size_bytes_max``: its limit. None: the backend's own.

    ``lease_s``: how long a writer that says nothing keeps a log that other machines reach. ``endpoint``: where peers
    reach this process. ``checkpoints_to``: the URL of a store for large checkpoints; "": they are in the log.
    """

    size_bytes: int | None = None
    size_bytes_max: int | None = None
    allow_data_loss: bool = False  # also where a crash could lose what was acknowledged
    lease_s: float = LEASE_S
    endpoint: str = ""
    checkpoints_to: str = ""


def only_in_folders(where: str, what: str) -> LogError:
    return LogError(f"the log {where} can't be {what}: only a log in a folder (lmdb:) can")


# What a verification finds, and how bad it is.


class Severity(Enum):
    NOTE = "note"  # nothing is lost
    DAMAGE = "damage"  # something is not what was written, and recovery does not need it
    FATAL = "fatal"  # recovery will stop there, or go wrong


class Finding(Struct, frozen=True):
    """One thing that is wrong. ``message`` says what, where, and what it means."""

    severity: Severity
    place: str  # "file", "meta", "checkpoint 3", "record 812", "sources", ...
    message: str
    records: tuple[int, int] | None = None  # the first and the last of those that are damaged or missing


# How much one step of removing may take: a commit waits for it.


STEP_ROWS_MAX = 1024  # a millisecond or two
STEP_SIZE_BYTES_MAX = 16 << 20


class RemovalBudget(Struct):
    """How much one step may still remove; the row that uses it up is removed too."""

    rows_left: int
    bytes_left: int

    @classmethod
    def step(cls) -> RemovalBudget:
        return cls(STEP_ROWS_MAX, STEP_SIZE_BYTES_MAX)

    @property
    def exhausted(self) -> bool:
        return self.rows_left <= 0 or self.bytes_left <= 0

    def take(self, size_bytes: int) -> None:
        self.rows_left -= 1
        self.bytes_left -= size_bytes

    def spend_span(self, view: View, table: str, end: bytes, first: bytes = b"") -> list[Span]:
        """The rows of ``table`` before the key ``end``, as far as the budget lasts: one span, or none."""
        last_key = None
        for key_view, size_bytes in view.sizes(table, first):
            key = bytes(key_view)
            if self.exhausted or key >= end:
                break
            self.take(size_bytes)
            last_key = key
        if last_key is None:
            return []
        # Records end at an ID, for what has to know which was the last that went.
        stop = SEQUENCE_KEY.pack(SEQUENCE_KEY.unpack(last_key)[0] + 1) if table == "records" else last_key + b"\0"
        return [Span(table, first, stop)]
