"""Calls between two services and more, one-way and awaited, and calls from outside.

The same calls also run under other conditions: with CURVE, which encrypts traffic of coordinators; on slower disks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from immortal.bench.calls import SIZE_BYTES, compare_callers, disk_latency, immortal_caller
from immortal.bench.harness import (
    DISK,
    HANDLER,
    IMMORTAL,
    LIMITS,
    PURE,
    TCP,
    Context,
    Figure,
    Target,
    latency,
    rate,
    values,
)
from immortal.bench.one_way import (
    BY_CALLS_SIZE_BYTES_MAX,
    ImmortalStreams,
    Load,
    Streams,
    compare_streams,
    format_size,
    immortal_streams,
    peak_memory,
    rate_by_size,
)
from immortal.bench.processes import append_rate, register, running
from immortal.bench.workload import Measured, Run, measure_in_tasks
from immortal.client import connect
from immortal.coordinator.log.backends.lmdb.writer import VARIABLE
from immortal.protocol import compiled
from scripts.benchmarks.limits import handler_rate, loopback
from scripts.benchmarks.rivals.adapters import GRPC, GRPC_ASYNCIO, GRPC_THREADS, grpc_caller, grpc_streams

Limits = dict[str, Callable[[], Any]]


def calls(context: Context) -> list[Figure]:
    """Measure awaited calls between two services, both logs durable: one at a time, and more."""
    figures: list[Figure] = []
    chart: dict[str, Any] = {"group": "awaited calls", "x_label": "calls outstanding"}
    with context.home() as home, ExitStack() as stack:
        ours = stack.enter_context(immortal_caller(home / "home"))
        asynchronous, threads = (stack.enter_context(grpc_caller(name)) for name in (GRPC_ASYNCIO, GRPC_THREADS))
        tcp = stack.enter_context(loopback())
        for outstanding in context.amounts.outstanding:
            if outstanding == 1:
                what = "one awaited call at a time"
                limits: Limits = {DISK: partial(disk_latency, home), TCP: tcp.round_trips}
                results = compare_callers(context, [ours, asynchronous, threads], 1, what, limits)
                for percent, times in (("p50", 1.5), ("p99", 3.0), ("p99.9", None)):
                    targets = [Target("at most", times, GRPC_THREADS)] if times else []
                    figures.append(latency(what, percent, results, targets))
                services = {name: some for name, some in results.items() if name not in LIMITS}
                figures.append(rate(f"{what}, rate", services, x=1, **chart))
            else:
                what = f"{outstanding} awaited calls outstanding"
                callers = [ours, asynchronous, *([threads] if outstanding <= 64 else [])]
                results = compare_callers(context, callers, outstanding, what, {HANDLER: partial(handler_rate, 16)})
                targets = [Target("at least", 200e3), Target("at least", 25, GRPC_ASYNCIO)]
                figures.append(rate(what, results, targets if outstanding == 1000 else [], x=outstanding, **chart))
    return figures


# One-way calls by size, with their costs in CPU time and memory.


MIXED = Load((16, 1024, 64, 256), receivers=4)


@contextmanager
def _immortal_by_codec(home: Path, receivers: int = 1) -> Iterator[dict[str, ImmortalStreams]]:
    """Yield streams of Immortal as installed, and in pure Python if the codec is compiled."""
    with ExitStack() as stack:
        streams = {IMMORTAL: stack.enter_context(immortal_streams(home / "installed", receivers=receivers))}
        if compiled.CODEC.is_installed:
            pure = immortal_streams(home / "pure", receivers=receivers, variables={compiled.PURE_VARIABLE: "1"})
            streams[PURE] = stack.enter_context(pure)
        yield streams


def _codec_targets(pure: float, with_compiled: float) -> list[Target]:
    """Return the targets for calls/s."""
    if not compiled.CODEC.is_installed:
        return [Target("at least", pure)]
    return [Target("at least", pure, of=PURE), Target("at least", with_compiled, note="with the compiled codec")]


def one_way(context: Context) -> list[Figure]:
    """Measure one-way calls by size, with their costs in CPU time and memory."""
    figures: list[Figure] = []
    large = [Target("at least", 0.6, DISK), Target("at least", 1.0, GRPC, note="the aim")]
    targets = {
        16: [*_codec_targets(1.0e6, 2.0e6), Target("at least", 50, GRPC)],
        64 << 10: large,
        1 << 20: large,
    }
    with context.home() as home, _immortal_by_codec(home) as ours, grpc_streams() as theirs, loopback() as tcp:
        for size_bytes in context.amounts.sizes:
            limits: Limits = {DISK: _disk_rate(home, max(size_bytes, 1 << 20)), TCP: tcp.rate}
            if size_bytes <= BY_CALLS_SIZE_BYTES_MAX:
                limits[HANDLER] = partial(handler_rate, size_bytes)
            what = f"one-way {format_size(size_bytes)}"
            results = compare_streams(context, {**ours, GRPC: theirs}, Load((size_bytes,)), what, limits)
            figures.append(rate_by_size(what, size_bytes, results, targets=targets.get(size_bytes, [])))
            if size_bytes == 16:
                figures += _costs({name: some for name, some in results.items() if name not in LIMITS})
                memory = peak_memory(what, ours[IMMORTAL])
                at_most = [Target("at most", 100, of=name) for name in memory.samples if "coordinator" in name]
                figures.append(replace(memory, targets=at_most))
    name = f"one-way {', '.join(map(str, sorted(MIXED.sizes)))} B mixed, four destinations"
    with context.home() as home, _immortal_by_codec(home, MIXED.receivers) as ours:
        figures.append(_beside_grpc(context, home, ours, name, MIXED, _codec_targets(300e3, 1.0e6)))
    return figures


def _disk_rate(home: Path, block_size_bytes: int = 1 << 20) -> Callable[[], float]:
    return partial(append_rate, home, block_size_bytes)


def _costs(results: dict[str, list[Measured]]) -> list[Figure]:
    """Return CPU seconds per million calls, which are µs per call."""
    spent: dict[str, list[float]] = {}
    for codec, end in ((IMMORTAL, ""), (PURE, ", pure Python")):
        for one in results.get(codec, ()):
            for process, seconds in one.cpu_s.items():
                spent.setdefault(f"{process}{end}", []).append(1e6 * seconds / one.calls)
    targets = [Target("at most", 1.0, of=name) for name in spent if "coordinator" in name]
    unit, what = "CPU s per million calls", "one-way 16 B: CPU of"
    return [
        Figure(f"{what} each process", unit, "lower", spent, targets),
        Figure(f"{what} all processes", unit, "lower", values(results, "cpu_us")),
    ]


def _beside_grpc(
    context: Context,
    home: Path,
    ours: Mapping[str, Streams],
    name: str,
    load: Load,
    targets: Sequence[Target] = (),
) -> Figure:
    """Return the rate of ``ours`` beside gRPC and the limits of the machine."""
    disk_rate, mean_size_bytes = _disk_rate(home), load.mean_size_bytes
    limits: Limits = {
        DISK: lambda: disk_rate() / mean_size_bytes,
        HANDLER: partial(handler_rate, round(mean_size_bytes)),
    }
    with grpc_streams(load.senders, load.receivers) as theirs:
        results = compare_streams(context, {**ours, GRPC: theirs}, load, name, limits)
    return rate(name, results, targets)


# More than two services: fan-out, fan-in, and a chain of five.


CHAIN = {
    "caller": "immortal.bench.apps:Caller",
    "callee": "scripts.benchmarks.apps:Relay",
    "relay-1": "scripts.benchmarks.apps:Relay1",
    "relay-2": "scripts.benchmarks.apps:Relay2",
    "relay-3": "immortal.bench.apps:Callee",
}


def shapes(context: Context) -> list[Figure]:
    """Measure more than two services: fan-out, fan-in, and a chain of five."""
    figures, peers = [], context.amounts.peers
    for name, load in (
        (f"one-way 16 B, fan-out to {peers}", Load((16,), receivers=peers)),
        (f"one-way 16 B, fan-in from {peers}", Load((16,), senders=peers)),
    ):
        with context.home() as home, immortal_streams(home, load.senders, load.receivers) as ours:
            figures.append(_beside_grpc(context, home, {IMMORTAL: ours}, name, load))
    name = f"a chain of {len(CHAIN)} services"
    with context.home() as home, ExitStack() as stack:
        relays = grpc_caller(GRPC_ASYNCIO, relays=len(CHAIN) - 2)
        callers = [stack.enter_context(one) for one in (immortal_caller(home / "home", CHAIN), relays)]
        limits: Limits = {DISK: partial(disk_latency, home), TCP: stack.enter_context(loopback()).round_trips}
        what = f"{name}, one awaited call"
        one_call = compare_callers(context, callers, 1, what, limits)
        figures += [latency(what, percent, one_call) for percent in ("p50", "p99")]
        what = f"{name}, 64 awaited calls outstanding"
        figures.append(rate(what, compare_callers(context, callers, 64, what)))
    return figures


# Calls from outside: a call, which is logged, and a query, which is not.


LOGGED, QUERY = f"{IMMORTAL}, a logged call", f"{IMMORTAL}, a query"
NAME = "asked"
APP = "scripts.benchmarks.apps:Asked"


def queries(context: Context) -> list[Figure]:
    """Measure how long an outside caller waits for a call, which is logged, and for a query, which is not."""
    figures: list[Figure] = []
    with context.home() as home, running(register(home, {NAME: APP}, {})):
        for outstanding, what in ((1, "one call from outside at a time"), (64, "64 calls from outside outstanding")):
            turns = {
                name: partial(_measure_requests, home=home, outstanding=outstanding, is_query=name == QUERY)
                for name in (LOGGED, QUERY)
            }
            results = context.compare(what, turns)
            figures += [latency(what, "p50", results), latency(what, "p99", results), rate(what, results)]
    return figures


def _measure_requests(calls: int, home: Path, outstanding: int, *, is_query: bool) -> Measured:
    async def ask() -> Measured:
        async with connect(NAME, home=home) as client:
            call = client.query.same if is_query else client.echo
            await call(bytes(SIZE_BYTES))
            return await measure_in_tasks(Run.about(calls, outstanding, SIZE_BYTES), [call] * outstanding)

    return asyncio.run(ask())


CURVE = "immortal, CURVE"
CURVE_SIZES = (16, 1 << 10, 64 << 10, 1 << 20)
SLOW_SIZES = (16, 1 << 10)
NOTE = (
    "The delay is added once to each commit. A small commit syncs once, to the journal; a larger one twice, in LMDB "
    "(the data, then the page that makes them count): for these, a disk whose every sync takes 5 ms is that with 10 ms."
)


def curve(context: Context) -> list[Figure]:
    """Measure calls between instances with keys: CURVE encrypts and authenticates traffic between coordinators."""
    variants = {IMMORTAL: {"curve": False}, CURVE: {"curve": True}}
    sizes = [size for size in CURVE_SIZES if size in context.amounts.sizes]
    return _compared(context, variants, "with CURVE", sizes)


def slow_disk(context: Context) -> list[Figure]:
    """Measure calls on a slower disk: each commit of a log takes some milliseconds more."""
    names = {delay_ms: f"{IMMORTAL}, {delay_ms:g} ms more" for delay_ms in context.amounts.delays_ms}
    variants = {name: {"variables": {VARIABLE: f"{delay_ms:g}"}} for delay_ms, name in names.items()}
    rate_targets = [Target("at least", 0.8, names[0], of=names[5])] if {0, 5} <= set(names) else []
    p50_targets = [Target("at most", 1e3 * (2 * 5 + 1), of=names[5])] if 5 in names else []
    what = "by what each commit takes more"
    return _compared(context, variants, what, SLOW_SIZES, rate_targets, p50_targets, NOTE)


def _compared(
    context: Context,
    variants: Mapping[str, Mapping[str, Any]],
    condition: str,
    sizes: Sequence[int],
    rate_targets: Sequence[Target] = (),
    p50_targets: Sequence[Target] = (),
    note: str = "",
) -> list[Figure]:
    """Measure one-way calls of ``sizes`` bytes and awaited calls. ``variants``: options of their instances by name."""
    figures: list[Figure] = []
    with context.home() as home, ExitStack() as stack:
        streams = {
            name: stack.enter_context(immortal_streams(home / str(number), **options))
            for number, (name, options) in enumerate(variants.items())
        }
        for size_bytes in sizes:
            what = f"one-way {format_size(size_bytes)} {condition}"
            results = compare_streams(context, streams, Load((size_bytes,)), what)
            figures.append(rate(what, results, rate_targets, note=note))
    with context.home() as home, ExitStack() as stack:
        callers = [
            stack.enter_context(immortal_caller(home / str(number), name=name, **options))
            for number, (name, options) in enumerate(variants.items())
        ]
        what = f"one awaited call at a time {condition}"
        results = compare_callers(context, callers, 1, what)
        figures += [latency(what, "p50", results, p50_targets, note=note), latency(what, "p99", results)]
        what = f"1000 awaited calls outstanding {condition}"
        figures.append(rate(what, compare_callers(context, callers, 1000, what)))
    return figures
