"""``scripts/bench``: run the suite, or write the report of runs."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from immortal.bench.processes import BenchError
from scripts.benchmarks.context import ROOT, Amounts, Context, prepare_environment
from scripts.benchmarks.run import FORMAT_VERSION, PARTS, run_suite, show

LOG_SIZE_GIB_MAX = 1000.0


def _log_sizes(context: click.Context, parameter: click.Parameter, value: str | None) -> list[float] | None:
    if value is None:
        return None
    try:
        sizes = [float(part) for part in value.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(0 < size <= LOG_SIZE_GIB_MAX for size in sizes):
        raise click.BadParameter(f"{value!r}; sizes in GiB were expected, as in 1,10,50")
    return sizes


def _peers(context: click.Context, parameter: click.Parameter, value: str | None) -> list[int] | None:
    if value is None:
        return None
    try:
        counts = [int(part) for part in value.split(",")]
    except ValueError:
        counts = []
    if not counts or not all(1 <= count <= 1000 for count in counts):
        raise click.BadParameter(f"{value!r}; numbers of peers, 1 to 1000, were expected, as in 2,50,200")
    return counts


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
    peers: list[int] | None,
    folder: Path | None,
    json_file: Path | None,
    reports: tuple[Path, ...],
    docs: Path,
) -> None:
    """Immortal beside its rivals and beside what the machine itself can do, in one run."""
    if reports:
        from scripts.benchmarks.report import write_report

        written = write_report([_read(path) for path in reports], docs)
        click.echo(f"written: {written}")
        return
    if json_file is not None and not json_file.parent.is_dir():
        raise click.UsageError(f"--json {json_file}: there is no folder {json_file.parent}")
    prepare_environment()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # not before the servers are stopped
    amounts = Amounts.quick() if quick else Amounts()
    changes: dict[str, Any] = {"repeats": repeats, "seconds": seconds, "log_sizes_gib": log_sizes, "peer_counts": peers}
    amounts = dataclasses.replace(amounts, **{name: value for name, value in changes.items() if value is not None})

    def save(run: dict[str, Any]) -> None:
        if json_file is not None:
            json_file.write_text(json.dumps(run, indent=1) + "\n")

    console = Console(stderr=True)
    with console.status("starting") as status:
        progress = status.update if console.is_terminal else _lines(console)
        context = Context(amounts, folder or Path(tempfile.gettempdir()), progress)
        result = run_suite(context, only or list(PARTS), save, quick=quick)
    show(result, Console())
    if any(part["error"] for part in result["parts"].values()):
        sys.exit(1)


def _lines(console: Console) -> Any:
    """Progress where no terminal shows it: a line for each part of the text in front of the colon, not each turn."""
    said: set[str] = set()

    def progress(text: str) -> None:
        what = text.partition(":")[0]
        if what not in said:
            said.add(what)
            console.print(what, markup=False, highlight=False)

    return progress


def _read(path: Path) -> dict[str, Any]:
    try:
        run: dict[str, Any] = json.loads(path.read_text())
        version = run["version"]
    except (ValueError, KeyError, TypeError):
        raise click.UsageError(f"{path} is no file of figures: 'scripts/bench --json {path}' writes one") from None
    if version != FORMAT_VERSION:
        raise click.UsageError(f"{path} is of version {version}, {FORMAT_VERSION} was expected: run the suite again")
    return run


if __name__ == "__main__":
    try:
        main(prog_name="scripts/bench")
    except BenchError as error:
        sys.exit(f"error: {error}")
