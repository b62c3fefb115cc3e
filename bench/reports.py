"""Reports of `immortal bench` for people: a table for each measurement, then remarks."""

from __future__ import annotations

from collections.abc import Sequence

from immortal.bench.calls import DISK_BLOCK_SIZE_BYTES, IDLE_PEERS, CallResults, Spread
from immortal.bench.embedded import EmbeddedResults
from immortal.bench.failing import FailingResult
from immortal.bench.fleet import FleetResult
from immortal.bench.isolation import OTHERS, RATE, IsolationResult
from immortal.bench.one_way import Results, SizeResult
from immortal.bench.trim import TrimResult
from immortal.protocol.command_line import echo, print_table


def print_one_way(results: Results) -> None:
    title = "one-way calls, executed by the receiver, both logs durable"
    _print_one_way_table(title, results.one_way)
    if results.one_way_curve:
        _print_one_way_table(f"{title}, with CURVE", results.one_way_curve)
    for plain, curve in zip(results.one_way, results.one_way_curve, strict=False):
        echo(f"{plain.size_bytes} B with CURVE: {curve.calls_per_s / plain.calls_per_s:.0%} of the calls/s")
    for block, rate in results.disk_mb_per_s.items():
        echo(f"the disk alone: append + fdatasync of {block >> 10} KiB: {rate:,.0f} MB/s")
    if results.replay is not None:
        replay = results.replay
        echo(
            f"recovery of the receiver after kill -9: {replay.calls:,} calls replayed in {replay.seconds:.2f} s, "
            f"processes started included: {replay.calls_per_s:,.0f} calls/s"
        )
    for name, (coordinator, app) in results.peak_memory_mib.items():
        echo(f"peak memory of {name}: coordinator {coordinator:.0f} MiB, app {app:.0f} MiB")


def _print_one_way_table(title: str, results: Sequence[SizeResult]) -> None:
    heads = ("size", "calls", "seconds", "calls/s", "MB/s")
    rows = (
        (
            f"{one.size_bytes} B",
            f"{one.calls:,}",
            f"{one.seconds:.2f}",
            f"{one.calls_per_s:,.0f}",
            f"{one.mb_per_s:,.1f}",
        )
        for one in results
    )
    print_table(heads, rows, right=heads, title=title)


def print_trim(results: Sequence[TrimResult]) -> None:
    heads = ("records trimmed", "in s", "p50", "p99", "max", "p50 trimming", "p99 trimming", "max trimming")
    rows = (
        (
            f"{one.records:,} of {one.size_bytes} B",
            f"{one.seconds:.2f}",
            *(
                f"{value:.2f}"
                for latency in (one.without, one.trimming)
                for value in (latency.p50_ms, latency.p99_ms, latency.max_ms)
            ),
        )
        for one in results
    )
    title = "commits of a small record, in ms, alone and while a log is trimmed"
    print_table(heads, rows, right=heads, title=title)
    for one in results:
        echo(f"trimming records of {one.size_bytes} B adds {one.added_p99_ms:.2f} ms at the 99th percentile")


def print_calls(results: CallResults) -> None:
    heads = ("waiting", "p50, µs", "p99, µs", "calls/s", "CPU, µs/call")
    rows = (
        (
            f"{column.outstanding}",
            *(_spread_in_words(one) for one in (column.p50_us, column.p99_us, column.calls_per_s)),
            f"{column.cpu_us_per_call:,.1f}",
        )
        for column in results.columns
    )
    title = f"calls of {results.size_bytes} B that wait for their answers: median (lowest-highest)"
    print_table(heads, rows, right=heads, title=title)
    echo(
        f"the disk alone: append + fdatasync of {DISK_BLOCK_SIZE_BYTES >> 10} KiB: p50 "
        f"{results.disk_p50_us.median:,.0f} µs, p99 {results.disk_p99_us.median:,.0f} µs"
    )
    few, many = IDLE_PEERS
    echo(
        f"without sockets, disk and wake-ups, CPU: {results.turns.awaited_us:,.0f} µs an awaited call; in the core "
        f"{results.turns.few_peers_us:,.0f} µs a call to one of {few} peers, {results.turns.many_peers_us:,.0f} µs to "
        f"one of {many:,}"
    )


