"""Charts of figures that belong together: one file for each group."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

from scripts.benchmarks.figures import LIMITS, Figure, median, number

mpl.use("agg")
COLORS = ("#1f4e79", "#c05020", "#2e7d32", "#7b3fa0", "#8a6d1d", "#444444", "#1a8a8a")
SIZE_INCHES = (7.0, 4.0)
DPI = 100


def draw(groups: dict[str, list[Figure]], folder: Path) -> dict[str, Path]:
    """The file of each group that has at least two points."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for group, figures in groups.items():
        if len({figure.x for figure in figures}) < 2:
            continue
        path = folder / f"{re.sub(r'[^a-z0-9]+', '-', group.lower()).strip('-')}.png"
        _draw(group, figures, path)
        files[group] = path
    return files


def _draw(group: str, figures: list[Figure], path: Path) -> None:
    lines: dict[str, list[tuple[float, list[float]]]] = {}
    for figure in figures:
        for name, values in figure.samples.items():
            lines.setdefault(name, []).append((figure.x or 0.0, values))
    chart, axes = plt.subplots(figsize=SIZE_INCHES)
    colors = iter(COLORS * 3)
    lowest = min(median(values) for points in lines.values() for _, values in points)
    highest = max(median(values) for points in lines.values() for _, values in points)
    for name, points in lines.items():
        ordered = sorted(points)
        middles = [median(values) for _, values in ordered]
        spreads = [
            [middle - min(values) for middle, (_, values) in zip(middles, ordered, strict=True)],
            [max(values) - middle for middle, (_, values) in zip(middles, ordered, strict=True)],
        ]
        axes.errorbar(
            [x for x, _ in ordered],
            middles,
            yerr=spreads,
            label=name,
            color=next(colors),
            linestyle="--" if name in LIMITS else "-",
            marker="o",
            markersize=4,
            capsize=2,
        )
    xs = sorted({figure.x or 0.0 for figure in figures})
    if xs[0] > 0 and xs[-1] / xs[0] > 20:
        axes.set_xscale("log")
        axes.set_xticks(xs, [number(x) for x in xs], rotation=30 if xs[-1] > 1e5 else 0)
        axes.minorticks_off()
    if lowest > 0 and highest / lowest > 20:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(figures[0].x_label)
    axes.set_ylabel(figures[0].unit)
    axes.set_title(group, loc="left")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    chart.savefig(path, bbox_inches="tight", metadata={"Software": None}, dpi=DPI)
    plt.close(chart)
