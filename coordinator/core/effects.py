"""What a machine asks for. Whoever drives it carries these out, in their order.

Duties of a driver:

1. Commit and WriteCheckpointChunk reach the log in the order in which they were asked for, and each is answered.
2. Nothing is answered as done before it is: Committed means durable.
3. SendToApp's bytes go to the connection that was up when it was asked for, in order, or nowhere.
4. SendToPeer is at least once and may be reordered; after ResetPeer nothing asked for before it is sent any more.
5. LoadLog, CheckCheckpoint and the reads are answered once each, LogFailed counting as an answer.
6. WakeAt is answered by one Tick once as much time has passed as was left to it, whatever the wall clock does
   meanwhile; a later WakeAt takes its place.
7. After Stop nothing else is carried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.core.interfaces import CheckpointHeader, Transaction
from protocol.client import ClientFrame
from protocol.errors import ImmortalError
from protocol.peer import PeerFrame


@dataclass(slots=True)
class SendToApp:
    data: bytes | memoryview


@dataclass(slots=True)
class CloseApp:
    """Close the app's connection once what was asked to be sent is sent."""


@dataclass(slots=True)
class PauseApp:
    """Read no more from the app until ResumeApp: this is the back-pressure."""


@dataclass(slots=True)
class ResumeApp:
    pass


@dataclass(slots=True)
class Commit:
    ticket: int
    transaction: Transaction
    size_bytes: int


@dataclass(slots=True)
class WriteCheckpointChunk:
    checkpoint_id: int
    index: int
    data: bytes


@dataclass(slots=True)
class Trim:
    """Remove, in small steps and when there is time, what no kept checkpoint needs."""


@dataclass(slots=True)
class LoadLog:
    pass


@dataclass(slots=True)
class CheckCheckpoint:
    """Read the whole blob of ``header``'s checkpoint and compare it with what was written."""

    header: CheckpointHeader


@dataclass(slots=True)
class ReadCheckpointChunk:
    checkpoint_id: int
    index: int


@dataclass(slots=True)
class ReadRecords:
    first_sequence_id: int
    size_bytes_max: int


@dataclass(slots=True)
class ReadSpilled:
    """Of what memory had no room for: as :meth:`LogStore.read_spilled`."""

    destination: str
    first_position: int
    last_position: int
    size_bytes_max: int


@dataclass(slots=True)
class OpenPeer:
    """Find out where ``destination`` is. What is sent there before that is known may be dropped; PeerMoved follows."""

    destination: str


@dataclass(slots=True)
class SendToPeer:
    destination: str
    tag: int
    frame: PeerFrame


@dataclass(slots=True)
class ResetPeer:
    """Forget all that is on its way to ``destination``."""

    destination: str


@dataclass(slots=True)
class PeerResetDone:
    """Answers PeerReset, once it is durable; ``found`` False: nothing is known of that peer."""

    token: object
    found: bool


@dataclass(slots=True)
class ReplyToPeer:
    token: object
    frame: PeerFrame


@dataclass(slots=True)
class ReplyToClient:
    """At most once: a client asks again. ``token`` is that of any frame of this client, and may be used again."""

    token: object
    frame: ClientFrame


@dataclass(slots=True)
class WakeAt:
    """``time_ns``: ns since the Unix epoch."""

    time_ns: int


@dataclass(slots=True)
class UpgradeEnded:
    """The upgrade to ``version`` is durable, or (with a ``problem``) given up: then it is not to be tried again."""

    version: int
    problem: str | None = None


@dataclass(slots=True)
class Report:
    """A line for the operator. ``level`` is a name of the logging module's, in lower case."""

    level: str
    message: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class Stop:
    """The end: cleanly where ``error`` is None."""

    error: ImmortalError | None = None


Effect = (
    SendToApp
    | CloseApp
    | PauseApp
    | ResumeApp
    | Commit
    | WriteCheckpointChunk
    | Trim
    | LoadLog
    | CheckCheckpoint
    | ReadCheckpointChunk
    | ReadRecords
    | ReadSpilled
    | OpenPeer
    | SendToPeer
    | ResetPeer
    | PeerResetDone
    | ReplyToPeer
    | ReplyToClient
    | WakeAt
    | UpgradeEnded
    | Report
    | Stop
)
