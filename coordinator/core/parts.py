"""Components of a coordinator's core, and how they are connected."""

from __future__ import annotations

from collections.abc import Mapping

from immortal.coordinator.core.availability.failover import Failover
from immortal.coordinator.core.availability.snapshot_transfer import SnapshotReceiver, SnapshotSender
from immortal.coordinator.core.availability.write_lease import LogRequests, WriteLease
from immortal.coordinator.core.checkpoints.policy import CheckpointPolicy, Recovery
from immortal.coordinator.core.checkpoints.taking import CheckpointTaker
from immortal.coordinator.core.client.queries import Queries
from immortal.coordinator.core.client.requests import Clients
from immortal.coordinator.core.clock import AppClock, RunningTime
from immortal.coordinator.core.failures.call_failure import CallFailures, Verdicts
from immortal.coordinator.core.failures.dead_letters import OperatorActions
from immortal.coordinator.core.failures.poison_guard import CallerPenalties, PoisonGuard
from immortal.coordinator.core.failures.unsaved_state import UnsavedState
from immortal.coordinator.core.group_commit import GroupCommit
from immortal.coordinator.core.input.admission import Admission
from immortal.coordinator.core.input.app_inbox import AppInbox
from immortal.coordinator.core.input.back_pressure import BackPressure, Impulses, LogCapacity
from immortal.coordinator.core.interfaces import NO_SUSPECT, LogSummary, StoredClients
from immortal.coordinator.core.life_cycle.feeding import RecordFeeder
from immortal.coordinator.core.life_cycle.pause_stop import Pause, Shutdown
from immortal.coordinator.core.life_cycle.recovery import Lifecycle, Upgrades
from immortal.coordinator.core.life_cycle.session import AppSession
from immortal.coordinator.core.life_cycle.waiting_handlers import WaitingHandlers
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.output.replay_check import ReplayPolicy
from immortal.coordinator.core.peers import PeerResets, Peers
from immortal.coordinator.core.permissions import Permission
from immortal.coordinator.core.state import AppOutbox, Epoch, Turn, Versions
from immortal.coordinator.core.timers import Timers
from immortal.protocol.limits import RPC_FRONT_SIZE_BYTES_MAX


