"""Rival for calls and streams: grpcio, with and without asyncio. It makes nothing durable.

``python -m scripts.benchmarks.rivals.grpc_calls server|client threads|asyncio|stream [ADDRESS ...]``, each in a process
of its own, as the apps are. A server prints its address. A client of ``threads`` and ``asyncio`` takes runs of unary
calls (see ``immortal.bench.workload``); one of ``stream`` takes plans, and answers with the servers' counts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio

from immortal.bench.workload import encode_measured, measure_in_tasks, measure_in_threads, read_runs

SERVICE, ECHO, TAKE = "Callee", "Echo", "Take"
ECHO_PATH, TAKE_PATH = f"/{SERVICE}/{ECHO}", f"/{SERVICE}/{TAKE}"
SERVER_THREADS = {"threads": 8, "stream": 32}
STREAM_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def _handlers(echo: Callable[[bytes, Any], Any]) -> Any:
    """Return handlers of plain bytes, without protobuf, which would only cost time."""
    methods = {ECHO: grpc.unary_unary_rpc_method_handler(echo), TAKE: grpc.stream_unary_rpc_method_handler(_take)}
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def _echo(request: bytes, context: Any) -> bytes:
    return request


async def _echo_async(request: bytes, context: Any) -> bytes:
    return request


def _take(requests: Iterator[bytes], context: Any) -> bytes:
    calls = received_bytes = 0
    for data in requests:
        calls += 1
        received_bytes += len(data)
    return json.dumps([calls, received_bytes]).encode()


def _say(line: object) -> None:
    print(line, flush=True)


def serve_threads(kind: str) -> None:
    options = STREAM_OPTIONS if kind == "stream" else None
    server = grpc.server(ThreadPoolExecutor(SERVER_THREADS[kind]), options=options)
    server.add_generic_rpc_handlers((_handlers(_echo),))
    _say(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    server.wait_for_termination()


async def serve_asyncio(next_address: str = "") -> None:
    """Serve calls; with ``next_address`` pass them on to it, and its answers back."""
    server = grpc.aio.server()
    echo: Callable[[bytes, Any], Awaitable[bytes]] = _echo_async
    if next_address:
        call = grpc.aio.insecure_channel(next_address).unary_unary(ECHO_PATH)

        async def echo(request: bytes, context: Any) -> bytes:
            return bytes(await call(request))

    server.add_generic_rpc_handlers((_handlers(echo),))
    _say(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    await server.wait_for_termination()


def call_threads(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(ECHO_PATH)
        for run in read_runs(sys.stdin):
            _say(encode_measured(measure_in_threads(run, call)))


async def call_asyncio(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(ECHO_PATH)
        for run in read_runs(sys.stdin):
            _say(encode_measured(await measure_in_tasks(run, [call] * run.outstanding)))


def call_streams(addresses: tuple[str, ...]) -> None:
    streams = [grpc.insecure_channel(address, options=STREAM_OPTIONS).stream_unary(TAKE_PATH) for address in addresses]
    for line in sys.stdin:
        plan = json.loads(line)
        data = [bytes(size) for size in plan["sizes"]]
        counts: list[list[int]] = [[] for _ in streams]

        def stream(index: int, calls: int, data: list[bytes], counts: list[list[int]]) -> None:
            requests = itertools.islice(itertools.cycle(data), calls)
            counts[index] = json.loads(streams[index](requests))

        threads = [
            threading.Thread(target=stream, args=(index, plan["calls"], data, counts)) for index in range(len(streams))
        ]
        begun_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ended_s = time.perf_counter()
        calls, received_bytes = map(sum, zip(*counts, strict=True))
        _say(json.dumps({"calls": calls, "bytes": received_bytes, "begun_s": begun_s, "ended_s": ended_s}))


def main(role: str, kind: str, *addresses: str) -> None:
    match role, kind:
        case "server", "threads" | "stream":
            serve_threads(kind)
        case "server", "asyncio":
            asyncio.run(serve_asyncio(*addresses))
        case "client", "threads":
            call_threads(*addresses)
        case "client", "asyncio":
            asyncio.run(call_asyncio(*addresses))
        case "client", "stream":
            call_streams(addresses)
        case _:
            sys.exit(f"{role} {kind}: server or client, threads, asyncio or stream was expected")


if __name__ == "__main__":
    main(*sys.argv[1:])
