"""docs/benchmarks.md and its charts, out of the figures of one or more runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.benchmarks.charts import draw
from scripts.benchmarks.figures import IMMORTAL, Figure, Target, median, number, spread
from scripts.benchmarks.run import PARTS, figures_of

Run = dict[str, Any]
RIVALS = Path(__file__).with_name("rivals.md")


def write_report(runs: Sequence[Run], docs: Path) -> Path:
    """Write ``docs``/benchmarks.md, with charts in ``docs``/benchmarks; where it is. Several runs become one table."""
    merged = {name: _merge([run["parts"][name] for run in runs if name in run["parts"]]) for name in PARTS}
    groups: dict[str, list[Figure]] = {}
    for figures in merged.values():
        for figure in figures:
            if figure.group:
                groups.setdefault(figure.group, []).append(figure)
    charts = draw(groups, docs / "benchmarks")
    sections = [
        _head(runs),
        _machine(runs),
        _targets(runs, merged),
        *(_part(name, figures, charts, docs) for name, figures in merged.items() if figures),
        _left_out(runs),
        _noise(runs),
        RIVALS.read_text().strip(),
    ]
    path = docs / "benchmarks.md"
    path.write_text("\n\n".join(section for section in sections if section) + "\n")
    return path


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


def _head(runs: Sequence[Run]) -> str:
    lines = [
        "# Benchmarks",
        "",
        "Written by `scripts/bench --report`; do not edit. `scripts/bench` runs all of it on your machine.",
        "",
        "All of Immortal's figures are durable: each call is in the log of its receiver, synced, before its handler"
        " sees it. gRPC keeps nothing. Implementations take turns in the same run; a figure is the median of all turns,"
        " in parentheses the lowest and the highest. What receivers counted and what callers got back was checked.",
        "",
        "| run | from | to | turns | load average at the start | at the end, by the suite too |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for index, run in enumerate(runs, start=1):
        load = run["load"]
        quick = ", quick" if run["quick"] else ""
        lines.append(
            f"| {index} | {run['begun']} | {run['ended']} | {run['repeats']}{quick} | {load['start'][0]} |"
            f" {load['end'][0]} |"
        )
    return "\n".join(lines)


def _machine(runs: Sequence[Run]) -> str:
    lines = ["## The machine"]
    known: list[dict[str, Any]] = []
    for run in runs:
        machine = {key: value for key, value in run["machine"].items() if key != "commit"}
        if machine in known:
            continue
        known.append(machine)
        packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
        lines += [
            "",
            f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB of memory; Linux"
            f" {machine['kernel']}, {machine['filesystem']}; Python {machine['python']}; {packages}.",
        ]
    return "\n".join(lines)


def _targets(runs: Sequence[Run], merged: dict[str, list[Figure]]) -> str:
    wanted = [(figure, target) for figures in merged.values() for figure in figures for target in figure.targets]
    if not wanted:
        return ""
    several = len(runs) > 1
    by_runs = [f"run {index}" for index in range(1, len(runs) + 1)] if several else []
    head = ["figure", "target", "measured", *by_runs, ""]
    lines = ["## Targets", "", _row(head), _row(["---"] * len(head))]
    by_run = [{figure.name: figure for part in run["parts"].values() for figure in figures_of(part)} for run in runs]
    for figure, target in wanted:
        measured = target.measured(figure.samples)
        if measured is None:
            continue
        cells = [_named(figure, target), target.in_words(figure.unit), _measured(target, figure)]
        if several:
            cells += [_measured(target, run.get(figure.name)) for run in by_run]
        lines.append(_row([*cells, "met" if target.met(figure.samples) else "**missed**"]))
    return "\n".join(lines)


def _named(figure: Figure, target: Target) -> str:
    return figure.name if target.of == IMMORTAL else f"{figure.name}: {target.of}"


def _measured(target: Target, figure: Figure | None) -> str:
    measured = None if figure is None else target.measured(figure.samples)
    if measured is None:
        return "-"
    return f"{number(measured)} times" if target.against else number(measured)


def _part(name: str, figures: list[Figure], charts: dict[str, Path], docs: Path) -> str:
    title = PARTS[name]
    lines = [f"## {title[0].upper()}{title[1:]}", "", _row(["", "unit", "", "median (lowest-highest)"])]
    lines.append(_row(["---", "---", "---", "---:"]))
    notes = []
    for figure in figures:
        heading, unit = figure.name, f"{figure.unit}, {figure.better} is better"
        for implementation, values in figure.samples.items():
            lines.append(_row([heading, unit, implementation, spread(values)]))
            heading = unit = ""
        if figure.note and figure.note not in notes:
            notes.append(figure.note)
    for note in notes:
        lines += ["", note]
    groups = dict.fromkeys(figure.group for figure in figures if figure.group in charts)
    for group in groups:
        lines += ["", f"![{group}]({os.path.relpath(charts[group], docs)})"]
    return "\n".join(lines)


def _left_out(runs: Sequence[Run]) -> str:
    lines = []
    for index, run in enumerate(runs, start=1):
        lines += [f"- Run {index}: {what}: {why}" for what, why in run["skipped"].items()]
        lines += [
            f"- Run {index}: {part['title']}: failed: {part['error'].splitlines()[0]}"
            for part in run["parts"].values()
            if part["error"]
        ]
        missing = [title for name, title in PARTS.items() if name not in run["parts"]]
        if missing:
            lines.append(f"- Run {index} did not have: {'; '.join(missing)}")
    return "\n".join(["## Left out", "", *lines]) if lines else ""


def _noise(runs: Sequence[Run]) -> str:
    cores = runs[0]["machine"]["cores"]
    loads = [run["load"][when][0] for run in runs for when in ("start", "end")]
    spreads = [
        max(values) / min(values)
        for run in runs
        for part in run["parts"].values()
        for figure in figures_of(part)
        for values in figure.samples.values()
        if len(values) > 1 and min(values) > 0
    ]
    lines = ["## How far to trust it", ""]
    if loads and min(loads[::2]) > 0.5 * cores:
        lines.append(
            f"The machine was busy with other work: the load average was {number(min(loads))} to {number(max(loads))}"
            f" on {cores} cores. Absolute figures are too low, and too high where a time is measured; a ratio within a"
            " run says more, and is still uncertain."
        )
    else:
        lines.append(f"The load average was {number(min(loads))} to {number(max(loads))} on {cores} cores.")
    if spreads:
        lines.append(
            f"Between the lowest and the highest turn of the same figure lies a factor of {number(median(spreads))}"
            f" (median), {number(max(spreads))} at worst."
        )
    lines += [
        "",
        "- Clients, servers, coordinators and databases share the cores: on more cores each would be faster.",
        "- The disk is this machine's: its own figures stand beside ours. Disks that take milliseconds for a sync have"
        " a part of their own.",
        "- The limits in the tables are of one thing at a time: nobody reaches all of them at once.",
        "- DBOS's workflows are begun in the process that runs them, Restate's through its ingress, ours by another"
        " service whose own log is synced as well.",
        "- The rivals are as they come, but that DBOS may use 64 connections. SQLite syncs fully, PostgreSQL and"
        " Restate by their defaults; Restate's server was seen to call fdatasync some eight times for a handler of"
        " three steps.",
    ]
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
