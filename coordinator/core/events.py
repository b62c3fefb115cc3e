"""Events: what can happen to a coordinator. The runtime or a simulator makes them; the machine handles them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from immortal.coordinator.core.effects import (
    CheckCheckpoint,
    Commit,
    LoadLog,
    ReadCheckpointChunk,
    ReadLetters,
    ReadRecords,
    ReadSpilled,
    ReadTail,
    WriteCheckpointChunk,
)
from immortal.coordinator.core.errors import LogError
from immortal.coordinator.core.interfaces import Letter, LogSpace, LogSummary, Offer, OutputBatch, StoredClients, Token
from immortal.coordinator.core.permissions import Permission
from immortal.protocol.client_frames import ClientFrame
from immortal.protocol.peer_frames import PeerFrame
from immortal.protocol.system_methods import Order
from immortal.protocol.verdicts import MessageKey


class Started(Struct):
    """The first event of all: the process has begun."""


class AppConnected(Struct):
    """An app has connected. Only one at a time: the runtime turns others away."""


class AppData(Struct):
    """Bytes from the app, in any pieces."""

    data: bytes


class AppSent(Struct):
    """The app's socket has taken ``size_bytes`` more of what SendToApp handed over."""

    size_bytes: int


class AppClosed(Struct):
    """The app's connection has ended."""


class PeerFrameReceived(Struct):
    """A peer coordinator says something; ``token`` is to be given back in ReplyToPeer, once."""

    token: Token
    frame: PeerFrame


class ClientFrameReceived(Struct):
    """A client, which is no instance, says something; ``token`` is for ReplyToClient, as often as there is need.

    ``caller``: the name that its key stands for, "" without keys.
    """

    token: Token
    frame: ClientFrame
    caller: str = ""


class PermissionsChanged(Struct):
    """The settings give callers other permissions; see :class:`immortal.coordinator.core.permissions.Permissions`.

    ``has_keys``: callers prove their names.
    """

    given: Mapping[str, Permission]
    has_keys: bool = False


class PeerReplied(Struct):
    """A peer has answered a frame of ours; ``tag`` is that of the SendToPeer it answers."""

    destination: str
    tag: int
    frame: PeerFrame


class PeerMoved(Struct):
    """A destination is reached at another place, or for the first time: nothing in flight to it will arrive."""

    destination: str


class PeerReset(Struct):
    """An operator asks to forget which log ``peer`` had; answered by PeerResetDone with ``token``."""

    peer: str
    token: Token


class Reclaimed(Struct):
    """An operator says that this log counts, and no copy of it that has run; answered by PeerResetDone."""

    token: Token


class LettersDropped(Struct):
    """An operator, ``who``, removes these dead letters (None: all); answered by OperatorAnswered with ``token``."""

    keys: Sequence[MessageKey] | None
    who: str
    token: Token


class LettersRetried(Struct):
    """An operator, ``who``, gives dead letters, as they are in the log (None: it has none), to the app once more.

    Answered by OperatorAnswered with ``token``.
    """

    letters: Mapping[MessageKey, Letter | None]
    who: str
    token: Token


class MessageSkipped(Struct):
    """An operator, ``who``, wants this message passed over; answered by OperatorAnswered with ``token``.

    ``message``: as it is in the log, from its size on; None: there is no such message.
    """

    sequence_id: int
    message_index: int
    reason: str
    who: str
    message: bytes | None
    token: Token


class InstancePaused(Struct):
    """An operator, ``who``, wants the app to get no more input; answered by OperatorAnswered with ``token``."""

    who: str
    token: Token


class InstanceResumed(Struct):
    """An operator, ``who``, wants the app to get its input again; answered by OperatorAnswered with ``token``."""

    who: str
    token: Token


class HandlersAsked(Struct):
    """An operator asks for the handlers that wait (``task`` 0), or for all that the app knows of one; answered by
    OperatorAnswered with ``token``.

    ``retries``: effects of that one that wait for their next attempt are to be tried at once.
    """

    task: int
    token: Token
    retries: bool = False


class HandlerOrdered(Struct):
    """An operator orders a handler to do something; answered by OperatorAnswered with ``token``, once that is done."""

    order: Order
    token: Token


class WriteLeaseGranted(Struct):
    """Answers AcquireWriteLease: this coordinator is the log's writer, and nobody else is from now on.

    ``term``: rises with each that is given the right. ``appends_max``: as many Commits are worth handing over at once.
    """

    term: int
    appends_max: int = 1


class WriteLeaseHeld(Struct):
    """Answers AcquireWriteLease: ``holder`` (a text) has the lease. WriteLeaseGranted follows once it is lost."""

    holder: str


