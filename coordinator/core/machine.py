"""State machine of a coordinator: takes events, returns effects.

The machine routes each event to its component and sets the order of the work in a turn. No event waits: work that needs
durability, room in a window or the disk continues with the event that brings it.

This order keeps the promises: input -> log -> durable -> (acknowledged to its sender, given to the app). The app gets a
record only after it is durable, so the outputs that it makes of the record are sent after that, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from immortal.coordinator.core import events as ev
from immortal.coordinator.core import notices
from immortal.coordinator.core.clock import LOG
from immortal.coordinator.core.components import Components
from immortal.coordinator.core.effects import Commit, Effect, ReadCheckpointChunk, Stop, Trim
from immortal.coordinator.core.errors import FencedError
from immortal.coordinator.core.life_cycle.recovery import BEHIND, Proof
from immortal.coordinator.core.life_cycle.session import NORMAL, RECOVERED, WORKS, Phase, Step
from immortal.coordinator.core.status import StatusView
from immortal.protocol.client_frames import CLIENTS, ClientFrameType
from immortal.protocol.errors import ImmortalError, RemoteProtocolError
from immortal.protocol.messages import MessageType


class Machine:
    """State machine of one coordinator, from its start to its end. It loads its log once it has the write lease.

    ``view``: status for operators.
    """

    def __init__(self, components: Components) -> None:
        self.stopped = False
        self.components = components
        self.view = StatusView(components)
        self.state = state = components.state
        self._session, self._log, self._peers = state.session, state.log, components.peers
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.Started: components.failover.started,
            ev.WriteLeaseHeld: components.failover.lease_held,
            ev.WriteLeaseGranted: self._lease_granted,
            ev.AppConnected: components.lifecycle.connected,
            ev.AppData: components.inbox.received,
            ev.AppSent: self._app_sent,
            ev.AppClosed: self._app_closed,
            ev.PeerFrameReceived: components.peers.inbound.received,
            ev.ClientFrameReceived: self._client_frame_received,
            ev.PermissionsChanged: self._permissions_changed,
            ev.PeerReplied: components.peers.outbound.replied,
            ev.PeerMoved: components.peers.outbound.moved,
            ev.PeerReset: components.peer_resets.peer_reset,
            ev.Reclaimed: components.peer_resets.reclaimed,
            ev.LettersDropped: components.operator.drop,
            ev.LettersRetried: components.operator.retry,
            ev.MessageSkipped: components.operator.skip,
            ev.InstancePaused: components.state.pause.requested,
            ev.InstanceResumed: components.state.pause.resume_requested,
            ev.HandlersAsked: components.waiting_handlers.query,
            ev.HandlerOrdered: components.waiting_handlers.order,
            ev.Committed: self._committed,
            ev.ChunkWritten: self._chunk_written,
            ev.StandbysChanged: components.snapshot_receiver.standbys_changed,
            ev.CheckpointOffered: components.snapshot_receiver.checkpoint_offered,
            ev.StandbyCheckpointRequested: components.snapshot_sender.checkpoint_requested,
            ev.ChunkOffered: components.snapshot_sender.chunk_offered,
            ev.LogLoaded: self._noting_read(self._log_loaded),
            ev.CheckpointChecked: self._noting_read(self._checkpoint_checked),
            ev.CheckpointChunkRead: self._noting_read(components.record_feeder.checkpoint_chunk_read),
            ev.RecordsRead: self._noting_read(components.record_feeder.records_read),
            ev.SpilledRead: self._noting_read(components.peers.outbound.spilled_read),
            ev.LettersRead: self._noting_read(components.operator.letters_read),
            ev.TailRead: self._tail_read,
            ev.Fenced: self._fenced,
            ev.LogMeasured: self._log_measured,
            ev.LogFailed: self._log_failed,
            ev.CheckpointRequested: self._checkpoint_requested,
            ev.Tick: self._tick,
            ev.ClockMoved: components.app_clock.moved,
            ev.StopRequested: self._stop_requested,
        }

    # --- a turn ------------------------------------------------------------------------------------------------------

    def handle(self, events: Sequence[ev.Event], now_ns: int) -> Sequence[Effect]:
        """Handle ``events``, in order. Return the effects; they can already give the app its next record.

        A turn (driver/turn.py) calls handle(), :meth:`advance` and :meth:`settle`; it can do other work in between.
        ``now_ns``: the instance's time (core/clock.py), ns since the Unix epoch. A ClockMoved event announces each step
        of the time.
        """
        state = self.state
        state.now_ns = now_ns
        self.components.running.extend_to(now_ns)
        for event in events:
            if self.stopped:
                break
            try:
                self._handlers[type(event)](event)
            except ImmortalError as error:
                if isinstance(event, ev.AppData) and isinstance(error, RemoteProtocolError):
                    self.components.inbox.refuse(error)
                else:
                    self._stop(self._peers.policy.explain(error))
        return state.pop_effects()

    def advance(self) -> Sequence[Effect]:
        """Do the work that :meth:`handle` has made possible: read, send, commit. Return the effects."""
        if not self.stopped:
            try:
                self._advance()
            except ImmortalError as error:
                self._stop(self._peers.policy.explain(error))
        return self.state.pop_effects()

    def settle(self) -> Sequence[Effect]:
        """Do the rest of the turn after the last :meth:`advance`: checkpoints, back-pressure, timers. Commit nothing
        and send nothing to peers."""
        if not self.stopped:
            try:
                self._settle()
            except ImmortalError as error:
                self._stop(self._peers.policy.explain(error))
        return self.state.pop_effects()

    def _advance(self) -> None:
        peers, clients = self._peers, self.components.clients
        if self.components.lifecycle.proof is BEHIND and not peers.replay.is_behind():
            self.components.lifecycle.proof = Proof.COMPLETE  # the missing outputs were made
        if self.components.failover.has_work:
            self.components.failover.advance()
            self.components.record_feeder.feed()
            self.components.failover.advance()  # with the records just fed, the app may have caught up with the log
        else:
            self.components.record_feeder.feed()
        if self.components.snapshot_sender.has_work:
            self.components.snapshot_sender.advance()
        if self.components.waiting_handlers.has_work:
            self.components.waiting_handlers.advance()
        if self.components.queries.has_work:
            self.components.queries.advance()
        if self.components.impulses.held_bytes:
            self.components.inbox.admit_impulses()
        if peers.inbound.turns.waiting_bytes:
            peers.inbound.process_waiting_batches()
        peers.outbound.send()
        for answers in peers.outbound.pop_answers():
            clients.app_answered(answers)
        clients.answers.flush()
        if self.components.snapshot_receiver.is_under_way and self._session.phase is NORMAL:
            self.components.snapshot_receiver.advance()
        while self._log.commits_next:
            self._commit()

    def _settle(self) -> None:
        if self._session.phase is NORMAL and self.state.checkpoints.settled:
            self.components.checkpoint_taker.request_if_due()
        self.components.back_pressure.update()
        self.state.timers.schedule_wakes(self._peers)
        shutdown = self.state.shutdown
        if shutdown.goodbye_sent and self._session.unsent_bytes <= 0:
            self._stop(None)
        elif shutdown.hands_over and self._log.is_idle:
            shutdown.report_stop_reason()
            self._stop(None)

    # --- the log -----------------------------------------------------------------------------------------------------

    def _lease_granted(self, event: ev.WriteLeaseGranted) -> None:
        self.components.failover.lease_granted(event)
        self.components.snapshot_sender.forget()  # no other process could adopt a checkpoint now

    def _checkpoint_checked(self, event: ev.CheckpointChecked) -> None:
        if not self.components.snapshot_receiver.checkpoint_checked(event):
            self.components.lifecycle.checkpoint_checked(event)

    def _log_loaded(self, event: ev.LogLoaded) -> None:
        was_loaded = self._session.is_loaded
        self.components.failover.log_loaded(event)
        if not was_loaded:  # the app's messages that arrived before the log was loaded are judged now
            try:
                self.components.inbox.received(ev.AppData(b""))
            except RemoteProtocolError as error:
                self.components.inbox.refuse(error)

    def _commit(self) -> None:
        log = self._log
        # A mark is new only once, so marks are taken only if there is a record to hold them.
        marked = self._session.phase in WORKS and log.seals_next
        group = log.next_commit(self.state.now_ns, self._peers.outbound.new_marks(log.next_ticket) if marked else {})
        if group is not None:
            expected_last, fence = group.expected_last_sequence_id, self.state.write_lease.fence
            commit = Commit(group.ticket, group.transaction, group.size_bytes, expected_last, fence)
            self.state.log_requests.write(commit)

    def _committed(self, event: ev.Committed) -> None:
        components, state = self.components, self.state
        state.log_requests.write_done()
        ticket, now_ns, peers = event.ticket, state.now_ns, self._peers
        group = self._log.committed(ticket)
        peers.inbound.turns.committed(ticket, now_ns)
        transaction = group.transaction
        if group.impulses_accepted:
            self._session.note_accepted(group.impulses_accepted, self._log.durable_sequence_id)
        components.record_feeder.committed(group)
        if transaction.sources:
            peers.became_durable(transaction.sources.items())
        if CLIENTS in transaction.acknowledged:
            peers.outbound.acknowledge_answers(transaction.acknowledged[CLIENTS])
        components.peer_resets.committed(ticket)
        state.committed(ticket)
        if transaction.epoch is not None:
            state.report(notices.NewEpoch(transaction.epoch))
        if state.trim_ticket and ticket >= state.trim_ticket:
            state.trim_ticket = 0
            state.effects.append(Trim())
        if transaction.cut_healed:
            components.lifecycle.cut_healed()
        if transaction.version is not None:
            components.upgrades.version_began(transaction.version)
        if transaction.checkpoint is not None:
            components.checkpoint_taker.checkpoint_durable(transaction.checkpoint, adopted=transaction.adopts)

    def _chunk_written(self, event: ev.ChunkWritten) -> None:
        self.state.log_requests.write_done()
        self.state.checkpoints.chunks_pending_bytes -= event.size_bytes

    def _checkpoint_requested(self, event: ev.CheckpointRequested) -> None:
        self.state.checkpoints.is_requested = True

    def _tail_read(self, event: ev.TailRead) -> None:
        for write in self.state.log_requests.resolve_writes(event):
            if isinstance(write, Commit):
                self._committed(ev.Committed(write.ticket))
            else:
                self._chunk_written(ev.ChunkWritten(len(write.data)))

    def _log_failed(self, event: ev.LogFailed) -> None:
        components = self.components
        if event.retryable:
            self.state.log_requests.request_failed(event)
            if (due_ns := self.state.log_requests.due_ns) is not None:
                self.state.timers.set(LOG, due_ns)
        elif isinstance(event.request, ReadCheckpointChunk) and components.state.write_lease.follows:
            if self._session.phase is Phase.RESTORING:  # the writer may have removed it; the next read shows whether
                self._session.reading = False
                components.lifecycle.start_over(f"the checkpoint can't be restored ({event.error})")
        else:
            raise event.error

    def _fenced(self, event: ev.Fenced) -> None:
        """Stop: another process writes the log now, so this one must send nothing more. Raises FencedError."""
        name, epoch = self.state.name, self.state.epoch
        raise FencedError(
            event.holder,
            f"fenced by {event.holder} at epoch {epoch}: it writes the log of {name!r} now; nothing that was "
            f"acknowledged is lost, and nothing more of this coordinator counts",
        )

    def _noting_read(self, handle: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return a handler that notes that the log has answered a read, then calls ``handle``."""
        log_requests = self.state.log_requests

        def read(event: Any) -> None:
            log_requests.read_done()
            handle(event)

        return read

    def _log_measured(self, event: ev.LogMeasured) -> None:
        """Note a measurement of the log. A full log takes only input from the app, until a checkpoint makes room."""
        state, session, room = self.state, self._session, self.state.log_capacity
        if room.measured(event.space):
            if room.full_reason:
                state.report(notices.LogFull(room.full_reason))
            else:
                state.report(notices.LogHasRoom())
        last = state.checkpoints.last
        if session.phase is Phase.NORMAL and room.wants_checkpoint(
            session.fed_sequence_id, self._log.durable_sequence_id, last
        ):
            state.checkpoints.is_requested = True

    @property
    def waits_for_app(self) -> bool:
        """True if an AppSent would change something now; otherwise it can wait for the next event."""
        return self._session.unsent_bytes >= self.state.limits.app_window_bytes or self.state.shutdown.goodbye_sent

    def _app_sent(self, event: ev.AppSent) -> None:
        self._session.unsent_bytes -= event.size_bytes

    def _app_closed(self, event: ev.AppClosed) -> None:
        session, state, shutdown = self._session, self.state, self.state.shutdown
        if session.phase is Phase.WAITING:
            return
        if not session.refused and (session.reader.buffered_bytes or session.reader.inside_blob):
            state.report(notices.AppCutOff())
        if shutdown.goodbye_sent:
            self._stop(None)
            return
        state.report(notices.AppGone(session.phase.value))
        self.components.upgrades.app_lost()
        # While the coordinator did not read from the app, messages that it had sent can be lost.
        at_query = self.components.call_failures.died_at_query()
        self.components.call_failures.app_lost(all_read=not self.components.back_pressure.paused)
        caller, deaths = self.components.call_failures.poison_guard.culprit
        self.components.call_failures.penalize_caller(self.components.clients.holder_of(caller), deaths)
        self.components.operator.app_lost()
        self.components.unsaved_state.app_lost()
        self.components.waiting_handlers.app_lost()
        self.components.queries.app_lost(at_query=at_query)
        session.advance(Step.APP_LOST)
        session.connect()
        self._log.forget_app()
        self.components.admission.open_calls.is_known = not state.ready  # if it is, the next app recovers
        self._peers.outbound.forget()
        state.checkpoints.abandon()
        state.checkpoints.is_requested = False
        self.components.snapshot_sender.app_lost()
        self.components.snapshot_receiver.app_lost()
        self.components.lifecycle.app_lost()
        self.components.back_pressure.paused = False
        self.components.impulses.forget()
        if shutdown.is_requested:
            self._stop(None)

    # --- peers and clients -------------------------------------------------------------------------------------------

    @property
    def waits_for_peers(self) -> bool:
        """True if a PeerReplied would change something now; otherwise it can wait for the next event."""
        return (
            self.state.awaits_replies
            or self.components.back_pressure.paused
            or self.components.lifecycle.is_cut
            or self.state.shutdown.is_requested
        )

    def _client_frame_received(self, event: ev.ClientFrameReceived) -> None:
        now_ns = self.state.now_ns
        if event.frame.frame_type is ClientFrameType.QUERY:
            self.components.queries.received(event.token, event.frame, event.caller)
            return
        if event.frame.frame_type is ClientFrameType.REQUEST:
            self._peers.inbound.turns.note_sender(CLIENTS, now_ns)
        self.components.clients.received(event.token, event.frame, event.caller)

    def _permissions_changed(self, event: ev.PermissionsChanged) -> None:
        self.components.admission.change(event.by_caller, has_keys=event.has_keys)
        self._peers.inbound.answer_parked()

    def _tick(self, event: ev.Tick) -> None:
        self.state.log_requests.tick()
        self.state.timers.tick(self._peers)

    def _stop_requested(self, event: ev.StopRequested) -> None:
        shutdown = self.state.shutdown
        if shutdown.is_requested:
            return
        shutdown.request(hands_over=event.hands_over and self._session.phase in WORKS)
        self.state.accepting = False
        self.components.call_failures.stop_requested()
        if self._session.phase not in RECOVERED:
            shutdown.report_stop_reason()
            self._stop(None)

    def _stop(self, error: ImmortalError | None) -> None:
        if self.stopped:
            return
        if error is not None and self._session.phase is not Phase.WAITING:
            self.state.outbox.send_text(MessageType.REFUSAL, f"the coordinator stops: {error}")
        self.stopped = True
        self._session.advance(Step.STOP)
        self.state.effects.append(Stop(error))
