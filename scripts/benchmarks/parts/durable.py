"""A durable handler of three steps beside the rivals', and a log in PostgreSQL."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from immortal.bench.calls import CALL_APPS, SIZE_BYTES, Caller, compare_callers, disk_latency, immortal_caller
from immortal.bench.harness import DISK, IMMORTAL, Context, Figure, Target, latency, rate
from immortal.bench.one_way import Load, compare_streams, immortal_streams
from immortal.bench.processes import BenchError
from scripts.benchmarks.rivals import servers
from scripts.benchmarks.rivals.adapters import DBOS_POSTGRES, DURABLE, dbos, durable_callers, has_dbos
from tests.helpers.postgres import binaries

LOCAL = "immortal, def steps"
STEPS = {
    name: {"caller": "immortal.bench.apps:Caller", "callee": f"scripts.benchmarks.apps:{steps}"}
    for name, steps in ((IMMORTAL, "EffectSteps"), (LOCAL, "LocalSteps"))
}


def durable(context: Context) -> list[Figure]:
    """Measure a handler of three steps, called from outside; each step's result is durable before the next begins."""
    figures = []
    with context.home() as home, ExitStack() as stack:
        home.chmod(0o755)  # PostgreSQL's user must be able to enter it
        callers = [
            stack.enter_context(immortal_caller(home / apps["callee"], apps, name=name)) for name, apps in STEPS.items()
        ]
        for name, start in durable_callers(context, home).items():
            context.progress(f"starting {name}")
            try:
                callers.append(stack.enter_context(start()))
            except BenchError as error:
                context.skipped[name] = str(error).splitlines()[0]
        rivals = [caller.name for caller in callers if caller.name in DURABLE]
        for count in context.amounts.handlers:
            what = f"three-step durable handler, {count} at a time"
            targets = [Target("at least", 200, rival) for rival in rivals] if count > 1 else []
            at_most = [Target("at most", 0.2, rival) for rival in rivals]
            chart: dict[str, Any] = {"group": "three-step handlers", "x": count, "x_label": "handlers at a time"}
            figures += _calls(context, home, callers, count, what, at_most, targets, **chart)
    return figures


def _calls(
    context: Context,
    home: Path,
    callers: list[Caller],
    count: int,
    what: str,
    p50_targets: list[Target],
    rate_targets: list[Target],
    **chart: Any,
) -> list[Figure]:
    """Measure ``count`` calls at a time: their rate and, one at a time, their latency."""
    results = compare_callers(context, callers, count, what, {DISK: partial(disk_latency, home)} if count == 1 else {})
    latencies = [latency(what, "p50", results, p50_targets), latency(what, "p99", results)] if count == 1 else []
    results.pop(DISK, None)
    return [*latencies, rate(f"{what}, rate", results, rate_targets, **chart)]


# A log in PostgreSQL: beside one in a folder of the same disk, and beside DBOS on the same server.


IN_DATABASE = f"{IMMORTAL}, log in PostgreSQL"
HANDLERS = 64
"""Number of handlers at a time in the figure beside DBOS."""
NOTE = "The server, both instances and their apps share the processors and the disk, where the folders are, too."


def database(context: Context) -> list[Figure]:
    """Measure a log in PostgreSQL, beside one in a folder of the same disk and beside DBOS on the same server."""
    if binaries() is None:
        raise BenchError("there is no PostgreSQL; on Debian: apt-get install postgresql")
    if importlib.util.find_spec("psycopg") is None:
        raise BenchError("the package psycopg is not installed: scripts/bench does that")
    with context.home() as home:
        home.chmod(0o755)  # PostgreSQL's user must be able to enter it
        with servers.postgres(home) as url:
            return _in_database(context, home, url)


def _in_database(context: Context, home: Path, url: str) -> list[Figure]:
    end = "log in PostgreSQL"
    what = f"one-way {SIZE_BYTES} B"
    log = servers.postgres_database(url, "one_way")
    with immortal_streams(home / "s") as ours, immortal_streams(home / "sp", log=log) as in_database:
        streams = {IMMORTAL: ours, IN_DATABASE: in_database}
        results = compare_streams(context, streams, Load((SIZE_BYTES,)), what)
    figures = [rate(f"{what}, {end}", results, [Target("at least", 300e3, of=IN_DATABASE)], note=NOTE)]
    with _both(home / "c", servers.postgres_database(url, "calls"), CALL_APPS) as callers:
        targets = [Target("at most", 3.0, IMMORTAL, of=IN_DATABASE)]
        for count in context.amounts.outstanding:
            figures += _calls(context, home, callers, count, f"{count} awaited at a time, {end}", targets, [])
    what = f"three-step durable handler, {HANDLERS} at a time, {end}"
    with ExitStack() as stack:
        log = servers.postgres_database(url, "handlers")
        callers = stack.enter_context(_both(home / "h", log, STEPS[IMMORTAL]))
        if has_dbos(context):
            callers.append(stack.enter_context(dbos(DBOS_POSTGRES, url)))
        targets = [Target("at least", 20, DBOS_POSTGRES, of=IN_DATABASE)]
        figures += _calls(context, home, callers, HANDLERS, what, [], targets)
    return figures


@contextmanager
def _both(home: Path, log: str, apps: dict[str, str]) -> Iterator[list[Caller]]:
    """Yield two callers: one with its logs in a folder, one with its logs in the database ``log``."""
    with (
        immortal_caller(home / "folder", apps) as in_folder,
        immortal_caller(home / "database", apps, name=IN_DATABASE, log=log) as in_database,
    ):
        yield [in_folder, in_database]
