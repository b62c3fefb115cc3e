"""Recovery of an app: from its connection until it is primary. A new log begins with a first start instead.

The session's phases say how far it is (`session.py`). A recovery loads a checkpoint and replays the records up to the
end of the log. A follower does the same with a log that another process writes, and ends it with the write lease
(`failover.py`). The end of a replay is here, too: after a cut the app waits for all receivers, and a promoted app can
have to make further outputs that the log knows of before it gets any later record. Upgrades of the app are at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from immortal.coordinator.core import events as ev
from immortal.coordinator.core import notices
from immortal.coordinator.core.checkpoints.policy import Recovery
from immortal.coordinator.core.client.requests import Clients
from immortal.coordinator.core.clock import AppClock
from immortal.coordinator.core.effects import CloseApp, LoadLog, UpgradeEnded
from immortal.coordinator.core.errors import AppProtocolError, DivergenceError, FencedError, FollowerError
from immortal.coordinator.core.failures.call_failure import CallFailures
from immortal.coordinator.core.failures.dead_letters import OperatorActions
from immortal.coordinator.core.input.back_pressure import Impulses
from immortal.coordinator.core.interfaces import CheckpointHeader, LogSummary, StoredClients, Transaction, VersionStart
from immortal.coordinator.core.life_cycle.session import REPLAYS, UPGRADES, Phase, Step
from immortal.coordinator.core.peers import Peers
from immortal.coordinator.core.state import CoreState
from immortal.protocol.extensions import encode_version
from immortal.protocol.messages import MessageType, encode_checkpoint, encode_message
from immortal.protocol.readers import Message
from immortal.protocol.record import CHECKPOINT_SEQUENCE_ID, encode_record


class Proof(Enum):
    """Degree of proof that a primary app has made all outputs that the log knows of."""

    COMPLETE = "all is made, or not primary yet"
    AT_CHECKPOINT = "promoted: its next checkpoint shows it"
    BEHIND = "it holds something back, which is still to come"


BEHIND = Proof.BEHIND  # alias, since each turn reads it


@dataclass(slots=True, eq=False, repr=False)
class Lifecycle:
    """Way of the app to become primary. ``promote``: a recovered app starts to work before it gives a checkpoint."""

    state: CoreState
    peers: Peers
    clients: Clients
    call_failures: CallFailures
    app_clock: AppClock
    upgrades: Upgrades
    impulses: Impulses
    promote: bool
    recovery: Recovery = field(init=False)
    is_cut: bool = False  # the replayed log was cut by hand
    proof: Proof = Proof.COMPLETE
    _cut_repair: Transaction | None = None  # repair of the cut, until a checkpoint's transaction includes it
    took_over: bool = False  # the session has followed another process's log
    _wait_reported: bool = False  # the operator knows that receivers must answer first
    _load_ticket: int = 0  # the commit to wait for before the log is loaded for a new session; 0: none
    _load_due: bool = False  # the log must be loaded for a new session
    _loading: bool = False  # a load was requested, and is not answered
    _reload_due_ns: int = 0  # when a follower can next read the log's state
    _rechecked_id: int = 0  # the checkpoint of a followed log that was damaged at its last check

    def __post_init__(self) -> None:
        self.recovery = Recovery(self.state.name)

    # --- the app connects and disconnects ----------------------------------------------------------------------------

    def connected(self, event: ev.AppConnected) -> None:
        self.state.session.connect()
        self.state.session.advance(Step.APP_CONNECTED)
        self.app_clock.connected()
        self.start_recovery()

    def start_recovery(self) -> None:
        """Load the log for the connected app, now or as soon as it can be read."""
        if self.state.write_lease.writes:
            # The new epoch's commit comes after all that the last app has sent: once it is durable, so are the others.
            self._load_ticket = self.state.begin_epoch()
        self._load_due = self.state.write_lease.may_read

    def app_lost(self) -> None:
        self.recovery.forget()
        self._load_due = False
        self.took_over = False

    def load_if_due(self) -> None:
        is_due = self._load_due and not self._loading and self.state.write_lease.may_read
        if is_due and self.state.log.durable_ticket >= self._load_ticket:
            self._load_due = False
            self._loading = True
            self.state.effects.append(LoadLog())

    def reload_if_due(self) -> None:
        """Read from time to time what the writer has spilled and what is acknowledged, so that it can leave memory.
        Needed if the follower's app waits for room, as it then reads no record that would bring this news."""
        state = self.state
        if not self._loading and state.now_ns >= self._reload_due_ns:
            self._reload_due_ns = state.now_ns + state.limits.recent_ns
            self._loading = True
            state.effects.append(LoadLog())

    @property
    def may_restart_recovery(self) -> bool:
        """True if the log has answered all requests of this session."""
        return not self._loading and not self.recovery.is_choosing

    def send_introduction(self) -> None:
        """Send the app what it needs before its first record: verdicts and the time."""
        self.call_failures.send_verdicts()
        self.app_clock.send_time()

    # --- the log is loaded: a first start, or a checkpoint to restore ------------------------------------------------

    def load_log(self, summary: LogSummary, clients: StoredClients | None = None) -> None:
        """Give all components the log's state. ``clients``: given if this process writes the log from now on."""
        state = self.state
        state.log.load(summary)
        state.committer_id = summary.committer_id
        state.epoch = state.frame_epoch = summary.epoch
        state.session.load(summary.committer_id, summary.extensions)
        self.peers.load(summary)
        self.impulses.load(summary)
        state.checkpoints.load(summary.checkpoints)
        state.versions.load(summary.versions)
        self.call_failures.load(summary)
        self.peers.admission.open_calls.is_known = not state.ready  # if it is, the next app recovers
        if clients is not None:
            self.clients.table.load(clients)
            state.accepting = not state.shutdown.is_requested

    def log_loaded(self, event: ev.LogLoaded) -> None:
        state, session, epoch = self.state, self.state.session, self.state.epoch
        self._loading = False
        state.following = state.write_lease.follows
        if session.phase in REPLAYS and state.write_lease.follows and self.log_grew(event.summary):
            return
        if session.phase is not Phase.LOADING or self._load_due:
            return  # of a session that has ended
        if state.write_lease.writes and event.summary.epoch > epoch:
            raise FencedError(
                "another coordinator",
                f"fenced by another coordinator at epoch {epoch}: its log has {event.summary.epoch} by now",
            )
        if state.write_lease.follows and not event.summary.checkpoints:
            return  # the first start is incomplete and its writer is gone: this process will get the lease and begin it
        if state.ready:
            state.effects.append(self.recovery.choose(event.summary))
            return
        self.peers.replay.restore(None, event.summary)
        self.call_failures.session_began(event.summary, -1)
        if session.has_sent:  # otherwise once its Hello arrives
            self.send_introduction()
        session.advance(Step.LOG_IS_NEW)
        state.outbox.send_control(MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT)

    def checkpoint_checked(self, event: ev.CheckpointChecked) -> None:
        state = self.state
        if state.session.phase is not Phase.LOADING:
            return
        if state.write_lease.is_granted:  # the log will be loaded again, so this answer is outdated
            self.recovery.forget()
        elif event.problem is not None and state.write_lease.follows and event.checkpoint_id != self._rechecked_id:
            self._rechecked_id = event.checkpoint_id  # the writer may have removed it since
            self.recovery.forget()
            self._load_due = True
        elif event.problem is not None:
            state.report(notices.CheckpointDamaged(event.checkpoint_id, event.problem))
            if (check := self.recovery.choose_previous(event.checkpoint_id)) is not None:
                state.effects.append(check)
        elif (chosen := self.recovery.chosen(event.checkpoint_id)) is not None:
            self._restore(*chosen)

    def _restore(self, header: CheckpointHeader, summary: LogSummary) -> None:
        state, session, epoch = self.state, self.state.session, self.state.epoch
        session.advance(Step.CHECKPOINT_CHOSEN)
        session.fed_sequence_id = header.sequence_id
        session.replay_target = state.log.durable_sequence_id
        state.checkpoints.checkpoint_began(state.log.logged_bytes)
        state.versions.begin_at(header)
        self.is_cut = summary.cut_sequence_id is not None
        self.proof = Proof.COMPLETE
        self._cut_repair = None
        self._wait_reported = False
        self.peers.replay.restore(header, summary)
        self.peers.admission.open_calls.restore(header.open_calls, header.sequence_id)
        self.call_failures.session_began(summary, header.sequence_id)
        size = encode_checkpoint(header.size_bytes)
        state.outbox.send(encode_record(state.committer_id, CHECKPOINT_SEQUENCE_ID, size))
        to_replay = session.replay_target - header.sequence_id
        state.report(notices.Recovering(header.checkpoint_id, header.sequence_id, to_replay, epoch))

    # --- a followed log ----------------------------------------------------------------------------------------------

    def log_grew(self, summary: LogSummary) -> bool:
        """Note the new state of the followed log, ``summary``. Return False if the app must start over; that has begun.

        Raises FollowerError.
        """
        session = self.state.session
        problem = self._restart_reason(summary)
        if problem:
            self.start_over(f"the app that follows has the records up to {session.fed_sequence_id}: {problem}")
            return False
        self.load_log(summary)
        session.replay_target = summary.last_sequence_id
        self.peers.replay.log_grew(summary)
        return True

    def _restart_reason(self, summary: LogSummary) -> str:
        """Return why the following app can't continue with the log; "" if it can. Raises FollowerError."""
        session, versions = self.state.session, self.state.versions
        if len(summary.versions) > len(versions.starts):
            started, had = summary.versions[-1], versions.current
            if started.version != versions.upgrade_to or len(summary.versions) > len(versions.starts) + 1:
                raise FollowerError(
                    f"the log goes on with version {started.version} of the app behind record {started.sequence_id}, "
                    f"and this follower runs version {had}: start it again with the new code"
                )
            if not versions.add_followed(started, session.fed_sequence_id):
                self.load_log(summary)
                return f"record {started.sequence_id} was the last one of the old version, the next have the new one"
        if summary.last_sequence_id < session.fed_sequence_id:
            return f"the log ends with record {summary.last_sequence_id}, it was cut or replaced"
        if summary.first_sequence_id > session.fed_sequence_id + 1:
            return f"the log begins with record {summary.first_sequence_id} by now, what is before is trimmed away"
        if not self.call_failures.log_grew(summary):
            return "a message that it has handled is passed over by now"
        return ""

    def start_over(self, reason: str) -> None:
        """Drop the app, whose state is no longer usable; its successor begins at a checkpoint."""
        self.state.report(notices.FollowerBeginsAnew(problem=reason))
        self.state.session.refused = True
        self.state.effects.append(CloseApp())

    def take_over(self) -> None:
        """Let the following app take over: this process writes the log now, and its epoch is durable."""
        if not self.call_failures.agrees_with_writer:
            self.call_failures.forget_unlogged()
            self.start_over("messages have failed for the app that follows, or for the one before it, and not for both")
            return
        self.took_over = True
        self.state.session.advance(Step.LEASE_GRANTED)
        self.peers.replay.take_over()

    # --- the end of the replay ---------------------------------------------------------------------------------------

    def end_replay_if_due(self) -> None:
        """Tell the app its next step at the start of another version, or at the end of the replay."""
        session, versions = self.state.session, self.state.versions
        fed = session.fed_sequence_id
        if versions.version_starts_after(fed):
            if not session.hello_is_due:
                self.upgrades.repeat_next()
        elif session.phase is Phase.FOLLOWING:
            return  # the log can grow at any time
        elif fed < session.replay_target or (self.is_cut and self._waits_for_receivers()):
            return
        elif versions.upgrade_to is not None:
            if not session.hello_is_due:  # the Hello says whether the app wants to know the version
                self.upgrades.request_new()
        elif not self.is_cut and (self.promote or (self.took_over and session.hello is not None)):
            # Without a checkpoint; an app without extensions expects TakeBecomingPrimaryCheckpoint instead.
            self._promote_if_due()
        else:
            session.advance(Step.CAUGHT_UP)
            session.checkpoint_sequence_id = fed
            self.state.outbox.send_control(MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT)

    def _promote_if_due(self) -> None:
        """Promote the app once it has made all outputs that the log knows of; its next checkpoint proves the rest."""
        if self.peers.replay.is_behind():
            return
        self.state.session.advance(Step.PROMOTED)
        self.proof = Proof.AT_CHECKPOINT
        self._count_open_calls()  # the last calls may be answered in a moment: until then too many count as open
        self.state.outbox.send_control(MessageType.BECOMING_PRIMARY)
        self.report_recovered()

    def report_recovered(self) -> None:
        self.state.report(notices.Recovered(self.state.epoch, self.state.session.fed_sequence_id))

    def _waits_for_receivers(self) -> bool:
        """Return True if a receiver must still say how much it has: a cut can lose acknowledgements."""
        unanswered_receivers = self.peers.replay.unanswered_receivers()
        if unanswered_receivers and not self._wait_reported:
            self._wait_reported = True
            self.state.report(notices.WaitsForReceivers(", ".join(map(repr, unanswered_receivers))))
        return bool(unanswered_receivers)

    # --- the proof: the app has made all that the log knows of -------------------------------------------------------

    def prove_promotion(self) -> None:
        """Finish the replay of a promoted app: its checkpoint has begun, so it has sent all earlier outputs."""
        if self.proof is Proof.AT_CHECKPOINT:
            self.finish_replay()

    def finish_replay(self) -> None:
        """Finish the replay: the app has made all outputs except those it holds back. Raises DivergenceError."""
        self._count_open_calls()
        if self.is_cut:
            self._cut_repair = self.peers.replay.heal_cut()
            self.clients.mark_open_lost()
            return
        # Output that is held back at one checkpoint is sent after it, so before the next one.
        all_sent = self.state.session.flushes or self.proof is Proof.BEHIND
        self.peers.replay.finish(all_sent=all_sent)
        behind = not all_sent and self.peers.policy.compares and self.peers.replay.is_behind()
        self.proof = Proof.BEHIND if behind else Proof.COMPLETE

    def _count_open_calls(self) -> None:
        """Count open calls from now on: the recovery has made all answers again."""
        if not self.peers.admission.open_calls.is_known:
            self.peers.admission.open_calls.is_known = True
            self.peers.inbound.answer_parked()

    def add_cut_repair(self, transaction: Transaction) -> None:
        """Add the repair of a cut to the checkpoint's transaction."""
        if self._cut_repair is not None:
            transaction.absorb(self._cut_repair)
            self._cut_repair = None

    def cut_healed(self) -> None:
        self.is_cut = self.state.outputs_held = False