class Components:
    """Components of one machine, made in the order in which they need each other.

    ``name``: the instance. ``upgrade_to``: the version of the app that its next recovery is to end in. ``promote``: a
    recovered app begins to work without a checkpoint first. ``follow``: where another writes the log, follow it until
    the right to write is ours. ``permissions``: of callers, by name; others may call what is for no role.
    ``has_keys``: callers prove their names. ``running``: when it ran before; by default, always.
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
        has_keys: bool = False,
        running: RunningTime | None = None,
    ) -> None:
        self.name = name
        self.limits = limits = limits or Limits()
        self.running = running or RunningTime()
        self.turn = turn = Turn()
        self.write_lease = write_lease = WriteLease()
        self.log = log = GroupCommit(limits.group_size_bytes)
        self.log_requests = log_requests = LogRequests(limits, log, turn)
        self.epoch = epoch = Epoch(log, turn)
        self.session = session = AppSession(limits.arguments_bytes_max + RPC_FRONT_SIZE_BYTES_MAX)
        self.outbox = outbox = AppOutbox(session, turn)
        self.app_clock = app_clock = AppClock(session, outbox.send_control)
        self.policy = policy = ReplayPolicy(name, limits, session, turn.effects)
        self.admission = admission = Admission(name, permissions or {}, limits.nesting_max, has_keys=has_keys)
        self.peers = peers = Peers(name, limits, log, turn.effects, policy=policy, admission=admission)
        self.clients = Clients(name, limits, log, turn.effects, lambda: peers.ready, peers.delivery, self.running)
        self.impulses = Impulses(limits, log, peers, epoch, turn)
        self.checkpoints = CheckpointPolicy(limits)
        self.versions = Versions(upgrade_to)
        self.timers = Timers(limits, turn.effects)
        self.log_capacity = LogCapacity(name, limits)
        verdicts = Verdicts(limits, log)
        poison_guard = PoisonGuard(NO_SUSPECT, limits.kills_max)
        self.call_failures = call_failures = CallFailures(
            name,
            limits,
            log,
            session,
            peers,
            self.checkpoints,
            turn.effects,
            verdicts,
            poison_guard,
            write_lease,
            CallerPenalties(limits),
        )
        admission.call_failures = call_failures
        self.unsaved_state = UnsavedState(
            name, limits, turn, outbox, session, peers, self.checkpoints, verdicts, self.log_capacity
        )
        self.operator = OperatorActions(
            call_failures, verdicts, self.impulses, self.log_capacity, self.versions, self.unsaved_state, turn
        )
        self.pause = pause = Pause(name, session, turn)
        self.waiting_handlers = WaitingHandlers(name, session, outbox, self.impulses, self.log_capacity, pause, turn)
        self.queries = Queries(name, limits, session, outbox, self.clients, admission, call_failures, peers, turn)
        self.peer_resets = PeerResets(log, peers, epoch, turn)
        self.shutdown = shutdown = Shutdown(outbox, turn)
        self.back_pressure = BackPressure(
            limits, session, log, peers, self.checkpoints, self.impulses, shutdown, pause, turn
        )
        self.upgrades = Upgrades(self.versions, session, outbox, self.operator, epoch, turn)
        recovery = Recovery(name)
        self.lifecycle = Lifecycle(
            turn,
            write_lease,
            outbox,
            session,
            app_clock,
            log,
            epoch,
            peers,
            self.clients,
            admission,
            policy,
            call_failures,
            recovery,
            self.checkpoints,
            self.upgrades,
            self.load,
            limits,
            promote,
        )
        self.failover = Failover(name, turn, write_lease, session, log, epoch, self.lifecycle, self.load, follow)
        self.record_feeder = RecordFeeder(
            turn,
            outbox,
            session,
            write_lease,
            limits,
            log,
            peers,
            admission,
            self.versions,
            recovery,
            self.lifecycle,
            shutdown,
            pause,
        )
        self.snapshot_sender = SnapshotSender(
            turn,
            write_lease,
            outbox,
            session,
            log,
            peers,
            admission,
            call_failures,
            self.checkpoints,
            self.versions,
            policy,
            limits,
        )
        self.snapshot_receiver = SnapshotReceiver(
            turn, session, log, epoch, peers, call_failures, self.checkpoints, self.versions, limits, self.timers
        )
        self.checkpoint_taker = CheckpointTaker(
            name,
            turn,
            outbox,
            session,
            log,
            log_requests,
            peers,
            admission,
            call_failures,
            self.checkpoints,
            self.upgrades,
            self.lifecycle,
            shutdown,
            self.timers,
            self.snapshot_sender,
            self.snapshot_receiver,
            self.unsaved_state,
        )
        self.inbox = AppInbox(
            name,
            turn,
            outbox,
            session,
            peers,
            self.clients,
            self.impulses,
            self.log_capacity,
            admission,
            call_failures,
            self.operator,
            self.waiting_handlers,
            self.queries,
            self.lifecycle,
            self.checkpoint_taker,
            self.upgrades,
            shutdown,
        )

    def load(self, summary: LogSummary, clients: StoredClients | None = None) -> None:
        """Let all components take in what the log says. ``clients``: given if this coordinator writes the log from
        now on."""
        peers, session = self.peers, self.session
        self.log.load(summary)
        self.epoch.number = summary.epoch
        session.load(summary.committer_id, summary.extensions)
        peers.load(summary)
        self.impulses.load(summary)
        self.checkpoints.load(summary.checkpoints)
        self.versions.load(summary.versions)
        self.call_failures.load(summary)
        self.admission.open_calls.is_known = not peers.ready  # if it is, the next app recovers
        if clients is not None:
            self.clients.load(summary.committer_id, clients)
            peers.accepting = self.clients.accepting = not self.shutdown.is_requested
