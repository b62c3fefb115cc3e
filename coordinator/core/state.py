"""State that the machine's components share. The docstring of each component says which part of it that changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from immortal.coordinator.core.availability.write_lease import LogRequests, WriteLease
from immortal.coordinator.core.checkpoints.policy import CheckpointPolicy
from immortal.coordinator.core.clock import Timers
from immortal.coordinator.core.effects import Effect, Report, SendToApp
from immortal.coordinator.core.group_commit import GroupCommit
from immortal.coordinator.core.interfaces import CheckpointHeader, LogSpace, VersionStart
from immortal.coordinator.core.life_cycle.session import AppSession, Pause, Phase, Shutdown
from immortal.coordinator.core.limits import MIB, Limits
from immortal.coordinator.core.notices import Notice
from immortal.protocol.extensions import encode_impulses_accepted
from immortal.protocol.limits import RPC_FRONT_SIZE_BYTES_MAX
from immortal.protocol.messages import MessageType, encode_message
from immortal.protocol.peer_frames import FrameType, PeerFrame, RefusedCode
from immortal.protocol.record import CONTROL_SEQUENCE_ID, encode_record
from immortal.protocol.trailer import BatchSource

CHECKPOINTS_PER_RECORD_MAX = 2  # the log keeps two checkpoints: old records can be removed once both are new


class CoreState:
    """State that the components of one machine share.

    ``now_ns``: instance time (core/clock.py) of the current turn, ns since the Unix epoch. ``effects``: in the order in
    which the driver must carry them out; the list object stays the same.

    ``epoch``: the last epoch in the log. It rises with each app that connects, so receivers can recognize frames of an
    earlier epoch. ``frame_epoch``: the epoch of the frames that are sent, once a session has restored its streams.
    """

    def __init__(self, name: str, limits: Limits, upgrade_to: int | None = None) -> None:
        self.name = name
        self.limits = limits
        self.now_ns = 0
        self.effects: list[Effect] = []

        # The log, and the write lease.
        self.log = GroupCommit(limits.group_size_bytes)
        self.write_lease = WriteLease()
        self.log_requests = LogRequests(self)
        self.log_capacity = LogCapacity(name, limits)
        self.committer_id = 0
        self.versions = Versions(upgrade_to)
        self.checkpoints = CheckpointPolicy(limits)

        # The app.
        self.session = AppSession(limits.arguments_bytes_max + RPC_FRONT_SIZE_BYTES_MAX)
        self.outbox = AppOutbox(self.session, self.effects)
        self.pause = Pause(self)
        self.shutdown = Shutdown(self)
        self.app_knows_extensions = False  # its calls and answers say who waits, see WIRE.md, part 4.1
        self.app_accepts_verdicts = False  # it can leave out a call that is refused

        # Streams to and from other instances.
        self.epoch = 0
        self.epoch_began_ns = 0  # in this process; 0: before it
        self.frame_epoch = 0
        self.frame_epoch_began_ns = 0
        self.ready = False  # the instance has completed its first start
        self.accepting = False  # new input is accepted: this process writes the log, and is not stopping
        self.following = False  # another process writes the log: the app's outputs are not sent
        self.catching_up = False  # a replay makes messages again: receivers may have more than it has made yet
        self.outputs_held = False  # nothing is sent: what replaces lost or taken-back messages is not durable yet
        self.last_verdict_ticket = 0  # commit of the last verdict: what the app sends after the verdict waits for it
        self.awaits_replies = True  # work waits until a receiver answers
        self.trim_ticket = 0  # commit after which acknowledged spilled outputs can be removed from the log; 0: none

        self.timers = Timers(self)
        self._answers: deque[tuple[int, Effect]] = deque()  # to operators, each with the commit to wait for

    def report(self, notice: Notice) -> None:
        """Report a notice to the operator."""
        self.effects.append(Report(notice))

    def answer_after(self, ticket: int, answer: Effect) -> None:
        """Answer an operator once the commit ``ticket`` is durable."""
        self._answers.append((ticket, answer))

    def committed(self, ticket: int) -> None:
        """Send the operators' answers that waited for commits up to ``ticket``."""
        while self._answers and self._answers[0][0] <= ticket:
            self.effects.append(self._answers.popleft()[1])

    def pop_effects(self) -> Sequence[Effect]:
        """Return the effects since the last call, and clear them."""
        effects = self.effects
        if not effects:
            return ()
        taken = effects[:]
        effects.clear()
        return taken

    def begin_epoch(self, *, ahead: int = 1) -> int:
        """Begin the epoch that is ``ahead`` above the last one. Return the ticket of the commit to wait for: it comes
        after everything that the last app sent."""
        group = self.log.append_outside_record(0)
        self.epoch += ahead
        self.epoch_began_ns = self.now_ns
        group.transaction.epoch = self.epoch
        return group.ticket

    def use_epoch(self) -> None:
        """Send frames under the last epoch from now on."""
        self.frame_epoch, self.frame_epoch_began_ns = self.epoch, self.epoch_began_ns

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
            self.frame_epoch,
            position,
            count,
            time_ns,
            payload,
            code,
            reason,
        )


