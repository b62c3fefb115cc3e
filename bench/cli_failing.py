"""What `immortal bench --failing` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from bench.failing import FailingResult


def print_failing(results: Sequence[FailingResult]) -> None:
    table = Table(title="one call at a time, from a client, in ms: what a failure costs, which puts the state back")
    for heading in ("state, MiB", "works, p50", "first failure", "fails, p50", "fails, p99", "failures"):
        table.add_column(heading, justify="right")
    for row in results:
        table.add_row(
            f"{row.state_size_bytes / (1 << 20):,.0f}",
            f"{row.works_p50_ms:,.2f}",
            f"{row.first_failure_ms:,.1f}",
            f"{row.fails_p50_ms:,.2f}",
            f"{row.fails_p99_ms:,.1f}",
            f"{row.failures:,}",
        )
    Console().print(table)
