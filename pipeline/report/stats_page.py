"""The statistics of a fleet as one page of HTML that needs nothing from elsewhere."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from pipeline.jobs.stats import Figures, Stats
from pipeline.report.charts import SERIES_MAX, bars, matrix, over_time
from protocol.shown import printable

_ROWS_MAX = 200
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 62em; padding: 0 1em; color: #222 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } td, th { padding: 2px 10px; text-align: right }
th { border-bottom: 1px solid #999 } td:first-child, th:first-child, td.name { text-align: left }
svg { max-width: 100%; height: auto }
"""
_SIZES = {"MB": 1_000_000, "kB": 1_000, "bytes": 1}
_DURATIONS_MS = {"d": 86_400_000, "h": 3_600_000, "min": 60_000, "s": 1_000, "ms": 1}
_FIGURES = ("calls", "bytes", "median ms", "95 % ms", "99 % ms", "longest ms")


def stats_page(stats: Stats) -> str:
    """The whole page."""
    calls = sum(service.figures.calls for service in stats.services)
    size_bytes = sum(service.figures.size_bytes for service in stats.services)
    times = [time for service in stats.services for time in (service.first_ns, service.last_ns) if time]
    span = f"{time_text(min(times))} to {time_text(max(times))}" if times else "nothing logged"
    busiest = [service.instance for service in sorted(stats.services, key=lambda each: -each.figures.calls)]
    parts = [
        "<h1>A fleet of ", f"{len(stats.services)} service{'' if len(stats.services) == 1 else 's'}</h1>",
        f"<p>{calls:,} calls with {size_bytes:,} bytes of arguments, {html.escape(span)}.",
        " Times are from sending to logging, by the clocks of both machines.</p>",
        "<h2>Calls</h2>", _calls_over_time(stats, busiest),
        "<h2>From sending to logging</h2>", _latency_over_time(stats, busiest),
        "<h2>Services</h2>", _services(stats),
        "<h2>Methods</h2>", _methods(stats),
        "<h2>Who with whom</h2>", _talkers(stats, busiest),
    ]  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Statistics of a fleet</title>'
        f"<style>{_STYLE}</style></head><body>\n{''.join(parts)}\n</body></html>\n"
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


def _services(stats: Stats) -> str:
    sizes = [(service.instance, service.messages_median) for service in stats.services]
    heads = (*_FIGURES, "records", "bytes per record", "messages per record: median", "99 %", "most", "damaged records")
    rows = (
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
    )
    chart = bars("messages per record, median", "messages", sorted(sizes, key=lambda size: -size[1]))
    return chart + _table(("service", *heads), rows)


def _methods(stats: Stats) -> str:
    named = [(f"{method.instance}: {method.method}", float(method.figures.calls)) for method in stats.methods]
    rows = ((method.instance, method.method, *_cells(method.figures)) for method in stats.methods)
    return bars("the most called methods", "calls", named) + _table(("service", "method", *_FIGURES), rows)


def _talkers(stats: Stats, busiest: Sequence[str]) -> str:
    most_bytes = max((talker.figures.size_bytes for talker in stats.talkers), default=0)
    unit, unit_bytes = next((unit, size) for unit, size in _SIZES.items() if most_bytes >= size or size == 1)
    values = {(talker.sender, talker.receiver): talker.figures.size_bytes / unit_bytes for talker in stats.talkers}
    names = sorted({name for pair in values for name in pair}, key=lambda name: (name not in busiest, name))
    receivers = [name for name in names if name in busiest]
    rows = ((talker.sender, talker.receiver, *_cells(talker.figures)) for talker in stats.talkers)
    chart = matrix(f"{unit} of arguments: from (row) to (column)", names, receivers, values)
    return chart + _table(("from", "to", *_FIGURES), rows)


def _cells(figures: Figures) -> tuple[str, ...]:
    times = (figures.median_ms, figures.p95_ms, figures.p99_ms, figures.max_ms)
    return (f"{figures.calls:,}", f"{figures.size_bytes:,}", *(f"{time:,.3f}" for time in times))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    names = sum(head in ("service", "method", "from", "to") for head in heads)
    lines = []
    count = 0
    for row in rows:
        count += 1
        if count <= _ROWS_MAX:
            cells = [f'<td class="name">{html.escape(printable(cell))}</td>' for cell in row[:names]]
            lines.append(f"<tr>{''.join([*cells, *(f'<td>{cell}</td>' for cell in row[names:])])}</tr>")
    more = f"<p>... and {count - _ROWS_MAX:,} more; --json has them.</p>" if count > _ROWS_MAX else ""
    head = "".join(f"<th>{html.escape(head)}</th>" for head in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>{more}"
