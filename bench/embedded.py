"""Benchmark of services in one process, and of the same with sidecars: latency and processor time of a call.

A ratio is taken in each turn, and their median is the result: other load on the machine affects both alike.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

from immortal.bench.calls import processes_of, running
from immortal.bench.processes import BenchError, Service, append_latencies, cpu_s, hear, register, start_module, tell
from immortal.bench.workload import Case, Measured, Task, decode_measured, encode_run, percentile
from immortal.protocol.command_line import echo, print_table

MODULE = "immortal.bench.embedded_apps"
APPS = {"caller": f"{MODULE}:Caller", "callee": f"{MODULE}:Callee"}
EMBEDDED, SIDECARS = "one process", "sidecars"
CLIENT = "client"
WARM_UP_CALLS = 200
DISK_BLOCK_SIZE_BYTES = 4 << 10  # about what the commit of a small record writes


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one call as medians of the turns: latency, CPU time of all processes, switches of threads.
    ``client_cpu_us``: the outside client's part. ``switches``: how often threads waited, except the client's."""

    p50_us: float
    cpu_us: float
    client_cpu_us: float
    switches: float


@dataclass(frozen=True, slots=True)
class EmbeddedRow:
    """Results of one case. A ratio is one process divided by sidecars: the median of the ratios of all turns."""

    case: str
    turns: int
    sidecars: Cost
    embedded: Cost
    p50_ratio: float
    cpu_ratio: float
    cpu_ratio_without_client: float


@dataclass(frozen=True, slots=True)
class EmbeddedResults:
    size_bytes: int
    rows: list[EmbeddedRow]
    disk_p50_us: float  # append and fdatasync of DISK_BLOCK_SIZE_BYTES


class Side:
    """Way to run the services (in one process, or with sidecars), with its client."""

    def __init__(self, name: str, services: dict[str, Popen[str]], driver: Popen[str], client: Popen[str]) -> None:
        self.name = name
        self._services = services  # the processes that a call goes through
        self._driver, self._client = driver, client

    def run(self, task: Task) -> tuple[Measured, Cost]:
        """Run ``task``, and return what was measured. Raises BenchError."""
        process = self._client if task.case is Case.CLIENT else self._driver
        before = self._spent()
        tell(process, encode_run(task))
        said = hear(process, f"{self.name}: a process")
        spent_s, client_s, switches = (now - then for now, then in zip(self._spent(), before, strict=True))
        done = decode_measured(said)
        if done.calls != task.rounds:
            raise BenchError(f"{self.name}: {done.calls} rounds were made, {task.rounds} were asked for")
        calls = task.rounds * task.case.calls_per_round
        client_us = 1e6 * client_s / calls if task.case is Case.CLIENT else 0.0
        return done, Cost(done.p50_us, 1e6 * spent_s / calls + client_us, client_us, switches / calls)

    def _spent(self) -> tuple[float, float, float]:
        """Return CPU seconds of the services and of the client, and how often the services' threads waited."""
        services = self._services.values()
        return sum(cpu_s(one.pid) for one in services), cpu_s(self._client.pid), sum(map(_switches, services))


def run_embedded_benchmark(
    *,
    size_bytes: int,
    seconds: float,
    repeats: int,
    home: Path,
    progress: Callable[[str], None] = lambda text: None,
) -> EmbeddedResults:
    """Measure each :class:`Case` in one process and with sidecars, ``repeats`` turns of about ``seconds`` each.

    ``home``: for the logs. Raises BenchError.
    """
    with _with_sidecars(home / "sidecars") as sidecars, _in_one_process(home / "embedded") as embedded:
        disk: list[float] = []
        rows = []
        for case in Case:
            rows.append(_measure(sidecars, embedded, case, size_bytes, seconds, repeats, progress))
            disk.append(1e6 * percentile(append_latencies(home, DISK_BLOCK_SIZE_BYTES), 50))
        return EmbeddedResults(size_bytes, rows, statistics.median(disk))


