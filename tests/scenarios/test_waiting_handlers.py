"""What can happen while handlers wait, with real coordinators and processes: crashes, stops, upgrades, passing time."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.helpers.cli import DEADLINE_S, Run, immortal

BANK = """
import asyncio
import os
from datetime import datetime, timedelta, timezone

import immortal
from immortal import Immortal, Impulses, impulse, initial, on_primary, peer, rpc


class Refused(Exception):
    pass


class Bank(Immortal):
    asked: int

    def __init__(self) -> None:
        self.asked = 0

    @rpc
    def count(self) -> int:
        self.asked += 1
        return self.asked

    @rpc(raises=[Refused])
    async def credit(self, amount: int) -> int:
        asked = await immortal.step(self.count)
        print("asked", asked, flush=True)
        await immortal.event("open")
        if amount > 10:
            raise Refused(amount)
        return asked

    @impulse
    def open(self) -> None:
        for _ in range(2):
            immortal.signal("open")

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        print("the bank is", os.getpid(), flush=True)
        if os.path.exists("open"):
            impulses.open()


class Teller(Immortal):
    bank = peer(Bank, "bank")
    notes: list[str]

    def __init__(self) -> None:
        self.notes = []

    @initial
    def begin(self) -> None:
        self.work.fork()
        self.rest.fork()

    @rpc
    def note(self, text: str) -> None:
        self.notes.append(text)
        print("noted", text, "after", self.notes, flush=True)

    @rpc
    async def work(self) -> None:
        good, bad = self.bank.credit(5), self.ask_too_much()
        await immortal.step(self.note, f"{await asyncio.gather(good, bad)}")

    async def ask_too_much(self) -> str:
        try:
            await self.bank.credit(11)
        except Refused as error:
            return f"refused {error.args[0]}"

    @rpc
    async def rest(self) -> None:
        due = immortal.now() + timedelta(seconds=1.5)
        print("due", due.timestamp(), flush=True)
        await immortal.at(due)
        await immortal.step(self.note, "rested")

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        print("the teller is", os.getpid(), flush=True)
"""


def kill_app(run: Run, line: str) -> None:
    os.kill(int(line.split()[-1]), signal.SIGKILL)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


def test_caller_and_callee_crash_alone_and_together_and_a_timer_is_due_while_down(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(BANK)
    for name in ("bank", "teller"):
        immortal(tmp_path, "register", name, "--peer", "tcp://127.0.0.1:*")
    bank, teller = Run(tmp_path, "bank", "app:Bank", "--restart"), Run(tmp_path, "teller", "app:Teller", "--restart")
    try:
        bank.line("asked 2")  # both calls wait there
        due_s = float(teller.line("due ").split()[-1])
        kill_app(teller, teller.line("the teller is"))
        teller.line("the teller is", 2)
        kill_app(bank, bank.line("the bank is"))
        bank.line("the bank is", 2)
        immortal(tmp_path, "checkpoint", "bank")
        teller.kill()
        bank.kill()
        rested_before = teller.count("noted rested")
        until(lambda: time.time() > due_s)
        (tmp_path / "open").touch()
        bank, teller = Run(tmp_path, "bank", "app:Bank"), Run(tmp_path, "teller", "app:Teller")
        teller.line("noted rested") if not rested_before else None  # before the bank's answers, or behind them
        teller.line("noted [1, 'refused 11']")
        assert (bank.stop(), teller.stop()) == (0, 0)
        shown = json.loads(immortal(tmp_path, "replay", "teller", "--state", "--json"))["state"]["state"]
        assert sorted(shown["notes"]) == ["[1, 'refused 11']", "rested"]
        assert json.loads(immortal(tmp_path, "replay", "bank", "--state", "--json"))["state"]["state"]["asked"] == 2
    finally:
        bank.kill()
        teller.kill()
    assert json.loads(immortal(tmp_path, "verify", "teller", "--json"))["same"]


CROWD = """
import os

import immortal
from immortal import Immortal, Impulses, impulse, on_primary, rpc

COUNT = 10_000


class Crowd(Immortal):
    begun: int
    done: int

    def __init__(self) -> None:
        self.begun = self.done = 0

    @rpc
    def begin(self) -> None:
        self.begun += 1
        if self.begun == COUNT:
            print("all wait", flush=True)

    @rpc
    def end(self, number: int) -> None:
        self.done += 1
        if self.done == COUNT:
            print("all are done", flush=True)

    @impulse
    async def wait(self, number: int) -> None:
        await immortal.step(self.begin)
        await immortal.step(self.end, await immortal.event("go", int))

    @impulse
    def let_go(self) -> None:
        for number in range(COUNT):
            immortal.signal("go", number)

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        print("the crowd is", os.getpid(), flush=True)
        if not self.begun:
            for number in range(COUNT):
                impulses.wait(number)
        else:
            impulses.let_go()
