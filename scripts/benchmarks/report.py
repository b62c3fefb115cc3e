"""Report of one or more runs: the figures that the site shows in docs/benchmarks.md, and their charts."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from immortal.bench.harness import IMMORTAL, LIMITS, Figure, Target, number, spread
from immortal.bench.workload import percentile
from scripts.benchmarks.parts import TITLES, figures_of

Run = dict[str, Any]


def write_report(runs: Sequence[Run], docs: Path) -> Path:
    """Write figures.txt and its charts to ``docs``/benchmarks; return its path. Several runs become one table."""
    merged = {name: _merge([run["parts"][name] for run in runs if name in run["parts"]]) for name in TITLES}
    figures = [figure for some in merged.values() for figure in some]
    groups: dict[str, list[Figure]] = {}
    for figure in figures:
        if figure.group:
            groups.setdefault(figure.group, []).append(figure)
    charts = draw(groups, docs / "benchmarks")
    machines = [{key: value for key, value in run["machine"].items() if key != "commit"} for run in runs]
    by_run = [{figure.name: figure for figure in _figures(run)} for run in runs]
    text = render(
        "report.md",
        runs=runs,
        machines=[machine for index, machine in enumerate(machines) if machine not in machines[:index]],
        wanted=[(figure, target) for figure in figures for target in figure.targets],
        by_run=by_run if len(runs) > 1 else [],
        measured=_measured,
        immortal=IMMORTAL,
        parts=[{"title": _title(TITLES[name]), "figures": some} for name, some in merged.items() if some],
        charts={group: os.path.relpath(path, docs) for group, path in charts.items()},
        left_out=list(_skipped_lines(runs)),
        loads=[run["load"][when][0] for run in runs for when in ("start", "end")],
        cores=runs[0]["machine"]["cores"],
        spreads=[
            max(values) / min(values)
            for run in runs
            for figure in _figures(run)
            for values in figure.samples.values()
            if len(values) > 1 and min(values) > 0
        ],
    )
    path = docs / "benchmarks" / "figures.txt"
    path.write_text(text)
    return path


def render(template: str, **values: Any) -> str:
    """Return a template of this folder with its values."""
    folder = FileSystemLoader(Path(__file__).parent)
    templates = Environment(  # noqa: S701 (Markdown)
        loader=folder, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    templates.filters |= {"cell": lambda text: text.replace("|", "\\|"), "percentile": percentile}
    templates.filters |= {"median": median, "number": number, "spread": spread}
    return f"{templates.get_template(template).render(**values).strip()}\n"


def _figures(run: Run) -> Iterator[Figure]:
    for part in run["parts"].values():
        yield from figures_of(part)


def _merge(parts: Sequence[dict[str, Any]]) -> list[Figure]:
    """Merge figures of the same name: they get the samples of all runs, whose own figures stay unchanged."""
    merged: dict[str, Figure] = {}
    for part in parts:
        for figure in figures_of(part):
            known = merged.get(figure.name)
            if known is None:
                known = merged[figure.name] = replace(figure, samples={}, targets=[])
            for name, values in figure.samples.items():
                known.samples.setdefault(name, []).extend(values)
            known.targets.extend(target for target in figure.targets if target not in known.targets)
    return list(merged.values())


def _measured(target: Target, figure: Figure | None) -> str:
    measured = None if figure is None else target.measured(figure.samples)
    if measured is None:
        return "-"
    return f"{number(measured)} times" if target.against else number(measured)


def _skipped_lines(runs: Sequence[Run]) -> Iterator[str]:
    for index, run in enumerate(runs, start=1):
        for what, why in run["skipped"].items():
            yield f"Run {index}: {what}: {why}"
        for part in run["parts"].values():
            if part["error"]:
                yield f"Run {index}: {part['title']}: failed: {part['error'].splitlines()[0]}"
        missing = [title for name, title in TITLES.items() if name not in run["parts"]]
        if missing:
            yield f"Run {index} did not have: {'; '.join(missing)}"


def _title(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"


# Charts of figures that belong together: one file for each group.


mpl.use("agg")
COLORS = ("#1f4e79", "#c05020", "#2e7d32", "#7b3fa0", "#8a6d1d", "#444444", "#1a8a8a")
SIZE_INCHES = (7.0, 4.0)
DPI = 100


def draw(groups: dict[str, list[Figure]], folder: Path) -> dict[str, Path]:
    """Draw each group that has at least two points; return its file."""
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
    chart, axes = plt.subplots(figsize=SIZE_INCHES)
    figures = sorted(figures, key=lambda figure: figure.x or 0.0)
    names = dict.fromkeys(name for figure in figures for name in figure.samples)
    all_middles = []
    for name, color in zip(names, itertools.cycle(COLORS)):
        points = [(figure.x or 0.0, figure.samples[name]) for figure in figures if name in figure.samples]
        middles = [median(values) for _, values in points]
        all_middles += middles
        axes.errorbar(
            [x for x, _ in points],
            middles,
            yerr=[
                [middle - min(values) for middle, (_, values) in zip(middles, points, strict=True)],
                [max(values) - middle for middle, (_, values) in zip(middles, points, strict=True)],
            ],
            label=name,
            color=color,
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
    if min(all_middles) > 0 and max(all_middles) / min(all_middles) > 20:
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
