"""Comparisons of several implementations, which run in turns: one-way calls and awaited calls."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Protocol

from immortal.bench.calls import Caller, run_for, warm_up
from immortal.bench.one_way import (
    CALL_OVERHEAD_BYTES,
    ImmortalStreams,
    Load,
    OneWay,
    immortal_streams,
)
from immortal.bench.processes import BenchError, cpu_s, hear, start_module, tell
from immortal.bench.workload import Measured
from immortal.protocol import compiled
from scripts.benchmarks.context import Context
from scripts.benchmarks.figures import IMMORTAL, PURE, Figure, Target

WARM_UP_BYTES = 2_000_000
GRPC_MODULE = "scripts.benchmarks.rivals.grpc_calls"


class Streams(Protocol):
    def run(self, load: Load, calls: int) -> OneWay:
        """Make about ``calls`` calls in all. Raises BenchError."""


@contextlib.contextmanager
def immortal_by_codec(home: Path, receivers: int = 1) -> Iterator[dict[str, ImmortalStreams]]:
    """Yield streams of Immortal as installed, and in pure Python if the codec is compiled."""
    with contextlib.ExitStack() as stack:
        streams = {IMMORTAL: stack.enter_context(immortal_streams(home / "installed", receivers=receivers))}
        if compiled.CODEC.is_installed:
            pure = immortal_streams(home / "pure", receivers=receivers, variables={compiled.PURE_VARIABLE: "1"})
            streams[PURE] = stack.enter_context(pure)
        yield streams


def codec_targets(pure: float, with_compiled: float) -> list[Target]:
    """Return the targets for calls/s."""
    if not compiled.CODEC.is_installed:
        return [Target("at least", pure)]
    return [Target("at least", pure, of=PURE), Target("at least", with_compiled, note="with the compiled codec")]


class GrpcStreams:
    def __init__(self, clients: list[Popen[str]], servers: list[Popen[str]]) -> None:
        self._clients = clients
        self._processes = {"client": clients, "server": servers}

    def run(self, load: Load, calls: int) -> OneWay:
        each = max(1, round(calls / (load.senders * load.receivers * len(load.sizes)))) * len(load.sizes)
        calls = each * load.senders * load.receivers
        before = self._cpu_s()
        for client in self._clients:
            tell(client, json.dumps({"sizes": load.sizes, "calls": each}))
        counted = [json.loads(hear(client, "a gRPC client")) for client in self._clients]
        expected = (calls, calls // len(load.sizes) * sum(load.sizes))
        if (sum(one["calls"] for one in counted), sum(one["bytes"] for one in counted)) != expected:
            raise BenchError(f"the gRPC servers counted {counted}; {expected} calls and bytes were sent")
        spent = {name: now - before[name] for name, now in self._cpu_s().items()}
        seconds = max(one["ended_s"] for one in counted) - min(one["begun_s"] for one in counted)
        return OneWay(calls, seconds, spent)

    def _cpu_s(self) -> dict[str, float]:
        return {name: sum(cpu_s(one.pid) for one in some) for name, some in self._processes.items()}


@contextlib.contextmanager
def grpc_streams(senders: int = 1, receivers: int = 1) -> Iterator[GrpcStreams]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(start_module(GRPC_MODULE, "server", "stream")) for _ in range(receivers)]
        addresses = [hear(server, "a gRPC server") for server in servers]
        client = partial(start_module, GRPC_MODULE, "client", "stream", *addresses)
        clients = [stack.enter_context(client()) for _ in range(senders)]
        yield GrpcStreams(clients, servers)


def streams_by(
    context: Context,
    streams: Mapping[str, Streams],
    load: Load,
    what: str,
    limits: Mapping[str, Callable[[], float]] | None = None,
) -> tuple[dict[str, list[OneWay]], dict[str, list[float]]]:
    """Measure the calls of each implementation, and the limits between them. Raises BenchError."""
    turns = {}
    for name, one in streams.items():
        context.progress(f"{what}: {name}, warming up")
        turns[name] = partial(one.run, load, calls_for(one, load, context.amounts.seconds))
    return context.interleave_with_limits(turns, limits or {}, what)


def rates(measured: Mapping[str, list[OneWay]]) -> dict[str, list[float]]:
    """Return the calls/s of each turn."""
    return {name: [one.calls_per_s for one in turns] for name, turns in measured.items()}


def calls_for(streams: Streams, load: Load, seconds: float) -> int:
    """Return the number of calls that take about ``seconds``, after two runs, the first of them with cold processes."""
    calls = max(load.senders * load.receivers, round(WARM_UP_BYTES / (load.mean_size_bytes + CALL_OVERHEAD_BYTES)))
    for _ in range(2):
        calls = max(1, round(streams.run(load, calls).calls_per_s * seconds / 2))
    return calls * 2


# Awaited calls: implementations make the same calls in turns; each caller checks its answers.


SIZE_BYTES = 16


def calls_by(
    context: Context,
    callers: Sequence[Caller],
    outstanding: int,
    what: str,
    limits: Mapping[str, Callable[[], float]] | None = None,
) -> tuple[dict[str, list[Measured]], dict[str, list[float]]]:
    """Measure the calls of each caller, and the limits between them. Raises BenchError."""
    turns: dict[str, Callable[[], Measured]] = {}
    seconds = context.amounts.seconds
    for caller in callers:
        context.progress(f"{what}: {caller.name}, warming up")
        try:
            rate = warm_up(caller, outstanding, SIZE_BYTES, seconds)
        except BenchError as error:
            if caller.name.startswith(IMMORTAL):
                raise
            context.skip(f"{what}: {caller.name}", str(error).splitlines()[0])  # a rival's failure does not end our run
            continue
        turns[caller.name] = partial(caller.run, run_for(outstanding, SIZE_BYTES, rate, seconds))
    return context.interleave_with_limits(turns, limits or {}, what)


def rate_figure(
    name: str,
    measured: Mapping[str, list[Measured]],
    targets: list[Target],
    limits: Mapping[str, list[float]] | None = None,
    **more: object,
) -> Figure:
    samples = {who: [one.calls_per_s for one in turns] for who, turns in measured.items()}
    return Figure(name, "calls/s", "higher", {**samples, **(limits or {})}, targets, **more)  # type: ignore[arg-type]


def latency_figure(
    name: str,
    percentile: str,
    measured: Mapping[str, list[Measured]],
    targets: list[Target],
    limits: Mapping[str, list[float]] | None = None,
    **more: object,
) -> Figure:
    """Return the figure of a latency. ``percentile``: "p50", "p99" or "p999"."""
    samples = {who: [getattr(one, f"{percentile}_us") for one in turns] for who, turns in measured.items()}
    title = f"{name}, {'p99.9' if percentile == 'p999' else percentile}"
    return Figure(title, "µs", "lower", {**samples, **(limits or {})}, targets, **more)  # type: ignore[arg-type]


# Unary calls of grpcio, with and without asyncio. None of it is durable.


GRPC_ASYNCIO, GRPC_THREADS = "grpc asyncio", "grpc threads"


@contextlib.contextmanager
def grpc_caller(name: str, relays: int = 0) -> Iterator[Caller]:
    """Run a client of gRPC. ``relays``: servers between the client and the one that answers; only with asyncio."""
    kind = name.removeprefix("grpc ")
    with contextlib.ExitStack() as stack:
        servers: dict[str, Popen[str]] = {}
        addresses: list[str] = []
        for index in range(relays + 1):
            server = stack.enter_context(start_module(GRPC_MODULE, "server", kind, *addresses[-1:]))
            addresses.append(hear(server, f"the server of {name}"))
            servers[f"server {index + 1}" if relays else "server"] = server
        client = stack.enter_context(start_module(GRPC_MODULE, "client", kind, addresses[-1]))
        yield Caller(name, {"client": client, **servers}, lambda: None)
