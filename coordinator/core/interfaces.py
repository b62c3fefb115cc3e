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
"""Handle by which a driver finds who waits for an answer. The core never reads it."""

ONESELF = ""
"""Peer name under which the core keeps an instance's calls to itself."""

IMPULSES = "!impulses"
"""Source name of the impulses to oneself, in the table of sources; no instance can have this name."""


def is_outside(source: str) -> bool:
    """Return True if ``source`` is not an instance: impulses to oneself, or clients' requests."""
    return source == IMPULSES or source.startswith(CLIENTS)


class SourcePosition(Struct, frozen=True):
    """Position of one incoming stream in the log.

    ``position`` is the last one logged (0: none yet); ``committer_id`` and ``epoch`` are the sender's at that time.
    A negative epoch: the stream was reset, so a sender with another log is accepted once, and begins at 1.
    """

    committer_id: int
    epoch: int
    position: int


class StreamStart(Struct, frozen=True):
    """Start of an output stream at its receiver after a reset.

    The receiver's position p is the position p + ``offset`` of this log, whose own numbers never change. ``pending``:
    the receiver has not said yet how much it has, which decides the offset. ``forked``: this log is known to be an
    older copy of one that has sent more, so the receiver's messages after the acknowledged ones may be different ones.
    """

    offset: int = 0
    pending: bool = False
    forked: bool = False


class OutputMark(Struct, frozen=True):
    """Position of one output stream, and the CRC-64 of its messages up to there.

    Impulses take positions but are left out of the checksum: it covers only what a replay makes again.
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

    They take their positions in the stream to ``destination``. If the payload is empty, ``left_size_bytes`` is the
    number of its bytes that stay in the log until memory has room; 0: the payload is not needed any more.
    """

    destination: str
    left_size_bytes: int = 0


class SpilledBatch(OutputBatch, frozen=True):
    """Batch of messages for ``destination`` that is spilled to the log: memory has no room for it."""

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
    them from there. ``open_calls``: the numbers of the unanswered calls, by caller, for callers with a limit of
    concurrent calls.
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
    """Checkpoint that a follower has taken for the writer of ``epoch``. Its chunks are in the log.

    ``verdicts``: keys of the messages, up to its record, on which the follower's app got a verdict after the checkpoint
    that it started from.
    """

    epoch: int
    header: CheckpointHeader
    verdicts: Sequence[MessageKey] = ()


class ClientPosition(Struct, frozen=True):
    """Request numbers of one client in the log.

    ``number`` is the last one taken; replies up to ``released`` are no longer kept. ``time_ns``: when the client was
    last heard. ``owner``: the caller whose keys first used the ID, "" if it had none.
    """

    number: int
    released: int
    time_ns: int
    owner: str = ""


class StoredClients(Struct, frozen=True):
    """Clients in a log at the time it is opened, by client ID; ``replies`` by (client ID, number).

    A reply is its kind, one byte, and its value; only the kind if the value is no longer kept. ``forgotten_ns``: no
    client missing from ``positions`` was heard after this moment; 0 if none was ever forgotten.
    """

    positions: Mapping[str, ClientPosition] = field(default_factory=dict)
    replies: Mapping[tuple[str, int], bytes] = field(default_factory=dict)
    forgotten_ns: int = 0


class VersionStart(Struct, frozen=True):
    """Start of the app's version ``version``: it handles the log from the record after ``sequence_id`` on.

    ``app`` is the app's name for itself at that time ("module:Class"; "" if it gave none).
    """

    version: int
    sequence_id: int
    app: str = ""


class Suspect(Struct, frozen=True):
    """Message that the app was handling when its process died, ``runs_count`` times in a row.

    ``message_index`` RECORD: some message of that record; ``sequence_id`` UNKNOWN: some record up to
    ``last_sequence_id``, the last one that the app got. ``task``: the number of the waiting handler that the message
    continued; 0: none in particular.
    """

    sequence_id: int
    message_index: int
    runs_count: int
    last_sequence_id: int = -1
    task: int = 0


UNKNOWN = -1
NO_SUSPECT = Suspect(UNKNOWN, RECORD, 0)


class Letter(Struct, frozen=True):
    """Dead letter: a failed message that no caller waits for. ``time_ns``: when its verdict was given."""

    verdict: Verdict
    time_ns: int


class AuditEntry(Struct, frozen=True):
    """Entry of the audit log: the operator ``who`` did ``what`` at ``time_ns`` (ns since the Unix epoch)."""

    time_ns: int
    who: str
    what: str


