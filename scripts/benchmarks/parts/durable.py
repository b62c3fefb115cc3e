"""A durable handler of three steps, each step's result kept before the next begins, called from outside."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from immortal.bench.calls import Caller, immortal_caller
from immortal.bench.processes import BenchError, start_module
from scripts.benchmarks.comparisons import calls_by, latency_figure, rate_figure
from scripts.benchmarks.context import Context
from scripts.benchmarks.figures import DISK, IMMORTAL, Figure, Target
from scripts.benchmarks.limits import disk_latency_us
from scripts.benchmarks.rivals import servers

LOCAL = "immortal, def steps"
DBOS_SQLITE, DBOS_POSTGRES, RESTATE = "DBOS, SQLite", "DBOS, PostgreSQL", "Restate"
RIVALS = (DBOS_SQLITE, DBOS_POSTGRES, RESTATE)
CALLER = "immortal.bench.apps:Caller"


def run(context: Context) -> list[Figure]:
    figures = []
    with context.home() as home, ExitStack() as stack:
        home.chmod(0o755)  # PostgreSQL's user has to pass through it
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
        if servers.postgres_programs() is None:
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
    """With its tables in the database ``url``."""
    with start_module("scripts.benchmarks.rivals.dbos_steps", url) as process:
        _expect_line(process, name)
        yield Caller(name, {"app": process}, lambda: None)


@contextlib.contextmanager
def _dbos_postgres(home: Path) -> Iterator[Caller]:
    with servers.postgres(home) as url, dbos(DBOS_POSTGRES, url) as caller:
        yield caller


@contextlib.contextmanager
def _restate(home: Path) -> Iterator[Caller]:
    module = "scripts.benchmarks.rivals.restate_steps"
    with servers.restate(home) as server, start_module(module, "server") as service:
        server.register(_expect_line(service, RESTATE))
        with start_module(module, "client", str(server.ingress)) as client:
            yield Caller(RESTATE, {"client": client, "service": service}, lambda: None)


def _expect_line(process: object, name: str) -> str:
    line: str = process.stdout.readline().strip()  # type: ignore[attr-defined]
    if not line:
        raise BenchError(f"{name} did not start: it ended with status {process.wait()}")  # type: ignore[attr-defined]
    return line
