"""Values that the core and its log exchange, and the interface of a log.

The core decides what must be durable together; a :class:`LogStore` makes it so. Nothing here does work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from msgspec import Struct, field

from immortal.coordinator.core.errors import require
from immortal.protocol.client_frames import CLIENTS
from immortal.protocol.verdicts import RECORD, MessageKey, Verdict

Token: TypeAlias = Any
"""By which a driver finds who waits for an answer. The core looks at none."""

ONESELF = ""
"""The name under which an instance's calls to itself are kept."""

IMPULSES = "!impulses"
"""The source of the impulses to oneself, in the table of sources; no instance can have this name."""


def is_outside(source: str) -> bool:
    """Return whether ``source`` is no instance: impulses to oneself, and clients' requests."""
    return source == IMPULSES or source.startswith(CLIENTS)


class SourcePosition(Struct, frozen=True):
    """Position of one incoming stream in the log.

    ``position`` is the last one logged (0: none yet); ``committer_id`` and ``epoch`` are the sender's, as of then.
    A negative epoch: the stream was reset, and a sender with another log may come once, and begins at 1.
    """

    committer_id: int
    epoch: int
    position: int


class StreamStart(Struct, frozen=True):
    """Place at its receiver where an output stream goes on after a reset.

    The receiver's position p is the position p + ``offset`` of this log, whose own numbers never change. ``pending``:
    the receiver has not said yet how much it has, which decides the offset. ``forked``: this log is known to be an
    older copy of one that has sent more, so that what the receiver has beyond the acknowledged may be something else.
    """

    offset: int = 0
    pending: bool = False
    forked: bool = False


class OutputMark(Struct, frozen=True):
    """Position of one output stream, and the CRC-64 of its messages up to there.

    Impulses take positions but are left out of the checksum: it is what a replay makes again.
    """

    position: int
    checksum: int


class OutputBatch(Struct, frozen=True):
    """Consecutive messages of one output stream: ``count`` incoming-RPC messages, packed, from ``first_position``."""

    first_position: int
    count: int
    payload: bytes

    @property
    def last_position(self) -> int:
        return self.first_position + self.count - 1


class ImpulseBatch(OutputBatch, frozen=True):
    """Impulses to another instance, kept because no replay would make them again.

    They take their positions in the stream to ``destination``. Where the payload is empty, ``left_size_bytes`` says how
    much of it was left in the log, to be read when there is room; 0: it is needed no more.
    """

    destination: str
    left_size_bytes: int = 0


class SpilledBatch(OutputBatch, frozen=True):
    """Messages for ``destination`` that memory has no room for."""

    destination: str


class SpilledExtent(Struct, frozen=True):
    """Consecutive messages of one output stream that are in the log, both ends included."""

    first_position: int
    last_position: int
    size_bytes: int


class LogSpace(Struct, frozen=True):
    """Disk space of a log. ``used_bytes``: what the log needs of its file; freed pages don't count. ``free_bytes``:
    free on its disk for users other than root."""

    used_bytes: int
    free_bytes: int


class CheckpointHeader(Struct, frozen=True):
    """Checkpoint without its blob, which is stored beside it in chunks.

    The blob is the app's state after the record ``sequence_id`` (-1: before any record), as the app's version
    ``version`` writes it. ``outputs`` and ``unacknowledged`` are the output streams at that moment: replay continues
    them from there. ``open_calls``: the numbers of calls that are not answered yet, by caller, of the callers that may
    have so many at once.
    """

    checkpoint_id: int
    sequence_id: int
    size_bytes: int
    check: int  # CRC-64/XZ of the blob
    time_ns: int
    outputs: Mapping[str, OutputMark] = field(default_factory=dict)
    unacknowledged: Mapping[str, Sequence[OutputBatch]] = field(default_factory=dict)
    version: int = 1
    open_calls: Mapping[str, Sequence[int]] = field(default_factory=dict)


class Offer(Struct, frozen=True):
    """A checkpoint that a follower has taken for who writes the log in ``epoch``, and whose chunks are in the log.

    ``verdicts``: on which messages, up to its record and behind the checkpoint that it began with, its app had one.
    """

    epoch: int
    header: CheckpointHeader
    verdicts: Sequence[MessageKey] = ()


class ClientPosition(Struct, frozen=True):
    """Request numbers of one client in the log.

    ``number`` is the last one taken; the replies up to ``released`` are kept no longer. ``time_ns``: when it was last
    heard of. ``owner``: whose keys have used the ID first, "" where none had any.
    """

    number: int
    released: int
    time_ns: int
    owner: str = ""


class StoredClients(Struct, frozen=True):
    """Clients as a log holds them when it is opened, by client ID; ``replies`` by (client ID, number).

    A reply is its kind, one byte, and its value; only the kind where it is not kept any more. ``forgotten_ns``: no
    client that is not in ``positions`` was heard of after this moment, 0 if none was ever forgotten.
    """

    positions: Mapping[str, ClientPosition] = field(default_factory=dict)
    replies: Mapping[tuple[str, int], bytes] = field(default_factory=dict)
    forgotten_ns: int = 0


