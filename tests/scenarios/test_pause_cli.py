"""`immortal pause`, `resume` and `handlers NAME retry-effect`, with real processes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

from immortal.client import connect
from tests.helpers import commands
from tests.helpers.cli import DEADLINE_S, HOME, Run, immortal

SHOP = """
from datetime import timedelta
from pathlib import Path

import immortal
from immortal import Immortal, Retry, rpc


def charge(amount: int) -> int:
    if not Path("open").exists():
        raise ConnectionError("the bank is closed")
    return amount


class Shop(Immortal):
    sold: int

    def __init__(self) -> None:
        self.sold = 0

    @rpc
    def sell(self) -> int:
        self.sold += 1
        print("sold", self.sold, flush=True)
        return self.sold

    @rpc
    async def pay(self, amount: int) -> None:
        hours = timedelta(hours=9)
        retry = Retry(attempts=None, first_wait=hours, max_wait=hours)
        got = await immortal.effect.options(retry=retry)(charge, amount)
        await immortal.step(self.paid, got)

    @rpc
    def paid(self, amount: int) -> None:
        print("paid", amount, flush=True)

    @rpc
    def begin(self) -> None:
        self.pay.fork(10)
"""


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.02)


def shop(folder: Path) -> Run:
    (folder / "shop.py").write_text(SHOP)
    immortal(folder, "register", "shop", "--peer", "tcp://127.0.0.1:*", "--app", "shop:Shop")
    run = Run(folder, "shop")
    run.line("ready")
    return run


def status(folder: Path) -> dict:
    return json.loads(immortal(folder, "status", "shop", "--json"))


def test_a_pause_holds_calls_back_and_a_restart_ends_it(tmp_path: Path) -> None:
    run = shop(tmp_path)
    try:
        with connect("shop", home=tmp_path / HOME) as client:
            assert client.sell() == 1
            assert "shop: paused; incoming messages are logged" in immortal(tmp_path, "pause", "shop")
            assert "it is paused already, by " in immortal(tmp_path, "pause", "shop")
            again = json.loads(immortal(tmp_path, "pause", "shop", "--json"))
            assert (again["name"], again["changed"]) == ("shop", False)
            assert again["paused"]["by"]
            assert again["paused"]["since_ns"] > 0
            got: list[int] = []
            calling = threading.Thread(target=lambda: got.append(client.sell()))
            calling.start()
            until(lambda: status(tmp_path)["backlog_records"] == 1)
            said = immortal(tmp_path, "status", "shop")
            assert "shop: paused by " in said
            assert "immortal resume shop" in said
            assert got == []
            assert "shop: resumed; it was paused by " in immortal(tmp_path, "resume", "shop")
            nothing = json.loads(immortal(tmp_path, "resume", "shop", "--json"))
            assert nothing == {"name": "shop", "changed": False, "was_paused": None}
            calling.join(DEADLINE_S)
            assert got == [2]
        assert "it was not paused" in immortal(tmp_path, "resume", "shop")
        audit = immortal(tmp_path, "audit", "shop")
        assert "verb=pause" in audit
        assert "verb=resume" in audit
        immortal(tmp_path, "pause", "shop")
        immortal(tmp_path, "restart", "shop")
        assert status(tmp_path)["paused"] is None
        immortal(tmp_path, "stop", "shop")
        assert "does not run" in immortal(tmp_path, "pause", "shop", status=1)
    finally:
        run.kill()


def test_an_effect_that_would_be_tried_in_hours_is_tried_now(tmp_path: Path) -> None:
    run = shop(tmp_path)
    try:
        with connect("shop", home=tmp_path / HOME) as client:
            client.begin()
        until(lambda: "Shop.pay" in immortal(tmp_path, "handlers", "shop"))
        number = str(json.loads(immortal(tmp_path, "handlers", "shop", "--json"))["handlers"][0]["id"])
        until(lambda: f"retry-effect {number}" in immortal(tmp_path, "handlers", "shop", "explain", number))
        assert "the bank is closed" in immortal(tmp_path, "handlers", "shop", "explain", number)
        assert "no handler 777 waits" in immortal(tmp_path, "handlers", "shop", "retry-effect", "777", status=1)
        (tmp_path / "open").touch()
        said = ""

        def retried() -> bool:  # that it has failed is told a moment before it waits for its next attempt
            nonlocal said
            result = commands.run(tmp_path, "handlers", "shop", "retry-effect", number, home=HOME)
            said = result.stdout + result.stderr
            return result.returncode == 0

        until(retried)
        assert said == "shop: charge, for Shop.pay: the next attempt is made now\n"
        run.line("paid 10")
        assert "verb=retry-effect" in immortal(tmp_path, "audit", "shop")
        immortal(tmp_path, "stop", "shop")
        immortal(tmp_path, "verify", "shop", "--all")  # no log knows of attempts
    finally:
        run.kill()
