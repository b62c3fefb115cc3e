"""Changes of a table: how many a second, and how long until the last of many copies has one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from immortal.appsdk.patterns.clone import copies, publication
from immortal.bench.harness import IMMORTAL, Context, Figure, rate
from immortal.bench.processes import BenchError, read_line, register, running, start_module, write_line
from immortal.bench.workload import Measured
from immortal.client import connect
from immortal.patterns.clone import Change, Table
from immortal.patterns.clone import connect as connect_clone

CLIENTS = 100
_CHANGES = 100  # of one update
_KEYS = 1000
_PROCESSES = 2
_WAIT_S = 60.0


class _Copies:
    """Many clients, in a few processes, that follow the table or ``publishers``."""

    def __init__(self, stack: ExitStack, home: Path, publishers: Sequence[str] = ()) -> None:
        swarm = partial(start_module, __name__, "prices", str(home), str(CLIENTS // _PROCESSES), *publishers)
        self._processes = [stack.enter_context(swarm()) for _ in range(_PROCESSES)]
        for process in self._processes:
            read_line(process, "a process with copies of a table")

    def wait(self, number: int) -> list[dict[str, Any]]:
        """Wait until all copies have update ``number``."""
        for process in self._processes:
            write_line(process, str(number))
        return [json.loads(read_line(process, "a process with copies")) for process in self._processes]


@contextlib.contextmanager
def _processes(home: Path) -> Iterator[str]:
    """Run a table, a forwarder of it, and a second forwarder after the first; yield the second one's endpoint."""
    environment = {**os.environ, "IMMORTAL_HOME": str(home)}
    with ExitStack() as stack:
        stack.enter_context(running(register(home, {"prices": "immortal.patterns.clone:Table"}, {})))
        place = ""
        for _ in range(2):
            upstream = ["--upstream", place] if place else []
            forward = start_module(
                "immortal.patterns.clone", "forward", "prices", *upstream, env=environment, stderr=subprocess.DEVNULL
            )
            place = read_line(stack.enter_context(forward), "a forwarder").split()[-1]
        yield place


def _update(changes: int, table: Table, copies: _Copies) -> Measured:
    """Measure changes until all copies have the last one."""
    began_s = time.perf_counter()
    count = number = 0
    while count < changes:
        number = table.update([_change(count + index) for index in range(_CHANGES)]).number
        count += _CHANGES
    found = copies.wait(number)
    took_s = time.perf_counter() - began_s
    if any(one["holes"] or one["dropped"] for one in found):
        raise BenchError(f"changes were lost: {found}")
    return Measured(count, took_s)


def _change(index: int) -> Change:
    return Change(f"key/{index % _KEYS}", msgspec.msgpack.encode(index))


def _delay_ms(table: Table, copies: _Copies) -> float:
    """Measure the time in ms from the call until the last copy has the change."""
    began_s = time.time()
    number = table.update([_change(0)]).number
    last_s: float = max(one["last_s"] for one in copies.wait(number))
    return 1e3 * (last_s - began_s)


@contextlib.contextmanager
def _slow_client(home: Path) -> Iterator[None]:
    """Run a client that reads no change: above its high-water mark changes are dropped, for it alone."""
    with (
        mock.patch.object(copies, "CHANGES_WAITING_MAX", 10),
        connect_clone(
            "prices", home=home, window_bytes=publication.WINDOW_BYTES_MIN, mark_bytes=publication.MARK_BYTES_MIN
        ) as slow,
    ):
        changes = slow.changes(timeout=_WAIT_S)
        yield
        for _ in changes:
            if slow.counts.dropped:
                return
        raise BenchError("nothing was dropped for the client that reads nothing")


@contextlib.contextmanager
def _entitled(table: Table) -> Iterator[None]:
    """Filter at the publisher: each client sees only the subtree that it is entitled to, which all changes are in."""
    table.entitle("*", ["key"])
    yield
    table.disentitle("*")


def clone(context: Context) -> list[Figure]:
    """Measure changes of a table: how many a second, and how long until the last of many copies has one."""
    figures = []
    with context.home() as home, _processes(home) as leaf, connect(Table, "prices", home=home) as table:
        for publishers, what, meanwhile in (
            ((), f"{CLIENTS} copies", contextlib.nullcontext()),
            ((leaf,), f"{CLIENTS} copies, three levels", contextlib.nullcontext()),
            ((), f"{CLIENTS} copies, beside one that reads nothing", _slow_client(home)),
            ((), f"{CLIENTS} copies, entitled to a subtree", _entitled(table)),
        ):
            with ExitStack() as stack:
                stack.enter_context(meanwhile)
                copies = _Copies(stack, home, publishers)
                name = f"changes of a table, {what}"
                results = context.compare(name, {IMMORTAL: partial(_update, table=table, copies=copies)})
                figures.append(rate(name, results, unit="changes/s"))
                name = f"one change until the last has it, {what}"
                waits = context.interleave({IMMORTAL: partial(_delay_ms, table, copies)}, name)
                figures.append(Figure(name, "ms", "lower", waits))
    return figures


# Many clients of a table in one process: ``python -m scripts.benchmarks.parts.clone TABLE HOME COUNT [PUBLISHER ...]``
#
# On stdin: a number each line. On stdout: ``ready`` once all have a copy; for each number, once all copies have it, a
# line with JSON: holes, changes dropped, and the time in seconds at which the last copy had it.


def main(table: str, home: str, count: str, *publishers: str) -> None:
    with ExitStack() as stack:
        copies = [
            stack.enter_context(connect_clone(table, int, home=home, publishers=publishers, timeout=_WAIT_S))
            for _ in range(int(count))
        ]
        print("ready", flush=True)
        for line in sys.stdin:
            for copy in copies:
                copy.wait(int(line))
            last_s, counts = time.time(), [copy.counts for copy in copies]
            holes, dropped = sum(one.holes for one in counts), sum(one.dropped for one in counts)
            print(json.dumps({"holes": holes, "dropped": dropped, "last_s": last_s}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