def _spread_in_words(spread: Spread) -> str:
    return f"{spread.median:,.0f} ({spread.lowest:,.0f}-{spread.highest:,.0f})"


def print_embedded(results: EmbeddedResults) -> None:
    heads = ("", "p50, µs", "ratio", "CPU, µs/call", "ratio", "without client", "waits/call")
    rows = (
        (
            row.case,
            f"{row.sidecars.p50_us:,.0f} -> {row.embedded.p50_us:,.0f}",
            f"{row.p50_ratio:.2f}",
            f"{row.sidecars.cpu_us:,.1f} -> {row.embedded.cpu_us:,.1f}",
            f"{row.cpu_ratio:.2f}",
            f"{row.cpu_ratio_without_client:.2f}",
            f"{row.sidecars.switches:.1f} -> {row.embedded.switches:.1f}",
        )
        for row in results.rows
    )
    title = f"calls of {results.size_bytes} B: services with sidecars -> in one process; p50 of batches: of a whole one"
    print_table(heads, rows, right=heads[1:], title=title)
    echo(f"the disk alone: append + fdatasync of {DISK_BLOCK_SIZE_BYTES >> 10} KiB: p50 {results.disk_p50_us:,.0f} µs")


def print_failing(results: Sequence[FailingResult]) -> None:
    heads = ("state, MiB", "works, p50", "first failure", "fails, p50", "fails, p99", "failures")
    rows = (
        (
            f"{one.state_size_bytes / (1 << 20):,.0f}",
            f"{one.works_p50_ms:,.2f}",
            f"{one.first_failure_ms:,.1f}",
            f"{one.fails_p50_ms:,.2f}",
            f"{one.fails_p99_ms:,.1f}",
            f"{one.failures:,}",
        )
        for one in results
    )
    title = "one call at a time, from a client, in ms: what a failure costs, which puts the state back"
    print_table(heads, rows, right=heads, title=title)


def print_fleet(result: FleetResult) -> None:
    if result.instances < result.registered:
        echo(f"{result.registered} instances are registered; memory has room for {result.instances}, which run")
    echo(
        f"an idle coordinator with {result.registered:,} registered takes {result.idle_percent:.2f} % of a core, "
        f"where it is alone {result.alone_percent:.2f} %"
    )
    echo(
        f"{result.instances} instances, each with its app, started in {result.start_s:.1f} s, "
        f"and stopped cleanly in {result.stop_s:.1f} s"
    )
    echo(
        f"{result.calls:,} calls, each instance to {result.neighbours} others, all counted once and in order, "
        f"the last {result.work_s:.2f} s after the last start"
    )
    heads = ("resident MiB", "proportional MiB", "own MiB", "CPU % of a core")
    rows = (
        (
            name,
            *(f"{mean:.1f} ({most:.1f})" for mean, most in (idle.resident_mib, idle.proportional_mib, idle.own_mib)),
            f"{idle.processor_percent[0]:.2f} ({idle.processor_percent[1]:.2f})",
        )
        for name, idle in (("coordinator", result.coordinators), ("app", result.apps))
    )
    print_table(("", *heads), rows, right=heads, title="idle, each process: mean (most)")


def print_isolation(result: IsolationResult) -> None:
    heads = ("calls/s", f"p50 ms at {RATE:.0f}/s", "p99 ms", "calls timed")
    rows = (
        (
            "one dead, one stalled" if window.faulty else "healthy",
            f"{window.calls_per_s:,.0f}",
            f"{window.p50_ms:.2f}",
            f"{window.p99_ms:.2f}",
            f"{window.samples:,}",
        )
        for window in result.windows
    )
    title = f"calls to {len(OTHERS)} of 10 receivers, in the order of the windows"
    print_table(("the other two", *heads), rows, right=heads, title=title)
    echo(
        f"beside a dead and a stalled one, {len(OTHERS)} receivers have {result.throughput_ratio:.0%} of the calls/s "
        f"and {result.p99_ratio:.2f} times the p99 (medians of the windows)"
    )