# Upgrades of the app: past ones in the log, which each replay repeats, and a new one that an operator asks for.
#
# Both are requested after a record of the replay, and begin with a checkpoint of the app. A past upgrade needs no more.
# A new version counts once a second checkpoint, which confirms it, is durable; until then the old version is intact.


@dataclass(slots=True, eq=False, repr=False)
class Upgrades:
    """Upgrades of the app: the past ones of the log, and a new one."""

    state: CoreState
    operator: OperatorActions
    _replayed_version: VersionStart | None = None  # the past version to which the app is being upgraded

    def repeat_next(self) -> None:
        """Ask the app for the next past version, at the record where that version began."""
        self._replayed_version = self.state.versions.pop_next()
        self._send_request(self._replayed_version.version)

    def request_new(self) -> None:
        """Ask the app for the version that the operator wants, after the replay."""
        self.state.session.checkpoint_sequence_id = self.state.session.fed_sequence_id
        self._send_request(self.state.versions.upgrade_to)

    def _send_request(self, version: int | None) -> None:
        self.state.session.advance(Step.UPGRADE_REQUESTED)
        messages = encode_message(MessageType.UPGRADE_TAKE_CHECKPOINT)
        if version is not None and MessageType.VERSION in self.state.session.extensions:
            messages = encode_version(version) + messages
        self.state.outbox.send_control(MessageType.UPGRADE_TAKE_CHECKPOINT, messages)

    # --- the app's answer --------------------------------------------------------------------------------------------

    def is_new_version(self) -> bool:
        """Return True if the next checkpoint begins the new version. Raises AppProtocolError if the app names another
        version than the requested one."""
        if self._replayed_version is not None:
            return False
        session, wanted = self.state.session, self.state.versions.upgrade_to
        if MessageType.APP_DESCRIPTION in session.extensions and session.description.version != wanted:
            problem = f"the app is of version {session.description.version}, the upgrade is to version {wanted}"
            self._give_up(problem)
            raise AppProtocolError(problem)
        return True

    def upgraded(self) -> None:
        """Note the app's checkpoint that begins an upgrade."""
        session = self.state.session
        session.upgraded = True
        session.upgraded_sequence_id = session.fed_sequence_id
        if self._replayed_version is not None:
            self._replayed_version = None
            session.advance(Step.UPGRADE_REPLAYED)
            return
        session.advance(Step.CHECKPOINT_RECEIVED)
        self.state.outbox.send_control(MessageType.TAKE_CHECKPOINT)

    def failed(self, message: Message) -> None:
        """Handle the app's UpgradeFailed. Raises DivergenceError if the app was repeating a past upgrade."""
        session = self.state.session
        reason = message.data.decode("utf-8", "replace")
        if session.phase not in UPGRADES:
            raise AppProtocolError("the app says that an upgrade failed, none was asked for")
        if self._replayed_version is not None:
            raise DivergenceError(
                f"the app can't repeat the upgrade to version {self._replayed_version.version} that the log has behind "
                f"record {self._replayed_version.sequence_id}: {reason}"
            )
        session.refused = True
        self._give_up(reason)
        self.state.effects.append(CloseApp())

    def _give_up(self, reason: str) -> None:
        state = self.state
        version, state.versions.upgrade_to = state.versions.upgrade_to, None
        if version is not None:
            state.report(notices.UpgradeFailed(version, reason, state.versions.current))
            state.effects.append(UpgradeEnded(version, reason))

    def app_lost(self) -> None:
        state = self.state
        if state.session.phase in UPGRADES and state.versions.upgrade_to is not None:
            state.report(notices.UpgradeInterrupted(state.versions.upgrade_to))

    def version_began(self, start: VersionStart) -> None:
        """Note that a version is durable: that of the first start, or of an upgrade."""
        state = self.state
        before = state.versions.current
        state.versions.version_began(start)
        if start.sequence_id < 0:
            return
        session = state.session
        if session.phase is Phase.COMPLETING_UPGRADE:
            session.advance(Step.UPGRADE_DURABLE)
            state.report(notices.Recovered(state.epoch, session.fed_sequence_id))
        state.report(notices.Upgraded(before, start.version, start.sequence_id))
        state.effects.append(UpgradeEnded(start.version))
        self.operator.upgraded()
