"""Charts as SVG, and HTML pages without references to other files, such as the statistics of a fleet."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import matplotlib as mpl
from jinja2 import Environment, PackageLoader
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure

from immortal.pipeline.jobs.stats import Stats
from immortal.pipeline.jobs.trace import Node, Trace
from immortal.pipeline.report.text import figure_cells, method_rows, talker_rows
from immortal.protocol.command_line import counted
from immortal.protocol.safe_output import printable

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

SERIES_MAX = 8
"""Maximum of lines in one chart: more can't be told apart, so the others are summed up or left out."""

POINTS_MAX = 60
"""Number of points from which a line no longer marks each point."""

BARS_MAX = 20
NAMES_MAX = 40  # of a matrix

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "immortal",
    "text.parse_math": False,  # a name can hold dollars
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
_DAY_NS = 86_400_000_000_000

Series = Mapping[str, Mapping[int, float]]

P = ParamSpec("P")
R = TypeVar("R")


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Apply our style while ``draw`` runs: matplotlib reads part of it for a figure, and part when it writes one."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> R:
        with mpl.rc_context(STYLE):
            return draw(*args, **kwargs)

    return drawn


@styled
def over_time(title: str, unit: str, series: Series, bin_ns: int, *, stacked: bool = False) -> str:
    """Draw a line (``stacked``: a layer of steps) for each name. ``series``: values by name, then by start of a bin.

    Starts are in ns since the Unix epoch, at least ``bin_ns`` apart.
    """
    figure, axes = _figure(title, unit)
    starts = sorted({start_ns for points in series.values() for start_ns in points})
    if starts:
        draw = _layers if stacked else _lines
        _legend(axes, draw(axes, series, starts, bin_ns), list(series))
        axes.set_xlim(_day(starts[0]), _day(starts[-1] + bin_ns))
    axes.set_ylim(bottom=0)
    locator = AutoDateLocator("UTC")  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, "UTC"))  # type: ignore[no-untyped-call]
    return svg_of(figure)


def _layers(axes: Axes, series: Series, starts: Sequence[int], bin_ns: int) -> Sequence[Artist]:
    edges = range(starts[0], starts[-1] + 2 * bin_ns, bin_ns)
    values = [[points.get(start_ns, 0.0) for start_ns in edges] for points in series.values()]
    return axes.stackplot([_day(edge_ns) for edge_ns in edges], *values, step="post")


