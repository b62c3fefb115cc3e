"""Changes of a table: how many a second, and how long until the last of many copies has one."""

from __future__ import annotations

import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import zmq

from immortal.appsdk.patterns.clone import copies, publication
from immortal.appsdk.patterns.clone.subscriber import Access, Options, Places, Replica, Subscriber
from immortal.bench.harness import IMMORTAL, Context, Figure, rate
from immortal.bench.processes import BenchError, hear, register, running, start_module, tell
from immortal.bench.workload import Measured
from immortal.client import connect
from immortal.patterns.clone import Change, Table
from immortal.patterns.clone import connect as connect_clone

CLIENTS = 100
MANY_CLIENTS = 1000
_CHANGES = 100  # of one update
_KEYS = 1000
_PROCESSES = 2
_WAIT_S = 60.0


class _Copies:
    """Many clients, in a few processes, that follow the table or ``publishers``."""

    def __init__(self, stack: ExitStack, home: Path, clients: int, publishers: Sequence[str] = ()) -> None:
        swarm = partial(start_module, __name__, "prices", str(home), str(clients // _PROCESSES), *publishers)
        self._processes = [stack.enter_context(swarm()) for _ in range(_PROCESSES)]
        for process in self._processes:
            hear(process, "a process with copies of a table")

    def wait(self, number: int) -> list[dict[str, Any]]:
        """Wait until all copies have update ``number``."""
        for process in self._processes:
            tell(process, str(number))
        return [json.loads(hear(process, "a process with copies")) for process in self._processes]


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
            place = hear(stack.enter_context(forward), "a forwarder").split()[-1]
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
def _one_that_reads_nothing(home: Path) -> Iterator[None]:
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
        for clients, publishers, what, meanwhile in (
            (CLIENTS, (), f"{CLIENTS} copies", contextlib.nullcontext()),
            (CLIENTS, (leaf,), f"{CLIENTS} copies, three levels", contextlib.nullcontext()),
            (CLIENTS, (), f"{CLIENTS} copies, beside one that reads nothing", _one_that_reads_nothing(home)),
            (CLIENTS, (), f"{CLIENTS} copies, entitled to a subtree", _entitled(table)),
            (MANY_CLIENTS, (), f"{MANY_CLIENTS} copies", contextlib.nullcontext()),
        ):
            with ExitStack() as stack:
                stack.enter_context(meanwhile)
                copies = _Copies(stack, home, clients, publishers)
                name = f"changes of a table, {what}"
                results = context.compare(name, {IMMORTAL: partial(_update, table=table, copies=copies)})
                figures.append(rate(name, results, unit="changes/s"))
                name = f"one change until the last has it, {what}"
                waits = context.interleave({IMMORTAL: partial(_delay_ms, table, copies)}, name)
                figures.append(Figure(name, "ms", "lower", waits))
    return figures


# Many clients of a table in one process: each has its connection and its copy, and reports when it reaches a number.
#
#     python -m scripts.benchmarks.parts.clone TABLE HOME COUNT [PUBLISHER ...]
#
# On stdin: a number each line. On stdout: ``ready`` once all have a copy; for each number, once all copies have it, a
# line with JSON: changes taken, holes, changes dropped, and the times in seconds at which the copies had it: the
# median, and the last one.


class Swarm:
    def __init__(self, table: str, home: str, count: int, publishers: Sequence[str]) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, 4 * count + 100)
        self._connector = connect(Table, table, home=home)
        access = Access(table, {"home": home}, publishers)
        places = Places(access, self._connector.__enter__())
        now_s = time.monotonic()
        self._subscribers = [
            Subscriber(context, Replica(Options(label=f"{index}")), places.find, access.finder, now_s)
            for index in range(count)
        ]
        self._by_descriptor: dict[int, Subscriber] = {}
        self._poll = select.epoll()
        self.changes = 0
        self.reached_s: dict[Subscriber, float] = {}

    def watch(self, descriptor: int) -> None:
        self._poll.register(descriptor, select.EPOLLIN)

    def turn(self, target: int) -> list[int]:
        """Drive the swarm once; return the watched descriptors that are ready."""
        now_s = time.monotonic()
        ready = [descriptor for descriptor, _ in self._poll.poll(0.05)]
        due = {self._by_descriptor[one] for one in ready if one in self._by_descriptor}
        due.update(one for one in self._subscribers if one.next_deadline_s() <= now_s)
        for one in due:
            for news in one.process(time.monotonic()):
                self.changes += len(news.changes)
            if one.replica.number >= target > 0 and one not in self.reached_s:
                self.reached_s[one] = time.time()
            self._register(one)
        return [descriptor for descriptor in ready if descriptor not in self._by_descriptor]

    def _register(self, one: Subscriber) -> None:
        for socket in one.sockets():
            descriptor = int(socket.getsockopt(zmq.FD))
            if self._by_descriptor.get(descriptor) is not one:
                with suppress(FileExistsError):  # another subscriber had it, and closed it
                    self._poll.register(descriptor, select.EPOLLIN)
                self._by_descriptor[descriptor] = one

    @property
    def is_whole(self) -> bool:
        return all(one.replica.is_whole for one in self._subscribers)

    def reached(self, target: int) -> bool:
        for one in self._subscribers:
            if one.replica.number >= target and one not in self.reached_s:
                self.reached_s[one] = time.time()
        return len(self.reached_s) == len(self._subscribers)

    def counts(self) -> tuple[int, int]:
        return (
            sum(one.replica.counts.holes for one in self._subscribers),
            sum(one.replica.counts.dropped for one in self._subscribers),
        )


def main(table: str, home: str, count: str, *publishers: str) -> None:
    swarm = Swarm(table, home, int(count), publishers)
    while not swarm.is_whole:
        swarm.turn(0)
    print("ready", flush=True)
    swarm.watch(sys.stdin.fileno())
    target, text = 0, b""
    while True:
        if swarm.turn(target):
            data = os.read(sys.stdin.fileno(), 4096)
            if not data:
                return
            text += data
            *lines, text = text.split(b"\n")
            if lines:
                target = int(lines[-1])
        if target and swarm.reached(target):
            holes, dropped = swarm.counts()
            times = sorted(swarm.reached_s.values())
            found = {"changes": swarm.changes, "holes": holes, "dropped": dropped}
            print(json.dumps({**found, "median_s": statistics.median(times), "last_s": times[-1]}), flush=True)
            target, swarm.changes, swarm.reached_s = 0, 0, {}


if __name__ == "__main__":
    main(*sys.argv[1:])
