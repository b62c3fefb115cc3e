"""More than two services: fan-out, fan-in, and a chain of five."""

from __future__ import annotations

from contextlib import ExitStack

from immortal.bench.calls import immortal_caller
from immortal.bench.one_way import Load, immortal_streams
from scripts.benchmarks.comparisons import (
    GRPC_ASYNCIO,
    Streams,
    calls_by,
    grpc_caller,
    grpc_streams,
    latency_figure,
    rate_figure,
    rates,
    streams_by,
)
from scripts.benchmarks.context import Context
from scripts.benchmarks.figures import DISK, HANDLER, IMMORTAL, TCP, Figure
from scripts.benchmarks.limits import disk_latency_us, disk_rate, handler_rate, loopback

GRPC = "grpc stream"
CHAIN = {
    "caller": "immortal.bench.apps:Caller",
    "callee": "scripts.benchmarks.apps:Relay",
    "relay-1": "scripts.benchmarks.apps:Relay1",
    "relay-2": "scripts.benchmarks.apps:Relay2",
    "relay-3": "immortal.bench.apps:Callee",
}


def run(context: Context) -> list[Figure]:
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
