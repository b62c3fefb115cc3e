"""docs/benchmarks.md and its charts, out of the figures of one or more runs: `report.md` with what they hold."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from scripts.benchmarks.charts import draw
from scripts.benchmarks.failover_report import put, section_of
from scripts.benchmarks.figures import IMMORTAL, Figure, Target, median, number, spread
from scripts.benchmarks.run import PARTS, figures_of

Run = dict[str, Any]


def write_report(runs: Sequence[Run], docs: Path) -> Path:
    """Write ``docs``/benchmarks.md, with charts in ``docs``/benchmarks; where it is. Several runs become one table."""
    merged = {name: _merge([run["parts"][name] for run in runs if name in run["parts"]]) for name in PARTS}
    figures = [figure for some in merged.values() for figure in some]
    groups: dict[str, list[Figure]] = {}
    for figure in figures:
        if figure.group:
            groups.setdefault(figure.group, []).append(figure)
    charts = draw(groups, docs / "benchmarks")
    machines = [{key: value for key, value in run["machine"].items() if key != "commit"} for run in runs]
    by_run = [{figure.name: figure for figure in _figures(run)} for run in runs]
    templates = Environment(  # noqa: S701 (Markdown)
        loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    templates.filters |= {"cell": _cell, "median": median, "number": number, "spread": spread}
    text = templates.get_template("report.md").render(
        runs=runs,
        machines=[machine for index, machine in enumerate(machines) if machine not in machines[:index]],
        wanted=[(figure, target) for figure in figures for target in figure.targets],
        by_run=by_run if len(runs) > 1 else [],
        measured=_measured,
        immortal=IMMORTAL,
        parts=[{"title": _title(PARTS[name]), "figures": some} for name, some in merged.items() if some],
        charts={group: os.path.relpath(path, docs) for group, path in charts.items()},
        left_out=list(_left_out(runs)),
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
    path = docs / "benchmarks.md"
    failover = section_of(path.read_text()) if path.exists() else ""  # of runs of their own
    path.write_text(f"{text.strip()}\n")
    if failover:
        put(path, failover)
    return path


def _figures(run: Run) -> Iterator[Figure]:
    for part in run["parts"].values():
        yield from figures_of(part)


def _merge(parts: Sequence[dict[str, Any]]) -> list[Figure]:
    """Figures of the same name: the samples of all runs, which stay as they are."""
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


def _left_out(runs: Sequence[Run]) -> Iterator[str]:
    for index, run in enumerate(runs, start=1):
        for what, why in run["skipped"].items():
            yield f"Run {index}: {what}: {why}"
        for part in run["parts"].values():
            if part["error"]:
                yield f"Run {index}: {part['title']}: failed: {part['error'].splitlines()[0]}"
        missing = [title for name, title in PARTS.items() if name not in run["parts"]]
        if missing:
            yield f"Run {index} did not have: {'; '.join(missing)}"


def _title(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