# Versions: which version of the app handles which part of the log, and the requested upgrade.


FIRST_VERSION = 1


class Versions:
    """Versions of the app in this log. ``upgrade_to``: the version that the next recovery ends in; None: no upgrade."""

    def __init__(self, upgrade_to: int | None) -> None:
        self.starts: list[VersionStart] = []
        self.upgrade_to = upgrade_to
        self._upcoming: deque[VersionStart] = deque()

    def load(self, starts: Sequence[VersionStart]) -> None:
        """Load the version starts of the log, oldest first."""
        self.starts = list(starts)
        if self.upgrade_to == self.current:
            self.upgrade_to = None

    @property
    def current(self) -> int:
        return self.starts[-1].version if self.starts else FIRST_VERSION

    def begin_at(self, header: CheckpointHeader) -> None:
        """Start a replay at this checkpoint; the replay passes the versions that began after it."""
        self._upcoming = deque(after_checkpoint(self.starts, header))

    def add_followed(self, start: VersionStart, fed_sequence_id: int) -> bool:
        """Add a version that began in the followed log; return False if the old version already got its records."""
        if fed_sequence_id > start.sequence_id:
            return False
        self._upcoming.append(start)
        return True

    def version_began(self, start: VersionStart) -> None:
        self.starts.append(start)
        self.upgrade_to = None

    def replay_bound(self, target_sequence_id: int) -> int:
        """Return the last record, up to ``target_sequence_id``, that the current version's code handles."""
        return min(self._upcoming[0].sequence_id, target_sequence_id) if self._upcoming else target_sequence_id

    def version_starts_after(self, fed_sequence_id: int) -> bool:
        """Return True if the next version begins after this record or an earlier one."""
        return bool(self._upcoming) and fed_sequence_id >= self._upcoming[0].sequence_id

    def pop_next(self) -> VersionStart:
        return self._upcoming.popleft()


def after_checkpoint(starts: Sequence[VersionStart], header: CheckpointHeader) -> list[VersionStart]:
    """Return the version starts that come after the checkpoint of ``header``, oldest first."""
    for index in range(len(starts) - 1, -1, -1):
        if starts[index].version == header.version and starts[index].sequence_id <= header.sequence_id:
            return list(starts[index + 1 :])
    return []


# Output to the app: logged records and control records. All bytes count as unsent until the socket takes them.


