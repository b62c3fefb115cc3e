"""Nodes and handles with real coordinators and processes, each of which is killed while handles are on their way."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.helpers.cli import Run, immortal

ORDERS = 60

APP = """
import os
import threading

import immortal
from immortal import Handle, Immortal, Impulses, Node, Transient, impulse, on_primary, peer, rpc

ORDERS = 60


class Order(Node):
    number: int
    filled: int

    def __init__(self, number: int) -> None:
        self.number = number
        self.filled = 0

    @rpc
    def fill(self, count: int) -> int:
        self.filled += count
        return self.filled


class Exchange(Immortal, nodes=(Order,)):
    broker = peer(lambda: Broker, "broker")
    orders: dict[int, Handle[Order]]
    released: list[int]
    filled: dict[int, int]
    over: Transient[threading.Event]
    half: Transient[threading.Event]

    def __init__(self) -> None:
        self.orders, self.released, self.filled = {}, [], {}

    def prepare(self) -> None:
        self.over, self.half = threading.Event(), threading.Event()
        self.look()

    def look(self) -> None:
        if len(self.released) >= ORDERS // 2:
            self.half.set()
        if len(self.released) == ORDERS:
            self.over.set()

    @impulse
    def open(self, number: int) -> None:
        if number not in self.orders:
            self.orders[number] = immortal.create_node(Order, number)
            self.broker.work_on.fork(self.orders[number])

    def on_last_release(self, handle: Handle[Order]) -> None:
        node = immortal.node_of(handle)
        self.released.append(node.number)
        self.filled[node.number] = node.filled
        immortal.destroy(handle)
        self.look()

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        print("process", os.getpid(), flush=True)
        for number in range(ORDERS):
            impulses.open(number)
        self.half.wait()
        print("half of them", flush=True)
        self.over.wait()
        same = sorted(self.released) == list(range(ORDERS)) and set(self.filled.values()) == {6}
        print("all released once and filled:", same, flush=True)


class Broker(Immortal):
    helper = peer(lambda: Broker, "helper")
    name: str

    def __init__(self) -> None:
        self.name = ""

    @rpc
    def work_on(self, order: Handle[Order]) -> None:
        immortal.multicast([order]).fill.fork(1)
        order.fill.fork(2)
        self.helper.finish.fork(order)
        immortal.release_handle(order)

    @rpc
    async def finish(self, order: Handle[Order]) -> None:
        await order.fill(3)
        await immortal.step(self.drop, order)

    @rpc
    def drop(self, order: Handle[Order]) -> None:
        immortal.release_handle(order)

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        print("process", os.getpid(), flush=True)
"""


def pid_of(line: str) -> int:
    words = line.split()
    return int(words[words.index("process") + 1])


def test_each_handle_is_released_once_whoever_is_killed(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    assert f"ORDERS = {ORDERS}" in APP
    classes = {"exchange": "Exchange", "broker": "Broker", "helper": "Broker"}
    for name in classes:
        immortal(tmp_path, "register", name, "--peer", "tcp://127.0.0.1:*")
    runs: dict[str, Run] = {}
    try:
        for name in ("broker", "exchange"):  # the helper is still down
            runs[name] = Run(tmp_path, name, f"app:{classes[name]}", "--restart")
        for name in ("broker", "exchange"):
            os.kill(pid_of(runs[name].line("process")), signal.SIGKILL)
            runs[name].line("process", 2)
        runs["helper"] = Run(tmp_path, "helper", "app:Broker", "--restart")
        os.kill(pid_of(runs["helper"].line("process")), signal.SIGKILL)
        runs["exchange"].line("half of them")
        immortal(tmp_path, "checkpoint", "exchange")
        os.kill(pid_of(runs["exchange"].line("process", 2)), signal.SIGKILL)
        runs["exchange"].line("process", 3)
        runs["helper"].line("process", 2)
        assert "True" in runs["exchange"].line("all released once and filled:")
        for run in runs.values():
            assert run.stop() == 0
    finally:
        for run in runs.values():
            run.kill()
    for name in ("exchange", "helper"):
        assert json.loads(immortal(tmp_path, "verify", name, "--json"))["same"]
