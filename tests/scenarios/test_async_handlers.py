"""Async handlers with real coordinators and processes: one waits, its app is killed, and it goes on; then its log."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.helpers.cli import Run, immortal

APP = """
import asyncio
import os
import threading
from datetime import timedelta

import immortal
from immortal import Immortal, Impulses, Transient, impulse, initial, on_primary, peer, rpc


class Full(Exception):
    pass


class Bank(Immortal):
    amount: int

    def __init__(self) -> None:
        self.amount = 0

    @rpc(raises=[Full])
    def credit(self, amount: int) -> int:
        if self.amount + amount > 10:
            raise Full(self.amount)
        self.amount += amount
        return self.amount


class Teller(Immortal):
    bank = peer(Bank, "bank")
    notes: list[str]
    lives: int
    reached: Transient[dict[str, threading.Event]]

    def __init__(self) -> None:
        self.notes = []
        self.lives = 0

    def prepare(self) -> None:
        self.reached = {"credited": threading.Event(), "finished": threading.Event()}

    @initial
    def begin(self) -> None:
        self.work.fork(4)

    @rpc
    def note(self, text: str) -> int:
        self.notes.append(text)
        if text in self.reached:
            self.reached[text].set()
        return len(self.notes)

    @rpc
    async def work(self, amount: int) -> None:
        await immortal.step(self.note, f"bank has {await self.bank.credit(amount)}")
        await immortal.step(self.note, "credited")
        await immortal.step(self.note, f"sent {await immortal.event('go', int)}")
        await immortal.sleep(timedelta(milliseconds=200))
        try:
            await asyncio.gather(self.bank.credit(5), self.bank.credit(5))
        except Full as error:
            await immortal.step(self.note, f"full at {error.args[0]}")
        await immortal.step(self.note, "finished")

    @impulse
    def born(self) -> None:
        self.lives += 1
        if self.lives > 1:
            immortal.signal("go", self.lives)

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        self.reached["credited"].wait() if "credited" not in self.notes else None
        print("process", os.getpid(), "has notes", len(self.notes), flush=True)
        impulses.born()
        self.reached["finished"].wait() if "finished" not in self.notes else None
        print("all notes:", *self.notes, sep="; ", flush=True)
"""

NOTES = "bank has 4; credited; sent 2; full at 9; finished"


def test_a_handler_that_waits_outlives_its_process(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    for name in ("bank", "teller"):
        immortal(tmp_path, "register", name, "--peer", "tcp://127.0.0.1:*")
    bank = Run(tmp_path, "bank", "app:Bank", "--restart")
    try:
        bank.line("ready")
        teller = Run(tmp_path, "teller", "app:Teller", "--restart")
        try:
            first = teller.line("has notes 2").split()
            immortal(tmp_path, "checkpoint", "teller")
            os.kill(int(first[first.index("process") + 1]), signal.SIGKILL)
            teller.line("has notes 2", 2)
            assert NOTES in teller.line("all notes:")
            assert teller.stop() == 0
        finally:
            teller.kill()
        assert bank.stop() == 0
    finally:
        bank.kill()
    verified = json.loads(immortal(tmp_path, "verify", "teller", "--json"))
    assert verified["same"]
    before_last = str(verified["sections"][-1]["last_record"] - 1)
    replayed = json.loads(immortal(tmp_path, "replay", "teller", "--to", before_last, "--state", "--json"))
    (waiting,) = replayed["state"]["state"]["$waiting"]
    assert waiting["waits_for"][-1].startswith("call bank.credit")
    assert waiting["results"][0][1] == 4
    assert json.loads(immortal(tmp_path, "what-if", "teller", "--app", "app:Teller", "--json"))["same"]
    (tmp_path / "other.py").write_text(APP.replace("self.bank.credit(5), self", "self.bank.credit(6), self"))
    said = immortal(tmp_path, "what-if", "teller", "--app", "other:Teller", status=3)
    assert "message 0: the clock" in said
    assert "would be Bank.credit(6) as call " in said
