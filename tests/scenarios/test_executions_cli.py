"""`immortal executions` with real processes: found by key, across services, after kill -9, and without the list."""

from __future__ import annotations

import json
import os
import signal
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from immortal.client import connect, executions
from immortal.errors import UsageError
from immortal.protocol.executions import FILE_NAME, Query, open_index
from tests.helpers.cli import HOME, Run, immortal, wait_until

SHOP = """
import immortal
from immortal import Immortal, peer, rpc


def rate(item: str) -> int:
    return len(item)


class Bank(Immortal):
    total: int

    def __init__(self) -> None:
        self.total = 0

    @rpc(labels=("order",))
    def charge(self, order: int, cents: int) -> int:
        self.total += cents
        return self.total


class Shop(Immortal):
    bank = peer(Bank, "bank")

    @rpc
    async def ship(self, order: int, item: str) -> str:
        immortal.label(order=order)
        await immortal.effect(rate, item)
        await self.bank.charge(order, 100)
        if not await immortal.event("go", bool):
            raise ValueError("it is refused")
        return f"{item} is shipped"

    @rpc
    def begin(self, order: int, item: str) -> None:
        self.ship.fork(order, item)
"""


def found(folder: Path, name: str, **query: Any) -> dict[str, dict[str, Any]]:
    """By ID, as a command would find them: without the time that each command takes to start."""
    if not (folder / HOME / name / FILE_NAME).exists():
        return {}
    with open_index(folder / HOME / name, name) as index:
        return {one.id: one.plain() for one in index.find(Query(**query))}


def states(folder: Path) -> dict[str, str]:
    return {one["labels"]["order"]: one["state"] for one in found(folder, "shop").values()}


def test_executions_are_found_after_kills_and_changed_by_query(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    for name, app in (("bank", "shop:Bank"), ("shop", "shop:Shop")):
        immortal(tmp_path, "register", name, "--peer", "tcp://127.0.0.1:*", "--app", app)
    assert "'immortal executions shop rebuild'" in immortal(tmp_path, "executions", "shop", status=1)
    bank, shop = Run(tmp_path, "bank", "--restart"), Run(tmp_path, "shop", "--restart")
    try:
        bank.line("ready")
        shop.line("ready")
        with connect("shop", home=tmp_path / HOME) as client:
            for order, item in ((17, "tea"), (18, "rice"), (19, "salt")):
                client.begin(order, item)
        wait_until(lambda: len(found(tmp_path, "bank")) == 3)
        os.kill(int(shop.line("app_pid=").rpartition("app_pid=")[2]), signal.SIGKILL)
        shop.line("ready", 2)
        wait_until(lambda: states(tmp_path) == {"17": "waiting", "18": "waiting", "19": "waiting"})
        said = json.loads(immortal(tmp_path, "executions", "shop", "--where", "order=17", "--json"))
        assert [(one["handler"], one["arguments"]) for one in said] == [("Shop.ship", "(17, 'tea')")]

        said = immortal(tmp_path, "executions", "shop", "cancel", "--where", "order=18", "--dry-run")
        assert "would cancel 1 execution" in said
        assert states(tmp_path)["18"] == "waiting"
        immortal(tmp_path, "executions", "shop", "cancel", "--where", "order=18", given="y\n")
        immortal(tmp_path, "executions", "shop", "signal", "go", "true", "--where", "order=17", "--yes")
        wait_until(lambda: states(tmp_path) == {"17": "ended", "18": "cancelled", "19": "waiting"})
        audit = immortal(tmp_path, "audit", "shop")
        assert "verb=cancel" in audit
        assert "verb=signal" in audit

        (ended,) = found(tmp_path, "shop", where=[("order", "17")])
        listed = executions("shop", where={"order": 17}, state="ended", home=tmp_path / HOME)
        assert [(one.id, one.call, one.labels["order"]) for one in listed] == [(ended, "Shop.ship(17, 'tea')", "17")]
        with pytest.raises(UsageError, match="one of waiting, ended, failed, cancelled, terminated"):
            executions("shop", state="done", home=tmp_path / HOME)
        page = immortal(tmp_path, "executions", "shop", ended)
        assert "call bank.charge gave 100" in page
        assert "Bank.charge(17, 100) ended" in page
        assert "event go gave True" in page
        (child,) = found(tmp_path, "bank", where=[("order", "17")])
        assert "cancel works only for 'async def' handlers" in immortal(
            tmp_path, "executions", "bank", "cancel", child, status=1
        )
        grouped = immortal(tmp_path, "log", "show", "shop", "--by-execution")
        _, _, group = grouped.partition(f"execution {ended}: Shop.ship(17, 'tea'), ended\n")
        lines = list(takewhile(lambda line: line.startswith("    "), group.split("\n")))
        for line, word in zip(lines, ("Shop.ship", "rate(item='tea')", "Bank.charge", "order"), strict=True):
            assert word in line, grouped
        said = immortal(tmp_path, "executions", "bank", child, "--states")
        assert "    total: 0 -> 100" in said
        said = json.loads(immortal(tmp_path, "executions", "shop", ended, "--states", "--json"))["states"]
        assert [one["path"] for one in said["changes"]] == ["$waiting"]
        assert f"shop {ended}: Shop.ship(17, 'tea') ended" in immortal(tmp_path, "executions", "bank", child)

        immortal(tmp_path, "executions", "shop", "signal", "go", "false", "--where", "order=19", "--yes")
        wait_until(lambda: states(tmp_path)["19"] == "failed")
        (failed,) = found(tmp_path, "shop", where=[("order", "19")]).values()
        place = f"{failed['ended_record']}:{failed['ended_message']}"  # as the caller is told
        said = immortal(tmp_path, "executions", "shop", place)
        assert f"execution {failed['id']}: Shop.ship(19, 'salt')" in said
        said = immortal(tmp_path, "executions", "shop", "0:9", status=1)
        assert "'immortal log show shop --from 0 --to 0' shows the record" in said
        said = immortal(tmp_path, "executions", "shop", "restart", ended, "--arguments", '[20, "tea"]', "--yes")
        assert "Shop.ship has begun again, as" in said
        wait_until(lambda: states(tmp_path).get("20") == "waiting")
        said = immortal(
            tmp_path, "executions", "shop", "restart", "--where", "order=17", "--from-step", "2", "--dry-run"
        )
        assert "Shop.ship(17, 'tea')" in said
        assert "would restart 1 execution from step 2" in said
        said = immortal(tmp_path, "executions", "--where", "order=17", "--since", "1h")
        assert "bank" in said
        assert "Shop.ship(17, 'tea')" in said
        assert "there are order" in immortal(tmp_path, "executions", "--where", "ordr=17", status=1)
        assert next(iter(found(tmp_path, "shop", where=[("order", "20")]).values()))["origin"] == ended
        wait_until(lambda: len(found(tmp_path, "bank")) == 4)

        for run in (shop, bank):
            run.kill()
        before = found(tmp_path, "shop")
        assert states(tmp_path) == {"17": "ended", "18": "cancelled", "19": "failed", "20": "waiting"}
        for path in (tmp_path / HOME / "shop").glob(f"{FILE_NAME}*"):
            path.unlink()
        assert "4 executions added" in immortal(tmp_path, "executions", "shop", "rebuild")
        assert found(tmp_path, "shop") == before
        rows = immortal(tmp_path, "sql", "select id, state from executions where instance = 'bank'", "--json")
        assert [json.loads(row)["state"] for row in rows.splitlines()] == ["ended"] * 4
    finally:
        for run in (shop, bank):
            run.kill()
