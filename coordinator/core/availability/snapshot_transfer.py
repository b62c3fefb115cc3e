"""Snapshot transfer: a follower takes a checkpoint for the writer, which adopts it.

    NOTHING --the writer asks, the app follows--> REQUESTED --the app's blob begins--> COMING --it is whole--> WHOLE
       ^                                            '--- nobody wants it any more ---> UNWANTED                  |
       '------------ offered: the log's marks have shown that the app made the same -----------------------------'

The state is that after the last record that the app had when it was asked; the log has that record. The output streams
in the header are known later: a follower's calls get their positions from the log's marks, which also prove that they
equal the writer's calls. So the checkpoint of an app that has diverged is never offered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from msgspec.structs import replace

from immortal.coordinator.core import events as ev
from immortal.coordinator.core import notices
from immortal.coordinator.core.checkpoints.policy import CheckpointWriter
from immortal.coordinator.core.effects import (
    CancelStandbyRequest,
    CheckCheckpoint,
    OfferCheckpoint,
    OfferChunk,
    RequestStandbyCheckpoint,
)
from immortal.coordinator.core.failures.call_failure import CallFailures
from immortal.coordinator.core.interfaces import CheckpointHeader, Offer
from immortal.coordinator.core.life_cycle.session import WORKS, Phase
from immortal.coordinator.core.output.replay_check import FollowerSnapshotCut
from immortal.coordinator.core.peers import Peers
from immortal.coordinator.core.state import CoreState
from immortal.protocol.messages import MessageType


class OfferStage(Enum):
    NOTHING = "nothing was asked of the app"
    REQUESTED = "the app was asked"
    COMING = "the app's state comes"
    UNWANTED = "it comes, or will, and nobody wants it"
    WHOLE = "it is in the log, and not offered yet"


_OWED = frozenset({OfferStage.REQUESTED, OfferStage.COMING, OfferStage.UNWANTED})
"""Stages in which the app must still send its state, or the rest of it."""


@dataclass(slots=True, eq=False, repr=False)
class SnapshotSender:
    """Follower's side: asks its app for a checkpoint and offers it to the writer. ``expects_blob``: the next blob from
    the app belongs to such a checkpoint."""

    state: CoreState
    peers: Peers
    call_failures: CallFailures
    stage: OfferStage = OfferStage.NOTHING
    expects_blob: bool = False
    has_work: bool = False  # :meth:`advance` may have something to do
    _pending_request: ev.StandbyCheckpointRequested | None = None  # request that the app does not have yet
    _active_request: ev.StandbyCheckpointRequested | None = None  # request that the app's checkpoint answers
    _sequence_id: int = -1
    _writer: CheckpointWriter | None = None
    _chunks_waiting: int = 0  # handed to the log, not answered
    _cut: FollowerSnapshotCut = field(default_factory=FollowerSnapshotCut)

    def _reach(self, stage: OfferStage) -> None:
        self.stage = stage
        self.expects_blob = stage in _OWED
        self.has_work = self._pending_request is not None or stage is OfferStage.WHOLE

    # --- the request -------------------------------------------------------------------------------------------------

    def checkpoint_requested(self, event: ev.StandbyCheckpointRequested) -> None:
        """Store the writer's request. It replaces an earlier one."""
        self.forget()
        lease = self.state.write_lease
        self._pending_request = event if lease.follows and not lease.is_granted else None
        self._reach(self.stage)

    def forget(self) -> None:
        """Drop the request, and the checkpoint that the app gives or has given."""
        self._pending_request = self._active_request = self._writer = None
        self._cut = FollowerSnapshotCut()
        self._reach(OfferStage.UNWANTED if self.expects_blob else OfferStage.NOTHING)

    def app_lost(self) -> None:
        self.expects_blob = False
        self.forget()

    def advance(self) -> None:
        """Ask the app for its checkpoint, or offer the finished one, as soon as either is possible."""
        if self._pending_request is not None and self.stage is OfferStage.NOTHING and self._may_request:
            self._active_request, self._pending_request = self._pending_request, None
            self._sequence_id = self.state.session.fed_sequence_id
            self._reach(OfferStage.REQUESTED)
            self.state.outbox.send_control(MessageType.TAKE_CHECKPOINT)
        elif self.stage is OfferStage.WHOLE and self._is_confirmed:
            self._offer()

    @property
    def _may_request(self) -> bool:
        """True if the app can give a checkpoint that the writer can adopt. An app that has repeated an upgrade and got
        no record since can't: it would count itself as primary. Nor can an app whose outputs are not compared with the
        log's marks."""
        session = self.state.session
        is_able = session.phase is Phase.FOLLOWING and not session.refused and not session.waits_for_hello
        has_record = session.fed_sequence_id > session.upgraded_sequence_id
        return is_able and self.state.following and has_record and self.peers.policy.compares

    # --- the app's answer --------------------------------------------------------------------------------------------

    def snapshot_began(self) -> None:
        if self._active_request is None:
            return
        self._cut = self.peers.outbound.followed.cut(self.peers.outbound.streams)
        self._chunks_waiting = 0
        header = CheckpointHeader(
            self._active_request.checkpoint_id,
            self._sequence_id,
            size_bytes=0,
            check=0,
            time_ns=0,
            version=self.state.versions.current,
            open_calls=self.peers.admission.open_calls.open_at(self._sequence_id),
        )
        self._writer = CheckpointWriter(header, self.state.limits.chunk_size_bytes)
        self._reach(OfferStage.COMING)

    def snapshot_data(self, data: bytes, *, last: bool) -> None:
        if self._writer is not None:
            chunk = self._writer.receive(data, last=last)
            if chunk is not None:
                self._chunks_waiting += 1
                self.state.checkpoints.chunks_pending_bytes += len(chunk.data)
                self.state.effects.append(OfferChunk(chunk.checkpoint_id, chunk.index, chunk.data))
        if last:
            self._reach(OfferStage.NOTHING if self._writer is None else OfferStage.WHOLE)

    def snapshot_failed(self) -> None:
        """Note that the app can't give a checkpoint."""
        wanted, self.expects_blob = self._pending_request, False
        self.forget()
        self._pending_request = wanted
        self._reach(OfferStage.NOTHING)

    def chunk_offered(self, event: ev.ChunkOffered) -> None:
        self.state.checkpoints.chunks_pending_bytes -= event.size_bytes
        if self._active_request is None or event.checkpoint_id != self._active_request.checkpoint_id:
            return
        self._chunks_waiting -= 1
        if event.problem:
            self.state.report(notices.OfferRefused(event.checkpoint_id, event.problem))
            self.forget()

    @property
    def _is_confirmed(self) -> bool:
        """True if the whole blob is in the log, and the marks prove that the app made the writer's outputs."""
        if self._chunks_waiting or self._cut.waits_for or not self.call_failures.agrees_up_to(self._sequence_id):
            return False
        outputs = self.peers.outbound.streams
        return all(outputs[name].has_confirmed(mark) for name, mark in self._cut.outputs.items())

    def _offer(self) -> None:
        state = self.state
        request, writer, cut = self._active_request, self._writer, self._cut
        if request is None or writer is None:
            return
        header = writer.header(state.log.time_ns(state.now_ns))
        header = replace(header, outputs=cut.outputs, unacknowledged=cut.unacknowledged)
        verdicts = self.call_failures.verdicts.keys_until(self._sequence_id)
        state.effects.append(OfferCheckpoint(Offer(request.epoch, header, verdicts)))
        state.report(notices.CheckpointOffered(header.checkpoint_id, header.sequence_id, header.size_bytes))
        self.forget()