def _lines(axes: Axes, series: Series, starts: Sequence[int], bin_ns: int) -> Sequence[Artist]:
    drawn: list[Artist] = []
    for points in series.values():
        middles = [_day(start_ns + bin_ns // 2) for start_ns in sorted(points)]
        marker = "." if len(points) < POINTS_MAX else None
        drawn += axes.plot(middles, [points[start_ns] for start_ns in sorted(points)], marker=marker)
    return drawn


def _legend(axes: Axes, drawn: Sequence[Artist], names: Sequence[str]) -> None:
    """Draw a legend of the names, set afterwards because matplotlib leaves out names that begin with "_"."""
    numbers = [str(number) for number in range(len(names))]
    legend = axes.legend(drawn, numbers, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(name)


def _day(time_ns: int) -> float:
    """Return a time in days since the epoch, as matplotlib counts."""
    return time_ns / _DAY_NS


@styled
def bars(title: str, unit: str, values: Sequence[tuple[str, float]]) -> str:
    """Draw horizontal bars, the first on top."""
    shown = list(values[:BARS_MAX])
    figure, axes = _figure(title, "", height=max(1.5, 0.28 * len(shown) + 0.9))
    axes.barh(range(len(shown)), [value for _, value in shown])
    axes.set_yticks(range(len(shown)), [name for name, _ in shown])
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    return svg_of(figure)


@styled
def matrix(title: str, rows: Sequence[str], columns: Sequence[str], values: Mapping[tuple[str, str], float]) -> str:
    """Draw a field for each pair (row, column): the larger its value, the darker."""
    rows, columns = rows[:NAMES_MAX], columns[:NAMES_MAX]
    if not rows or not columns:
        return bars(title, "", [])
    figure, axes = _figure("", "", height=max(2.5, 0.24 * len(rows) + 1.6))
    axes.grid(visible=False)
    figure.suptitle(title, x=0.0, ha="left", size="large")  # a narrow matrix has no room for it
    image = axes.imshow([[values.get((row, column), 0.0) for column in columns] for row in rows], cmap="Blues")
    axes.set_xticks(range(len(columns)), columns, rotation=90)
    axes.set_yticks(range(len(rows)), rows)
    figure.colorbar(image, ax=axes)
    return svg_of(figure)


def _figure(title: str, unit: str, height: float = 3.0) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9.0, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left")
    axes.set_ylabel(unit)
    return figure, axes


def svg_of(figure: Figure) -> str:
    """Return a figure as SVG without the XML declaration; the same figure gives the same text each time."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    lines = text[text.index("<svg") :].split("\n")
    return "\n".join(map(printable, lines))  # names come from logs; XML has no control characters


# Pages, and the statistics of a fleet as one.


ROWS_MAX = 200
_SIZES = {"MB": 1_000_000, "kB": 1_000, "bytes": 1}
_DURATIONS_MS = {"d": 86_400_000, "h": 3_600_000, "min": 60_000, "s": 1_000, "ms": 1}
_FIGURES = ("calls", "bytes", "median ms", "95 % ms", "99 % ms", "longest ms")


class Part(NamedTuple):
    """Chapter of a page. ``chart``: SVG. ``tree``: objects with a ``text`` and, as ``then``, such objects below."""

    title: str
    chart: str = ""
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    lines: Sequence[str] = ()
    tree: Sequence[Any] = ()


def page(title: str, about: str, parts: Sequence[Part], texts: Sequence[str], *, refresh_s: int = 0) -> str:
    """Return a page as HTML. ``texts``: heads of the columns that hold no numbers. ``refresh_s``: a browser loads it
    again after so long."""
    pages = Environment(loader=PackageLoader("immortal.pipeline.report", ""), autoescape=True)
    pages.filters["printable"] = printable
    values = {"title": title, "about": about, "parts": parts, "texts": texts, "rows_max": ROWS_MAX}
    return pages.get_template("page.html").render(values, refresh_s=refresh_s)


def stats_page(stats: Stats) -> str:
    """Return the whole page as HTML."""
    calls = sum(service.figures.calls for service in stats.services)
    size_bytes = sum(service.figures.size_bytes for service in stats.services)
    times = [time for service in stats.services for time in (service.first_ns, service.last_ns) if time]
    span = f"{time_text(min(times))} to {time_text(max(times))}" if times else "nothing logged"
    busiest = [service.instance for service in sorted(stats.services, key=lambda each: -each.figures.calls)]
    return page(
        f"A fleet of {counted(len(stats.services), 'service')}",
        f"{calls:,} calls with {size_bytes:,} bytes of arguments, {span}. Times are from sending to logging, by"
        " the clocks of both machines.",
        [
            Part("Calls", _calls_over_time(stats, busiest)),
            Part("From sending to logging", _latency_over_time(stats, busiest)),
            _services(stats),
            _methods(stats),
            _talkers(stats, busiest),
        ],
        ("service", "method", "from", "to"),
    )


def time_text(time_ns: int) -> str:
    return f"{datetime.fromtimestamp(time_ns // 1_000_000_000, UTC):%Y-%m-%d %H:%M:%S} UTC"


def duration_text(duration_ns: int) -> str:
    """Return a duration in the largest unit that divides it:
    >>> duration_text(30 * 60 * 10**9)
    '30 min'
    """
    duration_ms = duration_ns // 1_000_000
    unit, unit_ms = next((unit, unit_ms) for unit, unit_ms in _DURATIONS_MS.items() if duration_ms % unit_ms == 0)
    return f"{duration_ms // unit_ms} {unit}"


def _calls_over_time(stats: Stats, busiest: Sequence[str]) -> str:
    series: dict[str, dict[int, float]] = {name: {} for name in busiest[:SERIES_MAX]}
    for part in stats.bins:
        points = series.setdefault(part.instance if part.instance in busiest[:SERIES_MAX] else "all others", {})
        points[part.start_ns] = points.get(part.start_ns, 0) + part.figures.calls
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
            *figure_cells(service.figures),
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
    return Part("Services", chart, heads, rows)


def _methods(stats: Stats) -> Part:
    named = [(f"{method.instance}: {method.method}", float(method.figures.calls)) for method in stats.methods]
    chart = bars("the most called methods", "calls", named)
    return Part("Methods", chart, ("service", "method", *_FIGURES), method_rows(stats))


def _talkers(stats: Stats, busiest: Sequence[str]) -> Part:
    most_bytes = max((talker.figures.size_bytes for talker in stats.talkers), default=0)
    unit, unit_bytes = next((unit, size) for unit, size in _SIZES.items() if most_bytes >= size or size == 1)
    values = {(talker.sender, talker.receiver): talker.figures.size_bytes / unit_bytes for talker in stats.talkers}
    names = sorted({name for pair in values for name in pair}, key=lambda name: (name not in busiest, name))
    receivers = [name for name in names if name in busiest]
    chart = matrix(f"{unit} of arguments: from (row) to (column)", names, receivers, values)
    return Part("Who with whom", chart, ("from", "to", *_FIGURES), talker_rows(stats))


# The tree of a trace: a picture with time to the right and a lane for each service; DOT for graphviz; text.


LABELS_MAX = 60
"""Maximum of nodes with text in the picture: with more, text would cover its shape."""


@styled
def trace_svg(trace: Trace) -> str:
    """Draw a trace, with arrows from cause to effect: full if the cause is exact, dotted if it is one of several."""
    lanes = {name: index for index, name in enumerate(dict.fromkeys(node.instance for node in trace.nodes))}
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
    """Return a trace in the language of graphviz, for `dot -Tsvg`."""
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
    """Yield the tree as text: one line for each node, children below their parents."""
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


def _short(node: Node) -> str:
    return f"{node.record} {node.methods[0] if len(node.methods) == 1 else ''}".strip()


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
