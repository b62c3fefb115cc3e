"""A durable handler of three steps beside the rivals', and a log in PostgreSQL."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from immortal.bench.calls import CALL_APPS, Caller, immortal_caller
from immortal.bench.one_way import Load, immortal_streams
from immortal.bench.processes import BenchError, hear, start_module
from scripts.benchmarks.comparisons import SIZE_BYTES, calls_by, latency_figure, rate_figure, rates, streams_by
from scripts.benchmarks.context import Context
from scripts.benchmarks.figures import DISK, IMMORTAL, Figure, Target
from scripts.benchmarks.limits import disk_latency_us
from scripts.benchmarks.rivals import servers
from tests.helpers.postgres import binaries

LOCAL = "immortal, def steps"
DBOS_SQLITE, DBOS_POSTGRES, RESTATE = "DBOS, SQLite", "DBOS, PostgreSQL", "Restate"
RIVALS = (DBOS_SQLITE, DBOS_POSTGRES, RESTATE)
STEPS_MODULE = "scripts.benchmarks.rivals.durable_steps"
CALLER = "immortal.bench.apps:Caller"


def durable(context: Context) -> list[Figure]:
    """Measure a handler of three steps, called from outside; each step's result is durable before the next begins."""
    figures = []
    with context.home() as home, ExitStack() as stack:
        home.chmod(0o755)  # PostgreSQL's user must be able to enter it
        callers = [
            stack.enter_context(immortal_caller(home / kind, apps(kind), name=name))
            for name, kind in ((IMMORTAL, "EffectSteps"), (LOCAL, "LocalSteps"))
        ]
        for name, start in _rivals(context, home).items():
            context.progress(f"starting {name}")
            try:
                callers.append(stack.enter_context(start()))
            except BenchError as error:
                context.skip(name, str(error).splitlines()[0])
        for count in context.amounts.handlers:
            what = f"three-step durable handler, {count} at a time"
            limits = {DISK: lambda: disk_latency_us(home, 50)} if count == 1 else {}
            measured, limited = calls_by(context, callers, count, what, limits)
            against = [caller.name for caller in callers if caller.name in RIVALS]
            if count == 1:
                targets = [Target("at most", 0.2, rival) for rival in against]
                figures.append(latency_figure(what, "p50", measured, targets, limited))
                figures.append(latency_figure(what, "p99", measured, []))
            targets = [Target("at least", 200, rival) for rival in against] if count > 1 else []
            figures.append(
                rate_figure(
                    f"{what}, rate",
                    measured,
                    targets,
                    group="three-step handlers",
                    x=count,
                    x_label="handlers at a time",
                )
            )
    return figures


def _rivals(context: Context, home: Path) -> dict[str, Callable[[], AbstractContextManager[Caller]]]:
    starts: dict[str, Callable[[], AbstractContextManager[Caller]]] = {}
    if has_dbos(context):
        starts[DBOS_SQLITE] = lambda: dbos(DBOS_SQLITE, f"sqlite:///{home / 'dbos.sqlite'}")
        if binaries() is None:
            context.skip(DBOS_POSTGRES, "there is no PostgreSQL; on Debian: apt-get install postgresql")
        else:
            starts[DBOS_POSTGRES] = lambda: _dbos_postgres(home)
    if importlib.util.find_spec("restate") is None:
        context.skip(RESTATE, "the package restate-sdk is not installed: scripts/bench does that")
    elif servers.restate_program() is None:
        context.skip(RESTATE, "there is no restate-server: scripts/bench installs it where there is npm")
    else:
        starts[RESTATE] = lambda: _restate(home)
    return starts


def apps(steps: str) -> dict[str, str]:
    """Return the apps: a caller, and the callee with handlers of the class ``steps``."""
    return {"caller": CALLER, "callee": f"scripts.benchmarks.apps:{steps}"}


def has_dbos(context: Context) -> bool:
    is_there = importlib.util.find_spec("dbos") is not None
    if not is_there:
        context.skip("DBOS", "the package dbos is not installed: scripts/bench does that")
    return is_there


@contextlib.contextmanager
def dbos(name: str, url: str) -> Iterator[Caller]:
    """Run DBOS with its tables in the database ``url``."""
    with start_module(STEPS_MODULE, "dbos", url) as process:
        hear(process, name)
        yield Caller(name, {"app": process}, lambda: None)


@contextlib.contextmanager
def _dbos_postgres(home: Path) -> Iterator[Caller]:
    with servers.postgres(home) as url, dbos(DBOS_POSTGRES, url) as caller:
        yield caller


@contextlib.contextmanager
def _restate(home: Path) -> Iterator[Caller]:
    with servers.restate(home) as server, start_module(STEPS_MODULE, "restate-server") as service:
        server.register(hear(service, RESTATE))
        with start_module(STEPS_MODULE, "restate-client", str(server.ingress)) as client:
            yield Caller(RESTATE, {"client": client, "service": service}, lambda: None)


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
        callers = stack.enter_context(_both(home / "h", log, apps("EffectSteps")))
        if has_dbos(context):
            callers.append(stack.enter_context(dbos(DBOS_POSTGRES, url)))
        measured, _ = calls_by(context, callers, HANDLERS, what)
    target = Target("at least", 20, DBOS_POSTGRES, of=IN_DATABASE)
    return [rate_figure(f"{what}, rate", measured, [target])]


@contextmanager
def _both(home: Path, log: str, apps: dict[str, str]) -> Iterator[list[Caller]]:
    """Yield two callers: one with its logs in a folder, one with its logs in the database ``log``."""
    with (
        immortal_caller(home / "folder", apps) as in_folder,
        immortal_caller(home / "database", apps, name=IN_DATABASE, log=log) as in_database,
    ):
        yield [in_folder, in_database]
