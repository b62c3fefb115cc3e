"""What `immortal bench --isolation` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.isolation import OTHERS, RATE, IsolationResult
from coordinator.cli.common import echo


def as_dict(result: IsolationResult) -> dict[str, Any]:
    return {**asdict(result), "throughput_ratio": result.throughput_ratio, "p99_ratio": result.p99_ratio}


def print_isolation(result: IsolationResult) -> None:
    table = Table(title=f"calls to {len(OTHERS)} of 10 receivers, in the order of the windows")
    table.add_column("the other two")
    for heading in ("calls/s", f"p50 ms at {RATE:.0f}/s", "p99 ms", "calls timed"):
        table.add_column(heading, justify="right")
    for window in result.windows:
        table.add_row(
            "one dead, one stalled" if window.faulty else "healthy",
            f"{window.calls_per_s:,.0f}",
            f"{window.p50_ms:.2f}",
            f"{window.p99_ms:.2f}",
            f"{window.samples:,}",
        )
    Console().print(table)
    echo(
        f"beside a dead and a stalled one, {len(OTHERS)} receivers have {result.throughput_ratio:.0%} of the calls/s "
        f"and {result.p99_ratio:.2f} times the p99 (medians of the windows)"
    )
