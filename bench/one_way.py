"""One-way calls between two services, by size, and the replay of what they have logged."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.apps import CHAINS, PLAN_VARIABLE
from bench.disk import append_rate
from bench.processes import BenchError, Service, register
from coordinator.config import LOG_KEY_FILE
from coordinator.log import open_reader
from protocol.record import decode_header
from protocol.trailer import decode_trailer

BURST_SIZE_BYTES = 2048 << 10  # of arguments in one burst, roughly: small enough to be paced smoothly
CALL_OVERHEAD_BYTES = 200  # what a call costs in time, expressed in bytes: so that runs take about as long


@dataclass(frozen=True, slots=True)
class OneWay:
    size_bytes: int
    calls: int
    seconds: float
    calls_per_s: float
    mb_per_s: float


@dataclass(frozen=True, slots=True)
class Replay:
    calls: int
    seconds: float
    calls_per_s: float


@dataclass(frozen=True, slots=True)
class Results:
    one_way: list[OneWay]
    one_way_curve: list[OneWay]  # the same between instances with keys, if that was asked for
    disk_mb_per_s: dict[int, float]  # by block size
    replay: Replay | None
    peak_memory_mib: dict[str, tuple[float, float]]  # of (coordinator, app) by instance


def plan_for(size_bytes: int, volume_bytes: int) -> tuple[int, int, int]:
    """(size, bursts of each chain, calls per burst) of one run."""
    calls_per_burst = max(1, BURST_SIZE_BYTES // (size_bytes + CALL_OVERHEAD_BYTES))
    bursts = max(1, volume_bytes // (CHAINS * calls_per_burst * (size_bytes + CALL_OVERHEAD_BYTES)))
    return size_bytes, bursts, calls_per_burst


def run_benchmark(
    sizes: Sequence[int],
    *,
    volume_mb: int,
    curve: bool = False,
    log_key: bool = False,
    folder: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Results:
    """Measure each size once with ``volume_mb`` MB of traffic (calls counted as 200 bytes beside their arguments).

    ``curve``: and once more between instances with keys. ``log_key``: all of it with authenticated logs.

    ``folder``: where the logs go, the system's temporary folder by default. Raises BenchError.
    """
    with tempfile.TemporaryDirectory(prefix="immortal-bench-", dir=folder) as home_name:
        home = Path(home_name)
        progress("the disk alone")
        disk = {block: append_rate(home, block) / 1e6 for block in (64 << 10, 1 << 20)}
        # The first, short run is not counted: it finds the processes cold.
        plan = [plan_for(size, volume_mb * 1_000_000) for size in sizes]
        plan.insert(0, plan_for(sizes[0], 20_000_000))
        with _running(home / "plain", plan, curve=False, log_key=log_key) as services:
            one_way = _measure(services, plan, progress)[1:]
            memory = {name: service.peak_memory_mib() for name, service in services.items()}
            progress("replay")
            replay = measure_replay(services["receiver"])
        one_way_curve: list[OneWay] = []
        if curve:
            with _running(home / "curve", plan, curve=True, log_key=log_key) as services:
                one_way_curve = _measure(services, plan, lambda text: progress(f"{text}, with CURVE"))[1:]
    return Results(one_way, one_way_curve, disk, replay, memory)


@contextlib.contextmanager
def _running(
    home: Path, plan: list[tuple[int, int, int]], *, curve: bool, log_key: bool
) -> Iterator[dict[str, Service]]:
    services = register(
        home,
        {"receiver": "bench.apps:Receiver", "sender": "bench.apps:Sender"},
        {PLAN_VARIABLE: json.dumps(plan)},
        curve=curve,
        log_key=LOG_KEY_FILE if log_key else None,
    )
    try:
        for service in services.values():
            service.start()
        yield services
    finally:
        for service in services.values():
            service.kill()


def _measure(
    services: dict[str, Service], plan: list[tuple[int, int, int]], progress: Callable[[str], None]
) -> list[OneWay]:
    app = services["sender"].app
    if app is None or app.stdout is None:
        raise BenchError("the sender was not started")
    results = []
    for run, (size_bytes, bursts, calls_per_burst) in enumerate(plan, start=1):
        calls = CHAINS * bursts * calls_per_burst
        progress(f"{calls} calls of {size_bytes} B")
        line = app.stdout.readline()
        if not line:
            for service in services.values():
                if service.app is not None:
                    service.app.wait()
                service.check_alive()
            raise BenchError("the sender said nothing")
        measured = json.loads(line)
        if (measured["run"], measured["calls"], measured["bytes"]) != (run, calls, calls * size_bytes):
            raise BenchError(f"the receiver counted {measured}, {calls} calls of {size_bytes} bytes were sent")
        seconds = measured["seconds"]
        results.append(OneWay(size_bytes, calls, seconds, calls / seconds, calls * size_bytes / seconds / 1e6))
    return results


def measure_replay(receiver: Service) -> Replay | None:
    """kill -9 the receiver and its coordinator; how fast are the calls since the last checkpoint replayed?"""
    status = receiver.status()
    if status is None or not status["checkpoint"]:
        return None
    positions = _positions(status)
    receiver.kill()
    with open_reader(receiver.settings.log) as log:
        checkpoint = log.summary().checkpoints[-1]
        calls = sum(
            batch_count(value.value) for value in log.records(checkpoint.sequence_id + 1) if value.problem is None
        )
    receiver.start()
    begun = time.perf_counter()
    receiver.wait_for_phase("normal")
    seconds = time.perf_counter() - begun
    status = receiver.status()
    if status is None or _positions(status) != positions:
        raise BenchError(f"after the replay the positions are {status and _positions(status)}, before {positions}")
    return Replay(calls, seconds, calls / seconds)


def _positions(status: dict[str, Any]) -> dict[str, int]:
    return {source: stream["position"] for source, stream in status["inputs"].items() if stream["position"]}


def batch_count(value: bytes) -> int:
    """How many calls a record holds, by its trailer."""
    header = decode_header(value)
    return sum(batch.count for batch in decode_trailer(value[header.size_bytes :], header.check).batches)
