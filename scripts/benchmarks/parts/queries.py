"""Measures what an outside caller waits for: a call, which is logged, and a query, which is not."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any

from immortal.bench.calls import running
from immortal.bench.processes import BenchError, register
from immortal.bench.workload import Measured, argument, measured
from immortal.client import connect
from scripts.benchmarks.comparisons import SIZE_BYTES, latency_figure, rate_figure
from scripts.benchmarks.context import Context
from scripts.benchmarks.figures import IMMORTAL, Figure

LOGGED, QUERY = f"{IMMORTAL}, a logged call", f"{IMMORTAL}, a query"
NAME = "asked"
APP = "scripts.benchmarks.apps:Asked"
_WARM_UP_S = 0.2


async def _loop(client: Any, first: int, until_s: float, latencies_ns: list[int], *, is_query: bool) -> None:
    ask = client.query.same if is_query else client.echo
    number = first
    while time.perf_counter() < until_s:
        data = argument(number, SIZE_BYTES)
        begun_ns = time.perf_counter_ns()
        answer = await ask(data)
        latencies_ns.append(time.perf_counter_ns() - begun_ns)
        if answer != data:
            raise BenchError(f"call {number} got the answer {answer!r}")
        number += 1


def _turn(home: Path, outstanding: int, seconds: float, *, is_query: bool) -> Measured:
    return asyncio.run(_asked(home, outstanding, seconds, is_query=is_query))


async def _asked(home: Path, outstanding: int, seconds: float, *, is_query: bool) -> Measured:
    async with connect(NAME, home=home) as client:
        for duration_s in (_WARM_UP_S, seconds):
            latencies_ns: list[int] = []
            begun_s = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for index in range(outstanding):
                    loop = _loop(client, index << 32, begun_s + duration_s, latencies_ns, is_query=is_query)
                    group.create_task(loop)
            took_s = time.perf_counter() - begun_s
    return measured(latencies_ns, took_s)


def run(context: Context) -> list[Figure]:
    figures: list[Figure] = []
    with context.home() as home, running(register(home, {NAME: APP}, {})):
        for outstanding, what in ((1, "one call from outside at a time"), (64, "64 calls from outside outstanding")):
            turns = {
                name: partial(_turn, home, outstanding, context.amounts.seconds, is_query=is_query)
                for name, is_query in ((LOGGED, False), (QUERY, True))
            }
            results = context.interleave(turns, what)
            figures += [latency_figure(what, percentile, results, []) for percentile in ("p50", "p99")]
            figures.append(rate_figure(what, results, []))
    return figures
