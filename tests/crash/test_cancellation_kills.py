"""kill -9 around a cancellation: the app and its coordinator, before and after it is durable, and as it cleans up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.cli import Run, immortal

ORDERS = """
import os
from datetime import timedelta

import immortal
from immortal import Cancelled, Immortal, Impulses, impulse, initial, on_primary, rpc


class Orders(Immortal):
    states: list[str]

    def __init__(self) -> None:
        self.states = []

    @initial
    def begin(self) -> None:
        self.order.fork(7)

    @rpc
    def note(self, text: str) -> None:
        self.states.append(text)
        print("noted", text, "after", len(self.states), flush=True)

    @rpc
    async def order(self, number: int) -> None:
        await immortal.step(self.note, "waits")
        try:
            await immortal.event("approved")
        except Cancelled as cancelled:
            await immortal.step(self.note, f"cancelled: {cancelled}")
            await immortal.event("stock is back")
            await immortal.step(self.note, "cleaned up")
            raise

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        print("orders are", os.getpid(), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "orders.py").write_text(ORDERS)
    immortal(tmp_path, "register", "orders", "--peer", "tcp://127.0.0.1:*", "--keep-checkpoints", "all")
    return tmp_path


@pytest.fixture
def runs(folder: Path) -> Iterator[list[Run]]:
    made: list[Run] = []
    yield made
    for run in made:
        run.kill()


def start(runs: list[Run], folder: Path) -> Run:
    runs.append(Run(folder, "orders", "orders:Orders", "--restart"))
    runs[-1].line("orders are")
    runs[-1].line("ready")  # before, it says nothing of its handlers
    return runs[-1]


def waiting(folder: Path) -> list[dict]:
    found: list[dict] = json.loads(immortal(folder, "handlers", "orders", "--json"))["handlers"]
    return found


def test_a_cancellation_is_obeyed_once_whatever_is_killed(runs: list[Run], folder: Path) -> None:
    run = start(runs, folder)
    run.line("noted waits")
    (one,) = waiting(folder)
    run.kill()  # all of it: its app and coordinator die with it
    said = immortal(folder, "handlers", "orders", "cancel", str(one["id"]), status=1)
    assert "does not run" in said
    run = start(runs, folder)
    assert waiting(folder) == [one]
    text = immortal(folder, "handlers", "orders", "cancel", str(one["id"]), "--reason", "no stock")
    assert "Orders.order was cancelled, and waits for event stock is back" in text
    run.kill()
    run = start(runs, folder)
    run.line("noted cancelled: no stock after 2")  # once more, by the replay
    (cleaning,) = waiting(folder)
    assert cleaning["cancelled"][0]["reason"] == "no stock"
    assert [wait["event"] for wait in cleaning["waits"]] == ["stock is back"]
    immortal(folder, "checkpoint", "orders")
    run.kill()
    run = start(runs, folder)
    assert waiting(folder) == [cleaning]
    assert run.count("noted") == 0, "it was run again, and not from its journal"
    text = immortal(folder, "handlers", "orders", "signal", str(one["id"]), "stock is back")
    assert "has the event 'stock is back', and has ended" in text
    run.kill()
    run = start(runs, folder)
    assert waiting(folder) == []
    assert "it has ended" in immortal(folder, "handlers", "orders", "cancel", str(one["id"]), status=1)
    assert "no handler of orders waits" in immortal(folder, "handlers", "orders")
    assert "has no dead letters" in immortal(folder, "dead-letters", "orders")
    assert run.stop() == 0
    shown = json.loads(immortal(folder, "replay", "orders", "--state", "--json"))["state"]["state"]
    assert shown["states"] == ["waits", "cancelled: no stock", "cleaned up"]
    assert json.loads(immortal(folder, "verify", "orders", "--json"))["same"]


def test_what_is_shown_of_a_handler(runs: list[Run], folder: Path) -> None:
    start(runs, folder).line("noted waits")
    (one,) = waiting(folder)
    line = next(number for number, text in enumerate(ORDERS.splitlines(), 1) if 'event("approved")' in text)
    (frame,) = one["at"][0]
    assert (frame["file"], frame["line"], frame["text"]) == ("orders.py", line, 'await immortal.event("approved")')
    table = immortal(folder, "handlers", "orders")
    assert f"orders.py:{line}  await immortal.event" in table
    assert "event approved, since" in table
    explained = immortal(folder, "handlers", "orders", "explain", str(one["id"]))
    assert f"handler {one['id']}: Orders.order(7)" in explained
    assert "step note gave None" in explained
    assert f"immortal handlers orders signal {one['id']} EVENT VALUE" in explained
    assert "no handler 999 of 'orders' waits" in immortal(folder, "handlers", "orders", "explain", "999", status=1)
    wrong = immortal(folder, "handlers", "orders", "signal", str(one["id"]), "approved", "{", status=2)
    assert "VALUE '{' is not JSON" in wrong
    text = immortal(folder, "handlers", "orders", "signal", str(one["id"]), "denied", "1", status=1)
    assert "does not wait for the event 'denied' (its events: 'approved')" in text
