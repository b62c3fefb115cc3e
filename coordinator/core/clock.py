"""Instance time, and the machine's timers, which are set in it.

Instance time follows the machine's wall clock, but does not accept a jump at once.

It is computed from the wall clock, which anybody can set, and a steady clock, which nobody can set: it counts from the
machine's start (the driver reads both). Between two readings the wall clock should move as far as the steady one did.
Any other movement is a jump: it is held back, and reported once. It is taken after it has lasted for a while, or when
an operator accepts it.

    the wall clock agrees within a second    followed, half a millisecond in each second: no step, in any direction
    ... is ahead of that                     held; once taken, a step
    ... is behind                            held; once taken, time runs 5 % slower until the clock has caught up

So time never goes back, and never stands still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from immortal.coordinator.core.effects import WakeAt
from immortal.coordinator.core.events import ClockMoved
from immortal.coordinator.core.life_cycle.session import AppSession
from immortal.protocol.extensions import AppTime, encode_app_time
from immortal.protocol.messages import MessageType

if TYPE_CHECKING:
    from immortal.coordinator.core.peers import Peers
    from immortal.coordinator.core.state import CoreState


TOLERANCE_NS = 1_000_000_000
"""Difference above which a reading is a jump. Leap seconds, and small corrections by NTP, are smaller."""

NOISE_NS = 1_000_000  # not worth correcting: the two clocks are read one after the other
FOLLOWED_PER_NS = 1 / 2000  # as fast as NTP corrects a clock
SLOWED_PER_NS = 1 / 20  # while time is ahead of the clock: an hour takes 20 hours
REPORTED_STEP_NS = 50_000_000  # difference above which the app gets the time again
STEPS_MAX = 16  # steps that apps are told of: older ones are in their logs, or not needed
SPANS_MAX = 1000
JOINED_NS = 1_000_000_000  # spans with less than this between them count as one


@dataclass(slots=True)
class Reading:
    """Result of one reading of the clock. Steps and jumps in ns; ahead is positive."""

    time_ns: int  # of the instance, since the Unix epoch
    held_jump_ns: int | None = None  # size of a jump that is held back from now on
    accepted_jump_ns: int | None = None  # size of a jump that was taken
    jump_ended: bool = False  # a held jump is over: the clock is right again

    @property
    def is_news(self) -> bool:
        return self.held_jump_ns is not None or self.accepted_jump_ns is not None or self.jump_ended


@dataclass(slots=True, eq=False, repr=False)
class SteadyClock:
    """Instance time derived from the steady clock. ``offset_ns``: instance time less steady time. ``hold_ns``: how
    long a jump must last before it counts."""

    offset_ns: int
    hold_ns: int
    held_ns: int | None = None  # by how much the wall clock is ahead, while that is held back
    held_since_ns: int = 0  # on the steady clock
    slowed: bool = False  # a jump back was taken: time runs slower
    read_ns: int | None = None  # when it was read last, on the steady clock

    def read(self, wall_ns: int, steady_ns: int) -> Reading:
        passed_ns = 0 if self.read_ns is None else max(0, steady_ns - self.read_ns)
        self.read_ns = steady_ns
        ahead_ns = wall_ns - steady_ns - self.offset_ns
        if abs(ahead_ns) <= TOLERANCE_NS:
            most_ns = int(passed_ns * FOLLOWED_PER_NS)
            self.offset_ns += max(-most_ns, min(ahead_ns, most_ns))
            jump_ended, self.held_ns, self.slowed = self.held_ns is not None, None, False
            return Reading(steady_ns + self.offset_ns, jump_ended=jump_ended)
        if self.held_ns is None or abs(ahead_ns - self.held_ns) > TOLERANCE_NS:
            self.held_ns, self.held_since_ns, self.slowed = ahead_ns, steady_ns, False
            return Reading(steady_ns + self.offset_ns, held_jump_ns=ahead_ns)
        self.held_ns = ahead_ns
        if self.slowed:
            self.offset_ns -= min(-ahead_ns, int(passed_ns * SLOWED_PER_NS))
        elif steady_ns - self.held_since_ns >= self.hold_ns:
            return self._accept_jump(ahead_ns, steady_ns)
        return Reading(steady_ns + self.offset_ns)

    def accept(self, wall_ns: int, steady_ns: int) -> Reading:
        """Accept the wall clock, because an operator says that it is right."""
        reading = self.read(wall_ns, steady_ns)
        if self.held_ns is None or self.slowed or reading.accepted_jump_ns is not None:
            return reading
        return self._accept_jump(wall_ns - steady_ns - self.offset_ns, steady_ns)

    def _accept_jump(self, ahead_ns: int, steady_ns: int) -> Reading:
        if ahead_ns > 0:
            self.offset_ns += ahead_ns
            self.held_ns = None
        else:
            self.slowed = True
        return Reading(steady_ns + self.offset_ns, accepted_jump_ns=ahead_ns)


@dataclass(slots=True, eq=False, repr=False)
class RunningTime:
    """Spans of instance time in which the instance ran; ages are counted in running time only.

    A taken jump, and the time between two starts, are in no span. ``past``: the spans before the current one, as
    (from, to) in ns, oldest first. A new object counts as having always run.
    """

    past: tuple[tuple[int, int], ...] = ()
    first_ns: int = 0
    last_ns: int = 0

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        return (*self.past, (self.first_ns, self.last_ns))

    def start_span(self, time_ns: int) -> None:
        """Start a span at ``time_ns``; the instance did not run since the end of the last one.

        Spans in the future, from a clock that was wrong, are dropped if nothing was logged in them.
        """
        if 0 <= time_ns - self.last_ns <= JOINED_NS:
            self.last_ns = time_ns
            return
        spans = [(first_ns, min(last_ns, time_ns)) for first_ns, last_ns in self.spans if first_ns <= time_ns]
        self.past = tuple(spans[1 - SPANS_MAX :])
        self.first_ns = self.last_ns = time_ns

    def extend_to(self, time_ns: int) -> None:
        if time_ns > self.last_ns:
            self.last_ns = time_ns

    def time_of_age(self, age_ns: int) -> int:
        """Return the latest time whose age is at least ``age_ns``; 0 if the instance has not run for so long."""
        for first_ns, last_ns in reversed(self.spans):
            if age_ns <= last_ns - first_ns:
                return last_ns - age_ns
            age_ns -= last_ns - first_ns
        return 0


class Timekeeper:
    """Clock of one instance, its running time, and the clock events that its core must get."""

    def __init__(self, clock: SteadyClock, running: RunningTime, steps: Iterable[ClockMoved] = ()) -> None:
        self.clock = clock
        self.running = running
        self.steps = list(steps)  # earlier ones, too
        self._reported_offset_ns: int | None = None
        self._events: list[ClockMoved] = list(self.steps)

    def time_if_calm(self, wall_ns: int, steady_ns: int) -> int | None:
        """Return the time if both clocks agree, which costs little; None: call :meth:`read`."""
        clock = self.clock
        if clock.held_ns is None and self._reported_offset_ns is not None:
            ahead_ns = wall_ns - steady_ns - clock.offset_ns
            if -NOISE_NS <= ahead_ns <= NOISE_NS:
                clock.read_ns = steady_ns
                return steady_ns + clock.offset_ns
        return None

    def read(self, wall_ns: int, steady_ns: int, *, accept: bool = False) -> Reading:
        """Read both clocks. ``accept``: an operator says that the wall clock is right."""
        clock = self.clock
        reading = clock.accept(wall_ns, steady_ns) if accept else clock.read(wall_ns, steady_ns)
        time_ns, jumped_ns = reading.time_ns, max(0, reading.accepted_jump_ns or 0)
        if jumped_ns:
            self.running.extend_to(time_ns - jumped_ns)
            self.running.start_span(time_ns)
        self.running.extend_to(time_ns)
        reported_ns = self._reported_offset_ns
        if jumped_ns or reported_ns is None or abs(clock.offset_ns - reported_ns) >= REPORTED_STEP_NS:
            self._reported_offset_ns = clock.offset_ns
            self._events.append(ClockMoved(time_ns, steady_ns, jumped_ns))
            self.steps += self._events[-1:] if jumped_ns else []
            del self.steps[:-STEPS_MAX]
        return reading

    def pop_events(self) -> list[ClockMoved]:
        """Return the events that the core must handle before it gets the next time."""
        events, self._events = self._events, []
        return events


# The app has no clock of its own: it gets the instance's time, so both processes have one time.
#
# It gets the time before its first record, and whenever the clock has moved differently from the machine's steady
# clock. It gets the clock steps with it. It logs each step once, so that no step makes a timeout shorter.


class AppClock:
    """Tells the app the time, since the app has no clock. ``send``: sends the app a control record."""

    def __init__(self, session: AppSession, send: Callable[[MessageType, bytes], None]) -> None:
        self._session = session
        self._send = send
        self._steps: list[ClockMoved] = []
        self._last: ClockMoved | None = None
        self._is_ready = False  # the app can get control records

    def connected(self) -> None:
        self._is_ready = False

    def send_time(self) -> None:
        """Tell the app all clock steps; it knows which of them its log already has."""
        if not self._is_ready:
            self._is_ready = True
            for event in self._steps:
                self._send_event(event)
            if self._last is not None:
                self._send_event(ClockMoved(self._last.time_ns, self._last.steady_ns))

    def moved(self, event: ClockMoved) -> None:
        self._last = event
        if event.jumped_ns:
            self._steps = [*self._steps, event][-STEPS_MAX:]
        if self._is_ready:
            self._send_event(event)

    def _send_event(self, event: ClockMoved) -> None:
        if MessageType.APP_TIME in self._session.extensions:
            time = AppTime(event.time_ns, event.steady_ns, event.jumped_ns)
            self._send(MessageType.APP_TIME, encode_app_time(time))


CHECKPOINT = "a checkpoint is due by age"
RETRY = "streams have stopped"
SPILL = "streams wait for their receiver, or for their log's writer"
HELD_BACK = "senders have used up their rate"
BARRIER = "the receiver of a call does not answer"
TURN = "batches wait for their turn"
LOG = "the log does not answer"
STANDBY = "a follower's checkpoint is awaited"


class Timers:
    """Timers of the machine that are set, by their reason: times in ns since the Unix epoch.

    Not a dataclass: mypyc makes dataclasses read their fields' types at import, when CoreState does not exist yet.
    """

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._due_ns: dict[str, int] = {}

    def set(self, reason: str, time_ns: int) -> None:
        """Set a timer, and ask for one WakeAt at the earliest time of all; it replaces the earlier WakeAt."""
        self._due_ns[reason] = time_ns
        self._plan()

    def standby_at(self, time_ns: int) -> None:
        if time_ns < self._due_ns.get(STANDBY, time_ns + 1):
            self.set(STANDBY, time_ns)

    def schedule_wakes(self, peers: Peers) -> None:
        """Set the timers for streams that have stopped or wait for their receivers."""
        state, now_ns, known = self._state, self._state.now_ns, self._due_ns
        if RETRY not in known and peers.outbound.any_failed:
            self.set(RETRY, now_ns + state.limits.stream_retry_ns)
        waits_for_writer = state.following and bool(peers.outbound.spilling.full)
        if SPILL not in known and (peers.outbound.spilling.waits_for_receiver or waits_for_writer):
            self.set(SPILL, now_ns + state.limits.recent_ns)
        if HELD_BACK not in known and peers.inbound.has_held_back_hellos:
            self.set(HELD_BACK, now_ns + state.limits.held_back_retry_ns)
        if BARRIER not in known and (barrier_ns := peers.outbound.barriers.due_ns) is not None:
            self.set(BARRIER, barrier_ns)
        if TURN not in known and (turn_ns := peers.inbound.turns.due_ns(now_ns)) is not None:
            self.set(TURN, turn_ns)

    def tick(self, peers: Peers) -> None:
        """Clear the timers that are due. Checkpoints, spilling and turns are checked in each turn anyway."""
        now_ns = self._state.now_ns
        due = [reason for reason, time_ns in self._due_ns.items() if now_ns >= time_ns]
        for reason in due:
            del self._due_ns[reason]
        if RETRY in due:
            peers.outbound.retry_failed()
        if HELD_BACK in due:
            peers.inbound.answer_parked()
        self._plan()

    def _plan(self) -> None:
        if self._due_ns:
            self._state.effects.append(WakeAt(min(self._due_ns.values())))
