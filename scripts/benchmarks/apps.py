"""Services of the suite, beside those of `immortal bench`. Each reads its commands from standard input."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from statistics import median

import immortal
from immortal import Immortal, Impulses, impulse, on_primary, peer, query, rpc, upgrades
from immortal.bench.apps import Caller, course, print_json, stopwatch
from scripts.benchmarks.rivals import STEPS, step

HOLD_AT_ONCE = 500


class Relay(Immortal):
    """Service that passes a call on, and its answer back."""

    next = peer("immortal.bench.apps:Callee", "relay-1")

    @rpc(id=1)
    async def echo(self, data: bytes) -> bytes:
        answer: bytes = await self.next.echo(data)
        return answer


class Relay1(Relay):
    next = peer("scripts.benchmarks.apps:Relay2", "relay-2")


class Relay2(Relay):
    next = peer("immortal.bench.apps:Callee", "relay-3")


class EffectSteps(Immortal):
    """Service whose steps are work outside: each result is durable before the next step begins, as with the rivals."""

    @rpc(id=1)
    async def echo(self, data: bytes) -> bytes:
        for number in STEPS:
            data = await immortal.effect(step, data, number)
        return data


class LocalSteps(Immortal):
    """Service whose steps are handlers of its own: a replay repeats them, so that none of them needs to be logged."""

    done: int

    def __init__(self) -> None:
        self.done = 0

    @rpc(id=1)
    async def echo(self, data: bytes) -> bytes:
        for number in STEPS:
            data = await immortal.step(self.work, data, number)
        return data

    @rpc(id=2)
    def work(self, data: bytes, number: int) -> bytes:
        self.done += 1
        return step(data, number)


class WaitingCaller(Caller):
    """Caller with handlers that wait for events that never occur, beside the measured ones."""

    held: int

    def __init__(self) -> None:
        super().__init__()
        self.held = 0

    @impulse(id=10)
    def hold(self, count: int) -> None:
        for number in range(self.held, self.held + count):
            self.wait_for.fork(number)

    @rpc(id=11)
    async def wait_for(self, number: int) -> None:
        await immortal.step(self.begun)
        await immortal.event(f"never {number}", bool)

    @rpc(id=12)
    def begun(self) -> None:
        self.held += 1

    @on_primary
    def drive(self, impulses: Impulses) -> None:
        for line in sys.stdin:
            count = int(line)
            before = self.held
            for first in range(0, count, HOLD_AT_ONCE):
                impulses.hold(min(HOLD_AT_ONCE, count - first))
                while self.held < min(before + first + HOLD_AT_ONCE, before + count):
                    time.sleep(0.001)
            print_json({"held": self.held})
            break
        super().drive(impulses)


class Asked(Immortal):
    """Service that answers callers from outside, as a call and as a query."""

    @rpc(id=1)
    def echo(self, data: bytes) -> bytes:
        return data

    @query(id=2)
    def same(self, data: bytes) -> bytes:
        return data


TOUCHES = 1_600  # calls on their way at a time


class Pauses:
    """Calls that were handled since they were asked for the last time, and the longest time between two of them."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.began_s = self.handled_s = time.perf_counter()
        self.calls, self.longest_s = 0, 0.0

    def note(self) -> None:
        now_s = time.perf_counter()
        self.longest_s = max(self.longest_s, now_s - self.handled_s)
        self.handled_s = now_s
        self.calls += 1

    def take(self) -> dict[str, float]:
        now_s = time.perf_counter()
        longest_s = max(self.longest_s, now_s - self.handled_s)
        found = {"calls": self.calls, "seconds": now_s - self.began_s, "longest_s": longest_s}
        self.restart()
        return found


pauses = Pauses()


class Holder(Immortal):
    """Service with a state of some size, which calls of its own change all the time once it is told "touch"."""

    texts: dict[int, str]

    def __init__(self) -> None:
        self.texts = {}

    @impulse(id=1)
    def fill(self, size_mib: int) -> None:
        self.texts = {key: f"{key:1024}" for key in range(size_mib << 10)}
        course.done.set()

    @impulse(id=2)
    def begin(self) -> None:
        for number in range(TOUCHES):
            self.touch.fork(number)

    @rpc(id=3)
    def touch(self, key: int) -> None:
        pauses.note()
        self.texts[key % len(self.texts)] = f"{key:1024}"
        self.touch.fork(key + 7919)

    @on_primary
    def drive(self, impulses: Impulses) -> None:
        for line in sys.stdin:
            match line.split():
                case ["fill", size_mib]:
                    course.done.clear()
                    impulses.fill(int(size_mib))
                    course.done.wait()
                    print_json({"entries": len(self.texts)})
                case ["touch"]:
                    impulses.begin()
                    print_json({})
                case ["pauses"]:
                    print_json(pauses.take())


