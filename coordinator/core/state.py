"""Shared state of the machine: turn, epoch, versions, output to the app, and the local end of streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from immortal.coordinator.core.effects import Effect, Report, SendToApp
from immortal.coordinator.core.group_commit import GroupCommit
from immortal.coordinator.core.interfaces import CheckpointHeader, VersionStart
from immortal.coordinator.core.life_cycle.session import AppSession, Phase
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.notices import Notice
from immortal.protocol.extensions import encode_impulses_accepted
from immortal.protocol.messages import MessageType, encode_message
from immortal.protocol.peer_frames import FrameType, PeerFrame, RefusedCode
from immortal.protocol.trailer import BatchSource


class Turn:
    """Turn under way. ``now_ns``: instance time (core/clock.py), ns since the Unix epoch. ``effects``: in the order
    in which they are to be carried out; the list object stays the same."""

    __slots__ = ("effects", "now_ns")

    def __init__(self) -> None:
        self.now_ns = 0
        self.effects: list[Effect] = []

    def report(self, notice: Notice) -> None:
        self.effects.append(Report(notice))

    def take_effects(self) -> Sequence[Effect]:
        """Return the effects since the last call, and clear them."""
        effects = self.effects
        if not effects:
            return ()
        taken = effects[:]
        effects.clear()
        return taken


# Epoch: rises with each app that connects, so that receivers can tell frames of a past epoch.


class Epoch:
    """Epoch of the instance. ``number``: the last one in the log. ``began_ns``: when it began in this process; 0:
    before."""

    __slots__ = ("_log", "_turn", "began_ns", "number")

    def __init__(self, log: GroupCommit, turn: Turn) -> None:
        self.number = 0
        self.began_ns = 0
        self._log = log
        self._turn = turn

    def begin(self, *, ahead: int = 1) -> int:
        """Begin a new epoch, ``ahead`` of the last; return the commit to wait for, which is behind everything the
        last app sent."""
        group = self._log.append_outside_record(0)
        self.number += ahead
        self.began_ns = self._turn.now_ns
        group.transaction.epoch = self.number
        return group.ticket


# Versions: which version of the app handles which part of the log, and the upgrade that is asked for.


FIRST_VERSION = 1


class Versions:
    """Versions of the app in this log. ``upgrade_to``: the version that the next recovery ends in; None: no upgrade."""

    def __init__(self, upgrade_to: int | None) -> None:
        self.starts: list[VersionStart] = []
        self.upgrade_to = upgrade_to
        self._ahead: deque[VersionStart] = deque()

    def load(self, starts: Sequence[VersionStart]) -> None:
        """Take the version starts of the log, oldest first."""
        self.starts = list(starts)
        if self.upgrade_to == self.current:
            self.upgrade_to = None

    @property
    def current(self) -> int:
        return self.starts[-1].version if self.starts else FIRST_VERSION

    def begin_at(self, header: CheckpointHeader) -> None:
        """Start a replay at this checkpoint; it passes the versions that began after it."""
        self._ahead = deque(behind(self.starts, header))

    def continues_with(self, start: VersionStart, fed_sequence_id: int) -> bool:
        """Take a version that has begun in a followed log. False if the app got records of it as the old version."""
        if fed_sequence_id > start.sequence_id:
            return False
        self._ahead.append(start)
        return True

    def began(self, start: VersionStart) -> None:
        self.starts.append(start)
        self.upgrade_to = None

    def replay_bound(self, target_sequence_id: int) -> int:
        """Return the last record, up to ``target_sequence_id``, for the code of the present version."""
        return min(self._ahead[0].sequence_id, target_sequence_id) if self._ahead else target_sequence_id

    def version_starts_after(self, fed_sequence_id: int) -> bool:
        """Return whether another version begins after this record."""
        return bool(self._ahead) and fed_sequence_id >= self._ahead[0].sequence_id

    def take_next(self) -> VersionStart:
        return self._ahead.popleft()


def behind(starts: Sequence[VersionStart], header: CheckpointHeader) -> list[VersionStart]:
    """Return those of ``starts`` after the checkpoint of ``header``, oldest first."""
    for index in range(len(starts) - 1, -1, -1):
        if starts[index].version == header.version and starts[index].sequence_id <= header.sequence_id:
            return list(starts[index + 1 :])
    return []


# Output to the app: logged bytes and control records. All bytes count as unsent until the socket takes them.


class AppOutbox:
    __slots__ = ("_session", "_turn")

    def __init__(self, session: AppSession, turn: Turn) -> None:
        self._session = session
        self._turn = turn

    def send(self, data: bytes | memoryview) -> None:
        self._session.unsent_bytes += len(data)
        self._turn.effects.append(SendToApp(data))

    def send_record(self, record: memoryview, batches: Sequence[BatchSource]) -> None:
        """Send a logged ``record``, whose trailer has ``batches``."""
        sources = self._session.sources_record(batches)
        if sources is not None:
            self._turn.effects.append(SendToApp(sources))
        self.send(record)

    def send_control(self, message_type: MessageType, message: bytes | None = None) -> None:
        """Send a control record: ``message``, whole, or one of that type without data."""
        self._turn.effects.append(SendToApp(self._session.control_record(message_type, message)))

    def send_text(self, message_type: MessageType, text: str) -> None:
        """Send a text to an app that has asked for texts."""
        if self._session.phase is Phase.RESTORING or not self._session.is_loaded:
            return  # the app would take it for a part of the blob; or for words of another instance
        if message_type in self._session.extensions:
            self.send_control(message_type, encode_message(message_type, text.encode()))

    def send_acceptances(self) -> None:
        """Tell the app how many impulses are durable, once it has the record after which they are."""
        accepted = self._session.acceptance_to_send()
        if accepted is not None and MessageType.IMPULSES_ACCEPTED in self._session.extensions:
            self.send_control(MessageType.IMPULSES_ACCEPTED, encode_impulses_accepted(accepted))


@dataclass(slots=True, eq=False, repr=False)
class LocalEndpoint:
    """Local end of all streams: the instance, its epoch, and what its streams share."""

    name: str
    limits: Limits
    log: GroupCommit
    effects: list[Effect]  # where effects go; the machine's
    committer_id: int = 0
    epoch: int = 0
    ready: bool = False  # the instance has completed its first start
    app_knows_extensions: bool = False  # its calls and answers are as WIRE.md's part 4.1 says: who waits shows
    app_takes_verdicts: bool = False  # it can leave out a call that is refused
    accepting: bool = False  # of new input: by the right to write, and not while stopping
    following: bool = False  # another writes the log: what the app makes goes nowhere
    log_full: str = ""  # why no input is taken from peers, in words; "" if it is
    epoch_began_ns: int = 0  # ns since the Unix epoch
    catching_up: bool = False  # a replay is making messages again: receivers may have more than there are yet
    held: bool = False  # nothing is sent: what was put in place of a cut's losses, or taken back, is not durable yet
    held_ticket: int = 0  # of the last verdict's commit: what the app sends behind it waits for that
    wants_replies: bool = True  # something is held up until a receiver answers
    trim_ticket: int = 0  # of the commit behind which spilled outputs can be removed from the log; 0: of none

    def frame(
        self,
        frame_type: FrameType,
        receiver: str,
        position: int,
        *,
        count: int = 0,
        time_ns: int = 0,
        payload: bytes = b"",
        code: RefusedCode = RefusedCode.NONE,
        reason: str = "",
    ) -> PeerFrame:
        """Return a frame of this instance in its epoch."""
        return PeerFrame(
            frame_type,
            self.name,
            receiver,
            self.committer_id,
            self.epoch,
            position,
            count,
            time_ns,
            payload,
            code,
            reason,
        )
