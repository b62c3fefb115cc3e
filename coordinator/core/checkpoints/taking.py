"""Taking a checkpoint: the coordinator asks, the app sends its state, and a header makes the checkpoint count.

The state arrives in one piece, a blob; or as a snapshot, beside the app's work: then it is the state at the Begin, and
its bytes arrive between other messages.
"""

from __future__ import annotations

from dataclasses import dataclass

from immortal.coordinator.core import notices
from immortal.coordinator.core.availability.snapshot_transfer import SnapshotReceiver, SnapshotSender
from immortal.coordinator.core.clock import CHECKPOINT
from immortal.coordinator.core.effects import Trim
from immortal.coordinator.core.errors import AppProtocolError
from immortal.coordinator.core.failures.call_failure import CallFailures
from immortal.coordinator.core.failures.unsaved_state import UnsavedState
from immortal.coordinator.core.group_commit import Group
from immortal.coordinator.core.interfaces import ONESELF, CheckpointHeader, VersionStart
from immortal.coordinator.core.life_cycle.recovery import BEHIND, Lifecycle, Proof
from immortal.coordinator.core.life_cycle.session import AWAITING_CHECKPOINT, Phase, Step
from immortal.coordinator.core.peers import Peers
from immortal.coordinator.core.state import CoreState
from immortal.protocol.messages import MessageType, encode_message
from immortal.protocol.readers import BlobData, Message
from immortal.protocol.trailer import BatchKind, BatchSource
from immortal.protocol.verdicts import decode_unsaved, decode_verdict


