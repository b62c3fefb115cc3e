"""Run of calls that all sides of a comparison make alike: the same calls, the same clock, the same checks.

A caller reads runs from standard input, a line of JSON each, and answers each with a line on standard output.
"""

from __future__ import annotations

import asyncio
import enum
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TextIO

NUMBER_SIZE_BYTES = 8  # at the start of each argument: the answer must be that of this call
BATCH_CALLS = 1_000  # of one round of Case.ONE_WAY


class Case(enum.StrEnum):
    """Caller and callee of a run. Tables show the values."""

    CLIENT = "an outside client's awaited call"
    SERVICES = "an awaited call between two services"
    STEP = "a handler's step, its result in the log"
    ONE_WAY = "one-way calls between two services, 1,000 a batch"


@dataclass(frozen=True, slots=True)
class Run:
    """Run of ``outstanding`` parallel loops, each of which waits for its call's answer before the next call."""

    outstanding: int
    calls_per_loop: int
    size_bytes: int
    case: str = Case.SERVICES

    @classmethod
    def about(cls, calls: int, outstanding: int, size_bytes: int, case: str = Case.SERVICES) -> Run:
        """Return a run of about ``calls`` calls."""
        return cls(outstanding, max(1, round(calls / outstanding)), size_bytes, case)

    @property
    def calls(self) -> int:
        return self.outstanding * self.calls_per_loop


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of a run. One-way calls have no latencies. ``cpu_s``: CPU seconds by process."""

    calls: int
    seconds: float
    p50_us: float = 0.0
    p99_us: float = 0.0
    p999_us: float = 0.0
    max_us: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)

    @property
    def calls_per_s(self) -> float:
        return self.calls / self.seconds

    @property
    def cpu_us(self) -> float:
        """Return the CPU time of a call, of all processes together, in µs."""
        return 1e6 * sum(self.cpu_s.values()) / self.calls


def measured(latencies_ns: Sequence[int], seconds: float) -> Measured:
    ordered = sorted(latencies_ns)
    p50_us, p99_us, p999_us = (percentile(ordered, percent) / 1e3 for percent in (50, 99, 99.9))
    return Measured(len(ordered), seconds, p50_us, p99_us, p999_us, ordered[-1] / 1e3)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of one or more values in ascending order."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent // 100))]


def print_result(result: Measured) -> None:
    """Answer a run."""
    print(json.dumps(asdict(result)), flush=True)


def read_runs(source: TextIO) -> Iterator[Run]:
    for line in source:
        yield Run(**json.loads(line))


def argument(number: int, size_bytes: int) -> bytes:
    """Return the argument of call ``number``: different for each, so that a misdirected answer is found."""
    return number.to_bytes(NUMBER_SIZE_BYTES, "little").ljust(size_bytes, b"\0")


def check(number: int, answer: bytes, data: bytes) -> None:
    """Check the answer of call ``number``. Raises ValueError."""
    if answer != data:
        raise ValueError(f"call {number} got the answer {answer[:200]!r}")


def measure_in_threads(run: Run, call: Callable[[bytes], bytes]) -> Measured:
    """Make the calls of ``run`` with a thread for each loop. Raises ValueError for a wrong answer."""
    latencies_ns: list[int] = []

    def loop(index: int) -> None:
        for number in range(index * run.calls_per_loop, (index + 1) * run.calls_per_loop):
            data = argument(number, run.size_bytes)
            begun_ns = time.perf_counter_ns()
            answer = call(data)
            latencies_ns.append(time.perf_counter_ns() - begun_ns)
            check(number, answer, data)

    with ThreadPoolExecutor(run.outstanding) as threads:
        begun = time.perf_counter()
        list(threads.map(loop, range(run.outstanding)))
        return measured(latencies_ns, time.perf_counter() - begun)


async def measure_in_tasks(run: Run, calls: Sequence[Callable[[bytes], Awaitable[bytes]]]) -> Measured:
    """Make the calls of ``run`` with a task for each loop, and one of ``calls`` for each."""
    latencies_ns: list[int] = []

    async def loop(index: int, call: Callable[[bytes], Awaitable[bytes]]) -> None:
        for number in range(index * run.calls_per_loop, (index + 1) * run.calls_per_loop):
            data = argument(number, run.size_bytes)
            begun_ns = time.perf_counter_ns()
            answer = await call(data)
            latencies_ns.append(time.perf_counter_ns() - begun_ns)
            check(number, answer, data)

    begun = time.perf_counter()
    await asyncio.gather(*(loop(index, call) for index, call in enumerate(calls)))
    return measured(latencies_ns, time.perf_counter() - begun)
