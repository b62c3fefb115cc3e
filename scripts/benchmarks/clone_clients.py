"""Many clients of a table in one process: each has its connection and its copy, and says when it has come to a number.

    python -m scripts.benchmarks.clone_clients TABLE HOME COUNT [PUBLISHER ...]

On stdin: a number each line. On stdout: ``ready`` once all have a copy; for each number, once all copies have it, a
line with JSON: the changes that were taken, holes, changes that were dropped, and by which time in seconds the copies
had it: the median, and the last one.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import zmq

from immortal.appsdk.patterns.clone.places import Access, Places
from immortal.appsdk.patterns.clone.replica import Options, Replica
from immortal.appsdk.patterns.clone.subscriber import Subscriber
from immortal.client import connect
from immortal.patterns.clone import Table


class Swarm:
    def __init__(self, table: str, home: str, count: int, publishers: Sequence[str]) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, 4 * count + 100)
        self._connector = connect(Table, table, home=home)
        access = Access(table, home, publishers=publishers)
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
        """What is ready of the descriptors that are watched besides."""
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
        for descriptor in one.filenos():
            if self._by_descriptor.get(descriptor) is not one:
                with suppress(FileExistsError):  # another one had it, and closed it
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
