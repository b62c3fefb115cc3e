"""An app's way from its connection to being primary: it starts anew, or recovers from a checkpoint and a replay.

The session's phases say how far it is (`session.py`). A recovery is a replay of a log that has ended; to follow is the
same of one that another writes, and ends when this coordinator is given the right to write (`taking_over.py`). What the
replay still owes when its last record is handled is here: a log that was cut by hand waits for the receivers, and an
app that is primary may have to make more of what the log knows of before anything later may come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from immortal.coordinator.core import events as ev
from immortal.coordinator.core import notices
from immortal.coordinator.core.app_clock import AppClock
from immortal.coordinator.core.app_outbox import AppOutbox
from immortal.coordinator.core.checkpointing import Checkpointing
from immortal.coordinator.core.clients import Clients
from immortal.coordinator.core.effects import CloseApp, LoadLog
from immortal.coordinator.core.epoch import Epoch
from immortal.coordinator.core.errors import FencedError, FollowerError
from immortal.coordinator.core.failing import Failing
from immortal.coordinator.core.group_commit import GroupCommit
from immortal.coordinator.core.interfaces import CheckpointHeader, LogSummary, Transaction
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.recovery import Recovery
from immortal.coordinator.core.replay_check import ReplayPolicy
from immortal.coordinator.core.right import Right
from immortal.coordinator.core.session import REPLAYS, AppSession, Phase, Step
from immortal.coordinator.core.streams.intake import Intake
from immortal.coordinator.core.streams.peers import Peers
from immortal.coordinator.core.turn import Turn
from immortal.coordinator.core.upgrades import Upgrades
from immortal.protocol.messages import MessageType, encode_checkpoint
from immortal.protocol.record import CHECKPOINT_SEQUENCE_ID, encode_record


class Proof(Enum):
    """Whether an app that is primary has made all that the log knows of."""

    COMPLETE = "all is made, or not primary yet"
    AT_CHECKPOINT = "promoted: its next checkpoint shows it"
    BEHIND = "it holds something back, which is still to come"


BEHIND = Proof.BEHIND  # each turn asks


@dataclass(slots=True, eq=False, repr=False)
class Lifecycle:
    """``promote``: a recovered app begins to work without a checkpoint first."""

    turn: Turn
    right: Right
    outbox: AppOutbox
    session: AppSession
    app_clock: AppClock
    log: GroupCommit
    epoch: Epoch
    peers: Peers
    clients: Clients
    intake: Intake
    policy: ReplayPolicy
    failing: Failing
    recovery: Recovery
    checkpoints: Checkpointing
    upgrades: Upgrades
    load: Callable[[LogSummary], None]  # into all parts of the machine
    limits: Limits
    promote: bool
    is_cut: bool = False  # the log that is replayed was cut by hand
    proof: Proof = Proof.COMPLETE
    _healing: Transaction | None = None  # what heals the cut, until a checkpoint takes it along
    took_over: bool = False  # the session has followed the log of another
    _waiting_told: bool = False  # the operator knows that receivers are waited for
    _load_ticket: int = 0  # the commit to wait for before the log is loaded for a new session; 0: none
    _load_due: bool = False  # the log is to be loaded for a new session
    _loading: bool = False  # that was asked for, and is not answered
    _look_ns: int = 0  # when a follower may look again at what the log says
    _looked_again: int = 0  # the checkpoint of a log that is followed that was no good when it was last looked at

    # --- the app connects, and is gone -------------------------------------------------------------------------------

    def connected(self, event: ev.AppConnected) -> None:
        self.session.connect()
        self.session.advance(Step.APP_CONNECTED)
        self.app_clock.connected()
        self.begin()

    def begin(self) -> None:
        """The app that is connected may be told what the log has, now or as soon as that is known."""
        if self.right.writes:
            # The new epoch's commit is behind all that the last app has sent: once it is durable, so is that.
            self._load_ticket = self.epoch.begin()
        self._load_due = self.right.may_read

    def app_lost(self) -> None:
        self.recovery.forget()
        self._load_due = False
        self.took_over = False

    def load_if_due(self) -> None:
        is_due = self._load_due and not self._loading and self.right.may_read
        if is_due and self.log.durable_ticket >= self._load_ticket:
            self._load_due = False
            self._loading = True
            self.turn.effects.append(LoadLog())

    def look_at_log(self) -> None:
        """What its writer has spilled by now, and what is acknowledged, need not stay in memory here: once in a while,
        for a follower whose app has to wait for room, and so gets no record that would tell."""
        if not self._loading and self.turn.now_ns >= self._look_ns:
            self._look_ns = self.turn.now_ns + self.limits.recent_ns
            self._loading = True
            self.turn.effects.append(LoadLog())

    @property
    def may_begin_anew(self) -> bool:
        """Nothing that was asked of the log for this session is still to be answered."""
        return not self._loading and not self.recovery.is_choosing

    def introduce(self) -> None:
        """What the app is to know before its first record."""
        self.failing.introduce()
        self.app_clock.introduce()

    # --- the log is loaded: a first start, or a checkpoint to restore ------------------------------------------------

    def log_loaded(self, event: ev.LogLoaded) -> None:
        session, epoch = self.session, self.epoch
        self._loading = False
        self.peers.following = self.right.follows
        if session.phase in REPLAYS and self.right.follows and self.log_grew(event.summary):
            return
        if session.phase is not Phase.LOADING or self._load_due:
            return  # of a session that has ended
        if self.right.writes and event.summary.epoch > epoch.number:
            raise FencedError(
                "another coordinator",
                f"fenced by another coordinator at epoch {epoch.number}: its log has {event.summary.epoch} by now",
            )
        if self.right.follows and not event.summary.checkpoints:
            return  # the first start has not come to its end, and its writer is gone: it is ours to begin
        if self.peers.ready:
            self.turn.effects.append(self.recovery.choose(event.summary))
            return
        self.peers.restore(None, event.summary, epoch.number, epoch.began_ns)
        self.failing.begin(event.summary, -1)
        if session.heard:  # else as soon as its Hello is here
            self.introduce()
        session.advance(Step.LOG_IS_NEW)
        self.outbox.control(MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT)

    def checkpoint_checked(self, event: ev.CheckpointChecked) -> None:
        if self.session.phase is not Phase.LOADING:
            return
        if self.right.is_granted:  # the log is about to be loaded anew, by its writer: this is of what was before
            self.recovery.forget()
        elif event.problem is not None and self.right.follows and event.checkpoint_id != self._looked_again:
            self._looked_again = event.checkpoint_id  # its writer may have removed it since
            self.recovery.forget()
            self._load_due = True
        elif event.problem is not None:
            self.turn.report(notices.CheckpointDamaged(event.checkpoint_id, event.problem))
            if (check := self.recovery.choose_another(event.checkpoint_id)) is not None:
                self.turn.effects.append(check)
        elif (chosen := self.recovery.chosen(event.checkpoint_id)) is not None:
            self._restore(*chosen)

    def _restore(self, header: CheckpointHeader, summary: LogSummary) -> None:
        session, epoch = self.session, self.epoch
        session.advance(Step.CHECKPOINT_CHOSEN)
        session.fed_sequence_id = header.sequence_id
        session.replay_target = self.log.durable_sequence_id
        self.checkpoints.asked(self.log.logged_bytes)
        self.upgrades.versions.begin_at(header)
        self.is_cut = summary.cut_sequence_id is not None
        self.proof = Proof.COMPLETE
        self._healing = None
        self._waiting_told = False
        self.peers.restore(header, summary, epoch.number, epoch.began_ns)
        self.intake.open_calls.restore(header.open_calls, header.sequence_id)
        self.failing.begin(summary, header.sequence_id)
        size = encode_checkpoint(header.size_bytes)
        self.outbox.send(encode_record(self.peers.committer_id, CHECKPOINT_SEQUENCE_ID, size))
        to_replay = session.replay_target - header.sequence_id
        self.turn.report(notices.Recovering(header.checkpoint_id, header.sequence_id, to_replay, epoch.number))

    # --- a log that another writes -----------------------------------------------------------------------------------

    def look_who_writes(self) -> None:
        if self.session.phase is Phase.REPLAYING and self.peers.following:
            self.session.advance(Step.FOLLOWS)

    def log_grew(self, summary: LogSummary) -> bool:
        """The log that the session follows is as ``summary`` says now. False where it has to begin anew, which it does.

        Raises FollowerError.
        """
        session = self.session
        problem = self._why_anew(summary)
        if problem:
            self.begin_anew(f"the app that follows has the records up to {session.fed_sequence_id}: {problem}")
            return False
        self.load(summary)
        session.replay_target = summary.last_sequence_id
        self.peers.log_grew(summary)
        return True

    def _why_anew(self, summary: LogSummary) -> str:
        """Why the app that follows can't go on with the log, in words; "": it can. Raises FollowerError."""
        session, versions = self.session, self.upgrades.versions
        if len(summary.versions) > len(versions.starts):
            started, had = summary.versions[-1], versions.current
            if started.version != versions.upgrade_to or len(summary.versions) > len(versions.starts) + 1:
                raise FollowerError(
                    f"the log goes on with version {started.version} of the app behind record {started.sequence_id}, "
                    f"and this follower runs version {had}: start it again with the new code"
                )
            if not versions.goes_on_with(started, session.fed_sequence_id):
                self.load(summary)
                return f"record {started.sequence_id} was the last one of the old version, the next have the new one"
        if summary.last_sequence_id < session.fed_sequence_id:
            return f"the log ends with record {summary.last_sequence_id}, it was cut or replaced"
        if summary.first_sequence_id > session.fed_sequence_id + 1:
            return f"the log begins with record {summary.first_sequence_id} by now, what is before is trimmed away"
        if not self.failing.log_grew(summary):
            return "a message that it has handled is passed over by now"
        return ""

    def begin_anew(self, why: str) -> None:
        """The app's state is of no use any more: the next one begins at a checkpoint."""
        self.turn.report(notices.FollowerBeginsAnew(problem=why))
        self.session.refused = True
        self.turn.effects.append(CloseApp())

    def take_over(self) -> None:
        """The session has followed the log, which is ours to write by now; our epoch is durable."""
        if not self.failing.is_at_one:
            self.failing.forget_unlogged()
            self.begin_anew("messages have failed for the app that follows, or for the one before it, and not for both")
            return
        self.took_over = True
        self.session.advance(Step.RIGHT_TAKEN)
        self.peers.take_over(self.epoch.number, self.epoch.began_ns)

    # --- the end of the replay ---------------------------------------------------------------------------------------

    def end_replay_if_due(self) -> None:
        """At the start of another version, and at the end of the replay, the app is told what it is to become."""
        session, versions = self.session, self.upgrades.versions
        fed = session.fed_sequence_id
        if versions.begins_behind(fed):
            if not session.hello_is_due:
                self.upgrades.repeat_next()
        elif session.phase is Phase.FOLLOWING:
            return  # there may be more at any time
        elif fed < session.replay_target or (self.is_cut and self._waits_for_receivers()):
            return
        elif versions.upgrade_to is not None:
            if not session.hello_is_due:  # it says whether the app wants to know the version
                self.upgrades.ask_for_new()
        elif (self.promote or self._was_promoted) and not self.is_cut:
            self._promote_if_due()
        else:
            session.advance(Step.CAUGHT_UP)
            session.checkpoint_sequence_id = fed
            self.outbox.control(MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT)

    @property
    def _was_promoted(self) -> bool:
        """The app followed another writer's log, and may go on without a checkpoint. A client of the base protocol
        expects TakeBecomingPrimaryCheckpoint there."""
        return self.took_over and self.session.hello is not None

    def _promote_if_due(self) -> None:
        """The app may work once all is made again that the log knows of; its next checkpoint proves the rest."""
        if self.peers.replay_is_behind():
            return
        self.session.advance(Step.PROMOTED)
        self.proof = Proof.AT_CHECKPOINT
        self._replay_is_known()  # but for what the last calls come to: for a moment, more may count as open than are
        self.outbox.control(MessageType.BECOMING_PRIMARY)
        self.report_recovered()

    def report_recovered(self) -> None:
        self.turn.report(notices.Recovered(self.epoch.number, self.session.fed_sequence_id))

    def _waits_for_receivers(self) -> bool:
        """What receivers have of a lost part is theirs to say: an acknowledgement may have been lost with it."""
        unheard = self.peers.unheard()
        if unheard and not self._waiting_told:
            self._waiting_told = True
            self.turn.report(notices.WaitsForReceivers(", ".join(map(repr, unheard))))
        return bool(unheard)

    # --- the proof: all is made that the log knows of ----------------------------------------------------------------

    def look_whether_behind(self) -> None:
        """Whether what was behind has come."""
        if not self.peers.replay_is_behind():
            self.proof = Proof.COMPLETE

    def prove_promotion(self) -> None:
        """A checkpoint of the app has begun: all that it has made by then is sent."""
        if self.proof is Proof.AT_CHECKPOINT:
            self.finish_replay()

    def finish_replay(self) -> None:
        """The app has made what the replay was to make, but for what it holds back. Raises DivergenceError."""
        self._replay_is_known()
        if self.is_cut:
            self._healing = self.peers.heal_cut()
            self.clients.lose_open()
            return
        # What was held back at one checkpoint comes behind it, so before the next.
        all_sent = self.session.flushes or self.proof is Proof.BEHIND
        self.peers.finish_replay(all_sent=all_sent)
        behind = not all_sent and self.policy.compares and self.peers.replay_is_behind()
        self.proof = Proof.BEHIND if behind else Proof.COMPLETE

    def _replay_is_known(self) -> None:
        """A recovery has made all answers once more that there were."""
        if not self.intake.open_calls.is_known:
            self.intake.open_calls.is_known = True
            if self.peers.ready:
                self.peers.answer_parked(self.turn.now_ns)

    def take_healing(self, transaction: Transaction) -> None:
        """What heals a cut becomes durable with the checkpoint behind it."""
        if self._healing is not None:
            transaction.absorb(self._healing)
            self._healing = None

    def cut_healed(self) -> None:
        self.is_cut = self.peers.held = False
