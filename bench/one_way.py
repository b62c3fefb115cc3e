"""One-way calls between two services, by size, and the replay of what they have logged."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from immortal.bench.disk import append_rate
from immortal.bench.processes import BenchError, Service
from immortal.bench.streams import CALL_OVERHEAD_BYTES, ImmortalStreams, Load, immortal_streams
from immortal.coordinator.config import LOG_KEY_FILE
from immortal.log import open_reader
from immortal.protocol.record import decode_header
from immortal.protocol.trailer import decode_trailer

WARM_UP_BYTES = 20_000_000


@dataclass(frozen=True, slots=True)
class SizeResult:
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
    one_way: list[SizeResult]
    one_way_curve: list[SizeResult]  # the same between instances with keys, if that was asked for
    disk_mb_per_s: dict[int, float]  # by block size
    replay: Replay | None
    peak_memory_mib: dict[str, tuple[float, float]]  # of (coordinator, app) by instance


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
        with _streams(home / "plain", curve=False, log_key=log_key) as streams:
            one_way = _measure(streams, sizes, volume_mb, progress)
            memory = {name.removesuffix("-0"): one.peak_memory_mib() for name, one in streams.services.items()}
            progress("replay")
            replay = measure_replay(streams.services["receiver-0"])
        one_way_curve: list[SizeResult] = []
        if curve:
            with _streams(home / "curve", curve=True, log_key=log_key) as streams:
                one_way_curve = _measure(streams, sizes, volume_mb, lambda text: progress(f"{text}, with CURVE"))
    return Results(one_way, one_way_curve, disk, replay, memory)


def _streams(home: Path, *, curve: bool, log_key: bool) -> AbstractContextManager[ImmortalStreams]:
    return immortal_streams(home, curve=curve, log_key=LOG_KEY_FILE if log_key else None)


def _measure(
    streams: ImmortalStreams, sizes: Sequence[int], volume_mb: int, progress: Callable[[str], None]
) -> list[SizeResult]:
    streams.run(Load((sizes[0],)), WARM_UP_BYTES // (sizes[0] + CALL_OVERHEAD_BYTES))  # it finds the processes cold
    results = []
    for size_bytes in sizes:
        calls = volume_mb * 1_000_000 // (size_bytes + CALL_OVERHEAD_BYTES)
        progress(f"{calls:,} calls of {size_bytes} B")
        done = streams.run(Load((size_bytes,)), calls)
        rate = done.calls_per_s
        results.append(SizeResult(size_bytes, done.calls, done.seconds, rate, rate * size_bytes / 1e6))
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
