"""grpcio's unary calls, with and without asyncio. Nothing of them is durable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from subprocess import Popen

from immortal.bench.calls import Caller
from immortal.bench.processes import BenchError, start_module

GRPC_ASYNCIO, GRPC_THREADS = "grpc asyncio", "grpc threads"


@contextlib.contextmanager
def grpc_caller(name: str, relays: int = 0) -> Iterator[Caller]:
    """``relays``: servers between the client and the one that answers; only with asyncio."""
    kind = name.removeprefix("grpc ")
    with contextlib.ExitStack() as stack:
        servers: dict[str, Popen[str]] = {}
        address = ""
        for index in range(relays + 1):
            server = stack.enter_context(
                start_module("scripts.benchmarks.rivals.grpc_echo", "server", kind, *([address] if address else []))
            )
            if server.stdout is None or not (address := server.stdout.readline().strip()):
                raise BenchError(f"the server of {name} did not start")
            servers[f"server {index + 1}" if relays else "server"] = server
        client = stack.enter_context(start_module("scripts.benchmarks.rivals.grpc_echo", "client", kind, address))
        yield Caller(name, {"client": client, **servers}, lambda: None)
