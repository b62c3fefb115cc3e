"""The pirate's requests, one at a time and several: to plain servers, and to instances from peer to peer.

Beside REQ and REP sockets that promise nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import zmq

from immortal.bench.apps import Callee
from immortal.bench.processes import BenchError, processor_s
from immortal.coordinator.service.process import die_with_parent
from immortal.patterns.pirate import Request, Server, connect, connect_instances
from scripts.benchmarks.context import Context, start_service
from scripts.benchmarks.figures import Figure

BARE, PIRATE, STORED, PEERS = "bare REQ/REP", "pirate", "pirate, replies stored", "pirate, instances"
_KINDS = {BARE: "bare", PIRATE: "pirate", STORED: "stored"}
SERVERS = 4  # of the pool, for several at a time
_AT_A_TIME = 64
_WARM_UP = 200
BODY = b"sixteen bytes ..."
Turn = tuple[float, float]  # requests in a second; µs of processors for each, both sides together


@contextlib.contextmanager
def _servers(kind: str, home: Path, count: int) -> Iterator[tuple[list[str], list[int]]]:
    """(endpoints, process IDs)."""
    store = [str(home / f"{kind}-{count}")] if kind == "stored" else []
    command = [sys.executable, "-m", "scripts.benchmarks.parts.pirate", kind, *store]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent(os.getpid()))
        for _ in range(count)
    ]
    try:
        endpoints = []
        for process in processes:
            assert process.stdout is not None
            endpoints.append(process.stdout.readline().strip())
        if not all(endpoints):
            raise BenchError(f"a server of kind {kind!r} has ended")
        yield endpoints, [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _instances(home: Path) -> Iterator[list[list[int]]]:
    """echo-0 and so on: the process IDs of each, of its coordinator and its app."""
    with contextlib.ExitStack() as stack:
        yield [start_service(stack, home, f"echo-{number}", "immortal.bench.apps:Callee") for number in range(SERVERS)]


def _measured(seconds: float, pids: list[int], ask: Callable[[], int]) -> Turn:
    """``ask`` makes some requests, and says how many. Raises BenchError."""
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


def _one_at_a_time(kind: str, home: Path, seconds: float) -> Turn:
    with _servers(kind, home, 1) as (endpoints, pids):
        if kind == "bare":
            with zmq.Context() as context, context.socket(zmq.REQ) as socket:
                socket.connect(endpoints[0])

                def ask() -> int:
                    socket.send(BODY)
                    _check(socket.recv())
                    return 1

                for _ in range(_WARM_UP):
                    ask()
                return _measured(seconds, pids, ask)
        with connect(endpoints) as pool:

            def request() -> int:
                _check(pool.request(BODY))
                return 1

            for _ in range(_WARM_UP):
                request()
            return _measured(seconds, pids, request)


def _many_at_a_time(kind: str, home: Path, seconds: float) -> Turn:
    """Awaited together, at a pool of several; for the bare sockets there is no such thing."""
    with _servers(kind, home, SERVERS) as (endpoints, pids), asyncio.Runner() as runner:

        async def ask() -> int:
            for reply in await asyncio.gather(*(pool.request(BODY) for _ in range(_AT_A_TIME))):
                _check(reply)
            return _AT_A_TIME

        connector = connect(endpoints)
        pool = runner.run(connector.__aenter__())
        try:
            runner.run(ask())
            return _measured(seconds, pids, lambda: runner.run(ask()))
        finally:
            runner.run(connector.__aexit__(None, None, None))


def _one_at_a_peer(home: Path, pids: list[list[int]], seconds: float) -> Turn:
    with connect_instances(Callee, ["echo-0"], home=home) as pool:

        def call() -> int:
            _check(pool.echo(BODY))
            return 1

        for _ in range(_WARM_UP):
            call()
        return _measured(seconds, pids[0], call)


def _many_at_peers(home: Path, pids: list[list[int]], seconds: float) -> Turn:
    with asyncio.Runner() as runner:

        async def call() -> int:
            for reply in await asyncio.gather(*(pool.echo(BODY) for _ in range(_AT_A_TIME))):
                _check(reply)
            return _AT_A_TIME

        connector = connect_instances(Callee, "echo-*", home=home)
        pool = runner.run(connector.__aenter__())
        try:
            runner.run(call())
            return _measured(seconds, [pid for both in pids for pid in both], lambda: runner.run(call()))
        finally:
            runner.run(connector.__aexit__(None, None, None))


def run(context: Context) -> list[Figure]:
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


# Servers that the pirate is measured with: ``python -m scripts.benchmarks.parts.pirate KIND [STORE]``.
#
# Each prints its endpoint, and gives a request back. KIND: ``bare`` (a REP socket alone), ``pirate``, ``stored``.


ENDPOINT = "tcp://127.0.0.1:*"


def echo(request: Request) -> bytes:
    return request.body


def bare() -> None:
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        socket.bind(ENDPOINT)
        print(socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
        while True:
            socket.send(socket.recv())


def main() -> None:
    kind, *store = sys.argv[1:]
    if kind == "bare":
        bare()
    server = Server(echo, ENDPOINT, store=store[0] if store else None)
    print(server.endpoint, flush=True)
    server.run()


if __name__ == "__main__":
    main()
