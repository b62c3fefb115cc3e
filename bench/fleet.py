"""Benchmark of many instances on one machine that call each other: starts, work, stops, and their costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from immortal.bench.fleet_apps import CALLS_VARIABLE, NAME_VARIABLE, NEIGHBOURS_VARIABLE
from immortal.bench.processes import MIB, BenchError, Service, final_state, memory_of, processor_s, register
from immortal.protocol.command_line import echo, print_table

APP = "immortal.bench.fleet_apps:Member"
NEIGHBOURS = 10
CALLS = 100  # to each neighbour
IDLE_S = 30.0
STARTED_AT_ONCE = 8  # more would only wait for each other's imports
PAIR_MIB = 60  # of memory, at most
SETTLE_S = 3.0  # after a start
IDLE_NAME = "idle-one"
STEP_TIMEOUT_S = 900.0  # for all to start, to have made their calls, or to stop


@dataclass(frozen=True, slots=True)
class Idle:
    """Usage of idle processes of one kind: the mean and the maximum of one process."""

    resident_mib: tuple[float, float]
    proportional_mib: tuple[float, float]
    own_mib: tuple[float, float]
    processor_percent: tuple[float, float]  # of one core


@dataclass(frozen=True, slots=True)
class FleetResult:
    """Results of a fleet. ``calls``: of all, as each receiver counted them in the state after its clean stop.

    ``registered``: instances, of which ``instances`` ran, limited by memory. ``idle_percent``: of a core, for a
    coordinator beside all registered ones; ``alone_percent``: for a coordinator that is the only one.
    """

    registered: int
    idle_percent: float
    alone_percent: float
    instances: int
    neighbours: int
    calls: int
    start_s: float
    work_s: float  # from the last instance's start; the first ones had already begun
    stop_s: float
    coordinators: Idle
    apps: Idle


def measure_fleet(
    instances: int,
    *,
    neighbours: int = NEIGHBOURS,
    calls: int = CALLS,
    idle_s: float = IDLE_S,
    curve: bool = False,
    home: Path,
    progress: Callable[[str], None] = lambda text: None,
) -> FleetResult:
    """Start ``instances``, each with its app, let each make ``calls`` to each of ``neighbours`` others, stop them.

    ``home``: for the logs. Raises BenchError.
    """
    registered = instances
    instances = min(instances, _free_mib() // PAIR_MIB)
    neighbours = min(neighbours, instances - 1)
    if neighbours < 1:
        raise BenchError(f"a fleet of {instances} has nobody to call: 2 instances at least, of {PAIR_MIB} MiB each")
    names = [f"member-{number:03d}" for number in range(registered)]
    progress(f"registering {registered} instances")
    services = register(home / "fleet", dict.fromkeys(names, APP), {CALLS_VARIABLE: str(calls)}, curve=curve)
    idle, alone = _idle_percents(home, idle_s, curve, progress)
    names = names[:instances]
    services = {name: services[name] for name in names}
    callers: dict[str, list[str]] = {name: [] for name in names}
    for number, (name, service) in enumerate(services.items()):
        called = [names[(number + step) % instances] for step in range(1, neighbours + 1)]
        for other in called:
            callers[other].append(name)
        service.environment |= {NAME_VARIABLE: name, NEIGHBOURS_VARIABLE: ",".join(called)}
    try:
        result = _measure(list(services.values()), callers, neighbours, calls, idle_s, progress)
    finally:
        for service in services.values():
            service.kill()
    return replace(result, registered=registered, idle_percent=idle, alone_percent=alone)


def _free_mib() -> int:
    """Return the MiB of memory that new processes can have."""
    (line,) = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:")]
    return int(line.split()[1]) >> 10


def _idle_percents(home: Path, idle_s: float, curve: bool, progress: Callable[[str], None]) -> tuple[float, float]:
    """Measure an idle coordinator beside all that are registered in ``home``, and one alone: percent of a core."""
    variables = {CALLS_VARIABLE: "0", NAME_VARIABLE: IDLE_NAME, NEIGHBOURS_VARIABLE: ""}
    both = [
        register(place, {IDLE_NAME: APP}, variables, curve=curve)[IDLE_NAME]
        for place in (home / "fleet", home / "alone")
    ]
    try:
        for service in both:
            service.start()
        for service in both:
            service.wait_for_phase("normal", timeout_s=STEP_TIMEOUT_S)
        progress(f"two are idle for {idle_s:.0f} s")
        pids = [service.processes()[0].pid for service in both]
        time.sleep(SETTLE_S)
        before, begun = [processor_s(pid) for pid in pids], time.perf_counter()
        time.sleep(idle_s)
        seconds = time.perf_counter() - begun
        idle, alone = (100 * (processor_s(pid) - used) / seconds for pid, used in zip(pids, before, strict=True))
        _stop(both)
    finally:
        for service in both:
            service.kill()
    return idle, alone


def _measure(
    services: Sequence[Service],
    callers: dict[str, list[str]],
    neighbours: int,
    calls: int,
    idle_s: float,
    progress: Callable[[str], None],
) -> FleetResult:
    begun = time.perf_counter()
    for first in range(0, len(services), STARTED_AT_ONCE):
        progress(f"starting, {first} of {len(services)} run")
        group = services[first : first + STARTED_AT_ONCE]
        for service in group:
            service.start()
        for service in group:
            service.wait_for_phase("normal", timeout_s=STEP_TIMEOUT_S)
    started = time.perf_counter()
    for number, service in enumerate(services):
        progress(f"calling, {number} of {len(services)} have all of theirs")
        _wait_for_calls(service, callers[service.settings.name], calls)
    worked = time.perf_counter()
    progress(f"idle for {idle_s:.0f} s")
    coordinators, apps = _idle(services, idle_s)
    progress("stopping")
    stopping = time.perf_counter()
    _stop(services)
    stopped = time.perf_counter()
    progress("counting")
    for service in services:
        _check_state(service, callers[service.settings.name], calls)
    return FleetResult(
        len(services),
        0.0,
        0.0,
        len(services),
        neighbours,
        len(services) * neighbours * calls,
        start_s=started - begun,
        work_s=worked - started,
        stop_s=stopped - stopping,
        coordinators=coordinators,
        apps=apps,
    )


def _wait_for_calls(service: Service, callers: Sequence[str], calls: int) -> None:
    def has_all(status: dict[str, object]) -> bool:
        inputs, outputs = status["inputs"], status["outputs"]
        assert isinstance(inputs, dict)
        assert isinstance(outputs, dict)
        received = all(inputs.get(name, {}).get("position") == calls for name in callers)
        return received and not status["backlog_records"] and not status["unsent_bytes"]

    service.wait_for(has_all, f"has not all {calls} calls of each of {len(callers)} callers", STEP_TIMEOUT_S)


def _idle(services: Sequence[Service], idle_s: float) -> tuple[Idle, Idle]:
    pids = [[process.pid for process in service.processes()] for service in services]
    before = [[processor_s(pid) for pid in pair] for pair in pids]
    begun = time.perf_counter()
    time.sleep(idle_s)
    seconds = time.perf_counter() - begun
    after = [[processor_s(pid) for pid in pair] for pair in pids]
    coordinators, apps = (
        _summary(
            [pair[kind] for pair in pids],
            [late[kind] - early[kind] for early, late in zip(before, after, strict=True)],
            seconds,
        )
        for kind in (0, 1)
    )
    for service in services:
        service.check_alive()
    return coordinators, apps


def _summary(pids: Sequence[int], used_s: Sequence[float], seconds: float) -> Idle:
    memories = [memory_of(pid) for pid in pids]
    return Idle(
        _mean_and_most(memory.resident / MIB for memory in memories),
        _mean_and_most(memory.proportional / MIB for memory in memories),
        _mean_and_most(memory.own / MIB for memory in memories),
        _mean_and_most(100 * used / seconds for used in used_s),
    )


def _mean_and_most(values: Iterator[float]) -> tuple[float, float]:
    found = list(values)
    return sum(found) / len(found), max(found)


def _stop(services: Sequence[Service]) -> None:
    """Stop all cleanly: the last checkpoint of each is after its last record."""
    deadline = time.perf_counter() + STEP_TIMEOUT_S
    for first in range(0, len(services), STARTED_AT_ONCE):
        group = services[first : first + STARTED_AT_ONCE]
        for service in group:
            service.ask_to_stop()
        for service in group:
            service.wait_until_stopped(max(0.0, deadline - time.perf_counter()))


def _check_state(service: Service, callers: Sequence[str], calls: int) -> None:
    counts = final_state(service, {"taken": dict[str, int]})["taken"]
    if counts != dict.fromkeys(callers, calls):
        name = service.settings.name
        raise BenchError(f"{name!r} has counted {counts}, expected {calls} calls of each of {', '.join(callers)}")


# Output for people.


def print_fleet(result: FleetResult) -> None:
    if result.instances < result.registered:
        echo(f"{result.registered} instances are registered; memory has room for {result.instances}, which run")
    echo(
        f"an idle coordinator with {result.registered:,} registered takes {result.idle_percent:.2f} % of a core, "
        f"where it is alone {result.alone_percent:.2f} %"
    )
    echo(
        f"{result.instances} instances, each with its app, started in {result.start_s:.1f} s, "
        f"and stopped cleanly in {result.stop_s:.1f} s"
    )
    echo(
        f"{result.calls:,} calls, each instance to {result.neighbours} others, all counted once and in order, "
        f"the last {result.work_s:.2f} s after the last start"
    )
    heads = ("resident MiB", "proportional MiB", "own MiB", "CPU % of a core")
    rows = (
        (
            name,
            *(f"{mean:.1f} ({most:.1f})" for mean, most in (idle.resident_mib, idle.proportional_mib, idle.own_mib)),
            f"{idle.processor_percent[0]:.2f} ({idle.processor_percent[1]:.2f})",
        )
        for name, idle in (("coordinator", result.coordinators), ("app", result.apps))
    )
    print_table(("", *heads), rows, right=heads, title="idle, each process: mean (most)")
