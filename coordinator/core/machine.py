"""The coordinator as one state machine: events in, effects out.

It says which event is for which of its parts, and what a turn looks at. An event never waits: what must
wait for something (durability, room in a window, an answer of the disk) is picked up again by the event that brings it.

The order that keeps the promises: input -> log -> durable -> (acknowledged to its sender, given to the app); and what
the app makes of a record is sent only after that record was given to it, so after it was durable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from immortal.coordinator.core import events as ev
from immortal.coordinator.core import notices
from immortal.coordinator.core.effects import Commit, Effect, ReadCheckpointChunk, Stop, Trim
from immortal.coordinator.core.errors import FencedError
from immortal.coordinator.core.life_cycle.recovery import BEHIND
from immortal.coordinator.core.life_cycle.session import NORMAL, RECOVERED, WORKS, Phase, Step
from immortal.coordinator.core.parts import Parts
from immortal.coordinator.core.status import View
from immortal.protocol.client_frames import CLIENTS, ClientFrameType
from immortal.protocol.errors import ImmortalError, RemoteProtocolError
from immortal.protocol.messages import MessageType


class Machine:
    """One coordinator, from its start to its end. What its log says it knows once it has the right to write it.

    ``view``: what operators ask.
    """

    def __init__(self, parts: Parts) -> None:
        self.stopped = False
        self.parts = parts
        self.view = View(parts)
        self.name, self.limits, self.running = parts.name, parts.limits, parts.running
        self.right, self.epoch = parts.right, parts.epoch
        self._turn, self._session, self._log, self._peers = parts.turn, parts.session, parts.log, parts.peers
        self._committing = committing = LogCommitter(parts)
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.Started: parts.failover.started,
            ev.WriteLeaseHeld: parts.failover.held,
            ev.WriteLeaseGranted: self._right_granted,
            ev.AppConnected: parts.lifecycle.connected,
            ev.AppData: parts.inbox.received,
            ev.AppSent: self._app_sent,
            ev.AppClosed: self._app_closed,
            ev.PeerFrameReceived: self._peer_frame_received,
            ev.ClientFrameReceived: self._client_frame_received,
            ev.PermissionsChanged: self._permissions_changed,
            ev.PeerReplied: self._peer_replied,
            ev.PeerMoved: self._peer_moved,
            ev.PeerReset: parts.resets.peer_reset,
            ev.Reclaimed: parts.resets.reclaimed,
            ev.LettersDropped: parts.operator.drop,
            ev.LettersRetried: parts.operator.retry,
            ev.MessageSkipped: parts.operator.skip,
            ev.InstancePaused: parts.pausing.pause,
            ev.InstanceResumed: parts.pausing.resume,
            ev.HandlersAsked: parts.waiting.ask,
            ev.HandlerOrdered: parts.waiting.order,
            ev.Committed: committing.committed,
            ev.ChunkWritten: committing.chunk_written,
            ev.StandbysChanged: parts.snapshot_receiver.standbys_changed,
            ev.CheckpointOffered: parts.snapshot_receiver.offered,
            ev.CheckpointAsked: parts.snapshot_sender.asked,
            ev.ChunkOffered: parts.snapshot_sender.chunk_offered,
            ev.LogLoaded: committing.was_read(self._log_loaded),
            ev.CheckpointChecked: committing.was_read(self._checkpoint_checked),
            ev.CheckpointChunkRead: committing.was_read(parts.feeding.checkpoint_chunk_read),
            ev.RecordsRead: committing.was_read(parts.feeding.records_read),
            ev.SpilledRead: committing.was_read(self._spilled_read),
            ev.LettersRead: committing.was_read(parts.operator.letters_read),
            ev.TailRead: committing.tail_read,
            ev.Fenced: committing.fenced,
            ev.LogMeasured: committing.log_measured,
            ev.LogFailed: committing.log_failed,
            ev.CheckpointRequested: committing.checkpoint_requested,
            ev.Tick: self._tick,
            ev.ClockMoved: parts.app_clock.moved,
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
                    self.parts.inbox.refuse(error)
                else:
                    self._stop(self.parts.policy.explained(error))
        return turn.take_effects()

    def advance(self) -> Sequence[Effect]:
        """Behind each :meth:`take`: what is possible now, be it to read, to send or to commit."""
        if not self.stopped:
            try:
                self._advance(self._turn.now_ns)
            except ImmortalError as error:
                self._stop(self.parts.policy.explained(error))
        return self._turn.take_effects()

    def settle(self) -> Sequence[Effect]:
        """Behind the last :meth:`advance` of a turn: what is looked at once all else is under way. It commits and sends
        to peers nothing."""
        if not self.stopped:
            try:
                self._settle(self._turn.now_ns)
            except ImmortalError as error:
                self._stop(self.parts.policy.explained(error))
        return self._turn.take_effects()

    def _advance(self, now_ns: int) -> None:
        peers, clients = self._peers, self.parts.clients
        if self.parts.lifecycle.proof is BEHIND:
            self.parts.lifecycle.check_replay_complete()
        if self.parts.failover.waits:
            self.parts.failover.go_on()
            self.parts.feeding.feed()
            self.parts.failover.go_on()  # that may have brought the app to where it follows
        else:
            self.parts.feeding.feed()
        if self.parts.snapshot_sender.waits:
            self.parts.snapshot_sender.go_on()
        if self.parts.waiting.waits:
            self.parts.waiting.go_on()
        if self.parts.queries.waits:
            self.parts.queries.go_on()
        if self.parts.impulses.held_bytes:
            self.parts.inbox.admit_impulses()
        if peers.turns.waiting_bytes:
            peers.take_turns(now_ns)
        peers.send(now_ns)
        for answers in peers.take_answers():
            clients.answered(answers)
        clients.flush()
        if self.parts.snapshot_receiver.is_under_way and self._session.phase is NORMAL:
            self.parts.snapshot_receiver.go_on()
        while self._log.commits_next:
            self._committing.commit(now_ns)

    def _settle(self, now_ns: int) -> None:
        if self._session.phase is NORMAL and self.parts.checkpoints.settled:
            self.parts.taking.ask_if_due()
        self.parts.back_pressure.look()
        self.parts.wakes.schedule_wakes(self._peers, now_ns)
        stopping = self.parts.stopping
        if stopping.said_goodbye and self._session.unsent_bytes <= 0:
            self._stop(None)
        elif stopping.hands_over and self._log.is_idle:
            stopping.report_stop_reason()
            self._stop(None)

    # --- the log -----------------------------------------------------------------------------------------------------

    def _right_granted(self, event: ev.WriteLeaseGranted) -> None:
        self.parts.failover.granted(event)
        self.parts.snapshot_sender.took_over()

    def _checkpoint_checked(self, event: ev.CheckpointChecked) -> None:
        if not self.parts.snapshot_receiver.checked(event):
            self.parts.lifecycle.checkpoint_checked(event)

    def _log_loaded(self, event: ev.LogLoaded) -> None:
        was_loaded = self._session.is_loaded
        self.parts.failover.log_loaded(event)
        if not was_loaded:  # what an app has said by now is judged now
            try:
                self.parts.inbox.received(ev.AppData(b""))
            except RemoteProtocolError as error:
                self.parts.inbox.refuse(error)

    @property
    def waits_for_room(self) -> bool:
        """The log has too little: to be measured again although nothing happens."""
        return bool(self.parts.log_room.full)

    # --- the app's connection ----------------------------------------------------------------------------------------

    @property
    def waits_for_app(self) -> bool:
        """Whether an AppSent would change anything now, or may as well come with the next event."""
        return self._session.unsent_bytes >= self.limits.app_window_bytes or self.parts.stopping.said_goodbye

    def _app_sent(self, event: ev.AppSent) -> None:
        self._session.unsent_bytes -= event.size_bytes

    def _app_closed(self, event: ev.AppClosed) -> None:
        session, turn, stopping = self._session, self._turn, self.parts.stopping
        if session.phase is Phase.WAITING:
            return
        if not session.refused and (session.reader.buffered_bytes or session.reader.inside_blob):
            turn.report(notices.AppCutOff())
        if stopping.said_goodbye:
            self._stop(None)
            return
        turn.report(notices.AppGone(session.phase.value))
        self.parts.upgrades.app_lost()
        # While it was not read, something that it had sent may be lost.
        at_query = self.parts.failing.died_at_query(stopping=stopping.asked)
        self.parts.failing.app_lost(stopping=stopping.asked, all_heard=not self.parts.back_pressure.paused)
        caller, deaths = self.parts.failing.watch.died_of
        self.parts.failing.caused_deaths(self.parts.clients.who_is(caller), deaths, turn.now_ns)
        self.parts.operator.app_lost()
        self.parts.saving.app_lost()
        self.parts.waiting.app_lost()
        self.parts.queries.app_lost(at_query=at_query)
        session.advance(Step.APP_LOST)
        session.connect()
        self._log.forget_app()
        self.parts.admission.open_calls.is_known = not self._peers.ready  # if it is, the next app recovers
        self._peers.forget_outputs()
        self.parts.checkpoints.abandon()
        self.parts.checkpoints.wanted = False
        self.parts.snapshot_sender.app_lost()
        self.parts.snapshot_receiver.app_lost()
        self.parts.lifecycle.app_lost()
        self.parts.back_pressure.paused = False
        self.parts.impulses.forget()
        if stopping.asked:
            self._stop(None)

    # --- peers and clients -------------------------------------------------------------------------------------------

    @property
    def waits_for_peers(self) -> bool:
        """Whether a PeerReplied would change anything now, or may as well come with the next event."""
        return (
            self._peers.wants_replies
            or self.parts.back_pressure.paused
            or self.parts.lifecycle.is_cut
            or self.parts.stopping.asked
        )

    def _peer_frame_received(self, event: ev.PeerFrameReceived) -> None:
        self._peers.received(event.token, event.frame, self._turn.now_ns)

    def _client_frame_received(self, event: ev.ClientFrameReceived) -> None:
        now_ns = self._turn.now_ns
        if event.frame.frame_type is ClientFrameType.QUERY:
            self.parts.queries.received(event.token, event.frame, event.caller)
            return
        if event.frame.frame_type is ClientFrameType.REQUEST:
            self._peers.turns.heard(CLIENTS, now_ns)
        self.parts.clients.received(event.token, event.frame, now_ns, event.caller)

    def _permissions_changed(self, event: ev.PermissionsChanged) -> None:
        self.parts.admission.change(event.given, has_keys=event.has_keys)
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
        self.parts.access.tick()
        self.parts.wakes.tick(self._turn.now_ns, self._peers.retry_failed, self._answer_parked)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _stop_requested(self, event: ev.StopRequested) -> None:
        stopping = self.parts.stopping
        if stopping.asked:
            return
        stopping.ask(hands_over=event.hands_over and self._session.phase in WORKS)
        self._peers.accepting = self.parts.clients.accepting = False
        self.parts.failing.stop_asked(self._turn.now_ns)
        if self._session.phase not in RECOVERED:
            stopping.report_stop_reason()
            self._stop(None)

    def _stop(self, error: ImmortalError | None) -> None:
        if self.stopped:
            return
        if error is not None and self._session.phase is not Phase.WAITING:
            self.parts.outbox.say(MessageType.REFUSAL, f"the coordinator stops: {error}")
        self.stopped = True
        self._session.advance(Step.STOP)
        self._turn.effects.append(Stop(error))


# Between the machine and its log: what is handed over to become durable, and what follows from the log's answers.


class LogCommitter:
    """Of the machine that has these parts. What there is no way on from is raised, an ImmortalError."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._turn, self._session, self._peers = parts.turn, parts.session, parts.peers
        self._log, self._access, self._checkpoints = parts.log, parts.access, parts.checkpoints

    def commit(self, now_ns: int) -> None:
        """What is to become durable next, if there is anything."""
        parts = self._parts
        log = self._log
        # Marks are new once only: they are taken when there is a record to hold them.
        marked = self._session.phase in WORKS and log.seals_next
        group = log.next_commit(now_ns, self._peers.new_marks(log.next_ticket) if marked else {})
        if group is not None:
            expected_last, fence = group.expected_last_sequence_id, parts.right.fence
            self._access.write(Commit(group.ticket, group.transaction, group.size_bytes, expected_last, fence))

    def committed(self, event: ev.Committed) -> None:
        parts = self._parts
        self._access.written()
        ticket, now_ns, peers = event.ticket, self._turn.now_ns, self._peers
        group = self._log.committed(ticket)
        peers.turns.committed(ticket, now_ns)
        transaction = group.transaction
        if group.impulses_accepted:
            self._session.note_accepted(group.impulses_accepted, self._log.durable_sequence_id)
        parts.feeding.committed(group)
        if transaction.sources:
            peers.became_durable(transaction.sources.items(), now_ns)
        if CLIENTS in transaction.acknowledged:
            peers.answers_durable(transaction.acknowledged[CLIENTS])
        parts.resets.committed(ticket)
        parts.operator.committed(ticket)
        if transaction.epoch is not None:
            self._turn.report(notices.NewEpoch(transaction.epoch))
        if peers.trim_ticket and ticket >= peers.trim_ticket:
            peers.trim_ticket = 0
            self._turn.effects.append(Trim())
        if transaction.cut_healed:
            parts.lifecycle.cut_healed()
        if transaction.version is not None:
            parts.upgrades.began(transaction.version)
        if transaction.checkpoint is not None:
            parts.taking.durable(transaction.checkpoint, adopted=transaction.adopts)

    def chunk_written(self, event: ev.ChunkWritten) -> None:
        self._access.written()
        self._checkpoints.chunks_pending_bytes -= event.size_bytes

    def checkpoint_requested(self, event: ev.CheckpointRequested) -> None:
        self._checkpoints.wanted = True

    def tail_read(self, event: ev.TailRead) -> None:
        for write in self._access.settle(event):
            if isinstance(write, Commit):
                self.committed(ev.Committed(write.ticket))
            else:
                self.chunk_written(ev.ChunkWritten(len(write.data)))

    def log_failed(self, event: ev.LogFailed) -> None:
        parts = self._parts
        if event.retryable:
            self._access.failed(event)
            parts.wakes.log_at(self._access.due_ns)
        elif isinstance(event.request, ReadCheckpointChunk) and parts.right.follows:
            if self._session.phase is Phase.RESTORING:  # its writer may have removed it; the next look says
                self._session.reading = False
                parts.lifecycle.begin_anew(f"the checkpoint can't be restored ({event.error})")
        else:
            raise event.error

    def fenced(self, event: ev.Fenced) -> None:
        """Another has the right to write by now: what is not durable is nobody's, and nothing more may leave.

        Raises FencedError.
        """
        parts = self._parts
        epoch = parts.epoch.number
        raise FencedError(
            event.holder,
            f"fenced by {event.holder} at epoch {epoch}: it writes the log of {parts.name!r} now; nothing that was "
            f"acknowledged is lost, and nothing more of this coordinator counts",
        )

    def was_read(self, then: Callable[[Any], None]) -> Callable[[Any], None]:
        """``then``, behind a look whether that ends a silence of the log."""
        access = self._access

        def read(event: Any) -> None:
            access.read()
            then(event)

        return read

    def log_measured(self, event: ev.LogMeasured) -> None:
        """A log that is full takes no input but what the app makes of it: that is the way to a checkpoint, and room."""
        parts = self._parts
        room, session, turn = parts.log_room, self._session, self._turn
        if room.measured(event.space):
            self._peers.log_full = room.full
            parts.clients.log_full = bool(room.full)
            if room.full:
                turn.report(notices.LogFull(room.full))
            else:
                turn.report(notices.LogHasRoom())
        last = self._checkpoints.last
        if session.phase is Phase.NORMAL and room.wants_checkpoint(
            session.fed_sequence_id, self._log.durable_sequence_id, last
        ):
            self._checkpoints.wanted = True