class AppOutbox:
    """Sends the app its records and control records."""

    __slots__ = ("_effects", "_session")

    def __init__(self, session: AppSession, effects: list[Effect]) -> None:
        self._session = session
        self._effects = effects

    def send(self, data: bytes | memoryview) -> None:
        self._session.unsent_bytes += len(data)
        self._effects.append(SendToApp(data))

    def send_record(self, record: memoryview, batches: Sequence[BatchSource]) -> None:
        """Send a logged ``record``, whose trailer has ``batches``."""
        sources = self._session.sources_record(batches)
        if sources is not None:
            self.send(sources)
        self.send(record)

    def send_control(self, message_type: MessageType, message: bytes | None = None) -> None:
        """Send a control record: the whole ``message``, or an empty one of ``message_type``."""
        message = message or encode_message(message_type)
        self.send(encode_record(self._session.committer_id, CONTROL_SEQUENCE_ID, message))

    def send_text(self, message_type: MessageType, text: str) -> None:
        """Send a text to an app that has asked for texts."""
        if self._session.phase is Phase.RESTORING or not self._session.is_loaded:
            return  # the app would read it as part of the blob, or as a text of another instance
        if message_type in self._session.extensions:
            self.send_control(message_type, encode_message(message_type, text.encode()))

    def send_acceptances(self) -> None:
        """Tell the app how many impulses are durable, once it has the record before them."""
        accepted, acceptances = None, self._session.acceptances
        while acceptances and acceptances[0][0] <= self._session.fed_sequence_id:
            accepted = acceptances.popleft()[1]
        if accepted is not None and MessageType.IMPULSES_ACCEPTED in self._session.extensions:
            self.send_control(MessageType.IMPULSES_ACCEPTED, encode_impulses_accepted(accepted))


class LogCapacity:
    """Room in the log. ``full_reason``: why the log refuses all input that it can refuse; "" while there is room."""

    def __init__(self, name: str, limits: Limits) -> None:
        self.full_reason = ""
        self.space: LogSpace | None = None
        self._name = name
        self._limits = limits
        self._requested_at = -2  # the record after which a checkpoint was last asked for
        self._request_count = 0  # number of requests at that record

    def measured(self, space: LogSpace) -> bool:
        """Note a measurement; return True if :attr:`full_reason` changed. A full log has room at 90 % of its limit."""
        self.space = space
        limits, was_full = self._limits, bool(self.full_reason)
        used_max, free_min = limits.log_limit_bytes, limits.disk_free_bytes_min
        too_large = used_max is not None and space.used_bytes > (used_max * 9 // 10 if was_full else used_max)
        too_little = space.free_bytes < (free_min * 11 // 10 if was_full else free_min)
        if was_full == (too_large or too_little):
            return False
        self.full_reason = self._reason(space, too_large=too_large) if not was_full else ""
        self._requested_at = -2
        return True

    def _reason(self, space: LogSpace, *, too_large: bool) -> str:
        if too_large:
            limit_text = _mib_text(self._limits.log_limit_bytes or 0)
            what = f"its log takes {_mib_text(space.used_bytes)}, log_limit_mb is {limit_text}"
        else:
            free, least = _mib_text(space.free_bytes), _mib_text(self._limits.disk_free_bytes_min)
            what = f"its disk has {free} left, disk_free_mb is {least}"
        return f"{self._name!r} is full: {what}; its app must catch up, or the limit be raised"

    def wants_checkpoint(self, fed_sequence_id: int, durable_sequence_id: int, last: CheckpointHeader | None) -> bool:
        """Return True if a checkpoint now would free records: the app has handled at least a quarter of those after the
        last one. Call it once for each measurement."""
        if not self.full_reason or last is None:
            return False
        behind = durable_sequence_id - last.sequence_id
        if fed_sequence_id < durable_sequence_id and (fed_sequence_id - last.sequence_id) * 4 < behind:
            return False
        if self._requested_at != fed_sequence_id:
            self._requested_at, self._request_count = fed_sequence_id, 0
        self._request_count += 1
        return self._request_count <= CHECKPOINTS_PER_RECORD_MAX


def _mib_text(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.0f} MiB"
