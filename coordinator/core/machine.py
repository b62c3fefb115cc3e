"""The coordinator as one state machine: events in, effects out.

It composes its parts, says which event is for which of them, and what a turn looks at. An event never waits: what must
wait for something (durability, room in a window, an answer of the disk) is picked up again by the event that brings it.

The order that keeps the promises: input -> log -> durable -> (acknowledged to its sender, given to the app); and what
the app makes of a record is sent only after that record was given to it, so after it was durable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coordinator.core import events as ev
from coordinator.core import notices
from coordinator.core.adopting import Adopting
from coordinator.core.app_clock import AppClock
from coordinator.core.app_inbox import AppInbox
from coordinator.core.app_outbox import AppOutbox
from coordinator.core.back_pressure import BackPressure
from coordinator.core.careful import Watch
from coordinator.core.checkpoint_taking import CheckpointTaking
from coordinator.core.checkpointing import Checkpointing
from coordinator.core.clients import Clients
from coordinator.core.clock import RunningTime
from coordinator.core.dead_letters import Operator
from coordinator.core.effects import Commit, Effect, ReadCheckpointChunk, Stop, Trim
from coordinator.core.epoch import Epoch
from coordinator.core.errors import FencedError
from coordinator.core.failing import Failing
from coordinator.core.feeding import Feeding
from coordinator.core.group_commit import GroupCommit
from coordinator.core.handlers import Handlers
from coordinator.core.impulses import Impulses
from coordinator.core.interfaces import NO_SUSPECT, LogSummary, StoredClients
from coordinator.core.lifecycle import BEHIND, Lifecycle
from coordinator.core.limits import Limits
from coordinator.core.log_access import LogAccess
from coordinator.core.log_room import LogRoom
from coordinator.core.offering import Offering
from coordinator.core.pausing import Pausing
from coordinator.core.permissions import Permission
from coordinator.core.queries import Queries
from coordinator.core.recovery import Recovery
from coordinator.core.replay_check import ReplayPolicy
from coordinator.core.resets import Resets
from coordinator.core.right import Right
from coordinator.core.session import NORMAL, RECOVERED, WORKS, AppSession, Phase, Step
from coordinator.core.status import describe, describe_clients, describe_flow, describe_peers, describe_right
from coordinator.core.stopping import Stopping
from coordinator.core.streams.intake import Intake
from coordinator.core.streams.peers import Peers
from coordinator.core.taking_over import TakingOver
from coordinator.core.turn import Turn
from coordinator.core.upgrades import Upgrades
from coordinator.core.verdicts import Verdicts
from coordinator.core.versions import Versions
from coordinator.core.wakes import Wakes
from protocol.client import CLIENTS, ClientFrameType
from protocol.errors import ImmortalError, RemoteProtocolError
from protocol.limits import RPC_FRONT_SIZE_BYTES_MAX
from protocol.messages import MessageType
from protocol.verdicts import MessageKey


class Machine:
    """One coordinator, from its start to its end. What its log says it knows once it has the right to write it.

    ``name``: the instance. ``upgrade_to``: the version of the app that its next recovery is to end in. ``promote``: a
    recovered app begins to work without a checkpoint first. ``follow``: where another writes the log, follow it until
    the right to write is ours. ``permissions``: of callers, by name; others may call all methods. ``running``: when it
    ran before; by default, always.
    """

    def __init__(
        self,
        name: str,
        limits: Limits | None = None,
        upgrade_to: int | None = None,
        *,
        promote: bool = False,
        follow: bool = False,
        permissions: Mapping[str, Permission] | None = None,
        running: RunningTime | None = None,
    ) -> None:
        self.name = name
        self.limits = limits = limits or Limits()
        self.stopped = False
        self.running = running or RunningTime()
        self._turn = turn = Turn()
        self.right = right = Right()
        self._log = log = GroupCommit(limits.group_size_bytes)
        self._access = access = LogAccess(limits, log, turn)
        self.epoch = epoch = Epoch(log, turn)
        self._session = session = AppSession(limits.arguments_bytes_max + RPC_FRONT_SIZE_BYTES_MAX)
        self._outbox = outbox = AppOutbox(session, turn)
        app_clock = AppClock(session, outbox.control)
        self._policy = policy = ReplayPolicy(name, limits, session, turn.effects)
        self._intake = intake = Intake(name, permissions or {})
        self._peers = peers = Peers(name, limits, log, turn.effects, policy=policy, intake=intake)
        self._clients = Clients(name, limits, log, turn.effects, lambda: peers.ready, peers.delivery, self.running)
        self._impulses = Impulses(limits, log, peers, epoch, turn)
        self._checkpoints = Checkpointing(limits)
        self._versions = Versions(upgrade_to)
        self._wakes = Wakes(limits, turn.effects)
        self._log_room = LogRoom(name, limits)
        verdicts = Verdicts(limits, log)
        watch = Watch(NO_SUSPECT, limits.kills_max)
        self._failing = failing = Failing(
            name, limits, log, session, peers, self._checkpoints, turn.effects, verdicts, watch, right
        )
        intake.failing = failing
        self._operator = Operator(failing, verdicts, self._impulses, self._log_room, self._versions, turn)
        self._pausing = pausing = Pausing(name, session, turn)
        self._waiting = handlers = Handlers(name, session, outbox, self._impulses, self._log_room, pausing, turn)
        self._queries = Queries(name, limits, session, outbox, self._clients, intake, failing, peers, turn)
        self._resets = Resets(log, peers, epoch, turn)
        self._stopping = stopping = Stopping(outbox, turn)
        self._back_pressure = BackPressure(
            limits, session, log, peers, self._checkpoints, self._impulses, stopping, pausing, turn
        )
        self._upgrades = Upgrades(self._versions, session, outbox, self._operator, epoch, turn)
        recovery = Recovery(name)
        self._lifecycle = Lifecycle(
            turn,
            right,
            outbox,
            session,
            app_clock,
            log,
            epoch,
            peers,
            self._clients,
            intake,
            policy,
            failing,
            recovery,
            self._checkpoints,
            self._upgrades,
            self._load,
            limits,
            promote,
        )
        self._taking_over = TakingOver(name, turn, right, session, log, epoch, self._lifecycle, self._load, follow)
        self._feeding = Feeding(
            turn,
            outbox,
            session,
            right,
            limits,
            log,
            peers,
            intake,
            self._versions,
            recovery,
            self._lifecycle,
            stopping,
            pausing,
        )
        self._offering = Offering(
            turn,
            right,
            outbox,
            session,
            log,
            peers,
            intake,
            failing,
            self._checkpoints,
            self._versions,
            policy,
            limits,
        )
        self._adopting = Adopting(
            turn, session, log, epoch, peers, failing, self._checkpoints, self._versions, limits, self._wakes
        )
        self._taking = CheckpointTaking(
            name,
            turn,
            outbox,
            session,
            log,
            access,
            peers,
            intake,
            failing,
            self._checkpoints,
            self._upgrades,
            self._lifecycle,
            stopping,
            self._wakes,
            self._offering,
            self._adopting,
        )
        self._inbox = AppInbox(
            name,
            turn,
            outbox,
            session,
            peers,
            self._clients,
            self._impulses,
            self._log_room,
            intake,
            failing,
            self._operator,
            handlers,
            self._queries,
            self._lifecycle,
            self._taking,
            self._upgrades,
            stopping,
        )
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.Started: self._taking_over.started,
            ev.RightHeld: self._taking_over.held,
            ev.RightGranted: self._right_granted,
            ev.AppConnected: self._lifecycle.connected,
            ev.AppData: self._inbox.received,
            ev.AppSent: self._app_sent,
            ev.AppClosed: self._app_closed,
            ev.PeerFrameReceived: self._peer_frame_received,
            ev.ClientFrameReceived: self._client_frame_received,
            ev.PermissionsChanged: self._permissions_changed,
            ev.PeerReplied: self._peer_replied,
            ev.PeerMoved: self._peer_moved,
            ev.PeerReset: self._resets.peer_reset,
            ev.Reclaimed: self._resets.reclaimed,
            ev.LettersDropped: self._operator.drop,
            ev.LettersRetried: self._operator.retry,
            ev.MessageSkipped: self._operator.skip,
            ev.InstancePaused: pausing.pause,
            ev.InstanceResumed: pausing.resume,
            ev.HandlersAsked: handlers.ask,
            ev.HandlerOrdered: handlers.order,
            ev.Committed: self._committed,
            ev.ChunkWritten: self._chunk_written,
            ev.StandbysChanged: self._adopting.standbys_changed,
            ev.CheckpointOffered: self._adopting.offered,
            ev.CheckpointAsked: self._offering.asked,
            ev.ChunkOffered: self._offering.chunk_offered,
            ev.LogLoaded: self._was_read(self._log_loaded),
            ev.CheckpointChecked: self._was_read(self._checkpoint_checked),
            ev.CheckpointChunkRead: self._was_read(self._feeding.checkpoint_chunk_read),
            ev.RecordsRead: self._was_read(self._feeding.records_read),
            ev.SpilledRead: self._was_read(self._spilled_read),
            ev.LettersRead: self._was_read(self._operator.letters_read),
            ev.TailRead: self._tail_read,
            ev.Fenced: self._fenced,
            ev.LogMeasured: self._log_measured,
            ev.LogFailed: self._log_failed,
            ev.CheckpointRequested: self._checkpoint_requested,
            ev.Tick: self._tick,
            ev.ClockMoved: app_clock.moved,
            ev.StopRequested: self._stop_requested,
        }

    # --- a turn ------------------------------------------------------------------------------------------------------

    def take(self, events: Sequence[ev.Event], now_ns: int) -> Sequence[Effect]:
        """Take in ``events``: what they ask for by themselves, above all the record that the app waits for.

        A turn (driver/turn.py) is this, :meth:`advance` and :meth:`settle`: for who has something to do in between.
        ``events``: what has come in, in order. ``now_ns``: the instance's time (core/clock.py), ns since the Unix
        epoch. A step of it comes with the event that tells it.
        """
        turn = self._turn
        turn.now_ns = now_ns
        self.running.reached(now_ns)
        for event in events:
            if self.stopped:
                break
            try:
                self._handlers[type(event)](event)
            except ImmortalError as error:
                if isinstance(event, ev.AppData) and isinstance(error, RemoteProtocolError):
                    self._inbox.refuse(error)
                else:
                    self._stop(self._policy.explained(error))
        return turn.take_effects()

    def advance(self) -> Sequence[Effect]:
        """Behind each :meth:`take`: what is possible now, be it to read, to send or to commit."""
        if not self.stopped:
            try:
                self._advance(self._turn.now_ns)
            except ImmortalError as error:
                self._stop(self._policy.explained(error))
        return self._turn.take_effects()

    def settle(self) -> Sequence[Effect]:
        """Behind the last :meth:`advance` of a turn: what is looked at once all else is under way. It commits and sends
        to peers nothing."""
        if not self.stopped:
            try:
                self._settle(self._turn.now_ns)
            except ImmortalError as error:
                self._stop(self._policy.explained(error))
        return self._turn.take_effects()

    def _advance(self, now_ns: int) -> None:
        peers, clients = self._peers, self._clients
        if self._lifecycle.proof is BEHIND:
            self._lifecycle.look_whether_behind()
        if self._taking_over.waits:
            self._taking_over.go_on()
            self._feeding.feed()
            self._taking_over.go_on()  # that may have brought the app to where it follows
        else:
            self._feeding.feed()
        if self._offering.waits:
            self._offering.go_on()
        if self._waiting.waits:
            self._waiting.go_on()
        if self._queries.waits:
            self._queries.go_on()
        if self._impulses.held_bytes:
            self._inbox.let_impulses_in()
        if peers.turns.waiting_bytes:
            peers.take_turns(now_ns)
        peers.send(now_ns)
        for answers in peers.take_answers():
            clients.answered(answers)
        clients.flush()
        if self._adopting.is_under_way and self._session.phase is NORMAL:
            self._adopting.go_on()
        while self._log.commits_next:
            self._commit(now_ns)

    def _settle(self, now_ns: int) -> None:
        if self._session.phase is NORMAL and self._checkpoints.settled:
            self._taking.ask_if_due()
        self._back_pressure.look()
        self._wakes.look_after(self._peers, now_ns)
        stopping = self._stopping
        if stopping.said_goodbye and self._session.unsent_bytes <= 0:
            self._stop(None)
        elif stopping.hands_over and self._log.is_idle:
            stopping.say_why()
            self._stop(None)

    # --- the log -----------------------------------------------------------------------------------------------------

    def _right_granted(self, event: ev.RightGranted) -> None:
        self._taking_over.granted(event)
        self._offering.took_over()

    def _checkpoint_checked(self, event: ev.CheckpointChecked) -> None:
        if not self._adopting.checked(event):
            self._lifecycle.checkpoint_checked(event)

    def _log_loaded(self, event: ev.LogLoaded) -> None:
        was_loaded = self._session.is_loaded
        self._taking_over.log_loaded(event)
        if not was_loaded:  # what an app has said by now is judged now
            try:
                self._inbox.received(ev.AppData(b""))
            except RemoteProtocolError as error:
                self._inbox.refuse(error)

    def _load(self, summary: LogSummary, clients: StoredClients | None = None) -> None:
        """All parts take in what the log says. ``clients``: this coordinator is its writer from now on."""
        peers, session = self._peers, self._session
        self._log.load(summary)
        self.epoch.number = summary.epoch
        session.load(summary.committer_id, summary.extensions)
        peers.load(summary)
        self._impulses.load(summary)
        self._checkpoints.load(summary.checkpoints)
        self._versions.load(summary.versions)
        self._failing.load(summary)
        self._intake.open_calls.is_known = not peers.ready  # if it is, the next app recovers
        if clients is not None:
            self._clients.load(summary.committer_id, clients)
            peers.accepting = self._clients.accepting = not self._stopping.asked

    def _commit(self, now_ns: int) -> None:
        log = self._log
        # Marks are new once only: they are taken when there is a record to hold them.
        marked = self._session.phase in WORKS and log.seals_next
        group = log.next_commit(now_ns, self._peers.new_marks(log.next_ticket) if marked else {})
        if group is not None:
            expected_last, fence = group.expected_last_sequence_id, self.right.fence
            self._access.write(Commit(group.ticket, group.transaction, group.size_bytes, expected_last, fence))

    def _committed(self, event: ev.Committed) -> None:
        self._access.written()
        ticket, now_ns, peers = event.ticket, self._turn.now_ns, self._peers
        group = self._log.committed(ticket)
        peers.turns.committed(ticket, now_ns)
        transaction = group.transaction
        if group.impulses_accepted:
            self._session.note_accepted(group.impulses_accepted, self._log.durable_sequence_id)
        self._feeding.committed(group)
        if transaction.sources:
            peers.became_durable(transaction.sources.items(), now_ns)
        if CLIENTS in transaction.acknowledged:
            peers.answers_durable(transaction.acknowledged[CLIENTS])
        self._resets.committed(ticket)
        self._operator.committed(ticket)
        if transaction.epoch is not None:
            self._turn.report(notices.NewEpoch(transaction.epoch))
        if peers.trim_ticket and ticket >= peers.trim_ticket:
            peers.trim_ticket = 0
            self._turn.effects.append(Trim())
        if transaction.cut_healed:
            self._lifecycle.cut_healed()
        if transaction.version is not None:
            self._upgrades.began(transaction.version)
        if transaction.checkpoint is not None:
            self._taking.durable(transaction.checkpoint, adopted=transaction.adopts)

    def _chunk_written(self, event: ev.ChunkWritten) -> None:
        self._access.written()
        self._checkpoints.chunks_pending_bytes -= event.size_bytes

    def _checkpoint_requested(self, event: ev.CheckpointRequested) -> None:
        self._checkpoints.wanted = True

    def _tail_read(self, event: ev.TailRead) -> None:
        for write in self._access.settle(event):
            if isinstance(write, Commit):
                self._committed(ev.Committed(write.ticket))
            else:
                self._chunk_written(ev.ChunkWritten(len(write.data)))

    def _log_failed(self, event: ev.LogFailed) -> None:
        if event.retryable:
            self._access.failed(event)
            self._wakes.log_at(self._access.due_ns)
        elif isinstance(event.request, ReadCheckpointChunk) and self.right.follows:
            if self._session.phase is Phase.RESTORING:  # its writer may have removed it; the next look says
                self._session.reading = False
                self._lifecycle.begin_anew(f"the checkpoint can't be restored ({event.error})")
        else:
            self._stop(event.error)

    def _fenced(self, event: ev.Fenced) -> None:
        """Another has the right to write by now: what is not durable is nobody's, and nothing more may leave."""
        epoch = self.epoch.number
        self._stop(
            FencedError(
                event.holder,
                f"fenced by {event.holder} at epoch {epoch}: it writes the log of {self.name!r} now; nothing that was "
                f"acknowledged is lost, and nothing more of this coordinator counts",
            )
        )

    def _was_read(self, then: Callable[[Any], None]) -> Callable[[Any], None]:
        """``then``, behind a look whether that ends a silence of the log."""
        access = self._access

        def read(event: Any) -> None:
            access.read()
            then(event)

        return read

    def _log_measured(self, event: ev.LogMeasured) -> None:
        """A log that is full takes no input but what the app makes of it: that is the way to a checkpoint, and room."""
        room, session, turn = self._log_room, self._session, self._turn
        if room.measured(event.space):
            self._peers.log_full = room.full
            self._clients.log_full = bool(room.full)
            if room.full:
                turn.report(notices.LogFull(room.full))
            else:
                turn.report(notices.LogHasRoom())
        last = self._checkpoints.last
        if session.phase is Phase.NORMAL and room.wants_checkpoint(
            session.fed_sequence_id, self._log.durable_sequence_id, last
        ):
            self._checkpoints.wanted = True

    # --- the app's connection ----------------------------------------------------------------------------------------

    @property
    def waits_for_app(self) -> bool:
        """Whether an AppSent would change anything now, or may as well come with the next event."""
        return self._session.unsent_bytes >= self.limits.app_window_bytes or self._stopping.said_goodbye

    def _app_sent(self, event: ev.AppSent) -> None:
        self._session.unsent_bytes -= event.size_bytes

    def _app_closed(self, event: ev.AppClosed) -> None:
        session, turn, stopping = self._session, self._turn, self._stopping
        if session.phase is Phase.WAITING:
            return
        if not session.refused and (session.reader.buffered_bytes or session.reader.inside_blob):
            turn.report(notices.AppCutOff())
        if stopping.said_goodbye:
            self._stop(None)
            return
        turn.report(notices.AppGone(session.phase.value))
        self._upgrades.app_lost()
        # While it was not read, something that it had sent may be lost.
        self._failing.app_lost(stopping=stopping.asked, all_heard=not self._back_pressure.paused)
        self._operator.app_lost()
        self._waiting.app_lost()
        self._queries.app_lost()
        session.advance(Step.APP_LOST)
        session.connect()
        self._log.forget_app()
        self._intake.open_calls.is_known = not self._peers.ready  # if it is, the next app recovers
        self._peers.forget_outputs()
        self._checkpoints.abandon()
        self._checkpoints.wanted = False
        self._offering.app_lost()
        self._adopting.app_lost()
        self._lifecycle.app_lost()
        self._back_pressure.paused = False
        self._impulses.forget()
        if stopping.asked:
            self._stop(None)

    # --- peers and clients -------------------------------------------------------------------------------------------

    @property
    def waits_for_peers(self) -> bool:
        """Whether a PeerReplied would change anything now, or may as well come with the next event."""
        return self._peers.wants_replies or self._back_pressure.paused or self._lifecycle.is_cut or self._stopping.asked

    def _peer_frame_received(self, event: ev.PeerFrameReceived) -> None:
        self._peers.received(event.token, event.frame, self._turn.now_ns)

    def _client_frame_received(self, event: ev.ClientFrameReceived) -> None:
        now_ns = self._turn.now_ns
        if event.frame.frame_type is ClientFrameType.QUERY:
            self._queries.received(event.token, event.frame, event.caller)
            return
        if event.frame.frame_type is ClientFrameType.REQUEST:
            self._peers.turns.heard(CLIENTS, now_ns)
        self._clients.received(event.token, event.frame, now_ns, event.caller)

    def _permissions_changed(self, event: ev.PermissionsChanged) -> None:
        self._intake.change(event.given)
        self._answer_parked()

    def _answer_parked(self) -> None:
        if self._peers.ready:
            self._peers.answer_parked(self._turn.now_ns)

    def _peer_replied(self, event: ev.PeerReplied) -> None:
        self._peers.replied(event.destination, event.tag, event.frame)

    def _peer_moved(self, event: ev.PeerMoved) -> None:
        self._peers.moved(event.destination)

    def _spilled_read(self, event: ev.SpilledRead) -> None:
        self._peers.spilled_read(event.destination, event.first_position, event.batches)

    def _tick(self, event: ev.Tick) -> None:
        """Time has passed. Whether a checkpoint is due is looked at in each turn."""
        self._access.tick()
        self._wakes.tick(self._turn.now_ns, self._peers.retry_failed, self._answer_parked)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _stop_requested(self, event: ev.StopRequested) -> None:
        stopping = self._stopping
        if stopping.asked:
            return
        stopping.ask(hands_over=event.hands_over and self._session.phase in WORKS)
        self._peers.accepting = self._clients.accepting = False
        self._failing.stop_asked(self._turn.now_ns)
        if self._session.phase not in RECOVERED:
            stopping.say_why()
            self._stop(None)

    def _stop(self, error: ImmortalError | None) -> None:
        if self.stopped:
            return
        if error is not None and self._session.phase is not Phase.WAITING:
            self._outbox.say(MessageType.REFUSAL, f"the coordinator stops: {error}")
        self.stopped = True
        self._session.advance(Step.STOP)
        self._turn.effects.append(Stop(error))

    # --- what operators ask ------------------------------------------------------------------------------------------

    def peers_status(self) -> dict[str, dict[str, object]]:
        """What `immortal peers show` shows of each other instance; plain values."""
        return describe_peers(self._peers, self._back_pressure.held_up_for)

    def clients_status(self) -> dict[str, object]:
        """What the page shows of outside callers; plain values."""
        return describe_clients(self._clients.table)

    @property
    def forbidden(self) -> Mapping[str, int]:
        """Calls that were refused as their caller may not make them, by caller, since the start."""
        return self._failing.forbidden

    @property
    def held_back(self) -> Mapping[str, int]:
        """How often calls had to wait since there were too many, by caller, since the start."""
        return self._intake.permissions.held_back

    @property
    def letters(self) -> list[MessageKey]:
        """The dead letters that are kept, oldest first."""
        return list(self._failing.verdicts.letters)

    @property
    def can_hand_over(self) -> bool:
        """The app works: all that there is is in the log, or is made once more from it."""
        return self.right.writes and self._session.phase in WORKS and not self._stopping.asked

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
            self._peers.committer_id,
            self.epoch.number,
            self._session,
            self._log,
            self._peers,
            self._checkpoints.last,
            now_ns,
        ) | {
            **describe_right(self.right, self._access, now_ns),
            **describe_flow(self._back_pressure, self._log_room, self._log, self.name, self.limits),
            **self._failing.describe(now_ns),
            **self._pausing.describe(),
            "impulses": self._impulses.count,
            "held_back": dict(self._intake.permissions.held_back),
            "open_calls": self._intake.open_calls.counts,
            "clients": self._clients.describe() | self._queries.describe(),
            "version": self._versions.current,
            "upgrade_to": self._versions.upgrade_to,
        }
