"""What `immortal bench --fleet` prints."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from bench.fleet import FleetResult
from coordinator.cli.common import echo


def print_fleet(result: FleetResult) -> None:
    echo(
        f"{result.instances} instances, each with its app, started in {result.start_s:.1f} s, "
        f"and stopped cleanly in {result.stop_s:.1f} s"
    )
    echo(
        f"{result.calls:,} calls, each instance to {result.neighbours} others, all counted once and in order, "
        f"the last {result.work_s:.2f} s after the last start"
    )
    table = Table(title="idle, each process: mean (most)")
    table.add_column("")
    for heading in ("resident MiB", "proportional MiB", "own MiB", "CPU % of a core"):
        table.add_column(heading, justify="right")
    for name, idle in (("coordinator", result.coordinators), ("app", result.apps)):
        memories = (idle.resident_mib, idle.proportional_mib, idle.own_mib)
        cells = [f"{mean:.1f} ({most:.1f})" for mean, most in memories]
        mean, most = idle.processor_percent
        table.add_row(name, *cells, f"{mean:.2f} ({most:.2f})")
    Console().print(table)
