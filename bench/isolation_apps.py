"""The services of the isolation benchmark: a hub, and the receivers that it calls, all of them alike."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime, timedelta
from types import new_class
from typing import Any

import immortal
from immortal import Immortal, Impulses, impulse, on_primary, peer, rpc

RECEIVERS = [f"receiver{number}" for number in range(10)]
FILL_SIZE_BYTES = 1024
CALLS_PER_BURST = 64  # to each receiver
CHAINS = 4
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Receiver(Immortal):
    latencies_us: dict[int, list[int]]  # of each window: from when a call was due to when it was logged here

    def __init__(self) -> None:
        self.latencies_us = {}

    @rpc(id=1)
    def fill(self, data: bytes) -> None:
        pass

    @rpc(id=2)
    def sample(self, window: int, due_us: int) -> None:
        now_us = (immortal.now() - _EPOCH) // timedelta(microseconds=1)
        self.latencies_us.setdefault(window, []).append(now_us - due_us)


class _Hub(Immortal):
    filling: bool

    def __init__(self) -> None:
        self.filling = False

    @impulse(id=1)
    def fill(self) -> None:
        self.filling = True
        for _ in range(CHAINS):
            self.burst.fork()

    @impulse(id=2)
    def rest(self) -> None:
        self.filling = False

    @impulse(id=3)
    def sample(self, window: int, due_us: int) -> None:
        for name in RECEIVERS:
            getattr(self, name).sample.fork(window, due_us)

    @rpc(id=4)
    def burst(self) -> None:
        if not self.filling:
            return
        data = bytes(FILL_SIZE_BYTES)
        for name in RECEIVERS:
            fork = getattr(self, name).fill.fork
            for _ in range(CALLS_PER_BURST):
                fork(data)
        self.burst.fork()

    @on_primary
    def drive(self, impulses: Impulses) -> None:
        """Do what each line of standard input says, and report it when done."""
        for line in sys.stdin:
            match line.split():
                case ["fill"]:
                    impulses.fill()
                case ["rest"]:
                    impulses.rest()
                case ["sample", window, rate, count, begin_us]:
                    _sample(impulses, int(window), float(rate), int(count), int(begin_us))
            impulses.flush()
            print(line.strip(), flush=True)


def _sample(impulses: Impulses, window: int, rate: float, count: int, begin_us: int) -> None:
    """Send ``count`` calls to each receiver, ``rate`` a second. A delayed call keeps the time when it was due."""
    for number in range(count):
        due_us = begin_us + int(number * 1e6 / rate)
        time.sleep(max(0.0, due_us / 1e6 - time.time()))
        impulses.sample(window, due_us)
        impulses.flush()


def _with_receivers(namespace: dict[str, Any]) -> None:
    namespace["__module__"] = __name__
    for name in RECEIVERS:
        namespace[name] = peer(Receiver, name)


Hub: Any = new_class("Hub", (_Hub,), {}, _with_receivers)
