"""The statistics of a fleet as one page of HTML that needs nothing from elsewhere."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from pipeline.jobs.stats import Figures, Stats
from pipeline.report.charts import SERIES_MAX, bars, matrix, over_time

_ROWS_MAX = 200
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 62em; padding: 0 1em; color: #222 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } td, th { padding: 2px 10px; text-align: right }
th { border-bottom: 1px solid #999 } td:first-child, th:first-child, td.name { text-align: left }
svg { max-width: 100%; height: auto }
"""
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


def _calls_over_time(stats: Stats, busiest: Sequence[str]) -> str:
    series: dict[str, dict[int, float]] = {name: {} for name in busiest[:SERIES_MAX]}
    others: dict[int, float] = defaultdict(float)
    for minute in stats.minutes:
        if minute.instance in series:
            series[minute.instance][minute.minute_ns] = minute.figures.calls
        else:
            others[minute.minute_ns] += minute.figures.calls
    if others:
        series["all others"] = others
    return over_time("executed calls", "calls per minute", series, stacked=True)


def _latency_over_time(stats: Stats, busiest: Sequence[str]) -> str:
    series: dict[str, dict[int, float]] = {name: {} for name in busiest[:SERIES_MAX]}
    for minute in stats.minutes:
        if minute.instance in series:
            series[minute.instance][minute.minute_ns] = minute.figures.p99_ms
    return over_time("99 % are faster than this; the busiest services", "ms", series)


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
    values = {(talker.sender, talker.receiver): talker.figures.size_bytes / 1e6 for talker in stats.talkers}
    names = sorted({name for pair in values for name in pair}, key=lambda name: (name not in busiest, name))
    receivers = [name for name in names if name in busiest]
    rows = ((talker.sender, talker.receiver, *_cells(talker.figures)) for talker in stats.talkers)
    chart = matrix("MB of arguments: from (row) to (column)", names, receivers, values)
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
            cells = [f'<td class="name">{html.escape(cell)}</td>' for cell in row[:names]]
            lines.append(f"<tr>{''.join([*cells, *(f'<td>{cell}</td>' for cell in row[names:])])}</tr>")
    more = f"<p>... and {count - _ROWS_MAX:,} more; --json has them.</p>" if count > _ROWS_MAX else ""
    head = "".join(f"<th>{html.escape(head)}</th>" for head in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>{more}"