# Adoption by the writer: a follower takes the checkpoint, so that the writer's own app need not.
#
#     NOTHING --one is due--> WAITING --somebody follows--> REQUESTED --CheckpointOffered--> READING --durable-.
#        ^                    '---- nobody does it in time, or what comes is no good: the app is asked ---.    |
#        '------------------------------------------------------------------------------------------------'----'
#
# An adopted checkpoint must equal one of the own app: the state after a record that the own app has handled, of the
# same version, with output streams and verdicts that the own ones continue. Its blob is read whole and compared with
# its check. The header becomes durable by an ordinary append, so only the holder of the write lease adopts.


class AdoptionStage(Enum):
    NOTHING = "none is due"
    WAITING = "for somebody who follows"
    REQUESTED = "somebody was asked"
    READING = "what was offered is read"
    ADOPTED = "its header is on its way to the log"


@dataclass(slots=True, eq=False, repr=False)
class SnapshotReceiver:
    """Writer's side: asks a follower for a checkpoint, checks it and adopts it."""

    state: CoreState
    peers: Peers
    call_failures: CallFailures
    stage: AdoptionStage = AdoptionStage.NOTHING
    has_standby: bool = False
    is_for_app: bool = False  # the due checkpoint must come from the own app: no follower gave one
    _due_ns: int = 0  # when the own app is asked instead
    _checkpoint_id: int = 0
    _offer: Offer | None = None
    _reading_id: int = 0  # of the checkpoint that is being read, even if it is no longer wanted

    # --- asking ------------------------------------------------------------------------------------------------------

    def request(self, *, at_once: bool) -> bool:
        """Ask a follower for the due checkpoint; return False if the own app must take it. ``at_once``: somebody waits
        for it."""
        limits = self.state.limits
        if not limits.checkpoints_on_standby or self.is_for_app or (at_once and not self.has_standby):
            self.is_for_app = False
            return False
        self.stage = AdoptionStage.WAITING
        self._due_ns = self.state.now_ns + limits.standby_checkpoint_ns
        self.advance()
        return True

    @property
    def is_under_way(self) -> bool:
        """True if :meth:`advance` can have something to do."""
        return self.stage is not AdoptionStage.NOTHING

    def advance(self) -> None:
        """Take the next possible step: ask a follower, or check what it has offered."""
        state = self.state
        state.timers.standby_at(min(self._due_ns, state.now_ns + state.limits.recent_ns))
        if self.stage is AdoptionStage.WAITING and self.has_standby:
            self.stage = AdoptionStage.REQUESTED
            self._checkpoint_id = state.checkpoints.next_id()
            state.effects.append(RequestStandbyCheckpoint(self._checkpoint_id, state.epoch))
        elif (
            self.stage is AdoptionStage.REQUESTED
            and self._offer is not None
            and state.session.phase in WORKS
            and self._offer.header.sequence_id <= state.session.fed_sequence_id  # a follower can be ahead of the app
        ):
            if problem := self._problem(self._offer):
                self.give_up(problem)
            else:
                self.stage, self._reading_id = AdoptionStage.READING, self._checkpoint_id
                state.effects.append(CheckCheckpoint(self._offer.header))
        elif self.stage is AdoptionStage.REQUESTED and state.log.is_idle and self.peers.outbound.any_unmarked:
            # The follower waits for marks of the last calls, and no record with input arrives that would carry them.
            state.log.append_no_message()

    @property
    def is_awaited(self) -> bool:
        """True if a follower's checkpoint is expected, so the own app is not asked. Give up once its time is over."""
        if self.stage in (AdoptionStage.NOTHING, AdoptionStage.ADOPTED):
            return False
        if self.state.now_ns >= self._due_ns:
            self.give_up(
                "nobody follows" if self.stage is AdoptionStage.WAITING else "who was asked has not given it in time"
            )
            return False
        return True

    def give_up(self, reason: str = "") -> None:
        """Stop waiting for a follower. ``reason``: why the own app is asked instead; "": it was already asked, or is
        gone."""
        if self.stage in (AdoptionStage.NOTHING, AdoptionStage.ADOPTED):
            return
        if self.stage is not AdoptionStage.WAITING:
            self.state.effects.append(CancelStandbyRequest())
        if reason:
            self.state.checkpoints.is_requested = self.is_for_app = True
            self.state.report(notices.StandbyTakesNone(reason))
        self.stage, self._offer = AdoptionStage.NOTHING, None

    def standbys_changed(self, event: ev.StandbysChanged) -> None:
        self.has_standby = event.is_ready

    # --- the offer ---------------------------------------------------------------------------------------------------

    def checkpoint_offered(self, event: ev.CheckpointOffered) -> None:
        """Store the offer if it answers the last request of this epoch; ignore any other."""
        offer = event.offer
        is_asked = self.stage is AdoptionStage.REQUESTED and offer.header.checkpoint_id == self._checkpoint_id
        if is_asked and offer.epoch == self.state.epoch:
            self._offer = offer

    def _problem(self, offer: Offer) -> str:
        """Return why the offered checkpoint can't replace one of the own app; "" if it can."""
        state = self.state
        header, last, outputs = offer.header, state.checkpoints.last, self.peers.outbound.streams
        if header.sequence_id > state.log.durable_sequence_id:
            return f"it is behind record {header.sequence_id}, the log ends with {state.log.durable_sequence_id}"
        if last is None or header.sequence_id < last.sequence_id or header.checkpoint_id <= last.checkpoint_id:
            return "the log has a later one"
        if header.version != state.versions.current:
            return f"it is of version {header.version} of the app, which runs version {state.versions.current}"
        settled = last.sequence_id
        verdicts = [key for key in offer.verdicts if key[0] > settled]
        own = [key for key in self.call_failures.verdicts.keys_until(header.sequence_id) if key[0] > settled]
        if verdicts != own:
            return f"messages have failed for one app and not for the other, up to record {header.sequence_id}"
        for name, mark in header.outputs.items():
            stream = outputs.get(name)
            position = 0 if stream is None else stream.position
            same = stream is None or mark.position < position or mark == stream.mark
            if mark.position > position or not same:
                return f"its app has made other calls to {name!r} up to message {mark.position}"
        for name, before in last.outputs.items():
            if name not in header.outputs or header.outputs[name].position < before.position:
                return f"it lacks calls to {name!r} that the checkpoint before it has"
        return ""

    def checkpoint_checked(self, event: ev.CheckpointChecked) -> bool:
        """Adopt the checkpoint if it was read and is undamaged. False if the answer is for another component."""
        if event.checkpoint_id != self._reading_id:
            return False
        self._reading_id = 0
        if self.stage is not AdoptionStage.READING or self._offer is None:
            pass  # it is no longer wanted
        elif event.problem is not None:
            self.give_up(event.problem)
        elif self.state.checkpoints.settled and not self.state.checkpoints.is_being_taken:
            state = self.state
            transaction = state.log.append_outside_record(0).transaction
            transaction.checkpoint = replace(self._offer.header, time_ns=state.log.time_ns(state.now_ns))
            transaction.adopts = True
            state.checkpoints.settled = False
            self.stage, self._offer = AdoptionStage.ADOPTED, None
        else:  # the app is giving one, which is later
            self.give_up()
        return True

    def checkpoint_durable(self, header: CheckpointHeader) -> None:
        self.stage = AdoptionStage.NOTHING
        self.state.checkpoints.is_requested = False
        self.call_failures.checkpoint_adopted(header.sequence_id)
        self.state.report(notices.CheckpointAdopted(header.checkpoint_id, header.sequence_id, header.size_bytes))

    def app_lost(self) -> None:
        """Forget the request: the own app is gone, and its successor takes a checkpoint anyway."""
        self.give_up()
        self.is_for_app = False