class VersionStart(Struct, frozen=True):
    """Start of the app's version ``version``: it handles the log from the record after ``sequence_id`` on.

    ``app`` is what the app called itself then ("module:Class"; "" if it said nothing).
    """

    version: int
    sequence_id: int
    app: str = ""


class Suspect(Struct, frozen=True):
    """Message that the app was at when its process ended without a word, ``runs_count`` times in a row.

    ``message_index`` RECORD: some message of that record; ``sequence_id`` UNKNOWN: some record up to
    ``last_sequence_id``, the last one that the app was given. ``task``: the handler that the message let go on, by its
    number; 0: none in particular.
    """

    sequence_id: int
    message_index: int
    runs_count: int
    last_sequence_id: int = -1
    task: int = 0


UNKNOWN = -1
NO_SUSPECT = Suspect(UNKNOWN, RECORD, 0)


class Letter(Struct, frozen=True):
    """A dead letter: a message that failed and that nobody waits for. ``time_ns``: when its verdict was given."""

    verdict: Verdict
    time_ns: int


class AuditEntry(Struct, frozen=True):
    """Action of an operator: ``who`` did ``what`` at ``time_ns`` (ns since the Unix epoch)."""

    time_ns: int
    who: str
    what: str


class Transaction(Struct):
    """Changes that become durable in one step, or not at all. Fields left empty change nothing."""

    records: list[tuple[int, bytes]] = []  # (sequence ID, record + trailer)
    sources: dict[str, SourcePosition] = {}  # by sender's name
    acknowledged: dict[str, int] = {}  # destination: last position durable there
    peers: dict[str, int] = {}  # destination: its committer ID
    stream_starts: dict[str, StreamStart] = {}  # destination: where its numbers begin
    impulses: list[ImpulseBatch] = []
    impulses_removed: list[tuple[str, int]] = []  # (destination, first position); goes first
    clients: dict[str, ClientPosition | None] = {}  # by client ID; None: forgotten
    replies: dict[tuple[str, int], bytes | None] = {}  # (client ID, number); None: removed
    clients_forgotten_ns: int | None = None
    spilled: list[SpilledBatch] = []
    spilled_ends: dict[str, int] = {}  # what the log has spilled behind that position goes
    checkpoint: CheckpointHeader | None = None  # its blob's chunks were written before
    adopts: bool = False  # ... by a follower
    version: VersionStart | None = None  # the version that begins with this checkpoint
    verdicts: list[Verdict] = []  # each once; those that are letters are kept as such, too
    letters_removed: list[MessageKey] = []  # dead letters that were retried or dropped, or that there is no room for
    suspect: Suspect | None = None  # what may have ended the app's process; NO_SUSPECT: nothing any more
    audit: list[AuditEntry] = []  # what an operator did
    cut_healed: bool = False  # the output streams go on behind what a cut has taken away: forget the cut
    epoch: int | None = None
    extensions: frozenset[int] | None = None  # those that the app asked for at its first start

    def absorb(self, later: Transaction) -> None:
        """Take in the transaction that follows this one: both become durable together."""
        self.records += later.records
        self.sources.update(later.sources)
        self.acknowledged.update(later.acknowledged)
        self.peers.update(later.peers)
        self.stream_starts.update(later.stream_starts)
        new = {(batch.destination, batch.first_position) for batch in self.impulses}
        require(new.isdisjoint(later.impulses_removed), "impulses are removed in the transaction that brings them")
        self.impulses += later.impulses
        self.impulses_removed += later.impulses_removed
        self.clients.update(later.clients)
        self.replies.update(later.replies)
        if later.clients_forgotten_ns is not None:
            self.clients_forgotten_ns = later.clients_forgotten_ns
        self.spilled += later.spilled
        self.spilled_ends.update(later.spilled_ends)
        if later.checkpoint is not None:  # of two, the later one makes the other superfluous
            self.checkpoint, self.adopts = later.checkpoint, later.adopts
        require(self.version is None or later.version is None, "two versions begin in one transaction")
        self.version = self.version or later.version
        self.verdicts += later.verdicts
        self.letters_removed += later.letters_removed
        self.suspect = later.suspect or self.suspect
        self.audit += later.audit
        self.cut_healed = self.cut_healed or later.cut_healed
        self.epoch = self.epoch if later.epoch is None else later.epoch
        self.extensions = self.extensions if later.extensions is None else later.extensions


