"""Timers: when the machine must look at things although nothing happens, in instance time (core/clock.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from immortal.coordinator.core.effects import WakeAt

if TYPE_CHECKING:
    from immortal.coordinator.core.peers import Peers
    from immortal.coordinator.core.state import CoreState


class Timers:
    """Times in ns since the Unix epoch; None where nothing is waited for.

    No dataclass: mypyc makes those read the types of their fields at import, where CoreState is not there yet.
    """

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._checkpoint_ns: int | None = None  # one is due by age
        self._retry_ns: int | None = None  # for streams that have stopped
        self._spill_ns: int | None = None  # for streams whose receivers, or whose log's writer, are waited for
        self._held_back_ns: int | None = None  # for senders that have used up their rate
        self._barrier_ns: int | None = None  # for calls whose receiver does not answer
        self._turn_ns: int | None = None  # for batches that wait for their turn
        self._log_ns: int | None = None  # for a log that does not answer
        self._standby_ns: int | None = None  # for a checkpoint of who follows

    def checkpoint_at(self, time_ns: int) -> None:
        self._checkpoint_ns = time_ns
        self._plan()

    def standby_at(self, time_ns: int) -> None:
        if self._standby_ns is None or time_ns < self._standby_ns:
            self._standby_ns = time_ns
            self._plan()

    def log_at(self, time_ns: int | None) -> None:
        self._log_ns = time_ns
        self._plan()

    def schedule_wakes(self, peers: Peers) -> None:
        """Wake for streams that have stopped, and for those that wait for their receivers."""
        state, now_ns = self._state, self._state.now_ns
        if self._retry_ns is None and peers.outbound.any_failed:
            self._retry_ns = now_ns + state.limits.stream_retry_ns
            self._plan()
        waits_for_writer = state.following and bool(peers.outbound.spilling.full)
        if self._spill_ns is None and (peers.outbound.spilling.waits_for_receiver or waits_for_writer):
            self._spill_ns = now_ns + state.limits.recent_ns
            self._plan()
        if self._held_back_ns is None and peers.inbound.holds_back:
            self._held_back_ns = now_ns + state.limits.held_back_ns
            self._plan()
        if self._barrier_ns is None and (barrier_ns := peers.outbound.barriers.due_ns) is not None:
            self._barrier_ns = barrier_ns
            self._plan()
        if self._turn_ns is None and (turn_ns := peers.inbound.turns.due_ns(now_ns)) is not None:
            self._turn_ns = turn_ns
            self._plan()

    def tick(self, peers: Peers) -> None:
        """Clear the timers that are due. Checkpoints, spilling and turns are looked at in each turn anyway."""
        now_ns = self._state.now_ns
        if self._checkpoint_ns is not None and now_ns >= self._checkpoint_ns:
            self._checkpoint_ns = None
        if self._spill_ns is not None and now_ns >= self._spill_ns:
            self._spill_ns = None
        if self._retry_ns is not None and now_ns >= self._retry_ns:
            self._retry_ns = None
            peers.outbound.retry_failed()
        if self._held_back_ns is not None and now_ns >= self._held_back_ns:
            self._held_back_ns = None
            peers.inbound.answer_parked()
        if self._barrier_ns is not None and now_ns >= self._barrier_ns:
            self._barrier_ns = None
        if self._turn_ns is not None and now_ns >= self._turn_ns:
            self._turn_ns = None
        if self._log_ns is not None and now_ns >= self._log_ns:
            self._log_ns = None
        if self._standby_ns is not None and now_ns >= self._standby_ns:
            self._standby_ns = None
        self._plan()

    def _plan(self) -> None:
        """Ask for one WakeAt at the earliest due time; it replaces the one before."""
        wishes_ns = (
            self._checkpoint_ns,
            self._retry_ns,
            self._spill_ns,
            self._held_back_ns,
            self._barrier_ns,
            self._turn_ns,
            self._log_ns,
            self._standby_ns,
        )
        due_ns = [at_ns for at_ns in wishes_ns if at_ns is not None]
        if due_ns:
            self._state.effects.append(WakeAt(min(due_ns)))
