"""Patterns: requests of the pirate, tasks of a queue, tasks of a batch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import zmq

from immortal.bench.apps import Callee
from immortal.bench.processes import BenchError, hear, processor_s, start_module
from immortal.patterns.harmony import Ventilator
from immortal.patterns.harmony import connect as connect_harmony
from immortal.patterns.pirate import Request, Server, connect_instances
from immortal.patterns.pirate import connect as connect_pirate
from immortal.patterns.queue import AsyncJobs, work
from immortal.patterns.queue import connect as connect_queue
from scripts.benchmarks.context import QUIET, Context, start_service
from scripts.benchmarks.figures import IMMORTAL, Figure

BARE, PIRATE, STORED, PEERS = "bare REQ/REP", "pirate", "pirate, replies stored", "pirate, instances"
_KINDS = {BARE: "bare", PIRATE: "pirate", STORED: "stored"}
SERVERS = 4  # of the pool, for several requests at a time
_AT_A_TIME = 64
_WARM_UP = 200
BODY = b"sixteen bytes ..."
T = TypeVar("T")
Turn = tuple[float, float]  # requests in a second; µs of processors for each, both sides together


@contextlib.contextmanager
def _servers(kind: str, home: Path, count: int) -> Iterator[tuple[list[str], list[int]]]:
    store = [str(home / f"{kind}-{count}")] if kind == "stored" else []
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(start_module(__name__, "server", kind, *store)) for _ in range(count)]
        endpoints = [hear(process, f"a server of kind {kind!r}") for process in processes]
        yield endpoints, [process.pid for process in processes]


@contextlib.contextmanager
def _instances(home: Path) -> Iterator[list[list[int]]]:
    """Run echo-0 and so on; yield the process IDs of each one's coordinator and app."""
    with contextlib.ExitStack() as stack:
        yield [start_service(stack, home, f"echo-{number}", "immortal.bench.apps:Callee") for number in range(SERVERS)]


def _measured(seconds: float, pids: list[int], ask: Callable[[], int]) -> Turn:
    """Measure the requests of ``ask``, which returns how many it made. Raises BenchError."""
    used_s = sum(map(processor_s, pids)) + time.process_time()
    began_s = time.perf_counter()
    count = 0
    while (took_s := time.perf_counter() - began_s) < seconds:
        count += ask()
    used_s = sum(map(processor_s, pids)) + time.process_time() - used_s
    return count / took_s, 1e6 * used_s / count


def _check(reply: bytes) -> None:
    if reply != BODY:
        raise BenchError(f"a wrong reply: {reply!r}")


def _one_by_one(seconds: float, pids: list[int], request: Callable[[bytes], bytes]) -> Turn:
    def ask() -> int:
        _check(request(BODY))
        return 1

    for _ in range(_WARM_UP):
        ask()
    return _measured(seconds, pids, ask)


@contextlib.contextmanager
def _entered(connector: AbstractAsyncContextManager[T]) -> Iterator[tuple[asyncio.Runner, T]]:
    """Enter ``connector`` in a loop that runs between two calls of the runner only."""
    with asyncio.Runner() as runner:
        pool = runner.run(connector.__aenter__())
        try:
            yield runner, pool
        finally:
            runner.run(connector.__aexit__(None, None, None))


def _together(
    seconds: float, pids: list[int], connector: AbstractAsyncContextManager[Any], request: Callable[[Any], Any]
) -> Turn:
    """Measure requests that are awaited together, at a pool of several servers; bare sockets can't do that."""

    async def ask() -> int:
        for reply in await asyncio.gather(*(request(pool) for _ in range(_AT_A_TIME))):
            _check(reply)
        return _AT_A_TIME

    with _entered(connector) as (runner, pool):
        runner.run(ask())
        return _measured(seconds, pids, lambda: runner.run(ask()))


def _one_at_a_time(kind: str, home: Path, seconds: float) -> Turn:
    with _servers(kind, home, 1) as (endpoints, pids):
        if kind != "bare":
            with connect_pirate(endpoints) as pool:
                return _one_by_one(seconds, pids, pool.request)
        with zmq.Context() as context, context.socket(zmq.REQ) as socket:
            socket.connect(endpoints[0])

            def ask(body: bytes) -> bytes:
                socket.send(body)
                return socket.recv()

            return _one_by_one(seconds, pids, ask)


def _many_at_a_time(kind: str, home: Path, seconds: float) -> Turn:
    with _servers(kind, home, SERVERS) as (endpoints, pids):
        return _together(seconds, pids, connect_pirate(endpoints), lambda pool: pool.request(BODY))


def _one_at_a_peer(home: Path, pids: list[list[int]], seconds: float) -> Turn:
    with connect_instances(Callee, ["echo-0"], home=home) as pool:
        return _one_by_one(seconds, pids[0], pool.echo)


def _many_at_peers(home: Path, pids: list[list[int]], seconds: float) -> Turn:
    all_pids = [pid for both in pids for pid in both]
    return _together(seconds, all_pids, connect_instances(Callee, "echo-*", home=home), lambda pool: pool.echo(BODY))


