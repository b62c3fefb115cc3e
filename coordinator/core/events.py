"""Events: all that can happen to a coordinator. The runtime or a simulator creates them; the machine handles them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from immortal.coordinator.core.effects import Read, Write
from immortal.coordinator.core.errors import LogError
from immortal.coordinator.core.interfaces import Letter, LogSpace, LogSummary, Offer, OutputBatch, StoredClients, Token
from immortal.coordinator.core.permissions import Permission
from immortal.protocol.client_frames import ClientFrame
from immortal.protocol.peer_frames import PeerFrame
from immortal.protocol.system_methods import Order
from immortal.protocol.verdicts import MessageKey


class Event(Struct):
    """Something that happened to a coordinator."""


class Started(Event):
    """The process has started: the first event of all."""


class AppConnected(Event):
    """An app has connected. There is one at a time: the runtime rejects others."""


class AppData(Event):
    """Bytes from the app, in any pieces."""

    data: bytes


class AppSent(Event):
    """The app's socket has taken ``size_bytes`` more of what SendToApp handed over."""

    size_bytes: int


class AppClosed(Event):
    """The app's connection has ended."""


class PeerFrameReceived(Event):
    """A peer coordinator has sent a frame; ReplyToPeer must give back ``token`` once."""

    token: Token
    frame: PeerFrame


class ClientFrameReceived(Event):
    """A client, which is not an instance, has sent a frame; ReplyToClient can use ``token`` any number of times.

    ``caller``: the name that its key proves, "" without keys.
    """

    token: Token
    frame: ClientFrame
    caller: str = ""


class PermissionsChanged(Event):
    """Callers' permissions have changed; see :class:`immortal.coordinator.core.permissions.Permissions`.

    ``has_keys``: callers prove their names.
    """

    by_caller: Mapping[str, Permission]
    has_keys: bool = False


class PeerReplied(Event):
    """A peer has answered a frame of this instance; ``tag`` is that of the answered SendToPeer."""

    destination: str
    tag: int
    frame: PeerFrame


class PeerMoved(Event):
    """A destination has another address, or its first one: nothing in flight to it will arrive."""

    destination: str


class PeerReset(Event):
    """An operator asks to forget which log ``peer`` had; answered by PeerResetDone with ``token``."""

    peer: str
    token: Token


class Reclaimed(Event):
    """An operator declares this log valid, and no copy of it that has run; answered by PeerResetDone."""

    token: Token


class LettersDropped(Event):
    """The operator ``operator`` removes these dead letters (None: all); answered by OperatorAnswered with ``token``."""

    keys: Sequence[MessageKey] | None
    operator: str
    token: Token


class LettersRetried(Event):
    """The operator ``operator`` retries dead letters, given as the log has them (None: the log has none).

    Answered by OperatorAnswered with ``token``.
    """

    letters: Mapping[MessageKey, Letter | None]
    operator: str
    token: Token


class MessageSkipped(Event):
    """The operator ``operator`` asks to skip this message; answered by OperatorAnswered with ``token``.

    ``message``: as the log has it, from its size on; None: there is no such message.
    """

    sequence_id: int
    message_index: int
    reason: str
    operator: str
    message: bytes | None
    token: Token


class InstancePaused(Event):
    """The operator ``operator`` asks to pause the app's input; answered by OperatorAnswered with ``token``."""

    operator: str
    token: Token


class InstanceResumed(Event):
    """The operator ``operator`` asks to resume the app's input; answered by OperatorAnswered with ``token``."""

    operator: str
    token: Token


class HandlersAsked(Event):
    """An operator asks for the waiting handlers (``task`` 0), or for all details of one.

    Answered by OperatorAnswered with ``token``. ``retries``: also try that handler's waiting effects again at once.
    """

    task: int
    token: Token
    retries: bool = False


class HandlerOrdered(Event):
    """An operator gives an order to a waiting handler; answered by OperatorAnswered with ``token``, once it is done."""

    order: Order
    token: Token


