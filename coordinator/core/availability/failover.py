"""Failover: how a process gets the write lease and loads the log, at its start or after it has followed a writer.

The lease is granted before the log is loaded, so the loaded log has everything that any earlier writer has written. A
follower takes over between two records, once its app is restored: it reads the log to its end under the lease, compares
its app's outputs with the marks there, and sends them under its own epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

from immortal.coordinator.core import events as ev
from immortal.coordinator.core import notices
from immortal.coordinator.core.availability.write_lease import LeaseRole
from immortal.coordinator.core.effects import AcquireWriteLease, LoadLog
from immortal.coordinator.core.errors import LogLockedError
from immortal.coordinator.core.interfaces import LogSummary, StoredClients
from immortal.coordinator.core.life_cycle.recovery import Lifecycle
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.coordinator.core.state import CoreState


@dataclass(slots=True, eq=False, repr=False)
class Failover:
    """Ways to the write lease: at the start, or after following. ``follow``: follow the log while another process
    writes it."""

    state: CoreState
    lifecycle: Lifecycle
    follow: bool
    _granted: ev.WriteLeaseGranted | None = None  # a lease that is granted and not used yet
    _epoch_ticket: int = 0  # commit of the epoch under which a session that has followed will work; 0: none

    def started(self, event: ev.Started) -> None:
        self.state.effects.append(AcquireWriteLease())

    def lease_held(self, event: ev.WriteLeaseHeld) -> None:
        """Follow the holder of the lease. Raises LogLockedError if this process must not follow."""
        state, write_lease = self.state, self.state.write_lease
        if not self.follow:
            raise LogLockedError(
                f"the log of {state.name!r} is in use by {event.holder}: two coordinators must not write one log; "
                f"stop that process first"
            )
        if event.holder != write_lease.holder:
            state.report(notices.Following(holder=event.holder))
        write_lease.holder = event.holder
        if write_lease.role is LeaseRole.STARTING:
            write_lease.become(LeaseRole.FOLLOWING)
            state.effects.append(LoadLog())

    def lease_granted(self, event: ev.WriteLeaseGranted) -> None:
        self._granted = event
        self.state.write_lease.is_granted = True

    def advance(self) -> None:
        """Take the next possible step: load the log under the lease, or let the app take over."""
        state = self.state
        if self._granted is not None and self._may_take_over:
            granted, self._granted = self._granted, None
            write_lease = state.write_lease
            if write_lease.follows:
                state.report(notices.TakingOver(holder=write_lease.holder))
            write_lease.become(LeaseRole.LOADING)
            write_lease.is_granted = False
            write_lease.fence = granted.term
            state.log.appends_max = granted.appends_max
            state.effects.append(LoadLog(with_clients=True))
        elif self._epoch_ticket and state.log.durable_ticket >= self._epoch_ticket:
            self._epoch_ticket = 0
            if state.session.phase is Phase.FOLLOWING:
                self.lifecycle.take_over()

    @property
    def has_work(self) -> bool:
        """True if :meth:`advance` can have something to do."""
        return self._granted is not None or self._epoch_ticket > 0

    @property
    def _may_take_over(self) -> bool:
        """True if the app can take over now. Not during its restore, as it would have to start over."""
        state = self.state
        if state.write_lease.role is LeaseRole.STARTING:
            return True
        is_between = state.session.phase in (Phase.WAITING, Phase.LOADING, Phase.FOLLOWING)
        return (
            state.write_lease.is_loaded
            and is_between
            and self.lifecycle.may_restart_recovery
            and not state.session.reading
        )

    def log_loaded(self, event: ev.LogLoaded) -> None:
        if event.clients is not None:
            self._load_as_writer(event.summary, event.clients)
        elif not self.state.write_lease.is_loaded:
            self.state.write_lease.is_loaded = True
            self.lifecycle.load_log(event.summary)
            if self.state.session.phase is Phase.LOADING:
                self.lifecycle.start_recovery()
        else:
            self.lifecycle.log_loaded(event)

    def _load_as_writer(self, summary: LogSummary, clients: StoredClients) -> None:
        state = self.state
        lifecycle, session = self.lifecycle, state.session
        is_followed = session.phase is Phase.FOLLOWING and not session.refused
        if is_followed and not lifecycle.log_grew(summary):
            is_followed = False  # the app starts over
        state.write_lease.is_loaded = True
        lifecycle.load_log(summary, clients)
        state.write_lease.become(LeaseRole.WRITING)
        state.log.is_held = False
        if is_followed:
            self._epoch_ticket = state.begin_epoch()
            return
        lifecycle.call_failures.forget_unlogged()
        if session.phase is Phase.LOADING:
            lifecycle.start_recovery()
