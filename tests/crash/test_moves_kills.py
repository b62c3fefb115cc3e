"""Keys move from 2 shards to 4 and to 3 while calls go on, under kill -9: each call is executed once and in order."""

from __future__ import annotations

import json
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from immortal.client import connect
from immortal.coordinator.project.project import Project
from tests.crash.test_keyed_kills import children_of
from tests.helpers.cli import DEADLINE_S
from tests.helpers.effort import effort
from tests.helpers.projects import immortal, make_project

KEYS = [f"customer {number}" for number in range(9)]
CALLS = 40

SOURCE = """
from immortal import Immortal, peers, query, rpc


class Cart(Immortal, keyed=str):
    seen: list[tuple[str, int]]

    def __init__(self) -> None:
        self.seen = []

    @rpc
    def add(self, who: str, number: int) -> int:
        self.seen.append((who, number))
        return len(self.seen)

    @query
    def all(self) -> list[tuple[str, int]]:
        return self.seen


class Shop(Immortal):
    carts = peers(Cart, "carts", shards=2)

    @rpc
    async def order(self, key: str, number: int) -> int:
        self.carts[key].add.fork("fork", number)
        return await self.carts[key].add("await", number)
"""

PROJECT = """
[services.carts]
app = "shop:Cart"
count = 2

[services.shop]
app = "shop:Shop"
"""


@pytest.mark.timeout(300)
def test_each_call_is_executed_once_and_in_order(tmp_path: Path) -> None:
    make_project(tmp_path, SOURCE, PROJECT)
    home, rng = tmp_path / ".immortal", random.Random(8)
    immortal(tmp_path, "up", "--timeout-s", "180")
    try:
        with (
            connect("shop", home=home, timeout=DEADLINE_S) as shop,
            connect("carts", home=home, timeout=DEADLINE_S) as carts,
            ThreadPoolExecutor(1) as threads,
        ):
            sent = 0
            for count in (4, 3):
                move = threads.submit(
                    immortal, tmp_path, "shards", "carts", "--count", str(count), "--timeout-s", "180"
                )
                kills = effort(3)
                while not move.done() or kills > 0:
                    sent += 1
                    for key in KEYS:
                        shop.order.fork(key, sent)
                    assert carts[KEYS[sent % len(KEYS)]].add("client", sent) > 0
                    assert carts[KEYS[sent % len(KEYS)]].query.all()
                    if kills > 0 and sent % 4 == 0:
                        kills -= 1
                        names = sorted(one.parent.name for one in home.glob("carts-*/supervisor.json"))
                        if pids := children_of(home / rng.choice(names)):  # none between a death and a start
                            os.kill(rng.choice(pids), signal.SIGKILL)
                move.result()
            shop.order(KEYS[0], sent + 1)
        with connect("carts", home=home, timeout=DEADLINE_S) as carts:
            for place, key in enumerate(KEYS):
                seen = carts[key].all()
                for who in ("fork", "await"):
                    wanted = list(range(1, sent + 1 + (key == KEYS[0])))
                    assert [number for one, number in seen if one == who] == wanted, (key, who)
                mine = [number for number in range(1, sent + 1) if number % len(KEYS) == place]
                assert [number for one, number in seen if one == "client"] == mine
        found = json.loads(immortal(tmp_path, "shards", "carts", "--json"))
        assert [(one["name"], one["ranges"], one["shards"]) for one in found] == [
            ("carts-1", 1366, 3),
            ("carts-2", 1365, 3),
            ("carts-3", 1365, 3),
        ]
        assert Project(tmp_path / "immortal.toml").table("carts").leaving == ("carts-4",)
    finally:
        immortal(tmp_path, "down")
