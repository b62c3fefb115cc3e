"""Calls between two services and more, one-way and awaited, and calls from outside.

The same calls also run under other conditions: with CURVE, which encrypts traffic of coordinators; on slower disks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from immortal.bench.calls import immortal_caller, running
from immortal.bench.one_way import ImmortalStreams, Load, OneWay, immortal_streams
from immortal.bench.processes import BenchError, register
from immortal.bench.workload import Measured, argument, measured
from immortal.client import connect
from immortal.coordinator.log.backends.lmdb.writer import VARIABLE
from scripts.benchmarks.comparisons import (
    GRPC_ASYNCIO,
    GRPC_THREADS,
    SIZE_BYTES,
    Streams,
    calls_by,
    codec_targets,
    grpc_caller,
    grpc_streams,
    immortal_by_codec,
    latency_figure,
    rate_figure,
    rates,
    streams_by,
)
from scripts.benchmarks.context import Context
from scripts.benchmarks.figures import DISK, HANDLER, IMMORTAL, PURE, TCP, Figure, Target
from scripts.benchmarks.limits import disk_latency_us, disk_rate, handler_rate, loopback


def calls(context: Context) -> list[Figure]:
    """Measure awaited calls between two services, both logs durable: one at a time, and more."""
    figures: list[Figure] = []
    with context.home() as home, ExitStack() as stack:
        ours = stack.enter_context(immortal_caller(home / "home"))
        asynchronous, threads = (stack.enter_context(grpc_caller(name)) for name in (GRPC_ASYNCIO, GRPC_THREADS))
        tcp = stack.enter_context(loopback())
        for outstanding in context.amounts.outstanding:
            if outstanding == 1:
                limits = {
                    **{f"{DISK}, {name}": partial(disk_latency_us, home, at) for name, at in _PERCENTILES.items()},
                    **{f"{TCP}, {name}": partial(tcp.round_trip_us, at) for name, at in _PERCENTILES.items()},
                }
                measured, limited = calls_by(context, [ours, asynchronous, threads], 1, "one awaited call", limits)
                figures += _one_at_a_time(measured, limited)
            else:
                what = f"{outstanding} awaited calls outstanding"
                callers = [ours, asynchronous, *([threads] if outstanding <= 64 else [])]
                measured, limited = calls_by(context, callers, outstanding, what, {HANDLER: partial(handler_rate, 16)})
                targets = [Target("at least", 200e3), Target("at least", 25, GRPC_ASYNCIO)]
                figures.append(
                    rate_figure(
                        what,
                        measured,
                        targets if outstanding == 1000 else [],
                        limited,
                        group="awaited calls",
                        x=outstanding,
                        x_label="calls outstanding",
                    )
                )
    return figures


_PERCENTILES = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9}


def _one_at_a_time(measured: dict[str, list[Measured]], limited: dict[str, list[float]]) -> list[Figure]:
    targets = {"p50": [Target("at most", 1.5, GRPC_THREADS)], "p99": [Target("at most", 3.0, GRPC_THREADS)]}
    name = "one awaited call at a time"
    figures = [
        latency_figure(
            name,
            title.replace(".", ""),
            measured,
            targets.get(title, []),
            {what: limited[f"{what}, {title}"] for what in (DISK, TCP)},
        )
        for title in _PERCENTILES
    ]
    rate = rate_figure(f"{name}, rate", measured, [], group="awaited calls", x=1, x_label="calls outstanding")
    return [*figures, rate]


# One-way calls by size, with their costs in CPU time and memory.


GRPC = "grpc stream"
MIXED = Load((16, 1024, 64, 256), receivers=4)
_BY_CALLS_MAX = 1 << 10  # larger ones are compared in MB/s


def one_way(context: Context) -> list[Figure]:
    """Measure one-way calls by size, with their costs in CPU time and memory."""
    figures: list[Figure] = []
    with context.home() as home, immortal_by_codec(home) as ours, grpc_streams() as theirs, loopback() as tcp:
        streams: dict[str, Streams] = {**ours, GRPC: theirs}
        for size_bytes in context.amounts.sizes:
            limits: dict[str, Callable[[], float]] = {
                DISK: partial(disk_rate, home, max(size_bytes, 1 << 20)),
                TCP: tcp.rate,
                HANDLER: partial(handler_rate, size_bytes),
            }
            what = f"one-way {format_size(size_bytes)}"
            measured, limited = streams_by(context, streams, Load((size_bytes,)), what, limits)
            figures.append(_rate(what, size_bytes, measured, limited))
            if size_bytes == 16:
                figures += _costs(measured)
                figures.append(_memory(ours[IMMORTAL]))
    figures.append(_mixed(context))
    return figures


def _rate(what: str, size_bytes: int, measured: dict[str, list[OneWay]], limited: dict[str, list[float]]) -> Figure:
    """Return a rate: calls/s for small calls, MB/s for large ones."""
    by_calls = size_bytes <= _BY_CALLS_MAX
    size = max(1, size_bytes)
    samples = {
        name: [rate if by_calls else rate * size / 1e6 for rate in turns] for name, turns in rates(measured).items()
    }
    for name in (DISK, TCP):
        samples[name] = [rate / size if by_calls else rate / 1e6 for rate in limited[name]]
    if by_calls:
        samples[HANDLER] = limited[HANDLER]
    targets = []
    if size_bytes == 16:
        targets = [
            *codec_targets(1.0e6, 2.0e6),
            Target("at least", 50, GRPC),
        ]
    elif size_bytes in (64 << 10, 1 << 20):
        targets = [Target("at least", 0.6, DISK), Target("at least", 1.0, GRPC, note="the aim")]
    return Figure(
        what,
        "calls/s" if by_calls else "MB/s",
        "higher",
        samples,
        targets,
        group="one-way, calls/s" if by_calls else "one-way, MB/s",
        x=size_bytes,
        x_label="size of the argument, bytes",
    )


def _costs(measured: dict[str, list[OneWay]]) -> list[Figure]:
    """Return CPU seconds per million calls, which are µs per call."""
    spent: dict[str, list[float]] = {}
    for codec, end in ((IMMORTAL, ""), (PURE, ", pure Python")):
        for one in measured.get(codec, ()):
            for process, seconds in one.cpu_s.items():
                spent.setdefault(f"{process}{end}", []).append(1e6 * seconds / one.calls)
    coordinators = {name: values for name, values in spent.items() if "coordinator" in name}
    total = {name: [1e6 * sum(one.cpu_s.values()) / one.calls for one in runs] for name, runs in measured.items()}
    unit = "CPU s per million calls"
    return [
        Figure(
            "one-way 16 B: CPU of each process",
            unit,
            "lower",
            spent,
            [Target("at most", 1.0, of=name) for name in coordinators],
        ),
        Figure("one-way 16 B: CPU of all processes", unit, "lower", total),
    ]


def _memory(ours: ImmortalStreams) -> Figure:
    samples: dict[str, list[float]] = {}
    for name, service in ours.services.items():
        coordinator, app = service.peak_memory_mib()
        samples[f"{name}'s coordinator"] = [coordinator]
        samples[f"{name}'s app"] = [app]
    targets = [Target("at most", 100, of=name) for name in samples if "coordinator" in name]
    return Figure("one-way 16 B: peak memory", "MiB", "lower", samples, targets)


def _mixed(context: Context) -> Figure:
    with (
        context.home() as home,
        immortal_by_codec(home, receivers=MIXED.receivers) as ours,
        grpc_streams(receivers=MIXED.receivers) as theirs,
    ):
        limits: dict[str, Callable[[], float]] = {
            DISK: lambda: disk_rate(home) / MIXED.mean_size_bytes,
            HANDLER: partial(handler_rate, round(MIXED.mean_size_bytes)),
        }
        streams: dict[str, Streams] = {**ours, GRPC: theirs}
        measured, limited = streams_by(context, streams, MIXED, "mixed sizes, four destinations", limits)
    targets = codec_targets(300e3, 1.0e6)
    name = f"one-way {', '.join(map(str, sorted(MIXED.sizes)))} B mixed, four destinations"
    return Figure(name, "calls/s", "higher", {**rates(measured), **limited}, targets)


def format_size(size_bytes: int) -> str:
    if size_bytes >= 1 << 20:
        return f"{size_bytes >> 20} MiB"
    return f"{size_bytes >> 10} KiB" if size_bytes >= 1 << 10 else f"{size_bytes} B"


# More than two services: fan-out, fan-in, and a chain of five.


GRPC = "grpc stream"
CHAIN = {
    "caller": "immortal.bench.apps:Caller",
    "callee": "scripts.benchmarks.apps:Relay",
    "relay-1": "scripts.benchmarks.apps:Relay1",
    "relay-2": "scripts.benchmarks.apps:Relay2",
    "relay-3": "immortal.bench.apps:Callee",
}


def shapes(context: Context) -> list[Figure]:
    """Measure more than two services: fan-out, fan-in, and a chain of five."""
    peers = context.amounts.peers
    return [
        _one_way(context, f"one-way 16 B, fan-out to {peers}", Load((16,), receivers=peers)),
        _one_way(context, f"one-way 16 B, fan-in from {peers}", Load((16,), senders=peers)),
        *_chain(context),
    ]


def _one_way(context: Context, name: str, load: Load) -> Figure:
    with (
        context.home() as home,
        immortal_streams(home, load.senders, load.receivers) as ours,
        grpc_streams(load.senders, load.receivers) as theirs,
    ):
        streams: dict[str, Streams] = {IMMORTAL: ours, GRPC: theirs}
        limits = {DISK: lambda: disk_rate(home) / load.mean_size_bytes, HANDLER: lambda: handler_rate(load.sizes[0])}
        measured, limited = streams_by(context, streams, load, name, limits)
    return Figure(name, "calls/s", "higher", {**rates(measured), **limited})


def _chain(context: Context) -> list[Figure]:
    name = "a chain of 5 services"
    with context.home() as home, ExitStack() as stack:
        ours = stack.enter_context(immortal_caller(home / "home", CHAIN))
        theirs = stack.enter_context(grpc_caller(GRPC_ASYNCIO, relays=len(CHAIN) - 2))
        tcp = stack.enter_context(loopback())
        limits = {DISK: lambda: disk_latency_us(home, 50), TCP: lambda: tcp.round_trip_us(50)}
        one, limited = calls_by(context, [ours, theirs], 1, f"{name}, one awaited call", limits)
        many, _ = calls_by(context, [ours, theirs], 64, f"{name}, 64 awaited calls")
    return [
        latency_figure(f"{name}, one awaited call", "p50", one, [], limited),
        latency_figure(f"{name}, one awaited call", "p99", one, []),
        rate_figure(f"{name}, 64 awaited calls outstanding", many, []),
    ]


# Calls from outside: a call, which is logged, and a query, which is not.


LOGGED, QUERY = f"{IMMORTAL}, a logged call", f"{IMMORTAL}, a query"
NAME = "asked"
APP = "scripts.benchmarks.apps:Asked"
_WARM_UP_S = 0.2


async def _loop(client: Any, first: int, until_s: float, latencies_ns: list[int], *, is_query: bool) -> None:
    ask = client.query.same if is_query else client.echo
    number = first
    while time.perf_counter() < until_s:
        data = argument(number, SIZE_BYTES)
        begun_ns = time.perf_counter_ns()
        answer = await ask(data)
        latencies_ns.append(time.perf_counter_ns() - begun_ns)
        if answer != data:
            raise BenchError(f"call {number} got the answer {answer!r}")
        number += 1


def _turn(home: Path, outstanding: int, seconds: float, *, is_query: bool) -> Measured:
    return asyncio.run(_asked(home, outstanding, seconds, is_query=is_query))


async def _asked(home: Path, outstanding: int, seconds: float, *, is_query: bool) -> Measured:
    async with connect(NAME, home=home) as client:
        for duration_s in (_WARM_UP_S, seconds):
            latencies_ns: list[int] = []
            begun_s = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for index in range(outstanding):
                    loop = _loop(client, index << 32, begun_s + duration_s, latencies_ns, is_query=is_query)
                    group.create_task(loop)
            took_s = time.perf_counter() - begun_s
    return measured(latencies_ns, took_s)


def queries(context: Context) -> list[Figure]:
    """Measure how long an outside caller waits for a call, which is logged, and for a query, which is not."""
    figures: list[Figure] = []
    with context.home() as home, running(register(home, {NAME: APP}, {})):
        for outstanding, what in ((1, "one call from outside at a time"), (64, "64 calls from outside outstanding")):
            turns = {
                name: partial(_turn, home, outstanding, context.amounts.seconds, is_query=is_query)
                for name, is_query in ((LOGGED, False), (QUERY, True))
            }
            results = context.interleave(turns, what)
            figures += [latency_figure(what, percentile, results, []) for percentile in ("p50", "p99")]
            figures.append(rate_figure(what, results, []))
    return figures


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
    names = {_name(delay_ms): delay_ms for delay_ms in context.amounts.delays_ms}
    variants = {name: {"variables": {VARIABLE: f"{delay_ms:g}"}} for name, delay_ms in names.items()}
    fast, slow = _name(0), _name(5)
    rate_targets = [Target("at least", 0.8, fast, of=slow)] if {fast, slow} <= set(names) else []
    p50_targets = [Target("at most", 1e3 * (2 * 5 + 1), of=slow)] if slow in names else []
    what = "by what each commit takes more"
    return _compared(context, variants, what, SLOW_SIZES, rate_targets, p50_targets, NOTE)


def _name(delay_ms: float) -> str:
    return f"{IMMORTAL}, {delay_ms:g} ms more"


def _compared(
    context: Context,
    variants: Mapping[str, Mapping[str, Any]],
    condition: str,
    sizes: list[int] | tuple[int, ...],
    rate_targets: list[Target] | None = None,
    p50_targets: list[Target] | None = None,
    note: str = "",
) -> list[Figure]:
    """Measure one-way calls of ``sizes`` bytes and awaited calls. ``variants``: options of their instances by name."""
    figures: list[Figure] = []
    with context.home() as home, ExitStack() as stack:
        streams: dict[str, Streams] = {
            name: stack.enter_context(immortal_streams(home / str(number), **options))
            for number, (name, options) in enumerate(variants.items())
        }
        for size_bytes in sizes:
            what = f"one-way {format_size(size_bytes)} {condition}"
            measured_rates, _ = streams_by(context, streams, Load((size_bytes,)), what)
            figures.append(Figure(what, "calls/s", "higher", rates(measured_rates), rate_targets or [], note=note))
    with context.home() as home, ExitStack() as stack:
        callers = [
            stack.enter_context(immortal_caller(home / str(number), name=name, **options))
            for number, (name, options) in enumerate(variants.items())
        ]
        what = f"one awaited call at a time {condition}"
        measured, _ = calls_by(context, callers, 1, what)
        figures += [
            latency_figure(what, "p50", measured, p50_targets or [], note=note),
            latency_figure(what, "p99", measured, []),
        ]
        what = f"1000 awaited calls outstanding {condition}"
        measured, _ = calls_by(context, callers, 1000, what)
        figures.append(rate_figure(what, measured, []))
    return figures
