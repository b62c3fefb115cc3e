"""Run of calls that both sides of a comparison make alike: the same calls, the same clock, the same checks.

A caller reads runs from standard input, a line of JSON each, and answers each with a line on standard output.
"""

from __future__ import annotations

import asyncio
import enum
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TextIO

NUMBER_SIZE_BYTES = 8  # at the start of each argument: the answer must be that of this call


@dataclass(frozen=True, slots=True)
class Run:
    """Run of ``outstanding`` parallel loops, each of which waits for its call's answer before the next call."""

    outstanding: int
    calls_per_loop: int
    size_bytes: int

    @property
    def calls(self) -> int:
        return self.outstanding * self.calls_per_loop


@dataclass(frozen=True, slots=True)
class Measured:
    calls: int
    seconds: float
    p50_us: float
    p99_us: float
    p999_us: float
    max_us: float

    @property
    def calls_per_s(self) -> float:
        return self.calls / self.seconds


def measured(latencies_ns: list[int], seconds: float) -> Measured:
    ordered = sorted(latencies_ns)
    p50_us, p99_us, p999_us = (percentile(ordered, percent) / 1e3 for percent in (50, 99, 99.9))
    return Measured(len(ordered), seconds, p50_us, p99_us, p999_us, ordered[-1] / 1e3)


def argument(number: int, size_bytes: int) -> bytes:
    """Return the argument of call ``number``: different for each, so that a misdirected answer is found."""
    return number.to_bytes(NUMBER_SIZE_BYTES, "little").ljust(size_bytes, b"\0")


def encode_run(run: Run | Task) -> str:
    return json.dumps(asdict(run))


def read_runs(source: TextIO) -> Iterator[Run]:
    for line in source:
        yield Run(**json.loads(line))


def make_calls(call: Callable[[bytes], bytes], run: Run, index: int, latencies_ns: list[int]) -> None:
    """Make the calls of loop ``index``, one after the other. Raises ValueError for a wrong answer."""
    for number in range(index * run.calls_per_loop, (index + 1) * run.calls_per_loop):
        data = argument(number, run.size_bytes)
        begun_ns = time.perf_counter_ns()
        answer = call(data)
        latencies_ns.append(time.perf_counter_ns() - begun_ns)
        _check(number, answer, data)


async def make_async_calls(
    call: Callable[[bytes], Awaitable[bytes]], run: Run, index: int, latencies_ns: list[int]
) -> None:
    """Make the calls of loop ``index`` as :func:`make_calls` does, with asyncio."""
    for number in range(index * run.calls_per_loop, (index + 1) * run.calls_per_loop):
        data = argument(number, run.size_bytes)
        begun_ns = time.perf_counter_ns()
        answer = await call(data)
        latencies_ns.append(time.perf_counter_ns() - begun_ns)
        _check(number, answer, data)


def _check(number: int, answer: bytes, data: bytes) -> None:
    if answer != data:
        raise ValueError(f"call {number} got the answer {answer[:200]!r}")


def measure_in_threads(run: Run, call: Callable[[bytes], bytes]) -> Measured:
    """Make the calls of ``run`` with a thread for each loop. Raises ValueError for a wrong answer."""
    latencies_ns: list[int] = []
    with ThreadPoolExecutor(run.outstanding) as threads:
        begun = time.perf_counter()
        loops = [threads.submit(make_calls, call, run, index, latencies_ns) for index in range(run.outstanding)]
        for loop in loops:
            loop.result()
        return measured(latencies_ns, time.perf_counter() - begun)


async def measure_in_tasks(run: Run, calls: Sequence[Callable[[bytes], Awaitable[bytes]]]) -> Measured:
    """Make the calls of ``run`` with a task for each loop, and one of ``calls`` for each."""
    latencies_ns: list[int] = []
    begun = time.perf_counter()
    await asyncio.gather(*(make_async_calls(call, run, index, latencies_ns) for index, call in enumerate(calls)))
    return measured(latencies_ns, time.perf_counter() - begun)


def encode_measured(result: Measured) -> str:
    return json.dumps(asdict(result))


def decode_measured(line: str) -> Measured:
    return Measured(**json.loads(line))


# Tasks for both ways of running services: a line of JSON on standard input for each run.


BATCH_CALLS = 1_000  # of one round of Case.ONE_WAY


class Case(enum.StrEnum):
    """Caller and callee of a measurement. Tables show the values."""

    CLIENT = "an outside client's awaited call"
    SERVICES = "an awaited call between two services"
    STEP = "a handler's step, its result in the log"
    ONE_WAY = "one-way calls between two services, 1,000 a batch"

    @property
    def calls_per_round(self) -> int:
        return BATCH_CALLS if self is Case.ONE_WAY else 1


@dataclass(frozen=True, slots=True)
class Task:
    """Run of ``rounds``, one after the other: each is an awaited call, or a batch and its acknowledgement."""

    case: Case
    rounds: int
    size_bytes: int


def read_tasks(source: TextIO) -> Iterator[Task]:
    for line in source:
        values = json.loads(line)
        yield Task(Case(values["case"]), values["rounds"], values["size_bytes"])


# Latencies as numbers that people compare.


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of one or more values in ascending order."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent // 100))]
