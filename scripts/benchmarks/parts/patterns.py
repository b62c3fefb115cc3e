"""Patterns: requests of the pirate, tasks of a queue."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import zmq

from immortal.bench.apps import Callee
from immortal.bench.harness import IMMORTAL, Context, Figure, rate, values
from immortal.bench.processes import BenchError, cpu_s, read_line, register, running, start_module
from immortal.bench.workload import Measured
from immortal.patterns.pirate import Request, Server, connect_instances
from immortal.patterns.pirate import connect as connect_pirate
from immortal.patterns.queue import AsyncJobs, work
from immortal.patterns.queue import connect as connect_queue

BARE, PIRATE, STORED, PEERS = "bare REQ/REP", "pirate", "pirate, replies stored", "pirate, instances"
KINDS = {BARE: "bare", PIRATE: "pirate", STORED: "stored"}
SERVERS = 4  # of the pool, for several requests at a time
AT_A_TIME = 64
BODY = b"sixteen bytes ..."
T = TypeVar("T")
Side = Callable[[int], Measured]


def _side(pids: Sequence[int], ask: Callable[[], int]) -> Side:
    """Return what makes as many requests as it is asked for by ``ask``, which returns how many it made. CPU time is of
    both sides: this process, and ``pids``."""

    def run(requests: int) -> Measured:
        used_s = sum(map(cpu_s, pids)) + time.process_time()
        began_s, made = time.perf_counter(), 0
        while made < requests:
            made += ask()
        took_s = time.perf_counter() - began_s
        return Measured(made, took_s, cpu_s={"both": sum(map(cpu_s, pids)) + time.process_time() - used_s})

    return run


def _sequential(pids: Sequence[int], request: Callable[[bytes], bytes]) -> Side:
    def ask() -> int:
        if (reply := request(BODY)) != BODY:
            raise BenchError(f"a wrong reply: {reply!r}")
        return 1

    return _side(pids, ask)


def _concurrent(stack: ExitStack, pids: Sequence[int], connector: Any, request: Callable[[Any], Any]) -> Side:
    """Return requests that are awaited together, at a pool of several servers; bare sockets can't do that."""
    runner, pool = stack.enter_context(_entered(connector))

    async def ask() -> int:
        for reply in await asyncio.gather(*(request(pool) for _ in range(AT_A_TIME))):
            if reply != BODY:
                raise BenchError(f"a wrong reply: {reply!r}")
        return AT_A_TIME

    return _side(pids, lambda: runner.run(ask()))


@contextmanager
def _entered(connector: AbstractAsyncContextManager[T]) -> Iterator[tuple[asyncio.Runner, T]]:
    """Enter ``connector`` in a loop that runs between two calls of the runner only."""
    with asyncio.Runner() as runner:
        pool = runner.run(connector.__aenter__())
        try:
            yield runner, pool
        finally:
            runner.run(connector.__aexit__(None, None, None))


def _servers(stack: ExitStack, kind: str, home: Path, count: int) -> tuple[list[str], list[int]]:
    """Start servers; return their endpoints and process IDs."""
    store = [str(home / f"{kind}-{count}")] if kind == "stored" else []
    processes = [stack.enter_context(start_module(__name__, "server", kind, *store)) for _ in range(count)]
    return [read_line(one, f"a server of kind {kind!r}") for one in processes], [one.pid for one in processes]


def _bare_request(stack: ExitStack, endpoint: str) -> Callable[[bytes], bytes]:
    socket = stack.enter_context(stack.enter_context(zmq.Context()).socket(zmq.REQ))
    socket.connect(endpoint)

    def request(body: bytes) -> bytes:
        socket.send(body)
        return socket.recv()

    return request