@dataclass(slots=True, eq=False, repr=False)
class CheckpointTaker:
    """Asks the app for checkpoints and writes them to the log."""

    state: CoreState
    peers: Peers
    lifecycle: Lifecycle
    call_failures: CallFailures
    unsaved_state: UnsavedState
    snapshot_sender: SnapshotSender
    snapshot_receiver: SnapshotReceiver

    def request_if_due(self) -> None:
        """Ask for a checkpoint if one is due. Call it while the app is in normal processing and no header is being
        written."""
        state = self.state
        session, checkpoints, shutdown = state.session, state.checkpoints, state.shutdown
        if shutdown.is_feeding_stopped or self.snapshot_sender.expects_blob:  # an app gives one at a time
            return
        is_apps = shutdown.is_requested or self.lifecycle.proof is BEHIND
        snapshot_receiver, wanted = self.snapshot_receiver, checkpoints.is_requested
        if snapshot_receiver.is_awaited and not is_apps:
            return
        logged_bytes = state.log.logged_bytes
        if is_apps or checkpoints.is_due(logged_bytes, state.now_ns):
            checkpoints.checkpoint_began(logged_bytes)
            # A promoted app proves by its next checkpoint that it has made all outputs that the log knows of.
            is_own = is_apps or self.unsaved_state.has_requests
            if not is_own and self.lifecycle.proof is Proof.COMPLETE and snapshot_receiver.request(at_once=wanted):
                return
            snapshot_receiver.give_up()
            shutdown.checkpoint_requested()
            session.advance(Step.CHECKPOINT_REQUESTED)
            session.checkpoint_sequence_id = session.fed_sequence_id
            self.unsaved_state.send_requests()
            state.outbox.send_control(MessageType.TAKE_CHECKPOINT)

    def blob_began(self) -> None:
        session = self.state.session
        if self.snapshot_sender.expects_blob:
            self.snapshot_sender.snapshot_began()
            return
        if session.phase not in AWAITING_CHECKPOINT or self.state.checkpoints.is_being_taken:
            raise AppProtocolError(
                f"the app sent a Checkpoint in the phase {session.phase.value!r}, none was asked for"
            )
        if session.phase is Phase.FIRST_START and session.initial_message is None:
            raise AppProtocolError("the app's first checkpoint came without an InitialMessage (type 9) before it")
        if session.phase is Phase.UPGRADING:
            if self.lifecycle.upgrades.is_new_version():
                self.lifecycle.finish_replay()
            return  # only the checkpoint that confirms an upgrade is kept
        if session.phase is Phase.BECOMING_PRIMARY or self.lifecycle.proof is BEHIND:
            self.lifecycle.finish_replay()
        self._begin()

    def blob_received(self, blob: BlobData) -> None:
        if self.snapshot_sender.expects_blob:
            self.snapshot_sender.snapshot_data(blob.data, last=blob.last)
            return
        if self.state.session.phase is Phase.UPGRADING:
            if blob.last:
                self.lifecycle.upgrades.upgraded()
            return
        self._receive(blob.data, last=blob.last)
        if blob.last:
            self._end()

    # --- beside the app's work ---------------------------------------------------------------------------------------

    def snapshot_began(self, message: Message) -> None:
        phase = self.state.session.phase
        if self.snapshot_sender.expects_blob:
            self.snapshot_sender.snapshot_began()
            return
        if phase is not Phase.CHECKPOINTING or self.state.checkpoints.is_being_taken:
            raise AppProtocolError(f"the app began a snapshot in the phase {phase.value!r}, none was asked for")
        self._begin()

    def snapshot_chunk(self, message: Message) -> None:
        if self.snapshot_sender.expects_blob:
            self.snapshot_sender.snapshot_data(message.data, last=False)
            return
        if not self._snapshot_is_being_taken:
            raise AppProtocolError("the app sent a part of a snapshot that it had not begun")
        self._receive(message.data, last=False)

    def snapshot_ended(self, message: Message) -> None:
        state = self.state
        if self.snapshot_sender.expects_blob and message.data:
            self.snapshot_sender.snapshot_failed()
            return
        if self.snapshot_sender.expects_blob:
            self.snapshot_sender.snapshot_data(b"", last=True)
            return
        if not self._snapshot_is_being_taken:
            raise AppProtocolError("the app ended a snapshot that it had not begun")
        if not message.data:
            self._receive(b"", last=True)
            self._end()
            return
        state.checkpoints.abandon()
        state.session.advance(Step.CHECKPOINT_ABANDONED)
        state.report(notices.CheckpointFailed(message.data.decode("utf-8", "replace")))
        state.shutdown.checkpoint_failed()

    @property
    def _snapshot_is_being_taken(self) -> bool:
        return self.state.checkpoints.is_being_taken and self.state.session.phase is Phase.CHECKPOINTING

    def failed(self, message: Message) -> None:
        """Handle the app's message that its state can't be saved. The app continues without a checkpoint."""
        state = self.state
        session, lifecycle, unsaved = state.session, self.lifecycle, decode_unsaved(message.data)
        if self.snapshot_sender.expects_blob:
            state.report(notices.CheckpointFailed(unsaved.text))
            self.snapshot_sender.snapshot_failed()
            return
        is_recovery = session.phase is Phase.BECOMING_PRIMARY
        if state.checkpoints.is_being_taken or not (is_recovery or session.phase is Phase.CHECKPOINTING):
            raise AppProtocolError(
                f"the app sent a CheckpointFailed in the phase {session.phase.value!r}, no checkpoint was asked for"
            )
        if lifecycle.is_cut:
            raise AppProtocolError(
                f"the log was cut, and goes on with a checkpoint only: {unsaved.text}. Cut it before that message, or "
                f"start it with code whose state can be saved"
            )
        if is_recovery or lifecycle.proof is BEHIND:
            lifecycle.finish_replay()
        lifecycle.prove_promotion()
        if is_recovery:
            lifecycle.report_recovered()
        session.advance(Step.CHECKPOINT_ABANDONED)
        self.unsaved_state.save_failed(unsaved)
        state.shutdown.checkpoint_failed()

    def taken_back(self, message: Message) -> None:
        """Note that the app has taken a message back: its next checkpoint is of the state without that message."""
        if (
            self.state.session.phase not in (Phase.BECOMING_PRIMARY, Phase.CHECKPOINTING)
            or self.state.checkpoints.is_being_taken
        ):
            raise AppProtocolError(
                f"the app sent a TakenBack in the phase {self.state.session.phase.value!r}, no checkpoint was asked for"
            )
        self.unsaved_state.taken_back(decode_verdict(message.data))

    # --- either way --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        state, session, versions = self.state, self.state.session, self.state.versions
        self.lifecycle.prove_promotion()
        outputs = self.peers.outbound.streams
        version = versions.current
        if session.phase is Phase.FIRST_START:
            version = session.description.version
        elif session.phase is Phase.CONFIRMING_UPGRADE:
            version = versions.upgrade_to or version
        checkpoint_id = state.checkpoints.next_id()
        header = CheckpointHeader(
            checkpoint_id,
            session.checkpoint_sequence_id,
            size_bytes=0,
            check=0,
            time_ns=0,
            outputs={name: stream.mark for name, stream in outputs.items()},
            unacknowledged={name: stream.unacknowledged for name, stream in outputs.items() if stream.memory_bytes},
            version=version,
            open_calls=self.peers.admission.open_calls.open_at(session.checkpoint_sequence_id),
        )
        state.checkpoints.begin(header)
        state.shutdown.checkpoint_began(checkpoint_id)
        state.report(notices.CheckpointBegan(checkpoint_id))

    def _receive(self, data: bytes, *, last: bool) -> None:
        chunk = self.state.checkpoints.receive(data, last=last)
        if chunk is not None:
            self.state.log_requests.write(chunk)

    def _end(self) -> None:
        state, session = self.state, self.state.session
        header = state.checkpoints.end(state.log.time_ns(state.now_ns))
        group = state.log.append_outside_record(0)
        if session.phase is Phase.FIRST_START:
            group = self._log_first_record()
        if session.phase is Phase.BECOMING_PRIMARY:
            self.lifecycle.report_recovered()
        self.lifecycle.add_cut_repair(group.transaction)
        group.transaction.checkpoint = header
        self.unsaved_state.checkpoint_complete(group)
        if state.shutdown.awaits_last_checkpoint:
            self.call_failures.app_stopped(group.transaction)
        if session.phase is Phase.CONFIRMING_UPGRADE:
            group.transaction.version = VersionStart(header.version, header.sequence_id, session.label)
            session.advance(Step.UPGRADE_CONFIRMED)
        else:
            session.advance(Step.CHECKPOINT_RECEIVED)

    def _log_first_record(self) -> Group:
        """Log the initial message as record 0, in one transaction with the first checkpoint."""
        state, session = self.state, self.state.session
        state.log.with_record_time = MessageType.RECORD_TIME in session.extensions
        message = encode_message(MessageType.INITIAL_MESSAGE, session.initial_message or b"")
        source = BatchSource(BatchKind.INITIAL, ONESELF, 1, 1, state.now_ns)
        chunks = [message]
        if MessageType.INSTANCE_NAME in session.extensions:  # in the log, so that each replay tells it again
            chunks.insert(0, encode_message(MessageType.INSTANCE_NAME, state.name.encode()))
        group = state.log.append(chunks, sum(map(len, chunks)), source)
        group.transaction.extensions = session.logged_extensions = session.extensions
        self.peers.set_app_extensions(session.extensions)
        group.transaction.version = VersionStart(session.description.version, -1, session.label)
        return group

    def checkpoint_durable(self, header: CheckpointHeader, *, adopted: bool = False) -> None:
        """Note that the checkpoint of ``header`` is durable. ``adopted``: a follower has taken it."""
        state = self.state
        wake_at_ns = state.checkpoints.became_durable(header)
        if wake_at_ns is not None:
            state.timers.set(CHECKPOINT, wake_at_ns)
        self.call_failures.checkpoint_durable(header.sequence_id)
        self.unsaved_state.checkpoint_durable()
        if adopted:
            self.snapshot_receiver.checkpoint_durable(header)
        else:
            state.report(notices.CheckpointTaken(header.checkpoint_id, header.sequence_id, header.size_bytes))
        if not state.ready:
            state.ready = True
            self.peers.inbound.answer_parked()
        state.effects.append(Trim())
        state.shutdown.checkpoint_durable(header.checkpoint_id)
