"""A log in PostgreSQL: beside one in a folder of the same disk, and beside DBOS on the same server."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from immortal.bench.calls import CALL_APPS, Caller, immortal_caller
from immortal.bench.one_way import Load, immortal_streams
from immortal.bench.processes import BenchError
from scripts.benchmarks.comparisons import SIZE_BYTES, calls_by, latency_figure, rate_figure, rates, streams_by
from scripts.benchmarks.context import Context
from scripts.benchmarks.figures import DISK, IMMORTAL, Figure, Target
from scripts.benchmarks.limits import disk_latency_us
from scripts.benchmarks.parts import durable
from scripts.benchmarks.rivals import servers

IN_DATABASE = f"{IMMORTAL}, log in PostgreSQL"
HANDLERS = 64
"""At a time: what the figure beside DBOS is of."""
NOTE = "The server, both instances and their apps share the processors and the disk, where the folders are, too."


def run(context: Context) -> list[Figure]:
    if servers.postgres_programs() is None:
        raise BenchError("there is no PostgreSQL; on Debian: apt-get install postgresql")
    if importlib.util.find_spec("psycopg") is None:
        raise BenchError("the package psycopg is not installed: scripts/bench does that")
    with context.home() as home:
        home.chmod(0o755)  # PostgreSQL's user has to pass through it
        with servers.postgres(home) as url:
            return [*_one_way(context, home, url), *_awaited(context, home, url), *_handlers(context, home, url)]


def _one_way(context: Context, home: Path, url: str) -> list[Figure]:
    what = f"one-way {SIZE_BYTES} B"
    log = servers.postgres_database(url, "one_way")
    with immortal_streams(home / "s") as ours, immortal_streams(home / "sp", log=log) as in_database:
        measured, _ = streams_by(context, {IMMORTAL: ours, IN_DATABASE: in_database}, Load((SIZE_BYTES,)), what)
    target = Target("at least", 300e3, of=IN_DATABASE)
    return [Figure(f"{what}, log in PostgreSQL", "calls/s", "higher", rates(measured), [target], NOTE)]


def _awaited(context: Context, home: Path, url: str) -> list[Figure]:
    figures: list[Figure] = []
    with _both(home / "c", servers.postgres_database(url, "calls"), CALL_APPS) as callers:
        for count in context.amounts.outstanding:
            what = f"{count} awaited at a time, log in PostgreSQL"
            limits = {DISK: lambda: disk_latency_us(home, 50)} if count == 1 else {}
            measured, limited = calls_by(context, callers, count, what, limits)
            if count == 1:
                target = Target("at most", 3.0, IMMORTAL, of=IN_DATABASE)
                figures.append(latency_figure(what, "p50", measured, [target], limited))
                figures.append(latency_figure(what, "p99", measured, []))
            figures.append(rate_figure(f"{what}, rate", measured, []))
    return figures


def _handlers(context: Context, home: Path, url: str) -> list[Figure]:
    what = f"three-step durable handler, {HANDLERS} at a time, log in PostgreSQL"
    with ExitStack() as stack:
        log = servers.postgres_database(url, "handlers")
        callers = stack.enter_context(_both(home / "h", log, durable.apps("EffectSteps")))
        if durable.has_dbos(context):
            callers.append(stack.enter_context(durable.dbos(durable.DBOS_POSTGRES, url)))
        measured, _ = calls_by(context, callers, HANDLERS, what)
    target = Target("at least", 20, durable.DBOS_POSTGRES, of=IN_DATABASE)
    return [rate_figure(f"{what}, rate", measured, [target])]


@contextmanager
def _both(home: Path, log: str, apps: dict[str, str]) -> Iterator[list[Caller]]:
    """One with its logs in a folder, one with its logs in the database ``log``."""
    with (
        immortal_caller(home / "folder", apps) as in_folder,
        immortal_caller(home / "database", apps, name=IN_DATABASE, log=log) as in_database,
    ):
        yield [in_folder, in_database]
