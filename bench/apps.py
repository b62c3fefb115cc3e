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
from collections.abc import Awaitable, Callable
from functools import partial

import immortal
from immortal import Immortal, Impulses, impulse, on_primary, peer, rpc
from immortal.bench.workload import (
    BATCH_CALLS,
    Case,
    Measured,
    argument,
    check,
    measure_in_threads,
    measured,
    print_result,
    read_runs,
)
from immortal.client import connect

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


def print_json(line: object) -> None:
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
            print_json("ready")
            course.done.wait()
            print_json({"calls": self.calls, "bytes": self.received_bytes, "ended_s": course.ended_s})


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
            print_json({"begun_s": begun_s})


# The two services of awaited calls. As in any app, the loops are ``async def`` handlers.


CALLS_PER_JOURNAL = 1_000  # after these a loop continues with an empty journal


class Stopwatch:
    """Measurements of the handlers; no part of the state, since a replay measures nothing."""

    def __init__(self) -> None:
        self.latencies_ns: list[int] = []
        self.done = threading.Event()
        self.clock_ns = time.perf_counter_ns


stopwatch = Stopwatch()


class Callee(Immortal):
    taken: int

    def __init__(self) -> None:
        self.taken = 0

    @rpc(id=1)
    def echo(self, data: bytes) -> bytes:
        return data

    @rpc(id=2)
    def take(self, data: bytes) -> None:
        self.taken += 1

    @rpc(id=3)
    def count(self) -> int:
        taken, self.taken = self.taken, 0
        return taken


class Caller(Immortal):
    callee = peer(Callee, "callee")
    loops_left: int

    def __init__(self) -> None:
        self.loops_left = 0

    @impulse(id=1)
    def start(self, case: str, outstanding: int, calls_per_loop: int, size_bytes: int) -> None:
        self.loops_left = outstanding
        for index in range(outstanding):
            self.loop.fork(case, index * calls_per_loop, (index + 1) * calls_per_loop, size_bytes)

    @rpc(id=2)
    async def loop(self, case: str, first: int, end: int, size_bytes: int) -> None:
        """Make the calls from number ``first`` up to ``end``, and await each before the next."""
        clock_ns, note = stopwatch.clock_ns, stopwatch.latencies_ns.append
        ask: Callable[[bytes], Awaitable[bytes]] = self.callee.echo
        if case == Case.STEP:
            ask = partial(immortal.effect, _same)
        elif case == Case.ONE_WAY:
            ask = self._batch
        pause = min(first + CALLS_PER_JOURNAL, end)
        for number in range(first, pause):
            data = argument(number, size_bytes)
            begun_ns = clock_ns()
            answer = await ask(data)
            note(clock_ns() - begun_ns)
            check(number, answer, data)
        if pause < end:
            immortal.continue_as(case, pause, end, size_bytes)
        await immortal.step(self.loop_done)

    async def _batch(self, data: bytes) -> bytes:
        """Fork a batch, and wait until the callee has taken it."""
        fork = self.callee.take.fork
        for _ in range(BATCH_CALLS):
            fork(data)
        if (taken := await self.callee.count()) != BATCH_CALLS:
            raise ValueError(f"{taken} calls were taken, {BATCH_CALLS} were made")
        return data

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
            impulses.start(run.case, run.outstanding, run.calls_per_loop, run.size_bytes)
            stopwatch.done.wait()
            print_result(measured(stopwatch.latencies_ns, time.perf_counter() - begun))


def _same(data: bytes) -> bytes:
    return data


# Processes beside those of services: ``python -m immortal.bench.apps services | client | turns``.


def serve_in_one_process() -> None:
    """Run the caller and the callee in this process, until it is killed."""
    from immortal.embedded import start  # late: a service with a sidecar does not load it

    with start(Callee, "callee"), start(Caller, "caller"):
        threading.Event().wait()


def call_from_outside() -> None:
    """Call the callee as an outside client."""
    with connect(Callee, "callee") as callee:
        for run in read_runs(sys.stdin):
            print_result(measure_in_threads(run, callee.echo))


def measure_turns(calls: int = 400) -> None:
    """Measure CPU time of awaited calls between two instances in this process, logs in memory, apps included."""
    from immortal.testing import Environment

    with Environment() as environment:
        environment.start(Callee, "callee")
        caller = environment.start(TurnCaller, "caller")
        caller.call(TurnCaller.call_all, 20)
        begun_s = time.process_time()
        caller.call(TurnCaller.call_all, calls)
        print_result(Measured(calls, time.process_time() - begun_s))


class TurnCaller(Immortal):
    callee = peer(Callee, "callee")

    @rpc
    async def call_all(self, count: int) -> None:
        for _ in range(count):
            await self.callee.count()


if __name__ == "__main__":
    {"services": serve_in_one_process, "client": call_from_outside, "turns": measure_turns}[sys.argv[1]]()
