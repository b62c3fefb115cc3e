"""Clock of a running instance: reads the machine's clocks, and saves their state for the next process.

The file `clock` in the instance's folder has the difference between the instance's time and the machine's steady clock,
so that a process started while the wall clock is wrong continues the earlier time; and when the instance ran. A steady
clock counts from the machine's start: after another start of the machine (a boot) the wall clock has to be believed.
The file is not synced, and can be lost: then only the log says how long the instance has run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from immortal.coordinator.core.clock import Reading, RunningTime, SteadyClock, Timekeeper
from immortal.coordinator.core.effects import WakeAt
from immortal.coordinator.core.events import ClockMoved, Event, Tick
from immortal.coordinator.core.interfaces import LogSummary
from immortal.coordinator.notices import Notices
from immortal.protocol import decoding
from immortal.protocol.files import make_folder, opener

FILE_NAME = "clock"
TICK_NS = 1_000_000_000  # interval of readings when nothing happens, so that the end of a jump is not missed
SAVE_NS = 60_000_000_000
FAR_NS = 7 * 86_400 * 1_000_000_000  # a longer gap between two starts is reported
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # it also counts while the machine is suspended


def steady_ns() -> int:
    """Return ns since the machine's start, from a clock that nobody can set."""
    return time.clock_gettime_ns(_STEADY)


class _Saved(msgspec.Struct):
    """Clock state in the file. ``boot``: ID of the machine's boot for which the other fields hold."""

    boot: str
    offset_ns: int
    held_ns: int | None
    held_since_ns: int
    slowed: bool
    spans: tuple[tuple[int, int], ...]
    steps: list[ClockMoved] = []


