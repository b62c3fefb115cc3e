"""Back-pressure: room in the log, impulses that wait for it, and whether the app is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from immortal.coordinator.core import notices
from immortal.coordinator.core.checkpoints.policy import CheckpointPolicy
from immortal.coordinator.core.effects import PauseApp, Report, ResumeApp
from immortal.coordinator.core.errors import AppProtocolError
from immortal.coordinator.core.group_commit import Group, GroupCommit
from immortal.coordinator.core.interfaces import (
    IMPULSES,
    ONESELF,
    CheckpointHeader,
    LogSpace,
    LogSummary,
    SourcePosition,
)
from immortal.coordinator.core.life_cycle.pause_stop import Pause, Shutdown
from immortal.coordinator.core.life_cycle.session import AppSession, Phase
from immortal.coordinator.core.limits import MIB, Limits
from immortal.coordinator.core.output.output_stream import OutputStream, StreamState
from immortal.coordinator.core.peers import Peers
from immortal.coordinator.core.state import Epoch, Turn
from immortal.protocol.trailer import BatchKind, BatchSource

if TYPE_CHECKING:
    from immortal.coordinator.core.input.app_inbox import Calls


CHECKPOINTS_IN_ONE_PLACE_MAX = 2  # of two that are kept, both must be new before old records can go


class LogCapacity:
    """Room in the log. ``full``: why the log takes no more than it must; "" while there is room."""

    def __init__(self, name: str, limits: Limits) -> None:
        self.full = ""
        self.space: LogSpace | None = None
        self._name = name
        self._limits = limits
        self._asked_at = -2  # the record behind which a checkpoint was last asked for
        self._asked = 0  # how often there

    def measured(self, space: LogSpace) -> bool:
        """Take a measurement; return whether :attr:`full` has changed. A full log has room at 90 % of its limit."""
        self.space = space
        limits, was_full = self._limits, bool(self.full)
        most_bytes = limits.log_limit_bytes
        least_bytes = limits.disk_free_bytes_min
        too_large = most_bytes is not None and space.used_bytes > (most_bytes * 9 // 10 if was_full else most_bytes)
        too_little = space.free_bytes < (least_bytes * 11 // 10 if was_full else least_bytes)
        if was_full == (too_large or too_little):
            return False
        self.full = self._reason(space, too_large=too_large) if not was_full else ""
        self._asked_at = -2
        return True

    def _reason(self, space: LogSpace, *, too_large: bool) -> str:
        if too_large:
            limit_text = _mib_text(self._limits.log_limit_bytes or 0)
            what = f"its log takes {_mib_text(space.used_bytes)}, log_limit_mb is {limit_text}"
        else:
            free, least = _mib_text(space.free_bytes), _mib_text(self._limits.disk_free_bytes_min)
            what = f"its disk has {free} left, disk_free_mb is {least}"
        return f"{self._name!r} is full: {what}; its app must catch up, or the limit be raised"

    def wants_checkpoint(self, fed_sequence_id: int, durable_sequence_id: int, last: CheckpointHeader | None) -> bool:
        """Return whether a checkpoint now would free records: the app has handled a good part of those after the
        last one.

        Call it once for each measurement.
        """
        if not self.full or last is None:
            return False
        behind = durable_sequence_id - last.sequence_id
        if fed_sequence_id < durable_sequence_id and (fed_sequence_id - last.sequence_id) * 4 < behind:
            return False
        if self._asked_at != fed_sequence_id:
            self._asked_at, self._asked = fed_sequence_id, 0
        self._asked += 1
        return self._asked <= CHECKPOINTS_IN_ONE_PLACE_MAX


def _mib_text(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.0f} MiB"


# Impulses: input from outside the deterministic world, on its way to the log.
#
# Impulses to oneself are logged input like any other. Impulses to others take their place in the stream and are kept in
# a table of the log.


HELD_OVERHEAD_BYTES = 300  # of Python's objects around a batch that is held


class Impulses:
    """Impulses of one instance. ``count``: how many it has sent to itself in all its life."""

    def __init__(self, limits: Limits, log: GroupCommit, peers: Peers, epoch: Epoch, turn: Turn) -> None:
        self.count = 0
        self.held_bytes = 0
        self._held: list[Calls] = []  # that must not be taken yet
        self._held_bytes_max = limits.held_impulses_bytes + limits.arguments_bytes_max
        self._committer_id = 0
        self._log = log
        self._peers = peers
        self._epoch = epoch
        self._turn = turn

    @property
    def open_sequence_id(self) -> int:
        """Sequence ID of the record that holds the last logged impulse."""
        return self._log.open_sequence_id

    def load(self, summary: LogSummary) -> None:
        """Take in what the log says."""
        known = summary.sources.get(IMPULSES)
        self.count = known.position if known else 0
        self._committer_id = summary.committer_id

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

    def take_held(self) -> None:
        """Take the impulses that were held."""
        held = self._held
        self.forget()
        for calls in held:
            self.take(calls)

    def forget(self) -> None:
        """Drop held impulses of an app that is gone: nobody was told that they were accepted."""
        self._held, self.held_bytes = [], 0

    def take(self, calls: Calls) -> None:
        """Log the app's next impulses."""
        if calls.destination == ONESELF:
            group = self.log_own(calls.count, calls.payload)
        else:
            stream = self._peers.output(calls.destination)
            group = self._log.append_outside_record(len(calls.payload), from_app=True)
            group.transaction.impulses.append(stream.append_impulses(calls.count, calls.payload, group.ticket))
        group.impulses_accepted += calls.count

    def log_own(self, count: int, payload: bytes) -> Group:
        """Log impulses to the own app; return the group that makes them durable."""
        source = BatchSource(BatchKind.IMPULSES, ONESELF, self.count + 1, count, self._turn.now_ns)
        group = self._peers.delivery.deliver_own(source, payload).group
        self.count += count
        group.transaction.sources[IMPULSES] = SourcePosition(self._committer_id, self._epoch.number, self.count)
        return group


