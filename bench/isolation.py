"""Benchmark of isolation: do a dead and a stalled receiver slow calls to eight others?

There are windows with and without these faults. In each, the hub first makes as many calls as it can, which fills the
buffers for the two faulty receivers. Then it makes a few calls at fixed times, and measures their latencies: from when
a call was due to when it was on the receiver's disk.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from immortal.bench.fleet_apps import RECEIVERS
from immortal.bench.harness import Context, Figure, Target
from immortal.bench.processes import BenchError, Service, final_state, register, running, write_line
from immortal.bench.workload import percentile
from immortal.coordinator.operator import control

HUB = "hub"
DEAD, STALLED, *OTHERS = RECEIVERS
HEALTHY, FAULTY = "all healthy", "one dead, one stalled"
SECONDS = 6.0  # of each half of a window
ROUNDS = 3  # of two windows each: all healthy, and with the two
RATE = 25.0  # calls a second to each receiver, far below what two processors can do
SETTLE_S = 1.0
REST_S = 1.0  # between the two halves, once the others have all calls
STEP_TIMEOUT_S = 120.0
# Tuning of the hub, so that the calls that wait for the two go far beyond it within one window.
TUNING = "\n[tuning]\npeer_buffer_mib_max = 8\n"


def isolation(context: Context, *, seconds: float = SECONDS, rounds: int = ROUNDS) -> list[Figure]:
    """Measure calls to eight receivers in ``rounds`` of two windows. Raises BenchError."""
    apps = {HUB: "immortal.bench.fleet_apps:Hub"}
    apps |= dict.fromkeys(RECEIVERS, "immortal.bench.fleet_apps:Receiver")
    with context.home() as home:
        services = register(home, apps, {})
        with (home / f"{HUB}.toml").open("a") as settings:
            settings.write(TUNING)
        with running(services):
            return _Isolation(services, seconds, context.progress).measure(rounds)


class _Isolation:
    def __init__(self, services: dict[str, Service], seconds: float, progress: Callable[[str], None]) -> None:
        self._services = services
        self._hub = services[HUB]
        self._seconds = seconds
        self._progress = progress
        self._samples = int(seconds * RATE)
        self._commands = 0  # that the hub has not reported as done

    def measure(self, rounds: int) -> list[Figure]:
        rates: dict[str, list[float]] = {HEALTHY: [], FAULTY: []}
        for number in range(2 * rounds):
            faulty = number % 2 == 1
            kind = FAULTY if faulty else HEALTHY
            title = f"window {number + 1} of {2 * rounds}, {kind}"
            with self._faults(faulty):
                rates[kind].append(self._throughput(title))
                self._wait(self._is_settled(OTHERS), timeout_s=self._seconds)
                time.sleep(REST_S)
                self._progress(f"{title}: latency")
                self._command(f"sample {number} {RATE} {self._samples} {time.time_ns() // 1000}")
                self._listen(self._seconds + SETTLE_S)
            self._listen(STEP_TIMEOUT_S)
            if not self._wait(self._is_settled(RECEIVERS), timeout_s=STEP_TIMEOUT_S):
                raise BenchError(f"after {title} the hub's calls have not all arrived within {STEP_TIMEOUT_S:.0f} s")
        windows = self._latencies_ms(2 * rounds)
        title = f"calls to {len(OTHERS)} of {len(RECEIVERS)} receivers"
        figures = [Figure(title, "calls/s", "higher", rates, [Target("at least", 0.8, HEALTHY, of=FAULTY)])]
        for percent in (50, 99):
            found = [percentile(sorted(one), percent) for one in windows]
            samples = {HEALTHY: found[::2], FAULTY: found[1::2]}
            target = Target("at most", 1.25, HEALTHY, of=FAULTY)
            figures.append(Figure(f"{title}, {RATE:g}/s to each, p{percent}", "ms", "lower", samples, [target]))
        return figures

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

    def _throughput(self, title: str) -> float:
        """Return how many calls a second reached the disks of the others."""
        self._progress(f"{title}: throughput")
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
            service.request_stop()
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
        write_line(self._hub.processes()[1], line)
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
