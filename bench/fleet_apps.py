"""Services of `immortal bench --fleet`, `--isolation` and `--failing`."""

from __future__ import annotations

import os
import sys
import time
from datetime import UTC, datetime, timedelta

import immortal
from immortal import Immortal, Impulses, impulse, on_primary, peer, rpc

# A fleet: each member calls its neighbours, and checks that each neighbour's calls arrive in order.


NAME_VARIABLE = "IMMORTAL_BENCH_NAME"
NEIGHBOURS_VARIABLE = "IMMORTAL_BENCH_NEIGHBOURS"  # names, with commas between them
CALLS_VARIABLE = "IMMORTAL_BENCH_CALLS"  # to each neighbour
NEIGHBOURS = [name for name in os.environ.get(NEIGHBOURS_VARIABLE, "").split(",") if name]


class Member(Immortal):
    locals().update({f"neighbour{index}": peer(lambda: Member, name) for index, name in enumerate(NEIGHBOURS)})
    begun: bool
    taken: dict[str, int]

    def __init__(self) -> None:
        self.begun = False
        self.taken = {}

    @impulse(id=1)
    def begin(self, name: str, calls: int) -> None:
        if self.begun:
            return  # the hook runs at each start
        self.begun = True
        for number in range(1, calls + 1):
            for index in range(len(NEIGHBOURS)):
                getattr(self, f"neighbour{index}").take.fork(name, number)

    @rpc(id=2)
    def take(self, sender: str, number: int) -> None:
        before = self.taken.get(sender, 0)
        if number != before + 1:
            raise ValueError(f"call {number} of {sender} came behind its call {before}")
        self.taken[sender] = number

    @on_primary
    def drive(self, impulses: Impulses) -> None:
        impulses.begin(os.environ[NAME_VARIABLE], int(os.environ[CALLS_VARIABLE]))


# For --isolation: a hub, and receivers that all run the same code.


RECEIVERS = [f"receiver{number}" for number in range(10)]
FILL_SIZE_BYTES = 1024
CALLS_PER_BURST = 64  # to each receiver
CHAINS = 4
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Receiver(Immortal):
    latencies_us: dict[int, list[int]]  # by window: times from when each call was due until it was logged here

    def __init__(self) -> None:
        self.latencies_us = {}

    @rpc(id=1)
    def fill(self, data: bytes) -> None:
        pass

    @rpc(id=2)
    def sample(self, window: int, due_us: int) -> None:
        now_us = (immortal.now() - _EPOCH) // timedelta(microseconds=1)
        self.latencies_us.setdefault(window, []).append(now_us - due_us)


class Hub(Immortal):
    locals().update({name: peer(Receiver, name) for name in RECEIVERS})
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
        """Run the command of each line of standard input, and report when it is done."""
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
    """Send ``count`` calls to each receiver, ``rate`` per second. A call that is late still has its planned time."""
    for number in range(count):
        due_us = begin_us + int(number * 1e6 / rate)
        time.sleep(max(0.0, due_us / 1e6 - time.time()))
        impulses.sample(window, due_us)
        impulses.flush()


# For --failing: a state of a given size, with calls that work and calls that fail.


STATE_SIZE_VARIABLE = "IMMORTAL_BENCH_STATE_SIZE"
ROW_SIZE_BYTES = 1000
ENCODED_ROW_SIZE_BYTES = 1024  # at most: so a state of 1 MiB, with its envelope, is within a small state's limit


class Ledger(Immortal):
    rows: list[bytes]
    count: int

    def __init__(self) -> None:
        self.rows = [
            bytes(ROW_SIZE_BYTES) for _ in range(int(os.environ[STATE_SIZE_VARIABLE]) // ENCODED_ROW_SIZE_BYTES)
        ]
        self.count = 0

    @rpc
    def book(self, works: bool) -> int:
        self.count += 1
        if not works:
            raise ValueError("as it was asked to")
        return self.count