"""


def test_a_checkpoint_while_ten_thousand_handlers_wait(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(CROWD)
    immortal(tmp_path, "register", "crowd", "--peer", "tcp://127.0.0.1:*")
    run = Run(tmp_path, "crowd", "app:Crowd", "--restart")
    try:
        run.line("all wait")
        immortal(tmp_path, "checkpoint", "crowd")
        run.line("checkpoint taken", 2)
        kill_app(run, run.line("the crowd is"))
        run.line("all are done")
        assert run.count("all wait") == 1  # the recovery began at the checkpoint
        assert run.stop() == 0
    finally:
        run.kill()
    shown = json.loads(immortal(tmp_path, "replay", "crowd", "--state", "--json"))["state"]["state"]
    assert (shown["begun"], shown["done"], shown.get("$waiting")) == (10_000, 10_000, None)


SHOP = """
import os
import time

import immortal
from immortal import EffectFailed, Immortal, Impulses, Retry, effect_context, initial, on_primary, rpc


def charge(customer: str, cents: int) -> str:
    context = effect_context()
    with open("charges", "a") as file:
        print(context.key, context.attempt, customer, cents, file=file)
    print("charging", os.getpid(), flush=True)
    while not os.path.exists("answer"):
        time.sleep(0.01)
    return f"receipt {os.getpid()}"


class Shop(Immortal):
    notes: list[str]

    def __init__(self) -> None:
        self.notes = []

    @initial
    def begin(self) -> None:
        self.order.fork("ann", 500)

    @rpc
    def note(self, text: str) -> None:
        self.notes.append(text)

    @rpc
    async def order(self, customer: str, cents: int) -> None:
        receipt = await immortal.effect(charge, customer, cents)
        await immortal.step(self.note, receipt)
        print("noted", receipt, flush=True)

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        print("shop", os.getpid(), "has", self.notes, flush=True)
"""

SHOP2 = """
from __future__ import annotations

import shop
import immortal
from immortal import Immortal, rpc, upgrades


@upgrades(shop.Shop)
class Shop(Immortal):
    notes: list[str]
    version: int

    def __init__(self) -> None:
        self.notes = []
        self.version = 2

    @classmethod
    def upgrade(cls, old: shop.Shop) -> Shop:
        new = cls()
        new.notes = [*old.notes, "upgraded"]
        return new

    @rpc
    def note(self, text: str) -> None:
        self.notes.append(f"{text} by version {self.version}")

    @rpc
    async def order(self, customer: str, cents: int) -> None:
        receipt = await immortal.effect(shop.charge, customer, cents)
        await immortal.step(self.note, receipt)
        print("noted", receipt, flush=True)
"""


def charges(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "charges").read_text().splitlines()]


def test_an_effect_in_flight_at_a_crash_and_at_a_stop(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    immortal(tmp_path, "register", "shop", "--peer", "tcp://127.0.0.1:*", "--keep-checkpoints", "all")
    run = Run(tmp_path, "shop", "shop:Shop", "--restart")
    try:
        kill_app(run, run.line("charging "))
        run.line("charging ", 2)
        immortal(tmp_path, "checkpoint", "shop")
        assert run.stop() == 0  # though its thread goes on
        run = Run(tmp_path, "shop", "shop:Shop", "--restart")
        third = run.line("charging ").split()[-1]
        (tmp_path / "answer").touch()
        run.line(f"noted receipt {third}")
        kill_app(run, f"shop {third}")
        assert f"['receipt {third}']" in run.line(" has ", 2)
        assert run.stop() == 0
    finally:
        run.kill()
    made = charges(tmp_path)
    assert len(made) == 3
    assert {tuple(charge) for charge in made} == {(made[0][0], "1", "ann", "500")}  # one key for all
    assert json.loads(immortal(tmp_path, "verify", "shop", "--json"))["same"]
    replayed = json.loads(immortal(tmp_path, "replay", "shop", "--to", "1", "--state", "--json"))
    (waiting,) = replayed["state"]["state"]["$waiting"]
    assert waiting["waits_for"][0].startswith("effect charge")
    assert json.loads(immortal(tmp_path, "what-if", "shop", "--app", "shop:Shop", "--json"))["same"]
    (tmp_path / "dear.py").write_text(
        SHOP.replace("customer, cents)\n        await", "customer, 2 * cents)\n        await")
    )
    said = immortal(tmp_path, "what-if", "shop", "--app", "dear:Shop", status=3)
    print(said)
    assert "$waiting" in said
    assert len(charges(tmp_path)) == 3  # no replay runs it


def test_an_upgrade_while_an_effect_is_in_flight(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "shop2.py").write_text(SHOP2)
    immortal(tmp_path, "register", "shop", "--peer", "tcp://127.0.0.1:*", "--keep-checkpoints", "all")
    run = Run(tmp_path, "shop", "shop:Shop")
    try:
        run.line("charging ")
        assert run.stop() == 0
        immortal(tmp_path, "upgrade", "shop", "shop2:Shop", "--to", "2")
        run = Run(tmp_path, "shop", "shop2:Shop")
        pid = run.line("charging ").split()[-1]
        (tmp_path / "answer").touch()
        run.line(f"noted receipt {pid}")
        assert run.stop() == 0
    finally:
        run.kill()
    shown = json.loads(immortal(tmp_path, "replay", "shop", "--state", "--json"))["state"]["state"]
    assert shown["notes"] == ["upgraded", f"receipt {pid} by version 2"]
    first, second = charges(tmp_path)
    assert first == second
