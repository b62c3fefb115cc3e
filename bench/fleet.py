"""Benchmark of many instances on one machine that call each other: starts, work, stops, and their costs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from immortal.bench.fleet_apps import CALLS_VARIABLE, NAME_VARIABLE, NEIGHBOURS_VARIABLE
from immortal.bench.harness import Context, Figure, values
from immortal.bench.processes import BenchError, Service, cpu_s, final_state, memory_of, register, running

APP = "immortal.bench.fleet_apps:Member"
NEIGHBOURS = 10
CALLS = 100  # to each neighbour
IDLE_S = 30.0
STARTED_AT_ONCE = 8  # more would only wait for each other's imports
PAIR_MIB = 60  # of memory, at most
SETTLE_S = 3.0  # after a start
IDLE_NAME = "idle-one"
KINDS = ("coordinator", "app")
STEP_TIMEOUT_S = 900.0  # for all to start, to have made their calls, or to stop


def fleet(
    context: Context,
    instances: int,
    *,
    neighbours: int = NEIGHBOURS,
    calls: int = CALLS,
    idle_s: float = IDLE_S,
    curve: bool = False,
) -> list[Figure]:
    """Start ``instances``, each with its app, let each make ``calls`` to each of ``neighbours`` others, stop them.

    All are registered; as many as memory has room for run. Each receiver counts its calls: they are checked in its
    state after its clean stop. Raises BenchError.
    """
    registered = instances
    instances = min(instances, _free_mib() // PAIR_MIB)
    neighbours = min(neighbours, instances - 1)
    if neighbours < 1:
        raise BenchError(f"a fleet of {instances} has nobody to call: 2 instances at least, of {PAIR_MIB} MiB each")
    names = [f"member-{number:03d}" for number in range(registered)]
    context.progress(f"registering {registered} instances")
    with context.home() as home:
        services = register(home / "fleet", dict.fromkeys(names, APP), {CALLS_VARIABLE: str(calls)}, curve=curve)
        figures = [_idle_coordinators(context, home, idle_s, registered, curve)]
        names = names[:instances]
        callers: dict[str, list[str]] = {name: [] for name in names}
        for number, name in enumerate(names):
            called = [names[(number + step) % instances] for step in range(1, neighbours + 1)]
            for other in called:
                callers[other].append(name)
            services[name].environment |= {NAME_VARIABLE: name, NEIGHBOURS_VARIABLE: ",".join(called)}
        with contextlib.ExitStack() as stack:
            chosen = [services[name] for name in names]
            for service in chosen:
                stack.callback(service.kill)
            return figures + _measure(context, chosen, callers, calls, idle_s)


def _free_mib() -> int:
    """Return the MiB of memory that new processes can have."""
    (line,) = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:")]
    return int(line.split()[1]) >> 10


def _idle_coordinators(context: Context, home: Path, idle_s: float, registered: int, curve: bool) -> Figure:
    """Measure an idle coordinator beside all that are registered in ``home``, and one alone."""
    variables = {CALLS_VARIABLE: "0", NAME_VARIABLE: IDLE_NAME, NEIGHBOURS_VARIABLE: ""}
    places = {f"beside {registered:,} registered": home / "fleet", "alone": home / "alone"}
    both = {
        name: register(place, {IDLE_NAME: APP}, variables, curve=curve)[IDLE_NAME] for name, place in places.items()
    }
    with running(both):
        context.progress(f"two are idle for {idle_s:.0f} s")
        time.sleep(SETTLE_S)
        percents = _percents([service.processes()[0].pid for service in both.values()], idle_s)
        _stop(list(both.values()))
    samples = {name: [percent] for name, percent in zip(both, percents, strict=True)}
    return Figure("an idle coordinator", "% of a core", "lower", samples)


def _percents(pids: Sequence[int], idle_s: float) -> list[float]:
    """Return the CPU time of processes for a while, in percent of a core."""
    before, begun = [cpu_s(pid) for pid in pids], time.perf_counter()
    time.sleep(idle_s)
    seconds = time.perf_counter() - begun
    return [100 * (cpu_s(pid) - used) / seconds for pid, used in zip(pids, before, strict=True)]


def _measure(
    context: Context, services: Sequence[Service], callers: dict[str, list[str]], calls: int, idle_s: float
) -> list[Figure]:
    begun = time.perf_counter()
    for first in range(0, len(services), STARTED_AT_ONCE):
        context.progress(f"starting, {first} of {len(services)} run")
        group = services[first : first + STARTED_AT_ONCE]
        for service in group:
            service.start()
        for service in group:
            service.wait_for_phase("normal", timeout_s=STEP_TIMEOUT_S)
    started = time.perf_counter()
    for number, service in enumerate(services):
        context.progress(f"calling, {number} of {len(services)} have all of theirs")
        _wait_for_calls(service, callers[service.settings.name], calls)
    worked = time.perf_counter()
    context.progress(f"idle for {idle_s:.0f} s")
    idle = _idle(services, idle_s)
    context.progress("stopping")
    stopping = time.perf_counter()
    _stop(services)
    stopped = time.perf_counter()
    context.progress("counting")
    for service in services:
        _check_state(service, callers[service.settings.name], calls)
    steps = {
        "all start": started - begun,
        f"all {calls * sum(map(len, callers.values())):,} calls are counted, after that": worked - started,
        "all stop": stopped - stopping,
    }
    samples = {what: [seconds] for what, seconds in steps.items()}
    return [Figure(f"{len(services)} instances, each with its app", "s", "lower", samples), *idle]


def _wait_for_calls(service: Service, callers: Sequence[str], calls: int) -> None:
    def has_all(status: dict[str, object]) -> bool:
        inputs, outputs = status["inputs"], status["outputs"]
        assert isinstance(inputs, dict)
        assert isinstance(outputs, dict)
        received = all(inputs.get(name, {}).get("position") == calls for name in callers)
        return received and not status["backlog_records"] and not status["unsent_bytes"]

    service.wait_for(has_all, f"has not all {calls} calls of each of {len(callers)} callers", STEP_TIMEOUT_S)


def _idle(services: Sequence[Service], idle_s: float) -> list[Figure]:
    pids = {kind: [service.processes()[index].pid for service in services] for index, kind in enumerate(KINDS)}
    percents = _percents([pid for some in pids.values() for pid in some], idle_s)
    memories = {kind: [memory_of(pid) for pid in some] for kind, some in pids.items()}
    for service in services:
        service.check_alive()
    cpu = dict(zip(KINDS, (percents[: len(services)], percents[len(services) :]), strict=True))
    return [
        *(
            Figure(f"an idle process, {what} memory", "MiB", "lower", values(memories, what))
            for what in ("resident", "proportional", "own")
        ),
        Figure("an idle process, CPU", "% of a core", "lower", cpu),
    ]


def _stop(services: Sequence[Service]) -> None:
    """Stop all cleanly: the last checkpoint of each is after its last record."""
    deadline = time.perf_counter() + STEP_TIMEOUT_S
    for first in range(0, len(services), STARTED_AT_ONCE):
        group = services[first : first + STARTED_AT_ONCE]
        for service in group:
            service.request_stop()
        for service in group:
            service.wait_until_stopped(max(0.0, deadline - time.perf_counter()))


def _check_state(service: Service, callers: Sequence[str], calls: int) -> None:
    counts = final_state(service, {"taken": dict[str, int]})["taken"]
    if counts != dict.fromkeys(callers, calls):
        name = service.settings.name
        raise BenchError(f"{name!r} has counted {counts}, expected {calls} calls of each of {', '.join(callers)}")
