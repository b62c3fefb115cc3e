"""Components of a coordinator's core, and how they are connected."""

from __future__ import annotations

from collections.abc import Mapping

from immortal.coordinator.core.availability.failover import Failover
from immortal.coordinator.core.availability.snapshot_transfer import SnapshotReceiver, SnapshotSender
from immortal.coordinator.core.checkpoints.taking import CheckpointTaker
from immortal.coordinator.core.client.queries import Queries
from immortal.coordinator.core.client.requests import Clients
from immortal.coordinator.core.clock import AppClock, RunningTime
from immortal.coordinator.core.failures.call_failure import CallFailures, Verdicts
from immortal.coordinator.core.failures.dead_letters import OperatorActions
from immortal.coordinator.core.failures.poison_guard import CallerPenalties
from immortal.coordinator.core.failures.unsaved_state import UnsavedState
from immortal.coordinator.core.input.admission import Admission
from immortal.coordinator.core.input.app_inbox import AppInbox
from immortal.coordinator.core.input.back_pressure import BackPressure, Impulses
from immortal.coordinator.core.life_cycle.feeding import RecordFeeder, WaitingHandlers
from immortal.coordinator.core.life_cycle.recovery import Lifecycle, Upgrades
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.peers import PeerResets, Peers
from immortal.coordinator.core.permissions import Permission
from immortal.coordinator.core.state import CoreState


class Components:
    """Components of one machine, created in the order in which they need each other.

    ``name``: the instance. ``upgrade_to``: the version of the app in which the next recovery must end. ``promote``: a
    recovered app begins to work before it has given a checkpoint. ``follow``: follow a log that another process writes,
    until this one gets the write lease. ``permissions``: by caller; other callers can call the methods without a role.
    ``running``: when the instance ran before; by default, always.
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
        limits = limits or Limits()
        self.state = state = CoreState(name, limits, upgrade_to)
        self.running = running or RunningTime()
        self.app_clock = AppClock(state.session, state.outbox.send_control)
        self.call_failures = call_failures = CallFailures(state, Verdicts(state), CallerPenalties(limits))
        self.admission = admission = Admission(state, call_failures, permissions or {})
        self.peers = peers = Peers(state, admission)
        self.clients = clients = Clients(state, peers.delivery, self.running)
        self.impulses = impulses = Impulses(state, peers)
        self.unsaved_state = unsaved_state = UnsavedState(state, call_failures.verdicts)
        self.operator = OperatorActions(state, call_failures, impulses, unsaved_state)
        self.waiting_handlers = WaitingHandlers(state, impulses)
        self.queries = Queries(state, clients, call_failures, admission)
        self.peer_resets = PeerResets(state, peers)
        self.back_pressure = BackPressure(state, peers.outbound, impulses)
        self.upgrades = Upgrades(state, self.operator)
        self.lifecycle = lifecycle = Lifecycle(
            state, peers, clients, call_failures, self.app_clock, self.upgrades, impulses, promote
        )
        self.failover = Failover(state, lifecycle, follow)
        self.record_feeder = RecordFeeder(state, peers, lifecycle)
        self.snapshot_sender = SnapshotSender(state, peers, call_failures)
        self.snapshot_receiver = SnapshotReceiver(state, peers, call_failures)
        self.checkpoint_taker = CheckpointTaker(
            state, peers, lifecycle, call_failures, unsaved_state, self.snapshot_sender, self.snapshot_receiver
        )
        self.inbox = AppInbox(self)
