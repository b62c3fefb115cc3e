"""Measures a start, and the memory of an idle service."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from immortal.bench.processes import MIB, memory_of, register
from scripts.benchmarks.context import Context
from scripts.benchmarks.figures import IMMORTAL, Figure

PYTHON = "python -c pass"
CALLEE = "immortal.bench.apps:Callee"


def run(context: Context) -> list[Figure]:
    memory: dict[str, list[float]] = {"coordinator": [], "app": []}
    names = iter(range(sys.maxsize))
    with context.home() as home:
        results = context.interleave(
            {
                "a new log": lambda: _start(home / str(next(names)), memory, again=False),
                "again, after a clean stop": lambda: _start(home / str(next(names)), memory, again=True),
                PYTHON: _python,
            },
            "start",
        )
    return [
        Figure("start of coordinator and app, until they take input", "ms", "lower", results),
        Figure(f"memory of an idle {IMMORTAL} service", "MiB", "lower", memory),
    ]


def _start(home: Path, memory: dict[str, list[float]], *, again: bool) -> float:
    """In ms."""
    service = register(home, {"callee": CALLEE}, {})["callee"]
    try:
        begun = time.perf_counter()
        service.start()
        service.wait_for_phase("normal")
        if again:
            service.ask_to_stop()
            service.wait_until_stopped(30.0)
            service.kill()  # its pipes
            begun = time.perf_counter()
            service.start()
            service.wait_for_phase("normal")
        spent_s = time.perf_counter() - begun
        for name, process in zip(memory, service.processes(), strict=True):
            memory[name].append(memory_of(process.pid).resident / MIB)
        return 1e3 * spent_s
    finally:
        service.kill()


def _python() -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return 1e3 * (time.perf_counter() - begun)
