"""One instance: coordinator and app in their current lives, its disk, its clock, and its operators' acts.

The driver is the real one; its ports are built here. The world can let a fault strike before any effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.components import Components
from immortal.coordinator.core.errors import DamagedLogError, FencedError, LogError, LogFullError, LogSyncError
from immortal.coordinator.core.events import ClockMoved
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.coordinator.core.machine import Machine
from immortal.coordinator.driver.turn import Driver
from immortal.protocol.errors import ImmortalError
from tests.simulation.app_side import AppInterface
from tests.simulation.apps import App
from tests.simulation.checkers import Checker
from tests.simulation.clock import MS, US
from tests.simulation.disk import Disk
from tests.simulation.log_side import LogSide
from tests.simulation.marks import NOTICES
from tests.simulation.node_clock import HOLD_NS, NodeClock
from tests.simulation.peer_side import PeerSide
from tests.simulation.trace import Violation, describe, describe_events

if TYPE_CHECKING:
    from tests.simulation.world import World

VERSION_MAX = 3


class Node:
    """Node of the world. ``follows``: it follows the log if another node of that name has it."""

    def __init__(
        self, world: World, number: int, name: str, disk: Disk, checker: Checker, *, follows: bool = False
    ) -> None:
        self.follows = follows
        self.world, self.number, self.name, self.disk, self.checker = world, number, name, disk, checker
        self.life = 0  # of the coordinator
        self.app_life = 0
        self.upgrade_to: int | None = None  # requested by the operator
        self.upgrade_fails = False
        self._upgrade_tried = False
        self.time = NodeClock(world.clock)
        self._machine_starts = True  # it was switched off: it must believe its clock
        self.stop_requested = self.hands_over = False
        self._rng = world.plan.stream(f"node {number}")
        self._clock = world.clock
        self._turn_due = self._connecting = False
        self._slow = 1  # the coordinator's process: times as slow as usual
        self._driver: Driver | None = None
        self._app_side: AppInterface | None = None
        self.peer_side: PeerSide | None = None
        self.log_side: LogSide | None = None
        self._stopped: ef.Stop | None = None
        self._wake_ns: int | None = None

    def note(self, text: str) -> None:
        if self.world.trace is not None:
            self.world.trace.note(self._clock.now_ns, self.name, text)

    @property
    def now_ns(self) -> int:
        """Return the instance's time."""
        return self.time.now_ns()

    @property
    def machine(self) -> Machine | None:
        return None if self._driver is None else self._driver.machine

    @property
    def app(self) -> App | None:
        return None if self._app_side is None else self._app_side.app

    @property
    def waits_for_app(self) -> bool:
        return self._driver is not None and self._driver.machine.waits_for_app

    @property
    def phase(self) -> Phase:
        return self.machine.state.session.phase if self.machine is not None else Phase.STOPPED

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.machine is not None:
            return
        try:
            summary = self.disk.open()
        except LogError as error:
            self.note(f"does not start: {error}")
            if not self.disk.damaged:
                raise Violation(f"{self.name} does not start, though nothing is damaged: {error}") from error
            self.world.marks["start refused: damaged table"] += 1
            self._restore_from_copy()
            self._start_later()
            return
        self.checker.opened(summary)
        if self._machine_starts:
            self._machine_starts = False
            self.time.started_anew(max(summary.last_time_ns, *(one.time_ns for one in summary.checkpoints), 0, 0))
        else:
            self.time.process_started()
        current = summary.versions[-1].version if summary.versions else 1
        if self.upgrade_to is not None and self.upgrade_to <= current:
            self.upgrade_to = None  # done; the coordinator died before it could report that
        # A promoted copy is not found out: outputs that are made again and new ones are not distinguished.
        promote = self._rng.random() < 0.3 and not self.world.plan.has_copy
        self._slow = self._rng.choice((1, 1, 1, 20, 60))
        self.world.marks["upgrade asked for again"] += self.upgrade_to is not None and self._upgrade_tried
        self._upgrade_tried = self.upgrade_to is not None
        limits = self.world.plan.limits
        running = self.time.running
        machine = Machine(
            Components(self.name, limits, self.upgrade_to, promote=promote, follow=self.follows, running=running)
        )
        self._app_side = AppInterface(self, self._rng)
        self.peer_side = PeerSide(self, self._rng)
        inbox: list[ev.Event] = []
        self.log_side = LogSide(self, self._rng, inbox)
        self._driver = Driver(
            machine, inbox, self._app_side, self.peer_side, self.log_side, _ClockSide(self), self, self._observe
        )
        self.post(ev.Started())
        self.world.starts += 1
        self.note(f"starts, the log ends at record {summary.last_sequence_id}, version {current}, to {self.upgrade_to}")
        self._connect_later()

    def _start_later(self) -> None:
        self._clock.after(self._rng.random() * self._rng.choice((50 * US, 3 * MS)), self.start)

    def _connect_later(self) -> None:
        if not self._connecting:
            self._connecting = True
            self._clock.after(self._rng.random() * 200 * US, self._connect, self.life)

    def _connect(self, life: int) -> None:
        if life != self.life or self.machine is None:
            return
        self._connecting = False
        starts = self.disk.store.summary().versions
        self.checker.app_begins()
        app = self.world.make_app(self, self.machine.state.versions.upgrade_to or (starts[-1].version if starts else 1))
        app.fails_upgrade = self.upgrade_fails
        self.app_life += 1
        assert self._app_side is not None
        self._app_side.begin(app)

    def crash_app(self) -> None:
        """End the app's connection; bytes that it had sent can still be read, or not."""
        if self._app_side is not None:
            self._app_side.crash()

    def crash(self, *, app_first: bool) -> None:
        """End the coordinator's process, and its app's, sooner or later."""
        if self.machine is None:
            return
        if self._app_side is not None and not app_first:
            self._app_side.outlive_coordinator()
        self._end()
        self._start_later()

    def _end(self) -> None:
        for side in (self._app_side, self.peer_side, self.log_side):
            if side is not None:
                side.end()
        had_right = self.disk.shared.release(self)
        self.disk.shared.tell_of_standbys()
        lost = self.disk.crash()
        if had_right:
            self._clock.after(
                self._rng.random() * self._rng.choice((50 * US, 2 * MS)), self.world.offer_right, self.name
            )
        self.world.marks["writes lost in a crash"] += lost > 0
        self.note(f"is down, {lost} writes are lost")
        self.life += 1
        self.app_life += 1
        self._driver = self._app_side = self.peer_side = self.log_side = self._stopped = None
        self._turn_due = self._connecting = False
        self.stop_requested = self.hands_over = False
        self._wake_ns = None
        self.world.network.forget(self)

    def power_off(self, *, machine_too: bool = False) -> None:
        self._machine_starts = self._machine_starts or machine_too
        self._end()
        self._start_later()

    def wipe(self, disk: Disk, checker: Checker) -> None:
        """Lose the log: the node begins again with a new one."""
        self.note("is wiped")
        if self.machine is not None:
            self._end()
        self.world.network.cut_off(self)
        self.disk, self.checker = disk, checker
        self.upgrade_to = None
        self._start_later()

    def _restore_from_copy(self) -> None:
        self.world.marks["restored from a copy"] += 1
        self.note("is restored from a good copy")
        self.disk.repair()

    # --- turns -------------------------------------------------------------------------------------------------------

    def post(self, *events: ev.Event) -> None:
        """Queue events: they are handled in this turn, or in the next."""
        if self._driver is None or not events:
            return
        self._driver.inbox += events
        if not self._turn_due:
            self._turn_due = True
            self._clock.after(self._rng.random() * 15 * US * self._slow, self._turn, self.life)

    def _turn(self, life: int) -> None:
        if life != self.life or self._driver is None:
            return
        world = self.world
        if world.trace is not None:
            self.note(f"<- {describe_events(self._driver.inbox)}")
        world.turns += 1
        is_fenced = any(isinstance(event, ev.Fenced) for event in self._driver.inbox)
        try:
            self._driver.turn()
        except _StruckError:
            return
        self._turn_due = False
        if is_fenced and self._stopped is None:
            raise Violation(f"{self.name} goes on, though another writes its log")
        self._look_who_writes()
        self.disk.shared.tell_of_standbys()
        state, peers = self._driver.machine.state, self._driver.machine.components.peers
        world.marks["batch waited for its turn"] += peers.inbound.turns.waiting_bytes > 0
        for destination, stream in peers.outbound.streams.items():
            if destination not in peers.outbound.busy and not stream.is_idle and not state.following:
                raise Violation(f"{self.name} would not look at its stream to {destination!r}")
        self.post(*self._take_inbox())
        if self._stopped is not None:
            error = self._stopped.error
            self._expect_stop(error)
            self._end()
            self._start_later()
        elif self.app is None and not self._connecting and not self.stop_requested:
            self._connect_later()

    def _look_who_writes(self) -> None:
        assert self._driver is not None
        machine, nodes = self._driver.machine, self.world.network.nodes
        self.world.marks["log silent"] += machine.state.log_requests.silent_since_ns is not None
        if (
            not (self.follows and machine.state.write_lease.writes)
            or nodes[self.name] is self
            or not self.disk.is_writer
        ):
            return
        self.world.marks["taken over"] += 1
        self.world.marks["taken over from one that lives"] += nodes[self.name].machine is not None
        nodes[self.name] = self  # frames arrive here from now on

    def _take_inbox(self) -> list[ev.Event]:
        """Return the events that are left for another turn."""
        assert self._driver is not None
        left = self._driver.inbox[:]
        self._driver.inbox.clear()
        return left

    def may_be_struck(self, effect: ef.Effect, *, moments: int = 1) -> None:
        """Let a fault strike, if due, before ``effect`` is carried out, which takes ``moments``.

        Raises _StruckError if this process is no more.
        """
        world, life = self.world, self.life
        world.effects += moments
        if world.effects >= world.next_fault_at:
            world.strike(self, effect)
            if self.life != life:
                raise _StruckError

    def _observe(self, effect: ef.Effect) -> None:
        self.may_be_struck(effect)
        if self.world.trace is not None:
            self.note(f"-> {describe(effect)}")

    # --- time, the operator and the end ------------------------------------------------------------------------------

    def wake_at(self, effect: ef.WakeAt) -> None:
        self._wake_ns = effect.time_ns
        self._clock.after(max(0, effect.time_ns - self.time.now_ns()), self._wake, self.life, effect.time_ns)

    def _wake(self, life: int, time_ns: int) -> None:
        if life != self.life or self._wake_ns != time_ns:
            return
        if (now_ns := self.time.now_ns()) < time_ns:  # the clock runs slower
            self._clock.after(time_ns - now_ns, self._wake, life, time_ns)
            return
        self._wake_ns = None
        self.post(ev.Tick())

    def set_clock(self, skew_ns: int) -> None:
        """Set the machine's clock. The instance reads it soon, and again when it has held for long enough."""
        self.time.jump(skew_ns)
        for delay_ns in (self._rng.random() * MS, HOLD_NS + self._rng.random() * 2 * MS, 2 * HOLD_NS):
            self._clock.after(delay_ns, self._look_at_clock)

    def _look_at_clock(self) -> None:
        if self.machine is not None:
            self.time.now_ns()
            self.post(*self.clock_events())

    def clock_events(self) -> list[ClockMoved]:
        events = self.time.pop_events()
        if any(event.jumped_ns for event in events) and self._app_side is not None:
            self.world.marks["jump of the clock taken"] += 1
            self._clock.after(0, self._app_side.look_at_clock)
        return events

    def request_stop(self) -> None:
        """Stop cleanly; if another node has caught up with the log, that one must take over at once."""
        if self.machine is not None and not self.stop_requested:
            self.stop_requested = True
            self.hands_over = any(node.phase is Phase.FOLLOWING for node in self.disk.shared.waiting)
            self.post(ev.StopRequested(self.hands_over))

    def upgrade_ended(self, effect: ef.UpgradeEnded) -> None:
        if effect.problem is not None and not self.upgrade_fails:
            raise Violation(f"{self.name}: the upgrade to {effect.version} failed: {effect.problem}")
        self.upgrade_to = None
        self.upgrade_fails = False
        self.world.upgrades += effect.problem is None

    def report(self, effect: ef.Report) -> None:
        notice = effect.notice
        if (mark := NOTICES.get(type(notice))) is not None:
            self.world.marks[mark] += 1
        if "which has sent only" in notice.text:
            self.world.marks["older copy found out"] += 1
        if notice.level == "error":
            self.world.error_told(self, notice)

    def stop(self, effect: ef.Stop) -> None:
        self._stopped = effect

    def peer_reset_done(self, effect: ef.PeerResetDone) -> None:
        pass

    def operator_answered(self, effect: ef.OperatorAnswered) -> None:
        pass

    def _expect_stop(self, error: ImmortalError | None) -> None:
        marks = self.world.marks
        if error is None:
            if not self.stop_requested:
                raise Violation(f"{self.name} stopped, nobody had asked for it")
            marks["stopped cleanly"] += 1
            if (
                self.machine is not None
                and self.machine.state.shutdown.hands_over
                and self.machine.state.write_lease.writes
            ):
                marks["handed over"] += 1
                if any(isinstance(job, ef.Commit) for job in self.disk.jobs):
                    raise Violation(f"{self.name} hands its log over with an append on its way")
        elif isinstance(error, LogFullError | LogSyncError) and "simulated" in str(error):
            marks["stopped: disk full" if isinstance(error, LogFullError) else "stopped: sync fails"] += 1
        elif isinstance(error, FencedError) and not self.disk.is_writer:
            marks["fenced"] += 1
        elif isinstance(error, LogError) and self.disk.damaged:
            marks[
                "stopped: damaged record" if isinstance(error, DamagedLogError) else "stopped: no usable checkpoint"
            ] += 1
            self._restore_from_copy()
        else:
            raise Violation(f"{self.name} stopped: {type(error).__name__}: {error}") from error

    @property
    def is_quiet(self) -> bool:
        """Return True if nothing of the node is on its way anywhere."""
        driver, app, log_side = self._driver, self._app_side, self.log_side
        if driver is None or app is None or log_side is None:
            return False
        if self.phase is Phase.FOLLOWING and driver.machine.state.write_lease.follows:
            fed, last = driver.machine.state.session.fed_sequence_id, self.disk.store.last_sequence_id
            return fed == last and not driver.inbox
        if self.phase is not Phase.NORMAL:
            return False
        if driver.inbox or not app.is_quiet or not log_side.is_quiet:
            return False
        machine = driver.machine
        log = machine.state.log
        if log.durable_sequence_id > machine.state.session.fed_sequence_id or not log.open.empty:
            return False
        return all(
            stream.acknowledged >= stream.position for stream in machine.components.peers.outbound.streams.values()
        )


class _StruckError(Exception):
    """Raised when the process has ended in the middle of a turn."""


class _ClockSide:
    def __init__(self, node: Node) -> None:
        self._node = node
        self.now_ns = node.time.now_ns
        self.pop_events = node.clock_events
        self.wake_at = node.wake_at
