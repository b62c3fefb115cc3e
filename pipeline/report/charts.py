"""Charts as SVG text, to stand within a page of HTML or in a file of their own."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import matplotlib as mpl
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure

from immortal.protocol.safe_output import printable

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

SERIES_MAX = 8
"""More lines than this in one chart are not told apart; the others are summed up, or left out."""

POINTS_MAX = 60
"""Fewer than this in one line are marked one by one."""

BARS_MAX = 20
NAMES_MAX = 40  # of a matrix

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "immortal",
    "text.parse_math": False,  # a name may hold dollars
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
_DAY_NS = 86_400_000_000_000

Series = Mapping[str, Mapping[int, float]]

P = ParamSpec("P")
R = TypeVar("R")


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """For what draws: matplotlib asks for some of the style as it makes a figure, for some as it writes it."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> R:
        with mpl.rc_context(STYLE):
            return draw(*args, **kwargs)

    return drawn


@styled
def over_time(title: str, unit: str, series: Series, bin_ns: int, *, stacked: bool = False) -> str:
    """One line for each name, or one layer of steps; ``series``: by name, then by the start of a part of the time.

    Starts are in ns since the Unix epoch, ``bin_ns`` apart or more.
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
    """Draw a legend by name. Names are set afterwards: a legend leaves out those that begin with "_"."""
    numbers = [str(number) for number in range(len(names))]
    legend = axes.legend(drawn, numbers, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(name)


def _day(time_ns: int) -> float:
    """A time as matplotlib counts it."""
    return time_ns / _DAY_NS


@styled
def bars(title: str, unit: str, values: Sequence[tuple[str, float]]) -> str:
    """Horizontal bars, the first on top."""
    shown = list(values[:BARS_MAX])
    figure, axes = _figure(title, "", height=max(1.5, 0.28 * len(shown) + 0.9))
    axes.barh(range(len(shown)), [value for _, value in shown])
    axes.set_yticks(range(len(shown)), [name for name, _ in shown])
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    return svg_of(figure)


@styled
def matrix(title: str, rows: Sequence[str], columns: Sequence[str], values: Mapping[tuple[str, str], float]) -> str:
    """A field for each pair (row, column), the darker the more."""
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
    """Without the XML declaration, and the same each time."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    lines = text[text.index("<svg") :].split("\n")
    return "\n".join(map(printable, lines))  # names come from logs; XML has no control characters
