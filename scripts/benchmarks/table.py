"""The figures on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.benchmarks.figures import Figure, number, spread
from scripts.benchmarks.run import figures_of


def show(run: dict[str, Any], console: Console) -> None:
    for part in run["parts"].values():
        if part["error"]:
            console.print(f"{part['title']}: failed: {part['error']}", markup=False, style="red")
            continue
        table = Table(title=f"{part['title']}: medians (lowest-highest)", title_justify="left")
        table.add_column("")
        table.add_column("")
        table.add_column("", justify="right", no_wrap=True)
        figures = figures_of(part)
        for figure in figures:
            heading = f"{figure.name}, {figure.unit}"
            for implementation, values in figure.samples.items():
                table.add_row(heading, implementation, spread(values))
                heading = ""
            table.add_section()
        console.print(table)
        for figure in figures:
            for line in targets_in_words(figure):
                console.print(f"target: {figure.name}: {line}", markup=False, highlight=False)
    for what, why in run["skipped"].items():
        console.print(f"skipped: {what}: {why}", markup=False)
    loads = " and ".join(f"{run['load'][when][0]:.1f} at the {when}" for when in ("start", "end"))
    console.print(f"load average: {loads}, on {run['machine']['cores']} cores")


def targets_in_words(figure: Figure) -> list[str]:
    lines = []
    for target in figure.targets:
        measured = target.measured(figure.samples)
        if measured is None:
            continue
        verdict = "met" if target.met(figure.samples) else "missed"
        value = number(measured)
        times = " times" if target.against else ""
        of = "" if target.of == "immortal" else f"{target.of}: "
        lines.append(f"{of}{target.in_words(figure.unit)}: {value}{times}, {verdict}")
    return lines
