"""What can happen to a coordinator. The runtime (or a simulator) makes these; the machine handles them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.core.errors import LogError
from coordinator.core.interfaces import LogSpace, LogSummary, OutputBatch
from protocol.client import ClientFrame
from protocol.peer import PeerFrame


@dataclass(slots=True)
class AppConnected:
    """An app has connected. Only one at a time: the runtime turns others away."""


@dataclass(slots=True)
class AppData:
    """Bytes from the app, in any pieces."""

    data: bytes


@dataclass(slots=True)
class AppSent:
    """The app's socket has taken ``size_bytes`` more of what SendToApp handed over."""

    size_bytes: int


@dataclass(slots=True)
class AppClosed:
    """The app's connection is gone."""


@dataclass(slots=True)
class PeerFrameReceived:
    """A peer coordinator says something; ``token`` is to be given back in ReplyToPeer, once."""

    token: object
    frame: PeerFrame


@dataclass(slots=True)
class ClientFrameReceived:
    """A client, which is no instance, says something; ``token`` is for ReplyToClient, as often as there is need."""

    token: object
    frame: ClientFrame


@dataclass(slots=True)
class PeerReplied:
    """The answer to a frame of ours; ``tag`` is that of the SendToPeer it answers."""

    destination: str
    tag: int
    frame: PeerFrame


@dataclass(slots=True)
class PeerMoved:
    """A destination is reached in another place, or for the first time: nothing of what is on its way will arrive."""

    destination: str


@dataclass(slots=True)
class PeerReset:
    """An operator asks to forget which log ``peer`` had; answered by PeerResetDone with ``token``."""

    peer: str
    token: object


@dataclass(slots=True)
class Committed:
    """The transaction of the Commit with this ticket is durable, and all before it."""

    ticket: int


@dataclass(slots=True)
class ChunkWritten:
    """One WriteCheckpointChunk is done."""

    size_bytes: int


@dataclass(slots=True)
class LogLoaded:
    """Answers LoadLog."""

    summary: LogSummary


@dataclass(slots=True)
class CheckpointChecked:
    """Answers CheckCheckpoint: ``problem`` is None where every byte is what was written."""

    checkpoint_id: int
    problem: str | None


@dataclass(slots=True)
class CheckpointChunkRead:
    """Answers ReadCheckpointChunk; empty behind the last chunk."""

    data: bytes


@dataclass(slots=True)
class RecordsRead:
    """Answers ReadRecords: verified values (record + trailer), in order."""

    values: Sequence[bytes]


@dataclass(slots=True)
class SpilledRead:
    """Answers ReadSpilled, with its ``destination`` and ``first_position``."""

    destination: str
    first_position: int
    batches: Sequence[OutputBatch]


@dataclass(slots=True)
class LogMeasured:
    """How much room the log takes, and has. To be said now and then, at least while there is too little."""

    space: LogSpace


@dataclass(slots=True)
class LogFailed:
    """The log could not be read or written; there is no way on."""

    error: LogError


@dataclass(slots=True)
class CheckpointRequested:
    """An operator asks for a checkpoint."""


@dataclass(slots=True)
class Tick:
    """The moment of a WakeAt has come."""


@dataclass(slots=True)
class StopRequested:
    """Stop cleanly: with a checkpoint where there is something to checkpoint."""


Event = (
    AppConnected
    | AppData
    | AppSent
    | AppClosed
    | PeerFrameReceived
    | ClientFrameReceived
    | PeerReplied
    | PeerMoved
    | PeerReset
    | Committed
    | ChunkWritten
    | LogLoaded
    | CheckpointChecked
    | CheckpointChunkRead
    | RecordsRead
    | SpilledRead
    | LogMeasured
    | LogFailed
    | CheckpointRequested
    | Tick
    | StopRequested
)
