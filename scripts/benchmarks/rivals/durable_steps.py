"""The durable handler of three steps in DBOS and Restate.

``python -m scripts.benchmarks.rivals.durable_steps dbos URL`` takes runs (see ``immortal.bench.workload``). Workflows
begin in the process that runs them, which saves DBOS a call between processes. ``... restate-server`` serves the
handler and prints its address; ``... restate-client SOCKET`` takes runs and calls it through the server's ingress, with
hand-written HTTP, which costs the client next to nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from functools import partial
from typing import Any

from immortal.bench.workload import measure_in_tasks, measure_in_threads, print_result, read_runs
from scripts.benchmarks.rivals import STEPS, step

POOL_SIZE_MAX = 64
BINARY = "application/octet-stream"


def run_dbos(url: str) -> None:
    from dbos import DBOS, DBOSConfig

    @DBOS.step()
    def durable_step(data: bytes, number: int) -> bytes:
        return step(data, number)

    @DBOS.workflow()
    def echo(data: bytes) -> bytes:
        for number in STEPS:
            data = durable_step(data, number)
        return data

    config: DBOSConfig = {
        "name": "bench",
        "system_database_url": url,
        "log_level": "ERROR",
        "sys_db_pool_size": POOL_SIZE_MAX,
    }
    logging.disable(logging.WARNING)
    DBOS(config=config)
    DBOS.launch()
    print("ready", flush=True)
    for run in read_runs(sys.stdin):
        print_result(measure_in_threads(run, echo))


def serve_restate() -> None:
    import hypercorn.asyncio
    import restate
    from restate.serde import BytesSerde

    service = restate.Service("Steps")
    options = restate.RunOptions(serde=BytesSerde())

    @service.handler(accept=BINARY, content_type=BINARY, input_serde=BytesSerde(), output_serde=BytesSerde())
    async def echo(context: Any, data: bytes) -> bytes:
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


async def call_restate(path: str) -> None:
    for run in await asyncio.to_thread(lambda: read_runs(sys.stdin)):
        connections = [await asyncio.open_unix_connection(path) for _ in range(run.outstanding)]
        calls = [partial(_post, *connection) for connection in connections]
        print_result(await measure_in_tasks(run, calls))
        for _, writer in connections:
            writer.close()


async def _post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    lines = ["POST /Steps/echo HTTP/1.1", "host: local", f"content-type: {BINARY}", f"content-length: {len(data)}"]
    writer.write("".join(f"{line}\r\n" for line in [*lines, ""]).encode() + data)
    status, *headers = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
    size_bytes = next((int(one[15:]) for one in headers if one.startswith(b"content-length:")), 0)
    answer = await reader.readexactly(size_bytes) if size_bytes else await _chunks(reader)
    if b" 200 " not in status + b" ":
        raise ValueError(f"a call got {status!r}, {answer[:200]!r}")
    return answer


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    answer = b""
    while size_bytes := int((await reader.readline()).strip(), 16):
        answer += await reader.readexactly(size_bytes)
        await reader.readline()
    await reader.readline()
    return answer


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["dbos", url]:
            run_dbos(url)
        case ["restate-server"]:
            serve_restate()
        case ["restate-client", path]:
            asyncio.run(call_restate(path))
        case other:
            sys.exit(f"{other}: dbos URL, restate-server or restate-client SOCKET was expected")