def pirate(context: Context) -> list[Figure]:
    """Measure the pirate's requests, one at a time and several: to plain servers, and to instances as peers."""
    figures: list[Figure] = []
    seconds = context.amounts.seconds
    with context.home() as home, _instances(home) as pids:
        for what, kinds, turn, to_peers in (
            ("one request at a time", (BARE, PIRATE, STORED), _one_at_a_time, _one_at_a_peer),
            (f"{_AT_A_TIME} requests at a time, {SERVERS} servers", (PIRATE, STORED), _many_at_a_time, _many_at_peers),
        ):
            turns = {name: partial(turn, _KINDS[name], home, seconds) for name in kinds}
            turns[PEERS] = partial(to_peers, home, pids, seconds)
            measured = context.interleave(turns, what)
            rates = {name: [rate for rate, _ in some] for name, some in measured.items()}
            costs = {name: [cost for _, cost in some] for name, some in measured.items()}
            figures.append(Figure(what, "requests/s", "higher", rates))
            figures.append(Figure(f"{what}: CPU of both sides", "µs per request", "lower", costs))
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


def bare() -> None:
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        socket.bind(ENDPOINT)
        print(socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
        while True:
            socket.send(socket.recv())


def serve(kind: str, store: str | None = None) -> None:
    if kind == "bare":
        bare()
    server = Server(echo, ENDPOINT, store=store)
    print(server.endpoint, flush=True)
    server.run()


# Tasks of a queue, from their submission to their result: one at a time and several.


WORKERS = 2
_READY_S = 60.0


@contextlib.contextmanager
def _queue(home: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        start_service(stack, home, "jobs", "immortal.patterns.queue:Queue")
        for _ in range(WORKERS):
            stack.enter_context(start_module(__name__, "worker", str(home), **QUIET))
        yield


async def _tasks(jobs: AsyncJobs, at_a_time: int) -> None:
    async def one() -> None:
        job = await jobs.submit("echo", [BODY], returns=bytes)
        if await job.result(_READY_S) != BODY:
            raise BenchError("a wrong result")

    await asyncio.gather(*(one() for _ in range(at_a_time)))


def _task_rate(runner: asyncio.Runner, jobs: AsyncJobs, at_a_time: int, seconds: float) -> float:
    began_s = time.perf_counter()
    count = 0
    while (took_s := time.perf_counter() - began_s) < seconds:
        runner.run(_tasks(jobs, at_a_time))
        count += at_a_time
    return count / took_s


def queue(context: Context) -> list[Figure]:
    """Measure tasks of a queue, from their submission to their result: one at a time and several."""
    figures = []
    with (
        context.home() as home,
        _queue(home),
        _entered(connect_queue("jobs", home=home, timeout=_READY_S)) as (runner, jobs),
    ):
        runner.run(_tasks(jobs, _AT_A_TIME))
        for at_a_time in (1, _AT_A_TIME):
            what = f"tasks of a queue, {at_a_time} at a time, {WORKERS} workers"
            turn = partial(_task_rate, runner, jobs, at_a_time, context.amounts.seconds)
            figures.append(Figure(what, "tasks/s", "higher", context.interleave({IMMORTAL: turn}, what)))
    return figures


# Tasks of a batch: from the first task until the collector has all results.


_TASKS_A_SECOND = 40_000  # about what two processors do; it sets the tasks for each second of a turn
_CLASSES = {"cluster": "immortal.patterns.harmony:Cluster", "results": "immortal.patterns.harmony:Collector"}
_WAIT_S = 120.0


@contextlib.contextmanager
def _cluster(home: Path) -> Iterator[None]:
    environment = {**os.environ, "IMMORTAL_HOME": str(home)}
    worker = partial(start_module, "immortal.patterns.harmony", "work", "cluster", "operator:neg", env=environment)
    with contextlib.ExitStack() as stack:
        for name, app in _CLASSES.items():
            start_service(stack, home, name, app)
        for _ in range(WORKERS):
            stack.enter_context(worker(**QUIET))
        yield


def _batch_rate(cluster: Ventilator, names: Iterator[int], tasks: int) -> float:
    batch = cluster.batch(f"batch {next(names)}", "neg", collector="results")
    began_s = time.perf_counter()
    batch.send(range(tasks))
    progress = batch.wait(timeout=_WAIT_S)
    results = sum(1 for result in batch.results(timeout=_WAIT_S) if result.value == -result.number)
    took_s = time.perf_counter() - began_s
    if results != tasks or progress.failed:
        raise BenchError(f"{results} right results of {tasks}, {progress.failed} failed")
    return tasks / took_s


def harmony(context: Context) -> list[Figure]:
    """Measure tasks of a batch, from the first task until the collector has all results."""
    tasks = int(_TASKS_A_SECOND * context.amounts.seconds)
    names = count()
    with context.home() as home, _cluster(home), connect_harmony("cluster", home=home) as cluster:
        _batch_rate(cluster, names, tasks // 10)
        what = f"tasks of a batch, {WORKERS} workers"
        turn = partial(_batch_rate, cluster, names, tasks)
        return [Figure(what, "tasks/s", "higher", context.interleave({IMMORTAL: turn}, what))]


if __name__ == "__main__":
    if sys.argv[1] == "server":
        serve(*sys.argv[2:])
    else:
        work("jobs", {"echo": same}, home=sys.argv[2])
