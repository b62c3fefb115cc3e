"""The services of the suite, beside those of `immortal bench`. Each reads what it is to do from standard input."""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time

from appsdk import Immortal, Impulses, impulse, on_primary, peer, rpc
from bench.call_apps import Caller
from scripts.benchmarks.rivals.steps import STEPS, step

CHAINS = 16  # bursts under way in a sender: it waits for nothing but back-pressure
PEERS_MAX = 200
WAITING_VARIABLE = "IMMORTAL_BENCH_WAITING"
HOLD_AT_ONCE = 500


class Course:
    """What the handlers tell the thread that drives them; no part of the state."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.done = threading.Event()
        self.ended_s = 0.0
        self.clock_s = time.perf_counter  # the same in all processes of a machine


_course = Course()


def _say(line: object) -> None:
    print(json.dumps(line), flush=True)


class Receiver(Immortal):
    calls: int
    received_bytes: int
    calls_expected: int

    def __init__(self) -> None:
        self.calls = self.received_bytes = self.calls_expected = 0

    @rpc(id=1)
    def take(self, data: bytes) -> None:
        self.calls += 1
        self.received_bytes += len(data)
        if self.calls == self.calls_expected:
            _course.ended_s = _course.clock_s()
            _course.done.set()

    @impulse(id=2)
    def expect(self, calls: int) -> None:
        self.calls = self.received_bytes = 0
        self.calls_expected = calls
        _course.done.clear()
        _course.ready.set()

    @on_primary
    def drive(self, impulses: Impulses) -> None:
        for line in sys.stdin:
            _course.ready.clear()
            impulses.expect(json.loads(line)["calls"])
            _course.ready.wait()
            _say("ready")
            _course.done.wait()
            _say({"calls": self.calls, "bytes": self.received_bytes, "ended_s": _course.ended_s})


class Sender(Immortal):
    """Forks calls in bursts, in turns to as many receivers as it is told to; each burst is a call to itself."""

    locals().update({f"receiver_{index}": peer(Receiver, f"receiver-{index}") for index in range(PEERS_MAX)})
    bursts: int

    def __init__(self) -> None:
        self.bursts = 0

    @impulse(id=1)
    def start(self, sizes: list[int], receivers: int, bursts: int, calls: int) -> None:
        for _ in range(CHAINS):
            self.burst.fork(sizes, receivers, bursts, calls)

    @rpc(id=2)
    def burst(self, sizes: list[int], receivers: int, bursts_left: int, calls: int) -> None:
        self.bursts += 1
        forks = [getattr(self, f"receiver_{index}").take.fork for index in range(receivers)]
        data = [bytes(size) for size in sizes]
        if len(forks) == len(data) == 1:
            fork, one = forks[0], data[0]
            for _ in range(calls):
                fork(one)
        else:
            pairs = [(fork, one) for one in data for fork in forks]
            for fork, one in itertools.islice(itertools.cycle(pairs), calls):
                fork(one)
        if bursts_left > 1:
            self.burst.fork(sizes, receivers, bursts_left - 1, calls)

    @on_primary
    def drive(self, impulses: Impulses) -> None:
        for line in sys.stdin:
            plan = json.loads(line)
            begun_s = time.perf_counter()
            impulses.start(plan["sizes"], plan["receivers"], plan["bursts"], plan["calls"])
            _say({"begun_s": begun_s})


class Relay(Immortal):
    """Passes a call on, and its answer back."""

    next = peer("bench.call_apps:Callee", "relay-1")

    @rpc(id=1)
    async def echo(self, data: bytes) -> bytes:
        answer: bytes = await self.next.echo(data)
        return answer


class Relay1(Relay):
    next = peer("scripts.benchmarks.apps:Relay2", "relay-2")


class Relay2(Relay):
    next = peer("bench.call_apps:Callee", "relay-3")


class EffectSteps(Immortal):
    """Each step is work in the outside world: its result is durable before the next begins, as the rivals' are."""

    @rpc(id=1)
    async def echo(self, data: bytes) -> bytes:
        for number in STEPS:
            data = await self.effect(step, data, number)
        return data


class LocalSteps(Immortal):
    """Each step is a handler of its own: replayed, so that nothing of it needs to be logged."""

    done: int

    def __init__(self) -> None:
        self.done = 0

    @rpc(id=1)
    async def echo(self, data: bytes) -> bytes:
        for number in STEPS:
            data = await self.work(data, number)
        return data

    @rpc(id=2)
    def work(self, data: bytes, number: int) -> bytes:
        self.done += 1
        return step(data, number)


class WaitingCaller(Caller):
    """A caller with handlers that wait for what never comes, beside those that are measured."""

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
        await self.begun()
        await self.event(f"never {number}", bool)

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
            _say({"held": self.held})
            break
        super().drive(impulses)


class Holder(Immortal, checkpoint="fork"):
    """Holds a state of some size."""

    texts: dict[int, str]

    def __init__(self) -> None:
        self.texts = {}

    @impulse(id=1)
    def fill(self, size_mib: int) -> None:
        self.texts = {key: f"{key:1024}" for key in range(size_mib << 10)}
        _course.done.set()

    @on_primary
    def drive(self, impulses: Impulses) -> None:
        for line in sys.stdin:
            _course.done.clear()
            impulses.fill(int(line))
            _course.done.wait()
            _say({"entries": len(self.texts)})
