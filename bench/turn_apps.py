"""Benchmark of a turn's processor time, without sockets, disk and wake-ups. A program that prints a JSON object."""

from __future__ import annotations

import time

import msgspec

from immortal import Immortal, peer, rpc
from immortal.bench.calls import IDLE_PEERS, TurnCosts
from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.components import Components
from immortal.coordinator.core.machine import Machine
from immortal.coordinator.driver.ports import PlainApp, PlainHost, PlainLog, PlainPeers, SetClock
from immortal.coordinator.driver.turn import Driver
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.protocol.extensions import ALL_EXTENSIONS, Hello, encode_hello
from immortal.protocol.messages import (
    MessageType,
    encode_attach_to,
    encode_checkpoint,
    encode_incoming_rpc,
    encode_message,
    encode_outgoing_rpc,
)
from immortal.protocol.peer_frames import FrameType, PeerFrame
from immortal.testing import Environment

REPEATS = 5  # the least of them counts
CALLS = 400
NOW_NS = 1_700_000_000_000_000_000


class Callee(Immortal):
    count: int

    def __init__(self) -> None:
        self.count = 0

    @rpc
    def add(self, number: int) -> int:
        self.count += number
        return self.count


class Caller(Immortal):
    callee = peer(Callee, "callee")

    @rpc
    async def add_all(self, count: int) -> int:
        total = 0
        for _ in range(count):
            total = await self.callee.add(1)
        return total


def awaited_us() -> float:
    """Measure one awaited call between two instances in one process, logs in memory, apps included; in µs."""
    with Environment() as environment:
        environment.start(Callee, "callee")
        caller = environment.start(Caller, "caller")
        caller.call(Caller.add_all, 20)
        begun_s = time.process_time()
        caller.call(Caller.add_all, CALLS)
        return (time.process_time() - begun_s) / CALLS * 1e6


class _Peers(PlainPeers):
    """Peers that keep the tag of the last frame to each destination: an answer must name it."""

    def __init__(self) -> None:
        self.tags: dict[str, int] = {}

    def send(self, effect: ef.SendToPeer) -> None:
        self.tags[effect.destination] = effect.tag


class _Core:
    """Core whose app calls peers, each of which acknowledges at once."""

    def __init__(self, peers: int) -> None:
        inbox: list[ev.Event] = []
        log = PlainLog(MemoryLogStore(1), inbox)
        machine = Machine(Components("a"))
        self._log, self._peers = log, _Peers()
        self._driver = Driver(machine, inbox, PlainApp(), self._peers, log, SetClock(NOW_NS), PlainHost())
        self._driver.start()
        self._turn(ev.AppConnected())
        hello = encode_hello(Hello(ALL_EXTENSIONS - {MessageType.SOURCES}, "turns"))
        first = encode_message(MessageType.INITIAL_MESSAGE, encode_incoming_rpc(1, 1, b""))
        self._turn(ev.AppData(hello + first + encode_checkpoint(1) + b"s"))
        for number in range(peers):
            self.call(f"p{number}", 1)

    def call(self, name: str, position: int) -> None:
        front = encode_attach_to(name) if position == 1 else b""
        self._turn(ev.AppData(front + encode_outgoing_rpc(name, 3, 1, b"argument")))
        if position == 1:
            self._reply(name, FrameType.WELCOME, 0)
        self._reply(name, FrameType.TRIM_TO, position)

    def _reply(self, name: str, frame_type: FrameType, position: int) -> None:
        frame = PeerFrame(frame_type, name, "a", 77, 1, position)
        self._turn(ev.PeerReplied(name, self._peers.tags[name], frame))

    def _turn(self, event: ev.Event) -> None:
        self._driver.inbox.append(event)
        self._driver.turn()
        while self._log.jobs:
            self._driver.inbox.append(self._log.work())
            self._driver.turn()


def beside_idle_us(peers: int) -> float:
    """Measure in µs a call to one of ``peers`` and its acknowledgement in the core alone, while the others are idle."""
    core = _Core(peers)
    begun_s = time.process_time()
    for position in range(2, CALLS + 2):
        core.call("p1", position)
    return (time.process_time() - begun_s) / CALLS * 1e6


def main() -> None:
    few, many = IDLE_PEERS
    costs = TurnCosts(
        min(awaited_us() for _ in range(REPEATS)),
        min(beside_idle_us(few) for _ in range(REPEATS)),
        min(beside_idle_us(many) for _ in range(REPEATS)),
    )
    print(msgspec.json.encode(costs).decode())


if __name__ == "__main__":
    main()
