"""Awaited calls: implementations take turns at the same calls; each answer is checked by whoever made the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from immortal.bench.call_workload import Measured
from immortal.bench.calls import Caller, run_for, warm_up
from immortal.bench.processes import BenchError
from scripts.benchmarks.context import Context
from scripts.benchmarks.figures import IMMORTAL, Figure, Target

SIZE_BYTES = 16


def calls_by(
    context: Context,
    callers: Sequence[Caller],
    outstanding: int,
    what: str,
    limits: Mapping[str, Callable[[], float]] | None = None,
) -> tuple[dict[str, list[Measured]], dict[str, list[float]]]:
    """What each caller's calls took, and the limits measured between them. Raises BenchError."""
    turns: dict[str, Callable[[], Measured]] = {}
    seconds = context.amounts.seconds
    for caller in callers:
        context.progress(f"{what}: {caller.name}, warming up")
        try:
            rate = warm_up(caller, outstanding, SIZE_BYTES, seconds)
        except BenchError as error:
            if caller.name.startswith(IMMORTAL):
                raise
            context.skip(f"{what}: {caller.name}", str(error).splitlines()[0])  # a rival's failure is no end of ours
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
    """``percentile``: "p50", "p99" or "p999"."""
    samples = {who: [getattr(one, f"{percentile}_us") for one in turns] for who, turns in measured.items()}
    title = f"{name}, {'p99.9' if percentile == 'p999' else percentile}"
    return Figure(title, "µs", "lower", {**samples, **(limits or {})}, targets, **more)  # type: ignore[arg-type]
