"""Benchmark of isolation: do a dead and a stalled receiver slow calls to eight others?

There are windows with and without these faults. In each, the hub first makes as many calls as it can, which fills the
buffers for the two faulty receivers. Then it makes a few calls at fixed times, and measures their latencies: from when
a call was due to when it was on the receiver's disk.
"""

from __future__ import annotations

import os
import select
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from immortal.bench.fleet_apps import RECEIVERS
from immortal.bench.processes import BenchError, Service, final_state, register, tell
from immortal.coordinator.operator import control
from immortal.protocol.command_line import echo, print_table

HUB = "hub"
DEAD, STALLED, *OTHERS = RECEIVERS
SECONDS = 6.0  # of each half of a window
ROUNDS = 3  # of two windows each: all healthy, and with the two
RATE = 25.0  # calls a second to each receiver, far below what two processors can do
SETTLE_S = 1.0
REST_S = 1.0  # between the two halves, once the others have all calls
STEP_TIMEOUT_S = 120.0
# Tuning of the hub, so that the calls that wait for the two go far beyond it within one window.
TUNING = "\n[tuning]\npeer_buffer_mib_max = 8\n"


@dataclass(frozen=True, slots=True)
class Window:
    """Figures of the eight other services together: ``calls_per_s`` at full speed, and latencies at RATE, in ms."""

    faulty: bool
    calls_per_s: float
    p50_ms: float
    p99_ms: float
    samples: int


@dataclass(frozen=True, slots=True)
class IsolationResult:
    windows: list[Window]

    @property
    def throughput_ratio(self) -> float:
        """Return calls/s with the two faults divided by calls/s without them: medians of the windows."""
        return self._median(True, lambda window: window.calls_per_s) / self._median(
            False, lambda window: window.calls_per_s
        )

    @property
    def p99_ratio(self) -> float:
        return self._median(True, lambda window: window.p99_ms) / self._median(False, lambda window: window.p99_ms)

    def _median(self, faulty: bool, value: Callable[[Window], float]) -> float:
        return statistics.median(value(window) for window in self.windows if window.faulty is faulty)


def measure_isolation(
    *,
    seconds: float = SECONDS,
    rounds: int = ROUNDS,
    home: Path,
    progress: Callable[[str], None] = lambda text: None,
) -> IsolationResult:
    """Measure ``rounds`` of two windows. ``home`` holds the logs. Raises BenchError."""
    apps = {HUB: "immortal.bench.fleet_apps:Hub"}
    apps |= dict.fromkeys(RECEIVERS, "immortal.bench.fleet_apps:Receiver")
    services = register(home, apps, {})
    with (home / f"{HUB}.toml").open("a") as settings:
        settings.write(TUNING)
    try:
        for service in services.values():
            progress(f"starting {service.settings.name}")
            service.start()
            service.wait_for_phase("normal")
        return _Isolation(services, seconds, progress).measure(rounds)
    finally:
        for service in services.values():
            service.kill()


