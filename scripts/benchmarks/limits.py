"""Limits of the machine without Immortal: the disk, loopback TCP, a Python loop that calls the handler.

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
from pathlib import Path

from immortal.bench.processes import BenchError, append_latencies, append_rate, hear, start_module
from immortal.bench.workload import percentile

DISK_SECONDS = 0.5
WRITE_SIZE_BYTES = 64 << 10
ROUND_TRIPS = 2_000
HANDLER_CALLS = 1_000_000
_COMMAND = struct.Struct("<BQ")  # the command, and a size in bytes
_ECHO, _TAKE = 1, 2


def disk_rate(folder: Path, block_size_bytes: int = 1 << 20) -> float:
    """Measure the bytes/s of append and fdatasync."""
    return append_rate(folder, block_size_bytes, DISK_SECONDS)


def disk_latency_us(folder: Path, percent: float) -> float:
    """Measure append and fdatasync of 4 KiB, about the size of a small commit; in µs."""
    return 1e6 * percentile(append_latencies(folder, 4 << 10), percent)


def handler_rate(size_bytes: int) -> float:
    """Measure the calls/s of a loop that calls the benchmark's handler on a plain object."""
    taker = _Taker()
    take = taker.take
    data = bytes(size_bytes)
    calls = range(HANDLER_CALLS)
    begun = time.perf_counter()
    for _ in calls:
        take(data)
    seconds = time.perf_counter() - begun
    if taker.calls != HANDLER_CALLS:
        raise BenchError("the loop did not call the handler")
    return HANDLER_CALLS / seconds


class _Taker:
    """Receiver like ``apps.Receiver``, without anything around it."""

    def __init__(self) -> None:
        self.calls = self.received_bytes = 0
        self.calls_expected = -1

    def take(self, data: bytes) -> None:
        self.calls += 1
        self.received_bytes += len(data)
        if self.calls == self.calls_expected:
            raise BenchError("no such number of calls was expected")


class Loopback:
    """TCP connection to another process of this machine."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def rate(self, seconds: float = DISK_SECONDS) -> float:
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

    def round_trip_us(self, percent: float, size_bytes: int = 16) -> float:
        self._connection.sendall(_COMMAND.pack(_ECHO, size_bytes))
        data = bytes(size_bytes)
        latencies_s = []
        for _ in range(ROUND_TRIPS):
            begun = time.perf_counter()
            self._connection.sendall(data)
            if _receive(self._connection, size_bytes) != data:
                raise BenchError("the other end sent back something else")
            latencies_s.append(time.perf_counter() - begun)
        return 1e6 * percentile(sorted(latencies_s), percent)


@contextlib.contextmanager
def loopback() -> Iterator[Loopback]:
    with start_module("scripts.benchmarks.limits") as other:
        port = int(hear(other, "the other end of the TCP connection"))
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield Loopback(connection)


def _receive(connection: socket.socket, size_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        piece = connection.recv(min(size_bytes - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


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
