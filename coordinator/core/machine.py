"""The coordinator as one state machine: events in, effects out.

It composes the app's session, the group commit and the streams. An event never waits: what must wait for something
(durability, room in a window, an answer of the disk) is picked up again by the event that brings it.

The order that keeps the promises: input -> log -> durable -> (acknowledged to its sender, given to the app); and what
the app makes of a record is sent only after that record was given to it, so after it was durable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coordinator.core import events as ev
from coordinator.core.app_clock import AppClock
from coordinator.core.app_messages import Calls, read_calls, refuse_too_large
from coordinator.core.back_pressure import BackPressure
from coordinator.core.careful import Watch
from coordinator.core.checkpointing import Checkpointing
from coordinator.core.clients import Clients
from coordinator.core.clock import RunningTime
from coordinator.core.dead_letters import Operator
from coordinator.core.effects import (
    CloseApp,
    Commit,
    Effect,
    LoadLog,
    OpenPeer,
    PauseApp,
    PeerResetDone,
    ReadRecords,
    Report,
    ResumeApp,
    SendToApp,
    Stop,
    Trim,
    UpgradeEnded,
)
from coordinator.core.errors import AppProtocolError, DivergenceError
from coordinator.core.failing import Failing
from coordinator.core.group_commit import Group, GroupCommit
from coordinator.core.impulses import Impulses
from coordinator.core.interfaces import (
    ONESELF,
    CheckpointHeader,
    LogSummary,
    StoredClients,
    Transaction,
    VersionStart,
)
from coordinator.core.limits import Limits
from coordinator.core.log_room import LogRoom
from coordinator.core.permissions import Permission
from coordinator.core.recovery import Recovery
from coordinator.core.replay_check import ReplayPolicy
from coordinator.core.session import (
    AWAITING_CHECKPOINT,
    GETS_RECORDS,
    INTRODUCED,
    SENDS_IMPULSES,
    UPGRADES,
    AppSession,
    Phase,
    Step,
)
from coordinator.core.status import describe, describe_flow, describe_peers
from coordinator.core.streams.intake import Intake
from coordinator.core.streams.peers import Peers
from coordinator.core.streams.reset import RECLAIM_EPOCHS
from coordinator.core.verdicts import Verdicts
from coordinator.core.versions import Versions
from coordinator.core.wakes import Wakes
from protocol.client import CLIENTS, ClientFrameType
from protocol.errors import ImmortalError, RemoteProtocolError
from protocol.extensions import (
    REPORTS,
    decode_app_description,
    decode_hello,
    encode_impulses_accepted,
    encode_version,
)
from protocol.limits import RPC_FRONT_SIZE_BYTES_MAX
from protocol.messages import (
    MessageType,
    decode_attach_to,
    encode_checkpoint,
    encode_message,
)
from protocol.readers import BlobData, BlobStart, Message, TooLargeRpc
from protocol.record import CHECKPOINT_SEQUENCE_ID, decode_header, encode_record
from protocol.trailer import BatchKind, BatchSource, decode_trailer
from protocol.verdicts import MessageKey

_CALLS = frozenset({MessageType.RPC, MessageType.RPC_BATCH, MessageType.STREAM_BATCH, MessageType.IMPULSE_BATCH})
LOGGED_EXTENSIONS = frozenset({MessageType.RECORD_TIME, MessageType.INSTANCE_NAME})
"""Extensions that change what the log holds: an app must ask for the same ones all its life."""


class Machine:
    """One coordinator, from the opening of its log to its end.

    ``name``: the instance. ``summary``: its log, as opened. ``upgrade_to``: the version of the app that its next
    recovery is to end in. ``promote``: a recovered app begins to work without a checkpoint first.
    ``clients``: what the log holds of clients. ``permissions``: of callers, by name; others may call all methods.
    ``running``: when it ran before; by default, always.
    """

    def __init__(
        self,
        name: str,
        summary: LogSummary,
        limits: Limits | None = None,
        upgrade_to: int | None = None,
        *,
        promote: bool = False,
        clients: StoredClients | None = None,
        permissions: Mapping[str, Permission] | None = None,
        running: RunningTime | None = None,
    ) -> None:
        self.name = name
        self.limits = limits or Limits()
        self.stopped = False
        self._effects: list[Effect] = []
        self._now_ns = 0
        self.running = running or RunningTime()
        self._committer_id = summary.committer_id
        self._epoch = summary.epoch
        self._epoch_began_ns = 0
        last_checkpoint_ns = max((header.time_ns for header in summary.checkpoints), default=0)
        self._log = GroupCommit(
            summary.committer_id,
            summary.last_sequence_id,
            max(summary.last_time_ns, last_checkpoint_ns),
            self.limits.group_size_bytes,
        )
        self._log.with_record_time = MessageType.RECORD_TIME in (summary.extensions or ())
        rpc_size_bytes_max = self.limits.arguments_bytes_max + RPC_FRONT_SIZE_BYTES_MAX
        self._session = AppSession(summary.committer_id, rpc_size_bytes_max)
        self._app_clock = AppClock(self._session, self._send_message)
        self._policy = ReplayPolicy(name, self.limits, self._session, self._effects)
        self._intake = intake = Intake(name, permissions or {}, recovers=summary.extensions is not None)
        self._permissions = intake.permissions
        self._peers = Peers(
            name,
            summary.committer_id,
            self.limits,
            self._log,
            summary.epoch,
            self._effects,
            ready=summary.extensions is not None,
            committer_ids=dict(summary.peers),
            policy=self._policy,
            intake=intake,
            starts=dict(summary.stream_starts),
            app_speaks=not INTRODUCED.isdisjoint(summary.extensions or ()),
        )
        self._peers.load_inputs(summary)
        self._clients = Clients(
            name,
            summary.committer_id,
            self.limits,
            self._log,
            self._effects,
            clients or StoredClients(),
            lambda: self._peers.ready,
            self._peers.delivery,
            self.running,
        )
        self._impulses = Impulses(summary, self.limits, self._log, self._peers)
        self._load_ticket = 0  # the commit to wait for before the log is loaded for a new session
        self._extensions = summary.extensions
        self._recovery = Recovery(name)
        self._checkpoints = Checkpointing(self.limits, summary.checkpoints)
        self._versions = Versions(summary.versions, upgrade_to)
        self._passing: VersionStart | None = None  # the version of the log's past that the app is being upgraded to
        self._promote = promote
        self._unproved = False  # the app is primary, and has not shown that its replay is whole
        self._behind = False  # its replay has made less than the log knows of: what it holds back is still to come
        self._cut = False  # the log that is replayed was cut by hand
        self._healing: Transaction | None = None
        self._waiting_told = False
        self._resets: deque[tuple[int, object]] = deque()  # (commit to wait for, token) of what an operator asked
        self._reclaims: deque[tuple[int, object]] = deque()  # the same, while their epoch is not durable yet
        self._wakes = Wakes(self.limits, self._effects)
        self._back_pressure = BackPressure(self.limits)
        self._log_room = LogRoom(name, self.limits)
        verdicts = Verdicts(summary, self.limits, self._log)
        self._failing = Failing(
            name,
            self.limits,
            self._log,
            self._session,
            self._peers,
            self._checkpoints,
            self._effects,
            verdicts,
            Watch(summary.suspect, self.limits.kills_max),
        )
        intake.failing = self._failing
        self._operator = Operator(self._failing, verdicts, self._impulses, self._log_room, self._effects)
        self._stopping = False
        self._final_checkpoint_asked = False
        self._final_checkpoint_id = 0
        self._goodbye_said = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.AppConnected: self._app_connected,
            ev.AppData: self._app_data,
            ev.AppSent: self._app_sent,
            ev.AppClosed: self._app_closed,
            ev.PeerFrameReceived: self._peer_frame_received,
            ev.ClientFrameReceived: self._client_frame_received,
            ev.PermissionsChanged: self._permissions_changed,
            ev.PeerReplied: self._peer_replied,
            ev.PeerMoved: self._peer_moved,
            ev.PeerReset: self._peer_reset,
            ev.Reclaimed: self._reclaimed,
            ev.LettersDropped: self._letters_dropped,
            ev.LettersRetried: self._letters_retried,
            ev.MessageSkipped: self._message_skipped,
            ev.Committed: self._committed,
            ev.ChunkWritten: self._chunk_written,
            ev.LogLoaded: self._log_loaded,
            ev.CheckpointChecked: self._checkpoint_checked,
            ev.CheckpointChunkRead: self._checkpoint_chunk_read,
            ev.RecordsRead: self._records_read,
            ev.SpilledRead: self._spilled_read,
            ev.LettersRead: self._letters_read,
            ev.LogMeasured: self._log_measured,
            ev.LogFailed: self._log_failed,
            ev.CheckpointRequested: self._checkpoint_requested,
            ev.Tick: self._tick,
            ev.ClockMoved: self._clock_moved,
            ev.StopRequested: self._stop_requested,
        }

    def take(self, events: Sequence[ev.Event], now_ns: int) -> Sequence[Effect]:
        """Take in ``events``: what they ask for by themselves, above all the record that the app waits for.

        A turn (driver/turn.py) is this, :meth:`advance` and :meth:`settle`: for who has something to do in between.
        ``events``: what has come in, in order. ``now_ns``: the instance's time (core/clock.py), ns since the Unix
        epoch. A step of it comes with the event that tells it.
        """
        self._now_ns = now_ns
        self.running.reached(now_ns)
        for event in events:
            if self.stopped:
                break
            try:
                self._handlers[type(event)](event)
            except ImmortalError as error:
                if isinstance(event, ev.AppData) and isinstance(error, RemoteProtocolError):
                    self._refuse_app(error)
                else:
                    self._stop(self._policy.explained(error))
        return self._take_effects()

    def advance(self) -> Sequence[Effect]:
        """Behind each :meth:`take`: what is possible now, be it to read, to send or to commit."""
        return self._guarded(self._advance)

    def settle(self) -> Sequence[Effect]:
        """Behind the last :meth:`advance` of a turn: what is looked at once all else is under way. It commits and sends
        to peers nothing."""
        return self._guarded(self._settle)

    def _guarded(self, part: Callable[[], None]) -> Sequence[Effect]:
        if not self.stopped:
            try:
                part()
            except ImmortalError as error:
                self._stop(self._policy.explained(error))
        return self._take_effects()

    def _take_effects(self) -> Sequence[Effect]:
        if not self._effects:
            return ()
        effects = self._effects[:]
        self._effects.clear()
        return effects

    def _advance(self) -> None:
        self._behind = self._behind and self._peers.replay_is_behind()
        self._feed()
        if self._impulses.held_bytes and not self._impulses_wait:
            self._impulses.let_in(self._epoch, self._now_ns)
        if self._peers.turns.waiting_bytes:
            self._peers.take_turns(self._now_ns)
        self._peers.send(self._now_ns)
        for answers in self._peers.take_answers():
            self._clients.answered(answers)
        self._clients.flush()
        self._commit()

    def _settle(self) -> None:
        self._ask_for_checkpoint()
        self._push_back()
        self._wakes.look_after(self._peers, self._now_ns)
        self._finish_stop()

    def _commit(self) -> None:
        if not self._log.commits_next:
            return
        marked = self._session.phase in (Phase.NORMAL, Phase.CHECKPOINTING)
        while self._log.commits_next:
            # Marks are new once only: they are taken when there is a record to hold them.
            marks = self._peers.new_marks(self._log.next_ticket) if marked and self._log.seals_next else {}
            group = self._log.next_commit(self._now_ns, marks)
            if group is not None:
                self._effects.append(Commit(group.ticket, group.transaction, group.size_bytes))

    # --- the app connects: load, restore, replay -------------------------------------------------------------------

    def _app_connected(self, event: ev.AppConnected) -> None:
        self._session.connect()
        self._session.advance(Step.APP_CONNECTED)
        self._app_clock.connected()
        # The new epoch's commit is behind all that the last app has sent: once it is durable, so is that.
        group = self._log.append_outside_record(0)
        self._epoch += 1
        self._epoch_began_ns = self._now_ns
        group.transaction.epoch = self._epoch
        self._load_ticket = group.ticket

    def _log_loaded(self, event: ev.LogLoaded) -> None:
        if self._session.phase is not Phase.LOADING:
            return
        if self._peers.ready:
            self._effects.append(self._recovery.choose(event.summary))
            return
        self._peers.restore(None, event.summary, self._epoch, self._epoch_began_ns)
        self._failing.begin(event.summary, -1)
        if self._session.heard:  # else as soon as its Hello is here
            self._introduce()
        self._session.advance(Step.LOG_IS_NEW)
        self._send_control(MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT)

    def _checkpoint_checked(self, event: ev.CheckpointChecked) -> None:
        if self._session.phase is not Phase.LOADING:
            return
        if event.problem is not None:
            self._report(
                "error",
                f"checkpoint {event.checkpoint_id} is damaged ({event.problem}); falling back to the one before",
            )
            if (check := self._recovery.choose_another(event.checkpoint_id)) is not None:
                self._effects.append(check)
        elif (chosen := self._recovery.chosen(event.checkpoint_id)) is not None:
            self._restore(*chosen)

    def _restore(self, header: CheckpointHeader, summary: LogSummary) -> None:
        session = self._session
        session.advance(Step.CHECKPOINT_CHOSEN)
        session.fed_sequence_id = header.sequence_id
        session.replay_target = self._log.durable_sequence_id
        self._checkpoints.asked(self._log.logged_bytes)
        self._versions.begin_at(header)
        self._cut = summary.cut_sequence_id is not None
        self._healing = None
        self._waiting_told = self._unproved = self._behind = False
        self._peers.restore(header, summary, self._epoch, self._epoch_began_ns)
        self._intake.open_calls.restore(header.open_calls, header.sequence_id)
        self._failing.begin(summary, header.sequence_id)
        record = encode_record(self._committer_id, CHECKPOINT_SEQUENCE_ID, encode_checkpoint(header.size_bytes))
        self._send(record)
        self._report(
            "info",
            "recovering",
            {
                "checkpoint": header.checkpoint_id,
                "after_record": header.sequence_id,
                "to_replay": session.replay_target - header.sequence_id,
                "epoch": self._epoch,
            },
        )

    def _checkpoint_chunk_read(self, event: ev.CheckpointChunkRead) -> None:
        session = self._session
        session.reading = False
        if session.phase is not Phase.RESTORING:
            return
        self._recovery.chunk_read(event.data)
        self._send(event.data)
        if self._recovery.next_read() is None:
            session.advance(Step.BLOB_SENT)  # what the app says from here on, it may say as one that is restored

    def _records_read(self, event: ev.RecordsRead) -> None:
        session = self._session
        session.reading = False
        if session.phase not in GETS_RECORDS or self._final_checkpoint_asked:
            return
        replaying = session.phase is Phase.REPLAYING
        for value in event.values:
            header = decode_header(value)
            if header.sequence_id != session.fed_sequence_id + 1:
                return  # of a session that has ended, or from behind the replay's end
            if header.sequence_id > self._last_to_feed():
                return
            record = memoryview(value)[: header.size_bytes]
            trailer = decode_trailer(memoryview(value)[header.size_bytes :], header.check)
            if replaying:
                self._peers.expect(header.sequence_id, record, trailer)
                self._intake.replayed(header.sequence_id, record, trailer.batches)
            session.fed_sequence_id = header.sequence_id
            self._send_record(record, trailer.batches)

    def _feed(self) -> None:
        """Give the app what it may have and has room for."""
        session = self._session
        phase = session.phase
        if phase is Phase.LOADING:
            if self._load_ticket and self._log.durable_ticket >= self._load_ticket:
                self._load_ticket = 0
                self._effects.append(LoadLog())
            return
        if session.unsent_bytes >= self.limits.app_window_bytes or session.reading or self._final_checkpoint_asked:
            return
        if phase is Phase.RESTORING:
            read = self._recovery.next_read()
            session.reading = read is not None
            if read is not None:
                self._effects.append(read)
            else:
                session.advance(Step.BLOB_SENT)
        if session.phase is Phase.REPLAYING:
            if self._waits_for_hello:
                return
            self._introduce()
            self._end_replay_if_due()
        if session.phase in GETS_RECORDS and not session.reading and session.fed_sequence_id < self._last_to_feed():
            session.reading = True
            self._effects.append(ReadRecords(session.fed_sequence_id + 1, self.limits.read_size_bytes))
        self._tell_acceptance()

    def _introduce(self) -> None:
        """What the app is to know before its first record."""
        self._failing.introduce()
        self._app_clock.introduce()

    @property
    def _waits_for_hello(self) -> bool:
        """The app has a Hello to send, and that says what it is to be told before its first record."""
        return not self._session.heard and not INTRODUCED.isdisjoint(self._extensions or ())

    def _last_to_feed(self) -> int:
        """The last record that the app may be given now."""
        session = self._session
        if session.phase is Phase.REPLAYING:
            return self._versions.replay_bound(session.replay_target)
        if self._behind or (session.phase is Phase.BECOMING_PRIMARY and not self._app_flushes):
            return session.replay_target  # of a later one's calls nobody could tell those that are still missing
        return self._log.durable_sequence_id

    @property
    def _app_flushes(self) -> bool:
        """Before a checkpoint the app sends all that it has made; one of the base protocol may do so behind it."""
        return MessageType.STREAM_BATCH in self._session.extensions

    def _end_replay_if_due(self) -> None:
        """At the start of another version, and at the end of the replay, the app is told what it is to become."""
        session, versions = self._session, self._versions
        fed = session.fed_sequence_id
        at_end = fed >= session.replay_target and not versions.begins_behind(fed)
        if at_end and self._cut and self._waits_for_peers():
            return
        if at_end and versions.upgrade_to is None and self._promote and not self._cut:
            self._promote_if_due()
        elif at_end and versions.upgrade_to is None:
            session.advance(Step.CAUGHT_UP)
            session.checkpoint_sequence_id = fed
            self._send_control(MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT)
        elif self._extensions and not session.heard:
            return  # its Hello is on its way: it says whether the app wants to know the version
        elif at_end:
            session.checkpoint_sequence_id = fed
            self._ask_for_upgrade(versions.upgrade_to)
        elif versions.begins_behind(fed):
            self._passing = versions.take_next()
            self._ask_for_upgrade(self._passing.version)

    def _promote_if_due(self) -> None:
        """The app may work once all is made again that the log knows of; its next checkpoint proves the rest."""
        if self._peers.replay_is_behind():
            return
        session = self._session
        session.advance(Step.PROMOTED)
        self._unproved = True
        self._replay_is_known()  # but for what the last calls come to: for a moment, more may count as open than are
        self._send_control(MessageType.BECOMING_PRIMARY)
        self._report("info", "recovered", {"epoch": self._epoch, "sequence_id": session.fed_sequence_id})

    def _waits_for_peers(self) -> bool:
        """What receivers have of a lost part is theirs to say: an acknowledgement may have been lost with it."""
        unheard = self._peers.unheard()
        if unheard and not self._waiting_told:
            self._waiting_told = True
            names = ", ".join(map(repr, unheard))
            self._report(
                "warning", f"the log was cut: waiting for {names} to say how much of this instance's calls they have"
            )
        return bool(unheard)

    def _ask_for_upgrade(self, version: int | None) -> None:
        session = self._session
        session.advance(Step.UPGRADE_ASKED)
        messages = encode_message(MessageType.UPGRADE_TAKE_CHECKPOINT)
        if version is not None and MessageType.VERSION in session.extensions:
            messages = encode_version(version) + messages
        self._effects.append(SendToApp(session.control_record(MessageType.UPGRADE_TAKE_CHECKPOINT, messages)))

    def _tell_acceptance(self) -> None:
        accepted = self._session.acceptance_to_send()
        if accepted is not None and MessageType.IMPULSES_ACCEPTED in self._session.extensions:
            record = self._session.control_record(MessageType.IMPULSES_ACCEPTED, encode_impulses_accepted(accepted))
            self._effects.append(SendToApp(record))

    def _send_record(self, record: memoryview, batches: Sequence[BatchSource]) -> None:
        sources = self._session.sources_record(batches)
        if sources is not None:
            self._effects.append(SendToApp(sources))
        self._send(record)

    def _send(self, data: bytes | memoryview) -> None:
        self._session.unsent_bytes += len(data)
        self._effects.append(SendToApp(data))

    def _send_control(self, message_type: MessageType) -> None:
        self._effects.append(SendToApp(self._session.control_record(message_type)))

    def _send_message(self, message_type: MessageType, message: bytes) -> None:
        self._effects.append(SendToApp(self._session.control_record(message_type, message)))

    @property
    def waits_for_peers(self) -> bool:
        """Whether a PeerReplied would change anything now, or may as well come with the next event."""
        return self._peers.wants_replies or self._back_pressure.paused or self._cut or self._stopping

    @property
    def waits_for_app(self) -> bool:
        """Whether an AppSent would change anything now, or may as well come with the next event."""
        return self._session.unsent_bytes >= self.limits.app_window_bytes or self._goodbye_said

    def _app_sent(self, event: ev.AppSent) -> None:
        self._session.unsent_bytes -= event.size_bytes

    # --- the app speaks --------------------------------------------------------------------------------------------

    def _app_data(self, event: ev.AppData) -> None:
        session = self._session
        if session.phase is Phase.WAITING or session.refused:
            return
        reader = session.reader
        reader.receive_data(event.data)
        while (message := reader.next_event()) is not None:
            if isinstance(message, Message):
                self._app_message(message)
            elif isinstance(message, BlobStart):
                self._blob_started(message)
            elif isinstance(message, TooLargeRpc):
                self._heard_base_app()
                self._report("error", refuse_too_large(session, message), kind="too large")
            else:
                self._blob_data(message)

    def _app_message(self, message: Message) -> None:
        session = self._session
        message_type = message.message_type
        if not session.heard:
            session.heard = True
            if message_type == MessageType.HELLO:
                session.hello = decode_hello(message.data)
            self._check_extensions()
            self._permissions.app_came(takes_verdicts=MessageType.VERDICTS in session.extensions)
            if message_type == MessageType.HELLO:
                if session.phase is Phase.FIRST_START:
                    self._introduce()
                return
        if message_type in _CALLS:
            for calls in read_calls(session, self.name, message):
                self._take(calls)
        elif message_type == MessageType.ATTACH_TO:
            destination = decode_attach_to(message.data)
            if destination != self.name:
                session.attached.add(destination)
                if destination != CLIENTS:
                    self._effects.append(OpenPeer(destination))
        elif message_type == MessageType.TAKE_CHECKPOINT:
            self._checkpoints.wanted = True
        elif message_type == MessageType.SNAPSHOT_CHUNK:
            self._snapshot_chunk(message)
        elif message_type == MessageType.SNAPSHOT_BEGIN:
            self._snapshot_begun()
        elif message_type == MessageType.SNAPSHOT_END:
            self._snapshot_ended(message)
        elif message_type == MessageType.APP_DESCRIPTION:
            session.description = decode_app_description(message.data)
            self._failing.methods = session.description.methods
            self._clients.describe_methods(session.description)
            self._permissions.describe(session.description)
            self._answer_parked()
        elif message_type == MessageType.UPGRADE_FAILED:
            self._upgrade_failed(message.data.decode("utf-8", "replace"))
        elif message_type == MessageType.INITIAL_MESSAGE:
            if session.phase is not Phase.FIRST_START or session.initial_message is not None:
                raise AppProtocolError("an InitialMessage may come once, at the first start, before the checkpoint")
            session.initial_message = message.data
        elif message_type == MessageType.RETRY_REFUSED:
            self._operator.retry_refused()
        elif message_type in REPORTS:
            self._failing.received(message, self._now_ns, stopping=self._stopping)
        elif message_type == MessageType.HELLO:
            raise AppProtocolError("a Hello must be the app's first message")
        else:
            raise AppProtocolError(f"the app sent a message of type {message_type}, which is not for apps to send")

    def _heard_base_app(self) -> None:
        """It begins with something that is no Hello."""
        if not self._session.heard:
            self._session.heard = True
            self._permissions.app_came(takes_verdicts=False)
            self._check_extensions()

    def _check_extensions(self) -> None:
        """The log's records have, or have not, what the app asked for at its first start."""
        if not self._peers.ready:
            return
        logged = LOGGED_EXTENSIONS & (self._extensions or frozenset())
        asked = LOGGED_EXTENSIONS & self._session.extensions
        if logged != asked - (frozenset({MessageType.INSTANCE_NAME}) - logged):  # an older log may lack the name
            raise AppProtocolError(
                f"the log of {self.name!r} was begun by an app with the extensions {sorted(map(int, logged))}, "
                f"this one asks for {sorted(map(int, asked))}: an instance keeps the kind of app that it was begun with"
            )

    def _take(self, calls: Calls) -> None:
        if not calls.impulses:
            self._peers.append(calls.destination, calls.count, calls.payload)
        elif self._impulses_wait or self._impulses.held_bytes:
            self._impulses.hold(calls)
        else:
            self._impulses.take(calls, self._epoch, self._now_ns)

    @property
    def _impulses_wait(self) -> bool:
        """For room in the log; or until the upgrade that the app takes for done is."""
        return bool(self._log_room.full) or self._session.phase not in SENDS_IMPULSES

    def _refuse_app(self, error: RemoteProtocolError) -> None:
        """The app broke the protocol: its connection ends; the next one recovers."""
        self._session.refused = True
        what = f"the app broke the protocol: {error}; its connection is closed, nothing logged is lost"
        self._report("error", what, kind="the app broke the protocol")
        self._say(MessageType.REFUSAL, str(error))
        self._effects.append(CloseApp())

    def _say(self, message_type: MessageType, text: str) -> None:
        if self._session.phase is Phase.RESTORING:
            return  # the app would take it for a part of the blob
        if message_type in self._session.extensions:
            message = encode_message(message_type, text.encode())
            self._effects.append(SendToApp(self._session.control_record(message_type, message)))

    def _app_closed(self, event: ev.AppClosed) -> None:
        session = self._session
        if session.phase is Phase.WAITING:
            return
        if not session.refused and (session.reader.buffered_bytes or session.reader.inside_blob):
            self._report("warning", "the app's connection ended in the middle of a message; that message is dropped")
        if self._goodbye_said:
            self._stop(None)
            return
        self._report("warning", "the app is gone; waiting for the next one", {"phase": session.phase.value})
        if session.phase in UPGRADES and self._versions.upgrade_to is not None:
            self._report(
                "warning",
                f"the upgrade to version {self._versions.upgrade_to} was interrupted: the old version is whole, "
                f"and the upgrade is tried again at the next start",
            )
        # While it was not read, something that it had sent may be lost.
        self._failing.app_lost(stopping=self._stopping, all_heard=not self._back_pressure.paused)
        self._operator.app_lost()
        session.advance(Step.APP_LOST)
        session.connect()
        self._log.forget_app()
        self._intake.open_calls.is_known = not self._peers.ready  # if it is, the next app recovers
        self._peers.forget_outputs()
        self._checkpoints.abandon()
        self._checkpoints.wanted = False
        self._recovery.forget()
        self._load_ticket = 0
        self._back_pressure.paused = False
        self._impulses.forget()
        if self._stopping:
            self._stop(None)

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def _ask_for_checkpoint(self) -> None:
        session = self._session
        if session.phase is not Phase.NORMAL or self._final_checkpoint_asked or not self._checkpoints.settled:
            return
        if self._stopping or self._behind or self._checkpoints.is_due(self._log.logged_bytes, self._now_ns):
            self._checkpoints.asked(self._log.logged_bytes)
            self._final_checkpoint_asked = self._stopping
            session.advance(Step.CHECKPOINT_ASKED)
            session.checkpoint_sequence_id = session.fed_sequence_id
            self._send_control(MessageType.TAKE_CHECKPOINT)

    def _blob_started(self, blob: BlobStart) -> None:
        session = self._session
        self._heard_base_app()
        if session.phase not in AWAITING_CHECKPOINT or self._checkpoints.on_its_way:
            raise AppProtocolError(
                f"the app sent a Checkpoint in the phase {session.phase.value!r}, none was asked for"
            )
        if session.phase is Phase.FIRST_START and session.initial_message is None:
            raise AppProtocolError("the app's first checkpoint came without an InitialMessage (type 9) before it")
        if session.phase is Phase.UPGRADING:
            if self._passing is None:
                self._require_upgraded()
                self._finish_replay()
            return  # only the checkpoint that confirms an upgrade is kept
        if session.phase is Phase.BECOMING_PRIMARY or self._behind:
            self._finish_replay()
        self._begin_checkpoint()

    def _finish_replay(self) -> None:
        self._replay_is_known()
        if self._cut:
            self._healing = self._peers.heal_cut()
            self._clients.lose_open()
            return
        # What was held back at one checkpoint comes behind it, so before the next.
        all_sent = self._app_flushes or self._behind
        self._peers.finish_replay(all_sent=all_sent)
        self._behind = not all_sent and self._policy.compares and self._peers.replay_is_behind()

    def _replay_is_known(self) -> None:
        """A recovery has made all answers once more that there were."""
        if not self._intake.open_calls.is_known:
            self._intake.open_calls.is_known = True
            self._answer_parked()

    def _begin_checkpoint(self) -> None:
        session = self._session
        if self._unproved:
            self._unproved = False
            self._finish_replay()
        outputs = self._peers.outputs
        version = self._versions.current
        if session.phase is Phase.FIRST_START:
            version = session.description.version
        elif session.phase is Phase.CONFIRMING_UPGRADE:
            version = self._versions.upgrade_to or version
        checkpoint_id = self._checkpoints.begin(
            session.checkpoint_sequence_id,
            version,
            {name: stream.mark for name, stream in outputs.items()},
            {name: stream.unacknowledged for name, stream in outputs.items() if stream.memory_bytes},
            self._intake.open_calls.open_at(session.checkpoint_sequence_id),
        )
        if self._final_checkpoint_asked:
            self._final_checkpoint_id = checkpoint_id

    def _blob_data(self, blob: BlobData) -> None:
        if self._session.phase is Phase.UPGRADING:
            if blob.last:
                self._upgraded()
            return
        self._receive_checkpoint(blob.data, last=blob.last)
        if blob.last:
            self._end_checkpoint()

    def _receive_checkpoint(self, data: bytes, *, last: bool) -> None:
        chunk = self._checkpoints.receive(data, last=last)
        if chunk is not None:
            self._effects.append(chunk)

    def _end_checkpoint(self) -> None:
        session = self._session
        header = self._checkpoints.end(self._log.time_ns(self._now_ns))
        group = self._log.append_outside_record(0)
        if session.phase is Phase.FIRST_START:
            group = self._log_first_record()
        if session.phase is Phase.BECOMING_PRIMARY:
            self._report("info", "recovered", {"epoch": self._epoch, "sequence_id": session.fed_sequence_id})
        if self._healing is not None:
            group.transaction.absorb(self._healing)
            self._healing = None
        group.transaction.checkpoint = header
        if self._final_checkpoint_asked:
            self._failing.end_well(group.transaction)
        if session.phase is Phase.CONFIRMING_UPGRADE:
            app = session.hello.label if session.hello else ""
            group.transaction.version = VersionStart(header.version, header.sequence_id, app)
            session.advance(Step.UPGRADE_CONFIRMED)
        else:
            session.advance(Step.CHECKPOINT_RECEIVED)

    # A checkpoint that the app takes beside its work: its state is that of the Begin, its bytes come in between.

    def _snapshot_begun(self) -> None:
        session = self._session
        if session.phase is not Phase.CHECKPOINTING or self._checkpoints.on_its_way:
            raise AppProtocolError(f"the app began a snapshot in the phase {session.phase.value!r}, none was asked for")
        self._begin_checkpoint()

    def _snapshot_chunk(self, message: Message) -> None:
        if not self._checkpoints.on_its_way or self._session.phase is not Phase.CHECKPOINTING:
            raise AppProtocolError("the app sent a part of a snapshot that it had not begun")
        self._receive_checkpoint(message.data, last=False)

    def _snapshot_ended(self, message: Message) -> None:
        if not self._checkpoints.on_its_way or self._session.phase is not Phase.CHECKPOINTING:
            raise AppProtocolError("the app ended a snapshot that it had not begun")
        if not message.data:
            self._receive_checkpoint(b"", last=True)
            self._end_checkpoint()
            return
        self._checkpoints.abandon()
        self._session.advance(Step.CHECKPOINT_ABANDONED)
        reason = message.data.decode("utf-8", "replace")
        what = f"the app could not take its checkpoint: {reason}; the one before stays in use"
        self._report("error", what, kind="no checkpoint")
        if self._final_checkpoint_asked:
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        self._goodbye_said = True
        self._say(MessageType.GOODBYE, "the coordinator was asked to stop")
        self._effects.append(CloseApp())

    # --- upgrades ----------------------------------------------------------------------------------------------------

    def _require_upgraded(self) -> None:
        """An app that names its version must be of the one that was asked for. Raises AppProtocolError."""
        session, wanted = self._session, self._versions.upgrade_to
        if MessageType.APP_DESCRIPTION in session.extensions and session.description.version != wanted:
            problem = f"the app is of version {session.description.version}, the upgrade is to version {wanted}"
            self._give_up_upgrade(problem)
            raise AppProtocolError(problem)

    def _upgraded(self) -> None:
        """The app has sent the checkpoint that an upgrade begins with."""
        session = self._session
        session.upgraded = True
        if self._passing is not None:
            self._passing = None
            session.advance(Step.UPGRADE_REPLAYED)
            return
        session.advance(Step.CHECKPOINT_RECEIVED)
        self._send_control(MessageType.TAKE_CHECKPOINT)

    def _upgrade_failed(self, reason: str) -> None:
        session = self._session
        if session.phase not in UPGRADES:
            raise AppProtocolError("the app says that an upgrade failed, none was asked for")
        if self._passing is not None:
            raise DivergenceError(
                f"the app can't repeat the upgrade to version {self._passing.version} that the log has behind record "
                f"{self._passing.sequence_id}: {reason}"
            )
        session.refused = True
        self._give_up_upgrade(reason)
        self._effects.append(CloseApp())

    def _give_up_upgrade(self, reason: str) -> None:
        version, self._versions.upgrade_to = self._versions.upgrade_to, None
        if version is not None:
            self._report(
                "error",
                f"the upgrade to version {version} failed: {reason}; version {self._versions.current} goes on",
            )
            self._effects.append(UpgradeEnded(version, reason))

    def _version_began(self, start: VersionStart) -> None:
        """A version is durable: of the first start, or behind an upgrade."""
        before = self._versions.current
        self._versions.began(start)
        if start.sequence_id < 0:
            return
        if self._session.phase is Phase.COMPLETING_UPGRADE:
            self._session.advance(Step.UPGRADE_DURABLE)
            self._report("info", "recovered", {"epoch": self._epoch, "sequence_id": self._session.fed_sequence_id})
        self._report(
            "info",
            "upgraded",
            {"from_version": before, "to_version": start.version, "after_record": start.sequence_id},
        )
        self._effects.append(UpgradeEnded(start.version))
        self._operator.upgraded()

    # --- more of checkpoints -----------------------------------------------------------------------------------------

    def _log_first_record(self) -> Group:
        """The initial message is record 0, durable together with the first checkpoint: never one without the other."""
        session = self._session
        self._log.with_record_time = MessageType.RECORD_TIME in session.extensions
        message = encode_message(MessageType.INITIAL_MESSAGE, session.initial_message or b"")
        source = BatchSource(BatchKind.INITIAL, ONESELF, 1, 1, self._now_ns)
        chunks = [message]
        if MessageType.INSTANCE_NAME in session.extensions:  # in the log, so that each replay tells it again
            chunks.insert(0, encode_message(MessageType.INSTANCE_NAME, self.name.encode()))
        group = self._log.append(chunks, sum(map(len, chunks)), source)
        group.transaction.extensions = self._extensions = session.extensions
        self._peers.app_speaks = session.speaks
        app = session.hello.label if session.hello else ""
        group.transaction.version = VersionStart(session.description.version, -1, app)
        return group

    def _checkpoint_committed(self, header: CheckpointHeader) -> None:
        wake_at_ns = self._checkpoints.became_durable(header)
        if wake_at_ns is not None:
            self._wakes.checkpoint_at(wake_at_ns)
        self._failing.checkpoint_durable(header.sequence_id)
        self._report(
            "info",
            "checkpoint taken",
            {"checkpoint": header.checkpoint_id, "after_record": header.sequence_id, "bytes": header.size_bytes},
        )
        if not self._peers.ready:
            self._peers.became_ready(self._now_ns)
        self._effects.append(Trim())
        if header.checkpoint_id == self._final_checkpoint_id:
            self._say_goodbye()

    def _chunk_written(self, event: ev.ChunkWritten) -> None:
        self._checkpoints.chunks_pending_bytes -= event.size_bytes

    def _checkpoint_requested(self, event: ev.CheckpointRequested) -> None:
        self._checkpoints.wanted = True

    def _tick(self, event: ev.Tick) -> None:
        """Time has passed. Whether a checkpoint is due is looked at in each turn."""
        self._wakes.tick(self._now_ns, self._peers.retry_failed, self._answer_parked)

    def _clock_moved(self, event: ev.ClockMoved) -> None:
        self._app_clock.moved(event)

    # --- the log ---------------------------------------------------------------------------------------------------

    def _committed(self, event: ev.Committed) -> None:
        group = self._log.committed(event.ticket)
        self._peers.turns.committed(event.ticket, self._now_ns)
        transaction = group.transaction
        session = self._session
        if group.impulses_accepted:
            session.note_accepted(group.impulses_accepted, self._log.durable_sequence_id)
        if (
            group.record is not None
            and group.sequence_id == session.fed_sequence_id + 1
            and group.sequence_id <= self._last_to_feed()
            and session.phase in (Phase.NORMAL, Phase.CHECKPOINTING, Phase.BECOMING_PRIMARY)
            and session.unsent_bytes < self.limits.app_window_bytes
            and not self._final_checkpoint_asked
        ):  # the app is up to date: the very bytes that were just written go to it
            session.fed_sequence_id = group.sequence_id
            self._send_record(group.record, group.batches)
        if transaction.sources:
            self._peers.became_durable(transaction.sources.items(), self._now_ns)
        if CLIENTS in transaction.acknowledged:
            self._peers.answers_durable(transaction.acknowledged[CLIENTS])
        while self._reclaims and self._reclaims[0][0] <= event.ticket:
            self._reclaim_streams(self._reclaims.popleft()[1])
        while self._resets and self._resets[0][0] <= event.ticket:
            self._effects.append(PeerResetDone(self._resets.popleft()[1], True))
        self._operator.committed(event.ticket)
        if transaction.epoch is not None:
            self._report("debug", "new epoch", {"epoch": transaction.epoch})
        if self._peers.trim_ticket and event.ticket >= self._peers.trim_ticket:
            self._peers.trim_ticket = 0
            self._effects.append(Trim())
        if transaction.cut_healed:
            self._cut = self._peers.held = False
        if transaction.version is not None:
            self._version_began(transaction.version)
        if transaction.checkpoint is not None:
            self._checkpoint_committed(transaction.checkpoint)

    def _log_failed(self, event: ev.LogFailed) -> None:
        self._stop(event.error)

    def _log_measured(self, event: ev.LogMeasured) -> None:
        """A log that is full takes no input but what the app makes of it: that is the way to a checkpoint, and room."""
        room, session = self._log_room, self._session
        if room.measured(event.space):
            self._peers.log_full = room.full
            self._clients.log_full = bool(room.full)
            if room.full:
                self._report("error", f"no more input is taken from peers, and no impulses: {room.full}", kind="full")
            else:
                self._report("info", "the log has room again: input is taken from peers, and impulses")
        last = self._checkpoints.last
        if session.phase is Phase.NORMAL and room.wants_checkpoint(
            session.fed_sequence_id, self._log.durable_sequence_id, last
        ):
            self._checkpoints.wanted = True

    # --- peers -----------------------------------------------------------------------------------------------------

    def _peer_frame_received(self, event: ev.PeerFrameReceived) -> None:
        self._peers.received(event.token, event.frame, self._now_ns)

    def _client_frame_received(self, event: ev.ClientFrameReceived) -> None:
        if event.frame.frame_type is ClientFrameType.REQUEST:
            self._peers.turns.heard(CLIENTS, self._now_ns)
        self._clients.received(event.token, event.frame, self._now_ns, event.caller)

    def _permissions_changed(self, event: ev.PermissionsChanged) -> None:
        self._intake.change(event.given)
        self._answer_parked()

    def _answer_parked(self) -> None:
        if self._peers.ready:
            self._peers.answer_parked(self._now_ns)

    def _peer_replied(self, event: ev.PeerReplied) -> None:
        self._peers.replied(event.destination, event.tag, event.frame)

    def _peer_moved(self, event: ev.PeerMoved) -> None:
        self._peers.moved(event.destination)

    def _spilled_read(self, event: ev.SpilledRead) -> None:
        self._peers.spilled_read(event.destination, event.first_position, event.batches)

    def _peer_reset(self, event: ev.PeerReset) -> None:
        group = self._peers.reset(event.peer)
        if group is None:
            self._effects.append(PeerResetDone(event.token, False))
            return
        self._resets.append((group.ticket, event.token))
        self._report("warning", "what was known of a peer's log is forgotten", {"peer": event.peer})

    def _reclaimed(self, event: ev.Reclaimed) -> None:
        """First an epoch ahead of the copy's: the greetings with it follow once it is durable."""
        group = self._log.append_outside_record(0)
        self._epoch += RECLAIM_EPOCHS
        self._epoch_began_ns = self._now_ns
        group.transaction.epoch = self._epoch
        self._reclaims.append((group.ticket, event.token))

    def _reclaim_streams(self, token: object) -> None:
        self._peers.epoch, self._peers.epoch_began_ns = self._epoch, self._epoch_began_ns
        group = self._log.append_outside_record(0)
        for peer in self._peers.known():
            group = self._peers.reset(peer, forked=True) or group
        self._resets.append((group.ticket, token))
        self._report("warning", "this log counts from now on, and no copy of it", {"epoch": self._epoch})

    # --- the operator ------------------------------------------------------------------------------------------------

    def _letters_dropped(self, event: ev.LettersDropped) -> None:
        self._operator.drop(event, self._now_ns)

    def _letters_retried(self, event: ev.LettersRetried) -> None:
        self._operator.retry(event, self._epoch, self._now_ns)

    def _letters_read(self, event: ev.LettersRead) -> None:
        for problem in event.problems:
            self._report("error", f"{problem}: it is not retried")
        self._operator.letters_read(event, self._versions.current, self._epoch, self._now_ns)

    def _message_skipped(self, event: ev.MessageSkipped) -> None:
        if self._operator.skip(event, self._now_ns):
            self._session.refused = True
            self._effects.append(CloseApp())

    # --- back-pressure and the end -----------------------------------------------------------------------------------

    def _push_back(self) -> None:
        limits, pressure = self.limits, self._back_pressure
        self._effects += pressure.look(self._peers, self._now_ns)
        full = (
            self._log.from_app_bytes > limits.log_pending_bytes
            or self._checkpoints.chunks_pending_bytes > limits.chunks_pending_bytes
            # ... the last checkpoint comes behind what the app has sent
            or (bool(pressure.held_up_for) and not self._stopping)
            or (self._impulses.held_bytes > limits.log_pending_bytes and self._app_has_nothing_to_do)
        )
        if full != pressure.paused and self._session.phase is not Phase.WAITING:
            pressure.paused = full
            self._effects.append(PauseApp() if full else ResumeApp())

    @property
    def _app_has_nothing_to_do(self) -> bool:
        """Nobody waits for what the app sends: no record is on its way to it, no checkpoint from it."""
        session = self._session
        caught_up = session.fed_sequence_id == self._log.durable_sequence_id and session.unsent_bytes <= 0
        return caught_up and session.phase is Phase.NORMAL and not self._stopping

    def _stop_requested(self, event: ev.StopRequested) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._peers.accepting = self._clients.accepting = False
        self._failing.stop_asked(self._now_ns)
        if self._session.phase not in (Phase.NORMAL, Phase.CHECKPOINTING, Phase.BECOMING_PRIMARY):
            self._say(MessageType.GOODBYE, "the coordinator was asked to stop")
            self._stop(None)

    def _finish_stop(self) -> None:
        if self._goodbye_said and self._session.unsent_bytes <= 0:
            self._stop(None)

    def _stop(self, error: ImmortalError | None) -> None:
        if self.stopped:
            return
        if error is not None and self._session.phase is not Phase.WAITING:
            self._say(MessageType.REFUSAL, f"the coordinator stops: {error}")
        self.stopped = True
        self._session.advance(Step.STOP)
        self._effects.append(Stop(error))

    def _report(self, level: str, message: str, fields: dict[str, object] | None = None, kind: str = "") -> None:
        self._effects.append(Report(level, message, fields or {}, kind))

    def peers_status(self) -> dict[str, dict[str, object]]:
        """What `immortal peers show` shows of each other instance; plain values."""
        return describe_peers(self._peers, self._back_pressure.held_up_for)

    @property
    def forbidden(self) -> Mapping[str, int]:
        """Calls that were refused as their caller may not make them, by caller, since the start."""
        return self._failing.forbidden

    @property
    def held_back(self) -> Mapping[str, int]:
        """How often calls had to wait since there were too many, by caller, since the start."""
        return self._permissions.held_back

    @property
    def letters(self) -> list[MessageKey]:
        """The dead letters that are kept, oldest first."""
        return list(self._failing.verdicts.letters)

    def handling_in_words(self, now_ns: int) -> str:
        """The handler that the app does not come back from, in words; "" where there is none."""
        return self._failing.watch.in_words(now_ns)

    @property
    def waits_for_room(self) -> bool:
        """The log has too little: to be measured again although nothing happens."""
        return bool(self._log_room.full)

    def status(self, now_ns: int) -> dict[str, object]:
        """What `immortal status` shows of a live instance; plain values."""
        return describe(
            self.name,
            self._committer_id,
            self._epoch,
            self._session,
            self._log,
            self._peers,
            self._checkpoints.last,
            now_ns,
        ) | {
            **describe_flow(self._back_pressure, self._log_room, self._log, self.name, self.limits),
            **self._failing.describe(now_ns),
            "impulses": self._impulses.count,
            "held_back": dict(self._permissions.held_back),
            "open_calls": self._intake.open_calls.counts,
            "clients": self._clients.describe(),
            "version": self._versions.current,
            "upgrade_to": self._versions.upgrade_to,
        }
