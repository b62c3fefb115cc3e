"""The two services of the benchmark of awaited calls. As in any app: the loops are ``async def`` handlers."""

from __future__ import annotations

import sys
import threading
import time

from immortal import Immortal, Impulses, impulse, on_primary, peer, rpc
from immortal.bench.call_workload import argument, encode_measured, measured, read_runs

CALLS_PER_JOURNAL = 1_000  # then a loop goes on with an empty journal


class Stopwatch:
    """No part of the state: a replay measures nothing."""

    def __init__(self) -> None:
        self.latencies_ns: list[int] = []
        self.done = threading.Event()
        self.clock_ns = time.perf_counter_ns


_stopwatch = Stopwatch()


class Callee(Immortal):
    @rpc(id=1)
    def echo(self, data: bytes) -> bytes:
        return data


class Caller(Immortal):
    callee = peer(Callee, "callee")
    loops_left: int

    def __init__(self) -> None:
        self.loops_left = 0

    @impulse(id=1)
    def start(self, outstanding: int, calls_per_loop: int, size_bytes: int) -> None:
        self.loops_left = outstanding
        for index in range(outstanding):
            self.loop.fork(index * calls_per_loop, (index + 1) * calls_per_loop, size_bytes)

    @rpc(id=2)
    async def loop(self, first: int, end: int, size_bytes: int) -> None:
        clock_ns, note = _stopwatch.clock_ns, _stopwatch.latencies_ns.append
        pause = min(first + CALLS_PER_JOURNAL, end)
        for number in range(first, pause):
            data = argument(number, size_bytes)
            begun_ns = clock_ns()
            answer = await self.callee.echo(data)
            note(clock_ns() - begun_ns)
            if answer != data:
                raise ValueError(f"call {number} got the answer {answer[:16]!r}")
        if pause < end:
            self.continue_as(pause, end, size_bytes)
        await self.loop_done()

    @rpc(id=3)
    def loop_done(self) -> None:
        self.loops_left -= 1
        if not self.loops_left:
            _stopwatch.done.set()

    @on_primary
    def drive(self, impulses: Impulses) -> None:
        for run in read_runs(sys.stdin):
            _stopwatch.latencies_ns.clear()
            _stopwatch.done.clear()
            begun = time.perf_counter()
            impulses.start(run.outstanding, run.calls_per_loop, run.size_bytes)
            _stopwatch.done.wait()
            seconds = time.perf_counter() - begun
            print(encode_measured(measured(_stopwatch.latencies_ns, seconds)), flush=True)
