"""The durable handler of three steps in Restate.

``python -m scripts.benchmarks.rivals.restate_steps server`` serves it and prints its address; ``... client SOCKET``
calls it through the server's ingress, runs on stdin. HTTP is spoken by hand, which costs the client next to nothing.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time

import hypercorn.asyncio
import restate
from restate.serde import BytesSerde

from immortal.bench.workload import Run, argument, encode_measured, measured, read_runs
from scripts.benchmarks.rivals.steps import STEPS, step

BINARY = "application/octet-stream"


def serve() -> None:
    service = restate.Service("Steps")
    options = restate.RunOptions(serde=BytesSerde())

    @service.handler(accept=BINARY, content_type=BINARY, input_serde=BytesSerde(), output_serde=BytesSerde())
    async def echo(context: restate.Context, data: bytes) -> bytes:
        for number in STEPS:
            data = await context.run_typed(f"step {number}", step, options, data=data, number=number)
        return data

    listener = socket.create_server(("127.0.0.1", 0))
    config = hypercorn.Config()
    config.bind = [f"fd://{listener.fileno()}"]
    config.h2_max_concurrent_streams = 2**31 - 1
    config.keep_alive_max_requests = 2**31 - 1
    config.loglevel = "ERROR"
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    asyncio.run(hypercorn.asyncio.serve(restate.app([service]), config))


async def call(path: str) -> None:
    for run in await asyncio.to_thread(lambda: read_runs(sys.stdin)):
        latencies_ns: list[int] = []
        connections = [await asyncio.open_unix_connection(path) for _ in range(run.outstanding)]
        begun = time.perf_counter()
        await asyncio.gather(
            *(_loop(*connection, run, index, latencies_ns) for index, connection in enumerate(connections))
        )
        seconds = time.perf_counter() - begun
        for _, writer in connections:
            writer.close()
        print(encode_measured(measured(latencies_ns, seconds)), flush=True)


async def _loop(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, run: Run, index: int, latencies_ns: list[int]
) -> None:
    first = index * run.calls_per_loop
    lines = ["POST /Steps/echo HTTP/1.1", "host: local", f"content-type: {BINARY}", f"content-length: {run.size_bytes}"]
    head = "".join(f"{line}\r\n" for line in [*lines, ""]).encode()
    for number in range(first, first + run.calls_per_loop):
        data = argument(number, run.size_bytes)
        begun_ns = time.perf_counter_ns()
        writer.write(head + data)
        status, *headers = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        size_bytes = next((int(one[15:]) for one in headers if one.startswith(b"content-length:")), 0)
        answer = await reader.readexactly(size_bytes) if size_bytes else await _chunks(reader)
        latencies_ns.append(time.perf_counter_ns() - begun_ns)
        if b" 200 " not in status + b" " or answer != data:
            raise ValueError(f"call {number} got {status!r}, {answer[:200]!r}")


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    answer = b""
    while size_bytes := int((await reader.readline()).strip(), 16):
        answer += await reader.readexactly(size_bytes)
        await reader.readline()
    await reader.readline()
    return answer


if __name__ == "__main__":
    if sys.argv[1] == "server":
        serve()
    else:
        asyncio.run(call(sys.argv[2]))