def pirate(context: Context) -> list[Figure]:
    """Measure the pirate's requests, one at a time and several: to plain servers, and to instances as peers."""
    figures: list[Figure] = []
    instances = {f"echo-{number}": "immortal.bench.apps:Callee" for number in range(SERVERS)}
    with context.home() as home, ExitStack() as stack:
        services = register(home, instances, {})
        stack.enter_context(running(services))
        pids = [[process.pid for process in service.processes()] for service in services.values()]
        one: dict[str, Side] = {}
        many: dict[str, Side] = {}
        for name, kind in KINDS.items():
            endpoints, server_pids = _servers(stack, kind, home, 1)
            if name == BARE:
                one[name] = _sequential(server_pids, _bare_request(stack, endpoints[0]))
                continue
            one[name] = _sequential(server_pids, stack.enter_context(connect_pirate(endpoints)).request)
            endpoints, server_pids = _servers(stack, kind, home, SERVERS)
            many[name] = _concurrent(stack, server_pids, connect_pirate(endpoints), lambda pool: pool.request(BODY))
        one[PEERS] = _sequential(pids[0], stack.enter_context(connect_instances(Callee, ["echo-0"], home=home)).echo)
        all_peers = connect_instances(Callee, "echo-*", home=home)
        many[PEERS] = _concurrent(
            stack, [one for some in pids for one in some], all_peers, lambda pool: pool.echo(BODY)
        )
        for what, sides in (
            ("one request at a time", one),
            (f"{AT_A_TIME} requests at a time, {SERVERS} servers", many),
        ):
            results = context.compare(what, sides)
            figures.append(rate(what, results, unit="requests/s"))
            cost = values(results, "cpu_us")
            figures.append(Figure(f"{what}: CPU of both sides", "µs per request", "lower", cost))
    return figures


# Tasks of a queue, from their submission to their result: one at a time and several.


WORKERS = 2
READY_S = 60.0
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


async def _tasks(jobs: AsyncJobs, at_a_time: int) -> int:
    async def one() -> None:
        job = await jobs.submit("echo", [BODY], returns=bytes)
        if await job.result(READY_S) != BODY:
            raise BenchError("a wrong result")

    await asyncio.gather(*(one() for _ in range(at_a_time)))
    return at_a_time


def queue(context: Context) -> list[Figure]:
    """Measure tasks of a queue, from their submission to their result: one at a time and several."""
    figures = []
    with context.home() as home, ExitStack() as stack:
        stack.enter_context(running(register(home, {"jobs": "immortal.patterns.queue:Queue"}, {})))
        for _ in range(WORKERS):
            stack.enter_context(start_module(__name__, "worker", str(home), **QUIET))
        runner, jobs = stack.enter_context(_entered(connect_queue("jobs", home=home, timeout=READY_S)))
        for at_a_time in (1, AT_A_TIME):
            what = f"tasks of a queue, {at_a_time} at a time, {WORKERS} workers"
            side = _side([], lambda at_a_time=at_a_time: runner.run(_tasks(jobs, at_a_time)))  # type: ignore[misc]
            figures.append(rate(what, context.compare(what, {IMMORTAL: side}), unit="tasks/s"))
    return figures


# Measured processes: ``python -m scripts.benchmarks.parts.patterns server KIND [STORE]``, ``... worker HOME``.
#
# A server of the pirate prints its endpoint, and returns each request. KIND: ``bare`` (a REP socket alone), ``pirate``,
# ``stored``. A worker of the queue returns a task's body.


ENDPOINT = "tcp://127.0.0.1:*"


def echo(request: Request) -> bytes:
    return request.body


def same(body: bytes) -> bytes:
    return body


def serve(kind: str, store: str | None = None) -> None:
    if kind == "bare":
        with zmq.Context() as context, context.socket(zmq.REP) as socket:
            socket.bind(ENDPOINT)
            print(socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
            while True:
                socket.send(socket.recv())
    server = Server(echo, ENDPOINT, store=store)
    print(server.endpoint, flush=True)
    server.run()


if __name__ == "__main__":
    if sys.argv[1] == "server":
        serve(*sys.argv[2:])
    else:
        work("jobs", {"echo": same}, home=sys.argv[2])