class InstanceClock:
    """Clock of one instance. ``hold_ns``: how long a jump must last before it counts. ``log``: takes reports.
    ``is_ours``: no other process runs the instance, so this one writes the file."""

    def __init__(
        self,
        folder: Path,
        summary: LogSummary | None,
        hold_ns: int,
        log: Notices,
        *,
        is_ours: bool = True,
        wall_ns: Callable[[], int] = time.time_ns,
        steady_ns: Callable[[], int] = steady_ns,
    ) -> None:
        self.jumps_count = 0
        self.wake_due_ns: int | None = None  # on the monotonic clock
        self._path = folder / FILE_NAME
        self._name = folder.name
        self._log = log
        self._wall_ns, self._steady_ns = wall_ns, steady_ns
        self._boot = _boot_id()
        self._read_ns = self._saved_ns = steady_ns()
        self._unsaved_reported = False
        self._hold_ns = hold_ns
        self._is_ours = is_ours
        self._keeper = self._continue_clock(summary, hold_ns)
        self.now_ns()
        self._save()

    def take_over(self, summary: LogSummary) -> None:
        """Run the instance's clock from now on: its time continues that of the earlier process."""
        before, self._keeper = self._keeper, self._continue_clock(summary, self._hold_ns)
        now, running = self._keeper, before.running
        now.clock.offset_ns = max(now.clock.offset_ns, before.clock.offset_ns)
        running.past, running.first_ns, running.last_ns = now.running.past, now.running.first_ns, now.running.last_ns
        now.running = running  # other objects hold it
        self._is_ours = True
        self._save()

    def _continue_clock(self, summary: LogSummary | None, hold_ns: int) -> Timekeeper:
        """Return a clock that continues the earlier process's, and is not behind the log's last record."""
        checkpoints_ns = [] if summary is None else [header.time_ns for header in summary.checkpoints]
        logged_ns = max(0 if summary is None else summary.last_time_ns, *checkpoints_ns, 0)
        saved = self._load()
        wall_ns = self._wall_ns()
        clock = SteadyClock(wall_ns - self._read_ns, hold_ns)
        if saved is not None and saved.boot == self._boot != "":
            clock = SteadyClock(saved.offset_ns, hold_ns, saved.held_ns, saved.held_since_ns, saved.slowed)
        elif logged_ns and wall_ns - logged_ns > FAR_NS:
            ahead = format_duration(wall_ns - logged_ns)
            self._log.warning(
                f"the machine's clock is {ahead} ahead of the log's last record: since the machine was"
                " started anew, it is believed; nothing is forgotten or trimmed for it"
            )
        clock.offset_ns = max(clock.offset_ns, logged_ns - self._read_ns)
        # Without the file, the whole time of the log counts as running time.
        spans = saved.spans if saved is not None and saved.spans else ((min(checkpoints_ns, default=0), logged_ns),)
        running = RunningTime(spans[:-1], *spans[-1])
        running.start_span(self._read_ns + clock.offset_ns)
        return Timekeeper(clock, running, saved.steps if saved is not None else ())

    @property
    def running(self) -> RunningTime:
        return self._keeper.running

    def pop_events(self) -> list[ClockMoved]:
        """Return clock events that the core must get before the next time."""
        return self._keeper.pop_events()

    def now_ns(self, *, accept: bool = False) -> int:
        """Return the instance's time, ns since the Unix epoch. It never goes back."""
        self._read_ns = steady_ns = self._steady_ns()
        wall_ns = self._wall_ns()
        if not accept and (time_ns := self._keeper.time_if_calm(wall_ns, steady_ns)) is not None:
            return time_ns
        reading = self._keeper.read(wall_ns, steady_ns, accept=accept)
        if reading.is_news:
            self._report(reading)
            self._save()
        return reading.time_ns

    def _report(self, reading: Reading) -> None:
        if reading.held_jump_ns is not None:
            self.jumps_count += 1
            offset = _format_offset(reading.held_jump_ns)
            self._log.warning(
                f"the machine's clock is {offset} the instance's time: that goes on as before, until"
                f" this has stood for {self._keeper.clock.hold_ns // 1_000_000_000} s, or"
                f" 'immortal clock {self._name} --accept' says that it is right"
            )
        if reading.accepted_jump_ns is not None:
            then = "is stepped" if reading.accepted_jump_ns > 0 else "runs 5 % slower until the clock has caught up"
            offset = _format_offset(reading.accepted_jump_ns)
            self._log.warning(f"the machine's clock is {offset} the instance's time, and believed now: that {then}")
        if reading.jump_ended:
            self._log.info("the machine's clock agrees with the instance's time again")

    def wake_at(self, effect: WakeAt) -> None:
        """Ask for a Tick after the time that is left to ``time_ns`` has passed, whatever the wall clock does
        meanwhile."""
        self.wake_due_ns = time.monotonic_ns() + effect.time_ns - self.now_ns()

    def due_events(self, now_ns: int) -> list[Event]:
        """Return a Tick if a wake-up is due at ``now_ns`` of the monotonic clock."""
        events: list[Event] = []
        if self.wake_due_ns is not None and now_ns >= self.wake_due_ns:
            self.wake_due_ns = None
            events.append(Tick())
        return events

    def tick(self) -> None:
        """Read the clocks when nothing happens. Call it every TICK_NS."""
        self.running.extend_to(self.now_ns())
        if self._read_ns - self._saved_ns >= SAVE_NS:
            self._save()

    def status(self) -> dict[str, object]:
        """Return the clock's status. ``ahead_s``: how far the machine's clock is ahead, while that is held back or time
        runs slower; negative: behind."""
        time_ns, clock = self.now_ns(), self._keeper.clock
        held_ns = clock.held_ns
        return {
            "time_ns": time_ns,
            "ahead_s": 0.0 if held_ns is None else round(held_ns / 1e9, 3),
            "held_s": 0.0 if held_ns is None else round((self._read_ns - clock.held_since_ns) / 1e9, 3),
            "hold_s": clock.hold_ns // 1_000_000_000,
            "slowed": clock.slowed,
            "jumps": self.jumps_count,
        }

    def _load(self) -> _Saved | None:
        try:
            return decoding.decode_json(self._path.read_bytes(), type=_Saved)
        except FileNotFoundError:
            return None
        except (decoding.DecodeError, OSError) as error:
            self._log.warning(f"{self._path} can't be read ({error}): it is made anew")
            return None

    def _save(self) -> None:
        self._saved_ns = self._read_ns
        if not self._is_ours:
            return
        clock = self._keeper.clock
        saved = _Saved(
            self._boot,
            clock.offset_ns,
            clock.held_ns,
            clock.held_since_ns,
            clock.slowed,
            self.running.spans,
            self._keeper.steps,
        )
        temporary = self._path.with_name(f".{FILE_NAME}.new")
        try:
            make_folder(self._path.parent)  # the log can be elsewhere
            with open(temporary, "wb", opener=opener) as file:
                file.write(msgspec.json.encode(saved))
            os.replace(temporary, self._path)
        except OSError as error:
            if not self._unsaved_reported:
                self._unsaved_reported = True
                self._log.warning(f"{self._path} can't be written: {error.strerror}")

    def close(self) -> None:
        self._save()


def remove(folder: Path) -> None:
    """Forget when the instance of ``folder`` ran, because its log was removed."""
    (folder / FILE_NAME).unlink(missing_ok=True)


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _format_offset(ahead_ns: int) -> str:
    return f"{format_duration(abs(ahead_ns))} {'ahead of' if ahead_ns > 0 else 'behind'}"


def format_duration(duration_ns: int) -> str:
    """Format a duration, such as "3 days", "1 hour" or "12 s"."""
    seconds = duration_ns / 1e9
    for unit, length_s in (("year", 365 * 86_400), ("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= 0.95 * length_s:
            count = round(seconds / length_s, 1)
            return f"{count:g} {unit}{'' if count == 1 else 's'}"
    return f"{seconds:.1f} s"


# Optional deadlines.


def earliest(*moments_ns: int | None) -> int | None:
    """Return the first of ``moments_ns``; None if there is none."""
    first_ns: int | None = None
    for moment_ns in moments_ns:
        if moment_ns is not None and (first_ns is None or moment_ns < first_ns):
            first_ns = moment_ns
    return first_ns
