"""Clock of one machine, which is set at any moment, by any amount; and checks of the instance's time."""

from __future__ import annotations

from immortal.coordinator.core.clock import TOLERANCE_NS, Reading, RunningTime, SteadyClock, Timekeeper
from immortal.coordinator.core.events import ClockMoved
from tests.simulation.clock import MS, START_NS, Clock
from tests.simulation.trace import Violation

HOUR = 3600 * 10**9
HOLD_NS = 4 * MS  # how long a jump must hold, instead of ten minutes
JUMPS_NS = (HOUR, 72 * HOUR, 10 * 8766 * HOUR)  # an hour, three days, ten years
SIMULATED_NS_MAX = 60 * 10**9  # a run takes a tenth of a second: one that waits for a clock is stuck


class NodeClock:
    """Wall clock of a machine, which is set at any moment, and the instance's time that it gives.

    ``skew_ns``: by how much the wall clock is ahead of the true time; negative: behind it.
    """

    def __init__(self, clock: Clock) -> None:
        self.skew_ns = 0
        self.believes_wrong = False  # the machine was started with a clock that was wrong
        self._true = clock
        self._set_ns = clock.now_ns  # when it was last set
        self._ahead_ns = 0  # of the true time: the skew that had to be believed
        self._time_ns = 0
        self._keeper = self._make(RunningTime(), 0)

    def _make(self, running: RunningTime, logged_ns: int) -> Timekeeper:
        offset_ns = max(self.wall_ns, logged_ns) - self._true.now_ns
        running.start_span(self._true.now_ns + offset_ns)
        return Timekeeper(SteadyClock(offset_ns, HOLD_NS), running)

    @property
    def wall_ns(self) -> int:
        return self._true.now_ns + self.skew_ns

    @property
    def running(self) -> RunningTime:
        return self._keeper.running

    def jump(self, skew_ns: int) -> None:
        if abs(skew_ns - self.skew_ns) > TOLERANCE_NS:
            self._set_ns = self._true.now_ns
        self.skew_ns = skew_ns

    def started_anew(self, logged_ns: int) -> None:
        """Start the machine anew: its steady clock counts from there, so it must believe the wall clock; but not that
        the instance has run up to that time."""
        running = RunningTime(self.running.past, self.running.first_ns, self.running.last_ns)
        self._keeper = self._make(running, logged_ns)
        self._ahead_ns = max(self.wall_ns, logged_ns) - self._true.now_ns
        self.believes_wrong = self.believes_wrong or self._ahead_ns > TOLERANCE_NS
        self._time_ns = 0

    def process_started(self) -> None:
        """Start another process during the same start of the machine: it continues, and informs its core anew."""
        keeper = self._keeper
        self._keeper = Timekeeper(keeper.clock, keeper.running, keeper.steps)

    def now_ns(self) -> int:
        wall_ns, true_ns = self.wall_ns, self._true.now_ns
        usual_ns = self._keeper.time_if_calm(wall_ns, true_ns)
        reading = Reading(usual_ns) if usual_ns is not None else self._keeper.read(wall_ns, true_ns)
        self._check(reading)
        return reading.time_ns

    def pop_events(self) -> list[ClockMoved]:
        return self._keeper.pop_events()

    def _check(self, reading: Reading) -> None:
        true_ns = self._true.now_ns
        if reading.accepted_jump_ns is not None:
            if true_ns - self._set_ns < HOLD_NS:
                raise Violation(f"a clock was believed that was set {true_ns - self._set_ns} ns ago")
            self._ahead_ns += max(0, reading.accepted_jump_ns)
        if abs(reading.time_ns - true_ns - self._ahead_ns) > 2 * TOLERANCE_NS:
            raise Violation(f"time is {reading.time_ns - true_ns - self._ahead_ns} ns from what it may be")
        if reading.time_ns < self._time_ns:
            raise Violation(f"time goes back by {self._time_ns - reading.time_ns} ns")
        self._time_ns = reading.time_ns
        if self.running.last_ns > reading.time_ns or self.ran_ns > true_ns - START_NS + TOLERANCE_NS:
            raise Violation(f"it counts as having run for {self.ran_ns} ns")

    @property
    def ran_ns(self) -> int:
        """Return for how long the instance has run, by its own count."""
        return sum(last_ns - first_ns for first_ns, last_ns in self.running.spans if first_ns)
