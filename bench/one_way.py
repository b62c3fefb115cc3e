"""Benchmark of one-way calls, timed from the first sender's first call to the last receiver's last one."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import Popen
from types import MappingProxyType
from typing import Any, Protocol

from immortal.bench.apps import CHAINS
from immortal.bench.calls import cpu_per_call
from immortal.bench.harness import DISK, IMMORTAL, Context, Figure, values
from immortal.bench.processes import (
    BenchError,
    Service,
    append_rate,
    check_all_alive,
    cpu_s,
    memory_of,
    processes_of,
    read_line,
    register,
    running,
    write_line,
)
from immortal.bench.workload import Measured
from immortal.coordinator.config import LOG_KEY_FILE
from immortal.log import open_reader
from immortal.protocol.record import decode_header
from immortal.protocol.trailer import decode_trailer

BURST_SIZE_BYTES = 2 << 20  # of arguments in one burst, roughly: small enough for smooth pacing
CALL_OVERHEAD_BYTES = 200  # a call costs about as much time as this many bytes; makes all runs equally long
WARM_UP_BYTES = 2_000_000
BY_CALLS_SIZE_BYTES_MAX = 1 << 10  # larger calls are compared in MB/s
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


class Streams(Protocol):
    def run(self, load: Load, calls: int) -> Measured:
        """Make about ``calls`` calls in all. Raises BenchError."""


class ImmortalStreams:
    def __init__(self, services: Mapping[str, Service]) -> None:
        self.services = services

    def run(self, load: Load, calls: int) -> Measured:
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
            write_line(receiver, json.dumps({"calls": received}))
        for receiver in receivers:
            if (said := self._read(receiver)) != "ready":
                raise BenchError(f"a receiver said {said!r}, 'ready' was expected")
        plan = {"sizes": load.sizes, "receivers": load.receivers, "bursts": bursts, "calls": in_burst}
        for sender in senders:
            write_line(sender, json.dumps(plan))
        begun_s = min(self._read(sender)["begun_s"] for sender in senders)
        ended_s = begun_s
        for receiver in receivers:
            counted = self._read(receiver)
            expected_bytes = received // len(load.sizes) * sum(load.sizes)
            if (counted["calls"], counted["bytes"]) != (received, expected_bytes):
                raise BenchError(f"a receiver counted {counted}; {received} calls, {expected_bytes} bytes were sent")
            ended_s = max(ended_s, counted["ended_s"])
        spent = {name: now - before[name] for name, now in self._cpu_s().items()}
        return Measured(calls, ended_s - begun_s, cpu_s=spent)

    def _cpu_s(self) -> dict[str, float]:
        return {name: cpu_s(process.pid) for name, process in processes_of(self.services).items()}

    def _read(self, process: Popen[str]) -> Any:
        return json.loads(read_line(process, "a process", partial(check_all_alive, self.services), SILENCE_S_MAX))


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
    """Run senders and receivers. ``settings``: of all these instances, as :meth:`Registry.register` takes them."""
    apps = {f"receiver-{index}": "immortal.bench.apps:Receiver" for index in range(receivers)}
    apps |= {f"sender-{index}": "immortal.bench.apps:Sender" for index in range(senders)}
    services = register(home, apps, dict(variables), curve=curve, **settings)
    with running(services):
        yield ImmortalStreams(services)


def compare_streams(
    context: Context,
    streams: Mapping[str, Streams],
    load: Load,
    title: str,
    limits: Mapping[str, Callable[[], Any]] | None = None,
) -> dict[str, list[Any]]:
    """Measure the calls of each implementation, in turns with ``limits``, such as the disk's. Raises BenchError."""
    turns = {name: partial(one.run, load) for name, one in streams.items()}
    return context.compare(title, turns, limits, first_calls=first_calls(load))


def first_calls(load: Load) -> int:
    """Return the number of calls to make before the measurement, as a warm-up."""
    return max(load.senders * load.receivers, round(WARM_UP_BYTES / (load.mean_size_bytes + CALL_OVERHEAD_BYTES)))


def rate_by_size(title: str, size_bytes: int, results: Mapping[str, list[Any]], **more: Any) -> Figure:
    """Return a rate, in calls/s for small calls, in MB/s for large ones. A result that is a number is in bytes/s."""
    size = max(1, size_bytes)
    unit = "calls/s" if size_bytes <= BY_CALLS_SIZE_BYTES_MAX else "MB/s"
    samples = {}
    for name, rates in values(results, "calls_per_s").items():
        in_calls = isinstance(results[name][0], Measured)
        factor = {"calls/s": 1 if in_calls else 1 / size, "MB/s": size / 1e6 if in_calls else 1e-6}[unit]
        samples[name] = [rate * factor for rate in rates]
    label = "size of the argument, bytes"
    return Figure(title, unit, "higher", samples, group=f"one-way, {unit}", x=size_bytes, x_label=label, **more)


def format_size(size_bytes: int) -> str:
    if size_bytes >= 1 << 20:
        return f"{size_bytes >> 20} MiB"
    return f"{size_bytes >> 10} KiB" if size_bytes >= 1 << 10 else f"{size_bytes} B"


def peak_memory(title: str, streams: ImmortalStreams) -> Figure:
    samples = {name: [memory_of(process.pid).peak] for name, process in processes_of(streams.services).items()}
    return Figure(f"{title}: peak memory", "MiB", "lower", samples)


# `immortal bench`


def one_way(context: Context, *, curve: bool = False, log_key: bool = False) -> list[Figure]:
    """Measure one-way calls by size in turns with the disk alone, then a replay of the receiver's log.

    ``curve``: between instances with keys. ``log_key``: with authenticated logs.
    """
    figures: list[Figure] = []
    options: dict[str, Any] = {"curve": curve, "log_key": LOG_KEY_FILE if log_key else None}
    with context.home() as home, immortal_streams(home, **options) as streams:
        for size_bytes in context.amounts.sizes:
            title = f"one-way {format_size(size_bytes)}"
            limits = {DISK: partial(append_rate, home, max(size_bytes, 1 << 20))}
            results = compare_streams(context, {IMMORTAL: streams}, Load((size_bytes,)), title, limits)
            figures.append(rate_by_size(title, size_bytes, results))
            figures.append(cpu_per_call(title, results[IMMORTAL]))
        figures.append(peak_memory("one-way", streams))
        context.progress("replay")
        if replayed := measure_replay(streams.services["receiver-0"]):
            title = f"replay of {replayed.calls:,} calls after kill -9, start of the processes included"
            figures.append(Figure(title, "calls/s", "higher", {IMMORTAL: [replayed.calls_per_s]}))
    return figures


def measure_replay(receiver: Service) -> Measured | None:
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
    begun = time.perf_counter()
    receiver.start()
    receiver.wait_for_phase("normal")
    seconds = time.perf_counter() - begun
    status = receiver.status()
    if status is None or _positions(status) != positions:
        raise BenchError(f"after the replay the positions are {status and _positions(status)}, before {positions}")
    return Measured(calls, seconds)


def _positions(status: dict[str, Any]) -> dict[str, int]:
    return {source: stream["position"] for source, stream in status["inputs"].items() if stream["position"]}


def batch_count(value: bytes) -> int:
    """Return the number of calls in a record, by its trailer."""
    header = decode_header(value)
    return sum(batch.count for batch in decode_trailer(value[header.size_bytes :], header.check).batches)