def _measure(
    sidecars: Side,
    embedded: Side,
    case: Case,
    size_bytes: int,
    seconds: float,
    repeats: int,
    progress: Callable[[str], None],
) -> EmbeddedRow:
    sides = (sidecars, embedded)
    progress(f"{case}: warming up")
    tasks = {side.name: _task_for(side, case, size_bytes, seconds) for side in sides}
    turns: list[tuple[Cost, Cost]] = []
    for turn in range(repeats):
        progress(f"{case}: {turn + 1} of {repeats}")
        costs = {side.name: side.run(tasks[side.name])[1] for side in (sides if turn % 2 else sides[::-1])}
        turns.append((costs[sidecars.name], costs[embedded.name]))
    return EmbeddedRow(
        case.value,
        repeats,
        _median([turn[0] for turn in turns]),
        _median([turn[1] for turn in turns]),
        statistics.median(one.p50_us / beside.p50_us for beside, one in turns),
        statistics.median(one.cpu_us / beside.cpu_us for beside, one in turns),
        statistics.median((one.cpu_us - one.client_cpu_us) / (at.cpu_us - at.client_cpu_us) for at, one in turns),
    )


def _task_for(side: Side, case: Case, size_bytes: int, seconds: float) -> Task:
    """Run twice, to warm the processes up and to measure; return a task that takes about ``seconds``."""
    rounds = max(2, WARM_UP_CALLS // case.calls_per_round)
    for _ in range(2):
        done, _ = side.run(Task(case, rounds, size_bytes))
        rounds = max(2, round(seconds * done.calls_per_s / (2 if rounds < WARM_UP_CALLS else 1)))
    return Task(case, rounds, size_bytes)


def _median(costs: list[Cost]) -> Cost:
    return Cost(
        statistics.median(one.p50_us for one in costs),
        statistics.median(one.cpu_us for one in costs),
        statistics.median(one.client_cpu_us for one in costs),
        statistics.median(one.switches for one in costs),
    )


def _switches(process: Popen[str]) -> int:
    count = 0
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            for line in (task / "status").read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches:"):
                    count += int(line.split()[1])
    return count


# --- processes --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _with_sidecars(home: Path) -> Iterator[Side]:
    services = register(home, APPS, {})
    with running(services), _process(home, services, CLIENT) as client:
        processes = processes_of(services)
        yield Side(SIDECARS, processes, processes["caller's app"], client)


@contextlib.contextmanager
def _in_one_process(home: Path) -> Iterator[Side]:
    services = register(home, APPS, {})
    with _process(home, services) as process:
        for service in services.values():
            service.wait_for_phase("normal")
        with _process(home, services, CLIENT) as client:
            yield Side(EMBEDDED, {"services": process}, process, client)


@contextlib.contextmanager
def _process(home: Path, services: dict[str, Service], *arguments: str) -> Iterator[Popen[str]]:
    """Run ``python -m immortal.bench.embedded_apps``, and kill it at the end."""
    environment = services["caller"].environment
    with (
        open(home / "errors.txt", "a") as errors,
        start_module(MODULE, *arguments, cwd=home, env=environment, stderr=errors) as process,
    ):
        yield process


# Output for people.


def print_embedded(results: EmbeddedResults) -> None:
    heads = ("", "p50, µs", "ratio", "CPU, µs/call", "ratio", "without client", "waits/call")
    rows = (
        (
            row.case,
            f"{row.sidecars.p50_us:,.0f} -> {row.embedded.p50_us:,.0f}",
            f"{row.p50_ratio:.2f}",
            f"{row.sidecars.cpu_us:,.1f} -> {row.embedded.cpu_us:,.1f}",
            f"{row.cpu_ratio:.2f}",
            f"{row.cpu_ratio_without_client:.2f}",
            f"{row.sidecars.switches:.1f} -> {row.embedded.switches:.1f}",
        )
        for row in results.rows
    )
    title = f"calls of {results.size_bytes} B: services with sidecars -> in one process; p50 of batches: of a whole one"
    print_table(heads, rows, right=heads[1:], title=title)
    echo(f"the disk alone: append + fdatasync of {DISK_BLOCK_SIZE_BYTES >> 10} KiB: p50 {results.disk_p50_us:,.0f} µs")
