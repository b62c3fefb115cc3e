"""The same on a slower disk: each commit of a log takes some milliseconds more."""

from __future__ import annotations

from contextlib import ExitStack

from immortal.bench.calls import IMMORTAL, immortal_caller
from immortal.bench.one_way import Load, immortal_streams
from immortal.coordinator.log.backends.lmdb.writer import VARIABLE
from scripts.benchmarks.comparisons import Streams, calls_by, latency_figure, rate_figure, rates, streams_by
from scripts.benchmarks.context import Context
from scripts.benchmarks.figures import Figure, Target

LOADS = {"16 B": Load((16,)), "1 KiB": Load((1 << 10,))}
NOTE = (
    "The delay is added once to each commit. A small commit syncs once, to the journal; a larger one twice, in LMDB "
    "(the data, then the page that makes them count): for these, a disk whose every sync takes 5 ms is that with 10 ms."
)


def run(context: Context) -> list[Figure]:
    figures: list[Figure] = []
    names = {_name(delay_ms): delay_ms for delay_ms in context.amounts.delays_ms}
    with context.home() as home, ExitStack() as stack:
        variables = {name: {VARIABLE: f"{delay_ms:g}"} for name, delay_ms in names.items()}
        streams: dict[str, Streams] = {
            name: stack.enter_context(immortal_streams(home / f"{delay_ms:g}", variables=variables[name]))
            for name, delay_ms in names.items()
        }
        fast, slow = _name(0), _name(5)
        for size, load in LOADS.items():
            what = f"one-way {size} by what each commit takes more"
            measured_rates, _ = streams_by(context, streams, load, what)
            targets = [Target("at least", 0.8, fast, of=slow)] if {fast, slow} <= set(names) else []
            figures.append(Figure(what, "calls/s", "higher", rates(measured_rates), targets, note=NOTE))
    with context.home() as home, ExitStack() as stack:
        callers = [
            stack.enter_context(immortal_caller(home / f"{delay_ms:g}", variables=variables[name], name=name))
            for name, delay_ms in names.items()
        ]
        what = "one awaited call at a time by what each commit takes more"
        measured, _ = calls_by(context, callers, 1, what)
        targets = [
            Target("at most", 1e3 * (2 * delay_ms + 1), of=name) for name, delay_ms in names.items() if delay_ms == 5
        ]
        figures += [
            latency_figure(what, "p50", measured, targets, note=NOTE),
            latency_figure(what, "p99", measured, []),
        ]
        what = "1000 awaited calls outstanding by what each commit takes more"
        measured, _ = calls_by(context, callers, 1000, what)
        figures.append(rate_figure(what, measured, []))
    return figures


def _name(delay_ms: float) -> str:
    return f"{IMMORTAL}, {delay_ms:g} ms more"
