"""Apps and client of `immortal bench --embedded`. Each process reads its runs from stdin, one JSON line a run.

`python -m immortal.bench.embedded_apps`: both services in one process. `... client`: an outside client of the callee.
"""

from __future__ import annotations

import sys
import threading
import time

import immortal
from immortal import Immortal, Impulses, impulse, on_primary, peer, rpc
from immortal.bench.apps import CALLS_PER_JOURNAL, say_measured, stopwatch
from immortal.bench.workload import BATCH_CALLS, Case, Run, argument, make_calls, read_tasks
from immortal.client import connect


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

    @rpc(id=2)
    async def calls(self, case: str, first: int, end: int, size_bytes: int) -> None:
        """Make the calls from number ``first`` up to ``end``, and await each before the next."""
        clock_ns, note = stopwatch.clock_ns, stopwatch.latencies_ns.append
        is_step, echo, effect = case == Case.STEP, self.callee.echo, immortal.effect
        pause = min(first + CALLS_PER_JOURNAL, end)
        for number in range(first, pause):
            data = argument(number, size_bytes)
            begun_ns = clock_ns()
            answer = await effect(_same, data) if is_step else await echo(data)
            note(clock_ns() - begun_ns)
            if answer != data:
                raise ValueError(f"call {number} got the answer {answer[:16]!r}")
        if pause < end:
            immortal.continue_as(case, pause, end, size_bytes)
        await immortal.step(self.done)

    @rpc(id=3)
    async def batches(self, first: int, end: int, size_bytes: int) -> None:
        """Fork the batches from number ``first`` up to ``end``, each after the callee has taken the one before."""
        clock_ns, note = stopwatch.clock_ns, stopwatch.latencies_ns.append
        pause = min(first + CALLS_PER_JOURNAL, end)
        data = bytes(size_bytes)
        fork = self.callee.take.fork
        for _ in range(first, pause):
            begun_ns = clock_ns()
            for _ in range(BATCH_CALLS):
                fork(data)
            taken = await self.callee.count()
            note(clock_ns() - begun_ns)
            if taken != BATCH_CALLS:
                raise ValueError(f"{taken} calls were taken, {BATCH_CALLS} were made")
        if pause < end:
            immortal.continue_as(pause, end, size_bytes)
        await immortal.step(self.done)

    @rpc(id=4)
    def done(self) -> None:
        stopwatch.done.set()

    @impulse(id=5)
    def start(self, case: str, rounds: int, size_bytes: int) -> None:
        if case == Case.ONE_WAY:
            self.batches.fork(0, rounds, size_bytes)
        else:
            self.calls.fork(case, 0, rounds, size_bytes)

    @on_primary
    def drive(self, impulses: Impulses) -> None:
        for task in read_tasks(sys.stdin):
            stopwatch.latencies_ns.clear()
            stopwatch.done.clear()
            begun = time.perf_counter()
            impulses.start(task.case.value, task.rounds, task.size_bytes)
            stopwatch.done.wait()
            say_measured(begun)


def _same(data: bytes) -> bytes:
    return data


def serve() -> None:
    """Run both services in this process, until it is killed."""
    from immortal.embedded import start  # late: a service with a sidecar does not load it

    with start(Callee, "callee"), start(Caller, "caller"):
        threading.Event().wait()


def call() -> None:
    """Call the callee as an outside client."""
    with connect(Callee, "callee") as callee:
        for task in read_tasks(sys.stdin):
            stopwatch.latencies_ns.clear()
            begun = time.perf_counter()
            make_calls(callee.echo, Run(1, task.rounds, task.size_bytes), 0, stopwatch.latencies_ns)
            say_measured(begun)


if __name__ == "__main__":
    call() if sys.argv[1:] == ["client"] else serve()