class _Isolation:
    def __init__(self, services: dict[str, Service], seconds: float, progress: Callable[[str], None]) -> None:
        self._services = services
        self._hub = services[HUB]
        self._seconds = seconds
        self._progress = progress
        self._samples = int(seconds * RATE)
        self._commands = 0  # that the hub has not reported as done

    def measure(self, rounds: int) -> IsolationResult:
        rates: list[tuple[bool, float]] = []
        for number in range(2 * rounds):
            faulty = number % 2 == 1
            what = f"window {number + 1} of {2 * rounds}, " + ("one dead, one stalled" if faulty else "all healthy")
            with self._faults(faulty):
                rates.append((faulty, self._throughput(what)))
                self._wait(self._is_settled(OTHERS), timeout_s=self._seconds)
                time.sleep(REST_S)
                self._progress(f"{what}: latency")
                self._command(f"sample {number} {RATE} {self._samples} {time.time_ns() // 1000}")
                self._listen(self._seconds + SETTLE_S)
            self._listen(STEP_TIMEOUT_S)
            if not self._wait(self._is_settled(RECEIVERS), timeout_s=STEP_TIMEOUT_S):
                raise BenchError(f"after {what} the hub's calls have not all arrived within {STEP_TIMEOUT_S:.0f} s")
        latencies_ms = self._latencies_ms(2 * rounds)
        return IsolationResult(
            [_window(faulty, rate, found) for (faulty, rate), found in zip(rates, latencies_ms, strict=True)]
        )

    @contextmanager
    def _faults(self, faulty: bool) -> Iterator[None]:
        """Kill one receiver and stop another, if ``faulty``, and bring both back at the end."""
        if not faulty:
            yield
            return
        dead, stalled = self._services[DEAD], self._services[STALLED]
        dead.kill()
        for process in stalled.processes():
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in stalled.processes():
                process.send_signal(signal.SIGCONT)
            dead.start()
        dead.wait_for_phase("normal")

    # --- the two halves of a window ----------------------------------------------------------------------------------

    def _throughput(self, what: str) -> float:
        """Return how many calls a second reached the disks of the others."""
        self._progress(f"{what}: throughput")
        self._command("fill")
        self._listen(SETTLE_S)
        time.sleep(SETTLE_S)
        before = [self._position(name) for name in OTHERS]
        time.sleep(self._seconds)
        after = [self._position(name) for name in OTHERS]
        self._command("rest")
        self._listen(SETTLE_S)
        return sum(
            (end - start) / (end_s - start_s) for (start, start_s), (end, end_s) in zip(before, after, strict=True)
        )

    def _position(self, name: str) -> tuple[int, float]:
        """Return the number of the hub's calls that ``name`` has, and the time."""
        status = control.query(self._services[name].settings.folder, "status", STEP_TIMEOUT_S)
        return status["inputs"].get(HUB, {}).get("position", 0), time.perf_counter()

    def _latencies_ms(self, windows: int) -> list[list[float]]:
        """Return the latencies of all calls to the others for each window; each must have got each call once."""
        found: list[list[float]] = [[] for _ in range(windows)]
        for name in OTHERS:
            service = self._services[name]
            service.ask_to_stop()
            service.wait_until_stopped(STEP_TIMEOUT_S)
            latencies_us = final_state(service, {"latencies_us": dict[int, list[int]]})["latencies_us"]
            counts = [len(latencies_us.get(window, ())) for window in range(windows)]
            if counts != [self._samples] * windows:
                raise BenchError(f"{name!r} got {counts} calls in the windows, {self._samples} were made in each")
            for window in range(windows):
                found[window] += [value / 1000 for value in latencies_us[window]]
        return found

    # --- the hub -----------------------------------------------------------------------------------------------------

    def _command(self, line: str) -> None:
        tell(self._hub.processes()[1], line)
        self._commands += 1

    def _listen(self, timeout_s: float) -> None:
        """Wait until the hub has run its commands, at most ``timeout_s``: a busy hub runs them later."""
        _, app = self._hub.processes()
        assert app.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        while self._commands and (left_s := deadline_s - time.monotonic()) > 0:
            if select.select([app.stdout], [], [], left_s)[0]:
                # Not through the file object: select would not see the bytes that it has read ahead.
                self._commands -= os.read(app.stdout.fileno(), 4096).count(b"\n")
            self._hub.check_alive()

    def _is_settled(self, names: Sequence[str]) -> Callable[[], bool]:
        def is_settled() -> bool:
            status = self._hub.status()
            if status is None or status["backlog_records"]:
                return False
            outputs = [status["outputs"].get(name) for name in names]
            return all(output and output["acknowledged"] == output["position"] for output in outputs)

        return is_settled

    @staticmethod
    def _wait(condition: Callable[[], bool], *, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.05)
        return True


def _window(faulty: bool, calls_per_s: float, latencies_ms: Sequence[float]) -> Window:
    ordered = sorted(latencies_ms)
    return Window(
        faulty,
        calls_per_s,
        p50_ms=ordered[len(ordered) // 2],
        p99_ms=ordered[len(ordered) * 99 // 100],
        samples=len(ordered),
    )


# Output for people.


def print_isolation(result: IsolationResult) -> None:
    heads = ("calls/s", f"p50 ms at {RATE:.0f}/s", "p99 ms", "calls timed")
    rows = (
        (
            "one dead, one stalled" if window.faulty else "healthy",
            f"{window.calls_per_s:,.0f}",
            f"{window.p50_ms:.2f}",
            f"{window.p99_ms:.2f}",
            f"{window.samples:,}",
        )
        for window in result.windows
    )
    title = f"calls to {len(OTHERS)} of 10 receivers, in the order of the windows"
    print_table(("the other two", *heads), rows, right=heads, title=title)
    echo(
        f"beside a dead and a stalled one, {len(OTHERS)} receivers have {result.throughput_ratio:.0%} of the calls/s "
        f"and {result.p99_ratio:.2f} times the p99 (medians of the windows)"
    )
