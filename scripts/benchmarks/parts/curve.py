"""The same between instances with keys: CURVE encrypts and authenticates what goes between coordinators."""

from __future__ import annotations

from contextlib import ExitStack

from immortal.bench.calls import IMMORTAL, immortal_caller
from immortal.bench.one_way import Load, immortal_streams
from scripts.benchmarks.comparisons import Streams, calls_by, latency_figure, rate_figure, rates, streams_by
from scripts.benchmarks.context import Context
from scripts.benchmarks.figures import Figure
from scripts.benchmarks.parts.one_way import format_size

CURVE = "immortal, CURVE"
SIZES = (16, 1 << 10, 64 << 10, 1 << 20)


def run(context: Context) -> list[Figure]:
    figures: list[Figure] = []
    with context.home() as home, ExitStack() as stack:
        streams: dict[str, Streams] = {
            name: stack.enter_context(immortal_streams(home / name.replace(" ", ""), curve=name == CURVE))
            for name in (IMMORTAL, CURVE)
        }
        for size_bytes in (size for size in SIZES if size in context.amounts.sizes):
            load = Load((size_bytes,))
            what = f"one-way {format_size(size_bytes)} with CURVE"
            measured_rates, _ = streams_by(context, streams, load, what)
            figures.append(Figure(what, "calls/s", "higher", rates(measured_rates)))
    with context.home() as home, ExitStack() as stack:
        callers = [
            stack.enter_context(immortal_caller(home / name.replace(" ", ""), name=name, curve=name == CURVE))
            for name in (IMMORTAL, CURVE)
        ]
        measured, _ = calls_by(context, callers, 1, "one awaited call at a time with CURVE")
        figures += [
            latency_figure("one awaited call at a time with CURVE", percentile, measured, [])
            for percentile in ("p50", "p99")
        ]
        measured, _ = calls_by(context, callers, 1000, "1000 awaited calls outstanding with CURVE")
        figures.append(rate_figure("1000 awaited calls outstanding with CURVE", measured, []))
    return figures
