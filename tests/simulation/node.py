"""One instance: the core and the app of its current lives, and the duties of a driver (core/effects.py) towards both.

What comes in is handled in turns, as in the real loop: a turn hands over all that has come since the last one, and its
effects are carried out in their order. The world may let a fault strike between any two of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from coordinator.core import effects as ef
from coordinator.core import events as ev
from coordinator.core.errors import DamagedLogError, LogError, LogFullError, LogSyncError
from coordinator.core.events import ClockMoved
from coordinator.core.machine import Machine
from coordinator.core.session import Phase
from coordinator.runtime import check_checkpoint
from protocol.errors import ImmortalError
from protocol.peer import FrameType
from tests.simulation.apps import App
from tests.simulation.callers import Caller
from tests.simulation.checkers import Checker
from tests.simulation.clock import MS, US
from tests.simulation.disk import Disk
from tests.simulation.failing import Death
from tests.simulation.marks import REPORTS
from tests.simulation.node_clock import HOLD_NS, NodeClock
from tests.simulation.trace import Violation, describe, describe_events

if TYPE_CHECKING:
    from tests.simulation.world import World

VERSION_MAX = 3


class Node:
    def __init__(self, world: World, number: int, name: str, disk: Disk, checker: Checker) -> None:
        self.world, self.number, self.name, self.disk, self.checker = world, number, name, disk, checker
        self.machine: Machine | None = None
        self.app: App | None = None
        self.life = 0  # of the coordinator
        self.app_life = 0
        self.upgrade_to: int | None = None  # the operator's wish
        self.upgrade_fails = False
        self._upgrade_tried = False
        self.time = NodeClock(world.clock)
        self._machine_starts = True  # it was switched off: there is a clock to be believed
        self.stop_asked = False
        self._rng = world.plan.stream(f"node {number}")
        self._clock = world.clock
        self._inbox: list[ev.Event] = []
        self._turn_due = self._reading = self._writing = self._acting = self._disk_busy = False
        self._connecting = False
        self._to_app: deque[bytes] = deque()
        self._to_core = bytearray()
        self._app_closing = False
        self._app_slow = 1  # times as slow as usual
        self._slow = 1  # the coordinator's process
        self._paused = False
        self._time_due_ns: int | None = None
        self._wake_ns: int | None = None
        self._carry_out: dict[type, Callable[[Any], None]] = {
            ef.SendToApp: self._send_to_app,
            ef.CloseApp: self._close_app,
            ef.PauseApp: self._pause_app,
            ef.ResumeApp: self._resume_app,
            ef.Commit: self._write,
            ef.WriteCheckpointChunk: self._write,
            ef.Trim: self._trim,
            ef.LoadLog: self._load_log,
            ef.CheckCheckpoint: self._check_checkpoint,
            ef.ReadCheckpointChunk: self._read_chunk,
            ef.ReadRecords: self._read_records,
            ef.ReadSpilled: self._read_spilled,
            ef.ReadLetters: self._read_letters,
            ef.OpenPeer: self._nothing,
            ef.SendToPeer: self._send_to_peer,
            ef.ResetPeer: self._reset_peer,
            ef.PeerResetDone: self._nothing,
            ef.OperatorAnswered: self._nothing,
            ef.ReplyToPeer: self._reply_to_peer,
            ef.ReplyToClient: self._reply_to_client,
            ef.WakeAt: self._wake_at,
            ef.UpgradeEnded: self._upgrade_ended,
            ef.Report: self._report,
            ef.Stop: self._stop,
        }

    def note(self, text: str) -> None:
        if self.world.trace is not None:
            self.world.trace.note(self._clock.now_ns, self.name, text)

    @property
    def now_ns(self) -> int:
        """The instance's time."""
        return self.time.now_ns()

    @property
    def phase(self) -> Phase:
        return self.machine._session.phase if self.machine is not None else Phase.STOPPED

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
            self.upgrade_to = None  # done, and the coordinator died before it could say so
        # Promoted, a copy is not found out: what it makes again and what is new are not told apart.
        promote = self._rng.random() < 0.3 and not self.world.plan.has_copy
        self._slow = self._rng.choice((1, 1, 1, 20, 60))
        self.world.marks["upgrade asked for again"] += self.upgrade_to is not None and self._upgrade_tried
        self._upgrade_tried = self.upgrade_to is not None
        clients = self.disk.store.clients()
        limits = self.world.plan.limits
        running = self.time.running
        self.machine = Machine(
            self.name, summary, limits, self.upgrade_to, promote=promote, clients=clients, running=running
        )
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
        versions = self.machine._versions
        self.checker.app_begins()
        self.app = self.world.make_app(self, versions.upgrade_to or versions.current)
        self.app.fails_upgrade = self.upgrade_fails
        self.app_life += 1
        self._to_app.clear()
        self._to_core.clear()
        self._app_closing = self._paused = self._reading = self._writing = self._acting = False
        self._app_slow = 15 if self._rng.random() < 0.2 else 1
        self._time_due_ns = None
        self.post(ev.AppConnected())
        self._app_has_run()

    def crash_app(self) -> None:
        """Its connection ends; what it had sent may still be read, or not."""
        if self.app is None:
            return
        if self._to_core and not self._paused and self._rng.random() < 0.5:
            self.post(ev.AppData(bytes(self._to_core)))
        self._app_is_gone()

    def _app_is_gone(self) -> None:
        self.app = None
        self.app_life += 1
        self._to_app.clear()
        self._to_core.clear()
        self.post(ev.AppClosed())

    def crash(self, *, app_first: bool) -> None:
        """The coordinator's process ends, and its app with it, sooner or later."""
        if self.machine is None:
            return
        if self.app is not None and not app_first:
            try:
                for data in self._to_app:  # it works on until it sees that its coordinator is gone
                    self.app.receive(data)
            except Death:
                pass
        self._end()
        self._start_later()

    def _end(self) -> None:
        lost = self.disk.crash()
        self.world.marks["writes lost in a crash"] += lost > 0
        self.note(f"is down, {lost} writes are lost")
        self.life += 1
        self.app_life += 1
        self.machine = self.app = None
        self._inbox.clear()
        self._to_app.clear()
        self._to_core.clear()
        self._turn_due = self._connecting = self._disk_busy = False
        self.stop_asked = False
        self._wake_ns = None
        self.world.network.forget(self)

    def power_off(self, *, machine_too: bool = False) -> None:
        self._machine_starts = self._machine_starts or machine_too
        self._end()
        self._start_later()

    def wipe(self, disk: Disk, checker: Checker) -> None:
        """Its log is lost: it begins again with a new one."""
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

    def post(self, event: ev.Event) -> None:
        """Something has come in: it is handled in the next turn."""
        self._inbox.append(event)
        if not self._turn_due:
            self._turn_due = True
            self._clock.after(self._rng.random() * 15 * US * self._slow, self._turn, self.life)

    def _turn(self, life: int) -> None:
        if life != self.life:
            return
        self._turn_due = False
        world = self.world
        while self._inbox:
            machine = self.machine
            if machine is None:
                return
            events, self._inbox = self._inbox, []
            if world.trace is not None:
                self.note(f"<- {describe_events(events)}")
            world.turns += 1
            for effect in self._asked_by(machine, events):
                world.effects += 1
                if world.effects >= world.next_fault_at:
                    world.strike(self, effect)
                    if self.machine is not machine:
                        return
                if world.trace is not None:
                    self.note(f"-> {describe(effect)}")
                self._carry_out[type(effect)](effect)
                if self.machine is not machine:
                    return
        if self.app is None and not self._connecting and not self.stop_asked:
            self._connect_later()

    def _asked_by(self, machine: Machine, events: Sequence[ev.Event]) -> Iterator[ef.Effect]:
        """As the real loop has it: each part when what the one before asks for is carried out."""
        now_ns = self.now_ns
        yield from machine.take([*self._clock_events(), *events], now_ns)
        yield from machine.advance()
        if not self._inbox:
            yield from machine.settle()

    def _nothing(self, effect: ef.Effect) -> None:
        pass

    # --- the app -----------------------------------------------------------------------------------------------------

    def _send_to_app(self, effect: ef.SendToApp) -> None:
        self.checker.given_to_app(effect.data)
        if self.app is None or self._app_closing:
            return
        self._to_app.append(bytes(effect.data))
        if not self._reading:
            self._reading = True
            self._clock.after(self._rng.random() * 60 * US * self._app_slow, self._app_reads, self.app_life)

    def _app_reads(self, app_life: int) -> None:
        if app_life != self.app_life or self.app is None:
            return
        self._reading = False
        pending = self._to_app
        if pending:
            spread = self._rng.random()
            if spread < 0.6:
                data = b"".join(pending)
                pending.clear()
            else:
                data = pending.popleft()
                if spread > 0.9 and len(data) > 1:
                    cut = 1 + int(self._rng.random() * (len(data) - 1))
                    pending.appendleft(data[cut:])
                    data = data[:cut]
            try:
                self.app.receive(data)
            except Death:
                self._app_dies()
                return
            self.post(ev.AppSent(len(data)))
            self._app_has_run()
        if pending:
            self._reading = True
            self._clock.after(self._rng.random() * 60 * US * self._app_slow, self._app_reads, app_life)
        elif self._app_closing:
            self._app_is_gone()

    def _app_dies(self) -> None:
        """Something that it handles has ended its process. All that it had put out is on its way."""
        assert self.app is not None
        self.world.marks[f"app died while {self.phase.value}"] += 1
        self.note("the app dies")
        data = bytes(self._to_core + self.app.out)
        if data and not self._paused:
            self.post(ev.AppData(data))
        self._app_is_gone()

    def _app_has_run(self) -> None:
        app = self.app
        assert app is not None
        if app.out:
            self._to_core += app.out
            app.out.clear()
            self._app_writes_later()
        if app.is_restless and not self._acting:
            self._acting = True
            self._clock.after(self._rng.random() * 150 * US, self._app_acts, self.app_life)
        due_ns = app.next_due_ns
        if due_ns is not None and (self._time_due_ns is None or due_ns < self._time_due_ns):
            self._time_due_ns = due_ns
            self._clock.after(max(0, due_ns - app.time_ns(self._clock.now_ns)), self._app_timer, self.app_life)

    def _app_timer(self, app_life: int) -> None:
        if app_life != self.app_life or self.app is None:
            return
        self._time_due_ns = None
        due_ns = self.app.next_due_ns
        if due_ns is not None and due_ns <= (time_ns := self.app.time_ns(self._clock.now_ns)):
            self.world.marks["time told to the app's clock"] += 1
            self.app.tell_time(time_ns)
        self._app_has_run()

    def _app_acts(self, app_life: int) -> None:
        if app_life != self.app_life or self.app is None:
            return
        more = self.app.act()
        self._app_has_run()
        self._acting = more
        if more:
            self._clock.after(20 * US + self._rng.random() * 250 * US, self._app_acts, app_life)

    def _app_writes_later(self) -> None:
        if self._to_core and not self._writing and not self._paused and not self._app_closing:
            self._writing = True
            self._clock.after(self._rng.random() * 40 * US, self._app_writes, self.app_life)

    def _app_writes(self, app_life: int) -> None:
        if app_life != self.app_life:
            return
        self._writing = False
        if self._paused or self._app_closing:
            return
        size_bytes = len(self._to_core)
        if self._rng.random() < 0.3:
            size_bytes = 1 + int(self._rng.random() * size_bytes)
        self.post(ev.AppData(bytes(self._to_core[:size_bytes])))
        del self._to_core[:size_bytes]
        self._app_writes_later()

    def _close_app(self, effect: ef.CloseApp) -> None:
        if self.app is None:
            return
        self._app_closing = True
        if not self._reading:
            self._reading = True
            self._clock.after(20 * US, self._app_reads, self.app_life)

    def _pause_app(self, effect: ef.PauseApp) -> None:
        self.world.marks["app paused"] += 1
        self._paused = True

    def _resume_app(self, effect: ef.ResumeApp) -> None:
        self._paused = False
        self._app_writes_later()

    # --- the log -----------------------------------------------------------------------------------------------------

    def _write(self, effect: ef.Commit | ef.WriteCheckpointChunk) -> None:
        assert self.machine is not None
        if isinstance(effect, ef.Commit) and effect.transaction.records:
            self.world.marks["record later than the machine's clock"] += (
                self.machine._log._last_time_ns > self.time.wall_ns
            )
        self.disk.jobs.append(effect)
        self._disk_works_later()

    def _trim(self, effect: ef.Trim) -> None:
        self.disk.trimming = True
        self._disk_works_later()

    def _disk_works_later(self) -> None:
        if not self._disk_busy and (self.disk.jobs or self.disk.trimming):
            self._disk_busy = True
            self._clock.after(self.disk.latency_ns(), self._disk_works, self.life)

    def _disk_works(self, life: int) -> None:
        if life != self.life:
            return
        self._disk_busy = False
        for event in self.disk.work():
            self.post(event)
        self._disk_works_later()

    def _answer(self, read: Callable[[], ev.Event]) -> None:
        """Reads are answered in the same turn, as by the real loop."""
        try:
            self._inbox.append(read())
        except LogError as error:
            self._inbox.append(ev.LogFailed(error))

    def _load_log(self, effect: ef.LoadLog) -> None:
        self._answer(self._loaded)

    def _loaded(self) -> ev.Event:
        summary = self.disk.store.summary()
        outputs = summary.checkpoints[-1].outputs if summary.checkpoints else {}
        for batch in summary.impulses:
            mark = outputs.get(batch.destination)
            if mark is None or batch.first_position > mark.position:
                self.world.marks["impulse put back by a replay"] += 1
        return ev.LogLoaded(summary)

    def _check_checkpoint(self, effect: ef.CheckCheckpoint) -> None:
        try:
            problem = check_checkpoint(self.disk.store, effect.header)
        except LogError as error:
            problem = str(error)
        if problem is not None:
            if not self.disk.damaged:
                raise Violation(
                    f"{self.name}: checkpoint {effect.header.checkpoint_id} is not what was written: {problem}"
                )
            self.damage_told = True
        self._inbox.append(ev.CheckpointChecked(effect.header.checkpoint_id, problem))

    def _read_chunk(self, effect: ef.ReadCheckpointChunk) -> None:
        store = self.disk.store
        self._answer(lambda: ev.CheckpointChunkRead(store.read_checkpoint_chunk(effect.checkpoint_id, effect.index)))

    def _read_records(self, effect: ef.ReadRecords) -> None:
        store = self.disk.store
        self._answer(lambda: ev.RecordsRead(store.read(effect.first_sequence_id, effect.size_bytes_max)))

    def _read_spilled(self, effect: ef.ReadSpilled) -> None:
        self.world.marks["spilled messages read"] += 1
        first, last, size_bytes_max = effect.first_position, effect.last_position, effect.size_bytes_max
        read = self.disk.store.read_spilled
        self._answer(
            lambda: ev.SpilledRead(effect.destination, first, read(effect.destination, first, last, size_bytes_max))
        )

    def _read_letters(self, effect: ef.ReadLetters) -> None:
        self.world.marks["refused letters looked for"] += 1
        letters = [self.disk.store.letter(key) for key in effect.keys]
        self._inbox.append(ev.LettersRead([letter for letter in letters if letter is not None]))

    # --- peers -------------------------------------------------------------------------------------------------------

    def _send_to_peer(self, effect: ef.SendToPeer) -> None:
        self.checker.sent_to_peer(effect)
        self.world.network.send(self, effect)

    def _reset_peer(self, effect: ef.ResetPeer) -> None:
        self.world.network.give_up(self, effect.destination)

    def _reply_to_peer(self, effect: ef.ReplyToPeer) -> None:
        self.checker.answered(effect)
        frame = effect.frame
        if frame.frame_type is FrameType.RESEND:
            self.world.marks["Resend"] += 1
        elif frame.frame_type is FrameType.REFUSED:
            self.world.refused(self, frame)
        self.world.network.reply(effect)

    def _reply_to_client(self, effect: ef.ReplyToClient) -> None:
        caller = effect.token
        assert isinstance(caller, Caller)
        self.world.marks["caller answered"] += 1
        caller.replied(effect)

    # --- time, the operator and the end ------------------------------------------------------------------------------

    def _wake_at(self, effect: ef.WakeAt) -> None:
        self._wake_ns = effect.time_ns
        self._clock.after(max(0, effect.time_ns - self.now_ns), self._wake, self.life, effect.time_ns)

    def _wake(self, life: int, time_ns: int) -> None:
        if life != self.life or self._wake_ns != time_ns:
            return
        if (now_ns := self.now_ns) < time_ns:  # it runs slower
            self._clock.after(time_ns - now_ns, self._wake, life, time_ns)
            return
        self._wake_ns = None
        self.post(ev.Tick())

    def set_clock(self, skew_ns: int) -> None:
        """The machine's. It is looked at soon, and again when it has stood for long enough."""
        self.time.jump(skew_ns)
        for delay_ns in (self._rng.random() * MS, HOLD_NS + self._rng.random() * 2 * MS, 2 * HOLD_NS):
            self._clock.after(delay_ns, self._look_at_clock)

    def _look_at_clock(self) -> None:
        if self.machine is not None:
            self.time.now_ns()
            for event in self._clock_events():
                self.post(event)

    def _clock_events(self) -> list[ClockMoved]:
        events = self.time.take_events()
        if any(event.jumped_ns for event in events):
            self.world.marks["jump of the clock taken"] += 1
            self._time_due_ns = None  # what the app waits for may come sooner than it seemed
            self._clock.after(0, self._app_timer, self.app_life)
        return events

    def ask_to_stop(self) -> None:
        if self.machine is not None and not self.stop_asked:
            self.stop_asked = True
            self.post(ev.StopRequested())

    def _upgrade_ended(self, effect: ef.UpgradeEnded) -> None:
        if effect.problem is not None and not self.upgrade_fails:
            raise Violation(f"{self.name}: the upgrade to {effect.version} failed: {effect.problem}")
        self.upgrade_to = None
        self.upgrade_fails = False
        self.world.upgrades += effect.problem is None

    def _report(self, effect: ef.Report) -> None:
        for words, mark in REPORTS.items():
            if words in effect.message:
                self.world.marks[mark] += 1
        if effect.level == "error":
            self.world.error_told(self, effect.message)

    def _stop(self, effect: ef.Stop) -> None:
        error = effect.error
        self._expect_stop(error)
        self._end()
        self._start_later()

    def _expect_stop(self, error: ImmortalError | None) -> None:
        marks = self.world.marks
        if error is None:
            if not self.stop_asked:
                raise Violation(f"{self.name} stopped, nobody had asked for it")
            marks["stopped cleanly"] += 1
        elif isinstance(error, LogFullError | LogSyncError) and "simulated" in str(error):
            marks["stopped: disk full" if isinstance(error, LogFullError) else "stopped: sync fails"] += 1
        elif isinstance(error, LogError) and self.disk.damaged:
            marks[
                "stopped: damaged record" if isinstance(error, DamagedLogError) else "stopped: no usable checkpoint"
            ] += 1
            self._restore_from_copy()
        else:
            raise Violation(f"{self.name} stopped: {type(error).__name__}: {error}") from error

    @property
    def is_quiet(self) -> bool:
        """Nothing of it is on its way anywhere."""
        machine, app = self.machine, self.app
        if machine is None or app is None or self.phase is not Phase.NORMAL or not app.is_done:
            return False
        if self._inbox or self.disk.jobs or self._to_app or self._to_core or app.out:
            return False
        log = machine._log
        if log.durable_sequence_id > machine._session.fed_sequence_id or not log.open.empty:
            return False
        return all(stream.acknowledged >= stream.position for stream in machine._peers.outputs.values())