class LogSummary(Struct, frozen=True):
    """The state of a log as it is opened: all that the core needs to start, without reading a record."""

    committer_id: int
    epoch: int  # the last one used; 0 for a new log
    first_sequence_id: int  # the first record still kept; equal to last + 1 when there is none
    last_sequence_id: int  # -1 for a new log
    checkpoints: Sequence[CheckpointHeader]  # complete ones, oldest first
    sources: Mapping[str, SourcePosition]
    acknowledged: Mapping[str, int]
    peers: Mapping[str, int]
    impulses: Sequence[ImpulseBatch]  # by destination, then position
    extensions: frozenset[int] | None  # None before the first start is complete
    last_time_ns: int = 0  # of the last record; 0 if there is none, or if it is damaged
    versions: Sequence[VersionStart] = ()  # oldest first; empty for a new log
    cut_sequence_id: int | None = None  # records from here on were cut off by hand, and no checkpoint since
    stream_starts: Mapping[str, StreamStart] = field(default_factory=dict)  # of the output streams once reset
    spilled: Mapping[str, Sequence[SpilledExtent]] = field(default_factory=dict)  # by destination; not acknowledged
    verdicts: Sequence[Verdict] = ()  # on the records that are kept, in their order; without their letters
    letters: Mapping[MessageKey, int] = field(
        default_factory=dict
    )  # the size in bytes of each that is kept, oldest first
    suspect: Suspect = NO_SUSPECT

    def impulses_by_destination(self) -> dict[str, list[ImpulseBatch]]:
        found: dict[str, list[ImpulseBatch]] = {}
        for batch in self.impulses:
            found.setdefault(batch.destination, []).append(batch)
        return found


class Standby(NamedTuple):
    """A process that follows a log. ``is_ready``: its app has all that the log has."""

    name: str  # HOST (process PID)
    host: str
    endpoint: str  # where peers would reach it
    is_ready: bool


class LogStore(Protocol):
    """A durable log. One writer; writes come from one thread at a time, reads may come beside them.

    After LogFullError, LogSyncError or FencedError the store accepts nothing more: what is durable is unknown until
    the log is opened anew.
    """

    problems: list[str]
    """Damage that the last summary left out, as messages."""

    def summary(self) -> LogSummary:
        """Read the log's state. A damaged checkpoint header is left out and described in :attr:`problems`.

        Impulses whose batch is acknowledged whole come with an empty payload: their positions count, their bytes are
        not needed. Raises DamagedLogError with sequence ID -1 for a damaged position, peer or meta value.
        """

    def clients(self) -> StoredClients:
        """Read clients' positions and replies. A damaged reply counts as removed and is described in :attr:`problems`.

        Raises DamagedLogError with sequence ID -1 for a damaged position.
        """

    def commit(self, transaction: Transaction, ticket: int = 0) -> None:
        """Make ``transaction`` durable, whole. When this returns it survives power loss. ``ticket``: for ``tail``.

        Raises LogFullError, LogSyncError, FencedError; LogUnavailableError where the outcome is unknown.
        """

    def read(self, first_sequence_id: int, size_bytes_max: int) -> list[bytes]:
        """Read checked values (record + trailer) from ``first_sequence_id`` on, in order.

        At most ``size_bytes_max`` bytes, but one value if there is one. Raises DamagedLogError if the first is damaged
        or missing; values before a damaged one are returned.
        """

    def read_spilled(
        self, destination: str, first_position: int, last_position: int, size_bytes_max: int
    ) -> list[OutputBatch]:
        """Read messages to ``destination`` that memory had no room for, impulses among them, without a gap.

        From ``first_position`` on, in a batch that may begin before it; none begins behind ``last_position``. At most
        ``size_bytes_max``, but one batch. Raises DamagedLogError where the first is missing or damaged.
        """

    def letter(self, key: MessageKey) -> Letter | None:
        """Read a dead letter; None where there is none. Raises DamagedLogError."""

    def space(self) -> LogSpace:
        """Measure the log's used and free bytes."""

    def write_checkpoint_chunk(self, checkpoint_id: int, index: int, data: bytes) -> None:
        """Keep one chunk of a blob; chunks come in order, and index 0 begins anew. An empty one is not stored.

        The blob counts once a transaction with the checkpoint's header is committed.
        """

    def read_checkpoint_chunk(self, checkpoint_id: int, index: int) -> bytes:
        """Read chunk ``index`` of a blob; b"" after the last.

        Raises DamagedCheckpointError; from then on ``trim`` does not count that checkpoint among those to keep.
        """

    def trim(
        self, *, keep_checkpoints: int | None, keep_since_ns: int | None = None, keep_bytes: int | None = None
    ) -> bool:
        """Remove one bounded step of what need not be kept; True if more remains.

        Kept are the newest ``keep_checkpoints`` with the records after them. Kept before them is what a replay from
        ``keep_since_ns`` on needs (ns since the Unix epoch), as far as all of it has about ``keep_bytes``; with
        ``keep_bytes`` alone, so much. ``keep_checkpoints`` None: only the other two count, and without them everything
        is kept. The newest valid checkpoint and the records after it always stay. Spilled outputs go as soon as they
        are acknowledged.
        """

    def close(self) -> None:
        """Close the log and let others write it. Harmless when closed already."""
