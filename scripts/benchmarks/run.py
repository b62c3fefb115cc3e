"""A run of the suite: its parts, one after the other, and all that came of them."""

from __future__ import annotations

import datetime
import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from immortal.bench.processes import BenchError
from scripts.benchmarks import context as machine
from scripts.benchmarks.context import Context
from scripts.benchmarks.figures import Figure, number, spread

FORMAT_VERSION = 1
PARTS = {
    "one_way": "one-way calls by size, and what they cost",
    "calls": "awaited calls",
    "queries": "calls from outside, logged and not",
    "shapes": "fan-out, fan-in, a chain of five",
    "durable": "a durable handler of three steps",
    "database": "a log in PostgreSQL",
    "recovery": "replay, and kill -9",
    "checkpoint": "checkpoint pauses",
    "start": "start and idle memory",
    "growth": "growth: log, state, peers, waiting handlers",
    "slow_disk": "slower disks",
    "curve": "encrypted peers",
    "pirate": "request-reply to a pool of servers",
    "queue": "a queue of tasks",
    "harmony": "a batch of tasks",
    "clone": "copies of a table",
    "ordering": "multicasts in one order",
}


def run_suite(
    context: Context, parts: Sequence[str], save: Callable[[dict[str, Any]], None], *, quick: bool
) -> dict[str, Any]:
    """Run the suite and return the content of the JSON file. A part that fails is noted; the others still run.

    ``save`` gets it after each part, so that a run that is cut short leaves what it had.
    """
    begun = _now()
    load = machine.load_average()
    results: dict[str, Any] = {}
    whole: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "begun": begun,
        "ended": begun,
        "quick": quick,
        "repeats": context.repeats,
        "load": {"start": load, "end": load},
        "machine": machine.describe(context.folder),
        "skipped": {},
        "parts": results,
    }
    for name in parts:
        module = importlib.import_module(f"scripts.benchmarks.parts.{name}")
        started_s = time.monotonic()
        figures: list[Figure] = []
        error = ""
        try:
            figures = module.run(context)
        except BenchError as failed:
            error = str(failed)
        results[name] = {
            "title": PARTS[name],
            "seconds": round(time.monotonic() - started_s, 1),
            "error": error,
            "load": machine.load_average(),
            "figures": [figure.to_json() for figure in figures],
        }
        whole["ended"] = _now()
        whole["load"]["end"] = machine.load_average()
        whole["skipped"] = dict(sorted(context.skipped.items()))
        save(whole)
    return whole


def figures_of(part: dict[str, Any]) -> list[Figure]:
    return [Figure.from_json(data) for data in part["figures"]]


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


# The figures on a terminal.


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
            for line in format_targets(figure):
                console.print(f"target: {figure.name}: {line}", markup=False, highlight=False)
    for what, why in run["skipped"].items():
        console.print(f"skipped: {what}: {why}", markup=False)
    loads = " and ".join(f"{run['load'][when][0]:.1f} at the {when}" for when in ("start", "end"))
    console.print(f"load average: {loads}, on {run['machine']['cores']} cores")


def format_targets(figure: Figure) -> list[str]:
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