class WriteLeaseGranted(Event):
    """Answers AcquireWriteLease: from now on this coordinator alone writes the log.

    ``term``: rises each time that a process gets the lease. ``appends_max``: how many Commits can be in flight.
    """

    term: int
    appends_max: int = 1


class WriteLeaseHeld(Event):
    """Answers AcquireWriteLease: ``holder`` (a text) has the lease. WriteLeaseGranted follows once it is lost."""

    holder: str


class Committed(Event):
    """The transaction of the Commit with this ticket, and all before it, are durable."""

    ticket: int


class Fenced(Event):
    """The log refused the Commit with this ticket, and will refuse later ones: ``holder`` (a text) writes the log
    now."""

    ticket: int
    holder: str


class TailRead(Event):
    """Answers ReadTail: the log ends with the record ``last_sequence_id``, and has this writer's appends up to
    ``ticket`` (0: none)."""

    ticket: int
    last_sequence_id: int


class ChunkWritten(Event):
    """A WriteCheckpointChunk is done."""

    size_bytes: int


class StandbysChanged(Event):
    """The set of the log's followers has changed. ``is_ready``: one of them has nearly all of the log."""

    is_ready: bool


class CheckpointOffered(Event):
    """A follower has offered the checkpoint that RequestStandbyCheckpoint asked for."""

    offer: Offer


class StandbyCheckpointRequested(Event):
    """The writer asks this follower, in ``epoch``, for a checkpoint with this ID."""

    checkpoint_id: int
    epoch: int


class ChunkOffered(Event):
    """Answers OfferChunk. ``problem``: why it was refused: the checkpoint is no longer wanted, or can't be stored."""

    checkpoint_id: int
    size_bytes: int
    problem: str = ""


class LogLoaded(Event):
    """Answers LoadLog."""

    summary: LogSummary
    clients: StoredClients | None = None


class CheckpointChecked(Event):
    """Answers CheckCheckpoint. ``problem``: None if every byte is as it was written."""

    checkpoint_id: int
    problem: str | None


class CheckpointChunkRead(Event):
    """Answers ReadCheckpointChunk; ``data`` is empty after the last chunk."""

    data: bytes


class RecordsRead(Event):
    """Answers ReadRecords: verified values (record + trailer), in order.

    ``summary``: for a follower, the state of the log when these records were in it.
    """

    values: Sequence[bytes]
    summary: LogSummary | None = None
    session: int | None = None  # of the ReadRecords; None: the current one


class SpilledRead(Event):
    """Answers ReadSpilled, with its ``destination`` and ``first_position``."""

    destination: str
    first_position: int
    batches: Sequence[OutputBatch]


class LettersRead(Event):
    """Answers ReadLetters. ``problems``: texts about the letters that can't be read."""

    letters: Sequence[Letter]
    problems: Sequence[str] = ()


class LogMeasured(Event):
    """The log's size and free space were measured. Sent from time to time, at least while room is short."""

    space: LogSpace


class LogFailed(Event):
    """The log could not be read or written.

    ``retryable``: ``request`` may succeed later. It is unknown then whether a write was done. Otherwise the coordinator
    can't continue.
    """

    error: LogError
    retryable: bool = False
    request: Write | Read | None = None


class CheckpointRequested(Event):
    """An operator asks for a checkpoint."""


class Tick(Event):
    """The time of a WakeAt has passed."""


class ClockMoved(Event):
    """The instance's clock (core/clock.py) was read for the first time, or differs from the steady clock's prediction.

    ``time_ns``: since the Unix epoch, when the steady clock was at ``steady_ns``. ``jumped_ns``: the part that was a
    step.
    """

    time_ns: int
    steady_ns: int
    jumped_ns: int = 0


class StopRequested(Event):
    """An operator asks for a clean stop, with a last checkpoint if there is something to checkpoint.

    ``hands_over``: a follower takes over: stop as soon as all accepted input is durable, without a checkpoint.
    """

    hands_over: bool = False