# Back-pressure on the app: whether it is read, and for which peers it is held up. Each change is reported once.


CALM_NS = 10_000_000_000  # a peer's state is told as better only when it has been so for this long


class Load(IntEnum):
    """Degree of load of one output stream, and what it means for the app."""

    IN_MEMORY = 0
    WAITED_FOR = 1  # memory is full, and the receiver takes what it can: the app waits for it
    SPILLED = 2  # memory is full: what comes goes to the log
    HELD_UP = 3  # that is full too: the app is not read


@dataclass(slots=True, eq=False, repr=False)
class _ReportedLoad:
    load: Load
    seen_ns: int  # when it was last that bad


@dataclass(slots=True, eq=False, repr=False)
class BackPressure:
    limits: Limits
    session: AppSession
    log: GroupCommit
    peers: Peers
    checkpoints: CheckpointPolicy
    impulses: Impulses
    shutdown: Shutdown
    pause: Pause
    turn: Turn
    paused: bool = False
    held_up_for: list[str] = field(default_factory=list)  # ONESELF among them where the own log is what is too slow
    _reported: dict[str, _ReportedLoad] = field(default_factory=dict)

    def update(self) -> None:
        """Pause or resume the app, and tell the operator what has changed for the streams."""
        limits, peers, effects = self.limits, self.peers, self.turn.effects
        if peers.busy or self._reported:
            spilling = peers.spilling
            self.held_up_for = spilling.full
            if self.held_up_for or self._reported or spilling.kept_bytes:
                effects.extend(self._report_changes(peers, self.turn.now_ns))
        else:  # nothing waits for anybody
            self.held_up_for = []
        full = (
            self.log.from_app_bytes > limits.log_pending_bytes
            or self.checkpoints.chunks_pending_bytes > limits.chunks_pending_bytes
            # ... the last checkpoint comes behind what the app has sent
            or (bool(self.held_up_for) and not self.shutdown.is_requested)
            or (self.impulses.held_bytes > limits.log_pending_bytes and self._app_has_nothing_to_do)
            or self.shutdown.hands_over
        )
        if full != self.paused and self.session.phase is not Phase.WAITING:
            self.paused = full
            effects.append(PauseApp() if full else ResumeApp())

    @property
    def _app_has_nothing_to_do(self) -> bool:
        """The app has handled all records and owes no checkpoint, so nothing it could send is waited for."""
        session = self.session
        has_all = session.fed_sequence_id == self.log.durable_sequence_id or self.pause.is_paused
        has_nothing = has_all and session.unsent_bytes <= 0
        return has_nothing and session.phase is Phase.NORMAL and not self.shutdown.is_requested

    def _report_changes(self, peers: Peers, now_ns: int) -> Iterator[Report]:
        spill_is_full = bool(self.held_up_for) and peers.spilling.is_full
        for destination, stream in peers.outputs.items():
            load = self._load_of(stream, spill_is_full)
            if destination != ONESELF and (load or destination in self._reported):
                yield from self._report_load(stream, load, now_ns)

    def _load_of(self, stream: OutputStream, spill_is_full: bool) -> Load:
        if stream.destination in self.held_up_for:
            return Load.HELD_UP if spill_is_full else Load.WAITED_FOR
        return Load.SPILLED if stream.spilled_bytes else Load.IN_MEMORY

    def _report_load(self, stream: OutputStream, load: Load, now_ns: int) -> Iterator[Report]:
        reported = self._reported.get(stream.destination)
        if reported is not None and load == reported.load:
            reported.seen_ns = now_ns
        if reported is not None and load <= reported.load and now_ns - reported.seen_ns < CALM_NS:
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
        limit_mib = _mib(self.limits.output_memory_bytes)
        if load is Load.SPILLED:
            return Report(notices.Spills(*waits, state, limit_mib))
        return Report(notices.HeldUp(*waits, state, limit_mib, _mib(self.limits.spill_limit_bytes)))


def _mib(size_bytes: int) -> float | int:
    return size_bytes // MIB if size_bytes % MIB == 0 or size_bytes >= 100 * MIB else round(size_bytes / MIB, 1)
