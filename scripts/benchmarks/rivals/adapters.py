"""Adapters of the rivals: each runs the rival's processes, and takes the same runs as ours does."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from subprocess import Popen

from immortal.bench.calls import Caller
from immortal.bench.harness import Context
from immortal.bench.one_way import Load
from immortal.bench.processes import BenchError, cpu_s, read_line, start_module, write_line
from immortal.bench.workload import Measured
from scripts.benchmarks.rivals import servers
from tests.helpers.postgres import binaries

# grpcio, with and without asyncio. None of it is durable.


GRPC, GRPC_ASYNCIO, GRPC_THREADS = "grpc stream", "grpc asyncio", "grpc threads"
GRPC_MODULE = "scripts.benchmarks.rivals.grpc_calls"


@contextlib.contextmanager
def grpc_caller(name: str, relays: int = 0) -> Iterator[Caller]:
    """Run a client of gRPC. ``relays``: servers between the client and the one that answers; only with asyncio."""
    kind = name.removeprefix("grpc ")
    with contextlib.ExitStack() as stack:
        servers: dict[str, Popen[str]] = {}
        address: list[str] = []
        for index in range(relays + 1):
            server = stack.enter_context(start_module(GRPC_MODULE, "server", kind, *address))
            address = [read_line(server, f"the server of {name}")]
            servers[f"server {index + 1}"] = server
        yield Caller(
            name, {"client": stack.enter_context(start_module(GRPC_MODULE, "client", kind, *address)), **servers}
        )


class GrpcStreams:
    def __init__(self, clients: list[Popen[str]], servers: list[Popen[str]]) -> None:
        self._clients = clients
        self._processes = {"client": clients, "server": servers}

    def run(self, load: Load, calls: int) -> Measured:
        each = max(1, round(calls / (load.senders * load.receivers * len(load.sizes)))) * len(load.sizes)
        calls = each * load.senders * load.receivers
        before = self._cpu_s()
        for client in self._clients:
            write_line(client, json.dumps({"sizes": load.sizes, "calls": each}))
        counted = [json.loads(read_line(client, "a gRPC client")) for client in self._clients]
        expected = (calls, calls // len(load.sizes) * sum(load.sizes))
        if (sum(one["calls"] for one in counted), sum(one["bytes"] for one in counted)) != expected:
            raise BenchError(f"the gRPC servers counted {counted}; {expected} calls and bytes were sent")
        spent = {name: now - before[name] for name, now in self._cpu_s().items()}
        seconds = max(one["ended_s"] for one in counted) - min(one["begun_s"] for one in counted)
        return Measured(calls, seconds, cpu_s=spent)

    def _cpu_s(self) -> dict[str, float]:
        return {name: sum(cpu_s(one.pid) for one in some) for name, some in self._processes.items()}


@contextlib.contextmanager
def grpc_streams(senders: int = 1, receivers: int = 1) -> Iterator[GrpcStreams]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(start_module(GRPC_MODULE, "server", "stream")) for _ in range(receivers)]
        addresses = [read_line(server, "a gRPC server") for server in servers]
        client = partial(start_module, GRPC_MODULE, "client", "stream", *addresses)
        yield GrpcStreams([stack.enter_context(client()) for _ in range(senders)], servers)


# DBOS and Restate, whose steps are durable.


DBOS_SQLITE, DBOS_POSTGRES, RESTATE = "DBOS, SQLite", "DBOS, PostgreSQL", "Restate"
DURABLE = (DBOS_SQLITE, DBOS_POSTGRES, RESTATE)
STEPS_MODULE = "scripts.benchmarks.rivals.durable_steps"
Start = Callable[[], AbstractContextManager[Caller]]


def durable_callers(context: Context, home: Path) -> dict[str, Start]:
    """Return what starts each rival that is installed; the others are skipped."""
    starts: dict[str, Start] = {}
    if has_dbos(context):
        starts[DBOS_SQLITE] = partial(dbos, DBOS_SQLITE, f"sqlite:///{home / 'dbos.sqlite'}")
        if binaries() is None:
            context.skipped[DBOS_POSTGRES] = "there is no PostgreSQL; on Debian: apt-get install postgresql"
        else:
            starts[DBOS_POSTGRES] = partial(_dbos_postgres, home)
    if importlib.util.find_spec("restate") is None:
        context.skipped[RESTATE] = "the package restate-sdk is not installed: scripts/bench does that"
    elif servers.restate_program() is None:
        context.skipped[RESTATE] = "there is no restate-server: scripts/bench installs it where there is npm"
    else:
        starts[RESTATE] = partial(_restate, home)
    return starts


def has_dbos(context: Context) -> bool:
    is_there = importlib.util.find_spec("dbos") is not None
    if not is_there:
        context.skipped["DBOS"] = "the package dbos is not installed: scripts/bench does that"
    return is_there


@contextlib.contextmanager
def dbos(name: str, url: str) -> Iterator[Caller]:
    """Run DBOS with its tables in the database ``url``."""
    with start_module(STEPS_MODULE, "dbos", url) as process:
        read_line(process, name)
        yield Caller(name, {"app": process})


@contextlib.contextmanager
def _dbos_postgres(home: Path) -> Iterator[Caller]:
    with servers.postgres(home) as url, dbos(DBOS_POSTGRES, url) as caller:
        yield caller


@contextlib.contextmanager
def _restate(home: Path) -> Iterator[Caller]:
    with servers.restate(home) as server, start_module(STEPS_MODULE, "restate-server") as service:
        server.register(read_line(service, RESTATE))
        with start_module(STEPS_MODULE, "restate-client", str(server.ingress)) as client:
            yield Caller(RESTATE, {"client": client, "service": service})
