"""Ranges of keys move between shards: no row is lost or doubled, each caller's calls of a key stay in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import immortal
from immortal import Immortal, peers, query, rpc
from immortal.appsdk.handlers.definition import block_of, range_of
from immortal.testing import Environment, crash_everywhere

KEYS = [f"c{number}" for number in range(12)]


class RefusalError(Exception):
    pass


class Cart(Immortal, keyed=str):
    seen: list[int]

    def __init__(self) -> None:
        self.seen = []

    @rpc(raises=[RefusalError])
    def add(self, number: int) -> int:
        if number < 0:
            raise RefusalError(number)
        self.seen.append(number)
        return len(self.seen)

    @query
    def all(self) -> list[int]:
        return self.seen

    @rpc
    def note(self, number: int) -> None:
        self.add.fork(number)
        immortal.signal("noted", number)

    @rpc
    async def watch(self) -> int:
        return await immortal.event("noted", int)

    @rpc
    def forget(self) -> None:
        immortal.forget_key()


class Shop(Immortal):
    carts = peers(Cart, "carts", shards=2)
    wider = peers(Cart, "carts", shards=4)
    sent: int = 0

    @rpc
    def put(self, who: str) -> None:
        self.sent += 1
        self.carts[who].add.fork(self.sent)

    @rpc
    def put_wide(self, who: str) -> None:
        self.sent += 1
        self.wider[who].add.fork(self.sent)

    @rpc
    async def ask(self, who: str, number: int) -> int:
        return await self.carts[who].add(number)


@pytest.fixture
def env() -> Iterator[Environment]:
    with Environment(fail_alone=True) as made:
        yield made


def owners(carts: Any) -> dict[str, list[int]]:
    """The shards at which each key has a row."""
    return {
        key: found
        for key in KEYS
        if (found := [number for number, one in carts.started.items() if key in one.state.keys])
    }


def test_rows_move_and_calls_find_them(env: Environment) -> None:
    carts, shop = env.start(Cart, "carts", shards=2), env.start(Shop, "shop")
    for count in (4, 3, 1, 2):
        for key in KEYS:
            shop.call(Shop.put, key)
            assert shop.call(Shop.ask, key, 0) > 1
        assert env.change_shards(carts, count) == []
        assert owners(carts) == {key: [block_of(range_of(key), count)] for key in KEYS}
        for key in KEYS:
            shop.call(Shop.put, key)
            assert carts[key].call(Cart.add, 0) == len(carts[key].call(Cart.all))
    for key in KEYS:
        mine = [one for one in carts[key].call(Cart.all) if one]
        assert len(mine) == 8
        assert mine == sorted(mine)
