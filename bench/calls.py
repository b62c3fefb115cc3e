"""Benchmarks of awaited calls between two services with durable logs: many at a time, in one process, and failing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from subprocess import Popen
from types import MappingProxyType
from typing import Any

import msgspec

from immortal.bench import hops
from immortal.bench.fleet_apps import STATE_SIZE_VARIABLE
from immortal.bench.harness import DISK, IMMORTAL, Context, Figure, Target, latency, rate, values
from immortal.bench.processes import (
    BenchError,
    append_latencies,
    check_all_alive,
    cpu_s,
    processes_of,
    read_line,
    register,
    running,
    start_module,
    write_line,
)
from immortal.bench.workload import BATCH_CALLS, Case, Measured, Run, measured
from immortal.client import CalleeFailed, connect

APPS = "immortal.bench.apps"
CALL_APPS = {"caller": f"{APPS}:Caller", "callee": f"{APPS}:Callee"}
SIZE_BYTES = 16
DISK_BLOCK_SIZE_BYTES = 4 << 10  # about what the commit of a small record writes
TURNS_S_MAX = 120.0
WHERE_CALLS = 1_000  # of a turn


class Caller:
    """Processes of one implementation, the first of which takes the runs. Each answers its run with what it measured:
    see :mod:`immortal.bench.workload`."""

    def __init__(
        self, name: str, processes: Mapping[str, Popen[str]], check_alive: Callable[[], None] = lambda: None
    ) -> None:
        self.name = name
        self._processes = processes
        self._driver = next(iter(processes.values()))
        self._check_alive = check_alive

    def run(self, run: Run) -> Measured:
        """Make the calls of ``run``, and return what was measured. Raises BenchError."""
        before = {name: cpu_s(one.pid) for name, one in self._processes.items()}
        write_line(self._driver, msgspec.json.encode(run).decode())
        done = msgspec.json.decode(read_line(self._driver, self.name, self._check_alive), type=Measured)
        if done.calls != run.calls:
            raise BenchError(f"{self.name} made {done.calls} calls, {run.calls} were asked for")
        done.cpu_s.update((name, cpu_s(one.pid) - before[name]) for name, one in self._processes.items())
        return done

    def about(self, calls: int, *, outstanding: int = 1, size_bytes: int = SIZE_BYTES) -> Measured:
        """Make about ``calls`` calls, ``outstanding`` at a time. Raises BenchError."""
        return self.run(Run.about(calls, outstanding, size_bytes))


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
        yield Caller(name, processes_of(services), partial(check_all_alive, services))


def compare_callers(
    context: Context,
    callers: Sequence[Caller],
    outstanding: int,
    title: str,
    limits: Mapping[str, Callable[[], Any]] | None = None,
    size_bytes: int = SIZE_BYTES,
) -> dict[str, list[Any]]:
    """Measure the calls of each caller, and the limits between them. Raises BenchError."""
    turns = {one.name: partial(one.about, outstanding=outstanding, size_bytes=size_bytes) for one in callers}
    return context.compare(title, turns, limits)


def disk_latency(folder: Path) -> Measured:
    """Measure append and fdatasync of 4 KiB, about the size of a small commit."""
    latencies_s = append_latencies(folder, DISK_BLOCK_SIZE_BYTES)
    return measured([int(1e9 * one) for one in latencies_s], sum(latencies_s))


# `immortal bench --calls`


def calls(context: Context, size_bytes: int = SIZE_BYTES) -> list[Figure]:
    """Measure awaited calls in turns with the disk alone."""
    figures: list[Figure] = []
    with context.home() as home, immortal_caller(home / "home") as caller:
        for outstanding in context.amounts.outstanding:
            title = f"{outstanding} waiting, {size_bytes} B"
            limits = {DISK: partial(disk_latency, home)}
            results = compare_callers(context, [caller], outstanding, title, limits, size_bytes)
            ours = {IMMORTAL: results[IMMORTAL]}
            figures += [latency(title, "p50", results), latency(title, "p99", results), rate(title, ours)]
            figures.append(cpu_per_call(title, results[IMMORTAL]))
    context.progress("a turn without sockets, disk and wake-ups")
    with context.home() as home, start_module(APPS, "turns", cwd=home) as process:
        turns = msgspec.json.decode(read_line(process, "the process of turns", timeout_s=TURNS_S_MAX), type=Measured)
    samples = {IMMORTAL: [1e6 / turns.calls_per_s]}
    figures.append(Figure("one awaited call without sockets, disk and wake-ups: CPU", "µs per call", "lower", samples))
    return figures


def cpu_per_call(title: str, results: Sequence[Measured]) -> Figure:
    """Return CPU time of each process for a call, in µs."""
    samples = {name: [1e6 * one.cpu_s[name] / one.calls for one in results] for name in results[0].cpu_s}
    samples["all processes"] = [one.cpu_us for one in results]
    return Figure(f"{title}: CPU", "µs per call", "lower", samples)


# `immortal bench --calls --where`


def measure_hops(context: Context, size_bytes: int = SIZE_BYTES) -> list[Figure]:
    """Measure the hops of one awaited call, in µs, beside the calls in the same processes without stamps."""
    samples: dict[str, list[float]] = {}
    with context.home() as home, immortal_caller(home / "plain") as plain:
        stamps = home / "stamps"
        stamps.mkdir()
        services = register(home / "stamped", dict(CALL_APPS), {hops.FOLDER_VARIABLE: str(stamps)})
        for one in services.values():
            one.runner = ("immortal.bench.hops",)
        with running(services):
            stamped = Caller("stamped", processes_of(services), partial(check_all_alive, services))
            pids = {
                (name, title): process.pid
                for name, one in services.items()
                for title, process in zip((hops.COORDINATOR, hops.APP), one.processes(), strict=True)
            }
            warm, calls = plain.about(WHERE_CALLS), min(WHERE_CALLS, hops.STAMPS_MAX // 64)
            for _ in range(context.amounts.repeats):
                context.progress("one awaited call, hop by hop")
                samples.setdefault("p50 without stamps", []).append(plain.about(warm.calls).p50_us)
                samples.setdefault("p50 with stamps", []).append(stamped.about(calls).p50_us)
                for name, time_us in hops.hops(stamps, pids, calls).items():
                    samples.setdefault(name, []).append(time_us)
    return [Figure(f"{size_bytes} B: {name}", "µs", "lower", {IMMORTAL: some}) for name, some in samples.items()]


# `immortal bench --embedded`


SIDECARS, EMBEDDED = f"{IMMORTAL}, sidecars", f"{IMMORTAL}, one process"


def embedded(context: Context, size_bytes: int = SIZE_BYTES) -> list[Figure]:
    """Measure services in one process beside those with sidecars: latency and processor time of a call."""
    figures: list[Figure] = []
    with context.home() as home, contextlib.ExitStack() as stack:
        sides = {
            SIDECARS: stack.enter_context(_with_sidecars(home / "sidecars")),
            EMBEDDED: stack.enter_context(_in_one_process(home / "embedded")),
        }
        for case in Case:
            batch = BATCH_CALLS if case is Case.ONE_WAY else 1

            def about(rounds: int, caller: Caller, case: Case = case) -> Measured:
                return caller.run(Run(1, max(2, rounds), size_bytes, case))

            turns = {name: partial(about, caller=callers[case is Case.CLIENT]) for name, callers in sides.items()}
            results = context.compare(case, turns, first_calls=max(2, 200 // batch))
            targets = [Target("at most", 1, SIDECARS, of=EMBEDDED)]
            title = f"{case}, whole batches" if batch > 1 else str(case)
            figures.append(latency(title, "p50", results, targets))
            cpu = {name: [one / batch for one in some] for name, some in values(results, "cpu_us").items()}
            figures.append(Figure(f"{case}: CPU", "µs per call", "lower", cpu, targets))
    return figures


@contextlib.contextmanager
def _with_sidecars(home: Path) -> Iterator[tuple[Caller, Caller]]:
    """Yield the caller between two services, and an outside one."""
    services = register(home, dict(CALL_APPS), {})
    with running(services), _process(home, services, "client") as client:
        processes = processes_of(services)
        yield Caller(SIDECARS, processes), Caller(SIDECARS, {"client": client, **processes})


@contextlib.contextmanager
def _in_one_process(home: Path) -> Iterator[tuple[Caller, Caller]]:
    services = register(home, dict(CALL_APPS), {})
    with _process(home, services, "services") as process:
        for service in services.values():
            service.wait_for_phase("normal")
        with _process(home, services, "client") as client:
            yield Caller(EMBEDDED, {"services": process}), Caller(EMBEDDED, {"client": client, "services": process})


@contextlib.contextmanager
def _process(home: Path, services: Mapping[str, Any], role: str) -> Iterator[Popen[str]]:
    environment = services["caller"].environment
    with (
        open(home / "errors.txt", "a") as errors,
        start_module(APPS, role, cwd=home, env=environment, stderr=errors) as process,
    ):
        yield process


# `immortal bench --failing`


NAME = "ledger"
WORKING_CALLS = 200
FAILING_CALLS_MAX = 60
FAILING_SECONDS_MAX = 60.0
TIMEOUT_S = 300.0  # of the start, since a state of 1 GiB is created, encoded and written first; and of a call


def failing(context: Context) -> list[Figure]:
    """Measure calls that fail, from a client and one at a time, beside calls that work, by the size of the state.

    A failure restores the state: the first one of a large state is a recovery from its checkpoint; later ones, and all
    of a small state, start from a copy in memory.
    """
    figures = []
    for size_mib in context.amounts.state_sizes_mib:
        title = f"a client's call, a state of {size_mib} MiB"
        context.progress(title)
        with context.home() as home:
            figures.append(Figure(title, "ms", "lower", _failing_ms(home, size_mib)))
    return figures


def _failing_ms(home: Path, size_mib: int) -> dict[str, list[float]]:
    service = register(home, {NAME: "immortal.bench.fleet_apps:Ledger"}, {STATE_SIZE_VARIABLE: f"{size_mib << 20}"})[
        NAME
    ]
    service.start()
    try:
        service.wait_for_phase("normal", timeout_s=TIMEOUT_S)
        with connect(NAME, home=home, timeout=TIMEOUT_S) as ledger:

            def booked_ms(works: bool) -> float:
                begun = time.perf_counter()
                with contextlib.suppress(CalleeFailed):
                    ledger.book(works)
                return 1e3 * (time.perf_counter() - begun)

            worked = [booked_ms(True) for _ in range(WORKING_CALLS)]
            first_ms = booked_ms(False)
            failed: list[float] = []
            begun = time.perf_counter()
            while len(failed) < FAILING_CALLS_MAX and (not failed or time.perf_counter() - begun < FAILING_SECONDS_MAX):
                booked_ms(True)  # a client whose calls all fail is refused after a while
                failed.append(booked_ms(False))
            expected = WORKING_CALLS + len(failed) + 1
            if (count := ledger.book(True)) != expected:
                raise BenchError(f"the state counts {count} calls, {expected} have worked")
    finally:
        service.kill()
    return {"works": worked, "fails": failed, "the first failure": [first_ms]}
