"""Cost of a call that fails: from a client, one at a time, beside calls that work, by the size of the state.

A failure puts the state back. The first one of a large state is a recovery from its checkpoint; those after it, and all
of a small state, start from a copy in memory.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from immortal.bench.fleet_apps import STATE_SIZE_VARIABLE
from immortal.bench.processes import BenchError, register
from immortal.bench.workload import percentile
from immortal.client import CalleeFailed, connect
from immortal.protocol.command_line import print_table

NAME = "ledger"
STATES_SIZE_BYTES = (1 << 20, 1 << 30)
WORKING_CALLS = 200
FAILING_CALLS_MAX = 60
FAILING_SECONDS_MAX = 60.0
START_TIMEOUT_S = 300.0  # a state of 1 GiB is made, encoded and written first
CALL_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class FailingResult:
    """Latencies for one size of the state: how long a client waits for each kind of call, in milliseconds."""

    state_size_bytes: int
    works_p50_ms: float
    first_failure_ms: float
    failures: int  # behind the first
    fails_p50_ms: float
    fails_p99_ms: float


def measure_failing(
    states_size_bytes: Sequence[int] = STATES_SIZE_BYTES,
    *,
    folder: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[FailingResult]:
    """``folder``: where the logs go, the system's temporary folder by default. Raises BenchError."""
    results = []
    for size_bytes in states_size_bytes:
        progress(f"a state of {size_bytes >> 20} MiB")
        with tempfile.TemporaryDirectory(prefix="immortal-bench-", dir=folder) as home:
            results.append(_measure(Path(home), size_bytes))
    return results


def _measure(home: Path, size_bytes: int) -> FailingResult:
    variables = {STATE_SIZE_VARIABLE: str(size_bytes)}
    service = register(home, {NAME: "immortal.bench.fleet_apps:Ledger"}, variables)[NAME]
    service.start()
    try:
        service.wait_for_phase("normal", timeout_s=START_TIMEOUT_S)
        with connect(NAME, home=home, timeout=CALL_TIMEOUT_S) as ledger:
            worked = [_timed(lambda: ledger.book(True)) for _ in range(WORKING_CALLS)]
            first_ms = _timed(lambda: ledger.book(False))
            failed: list[float] = []
            begun = time.perf_counter()
            while len(failed) < FAILING_CALLS_MAX and (not failed or time.perf_counter() - begun < FAILING_SECONDS_MAX):
                _timed(lambda: ledger.book(True))  # one that only fails is refused after a while
                failed.append(_timed(lambda: ledger.book(False)))
            expected = WORKING_CALLS + len(failed) + 1
            if (count := ledger.book(True)) != expected:
                raise BenchError(f"the state counts {count} calls, {expected} have worked")
    finally:
        service.kill()
    failed.sort()
    return FailingResult(
        size_bytes,
        percentile(sorted(worked), 50),
        first_ms,
        len(failed),
        percentile(failed, 50),
        percentile(failed, 99),
    )


def _timed(call: Callable[[], int]) -> float:
    """In milliseconds."""
    begun = time.perf_counter()
    with contextlib.suppress(CalleeFailed):
        call()
    return (time.perf_counter() - begun) * 1000


# What people read.


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
