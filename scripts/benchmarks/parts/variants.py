"""The same calls under other conditions: with CURVE, which encrypts what goes between coordinators; on slower disks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from immortal.bench.calls import IMMORTAL, immortal_caller
from immortal.bench.one_way import Load, immortal_streams
from immortal.coordinator.log.backends.lmdb.writer import VARIABLE
from scripts.benchmarks.comparisons import Streams, calls_by, latency_figure, rate_figure, rates, streams_by
from scripts.benchmarks.context import Context
from scripts.benchmarks.figures import Figure, Target
from scripts.benchmarks.parts.calls import format_size

CURVE = "immortal, CURVE"
CURVE_SIZES = (16, 1 << 10, 64 << 10, 1 << 20)
SLOW_SIZES = (16, 1 << 10)
NOTE = (
    "The delay is added once to each commit. A small commit syncs once, to the journal; a larger one twice, in LMDB "
    "(the data, then the page that makes them count): for these, a disk whose every sync takes 5 ms is that with 10 ms."
)


def curve(context: Context) -> list[Figure]:
    """The same between instances with keys: CURVE encrypts and authenticates what goes between coordinators."""
    variants = {IMMORTAL: {"curve": False}, CURVE: {"curve": True}}
    sizes = [size for size in CURVE_SIZES if size in context.amounts.sizes]
    return _compared(context, variants, "with CURVE", sizes)


def slow_disk(context: Context) -> list[Figure]:
    """The same on a slower disk: each commit of a log takes some milliseconds more."""
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
    """Measure one-way calls of ``sizes`` bytes and awaited calls. ``variants``: what their instances differ in."""
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
