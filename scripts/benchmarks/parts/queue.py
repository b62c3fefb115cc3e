"""Tasks of a queue, from their submission to their result: one at a time and several."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from immortal.bench.processes import BenchError
from immortal.coordinator.service.process import die_with_parent
from immortal.patterns.queue import AsyncJobs, connect, work
from scripts.benchmarks.context import Context, start_service
from scripts.benchmarks.figures import IMMORTAL, Figure

WORKERS = 2
_AT_A_TIME = 64
_READY_S = 60.0
BODY = b"sixteen bytes ..."


@contextlib.contextmanager
def _queue(home: Path) -> Iterator[None]:
    """A queue and its workers."""
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", "scripts.benchmarks.parts.queue", str(home)]
    with contextlib.ExitStack() as stack:
        start_service(stack, home, "jobs", "immortal.patterns.queue:Queue")
        for _ in range(WORKERS):
            process = subprocess.Popen(command, stdout=quiet, stderr=quiet, preexec_fn=die_with_parent(os.getpid()))
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


async def _tasks(jobs: AsyncJobs, at_a_time: int) -> None:
    async def one() -> None:
        job = await jobs.submit("echo", [BODY], returns=bytes)
        if await job.result(_READY_S) != BODY:
            raise BenchError("a wrong result")

    await asyncio.gather(*(one() for _ in range(at_a_time)))


def _rate(runner: asyncio.Runner, jobs: AsyncJobs, at_a_time: int, seconds: float) -> float:
    """Tasks in a second."""
    began_s = time.perf_counter()
    count = 0
    while (took_s := time.perf_counter() - began_s) < seconds:
        runner.run(_tasks(jobs, at_a_time))
        count += at_a_time
    return count / took_s


def run(context: Context) -> list[Figure]:
    figures = []
    with context.home() as home, _queue(home), asyncio.Runner() as runner:
        connector = connect("jobs", home=home, timeout=_READY_S)
        jobs = runner.run(connector.__aenter__())
        try:
            runner.run(_tasks(jobs, _AT_A_TIME))
            for at_a_time in (1, _AT_A_TIME):
                what = f"tasks of a queue, {at_a_time} at a time, {WORKERS} workers"
                turn = partial(_rate, runner, jobs, at_a_time, context.amounts.seconds)
                figures.append(Figure(what, "tasks/s", "higher", context.interleave({IMMORTAL: turn}, what)))
        finally:
            runner.run(connector.__aexit__(None, None, None))
    return figures


# A worker that the queue is measured with: ``python -m scripts.benchmarks.parts.queue HOME``.


def echo(body: bytes) -> bytes:
    return body


if __name__ == "__main__":
    work("jobs", {"echo": echo}, home=sys.argv[1])
