"""Program of ``scripts/bench``: run the suite, or write the report of runs."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from immortal.bench.cli import numbers
from immortal.bench.harness import QUICK, Amounts, Context, Figure, progress_lines, show
from immortal.bench.processes import BenchError
from immortal.protocol.command_line import echo
from scripts.benchmarks.machine import ROOT, describe, load_average, prepare_environment
from scripts.benchmarks.parts import PARTS, figures_of

_log_sizes = numbers("sizes in GiB", 0.001, 1000, "1,10,50", float)
_peers = numbers("numbers of peers", 1, 1000, "2,50,200")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Everything with small numbers: some minutes. For a look, not for figures.")
@click.option("--only", multiple=True, type=click.Choice(list(PARTS)), help="Only this part; may be given again.")
@click.option("--repeats", type=click.IntRange(1, 100), help="Turns of each implementation. [default: 5; quick: 2]")
@click.option("--seconds", type=click.FloatRange(0.01, 600), help="Of one turn, roughly. [default: 2; quick: 0.4]")
@click.option("--log-sizes", callback=_log_sizes, metavar="GIB,...", help="Of the logs in 'growth'. [default: 1,10]")
@click.option("--peers", callback=_peers, metavar="N,...", help="Numbers of peers in 'growth'. [default: 2,8,32]")
@click.option("--folder", type=click.Path(file_okay=False, exists=True, path_type=Path), help="Where the logs go.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures there.")
@click.option(
    "--report",
    "reports",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Run nothing: write docs/benchmarks/figures.txt from this file of figures; may be given again.",
)
@click.option(
    "--docs",
    type=click.Path(file_okay=False, path_type=Path),
    default=ROOT / "docs",
    help="With --report: the folder to write to. [default: docs]",
)
def main(
    quick: bool,
    only: tuple[str, ...],
    repeats: int | None,
    seconds: float | None,
    log_sizes: list[float] | None,
    peers: list[float] | None,
    folder: Path | None,
    json_file: Path | None,
    reports: tuple[Path, ...],
    docs: Path,
) -> None:
    """Immortal beside its rivals and beside what the machine itself can do, in one run."""
    if reports:
        from scripts.benchmarks.report import write_report

        written = write_report([_read(path) for path in reports], docs)
        echo(f"written: {written}")
        return
    if json_file is not None and not json_file.parent.is_dir():
        raise click.UsageError(f"--json {json_file}: there is no folder {json_file.parent}")
    prepare_environment()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the servers are stopped first
    amounts = QUICK if quick else Amounts()
    changes: dict[str, Any] = {"repeats": repeats, "seconds": seconds, "log_sizes_gib": log_sizes, "peer_counts": peers}
    amounts = dataclasses.replace(amounts, **{name: value for name, value in changes.items() if value is not None})

    def save(run: dict[str, Any]) -> None:
        if json_file is not None:
            json_file.write_text(json.dumps(run, indent=1) + "\n")

    with progress_lines() as progress:
        context = Context(amounts, folder or Path(tempfile.gettempdir()), progress)
        result = run_suite(context, only or list(PARTS), save, quick=quick)
    for part in result["parts"].values():
        if part["error"]:
            echo(f"{part['title']}: failed: {part['error']}")
        else:
            show(part["title"], figures_of(part))
    for what, why in result["skipped"].items():
        echo(f"skipped: {what}: {why}")
    loads = " and ".join(f"{result['load'][when][0]:.1f} at the {when}" for when in ("start", "end"))
    echo(f"load average: {loads}, on {result['machine']['cores']} cores")
    if any(part["error"] for part in result["parts"].values()):
        sys.exit(1)


def _read(path: Path) -> dict[str, Any]:
    try:
        run: dict[str, Any] = json.loads(path.read_text())
        version = run["version"]
    except (ValueError, KeyError, TypeError):
        raise click.UsageError(f"{path} is no file of figures: 'scripts/bench --json {path}' writes one") from None
    if version != FORMAT_VERSION:
        raise click.UsageError(f"{path} is of version {version}, {FORMAT_VERSION} was expected: run the suite again")
    return run


# A run of the suite: its parts, one after the other, and their results.


FORMAT_VERSION = 1


def run_suite(
    context: Context, parts: Sequence[str], save: Callable[[dict[str, Any]], None], *, quick: bool
) -> dict[str, Any]:
    """Run the suite and return the content of the JSON file. A part that fails is noted; the others still run.

    ``save`` gets the content after each part, so that an interrupted run keeps its results.
    """
    results: dict[str, Any] = {}
    load = load_average()
    whole: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "begun": _now(),
        "quick": quick,
        "repeats": context.amounts.repeats,
        "machine": describe(context.folder),
        "parts": results,
    }
    for name in parts:
        module, title = PARTS[name]
        part = getattr(importlib.import_module(f"scripts.benchmarks.parts.{module}"), name)
        started_s = time.monotonic()
        figures: list[Figure] = []
        error = ""
        try:
            figures = part(context)
        except BenchError as failed:
            error = str(failed)
        results[name] = {
            "title": title,
            "seconds": round(time.monotonic() - started_s, 1),
            "error": error,
            "load": load_average(),
            "figures": [dataclasses.asdict(figure) for figure in figures],
        }
        ended = {"ended": _now(), "load": {"start": load, "end": load_average()}}
        whole |= {**ended, "skipped": dict(sorted(context.skipped.items()))}
        save(whole)
    return whole


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    try:
        main(prog_name="scripts/bench")
    except BenchError as error:
        sys.exit(f"error: {error}")
