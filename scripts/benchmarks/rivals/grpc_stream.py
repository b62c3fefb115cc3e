"""Rival for one-way calls: grpcio's streams of requests. Nothing of it is durable.

``python -m scripts.benchmarks.rivals.grpc_stream server`` prints its address; ``... client ADDRESS ...`` reads plans
from standard input, a line of JSON each, and answers with what the servers counted.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

SERVICE, METHOD = "Receiver", "Take"
SERVER_THREADS = 32
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def _take(requests: Iterator[bytes], context: Any) -> bytes:
    calls = received_bytes = 0
    for data in requests:
        calls += 1
        received_bytes += len(data)
    return json.dumps([calls, received_bytes]).encode()


def serve() -> None:
    server = grpc.server(ThreadPoolExecutor(SERVER_THREADS), options=OPTIONS)
    handlers = {METHOD: grpc.stream_unary_rpc_method_handler(_take)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    server.start()
    server.wait_for_termination()


def call(addresses: list[str]) -> None:
    streams = [
        grpc.insecure_channel(address, options=OPTIONS).stream_unary(f"/{SERVICE}/{METHOD}") for address in addresses
    ]
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
        calls = sum(count[0] for count in counts)
        received_bytes = sum(count[1] for count in counts)
        print(json.dumps({"calls": calls, "bytes": received_bytes, "begun_s": begun_s, "ended_s": ended_s}), flush=True)


def main(role: str, *addresses: str) -> None:
    if role == "server":
        serve()
    elif role == "client" and addresses:
        call(list(addresses))
    else:
        sys.exit(f"{role}: 'server', or 'client' with addresses was expected")


if __name__ == "__main__":
    main(*sys.argv[1:])
