"""Benchmark of one-way calls, timed from the first sender's first call to the last receiver's last one."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from types import MappingProxyType
from typing import Any

from immortal.bench.apps import CHAINS
from immortal.bench.calls import processes_of, running
from immortal.bench.processes import BenchError, Service, append_rate, cpu_s, hear, register, tell
from immortal.coordinator.config import LOG_KEY_FILE
from immortal.log import open_reader
from immortal.protocol.command_line import echo, print_table
from immortal.protocol.record import decode_header
from immortal.protocol.trailer import decode_trailer

BURST_SIZE_BYTES = 2 << 20  # of arguments in one burst, roughly: small enough for smooth pacing
CALL_OVERHEAD_BYTES = 200  # the time of a call as bytes, so that all runs take about as long
SILENCE_S_MAX = 300.0


@dataclass(frozen=True, slots=True)
class Load:
    """Load of each sender: arguments of ``sizes`` in turn, to each of ``receivers`` in turn."""

    sizes: tuple[int, ...]
    senders: int = 1
    receivers: int = 1

    @property
    def mean_size_bytes(self) -> float:
        return sum(self.sizes) / len(self.sizes)


@dataclass(frozen=True, slots=True)
class OneWay:
    calls: int
    seconds: float
    cpu_s: dict[str, float] = field(default_factory=dict)  # by process

    @property
    def calls_per_s(self) -> float:
        return self.calls / self.seconds


class ImmortalStreams:
    def __init__(self, services: Mapping[str, Service]) -> None:
        self.services = services

    def run(self, load: Load, calls: int) -> OneWay:
        round_calls = len(load.sizes) * load.receivers  # so that all receivers get equal shares
        in_burst = max(1, round(BURST_SIZE_BYTES / (load.mean_size_bytes + CALL_OVERHEAD_BYTES) / round_calls))
        in_burst *= round_calls
        bursts = max(1, round(calls / (load.senders * CHAINS * in_burst)))
        if bursts == 1:  # few calls: smaller bursts
            in_burst = max(1, round(calls / (load.senders * CHAINS * round_calls))) * round_calls
        calls = load.senders * CHAINS * bursts * in_burst
        received = calls // load.receivers
        before = self._cpu_s()
        receivers = [self.services[f"receiver-{index}"].processes()[1] for index in range(load.receivers)]
        senders = [self.services[f"sender-{index}"].processes()[1] for index in range(load.senders)]
        for receiver in receivers:
            tell(receiver, json.dumps({"calls": received}))
        for receiver in receivers:
            if (said := self._read(receiver)) != "ready":
                raise BenchError(f"a receiver said {said!r}, 'ready' was expected")
        plan = {"sizes": load.sizes, "receivers": load.receivers, "bursts": bursts, "calls": in_burst}
        for sender in senders:
            tell(sender, json.dumps(plan))
        begun_s = min(self._read(sender)["begun_s"] for sender in senders)
        ended_s = begun_s
        for receiver in receivers:
            counted = self._read(receiver)
            expected_bytes = received // len(load.sizes) * sum(load.sizes)
            if (counted["calls"], counted["bytes"]) != (received, expected_bytes):
                raise BenchError(f"a receiver counted {counted}; {received} calls, {expected_bytes} bytes were sent")
            ended_s = max(ended_s, counted["ended_s"])
        spent = {name: now - before[name] for name, now in self._cpu_s().items()}
        return OneWay(calls, ended_s - begun_s, spent)

    def _cpu_s(self) -> dict[str, float]:
        return {name: cpu_s(process.pid) for name, process in processes_of(self.services).items()}

    def _read(self, process: Popen[str]) -> Any:
        return json.loads(hear(process, "a process", self._check_alive, SILENCE_S_MAX))

    def _check_alive(self) -> None:
        for service in self.services.values():
            service.check_alive()


@contextlib.contextmanager
def immortal_streams(
    home: Path,
    senders: int = 1,
    receivers: int = 1,
    *,
    variables: Mapping[str, str] = MappingProxyType({}),
    curve: bool = False,
    **settings: Any,
) -> Iterator[ImmortalStreams]:
    """Run senders and receivers. ``settings``: of the instances, as :class:`Registry`'s ``register`` takes them."""
    apps = {f"receiver-{index}": "immortal.bench.apps:Receiver" for index in range(receivers)}
    apps |= {f"sender-{index}": "immortal.bench.apps:Sender" for index in range(senders)}
    services = register(home, apps, dict(variables), curve=curve, **settings)
    with running(services):
        yield ImmortalStreams(services)