class ForkingHolder(Holder, checkpoint="fork"):
    pass


# The services for ordered multicasts: one sender, and up to 16 destinations that count.


DESTINATIONS_MAX = 16


async def timed(count: int, call: Callable[[int], Awaitable[object]]) -> None:
    """Await calls with the numbers up to ``count``, one after the other, and note each latency."""
    clock_ns, note = stopwatch.clock_ns, stopwatch.latencies_ns.append
    for number in range(count):
        begun_ns = clock_ns()
        await call(number)
        note(clock_ns() - begun_ns)


class Sink(Immortal):
    count: int

    def __init__(self) -> None:
        self.count = 0

    @rpc
    def note(self, number: int) -> int:
        self.count += 1
        return number

    @query
    def counted(self) -> int:
        return self.count


class Fan(Immortal):
    for _number in range(DESTINATIONS_MAX):
        locals()[f"d{_number}"] = peer(Sink, f"d{_number}")
    begun: int

    def __init__(self) -> None:
        self.begun = 0

    def sinks(self, destinations: int) -> list[type[Sink]]:
        return [getattr(self, f"d{number}") for number in range(destinations)]

    @rpc
    def burst(self, count: int, destinations: int, ordered: bool) -> None:
        sinks = self.sinks(destinations)
        if ordered:
            all_of_them = immortal.multicast(sinks)
            for number in range(count):
                all_of_them.note.fork(number)
            return
        for number in range(count):
            for sink in sinks:
                sink.note.fork(number)

    @rpc
    async def ask(self, count: int, destinations: int, ordered: bool) -> None:
        """Ask the destinations, one question after the other."""
        sinks = self.sinks(destinations)
        if ordered:
            await timed(count, lambda number: immortal.multicast(sinks).note.all(number))
        else:
            await timed(count, lambda number: asyncio.gather(*(sink.note(number) for sink in sinks)))

    @rpc
    def note(self, number: int) -> int:
        return number

    @rpc
    async def ask_with_itself(self, count: int) -> None:
        """Ask one other and itself, which takes all rounds, with no more processes than a plain call has."""
        both: list[type[Sink | Fan]] = [*self.sinks(1), type(self)]
        await timed(count, lambda number: immortal.multicast(both).note.all(number))

    @rpc
    async def ask_one(self, count: int) -> None:
        """Make plain awaited calls of one destination."""
        await timed(count, self.sinks(1)[0].note)

    @query
    def p50_us(self) -> float:
        """Return the median latency of awaited calls since the last question, in µs."""
        latencies_ns = stopwatch.latencies_ns.copy()
        stopwatch.latencies_ns.clear()
        return median(latencies_ns or [0]) / 1000


# An instance that moves, and one that calls it all the time: for failover.py.


PIECE_SIZE_BYTES = 1 << 20


class _Kept(Immortal):
    """Service with a state of some size, which counts."""

    count: int
    ballast: list[bytes]

    def __init__(self) -> None:
        self.count = 0
        self.ballast = []

    @rpc
    def add(self) -> int:
        self.count += 1
        return self.count


class Keeper(_Kept, formerly=("FormerKeeper",)):
    @rpc
    def grow(self, mib: int) -> None:
        first = len(self.ballast)
        self.ballast += [bytes([number % 251]) * PIECE_SIZE_BYTES for number in range(first, first + mib)]


@upgrades(Keeper)
class NextKeeper(_Kept):
    """Version 2 of the keeper."""

    @classmethod
    def upgrade(cls, old: Keeper) -> NextKeeper:
        new = cls()
        new.count, new.ballast = old.count, old.ballast
        return new


@upgrades(NextKeeper)
class FormerKeeper(_Kept, version=1):
    """Version 1 of the keeper again."""

    @classmethod
    def upgrade(cls, old: NextKeeper) -> FormerKeeper:
        new = cls()
        new.count, new.ballast = old.count, old.ballast
        return new


class Asker(Immortal):
    """Caller of one call after the other that writes the time of each answer to the file ANSWERS, not to its state."""

    keeper = peer(Keeper, "keeper")

    @rpc
    async def ask(self) -> None:
        answers = os.open(os.environ["ANSWERS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        while True:
            await self.keeper.add()
            os.write(answers, b"%d\n" % time.monotonic_ns())
