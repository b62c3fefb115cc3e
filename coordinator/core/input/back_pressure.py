"""Back-pressure: impulses that wait for room in the log, and when the coordinator stops reading from the app."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from immortal.coordinator.core import notices
from immortal.coordinator.core.effects import PauseApp, Report, ResumeApp
from immortal.coordinator.core.errors import AppProtocolError
from immortal.coordinator.core.group_commit import Group
from immortal.coordinator.core.interfaces import IMPULSES, ONESELF, LogSummary, SourcePosition
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.coordinator.core.limits import MIB
from immortal.coordinator.core.output.outbound import Outbound
from immortal.coordinator.core.output.output_stream import OutputStream, StreamState
from immortal.coordinator.core.peers import Peers
from immortal.coordinator.core.state import CoreState
from immortal.protocol.trailer import BatchKind, BatchSource

if TYPE_CHECKING:
    from immortal.coordinator.core.input.app_inbox import Calls


# Impulses: input from outside the deterministic world, on its way to the log.
#
# Impulses to oneself are logged input like any other. Impulses to others get a position in the stream and are kept in
# a table of the log.


HELD_OVERHEAD_BYTES = 300  # of Python's objects around a held batch


class Impulses:
    """Impulses of one instance. ``count``: how many it has sent to itself since its first start."""

    def __init__(self, state: CoreState, peers: Peers) -> None:
        self.count = 0
        self.held_bytes = 0
        self._held: list[Calls] = []  # impulses that must still wait
        self._held_bytes_max = state.limits.held_impulses_bytes + state.limits.arguments_bytes_max
        self._state = state
        self._peers = peers

    def load(self, summary: LogSummary) -> None:
        """Load the number of own impulses from the log."""
        known = summary.sources.get(IMPULSES)
        self.count = known.position if known else 0

    def hold(self, calls: Calls) -> None:
        """Hold impulses until the log has room, or the app's upgrade is durable. Raises AppProtocolError."""
        if self.held_bytes > self._held_bytes_max:
            raise AppProtocolError(
                f"the app's impulses that wait take {self.held_bytes} bytes, {self._held_bytes_max} is the most: "
                f"before it sends more it is to wait for ImpulsesAccepted, which comes once the log has room or the "
                f"upgrade is confirmed"
            )
        self._held.append(calls)
        self.held_bytes += len(calls.payload) + HELD_OVERHEAD_BYTES

    def log_held(self) -> None:
        """Log the held impulses."""
        held = self._held
        self.forget()
        for calls in held:
            self.log_calls(calls)

    def forget(self) -> None:
        """Drop the held impulses of an app that is gone: it was never told that they were accepted."""
        self._held, self.held_bytes = [], 0

    def log_calls(self, calls: Calls) -> None:
        """Log the app's next impulses."""
        if calls.destination == ONESELF:
            group = self.log_own(calls.count, calls.payload)
        else:
            stream = self._peers.outbound.stream(calls.destination)
            group = self._state.log.append_outside_record(len(calls.payload), from_app=True)
            group.transaction.impulses.append(stream.append_impulses(calls.count, calls.payload, group.ticket))
        group.impulses_accepted += calls.count

    def log_own(self, count: int, payload: bytes) -> Group:
        """Log impulses to the own app; return the group that makes them durable."""
        source = BatchSource(BatchKind.IMPULSES, ONESELF, self.count + 1, count, self._state.now_ns)
        group = self._peers.delivery.deliver_own(source, payload).group
        self.count += count
        group.transaction.sources[IMPULSES] = SourcePosition(self._state.committer_id, self._state.epoch, self.count)
        return group


# Back-pressure on the app: whether it is read, and which peers block it. Each change is reported once.


CALM_NS = 10_000_000_000  # a peer's better state is reported only after it has lasted this long


class Load(IntEnum):
    """Degree of load of one output stream, and its effect on the app."""

    IN_MEMORY = 0
    WAITED_FOR = 1  # memory is full, and the receiver takes as much as it can: the app waits for it
    SPILLED = 2  # memory is full: further messages go to the log
    HELD_UP = 3  # the spill space is full too: the app is not read


