"""Whether the app is read, and for which peers it is held up; each change is told once, with the peer's name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from immortal.coordinator.core import notices
from immortal.coordinator.core.checkpointing import Checkpointing
from immortal.coordinator.core.effects import PauseApp, Report, ResumeApp
from immortal.coordinator.core.group_commit import GroupCommit
from immortal.coordinator.core.impulses import Impulses
from immortal.coordinator.core.interfaces import ONESELF
from immortal.coordinator.core.limits import MIB, Limits
from immortal.coordinator.core.pausing import Pausing
from immortal.coordinator.core.session import AppSession, Phase
from immortal.coordinator.core.stopping import Stopping
from immortal.coordinator.core.streams.output_stream import OutputStream, StreamState
from immortal.coordinator.core.streams.peers import Peers
from immortal.coordinator.core.turn import Turn

CALM_NS = 10_000_000_000  # a peer's state is told as better only when it has been so for this long


class Load(IntEnum):
    """How much waits for one peer, and what that means for the app."""

    IN_MEMORY = 0
    WAITED_FOR = 1  # memory is full, and the receiver takes what it can: the app waits for it
    SPILLED = 2  # memory is full: what comes goes to the log
    HELD_UP = 3  # that is full too: the app is not read


@dataclass(slots=True, eq=False, repr=False)
class _Told:
    load: Load
    seen_ns: int  # when it was last that bad


@dataclass(slots=True, eq=False, repr=False)
class BackPressure:
    limits: Limits
    session: AppSession
    log: GroupCommit
    peers: Peers
    checkpoints: Checkpointing
    impulses: Impulses
    stopping: Stopping
    pausing: Pausing
    turn: Turn
    paused: bool = False
    held_up_for: list[str] = field(default_factory=list)  # ONESELF among them where the own log is what is too slow
    _told: dict[str, _Told] = field(default_factory=dict)

    def look(self) -> None:
        """Pause or resume the app, and tell the operator what has changed for the streams."""
        limits, peers, effects = self.limits, self.peers, self.turn.effects
        if peers.busy or self._told:
            spilling = peers.spilling
            self.held_up_for = spilling.full
            if self.held_up_for or self._told or spilling.kept_bytes:
                effects.extend(self._look(peers, self.turn.now_ns))
        else:  # nothing waits for anybody
            self.held_up_for = []
        full = (
            self.log.from_app_bytes > limits.log_pending_bytes
            or self.checkpoints.chunks_pending_bytes > limits.chunks_pending_bytes
            # ... the last checkpoint comes behind what the app has sent
            or (bool(self.held_up_for) and not self.stopping.asked)
            or (self.impulses.held_bytes > limits.log_pending_bytes and self._app_has_nothing_to_do)
            or self.stopping.hands_over
        )
        if full != self.paused and self.session.phase is not Phase.WAITING:
            self.paused = full
            effects.append(PauseApp() if full else ResumeApp())

    @property
    def _app_has_nothing_to_do(self) -> bool:
        """Nobody waits for what the app sends: no record is on its way to it, no checkpoint from it."""
        session = self.session
        has_all = session.fed_sequence_id == self.log.durable_sequence_id or self.pausing.is_paused
        has_nothing = has_all and session.unsent_bytes <= 0
        return has_nothing and session.phase is Phase.NORMAL and not self.stopping.asked

    def _look(self, peers: Peers, now_ns: int) -> Iterator[Report]:
        spill_is_full = bool(self.held_up_for) and peers.spilling.is_full
        for destination, stream in peers.outputs.items():
            load = self._load(stream, spill_is_full)
            if destination != ONESELF and (load or destination in self._told):
                yield from self._tell(stream, load, now_ns)

    def _load(self, stream: OutputStream, spill_is_full: bool) -> Load:
        if stream.destination in self.held_up_for:
            return Load.HELD_UP if spill_is_full else Load.WAITED_FOR
        return Load.SPILLED if stream.spilled_bytes else Load.IN_MEMORY

    def _tell(self, stream: OutputStream, load: Load, now_ns: int) -> Iterator[Report]:
        told = self._told.get(stream.destination)
        if told is not None and load == told.load:
            told.seen_ns = now_ns
        if told is not None and load <= told.load and now_ns - told.seen_ns < CALM_NS:
            return
        if load is Load.IN_MEMORY:
            del self._told[stream.destination]
        else:
            self._told[stream.destination] = _Told(load, now_ns)
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
