"""What `immortal bench --calls` prints."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from bench.calls import DISK_BLOCK_SIZE_BYTES, CallResults, Spread
from bench.turns import IDLE_PEERS


def print_calls(results: CallResults) -> None:
    console = Console()
    table = Table(
        title=f"calls of {results.size_bytes} B that wait for their answers: median, lowest-highest", show_lines=True
    )
    for heading in ("waiting", "p50, µs", "p99, µs", "calls/s", "CPU, µs/call"):
        table.add_column(heading, justify="right")
    for column in results.columns:
        table.add_row(
            f"{column.outstanding}",
            *(_spread_in_words(one) for one in (column.p50_us, column.p99_us, column.calls_per_s)),
            f"{column.cpu_us_per_call:,.1f}",
        )
    console.print(table)
    console.print(
        f"the disk alone: append + fdatasync of {DISK_BLOCK_SIZE_BYTES >> 10} KiB: p50 "
        f"{results.disk_p50_us.median:,.0f} µs, p99 {results.disk_p99_us.median:,.0f} µs"
    )
    few, many = IDLE_PEERS
    console.print(
        f"without sockets, disk and wake-ups, CPU: {results.turns.awaited_us:,.0f} µs an awaited call; in the core "
        f"{results.turns.few_peers_us:,.0f} µs a call to one of {few} peers, {results.turns.many_peers_us:,.0f} µs to "
        f"one of {many:,}"
    )


def _spread_in_words(spread: Spread) -> str:
    return f"{spread.median:,.0f}\n{spread.lowest:,.0f}-{spread.highest:,.0f}"
