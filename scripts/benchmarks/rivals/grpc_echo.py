"""Rival for calls: grpcio, unary, with and without asyncio. Nothing of it is durable.

``python -m scripts.benchmarks.rivals.grpc_echo server|client threads|asyncio [ADDRESS]``, each in a process of its own,
as the apps are. A server prints its address; a client takes runs (see ``immortal.bench.workload``).
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio

from immortal.bench.workload import Run, argument, encode_measured, measured, read_runs

SERVICE, METHOD = "Callee", "Echo"
SERVER_THREADS = 8


def _handlers(echo: Callable[[bytes, Any], Any]) -> Any:
    """Bytes in, bytes out: no protobuf, which would only cost time."""
    return grpc.method_handlers_generic_handler(SERVICE, {METHOD: grpc.unary_unary_rpc_method_handler(echo)})


def _echo(request: bytes, context: Any) -> bytes:
    return request


async def _echo_async(request: bytes, context: Any) -> bytes:
    return request


def _say(line: object) -> None:
    print(line, flush=True)


def serve_threads() -> None:
    server = grpc.server(ThreadPoolExecutor(SERVER_THREADS))
    server.add_generic_rpc_handlers((_handlers(_echo),))
    _say(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    server.wait_for_termination()


async def serve_asyncio(next_address: str = "") -> None:
    """With ``next_address`` calls are passed on to there, and so are the answers."""
    server = grpc.aio.server()
    echo: Callable[[bytes, Any], Awaitable[bytes]] = _echo_async
    if next_address:
        call = grpc.aio.insecure_channel(next_address).unary_unary(f"/{SERVICE}/{METHOD}")

        async def echo(request: bytes, context: Any) -> bytes:
            return bytes(await call(request))

    server.add_generic_rpc_handlers((_handlers(echo),))
    _say(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    await server.wait_for_termination()


def call_threads(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(f"/{SERVICE}/{METHOD}")
        for run in read_runs(sys.stdin):
            latencies_ns: list[int] = []
            begun = time.perf_counter()
            loops = [
                threading.Thread(target=_loop, args=(call, run, index, latencies_ns))
                for index in range(run.outstanding)
            ]
            for loop in loops:
                loop.start()
            for loop in loops:
                loop.join()
            _say(encode_measured(measured(latencies_ns, time.perf_counter() - begun)))


def _loop(call: Callable[[bytes], bytes], run: Run, index: int, latencies_ns: list[int]) -> None:
    first = index * run.calls_per_loop
    for number in range(first, first + run.calls_per_loop):
        data = argument(number, run.size_bytes)
        begun_ns = time.perf_counter_ns()
        answer = call(data)
        latencies_ns.append(time.perf_counter_ns() - begun_ns)
        if answer != data:
            raise ValueError(f"call {number} got the answer {answer[:16]!r}")


async def call_asyncio(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(f"/{SERVICE}/{METHOD}")
        for run in read_runs(sys.stdin):
            latencies_ns: list[int] = []
            begun = time.perf_counter()
            await asyncio.gather(*(_loop_async(call, run, index, latencies_ns) for index in range(run.outstanding)))
            _say(encode_measured(measured(latencies_ns, time.perf_counter() - begun)))


async def _loop_async(call: Callable[[bytes], Awaitable[bytes]], run: Run, index: int, latencies_ns: list[int]) -> None:
    first = index * run.calls_per_loop
    for number in range(first, first + run.calls_per_loop):
        data = argument(number, run.size_bytes)
        begun_ns = time.perf_counter_ns()
        answer = await call(data)
        latencies_ns.append(time.perf_counter_ns() - begun_ns)
        if answer != data:
            raise ValueError(f"call {number} got the answer {answer[:16]!r}")


def main(role: str, kind: str, address: str = "") -> None:
    if (role, kind) == ("server", "threads"):
        serve_threads()
    elif (role, kind) == ("server", "asyncio"):
        asyncio.run(serve_asyncio(address))
    elif (role, kind) == ("client", "threads"):
        call_threads(address)
    elif (role, kind) == ("client", "asyncio"):
        asyncio.run(call_asyncio(address))
    else:
        sys.exit(f"{role} {kind}: server or client, threads or asyncio was expected")


if __name__ == "__main__":
    main(*sys.argv[1:])
