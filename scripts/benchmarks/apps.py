"""The services of the suite, beside those of `immortal bench`. Each reads what it is to do from standard input."""

from __future__ import annotations

import sys
import time

from immortal import Immortal, Impulses, impulse, on_primary, peer, query, rpc
from immortal.bench.apps import course, say
from immortal.bench.call_apps import Caller
from scripts.benchmarks.rivals.steps import STEPS, step

HOLD_AT_ONCE = 500


class Relay(Immortal):
    """Passes a call on, and its answer back."""

    next = peer("immortal.bench.call_apps:Callee", "relay-1")

    @rpc(id=1)
    async def echo(self, data: bytes) -> bytes:
        answer: bytes = await self.next.echo(data)
        return answer


class Relay1(Relay):
    next = peer("scripts.benchmarks.apps:Relay2", "relay-2")


class Relay2(Relay):
    next = peer("immortal.bench.call_apps:Callee", "relay-3")


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
            say({"held": self.held})
            break
        super().drive(impulses)


class Asked(Immortal):
    """Answers callers from outside, as a call and as a query."""

    @rpc(id=1)
    def echo(self, data: bytes) -> bytes:
        return data

    @query(id=2)
    def same(self, data: bytes) -> bytes:
        return data


class Holder(Immortal, checkpoint="fork"):
    """Holds a state of some size."""

    texts: dict[int, str]

    def __init__(self) -> None:
        self.texts = {}

    @impulse(id=1)
    def fill(self, size_mib: int) -> None:
        self.texts = {key: f"{key:1024}" for key in range(size_mib << 10)}
        course.done.set()

    @on_primary
    def drive(self, impulses: Impulses) -> None:
        for line in sys.stdin:
            course.done.clear()
            impulses.fill(int(line))
            course.done.wait()
            say({"entries": len(self.texts)})
