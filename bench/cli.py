"""`immortal bench`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from bench.call_workload import NUMBER_SIZE_BYTES
from bench.calls import run_call_benchmark
from bench.cli_calls import print_calls
from bench.cli_failing import print_failing
from bench.cli_fleet import print_fleet
from bench.cli_isolation import as_dict, print_isolation
from bench.failing import measure_failing
from bench.fleet import measure_fleet
from bench.isolation import measure_isolation
from bench.one_way import OneWay, Results, run_benchmark
from bench.trim import TrimResult, measure_trimming
from coordinator.cli.common import echo

FLEET_SIZE_MAX = 1000  # of some 60 MiB each
OUTSTANDING_MAX = 100_000
STATE_MIB_MAX = 16_384


def _sizes(context: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    try:
        sizes = [int(part) for part in value.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(0 <= size <= 16 << 20 for size in sizes):
        raise click.BadParameter(f"{value!r}; expected sizes in bytes, 0 to 16777216, as in 16,64,1024")
    return sizes


def _outstanding(context: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    try:
        counts = [int(part) for part in value.split(",")]
    except ValueError:
        counts = []
    if not counts or not all(1 <= count <= OUTSTANDING_MAX for count in counts):
        raise click.BadParameter(f"{value!r}; expected numbers of calls, 1 to {OUTSTANDING_MAX}, as in 1,64,1000")
    return counts


def _states(context: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    """In bytes."""
    try:
        sizes_mib = [int(part) for part in value.split(",")]
    except ValueError:
        sizes_mib = []
    if not sizes_mib or not all(1 <= size_mib <= STATE_MIB_MAX for size_mib in sizes_mib):
        raise click.BadParameter(f"{value!r}; expected sizes in MiB, 1 to {STATE_MIB_MAX}, as in 1,1024")
    return [size_mib << 20 for size_mib in sizes_mib]


@click.command()
@click.option("--sizes", default="16,64,1024,65536", show_default=True, callback=_sizes, help="Arguments, in bytes.")
@click.option("--volume", "volume_mb", default=500, show_default=True, help="MB of traffic for each size.")
@click.option("--folder", type=click.Path(file_okay=False, exists=True, path_type=Path), help="Where the logs go.")
@click.option("--trim", is_flag=True, help="Measure instead how long a commit takes while a log is trimmed.")
@click.option("--curve", is_flag=True, help="Measure once more with keys: encrypted and authenticated.")
@click.option("--log-key", is_flag=True, help="Measure with logs that are authenticated with a key.")
@click.option(
    "--fleet",
    "fleet_size",
    type=click.IntRange(2, FLEET_SIZE_MAX),
    metavar="N",
    help="Run instead N instances that each call ten others: what they cost while idle.",
)
@click.option("--isolation", is_flag=True, help="Measure instead what a dead and a stalled peer cost eight others.")
@click.option("--failing", is_flag=True, help="Measure instead what a call that fails costs.")
@click.option(
    "--state",
    default="1,1024",
    show_default=True,
    callback=_states,
    help="With --failing: sizes of the service's state, in MiB.",
)
@click.option("--calls", is_flag=True, help="Measure instead calls that wait for their answers.")
@click.option(
    "--outstanding",
    default="1,64,1000",
    show_default=True,
    callback=_outstanding,
    help="With --calls: how many calls wait at a time.",
)
@click.option(
    "--size",
    "size_bytes",
    type=click.IntRange(NUMBER_SIZE_BYTES, 16 << 20),
    default=16,
    show_default=True,
    help="With --calls: the argument, in bytes.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.01, 3600.0),
    default=2.0,
    show_default=True,
    help="With --calls: of one turn, roughly.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1, 1000),
    default=5,
    show_default=True,
    help="With --calls: turns of each, one after the other.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench(
    sizes: list[int],
    volume_mb: int,
    folder: Path | None,
    trim: bool,
    curve: bool,
    log_key: bool,
    fleet_size: int | None,
    isolation: bool,
    failing: bool,
    state: list[int],
    calls: bool,
    outstanding: list[int],
    size_bytes: int,
    seconds: float,
    repeats: int,
    as_json: bool,
) -> None:
    """One-way calls between two services with durable logs, next to what the disk alone does."""
    console = Console(stderr=True)
    others = sum((calls, trim, isolation, failing, fleet_size is not None))
    if others > 1 or (curve and (calls or trim or failing)):
        raise click.UsageError("--calls, --trim, --curve, --fleet, --failing, --isolation each measure something else")
    if log_key and others:
        raise click.UsageError("--log-key is for one-way calls")
    if calls:
        with console.status("starting") as status:
            called = run_call_benchmark(
                outstanding,
                size_bytes=size_bytes,
                seconds=seconds,
                repeats=repeats,
                folder=folder,
                progress=status.update,
            )
        echo(json.dumps(asdict(called))) if as_json else print_calls(called)
        return
    if failing:
        with console.status("starting") as status:
            failed = measure_failing(state, folder=folder, progress=status.update)
        echo(json.dumps([asdict(row) for row in failed])) if as_json else print_failing(failed)
        return
    if isolation:
        with console.status("starting") as status:
            isolated = measure_isolation(folder=folder, progress=status.update)
        echo(json.dumps(as_dict(isolated))) if as_json else print_isolation(isolated)
        return
    if fleet_size is not None:
        with console.status("starting") as status:
            fleet = measure_fleet(fleet_size, curve=curve, folder=folder, progress=status.update)
        echo(json.dumps(asdict(fleet))) if as_json else print_fleet(fleet)
        return
    if trim:
        with console.status("starting") as status:
            trimmed = measure_trimming(folder=folder, progress=status.update)
        if as_json:
            echo(json.dumps([{**asdict(row), "added_p99_ms": row.added_p99_ms} for row in trimmed]))
        else:
            _print_trim(trimmed)
        return
    with console.status("starting") as status:
        results = run_benchmark(
            sizes, volume_mb=volume_mb, curve=curve, log_key=log_key, folder=folder, progress=status.update
        )
    if as_json:
        echo(json.dumps(asdict(results)))
    else:
        _print(results)


def _print_trim(results: list[TrimResult]) -> None:
    table = Table(title="commits of a small record, in ms, alone and while a log is trimmed")
    for heading in ("records trimmed", "in s", "p50", "p99", "max", "p50 trimming", "p99 trimming", "max trimming"):
        table.add_column(heading, justify="right")
    for row in results:
        latencies = (row.without, row.trimming)
        table.add_row(
            f"{row.records:,} of {row.size_bytes} B",
            f"{row.seconds:.2f}",
            *(f"{value:.2f}" for one in latencies for value in (one.p50_ms, one.p99_ms, one.max_ms)),
        )
    console = Console()
    console.print(table)
    for row in results:
        console.print(f"trimming records of {row.size_bytes} B adds {row.added_p99_ms:.2f} ms at the 99th percentile")


def _one_way_table(title: str, rows: list[OneWay]) -> Table:
    table = Table(title=title)
    for heading in ("size", "calls", "seconds", "calls/s", "MB/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row.size_bytes} B",
            f"{row.calls:,}",
            f"{row.seconds:.2f}",
            f"{row.calls_per_s:,.0f}",
            f"{row.mb_per_s:,.1f}",
        )
    return table


def _print(results: Results) -> None:
    console = Console()
    title = "one-way calls, executed by the receiver, both logs durable"
    console.print(_one_way_table(title, results.one_way))
    if results.one_way_curve:
        console.print(_one_way_table(f"{title}, with CURVE", results.one_way_curve))
    for plain, curve in zip(results.one_way, results.one_way_curve, strict=False):
        console.print(f"{plain.size_bytes} B with CURVE: {curve.calls_per_s / plain.calls_per_s:.0%} of the calls/s")
    for block, rate in results.disk_mb_per_s.items():
        console.print(f"the disk alone: append + fdatasync of {block >> 10} KiB: {rate:,.0f} MB/s")
    if results.replay is not None:
        replay = results.replay
        console.print(
            f"recovery of the receiver after kill -9: {replay.calls:,} calls replayed in {replay.seconds:.2f} s, "
            f"processes started included: {replay.calls_per_s:,.0f} calls/s"
        )
    for name, (coordinator, app) in results.peak_memory_mib.items():
        console.print(f"peak memory of {name}: coordinator {coordinator:.0f} MiB, app {app:.0f} MiB")
