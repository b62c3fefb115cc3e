"""Effects: actions that a machine asks its driver to do, in the given order.

Duties of a driver:

1. Commit and WriteCheckpointChunk reach the log in the order in which they were requested, and are answered in that
   order. One that fails blocks those after it: none of them is answered before the answer to the next ReadTail, and
   none is carried out except one that was in flight with it, and only if the failed one was itself carried out.
2. Nothing is answered as done before it is done: Committed means durable. A log with another writer answers Fenced.
3. SendToApp's bytes go, in order, to the connection that was up at the time of the request, or nowhere.
4. SendToPeer is at least once and can be reordered; after ResetPeer no earlier request is sent any more.
5. LoadLog, CheckCheckpoint and the reads are answered once each; LogFailed counts as an answer. AcquireWriteLease is
   answered by WriteLeaseHeld while another process has the lease, and by WriteLeaseGranted once this one has it.
6. WakeAt is answered by one Tick after the time that was left to it has passed, whatever the wall clock does
   meanwhile; a later WakeAt replaces it.
7. After Stop nothing else is carried out.
8. RequestStandbyCheckpoint and OfferCheckpoint can get lost; each OfferChunk is answered once, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from immortal.coordinator.core.interfaces import CheckpointHeader, Offer, Token, Transaction
from immortal.coordinator.core.notices import Notice
from immortal.protocol.client_frames import ClientFrame
from immortal.protocol.errors import ImmortalError
from immortal.protocol.peer_frames import PeerFrame
from immortal.protocol.verdicts import MessageKey


class Effect(Struct):
    """Action that a machine asks its driver to do."""


class SendToApp(Effect):
    data: bytes | memoryview


class CloseApp(Effect):
    """Close the app's connection once everything requested before is sent."""


class PauseApp(Effect):
    """Stop reading from the app until ResumeApp: this is the back-pressure."""


class ResumeApp(Effect):
    pass


class AcquireWriteLease(Effect):
    """Request the write lease, which one process holds at a time. Wait for it while another process holds it."""


class Commit(Effect):
    """Append a transaction. It counts only if the log ends with the record ``expected_last_sequence_id`` (-1: it has
    none) and no other process got the write lease after ``fence``, the term of this writer's lease."""

    ticket: int
    transaction: Transaction
    size_bytes: int
    expected_last_sequence_id: int
    fence: int


class WriteCheckpointChunk(Effect):
    checkpoint_id: int
    index: int
    data: bytes


class RequestStandbyCheckpoint(Effect):
    """Ask a follower that has caught up for a checkpoint with this ID. CheckpointOffered can follow much later."""

    checkpoint_id: int
    epoch: int


class CancelStandbyRequest(Effect):
    """Cancel RequestStandbyCheckpoint: reject what the follower writes from now on."""


class OfferChunk(Effect):
    """Write a chunk of the checkpoint that a follower takes, like WriteCheckpointChunk. The log can refuse it."""

    checkpoint_id: int
    index: int
    data: bytes


class OfferCheckpoint(Effect):
    """Tell the writer that the checkpoint is complete; its chunks are already durable."""

    offer: Offer


class Trim(Effect):
    """Remove data that no kept checkpoint needs, in small steps, when there is time."""


class ReadTail(Effect):
    """Ask which of this writer's appends the log has, after an append with an unknown outcome."""


class LoadLog(Effect):
    """Load the log's summary. ``with_clients``: also the clients, for a new writer. A follower gets the answer once
    there is a checkpoint."""

    with_clients: bool = False


class CheckCheckpoint(Effect):
    """Read the whole blob of ``header``'s checkpoint and compare its check."""

    header: CheckpointHeader


class ReadCheckpointChunk(Effect):
    checkpoint_id: int
    index: int


class ReadRecords(Effect):
    """Read records. A follower gets the answer once there are new ones, or the write lease is granted."""

    first_sequence_id: int
    size_bytes_max: int
    session: int  # of the app; repeated in the answer


class ReadSpilled(Effect):
    """Read spilled messages back; see :meth:`LogStore.read_spilled`."""

    destination: str
    first_position: int
    last_position: int
    size_bytes_max: int


class ReadLetters(Effect):
    """Read dead letters; leave out unreadable ones."""

    keys: Sequence[MessageKey]


class OpenPeer(Effect):
    """Find the address of ``destination``. Frames sent before it is known can be dropped; PeerMoved follows."""

    destination: str


class SendToPeer(Effect):
    destination: str
    tag: int
    frame: PeerFrame


class ResetPeer(Effect):
    """Forget everything in flight to ``destination``."""

    destination: str


class PeerResetDone(Effect):
    """Answer PeerReset, once the reset is durable. ``found`` False: nothing is known of that peer."""

    token: Token
    found: bool


class OperatorAnswered(Effect):
    """Answer an operator's request with plain values, once its result is durable."""

    token: Token
    answer: Mapping[str, object]


class ReplyToPeer(Effect):
    token: Token
    frame: PeerFrame


class ReplyToClient(Effect):
    """Send a reply to a client, at most once: a client repeats its request. ``token``: of any frame of this client; it
    stays usable."""

    token: Token
    frame: ClientFrame


class WakeAt(Effect):
    """Ask for a Tick at ``time_ns``, ns since the Unix epoch."""

    time_ns: int


class UpgradeEnded(Effect):
    """Report the end of the upgrade to ``version``: durable, or given up because of ``problem`` and not tried again."""

    version: int
    problem: str | None = None


class Report(Effect):
    """Report a notice to the operator."""

    notice: Notice


class Stop(Effect):
    """Stop the process; cleanly if ``error`` is None."""

    error: ImmortalError | None = None


Write = Commit | WriteCheckpointChunk
StoreRead = LoadLog | CheckCheckpoint | ReadCheckpointChunk | ReadRecords | ReadSpilled | ReadLetters
"""Requests that an open log answers by itself."""

Read = StoreRead | ReadTail