class Transaction(Struct):
    """Changes that become durable together or not at all. Empty fields change nothing."""

    records: list[tuple[int, bytes]] = []  # (sequence ID, record + trailer)
    sources: dict[str, SourcePosition] = {}  # by sender's name
    acknowledged: dict[str, int] = {}  # destination: last position durable there
    peers: dict[str, int] = {}  # destination: its committer ID
    stream_starts: dict[str, StreamStart] = {}  # destination: where its numbers begin
    impulses: list[ImpulseBatch] = []
    impulses_removed: list[tuple[str, int]] = []  # (destination, first position); applied first
    clients: dict[str, ClientPosition | None] = {}  # by client ID; None: forgotten
    replies: dict[tuple[str, int], bytes | None] = {}  # (client ID, number); None: removed
    clients_forgotten_ns: int | None = None
    spilled: list[SpilledBatch] = []
    spilled_ends: dict[str, int] = {}  # destination: position after which its spilled messages are removed
    checkpoint: CheckpointHeader | None = None  # its blob's chunks were written before
    adopts: bool = False  # ... by a follower
    version: VersionStart | None = None  # the version that begins with this checkpoint
    verdicts: list[Verdict] = []  # each once; verdicts that are dead letters are stored as such, too
    letters_removed: list[MessageKey] = []  # dead letters that were retried, dropped, or have no room
    suspect: Suspect | None = None  # what may have ended the app's process; NO_SUSPECT: nothing any more
    audit: list[AuditEntry] = []  # what an operator did
    cut_healed: bool = False  # the output streams continue after the loss of a cut: forget the cut
    epoch: int | None = None
    extensions: frozenset[int] | None = None  # those that the app asked for at its first start

    def absorb(self, later: Transaction) -> None:
        """Add the transaction that follows this one: both become durable together."""
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
        if later.checkpoint is not None:  # a later checkpoint makes an earlier one superfluous
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
    """State of a log when it is opened: all that the core needs to start, without reading a record."""

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
    """Process that follows a log. ``is_ready``: its app has handled all that the log has."""

    name: str  # HOST (process PID)
    host: str
    endpoint: str  # where peers would reach it
    is_ready: bool


class LogStore(Protocol):
    """Durable log with one writer. Writes come from one thread at a time; reads can run beside them.

    After LogFullError, LogSyncError or FencedError the store accepts no further writes: it is unknown what is durable
    until the log is opened again.
    """

    problems: list[str]
    """Messages about the damage that the last summary left out."""

    def summary(self) -> LogSummary:
        """Read the log's state. A damaged checkpoint header is left out and described in :attr:`problems`.

        An acknowledged batch of impulses has an empty payload: its positions count, its bytes are not needed. Raises
        DamagedLogError with sequence ID -1 for a damaged position, peer or meta value.
        """

    def clients(self) -> StoredClients:
        """Read clients' positions and replies. A damaged reply counts as removed and is described in :attr:`problems`.

        Raises DamagedLogError with sequence ID -1 for a damaged position.
        """

    def commit(self, transaction: Transaction, ticket: int = 0) -> None:
        """Make ``transaction`` durable as a whole: on return it survives power loss. ``ticket``: for ``tail``.

        Raises LogFullError, LogSyncError, FencedError; LogUnavailableError if the outcome is unknown.
        """

    def read(self, first_sequence_id: int, size_bytes_max: int) -> list[bytes]:
        """Read checked values (record + trailer) in order, from ``first_sequence_id`` on.

        Returns at most ``size_bytes_max`` bytes, but at least one value if there is one. Raises DamagedLogError if the
        first is damaged or missing; values before a damaged one are returned.
        """

    def read_spilled(
        self, destination: str, first_position: int, last_position: int, size_bytes_max: int
    ) -> list[OutputBatch]:
        """Read the spilled messages to ``destination``, impulses among them, without a gap.

        The first batch contains ``first_position``; none begins after ``last_position``. Returns at most
        ``size_bytes_max`` bytes, but at least one batch. Raises DamagedLogError if the first is missing or damaged.
        """

    def letter(self, key: MessageKey) -> Letter | None:
        """Read a dead letter; return None if there is none. Raises DamagedLogError."""

    def space(self) -> LogSpace:
        """Measure the log's used and free bytes."""

    def write_checkpoint_chunk(self, checkpoint_id: int, index: int, data: bytes) -> None:
        """Store one chunk of a blob. Chunks arrive in order; index 0 begins a new blob. An empty chunk is not stored.

        The blob counts once a transaction with the checkpoint's header is committed.
        """

    def read_checkpoint_chunk(self, checkpoint_id: int, index: int) -> bytes:
        """Read chunk ``index`` of a blob; b"" after the last.

        Raises DamagedCheckpointError; from then on ``trim`` does not count that checkpoint among those to keep.
        """

    def trim(
        self, *, keep_checkpoints: int | None, keep_since_ns: int | None = None, keep_bytes: int | None = None
    ) -> bool:
        """Remove one bounded step of data that need not be kept; return True if more remains.

        Kept are the newest ``keep_checkpoints`` with the records after them. Older data is kept if a replay from
        ``keep_since_ns`` on (ns since the Unix epoch) needs it, up to about ``keep_bytes`` in all; with ``keep_bytes``
        alone, up to that size. ``keep_checkpoints`` None: only the other two count; without them all is kept. The
        newest valid checkpoint and the records after it always stay. Acknowledged spilled outputs are removed at once.
        """

    def close(self) -> None:
        """Close the log and let others write it. Does nothing if it is already closed."""
