"""Tasks of a batch: from the first that is sent until all results are with the collector."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

from immortal.bench.processes import BenchError
from immortal.coordinator.service.process import die_with_parent
from immortal.patterns.harmony import Ventilator, connect
from scripts.benchmarks.context import Context, start_service
from scripts.benchmarks.figures import IMMORTAL, Figure

WORKERS = 2
_TASKS_A_SECOND = 40_000  # about what two processors do: so many for each second that a turn is to take
_CLASSES = {"cluster": "immortal.patterns.harmony:Cluster", "results": "immortal.patterns.harmony:Collector"}
_WAIT_S = 120.0


@contextlib.contextmanager
def _cluster(home: Path) -> Iterator[None]:
    """A cluster, its collector and its workers."""
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", "immortal.patterns.harmony", "work", "cluster", "operator:neg"]
    environment = {**os.environ, "IMMORTAL_HOME": str(home)}
    with contextlib.ExitStack() as stack:
        for name, app in _CLASSES.items():
            start_service(stack, home, name, app)
        for _ in range(WORKERS):
            process = subprocess.Popen(
                command, stdout=quiet, stderr=quiet, env=environment, preexec_fn=die_with_parent(os.getpid())
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def _rate(cluster: Ventilator, names: Iterator[int], tasks: int) -> float:
    """Tasks in a second."""
    batch = cluster.batch(f"batch {next(names)}", "neg", collector="results")
    began_s = time.perf_counter()
    batch.send(range(tasks))
    progress = batch.wait(timeout=_WAIT_S)
    results = sum(1 for result in batch.results(timeout=_WAIT_S) if result.value == -result.number)
    took_s = time.perf_counter() - began_s
    if results != tasks or progress.failed:
        raise BenchError(f"{results} right results of {tasks}, {progress.failed} failed")
    return tasks / took_s


def run(context: Context) -> list[Figure]:
    tasks = int(_TASKS_A_SECOND * context.amounts.seconds)
    names = count()
    with context.home() as home, _cluster(home), connect("cluster", home=home) as cluster:
        _rate(cluster, names, tasks // 10)
        what = f"tasks of a batch, {WORKERS} workers"
        turn = partial(_rate, cluster, names, tasks)
        return [Figure(what, "tasks/s", "higher", context.interleave({IMMORTAL: turn}, what))]
