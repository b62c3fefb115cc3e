"""The statistics of a fleet as one page of HTML that needs nothing from elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime

from jinja2 import Environment, PackageLoader

from immortal.pipeline.jobs.stats import Figures, Stats
from immortal.pipeline.report.charts import SERIES_MAX, bars, matrix, over_time
from immortal.protocol.shown import printable

_ROWS_MAX = 200
_SIZES = {"MB": 1_000_000, "kB": 1_000, "bytes": 1}
_DURATIONS_MS = {"d": 86_400_000, "h": 3_600_000, "min": 60_000, "s": 1_000, "ms": 1}
_FIGURES = ("calls", "bytes", "median ms", "95 % ms", "99 % ms", "longest ms")

Part = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""A chart, and the heads and rows of a table."""


def stats_page(stats: Stats) -> str:
    """The whole page."""
    calls = sum(service.figures.calls for service in stats.services)
    size_bytes = sum(service.figures.size_bytes for service in stats.services)
    times = [time for service in stats.services for time in (service.first_ns, service.last_ns) if time]
    span = f"{time_text(min(times))} to {time_text(max(times))}" if times else "nothing logged"
    busiest = [service.instance for service in sorted(stats.services, key=lambda each: -each.figures.calls)]
    pages = Environment(loader=PackageLoader("immortal.pipeline.report", ""), autoescape=True)
    pages.filters["printable"] = printable
    return pages.get_template("stats_page.html").render(
        services=len(stats.services),
        calls=calls,
        size_bytes=size_bytes,
        span=span,
        rows_max=_ROWS_MAX,
        parts=[
            ("Calls", _calls_over_time(stats, busiest), (), ()),
            ("From sending to logging", _latency_over_time(stats, busiest), (), ()),
            ("Services", *_services(stats)),
            ("Methods", *_methods(stats)),
            ("Who with whom", *_talkers(stats, busiest)),
        ],
    )


def time_text(time_ns: int) -> str:
    return f"{datetime.fromtimestamp(time_ns // 1_000_000_000, UTC):%Y-%m-%d %H:%M:%S} UTC"


def duration_text(duration_ns: int) -> str:
    """
    >>> duration_text(30 * 60 * 10**9)
    '30 min'
    """
    duration_ms = duration_ns // 1_000_000
    unit, unit_ms = next((unit, unit_ms) for unit, unit_ms in _DURATIONS_MS.items() if duration_ms % unit_ms == 0)
    return f"{duration_ms // unit_ms} {unit}"


def _calls_over_time(stats: Stats, busiest: Sequence[str]) -> str:
    series: dict[str, dict[int, float]] = {name: {} for name in busiest[:SERIES_MAX]}
    others: dict[int, float] = defaultdict(float)
    for part in stats.bins:
        if part.instance in series:
            series[part.instance][part.start_ns] = part.figures.calls
        else:
            others[part.start_ns] += part.figures.calls
    if others:
        series["all others"] = others
    return over_time("executed calls", f"calls in {duration_text(stats.bin_ns)}", series, stats.bin_ns, stacked=True)


def _latency_over_time(stats: Stats, busiest: Sequence[str]) -> str:
    series: dict[str, dict[int, float]] = {name: {} for name in busiest[:SERIES_MAX]}
    for part in stats.bins:
        if part.instance in series:
            series[part.instance][part.start_ns] = part.figures.p99_ms
    return over_time("99 % are faster than this; the busiest services", "ms", series, stats.bin_ns)


def _services(stats: Stats) -> Part:
    sizes = [(service.instance, service.messages_median) for service in stats.services]
    heads = (
        "service",
        *_FIGURES,
        "records",
        "bytes per record",
        "messages per record: median",
        "99 %",
        "most",
        "damaged records",
    )
    rows = [
        (
            service.instance,
            *_cells(service.figures),
            f"{service.records:,}",
            f"{service.record_size_bytes / max(1, service.records):,.0f}",
            f"{service.messages_median:,.0f}",
            f"{service.messages_p99:,.0f}",
            f"{service.messages_max:,}",
            f"{service.damaged:,}",
        )
        for service in stats.services
    ]
    chart = bars("messages per record, median", "messages", sorted(sizes, key=lambda size: -size[1]))
    return chart, heads, rows


def _methods(stats: Stats) -> Part:
    named = [(f"{method.instance}: {method.method}", float(method.figures.calls)) for method in stats.methods]
    rows = [(method.instance, method.method, *_cells(method.figures)) for method in stats.methods]
    return bars("the most called methods", "calls", named), ("service", "method", *_FIGURES), rows


def _talkers(stats: Stats, busiest: Sequence[str]) -> Part:
    most_bytes = max((talker.figures.size_bytes for talker in stats.talkers), default=0)
    unit, unit_bytes = next((unit, size) for unit, size in _SIZES.items() if most_bytes >= size or size == 1)
    values = {(talker.sender, talker.receiver): talker.figures.size_bytes / unit_bytes for talker in stats.talkers}
    names = sorted({name for pair in values for name in pair}, key=lambda name: (name not in busiest, name))
    receivers = [name for name in names if name in busiest]
    rows = [(talker.sender, talker.receiver, *_cells(talker.figures)) for talker in stats.talkers]
    chart = matrix(f"{unit} of arguments: from (row) to (column)", names, receivers, values)
    return chart, ("from", "to", *_FIGURES), rows


def _cells(figures: Figures) -> tuple[str, ...]:
    times = (figures.median_ms, figures.p95_ms, figures.p99_ms, figures.max_ms)
    return (f"{figures.calls:,}", f"{figures.size_bytes:,}", *(f"{time:,.3f}" for time in times))
