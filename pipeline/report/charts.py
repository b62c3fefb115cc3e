"""Charts as SVG text, to stand within a page of HTML or in a file of their own."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

if TYPE_CHECKING:
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
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
_DAY_NS = 86_400_000_000_000


def over_time(title: str, unit: str, series: Mapping[str, Mapping[int, float]], *, stacked: bool = False) -> str:
    """One line (or layer) for each name; ``series``: by name, then by ns since the Unix epoch."""
    figure, axes = _figure(title, unit)
    times = sorted({time_ns for points in series.values() for time_ns in points})
    if stacked and times:
        layers = [[points.get(time_ns, 0.0) for time_ns in times] for points in series.values()]
        axes.stackplot([_day(time_ns) for time_ns in times], *layers, labels=list(series))
    else:
        for name, points in series.items():
            moments = sorted(points)
            marker = "." if len(points) < POINTS_MAX else None
            axes.plot([_day(time_ns) for time_ns in moments], [points[time_ns] for time_ns in moments], marker=marker)
            axes.lines[-1].set_label(name)
    axes.set_ylim(bottom=0)
    if series:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.xaxis_date("UTC")
    figure.autofmt_xdate()
    return svg_of(figure)


def _day(time_ns: int) -> float:
    """A time as matplotlib counts it."""
    return time_ns / _DAY_NS


def bars(title: str, unit: str, values: Sequence[tuple[str, float]]) -> str:
    """Horizontal bars, the first on top."""
    shown = list(values[:BARS_MAX])
    figure, axes = _figure(title, "", height=max(1.5, 0.28 * len(shown) + 0.9))
    axes.barh(range(len(shown)), [value for _, value in shown])
    axes.set_yticks(range(len(shown)), [name for name, _ in shown])
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    return svg_of(figure)


def matrix(title: str, rows: Sequence[str], columns: Sequence[str], values: Mapping[tuple[str, str], float]) -> str:
    """A field for each pair (row, column), the darker the more."""
    rows, columns = rows[:NAMES_MAX], columns[:NAMES_MAX]
    if not rows or not columns:
        return bars(title, "", [])
    figure, axes = _figure(title, "", height=max(2.5, 0.24 * len(rows) + 1.6))
    axes.grid(visible=False)
    image = axes.imshow([[values.get((row, column), 0.0) for column in columns] for row in rows], cmap="Blues")
    axes.set_xticks(range(len(columns)), columns, rotation=90)
    axes.set_yticks(range(len(rows)), rows)
    figure.colorbar(image, ax=axes)
    return svg_of(figure)


def _figure(title: str, unit: str, height: float = 3.0) -> tuple[Figure, Axes]:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.0, height), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title, loc="left")
        axes.set_ylabel(unit)
    return figure, axes


def svg_of(figure: Figure) -> str:
    """Without the XML declaration, and the same each time."""
    buffer = io.StringIO()
    with mpl.rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
