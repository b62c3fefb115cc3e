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
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import grpc.aio

from immortal.bench.workload import measure_in_tasks, measure_in_threads, print_result, read_runs

SERVICE, ECHO, TAKE = "Callee", "Echo", "Take"
ECHO_PATH, TAKE_PATH = f"/{SERVICE}/{ECHO}", f"/{SERVICE}/{TAKE}"
SERVER_THREADS = {"threads": 8, "stream": 32}
STREAM_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def _handlers(echo: Callable[[bytes, Any], Any]) -> Any:
    """Return handlers of plain bytes, without protobuf, which would only cost time."""
    methods = {ECHO: grpc.unary_unary_rpc_method_handler(echo), TAKE: grpc.stream_unary_rpc_method_handler(_receive)}
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def _echo(request: bytes, context: Any) -> bytes:
    return request


async def _echo_async(request: bytes, context: Any) -> bytes:
    return request


def _receive(requests: Iterator[bytes], context: Any) -> bytes:
    calls = received_bytes = 0
    for data in requests:
        calls += 1
        received_bytes += len(data)
    return json.dumps([calls, received_bytes]).encode()


def serve_threads(kind: str) -> None:
    options = STREAM_OPTIONS if kind == "stream" else None
    server = grpc.server(ThreadPoolExecutor(SERVER_THREADS[kind]), options=options)
    server.add_generic_rpc_handlers((_handlers(_echo),))
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
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
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    await server.start()
    await server.wait_for_termination()


def call_threads(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(ECHO_PATH)
        for run in read_runs(sys.stdin):
            print_result(measure_in_threads(run, call))


async def call_asyncio(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(ECHO_PATH)
        for run in read_runs(sys.stdin):
            print_result(await measure_in_tasks(run, [call] * run.outstanding))


def call_streams(*addresses: str) -> None:
    streams = [grpc.insecure_channel(address, options=STREAM_OPTIONS).stream_unary(TAKE_PATH) for address in addresses]
    with ThreadPoolExecutor(len(streams)) as threads:
        for line in sys.stdin:
            plan = json.loads(line)
            data = [bytes(size) for size in plan["sizes"]]
            requests = [itertools.islice(itertools.cycle(data), plan["calls"]) for _ in streams]
            begun_s = time.perf_counter()
            counts = list(threads.map(lambda stream, some: json.loads(stream(some)), streams, requests))
            ended_s = time.perf_counter()
            calls, received_bytes = map(sum, zip(*counts, strict=True))
            counted = {"calls": calls, "bytes": received_bytes, "begun_s": begun_s, "ended_s": ended_s}
            print(json.dumps(counted), flush=True)


ROLES: dict[tuple[str, str], Callable[..., Any]] = {
    ("server", "threads"): partial(serve_threads, "threads"),
    ("server", "stream"): partial(serve_threads, "stream"),
    ("server", "asyncio"): serve_asyncio,
    ("client", "threads"): call_threads,
    ("client", "asyncio"): call_asyncio,
    ("client", "stream"): call_streams,
}


if __name__ == "__main__":
    role = ROLES[sys.argv[1], sys.argv[2]](*sys.argv[3:])
    if asyncio.iscoroutine(role):
        asyncio.run(role)
