"""The statistics of a fleet as one page of HTML that needs nothing from elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from jinja2 import Environment, PackageLoader
from matplotlib.figure import Figure

from immortal.pipeline.jobs.stats import Figures, Stats
from immortal.pipeline.jobs.trace import Node, Trace
from immortal.pipeline.report.charts import SERIES_MAX, bars, matrix, over_time, styled, svg_of
from immortal.protocol.safe_output import printable

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


# The tree of a trace: a picture with time to the right and a lane for each service; DOT for graphviz; text.


LABELS_MAX = 60
"""With more nodes the picture shows the shape only: text would cover it."""


@styled
def trace_svg(trace: Trace) -> str:
    """Arrows lead from a cause to its effect: full where the cause is exact, dotted where it is one of several."""
    lanes = {name: index for index, name in enumerate(_lanes(trace.nodes))}
    start_ns = trace.nodes[0].time_ns
    figure = Figure(figsize=(10.0, max(2.0, 0.55 * len(lanes) + 1.2)), layout="constrained")
    axes = figure.add_subplot()
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlabel("ms after the first record")
    places = [((node.time_ns - start_ns) / 1e6, lanes[node.instance]) for node in trace.nodes]
    for node, place in zip(trace.nodes, places, strict=True):
        if node.parent is not None:
            style = {"arrowstyle": "->", "color": "#36c", "lw": 0.8, "ls": "-" if node.candidates == 1 else ":"}
            axes.annotate("", xy=place, xytext=places[node.parent], arrowprops=style)
        if len(trace.nodes) <= LABELS_MAX:
            axes.annotate(_short(node), xy=place, xytext=(3, 5), textcoords="offset points", fontsize=7)
    axes.plot([x for x, _ in places], [y for _, y in places], "o", color="#234", markersize=3)
    return svg_of(figure)


def trace_dot(trace: Trace) -> str:
    """For `dot -Tsvg`."""
    lines = ["digraph trace {", "  rankdir=LR; node [shape=box, fontsize=10];"]
    for node in trace.nodes:
        label = f"{printable(node.instance)} record {node.record}\n{printable(', '.join(node.methods))}"
        lines.append(f"  n{node.number} [label={_quoted(label)}];")
    for node in trace.nodes:
        if node.parent is not None:
            style = "" if node.candidates == 1 else f', style=dotted, label="1 of {node.candidates}"'
            lines.append(f"  n{node.parent} -> n{node.number} [weight=1{style}];")
    return "\n".join([*lines, "}", ""])


def trace_lines(trace: Trace) -> Iterator[str]:
    """The tree, one line for each node, children below their parents."""
    children: dict[int | None, list[Node]] = {}
    for node in trace.nodes:
        children.setdefault(node.parent, []).append(node)
    waiting = list(reversed(children.get(None, [])))
    while waiting:
        node = waiting.pop()
        waiting += reversed(children.get(node.number, []))
        messages = f"{node.first}" if node.first == node.last else f"{node.first}-{node.last}"
        certainty = "" if node.parent is None else "  exact" if node.candidates == 1 else f"  one of {node.candidates}"
        latency_ms = (node.time_ns - node.sent_ns) / 1e6
        yield (
            f"{'  ' * node.depth}{node.instance} record {node.record}  {', '.join(node.methods)}"
            f"  {node.source} {messages}  {latency_ms:.3f} ms under way{certainty}"
        )
    if trace.cut_off:
        yield f"... and more than the {len(trace.nodes)} that --limit allows"


def _lanes(nodes: Sequence[Node]) -> list[str]:
    """Services in the order in which they come up."""
    return list(dict.fromkeys(node.instance for node in nodes))


def _short(node: Node) -> str:
    return f"{node.record} {node.methods[0] if len(node.methods) == 1 else ''}".strip()


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
