"""The two services of the benchmark.

The sender forks calls in bursts; each burst is a call to itself, and several chains of them are under way, so that it
waits for nothing but back-pressure.
"""

from __future__ import annotations

import json
import os
import time

from appsdk import Immortal, Impulses, impulse, on_primary, peer, rpc

PLAN_VARIABLE = "IMMORTAL_BENCH_PLAN"
POLL_INTERVAL_S = 0.0005
CHAINS = 16


class Receiver(Immortal):
    sender = peer("bench.apps:Sender", "sender")
    run: int
    calls: int
    received_bytes: int
    calls_expected: int

    def __init__(self) -> None:
        self.run = 0
        self.calls = self.received_bytes = self.calls_expected = 0

    @rpc(id=1)
    def take(self, data: bytes) -> None:
        self.calls += 1
        self.received_bytes += len(data)
        if self.calls == self.calls_expected:
            self.sender.finished.fork(self.run, self.calls, self.received_bytes)

    @rpc(id=2)
    def expect(self, run: int, calls: int) -> None:
        self.run = run
        self.calls = self.received_bytes = 0
        self.calls_expected = calls


class Sender(Immortal):
    receiver = peer(Receiver, "receiver")
    finished_run: int
    calls: int
    received_bytes: int

    def __init__(self) -> None:
        self.finished_run = self.calls = self.received_bytes = 0

    @impulse(id=1)
    def start(self, run: int, size_bytes: int, bursts: int, calls_per_burst: int) -> None:
        self.receiver.expect.fork(run, CHAINS * bursts * calls_per_burst)
        for _ in range(CHAINS):
            self.burst.fork(size_bytes, bursts, calls_per_burst)

    @rpc(id=2)
    def burst(self, size_bytes: int, bursts_left: int, calls: int) -> None:
        fork = self.receiver.take.fork
        data = bytes(size_bytes)
        for _ in range(calls):
            fork(data)
        if bursts_left > 1:
            self.burst.fork(size_bytes, bursts_left - 1, calls)

    @rpc(id=3)
    def finished(self, run: int, calls: int, received_bytes: int) -> None:
        self.calls, self.received_bytes = calls, received_bytes
        self.finished_run = run

    @on_primary
    def drive(self, impulses: Impulses) -> None:
        """Runs the plan, a line of JSON on standard output for each run; then idles."""
        for run, (size_bytes, bursts, calls_per_burst) in enumerate(json.loads(os.environ[PLAN_VARIABLE]), start=1):
            if run <= self.finished_run:
                continue
            begun = time.perf_counter()
            impulses.start(run, size_bytes, bursts, calls_per_burst)
            while self.finished_run < run:
                time.sleep(POLL_INTERVAL_S)
            seconds = time.perf_counter() - begun
            line = {"run": run, "calls": self.calls, "bytes": self.received_bytes, "seconds": seconds}
            print(json.dumps(line), flush=True)
