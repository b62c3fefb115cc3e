"""What a coordinator's core is made of, put together."""

from __future__ import annotations

from collections.abc import Mapping

from immortal.coordinator.core.adopting import Adopting
from immortal.coordinator.core.app_clock import AppClock
from immortal.coordinator.core.app_inbox import AppInbox
from immortal.coordinator.core.app_outbox import AppOutbox
from immortal.coordinator.core.back_pressure import BackPressure
from immortal.coordinator.core.careful import Watch
from immortal.coordinator.core.checkpoint_taking import CheckpointTaking
from immortal.coordinator.core.checkpointing import Checkpointing
from immortal.coordinator.core.clients import Clients
from immortal.coordinator.core.clock import RunningTime
from immortal.coordinator.core.culprits import Culprits
from immortal.coordinator.core.dead_letters import Operator
from immortal.coordinator.core.epoch import Epoch
from immortal.coordinator.core.failing import Failing
from immortal.coordinator.core.feeding import Feeding
from immortal.coordinator.core.group_commit import GroupCommit
from immortal.coordinator.core.handlers import Handlers
from immortal.coordinator.core.impulses import Impulses
from immortal.coordinator.core.interfaces import NO_SUSPECT, LogSummary, StoredClients
from immortal.coordinator.core.lifecycle import Lifecycle
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.log_access import LogAccess
from immortal.coordinator.core.log_room import LogRoom
from immortal.coordinator.core.offering import Offering
from immortal.coordinator.core.pausing import Pausing
from immortal.coordinator.core.permissions import Permission
from immortal.coordinator.core.queries import Queries
from immortal.coordinator.core.recovery import Recovery
from immortal.coordinator.core.replay_check import ReplayPolicy
from immortal.coordinator.core.resets import Resets
from immortal.coordinator.core.right import Right
from immortal.coordinator.core.saving import Saving
from immortal.coordinator.core.session import AppSession
from immortal.coordinator.core.stopping import Stopping
from immortal.coordinator.core.streams.intake import Intake
from immortal.coordinator.core.streams.peers import Peers
from immortal.coordinator.core.taking_over import TakingOver
from immortal.coordinator.core.turn import Turn
from immortal.coordinator.core.upgrades import Upgrades
from immortal.coordinator.core.verdicts import Verdicts
from immortal.coordinator.core.versions import Versions
from immortal.coordinator.core.wakes import Wakes
from immortal.protocol.limits import RPC_FRONT_SIZE_BYTES_MAX


class Parts:
    """Of one machine. Each part has what it needs of those before it.

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
        self.right = right = Right()
        self.log = log = GroupCommit(limits.group_size_bytes)
        self.access = access = LogAccess(limits, log, turn)
        self.epoch = epoch = Epoch(log, turn)
        self.session = session = AppSession(limits.arguments_bytes_max + RPC_FRONT_SIZE_BYTES_MAX)
        self.outbox = outbox = AppOutbox(session, turn)
        self.app_clock = app_clock = AppClock(session, outbox.control)
        self.policy = policy = ReplayPolicy(name, limits, session, turn.effects)
        self.intake = intake = Intake(name, permissions or {}, limits.nesting_max, has_keys=has_keys)
        self.peers = peers = Peers(name, limits, log, turn.effects, policy=policy, intake=intake)
        self.clients = Clients(name, limits, log, turn.effects, lambda: peers.ready, peers.delivery, self.running)
        self.impulses = Impulses(limits, log, peers, epoch, turn)
        self.checkpoints = Checkpointing(limits)
        self.versions = Versions(upgrade_to)
        self.wakes = Wakes(limits, turn.effects)
        self.log_room = LogRoom(name, limits)
        verdicts = Verdicts(limits, log)
        watch = Watch(NO_SUSPECT, limits.kills_max)
        self.failing = failing = Failing(
            name,
            limits,
            log,
            session,
            peers,
            self.checkpoints,
            turn.effects,
            verdicts,
            watch,
            right,
            Culprits(limits),
        )
        intake.failing = failing
        self.saving = Saving(name, limits, turn, outbox, session, peers, self.checkpoints, verdicts, self.log_room)
        self.operator = Operator(failing, verdicts, self.impulses, self.log_room, self.versions, self.saving, turn)
        self.pausing = pausing = Pausing(name, session, turn)
        self.waiting = handlers = Handlers(name, session, outbox, self.impulses, self.log_room, pausing, turn)
        self.queries = Queries(name, limits, session, outbox, self.clients, intake, failing, peers, turn)
        self.resets = Resets(log, peers, epoch, turn)
        self.stopping = stopping = Stopping(outbox, turn)
        self.back_pressure = BackPressure(
            limits, session, log, peers, self.checkpoints, self.impulses, stopping, pausing, turn
        )
        self.upgrades = Upgrades(self.versions, session, outbox, self.operator, epoch, turn)
        recovery = Recovery(name)
        self.lifecycle = Lifecycle(
            turn,
            right,
            outbox,
            session,
            app_clock,
            log,
            epoch,
            peers,
            self.clients,
            intake,
            policy,
            failing,
            recovery,
            self.checkpoints,
            self.upgrades,
            self.load,
            limits,
            promote,
        )
        self.taking_over = TakingOver(name, turn, right, session, log, epoch, self.lifecycle, self.load, follow)
        self.feeding = Feeding(
            turn,
            outbox,
            session,
            right,
            limits,
            log,
            peers,
            intake,
            self.versions,
            recovery,
            self.lifecycle,
            stopping,
            pausing,
        )
        self.offering = Offering(
            turn,
            right,
            outbox,
            session,
            log,
            peers,
            intake,
            failing,
            self.checkpoints,
            self.versions,
            policy,
            limits,
        )
        self.adopting = Adopting(
            turn, session, log, epoch, peers, failing, self.checkpoints, self.versions, limits, self.wakes
        )
        self.taking = CheckpointTaking(
            name,
            turn,
            outbox,
            session,
            log,
            access,
            peers,
            intake,
            failing,
            self.checkpoints,
            self.upgrades,
            self.lifecycle,
            stopping,
            self.wakes,
            self.offering,
            self.adopting,
            self.saving,
        )
        self.inbox = AppInbox(
            name,
            turn,
            outbox,
            session,
            peers,
            self.clients,
            self.impulses,
            self.log_room,
            intake,
            failing,
            self.operator,
            handlers,
            self.queries,
            self.lifecycle,
            self.taking,
            self.upgrades,
            stopping,
        )

    def load(self, summary: LogSummary, clients: StoredClients | None = None) -> None:
        """All parts take in what the log says. ``clients``: this coordinator is its writer from now on."""
        peers, session = self.peers, self.session
        self.log.load(summary)
        self.epoch.number = summary.epoch
        session.load(summary.committer_id, summary.extensions)
        peers.load(summary)
        self.impulses.load(summary)
        self.checkpoints.load(summary.checkpoints)
        self.versions.load(summary.versions)
        self.failing.load(summary)
        self.intake.open_calls.is_known = not peers.ready  # if it is, the next app recovers
        if clients is not None:
            self.clients.load(summary.committer_id, clients)
            peers.accepting = self.clients.accepting = not self.stopping.asked
