"""Services of the benchmarks of one-way and of awaited calls. Each reads its runs from stdin, one JSON line a run.

The sender forks calls in bursts. Each burst is a call to itself, and several chains of bursts run at once, so that only
back-pressure makes the sender wait.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time

import immortal
from immortal import Immortal, Impulses, impulse, on_primary, peer, rpc
from immortal.bench.workload import argument, encode_measured, measured, read_runs

CHAINS = 16
PEERS_MAX = 200


class Course:
    """Progress of the handlers, for the thread that drives them; not part of the state."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.done = threading.Event()
        self.ended_s = 0.0
        self.clock_s = time.perf_counter  # the same in all processes of a machine


course = Course()


def say(line: object) -> None:
    print(json.dumps(line), flush=True)


class Receiver(Immortal):
    calls: int
    received_bytes: int
    calls_expected: int

    def __init__(self) -> None:
        self.calls = self.received_bytes = self.calls_expected = 0

    @rpc(id=1)
    def take(self, data: bytes) -> None:
        self.calls += 1
        self.received_bytes += len(data)
        if self.calls == self.calls_expected:
            course.ended_s = course.clock_s()
            course.done.set()

    @impulse(id=2)
    def expect(self, calls: int) -> None:
        self.calls = self.received_bytes = 0
        self.calls_expected = calls
        course.done.clear()
        course.ready.set()

    @on_primary
    def drive(self, impulses: Impulses) -> None:
        for line in sys.stdin:
            course.ready.clear()
            impulses.expect(json.loads(line)["calls"])
            course.ready.wait()
            say("ready")
            course.done.wait()
            say({"calls": self.calls, "bytes": self.received_bytes, "ended_s": course.ended_s})


class Sender(Immortal):
    """Sender of calls in bursts, to several receivers in turns; each burst is a call to itself."""

    locals().update({f"receiver_{index}": peer(Receiver, f"receiver-{index}") for index in range(PEERS_MAX)})
    bursts: int

    def __init__(self) -> None:
        self.bursts = 0

    @impulse(id=1)
    def start(self, sizes: list[int], receivers: int, bursts: int, calls: int) -> None:
        for _ in range(CHAINS):
            self.burst.fork(sizes, receivers, bursts, calls)

    @rpc(id=2)
    def burst(self, sizes: list[int], receivers: int, bursts_left: int, calls: int) -> None:
        self.bursts += 1
        forks = [getattr(self, f"receiver_{index}").take.fork for index in range(receivers)]
        data = [bytes(size) for size in sizes]
        if len(forks) == len(data) == 1:
            fork, one = forks[0], data[0]
            for _ in range(calls):
                fork(one)
        else:
            pairs = [(fork, one) for one in data for fork in forks]
            for fork, one in itertools.islice(itertools.cycle(pairs), calls):
                fork(one)
        if bursts_left > 1:
            self.burst.fork(sizes, receivers, bursts_left - 1, calls)

    @on_primary
    def drive(self, impulses: Impulses) -> None:
        for line in sys.stdin:
            plan = json.loads(line)
            begun_s = time.perf_counter()
            impulses.start(plan["sizes"], plan["receivers"], plan["bursts"], plan["calls"])
            say({"begun_s": begun_s})


# The two services of the benchmark of awaited calls. As in any app, the loops are ``async def`` handlers.


CALLS_PER_JOURNAL = 1_000  # after these a loop continues with an empty journal


class Stopwatch:
    """Measurements of the handlers; no part of the state, since a replay measures nothing."""

    def __init__(self) -> None:
        self.latencies_ns: list[int] = []
        self.done = threading.Event()
        self.clock_ns = time.perf_counter_ns


stopwatch = Stopwatch()


def say_measured(begun_s: float) -> None:
    """Print the stopwatch's measurements since ``begun_s``."""
    seconds = time.perf_counter() - begun_s
    print(encode_measured(measured(stopwatch.latencies_ns, seconds)), flush=True)


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
        clock_ns, note = stopwatch.clock_ns, stopwatch.latencies_ns.append
        pause = min(first + CALLS_PER_JOURNAL, end)
        for number in range(first, pause):
            data = argument(number, size_bytes)
            begun_ns = clock_ns()
            answer = await self.callee.echo(data)
            note(clock_ns() - begun_ns)
            if answer != data:
                raise ValueError(f"call {number} got the answer {answer[:16]!r}")
        if pause < end:
            immortal.continue_as(pause, end, size_bytes)
        await immortal.step(self.loop_done)

    @rpc(id=3)
    def loop_done(self) -> None:
        self.loops_left -= 1
        if not self.loops_left:
            stopwatch.done.set()

    @on_primary
    def drive(self, impulses: Impulses) -> None:
        for run in read_runs(sys.stdin):
            stopwatch.latencies_ns.clear()
            stopwatch.done.clear()
            begun = time.perf_counter()
            impulses.start(run.outstanding, run.calls_per_loop, run.size_bytes)
            stopwatch.done.wait()
            say_measured(begun)
