"""The durable handler of three steps in DBOS. ``python -m scripts.benchmarks.rivals.dbos_steps URL``; runs on stdin.

Workflows are begun in the process that runs them, which spares DBOS a call between processes.
"""

from __future__ import annotations

import logging
import sys
import threading
import time

from dbos import DBOS, DBOSConfig

from immortal.bench.workload import Run, argument, encode_measured, measured, read_runs
from scripts.benchmarks.rivals.steps import STEPS, step

POOL_SIZE_MAX = 64


@DBOS.step()
def durable_step(data: bytes, number: int) -> bytes:
    return step(data, number)


@DBOS.workflow()
def echo(data: bytes) -> bytes:
    for number in STEPS:
        data = durable_step(data, number)
    return data


def main(url: str) -> None:
    config: DBOSConfig = {
        "name": "bench",
        "system_database_url": url,
        "log_level": "ERROR",
        "sys_db_pool_size": POOL_SIZE_MAX,
    }
    logging.disable(logging.WARNING)
    DBOS(config=config)
    DBOS.launch()
    print("ready", flush=True)
    for run in read_runs(sys.stdin):
        latencies_ns: list[int] = []
        wrong: list[int] = []
        loops = [
            threading.Thread(target=_loop, args=(run, index, latencies_ns, wrong)) for index in range(run.outstanding)
        ]
        begun = time.perf_counter()
        for loop in loops:
            loop.start()
        for loop in loops:
            loop.join()
        seconds = time.perf_counter() - begun
        if wrong or len(latencies_ns) != run.calls:
            sys.exit(f"{len(latencies_ns)} of {run.calls} workflows answered, {len(wrong)} of them wrongly")
        print(encode_measured(measured(latencies_ns, seconds)), flush=True)


def _loop(run: Run, index: int, latencies_ns: list[int], wrong: list[int]) -> None:
    first = index * run.calls_per_loop
    for number in range(first, first + run.calls_per_loop):
        data = argument(number, run.size_bytes)
        begun_ns = time.perf_counter_ns()
        answer = echo(data)
        latencies_ns.append(time.perf_counter_ns() - begun_ns)
        if answer != data:
            wrong.append(number)


if __name__ == "__main__":
    main(sys.argv[1])
