"""Limits of the machine without Immortal: loopback TCP, and a Python loop that calls the handler.

``python -m scripts.benchmarks.limits`` is the other end of the TCP connection: it echoes bytes, or takes them and
answers with their number.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import time
from collections.abc import Iterator

from immortal.bench.processes import BenchError, read_line, start_module
from immortal.bench.workload import Measured, measured

RATE_SECONDS = 0.5
WRITE_SIZE_BYTES = 64 << 10
ROUND_TRIPS = 2_000
ROUND_TRIP_SIZE_BYTES = 16
HANDLER_CALLS = 1_000_000
_COMMAND = struct.Struct("<BQ")  # the command, and a size in bytes
_ECHO, _TAKE = 1, 2


class _Taker:
    """Receiver like that of the benchmark, without anything around it."""

    def __init__(self) -> None:
        self.calls = self.received_bytes = 0

    def take(self, data: bytes) -> None:
        self.calls += 1
        self.received_bytes += len(data)
        if self.calls == -1:
            raise BenchError("no such number of calls was expected")


def handler_rate(size_bytes: int) -> Measured:
    """Measure a loop that calls the benchmark's handler on a plain object."""
    taker = _Taker()
    take = taker.take
    data = bytes(size_bytes)
    begun = time.perf_counter()
    for _ in range(HANDLER_CALLS):
        take(data)
    seconds = time.perf_counter() - begun
    return Measured(taker.calls, seconds)


class Loopback:
    """TCP connection to another process of this machine."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def rate(self, seconds: float = RATE_SECONDS) -> float:
        """Measure the bytes/s in one direction, written 64 KiB at a time."""
        block = bytes(WRITE_SIZE_BYTES)
        size_bytes = WRITE_SIZE_BYTES * 256
        sent_bytes = 0
        begun = time.perf_counter()
        while (spent := time.perf_counter() - begun) < seconds:
            self._connection.sendall(_COMMAND.pack(_TAKE, size_bytes))
            for _ in range(size_bytes // WRITE_SIZE_BYTES):
                self._connection.sendall(block)
            if _receive(self._connection, 8) != struct.pack("<Q", size_bytes):
                raise BenchError("the other end got another number of bytes than were sent")
            sent_bytes += size_bytes
        return sent_bytes / spent

    def round_trips(self) -> Measured:
        """Measure small round trips, one after the other."""
        self._connection.sendall(_COMMAND.pack(_ECHO, ROUND_TRIP_SIZE_BYTES))
        data = bytes(ROUND_TRIP_SIZE_BYTES)
        latencies_ns = []
        for _ in range(ROUND_TRIPS):
            begun_ns = time.perf_counter_ns()
            self._connection.sendall(data)
            if _receive(self._connection, len(data)) != data:
                raise BenchError("the other end sent back something else")
            latencies_ns.append(time.perf_counter_ns() - begun_ns)
        return measured(latencies_ns, sum(latencies_ns) / 1e9)


@contextlib.contextmanager
def loopback() -> Iterator[Loopback]:
    with start_module("scripts.benchmarks.limits") as other:
        port = int(read_line(other, "the other end of the TCP connection"))
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield Loopback(connection)


def _receive(connection: socket.socket, size_bytes: int) -> bytes:
    data = bytearray()
    while piece := connection.recv(min(size_bytes - len(data), 1 << 20)):
        data += piece
        if len(data) == size_bytes:
            return bytes(data)
    raise EOFError


def _serve() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = memoryview(bytearray(1 << 20))
    while True:
        command, size_bytes = _COMMAND.unpack(_receive(connection, _COMMAND.size))
        if command == _ECHO:
            for _ in range(ROUND_TRIPS):
                connection.sendall(_receive(connection, size_bytes))
            continue
        left = size_bytes
        while left:
            received = connection.recv_into(buffer, min(left, len(buffer)))
            if not received:
                return
            left -= received
        connection.sendall(struct.pack("<Q", size_bytes))


if __name__ == "__main__":
    with contextlib.suppress(EOFError, ConnectionError):
        _serve()
    sys.exit()
