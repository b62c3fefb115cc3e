"""Three shards of a keyed class and their caller under kill -9: each key's books have each call once."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from immortal.appsdk.handlers.definition import shard_of
from immortal.client import connect
from tests.helpers.cli import DEADLINE_S
from tests.helpers.effort import effort
from tests.helpers.projects import immortal, make_project

CALLS, KILLS = 60, effort(4)
KEYS = [f"customer {number}" for number in range(9)]

SOURCE = """
import immortal
from immortal import Immortal, peers, query, rpc


class Cart(Immortal, keyed=str):
    items: dict[str, int]

    def __init__(self) -> None:
        self.items = {}

    @rpc
    def add(self, item: str, n: int) -> int:
        self.items[item] = self.items.get(item, 0) + n
        return self.items[item]

    @query
    def all(self) -> dict[str, int]:
        return self.items


class Shop(Immortal):
    carts = peers(Cart, "carts", shards=3)

    @rpc
    async def order(self, who: str, item: str) -> int:
        self.carts[who].add.fork("wrap", 1)
        return await self.carts[who].add(item, 2)
"""

PROJECT = """
[services.carts]
app = "shop:Cart"
count = 3

[services.shop]
app = "shop:Shop"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    make_project(tmp_path, SOURCE, PROJECT)
    immortal(tmp_path, "up", "--timeout-s", "180")
    yield tmp_path
    immortal(tmp_path, "down")


def children_of(instance: Path) -> list[int]:
    """The processes of a running instance's coordinator and app, as far as they live now."""
    pid = json.loads((instance / "supervisor.json").read_text())["pid"]
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.timeout(300)
def test_each_call_reaches_its_key_once(folder: Path) -> None:
    home, rng = folder / ".immortal", random.Random(6)
    expected: dict[str, Counter[str]] = {}
    with connect("shop", home=home, timeout=DEADLINE_S) as shop:
        for number in range(CALLS):
            who, item = rng.choice(KEYS), rng.choice(["tea", "jam"])
            shop.order.fork(who, item)
            expected.setdefault(who, Counter()).update({item: 2, "wrap": 1})
            if number % (CALLS // KILLS) == 0:
                name = rng.choice(["carts-1", "carts-2", "carts-3", "shop"])
                if pids := children_of(home / name):  # none between a death and a start
                    os.kill(rng.choice(pids), signal.SIGKILL)
    with connect("carts", home=home, timeout=DEADLINE_S) as carts:
        assert {who: carts[who].all() for who in expected} == expected
        assert carts["nobody"].query.all() == {}
    said = immortal(folder, "call", f"carts[{KEYS[0]}]", "all", "--query")
    assert said.startswith("{")
    assert "'shop' has no keys" in immortal(folder, "call", "shop[ann]", "order", "tea", status=1)
    other = next(one for one in KEYS if shard_of(one, 3) != 1)
    assert "is shard 1 of 3" in immortal(folder, "call", "carts-1", "add", other, "tea", "1", status=1)
