"""Benchmarks of awaited calls between two services with durable logs, and of calls that fail.

Awaited calls and the disk alone are measured in turns, so that other load on the machine affects both alike.

Failing calls come from a client, one at a time, beside calls that work, by the size of the state. A failure restores
the state: the first one of a large state is a recovery from its checkpoint; later ones, and all of a small state, start
from a copy in memory.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from types import MappingProxyType
from typing import Any

import msgspec

from immortal.bench.fleet_apps import STATE_SIZE_VARIABLE
from immortal.bench.processes import BenchError, Service, append_latencies, cpu_s, hear, register, tell
from immortal.bench.workload import Measured, Run, decode_measured, encode_run, percentile
from immortal.client import CalleeFailed, connect
from immortal.protocol.command_line import echo, print_table

CALL_APPS = {"caller": "immortal.bench.apps:Caller", "callee": "immortal.bench.apps:Callee"}
IMMORTAL = "immortal"
WARM_UP_CALLS = 200
DISK_BLOCK_SIZE_BYTES = 4 << 10  # about what the commit of a small record writes


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True)
class Column:
    """Results for one number of outstanding calls. ``cpu_us_per_call``: of all processes together, and by process."""

    outstanding: int
    calls: int  # in all turns
    p50_us: Spread
    p99_us: Spread
    calls_per_s: Spread
    cpu_us_per_call: float
    cpu_us_per_call_by_process: dict[str, float]


@dataclass(frozen=True, slots=True)
class CallResults:
    size_bytes: int
    repeats: int
    columns: list[Column]
    disk_p50_us: Spread  # append and fdatasync of DISK_BLOCK_SIZE_BYTES
    disk_p99_us: Spread
    turns: TurnCosts


class Caller:
    """Processes of one implementation; the first process takes the runs."""

    def __init__(self, name: str, processes: dict[str, Popen[str]], check_alive: Callable[[], None]) -> None:
        self.name = name
        self.cpu_s = dict.fromkeys(processes, 0.0)  # of all runs that were measured
        self._processes = processes
        self._process = next(iter(processes.values()))
        self._check_alive = check_alive

    def run(self, run: Run) -> Measured:
        """Make the calls of ``run``, and return what was measured. Raises BenchError."""
        before = {name: cpu_s(one.pid) for name, one in self._processes.items()}
        tell(self._process, encode_run(run))
        line = hear(self._process, self.name, self._check_alive)
        for name, one in self._processes.items():
            self.cpu_s[name] += cpu_s(one.pid) - before[name]
        measured = decode_measured(line)
        if measured.calls != run.calls:
            raise BenchError(f"{self.name} made {measured.calls} calls, {run.calls} were asked for")
        return measured


def run_call_benchmark(
    outstanding: Sequence[int],
    *,
    size_bytes: int,
    seconds: float,
    repeats: int,
    home: Path,
    progress: Callable[[str], None] = lambda text: None,
) -> CallResults:
    """Measure each number of calls ``outstanding`` for about ``seconds``, ``repeats`` times, in turns.

    ``home``: for the logs. Raises BenchError.
    """
    with immortal_caller(home / "home") as caller:
        columns: list[Column] = []
        disk: list[list[float]] = []
        for count in outstanding:
            progress(f"{count} outstanding: warming up")
            rate = warm_up(caller, count, size_bytes, seconds)
            caller.cpu_s = dict.fromkeys(caller.cpu_s, 0.0)
            turns: list[Measured] = []
            for turn in range(repeats):
                progress(f"{count} outstanding: {turn + 1} of {repeats}")
                disk.append(append_latencies(home, DISK_BLOCK_SIZE_BYTES))
                turns.append(caller.run(run_for(count, size_bytes, rate, seconds)))
            columns.append(_column(caller, count, turns))
        return CallResults(
            size_bytes,
            repeats,
            columns,
            _spread([1e6 * percentile(ordered, 50) for ordered in disk]),
            _spread([1e6 * percentile(ordered, 99) for ordered in disk]),
            measure_turns(),
        )


def run_for(outstanding: int, size_bytes: int, calls_per_s: float, seconds: float) -> Run:
    return Run(outstanding, max(1, round(calls_per_s * seconds / outstanding)), size_bytes)


def warm_up(caller: Caller, outstanding: int, size_bytes: int, seconds: float) -> float:
    """Return about how many calls/s fit: the first run finds the processes cold, the second one is measured."""
    calls_per_s = WARM_UP_CALLS / seconds
    for _ in range(2):
        measured = caller.run(run_for(outstanding, size_bytes, calls_per_s, seconds))
        calls_per_s = measured.calls_per_s / 4
    return measured.calls_per_s


def _column(caller: Caller, outstanding: int, turns: list[Measured]) -> Column:
    calls = sum(one.calls for one in turns)
    by_process = {name: 1e6 * spent_s / calls for name, spent_s in caller.cpu_s.items()}
    return Column(
        outstanding,
        calls,
        _spread([one.p50_us for one in turns]),
        _spread([one.p99_us for one in turns]),
        _spread([one.calls_per_s for one in turns]),
        sum(by_process.values()),
        by_process,
    )


def _spread(values: list[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


# --- processes --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(services: Mapping[str, Service]) -> Iterator[None]:
    """Run all services until the end of the block."""
    try:
        for service in services.values():
            service.start()
        for service in services.values():
            service.wait_for_phase("normal")
        yield
    finally:
        for service in services.values():
            service.kill()


@contextlib.contextmanager
def immortal_caller(
    home: Path,
    apps: Mapping[str, str] = CALL_APPS,
    variables: Mapping[str, str] = MappingProxyType({}),
    *,
    name: str = IMMORTAL,
    curve: bool = False,
    **settings: Any,
) -> Iterator[Caller]:
    """Run ``apps``; the first one takes the runs. ``variables``: of the environment of all processes. ``settings``: of
    the instances, as ``immortal.coordinator.instances.registry.Registry.register`` takes them."""
    services = register(home, dict(apps), dict(variables), curve=curve, **settings)
    with running(services):
        yield Caller(name, processes_of(services), lambda: _check_alive(services))


def processes_of(services: Mapping[str, Service]) -> dict[str, Popen[str]]:
    processes = {}
    for name, service in services.items():
        for what, process in (("app", service.app), ("coordinator", service.coordinator)):
            if process is not None:
                processes[f"{name}'s {what}"] = process
    return processes


def _check_alive(services: Mapping[str, Service]) -> None:
    for service in services.values():
        service.check_alive()


# The cost of a turn of the core by itself, without sockets, disk and wake-ups.


IDLE_PEERS = (10, 1_000)
TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class TurnCosts:
    """Processor time in µs, the least of several runs.

    ``awaited_us``: an awaited call between two instances in one process, apps included. The others: the core alone, for
    a call to one peer and its acknowledgement, with as many peers as IDLE_PEERS says.
    """

    awaited_us: float
    few_peers_us: float
    many_peers_us: float


def measure_turns() -> TurnCosts:
    """Measure the turns in a process of their own. Raises BenchError."""
    command = [sys.executable, "-P", "-m", "immortal.bench.turn_apps"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise BenchError(f"the turns could not be measured: {done.stderr.strip()[-2000:]}")
    return msgspec.json.decode(done.stdout, type=TurnCosts)


# Output for people.


def print_calls(results: CallResults) -> None:
    heads = ("waiting", "p50, µs", "p99, µs", "calls/s", "CPU, µs/call")
    rows = (
        (
            f"{column.outstanding}",
            *(_spread_in_words(one) for one in (column.p50_us, column.p99_us, column.calls_per_s)),
            f"{column.cpu_us_per_call:,.1f}",
        )
        for column in results.columns
    )
    title = f"calls of {results.size_bytes} B that wait for their answers: median (lowest-highest)"
    print_table(heads, rows, right=heads, title=title)
    echo(
        f"the disk alone: append + fdatasync of {DISK_BLOCK_SIZE_BYTES >> 10} KiB: p50 "
        f"{results.disk_p50_us.median:,.0f} µs, p99 {results.disk_p99_us.median:,.0f} µs"
    )
    few, many = IDLE_PEERS
    echo(
        f"without sockets, disk and wake-ups, CPU: {results.turns.awaited_us:,.0f} µs an awaited call; in the core "
        f"{results.turns.few_peers_us:,.0f} µs a call to one of {few} peers, {results.turns.many_peers_us:,.0f} µs to "
        f"one of {many:,}"
    )


def _spread_in_words(spread: Spread) -> str:
    return f"{spread.median:,.0f} ({spread.lowest:,.0f}-{spread.highest:,.0f})"


NAME = "ledger"
STATES_SIZE_BYTES = (1 << 20, 1 << 30)
WORKING_CALLS = 200
FAILING_CALLS_MAX = 60
FAILING_SECONDS_MAX = 60.0
START_TIMEOUT_S = 300.0  # a state of 1 GiB is created, encoded and written first
CALL_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class FailingResult:
    """Latencies for one size of the state: how long a client waits for each kind of call, in milliseconds."""

    state_size_bytes: int
    works_p50_ms: float
    first_failure_ms: float
    failures: int  # after the first
    fails_p50_ms: float
    fails_p99_ms: float


def measure_failing(
    states_size_bytes: Sequence[int] = STATES_SIZE_BYTES,
    *,
    home: Path,
    progress: Callable[[str], None] = lambda text: None,
) -> list[FailingResult]:
    """Measure failing calls. ``home``: for the logs. Raises BenchError."""
    results = []
    for number, size_bytes in enumerate(states_size_bytes):
        progress(f"a state of {size_bytes >> 20} MiB")
        results.append(_measure(home / str(number), size_bytes))
    return results


def _measure(home: Path, size_bytes: int) -> FailingResult:
    variables = {STATE_SIZE_VARIABLE: str(size_bytes)}
    service = register(home, {NAME: "immortal.bench.fleet_apps:Ledger"}, variables)[NAME]
    service.start()
    try:
        service.wait_for_phase("normal", timeout_s=START_TIMEOUT_S)
        with connect(NAME, home=home, timeout=CALL_TIMEOUT_S) as ledger:
            worked = [_timed(lambda: ledger.book(True)) for _ in range(WORKING_CALLS)]
            first_ms = _timed(lambda: ledger.book(False))
            failed: list[float] = []
            begun = time.perf_counter()
            while len(failed) < FAILING_CALLS_MAX and (not failed or time.perf_counter() - begun < FAILING_SECONDS_MAX):
                _timed(lambda: ledger.book(True))  # a client whose calls all fail is refused after a while
                failed.append(_timed(lambda: ledger.book(False)))
            expected = WORKING_CALLS + len(failed) + 1
            if (count := ledger.book(True)) != expected:
                raise BenchError(f"the state counts {count} calls, {expected} have worked")
    finally:
        service.kill()
    failed.sort()
    return FailingResult(
        size_bytes,
        percentile(sorted(worked), 50),
        first_ms,
        len(failed),
        percentile(failed, 50),
        percentile(failed, 99),
    )


def _timed(call: Callable[[], int]) -> float:
    """Return how long ``call`` took, in milliseconds."""
    begun = time.perf_counter()
    with contextlib.suppress(CalleeFailed):
        call()
    return (time.perf_counter() - begun) * 1000


# Output for people.


def print_failing(results: Sequence[FailingResult]) -> None:
    heads = ("state, MiB", "works, p50", "first failure", "fails, p50", "fails, p99", "failures")
    rows = (
        (
            f"{one.state_size_bytes / (1 << 20):,.0f}",
            f"{one.works_p50_ms:,.2f}",
            f"{one.first_failure_ms:,.1f}",
            f"{one.fails_p50_ms:,.2f}",
            f"{one.fails_p99_ms:,.1f}",
            f"{one.failures:,}",
        )
        for one in results
    )
    title = "one call at a time, from a client, in ms: what a failure costs, which puts the state back"
    print_table(heads, rows, right=heads, title=title)
