"""One-way calls by size, with what they cost in CPU time and memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from immortal.bench.one_way import ImmortalStreams, Load, OneWay
from scripts.benchmarks.comparisons import Streams, codec_targets, grpc_streams, immortal_by_codec, rates, streams_by
from scripts.benchmarks.context import Context
from scripts.benchmarks.figures import DISK, HANDLER, IMMORTAL, PURE, TCP, Figure, Target
from scripts.benchmarks.limits import disk_rate, handler_rate, loopback

GRPC = "grpc stream"
MIXED = Load((16, 1024, 64, 256), receivers=4)
_BY_CALLS_MAX = 1 << 10  # larger ones are compared in MB/s


def run(context: Context) -> list[Figure]:
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
    """Small calls are counted, of large ones the bytes."""
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
    """CPU seconds per million calls, which are µs per call."""
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