@dataclass(slots=True, eq=False, repr=False)
class _ReportedLoad:
    load: Load
    last_seen_ns: int  # when it was last seen


@dataclass(slots=True, eq=False, repr=False)
class BackPressure:
    """Pauses and resumes reading from the app, and reports the load of streams."""

    state: CoreState
    outbound: Outbound
    impulses: Impulses
    paused: bool = False
    held_up_for: list[str] = field(default_factory=list)  # with ONESELF if the own log is too slow
    _reported: dict[str, _ReportedLoad] = field(default_factory=dict)

    def update(self) -> None:
        """Pause or resume the app, and report changed loads of streams to the operator."""
        state, limits, outbound, effects = self.state, self.state.limits, self.outbound, self.state.effects
        if outbound.busy or self._reported:
            spilling = outbound.spilling
            self.held_up_for = spilling.full
            if self.held_up_for or self._reported or spilling.kept_bytes:
                effects.extend(self._report_changes())
        else:  # no stream waits
            self.held_up_for = []
        full = (
            state.log.from_app_bytes > limits.log_pending_bytes
            or state.checkpoints.chunks_pending_bytes > limits.chunks_pending_bytes
            # ... the last checkpoint arrives after what the app has sent
            or (bool(self.held_up_for) and not state.shutdown.is_requested)
            or (self.impulses.held_bytes > limits.log_pending_bytes and self._app_is_idle)
            or state.shutdown.hands_over
        )
        if full != self.paused and state.session.phase is not Phase.WAITING:
            self.paused = full
            effects.append(PauseApp() if full else ResumeApp())

    @property
    def _app_is_idle(self) -> bool:
        """True if the app has handled all records and owes no checkpoint, so nothing that it could send is needed."""
        state, session = self.state, self.state.session
        has_all = session.fed_sequence_id == state.log.durable_sequence_id or state.pause.is_paused
        has_nothing = has_all and session.unsent_bytes <= 0
        return has_nothing and session.phase is Phase.NORMAL and not state.shutdown.is_requested

    def _report_changes(self) -> Iterator[Report]:
        spill_is_full = bool(self.held_up_for) and self.outbound.spilling.is_full
        for destination, stream in self.outbound.streams.items():
            load = Load.SPILLED if stream.spilled_bytes else Load.IN_MEMORY
            if destination in self.held_up_for:
                load = Load.HELD_UP if spill_is_full else Load.WAITED_FOR
            if destination != ONESELF and (load or destination in self._reported):
                yield from self._report_load(stream, load)

    def _report_load(self, stream: OutputStream, load: Load) -> Iterator[Report]:
        now_ns = self.state.now_ns
        reported = self._reported.get(stream.destination)
        if reported is not None and load == reported.load:
            reported.last_seen_ns = now_ns
        if reported is not None and load <= reported.load and now_ns - reported.last_seen_ns < CALM_NS:
            return
        if load is Load.IN_MEMORY:
            del self._reported[stream.destination]
        else:
            self._reported[stream.destination] = _ReportedLoad(load, now_ns)
        yield self._report(stream, load)

    def _report(self, stream: OutputStream, load: Load) -> Report:
        name = stream.destination
        waits = name, _mib(stream.memory_bytes), _mib(stream.spilled_bytes)
        if load is Load.IN_MEMORY:
            return Report(notices.InMemoryAgain(*waits))
        if load is Load.WAITED_FOR:
            return Report(notices.AppWaitsFor(*waits))
        state = "takes its messages too slowly" if stream.state is StreamState.OPEN else "takes no messages"
        limit_mib = _mib(self.state.limits.output_memory_bytes)
        if load is Load.SPILLED:
            return Report(notices.Spills(*waits, state, limit_mib))
        return Report(notices.HeldUp(*waits, state, limit_mib, _mib(self.state.limits.spill_limit_bytes)))


def _mib(size_bytes: int) -> float | int:
    return size_bytes // MIB if size_bytes % MIB == 0 or size_bytes >= 100 * MIB else round(size_bytes / MIB, 1)
