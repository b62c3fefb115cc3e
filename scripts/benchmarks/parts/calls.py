"""Awaited calls between two services, both logs durable: one at a time, and more."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from immortal.bench.calls import immortal_caller
from immortal.bench.workload import Measured
from scripts.benchmarks.comparisons import (
    GRPC_ASYNCIO,
    GRPC_THREADS,
    calls_by,
    grpc_caller,
    latency_figure,
    rate_figure,
)
from scripts.benchmarks.context import Context
from scripts.benchmarks.figures import DISK, HANDLER, TCP, Figure, Target
from scripts.benchmarks.limits import disk_latency_us, handler_rate, loopback


def run(context: Context) -> list[Figure]:
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
