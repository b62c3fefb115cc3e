"""Effects: what a machine asks its driver to do, in this order.

Duties of a driver:

1. Commit and WriteCheckpointChunk reach the log in the order in which they were asked for, and are answered in it.
   One that fails holds those behind it: none is answered up to the answer to the next ReadTail, and none is done but
   one that was under way with it, where it was done itself.
2. Nothing is answered as done before it is: Committed means durable. A log that another has taken answers Fenced.
3. SendToApp's bytes go to the connection that was up when it was asked for, in order, or nowhere.
4. SendToPeer is at least once and may be reordered; after ResetPeer nothing asked for before it is sent any more.
5. LoadLog, CheckCheckpoint and the reads are answered once each, LogFailed counting as an answer. AcquireWriteLease is
   answered by WriteLeaseHeld while another has it, and by WriteLeaseGranted once it is ours.
6. WakeAt is answered by one Tick once as much time has passed as was left to it, whatever the wall clock does
   meanwhile; a later WakeAt takes its place.
7. After Stop nothing else is carried out.
8. AskStandby and OfferCheckpoint get there, or not; OfferChunk is answered once each, in order.
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


class SendToApp(Struct):
    data: bytes | memoryview


class CloseApp(Struct):
    """Close the app's connection once what was asked to be sent is sent."""


class PauseApp(Struct):
    """Stop reading from the app until ResumeApp: this is the back-pressure."""


class ResumeApp(Struct):
    pass


class AcquireWriteLease(Struct):
    """Ask for the write lease, which one process holds at a time. It is waited for while another holds it."""


class Commit(Struct):
    """An append. It counts only where the log ends with the record ``expected_last_sequence_id`` (-1: it has none), and
    nobody was given the right to write since ``fence``, the term of this writer's."""

    ticket: int
    transaction: Transaction
    size_bytes: int
    expected_last_sequence_id: int
    fence: int


class WriteCheckpointChunk(Struct):
    checkpoint_id: int
    index: int
    data: bytes


class AskStandby(Struct):
    """Ask a follower that has caught up for this checkpoint. CheckpointOffered may answer much later."""

    checkpoint_id: int
    epoch: int


class DropAsked(Struct):
    """Cancel AskStandby: what the follower writes from now on is not taken."""


class OfferChunk(Struct):
    """Write a chunk of the checkpoint that a follower was asked for, like WriteCheckpointChunk. It may be refused."""

    checkpoint_id: int
    index: int
    data: bytes


class OfferCheckpoint(Struct):
    """Tell the writer that the checkpoint is complete; its chunks are durable by then."""

    offer: Offer


class Trim(Struct):
    """Remove what no kept checkpoint needs, in small steps, when there is time."""


class ReadTail(Struct):
    """Ask which of this writer's appends the log has, after one whose outcome is unknown."""


class LoadLog(Struct):
    """Load the log's summary. ``with_clients``: also the clients, for a new writer. A follower is answered once
    there is a checkpoint."""

    with_clients: bool = False


class CheckCheckpoint(Struct):
    """Read the whole blob of ``header``'s checkpoint and compare it with what was written."""

    header: CheckpointHeader


class ReadCheckpointChunk(Struct):
    checkpoint_id: int
    index: int


class ReadRecords(Struct):
    """Read records. A follower is answered once there are new ones, or the write lease is granted."""

    first_sequence_id: int
    size_bytes_max: int
    session: int  # of the app: the answer has it, too


class ReadSpilled(Struct):
    """Read spilled messages back; see :meth:`LogStore.read_spilled`."""

    destination: str
    first_position: int
    last_position: int
    size_bytes_max: int


class ReadLetters(Struct):
    """Read dead letters; unreadable ones are left out."""

    keys: Sequence[MessageKey]


class OpenPeer(Struct):
    """Find out where ``destination`` is. What is sent there before that is known may be dropped; PeerMoved follows."""

    destination: str


class SendToPeer(Struct):
    destination: str
    tag: int
    frame: PeerFrame


class ResetPeer(Struct):
    """Forget everything in flight to ``destination``."""

    destination: str


class PeerResetDone(Struct):
    """Answer PeerReset, once it is durable. ``found`` False: nothing is known of that peer."""

    token: Token
    found: bool


class OperatorAnswered(Struct):
    """Answer an operator's request, once what was done is durable; plain values."""

    token: Token
    answer: Mapping[str, object]


class ReplyToPeer(Struct):
    token: Token
    frame: PeerFrame


class ReplyToClient(Struct):
    """Send a reply to a client, at most once: a client asks again. ``token``: of any frame of this client; it stays
    usable."""

    token: Token
    frame: ClientFrame


class WakeAt(Struct):
    """Ask for a Tick at ``time_ns``, ns since the Unix epoch."""

    time_ns: int


class UpgradeEnded(Struct):
    """Report that the upgrade to ``version`` is durable, or given up (with a ``problem``): then it is not tried
    again."""

    version: int
    problem: str | None = None


class Report(Struct):
    """Tell the operator something."""

    notice: Notice


class Stop(Struct):
    """Stop; cleanly if ``error`` is None."""

    error: ImmortalError | None = None


Effect = (
    SendToApp
    | CloseApp
    | PauseApp
    | ResumeApp
    | AcquireWriteLease
    | Commit
    | WriteCheckpointChunk
    | AskStandby
    | DropAsked
    | OfferChunk
    | OfferCheckpoint
    | Trim
    | ReadTail
    | LoadLog
    | CheckCheckpoint
    | ReadCheckpointChunk
    | ReadRecords
    | ReadSpilled
    | ReadLetters
    | OpenPeer
    | SendToPeer
    | ResetPeer
    | PeerResetDone
    | OperatorAnswered
    | ReplyToPeer
    | ReplyToClient
    | WakeAt
    | UpgradeEnded
    | Report
    | Stop
)
