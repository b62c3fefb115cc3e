"""Ranges of keys move between shards: no row is lost or doubled, each caller's calls of a key stay in order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import immortal
from immortal import Handle, Immortal, Node, peers, query, rpc, upgrades
from immortal.appsdk.calls.outbox import encode_call, make_writer
from immortal.appsdk.client.clients import Proxy
from immortal.appsdk.client.errors import CallRefused
from immortal.appsdk.handlers import moves
from immortal.appsdk.handlers.definition import ELSEWHERE, RANGES, blocks, range_of
from immortal.appsdk.testing.instance import Pending
from immortal.appsdk.testing.outside import OUTSIDE_NAME
from immortal.errors import UsageError
from immortal.protocol import decoding
from immortal.protocol.messages import RpcType
from immortal.protocol.system_methods import CANCEL_CALL_METHOD_ID
from immortal.testing import Environment, crash_everywhere
from tests.helpers.effort import effort

KEYS = [f"c{number}" for number in range(8)]


class RefusalError(Exception):
    pass


class Cart(Immortal, keyed=str):
    seen: list[tuple[str, int]]

    def __init__(self) -> None:
        self.seen = []

    @rpc(raises=[RefusalError])
    def add(self, who: str, number: int) -> int:
        if number < 0:
            raise RefusalError(number)
        self.seen.append((who, number))
        return len(self.seen)

    @query
    def all(self) -> list[tuple[str, int]]:
        return self.seen

    @rpc
    def note(self, number: int) -> None:
        self.add.fork("itself", number)

    @rpc
    def fails(self) -> None:
        self.seen.clear()
        raise ValueError

    @rpc
    def tell(self, number: int) -> None:
        immortal.signal("told", number)

    @rpc
    async def watch(self) -> int:
        return await immortal.event("told", int)


class Shop(Immortal):
    carts = peers(Cart, "carts", shards=2)
    sent: int = 0
    answers: list[int]

    def __init__(self) -> None:
        self.answers = []

    @rpc
    def flood(self, who: str, rounds: int) -> None:
        self.sent += 1
        for key in KEYS:
            self.carts[key].add.fork(who, self.sent)
            if who == "shop":
                self.carts[key].note.fork(self.sent)
        if rounds > 1:
            self.flood.fork(who, rounds - 1)

    @rpc
    async def ask(self, key: str, number: int) -> int:
        return await self.carts[key].add("asks", number)


class WideShop(Shop):
    carts = peers(Cart, "carts", shards=4)


@pytest.fixture
def env() -> Iterator[Environment]:
    with Environment(fail_alone=True) as made:
        yield made


def require_whole(carts: Any, callers: dict[str, int]) -> None:
    """Check that each key is at its shard alone, and has the calls of each caller once and in order."""
    for key in KEYS:
        found = {number: one.state.keys[key] for number, one in carts.started.items() if key in one.state.keys}
        assert list(found) == [blocks(carts.count)[range_of(key)]]
        for caller, count in callers.items():
            seen = [number for who, number in next(iter(found.values())).seen if who == caller]
            assert seen == list(range(1, count + 1)), (key, caller)
    assert [one for shard in carts.instances for one in shard.dead_letters] == []


def test_rows_move_and_calls_find_them(env: Environment) -> None:
    carts, shop = env.start(Cart, "carts", shards=2), env.start(Shop, "shop")
    for count in (4, 3, 1, 2):
        shop.call(Shop.flood, "shop", 1)
        assert env.change_shards(carts, count) == []
        for key in KEYS:
            assert shop.call(Shop.ask, key, 0) == len(carts[key].call(Cart.all))
    require_whole(carts, {"shop": 4})
    with pytest.raises(RefusalError):
        carts.started[1][KEYS[0]].call(Cart.add, "x", -1)


@pytest.mark.parametrize("order", range(2))
def test_calls_stay_in_order_while_ranges_move(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "GIVE_LIMITS", (500, 2000, 1 << 18))
    monkeypatch.setattr(moves, "INDEXED_MAX", 2)
    with Environment(order=order) as env:
        carts, shop, wide = env.start(Cart, "carts", shards=2), env.start(Shop, "shop"), env.start(WideShop, "wide")
        sent = 0

        def send() -> None:
            nonlocal sent
            shop.send(Shop.flood, "shop", 2)
            sent += 2
            if carts.started.keys() >= {3, 4}:
                wide.send(WideShop.flood, "wide", 5)

        for count in (4, 3):
            env.change_shards(carts, count, meanwhile=send)
        env.run()
        require_whole(carts, {"shop": sent, "itself": sent, "wide": wide.state.sent})


def test_a_crash_anywhere_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "INDEXED_MAX", 2)
    for env in crash_everywhere(runs_max=effort(14), order=1):
        with env:
            carts, shop = env.start(Cart, "carts", shards=2), env.start(Shop, "shop")
            env.change_shards(carts, 3, meanwhile=lambda: shop.send(Shop.flood, "shop", 1))  # noqa: B023
            env.run()
            require_whole(carts, {"shop": shop.state.sent, "itself": shop.state.sent})


def test_only_shards_bring_rows(env: Environment) -> None:
    carts = env.start(Cart, "carts", shards=2)
    env.change_shards(carts, 3)
    rows = [(KEYS[0], b"row")]
    take: Any = moves.Moving.immortal_receive
    sent = env._world.outside.call("carts-1", take, (2, 0, [], rows, {}))
    with pytest.raises(immortal.CalleeFailed, match="came from test, and only shards of carts send it"):
        Pending(env._world, carts.started[1].definition, take, sent).result()
    assert list(carts.started[1].state.keys) == []  # type: ignore[attr-defined]


def test_handlers_and_signals_of_a_key(env: Environment) -> None:
    """A key whose handlers wait stays until they have ended; signals that nobody took go with it."""
    carts = env.start(Cart, "carts", shards=2)
    key, other = (one for one in KEYS if blocks(4)[range_of(one)] == 4)
    waits = carts[key].begin(Cart.watch)
    carts[other].call(Cart.tell, 5)
    assert env.change_shards(carts, 4) == [f"watch of {key!r}"]
    assert carts.started[4][key].call(Cart.add, "test", 1) == 1
    assert list(carts.started[2].state.keys) == [key]  # type: ignore[attr-defined]
    assert carts.started[2][other].call(Cart.watch) == 5
    carts.started[4][key].call(Cart.tell, 7)
    assert waits.result() == 7
    assert env.change_shards(carts, 4) == []
    assert list(carts.started[4].state.keys) == [key, other]  # type: ignore[attr-defined]


def test_a_forwarded_call_is_cancelled(env: Environment) -> None:
    carts = env.start(Cart, "carts", shards=2)
    key = next(one for one in KEYS if blocks(4)[range_of(one)] == 4)
    env.change_shards(carts, 4)
    waits = carts.started[2][key].begin(Cart.watch)
    env.run()
    outside = env._world.outside
    cancel = make_writer("cancel", CANCEL_CALL_METHOD_ID, RpcType.ASYNC)
    outside.put("carts-2", encode_call(cancel, (OUTSIDE_NAME, 10_000, waits._number, "no time")))
    with pytest.raises(immortal.CallCancelled, match="no time"):
        waits.result()
    assert decoding.decode(outside.answers[10_000].value) is True


def test_rows_come_from_an_older_version(env: Environment) -> None:
    @upgrades(Cart)
    class Newer(Cart):
        count: int = 0

        @classmethod
        def upgrade(cls, old: Cart) -> Newer:
            new = object.__new__(cls)
            new.seen, new.count = old.seen, len(old.seen)
            return new

    carts = env.start(Cart, "carts", shards=2)
    for key in KEYS:
        carts[key].call(Cart.add, "test", 1)
    steps = 0

    def upgrade() -> None:
        nonlocal steps
        steps += 1
        if steps == 6:  # all have begun
            carts.started[3].upgrade(Newer)

    assert env.change_shards(carts, 3, meanwhile=upgrade) == []
    moved: Any = carts.started[3].state
    assert {one.count for one in moved.keys.values()} == {1}
    with pytest.raises(UsageError, match=r"versions \[1, 2\]: upgrade all of them first"):
        env.change_shards(carts, 2)
    for number in (1, 2):
        carts.started[number].upgrade(Newer)
    assert env.change_shards(carts, 2) == []


def test_an_upgrade_drops_a_handler_with_a_forwarded_call(env: Environment) -> None:
    @upgrades(Cart)
    class Shorter(Immortal, keyed=str):
        seen: list[tuple[str, int]]

        @classmethod
        def upgrade(cls, old: Cart) -> Shorter:
            return object.__new__(cls)

    carts = env.start(Cart, "carts", shards=2)
    key = next(one for one in KEYS if blocks(4)[range_of(one)] == 4)
    env.change_shards(carts, 4)
    waits = carts.started[2][key].begin(Cart.watch)
    env.run()
    carts.started[2].upgrade(Shorter)
    carts.started[4][key].call(Cart.tell, 7)
    assert waits.result() == 7


def test_a_large_range_comes_in_parts(env: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "GIVE_LIMITS", (1024, 7, 500))
    carts = env.start(Cart, "carts", shards=2)
    names = [name for name in map(str, range(20_000)) if blocks(3)[range_of(name)] == 3 and range_of(name) > 4090]
    for name in names:
        carts[name].send(Cart.add, "x" * 30, 1)
    env.change_shards(carts, 3)
    assert list(carts.started[3].state.keys) == sorted(names)  # type: ignore[attr-defined]
    assert carts.started[2].state.keys == {}  # type: ignore[attr-defined]


def test_no_call_hashes_many_keys(env: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "GIVE_LIMITS", (1024, 1, 1 << 18))
    monkeypatch.setattr(moves, "INDEXED_MAX", 2)
    carts = env.start(Cart, "carts", shards=1)
    for key in KEYS:
        carts[key].call(Cart.add, "test", 1)
    show: Any = moves.Moving.immortal_shard
    shown: Any = Pending(env._world, carts.started[0].definition, show, env._world.outside.call("carts", show, ()))
    assert shown.result()["ranges"] == RANGES
    hashed = [0]

    def counting(key: object) -> int:
        hashed[-1] += 1
        return range_of(key)

    monkeypatch.setattr(moves, "range_of", counting)
    assert env.change_shards(carts, 2, meanwhile=lambda: hashed.append(0)) == []
    assert max(hashed) == 2
    assert [one.state.rows_by_range for one in carts.instances] == [None] * 3  # type: ignore[attr-defined]


def test_a_shard_that_missed_moves_learns_them_first(env: Environment) -> None:
    carts = env.start(Cart, "carts", shards=3)
    for count in (2, 1):
        env.change_shards(carts, count)
    assert carts.started[3].state.shards == 2  # type: ignore[attr-defined]
    carts.count = 2  # which it is not
    with pytest.raises(immortal.CalleeFailed, match="shard 1 has other ranges than it has as one of 2 shards"):
        env.change_shards(carts, 3)
    carts.count = 1
    assert env.change_shards(carts, 3) == []
    assert [one.state.shards for one in carts.instances] == [3, 3, 3, 3]  # type: ignore[attr-defined]


class Part(Node):
    used: int = 0

    @rpc
    def use(self) -> int:
        self.used += 1
        return self.used


class Echo(Immortal, keyed=str):
    @rpc
    def echo(self, part: Handle[Part]) -> Handle[Part]:
        return part


class Owner(Immortal, nodes=(Part,)):
    echoes = peers(Echo, "echoes", shards=2)
    parts: list[Handle[Part]]

    def __init__(self) -> None:
        self.parts = []

    @rpc
    def make(self) -> None:
        self.parts.append(immortal.create_node(Part))

    @rpc
    async def pass_on(self, key: str) -> int:
        part = await self.echoes[key].echo(self.parts[0])
        return await part.use()


def test_handles_pass_with_forwarded_calls(env: Environment) -> None:
    echoes, owner = env.start(Echo, "echoes", shards=2), env.start(Owner, "owner")
    key = next(one for one in KEYS if blocks(4)[range_of(one)] == 4)
    owner.call(Owner.make)
    env.change_shards(echoes, 4)
    assert owner.call(Owner.pass_on, key) == 1
    env.run()
    for one in echoes.instances:
        one.crash()
        one.recover()
    assert owner.call(Owner.pass_on, key) == 2


class Refusing:
    """Client of a shard that refuses each query that is not logged."""

    text = ELSEWHERE

    def query(self, *arguments: Any) -> Any:
        raise CallRefused(f"the call was refused: {self.text}")

    def call(self, *arguments: Any) -> Any:
        return 5


class AsyncRefusing(Refusing):
    async def query(self, *arguments: Any) -> Any:
        return super().query()

    async def call(self, *arguments: Any) -> Any:
        return super().call()


def test_a_query_of_a_key_that_has_moved_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    clients: list[Any] = [Refusing(), AsyncRefusing()]
    carts, later = (Proxy(client, None, "carts", None, None)["ann"].query for client in clients)
    assert carts.total() == asyncio.run(later.total()) == 5
    monkeypatch.setattr(Refusing, "text", "something else")
    with pytest.raises(CallRefused, match="something else"):
        carts.total()
    with pytest.raises(CallRefused, match="something else"):
        asyncio.run(later.total())