# One-way calls between two services, by size, and the replay of their logged calls.


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
    one_way_curve: list[SizeResult]  # the same between instances with keys, if requested
    disk_mb_per_s: dict[int, float]  # by block size
    replay: Replay | None
    peak_memory_mib: dict[str, tuple[float, float]]  # of (coordinator, app) by instance


def run_benchmark(
    sizes: Sequence[int],
    *,
    volume_mb: int,
    curve: bool = False,
    log_key: bool = False,
    home: Path,
    progress: Callable[[str], None] = lambda text: None,
) -> Results:
    """Measure each size once with ``volume_mb`` MB of traffic (each call counts 200 bytes beside its arguments).

    ``curve``: also measure instances with keys. ``log_key``: use authenticated logs for all of it.

    ``home``: for the logs. Raises BenchError.
    """
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
    streams.run(Load((sizes[0],)), WARM_UP_BYTES // (sizes[0] + CALL_OVERHEAD_BYTES))  # the processes start cold
    results = []
    for size_bytes in sizes:
        calls = volume_mb * 1_000_000 // (size_bytes + CALL_OVERHEAD_BYTES)
        progress(f"{calls:,} calls of {size_bytes} B")
        done = streams.run(Load((size_bytes,)), calls)
        rate = done.calls_per_s
        results.append(SizeResult(size_bytes, done.calls, done.seconds, rate, rate * size_bytes / 1e6))
    return results


def measure_replay(receiver: Service) -> Replay | None:
    """Kill the receiver and its coordinator; measure how fast the calls since the last checkpoint are replayed."""
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
    """Return the number of calls in a record, by its trailer."""
    header = decode_header(value)
    return sum(batch.count for batch in decode_trailer(value[header.size_bytes :], header.check).batches)


# Output for people.


def print_one_way(results: Results) -> None:
    title = "one-way calls, executed by the receiver, both logs durable"
    _print_one_way_table(title, results.one_way)
    if results.one_way_curve:
        _print_one_way_table(f"{title}, with CURVE", results.one_way_curve)
    for plain, curve in zip(results.one_way, results.one_way_curve, strict=False):
        echo(f"{plain.size_bytes} B with CURVE: {curve.calls_per_s / plain.calls_per_s:.0%} of the calls/s")
    for block, rate in results.disk_mb_per_s.items():
        echo(f"the disk alone: append + fdatasync of {block >> 10} KiB: {rate:,.0f} MB/s")
    if results.replay is not None:
        replay = results.replay
        echo(
            f"recovery of the receiver after kill -9: {replay.calls:,} calls replayed in {replay.seconds:.2f} s, "
            f"processes started included: {replay.calls_per_s:,.0f} calls/s"
        )
    for name, (coordinator, app) in results.peak_memory_mib.items():
        echo(f"peak memory of {name}: coordinator {coordinator:.0f} MiB, app {app:.0f} MiB")


def _print_one_way_table(title: str, results: Sequence[SizeResult]) -> None:
    heads = ("size", "calls", "seconds", "calls/s", "MB/s")
    rows = (
        (
            f"{one.size_bytes} B",
            f"{one.calls:,}",
            f"{one.seconds:.2f}",
            f"{one.calls_per_s:,.0f}",
            f"{one.mb_per_s:,.1f}",
        )
        for one in results
    )
    print_table(heads, rows, right=heads, title=title)