class Committed(Struct):
    """The transaction of the Commit with this ticket is durable, and all before it."""

    ticket: int


class Fenced(Struct):
    """The log did not take the Commit with this ticket, nor will it take later ones: ``holder``, in words, writes
    it."""

    ticket: int
    holder: str


class TailRead(Struct):
    """Answers ReadTail: the log ends with the record ``last_sequence_id``, and of this writer's appends it has those up
    to ``ticket`` (0: none)."""

    ticket: int
    last_sequence_id: int


class ChunkWritten(Struct):
    """A WriteCheckpointChunk is done."""

    size_bytes: int


class StandbysChanged(Struct):
    """The log's followers have changed. ``is_ready``: one of them has all but the last moment of the log."""

    is_ready: bool


class CheckpointOffered(Struct):
    """A follower has offered the checkpoint that AskStandby asked for."""

    offer: Offer


class CheckpointAsked(Struct):
    """The writer asks this follower, in ``epoch``, for a checkpoint with this ID."""

    checkpoint_id: int
    epoch: int


class ChunkOffered(Struct):
    """Answers OfferChunk. ``problem``: why it was not taken; the checkpoint is not wanted any more, or can't be had."""

    checkpoint_id: int
    size_bytes: int
    problem: str = ""


class LogLoaded(Struct):
    """Answers LoadLog."""

    summary: LogSummary
    clients: StoredClients | None = None


class CheckpointChecked(Struct):
    """Answers CheckCheckpoint: ``problem`` is None where every byte is what was written."""

    checkpoint_id: int
    problem: str | None


class CheckpointChunkRead(Struct):
    """Answers ReadCheckpointChunk; empty behind the last chunk."""

    data: bytes


class RecordsRead(Struct):
    """Answers ReadRecords: verified values (record + trailer), in order.

    ``summary``: for who follows, the log as it was once these were in it.
    """

    values: Sequence[bytes]
    summary: LogSummary | None = None
    session: int | None = None  # that of the ReadRecords; None: that of now


class SpilledRead(Struct):
    """Answers ReadSpilled, with its ``destination`` and ``first_position``."""

    destination: str
    first_position: int
    batches: Sequence[OutputBatch]


class LettersRead(Struct):
    """Answers ReadLetters; ``problems``: what is wrong with those that can't be read, in words."""

    letters: Sequence[Letter]
    problems: Sequence[str] = ()


class LogMeasured(Struct):
    """Measured size of the log and free room. Sent now and then, at least while room is short."""

    space: LogSpace


Asked = (
    Commit
    | WriteCheckpointChunk
    | ReadTail
    | LoadLog
    | CheckCheckpoint
    | ReadCheckpointChunk
    | ReadRecords
    | ReadSpilled
    | ReadLetters
)


class LogFailed(Struct):
    """The log could not be read or written.

    ``retryable``: it may be possible later, and ``request`` says what. Of a write nobody knows then whether it was
    done. Else there is no way on.
    """

    error: LogError
    retryable: bool = False
    request: Asked | None = None


class CheckpointRequested(Struct):
    """An operator asks for a checkpoint."""


class Tick(Struct):
    """The moment of a WakeAt has come."""


class ClockMoved(Struct):
    """The first reading of the instance's clock (core/clock.py), and each that differs from what the steady one says.

    ``time_ns``: since the Unix epoch, when the steady clock was at ``steady_ns``. ``jumped_ns``: what of it was a step.
    """

    time_ns: int
    steady_ns: int
    jumped_ns: int = 0


class StopRequested(Struct):
    """Stop cleanly: with a checkpoint where there is something to checkpoint.

    ``hands_over``: another one follows the log and goes on: as soon as all input that was taken is durable, and without
    a checkpoint.
    """

    hands_over: bool = False


Event = (
    Started
    | AppConnected
    | AppData
    | AppSent
    | AppClosed
    | PeerFrameReceived
    | ClientFrameReceived
    | PermissionsChanged
    | PeerReplied
    | PeerMoved
    | PeerReset
    | Reclaimed
    | LettersDropped
    | LettersRetried
    | MessageSkipped
    | InstancePaused
    | InstanceResumed
    | HandlersAsked
    | HandlerOrdered
    | WriteLeaseGranted
    | WriteLeaseHeld
    | Committed
    | Fenced
    | TailRead
    | ChunkWritten
    | StandbysChanged
    | CheckpointOffered
    | CheckpointAsked
    | ChunkOffered
    | LogLoaded
    | CheckpointChecked
    | CheckpointChunkRead
    | RecordsRead
    | SpilledRead
    | LettersRead
    | LogMeasured
    | LogFailed
    | CheckpointRequested
    | Tick
    | ClockMoved
    | StopRequested
)
