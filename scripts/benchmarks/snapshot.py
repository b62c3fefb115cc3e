"""Measures how long a checkpoint delays the handlers, inline and forked, and their rate meanwhile.

    .venv/bin/python -m scripts.benchmarks.snapshot [SHAPE ...] [--size-mib N]

SHAPE: "large" (a dict of 1 KiB strings), "small" (a dict from short strings to numbers). The app is a real one; the
coordinator is a script at the other end of its socket that keeps calls in flight and reads the app's messages.
"""

from __future__ import annotations

import argparse
import os
import select
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from immortal import Immortal, peer, rpc
from immortal.bench.processes import memory_of
from immortal.protocol.extensions import decode_app_batch
from immortal.protocol.messages import MessageType, decode_incoming_rpc, decode_messages
from immortal.protocol.readers import BlobData, Message, MessageReader
from tests.helpers.wire import call, control, initial_record, logged

SHAPES = ("large", "small")
SMALL_ENTRY_SIZE_BYTES = 150  # in memory, about
CALLS_PER_RECORD = 200
RECORDS_AHEAD = 8
STEADY_S = 2.0

handled_at_s = time.perf_counter()
longest_gap_s = 0.0  # between two calls that were handled: the app was busy, so this is a pause


class Store(Immortal):
    other = peer("__main__:Store", "other")
    texts: dict[int, str]
    counts: dict[str, int]

    def __init__(self) -> None:
        self.texts = {}
        self.counts = {}

    @rpc(id=1)
    def fill(self, shape: str, size_mib: int) -> None:
        if shape == "large":
            self.texts = {key: f"{key:1024}" for key in range(size_mib << 10)}
        else:
            self.counts = {f"key {key}": key for key in range((size_mib << 20) // SMALL_ENTRY_SIZE_BYTES)}
        self.other.touch.fork(0)

    @rpc(id=2)
    def touch(self, key: int) -> None:
        global handled_at_s, longest_gap_s
        now_s = time.perf_counter()  # immortal: deterministic
        longest_gap_s = max(longest_gap_s, now_s - handled_at_s)
        handled_at_s = now_s
        if self.texts:
            self.texts[key % len(self.texts)] = f"{key:1024}"
        else:
            self.counts[f"key {key % len(self.counts)}"] = key
        self.other.touch.fork(key)

    @rpc(id=3)
    def report(self) -> None:
        global longest_gap_s
        self.other.gap.fork(longest_gap_s)
        longest_gap_s = 0.0

    @rpc(id=4)
    def gap(self, longest_s: float) -> None:
        """Send the gap to the coordinator's end, which reads it."""


class Inline(Store):
    pass


class Fork(Store, checkpoint="fork"):
    pass


class Driver:
    """Coordinator's end of the app's socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = MessageReader()
        self._records = 0
        self._calls = 0
        self.checkpoints = self.blob_bytes = 0
        self.initial = b""
        self.calls_back = 0
        self.gaps_s: list[float] = []

    def send_record(self, calls: list[bytes]) -> None:
        self._records += 1
        self._connection.sendall(logged(self._records, calls))

    def send_touches(self) -> None:
        first = self._calls * 7919
        self._calls += CALLS_PER_RECORD
        self.send_record([call(2, first + 7919 * index) for index in range(CALLS_PER_RECORD)])

    def start(self) -> None:
        self._connection.sendall(control(MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT))
        while not self.checkpoints:
            self.receive()
        self._connection.sendall(initial_record(self.initial))

    def receive(self) -> None:
        data = self._connection.recv(1 << 18)
        if not data:
            raise SystemExit("the app is gone")
        self._reader.receive_data(data)
        while (event := self._reader.next_event()) is not None:
            if isinstance(event, BlobData):
                self.blob_bytes += len(event.data)
                self.checkpoints += event.last
            elif isinstance(event, Message):
                self._message(event)

    def _message(self, message: Message) -> None:
        if message.message_type == MessageType.INITIAL_MESSAGE:
            self.initial = message.data
        elif message.message_type == MessageType.SNAPSHOT_CHUNK:
            self.blob_bytes += len(message.data)
        elif message.message_type == MessageType.SNAPSHOT_END:
            if message.data:
                raise SystemExit(message.data.decode())
            self.checkpoints += 1
        elif message.message_type == MessageType.STREAM_BATCH:
            batch = decode_app_batch(message.data)
            for _, start, end in decode_messages(batch.payload) if batch.count < CALLS_PER_RECORD else ():
                rpc_message = decode_incoming_rpc(batch.payload, start, end)
                if rpc_message.method_id == 4:
                    self.gaps_s += msgspec.msgpack.decode(rpc_message.arguments)
            self.calls_back += batch.count

    def keep_busy(self, until_checkpoint: int | None, seconds: float = 0.0) -> float:
        """Keep RECORDS_AHEAD records in flight until a checkpoint is complete, or for a time; return the seconds."""
        begin = time.perf_counter()
        while True:
            if until_checkpoint is None and time.perf_counter() - begin >= seconds:
                break
            if until_checkpoint is not None and self.checkpoints >= until_checkpoint:
                break
            while self._calls - self.calls_back < RECORDS_AHEAD * CALLS_PER_RECORD:
                self.send_touches()
            if select.select([self._connection], [], [], 1.0)[0]:
                self.receive()
        return time.perf_counter() - begin

    def longest_gap_s(self) -> float:
        """Return the longest pause between two calls since the last question."""
        while self.calls_back < self._calls:
            self.receive()
        known = len(self.gaps_s)
        self.send_record([call(2, 0)] * 2 + [call(3)])
        while len(self.gaps_s) == known:
            self.receive()
        self.calls_back = self._calls
        return self.gaps_s[-1]


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of one checkpoint of one app under load."""

    resident_mib: int
    blob_bytes: int
    longest_pause_s: float  # between two calls, with the checkpoint
    steady_pause_s: float  # and without one
    checkpoint_s: float
    steady_calls_per_s: float
    during_calls_per_s: float


def measure(cls: str, shape: str, size_mib: int) -> Measured:
    """Measure a checkpoint. ``cls``: "Inline" or "Fork"."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "scripts.benchmarks.snapshot", "--app", cls, "--address", address]
    app = subprocess.Popen(command, env=environment)
    try:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        driver = Driver(connection)
        driver.start()
        driver.send_record([call(1, shape, size_mib)])
        while not driver.calls_back:
            driver.receive()
        driver.calls_back = 0
        driver.keep_busy(None, 1.0)
        driver.longest_gap_s()
        before = driver.calls_back
        steady_s = driver.keep_busy(None, STEADY_S)
        steady = (driver.calls_back - before) / steady_s
        steady_gap_s = driver.longest_gap_s()
        resident = memory_of(app.pid).resident >> 20
        driver.blob_bytes = 0
        before = driver.calls_back
        connection.sendall(control(MessageType.TAKE_CHECKPOINT))
        took_s = driver.keep_busy(driver.checkpoints + 1)
        during = (driver.calls_back - before) / took_s
        gap_s = driver.longest_gap_s()
        connection.sendall(control(MessageType.GOODBYE, b"measured"))
        app.wait(60)
        return Measured(resident, driver.blob_bytes, gap_s, steady_gap_s, took_s, steady, during)
    finally:
        app.kill()
        app.wait()
        listener.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="*", default=SHAPES, metavar="SHAPE")
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--app", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.app:
        {"Inline": Inline, "Fork": Fork}[options.app].main(options.address)
    for shape in options.shapes:
        for cls in ("Inline", "Fork"):
            found = measure(cls, shape, options.size_mib)
            print(
                f"{cls:7} {shape:6} resident {found.resident_mib:5} MiB, blob {found.blob_bytes >> 20:5} MiB: "
                f"longest pause {1000 * found.longest_pause_s:7.1f} ms "
                f"(without a checkpoint {1000 * found.steady_pause_s:.1f} ms), "
                f"checkpoint in {found.checkpoint_s:5.2f} s, calls/s {found.steady_calls_per_s:9,.0f} before, "
                f"{found.during_calls_per_s:9,.0f} during",
                flush=True,
            )


if __name__ == "__main__":
    main()
