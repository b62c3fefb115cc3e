"""Keyed classes: each key has an object of its own; shards divide the keys; what can't be is refused in words."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

import immortal
from immortal import (
    Immortal,
    Impulses,
    Node,
    Table,
    Transient,
    every,
    impulse,
    initial,
    on_primary,
    peer,
    peers,
    query,
    rpc,
    upgrades,
)
from immortal.appsdk.client.clients import Proxy
from immortal.appsdk.determinism.check import check
from immortal.appsdk.handlers.definition import KEY_SIZE_BYTES_MAX, RANGES, definition_of, key_problem, shard_of
from immortal.appsdk.running.options import OptionError, run_options
from immortal.errors import DefinitionError, StateError, UsageError
from immortal.testing import Environment, crash_everywhere


class RefusalError(Exception):
    pass


class Cart(Immortal, keyed=str):
    items: dict[str, int]
    count: int = 0
    label: str = "cart"

    def __init__(self) -> None:
        self.items, self.label = {}, "its own"

    @rpc(raises=[RefusalError])
    def add(self, item: str, n: int = 1, *, then: str = "") -> int:
        if n < 0:
            self.count = n
            raise RefusalError(n)
        self.items[item] = self.items.get(item, 0) + n
        self.count += 1
        if then:
            self.add.fork(then, n)
        immortal.signal("added", item)
        return self.items[item]

    @rpc
    def who(self) -> str:
        return f"{immortal.key()} has {self.total()}"

    @query
    def total(self) -> int:
        return sum(self.items.values())

    @query
    def sets(self) -> None:
        self.count = 5

    @query
    def forgets(self) -> None:
        immortal.forget_key()

    @rpc
    def pay(self) -> int:
        immortal.forget_key()
        return self.total()

    @rpc
    def fails(self, item: str) -> None:
        self.items[item] = 1
        raise ValueError(item)

    @rpc
    def unannotated(self) -> None:
        del self.label  # as many attributes as before
        self.extra = 1

    @rpc(limit=1)
    async def watch(self, number: int) -> list[Any]:
        seen: list[Any] = [immortal.key()]
        for _ in range(number):
            seen.append(await immortal.event("added", str))
        await immortal.step(self.add, "watched")
        await immortal.sleep(timedelta(seconds=5))
        await immortal.step(lambda: self.items.pop("watched"))
        return [*seen, self.items, self.count]

    @rpc
    async def asks_itself(self) -> list[Any]:
        return await self.watch(0)

    @rpc
    async def leaves(self) -> int:
        await immortal.step(immortal.forget_key)
        return len(self.items)


class BigCart(Cart):
    @rpc
    def who(self) -> str:
        return f"big {super().who()}"

    @rpc
    async def asks_itself(self) -> list[Any]:
        return ["big", await immortal.step(super().who), *await super().asks_itself()]


class Shop(Immortal):
    carts = peers(Cart, "carts", shards=3)

    @rpc
    def put(self, who: str, item: str) -> None:
        self.carts[who].add.fork(item, then="bag")

    @rpc
    async def buy(self, who: str, item: str) -> list[Any]:
        self.carts[who].add.fork("wrap")
        return [await self.carts[who].add(item, 2), await self.carts[who].who()]

    @impulse
    def wrong(self, who: Any) -> None:
        self.carts[who].add.fork("tea")

    @rpc
    def without_a_key(self) -> None:
        self.carts.add.fork("ann", "tea")  # type: ignore[attr-defined]

    @rpc
    def to_all(self) -> None:
        immortal.multicast([self.carts["ann"], self.carts["kim"]]).add.fork("tea")

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        impulses.carts["ann"].add("tea")
        impulses.to(self.carts["kim"]).add("tea", 3)


@pytest.fixture
def env() -> Any:
    with Environment(fail_alone=True) as made:
        yield made


def test_each_key_has_its_own_object(env: Environment) -> None:
    carts = env.start(Cart, "carts")
    assert carts["ann"].call(Cart.add, "tea", 2) == 2
    assert carts["bob"].call(Cart.add, "tea", 5, then="jam") == 5
    assert carts["ann"].call(Cart.add, "tea") == 3
    assert carts["ann"].call(Cart.who) == "ann has 3"
    assert carts["bob"].state.items == {"tea": 5, "jam": 5}
    with pytest.raises(RefusalError):
        carts["eve"].call(Cart.add, "tea", -1)
    assert list(carts.state.keys) == ["ann", "bob", "eve"]  # type: ignore[attr-defined]
    assert carts["eve"].state.count == -1  # a declared exception keeps the state


def test_a_query_makes_no_object_and_changes_none(env: Environment) -> None:
    carts = env.start(Cart, "carts")
    carts["ann"].call(Cart.add, "tea")
    assert carts["bob"].call(Cart.total) == 0
    for bad in (Cart.sets, Cart.forgets):
        for key in ("ann", "bob"):
            with pytest.raises(immortal.CalleeFailed, match="only reads"):
                carts[key].call(bad)
    assert {key: one.count for key, one in carts.state.keys.items()} == {"ann": 1}  # type: ignore[attr-defined]


def test_a_failed_call_leaves_no_trace_of_its_key(env: Environment) -> None:
    carts = env.start(Cart, "carts")
    carts["ann"].call(Cart.add, "tea")
    for key in ("ann", "bob"):
        with pytest.raises(immortal.CalleeFailed, match="ValueError: jam"):
            carts[key].call(Cart.fails, "jam")
        with pytest.raises(immortal.CalleeFailed, match="'extra' is set but not annotated"):
            carts[key].call(Cart.unannotated)
    assert {key: one.items for key, one in carts.state.keys.items()} == {"ann": {"tea": 1}}  # type: ignore[attr-defined]


def test_a_forgotten_key_begins_anew(env: Environment) -> None:
    carts = env.start(Cart, "carts")
    carts["ann"].call(Cart.add, "tea", 4)
    assert carts["ann"].call(Cart.pay) == 4
    assert carts.state.keys == {}  # type: ignore[attr-defined]
    carts.crash()
    carts.recover()
    assert carts["ann"].call(Cart.add, "tea", 1) == 1
    assert carts["ann"].call(Cart.leaves) == 0


def test_handlers_of_one_key_wait_apart_from_those_of_another() -> None:
    for env in crash_everywhere(runs_max=12):
        with env:
            carts = env.start(Cart, "carts")
            ann, bob = carts["ann"].begin(Cart.watch, 2), carts["bob"].begin(Cart.watch, 1)
            second = carts["ann"].begin(Cart.watch, 0)  # limit=1 is for each key
            env.run()
            carts["ann"].call(Cart.add, "tea")
            carts.checkpoint()
            assert not ann.done
            carts["bob"].call(Cart.add, "jam")
            assert bob.result() == ["bob", "jam", {"jam": 1}, 2]
            assert not ann.done
            carts["ann"].call(Cart.add, "gin")
            assert ann.result() == ["ann", "tea", "gin", {"tea": 1, "gin": 1}, 3]
            assert second.result() == ["ann", {"tea": 1, "gin": 1}, 4]


def test_a_subclass_calls_what_it_replaces(env: Environment) -> None:
    carts = env.start(BigCart, "carts")
    carts["ann"].call(BigCart.add, "tea")
    assert carts["ann"].call(BigCart.who) == "big ann has 1"
    assert carts["ann"].call(BigCart.asks_itself) == ["big", "ann has 1", "ann", {"tea": 1}, 2]
    plain = BigCart()
    plain.items["tea"] = 3
    assert plain.total() == 3


def test_shards_have_the_keys_between_them(env: Environment) -> None:
    carts, shop = env.start(Cart, "carts", shards=3), env.start(Shop, "shop")
    names = [f"c{number}" for number in range(12)]
    for name in names:
        shop.call(Shop.put, name, "tea")
    assert shop.call(Shop.buy, "c3", "jam") == [2, "c3 has 5"]
    assert {key: one.items["tea"] for key, one in carts.keys.items()} == dict.fromkeys(names, 1)
    for number, one in enumerate(carts.instances, 1):
        assert one.name == f"carts-{number}"
        assert {shard_of(key, 3) for key in one.state.keys} == {number}  # type: ignore[attr-defined]


def test_hooks_call_keys(env: Environment) -> None:
    carts, shop = env.start(Cart, "carts", shards=3), env.start(Shop, "shop")
    shop.run_hook(Shop.feed)
    assert {key: one.items for key, one in carts.keys.items()} == {"ann": {"tea": 1}, "kim": {"tea": 3}}


@pytest.mark.parametrize(
    ("handler", "said"),
    [(Shop.without_a_key, r"self.<peers>\[key\].add\(...\)"), (Shop.to_all, "peers .* were expected")],
)
def test_calls_of_no_key_fail(env: Environment, handler: Any, said: str) -> None:
    env.start(Cart, "carts", shards=3)
    with pytest.raises(immortal.CalleeFailed, match=said):
        env.start(Shop, "shop").call(handler)


def test_the_shard_of_a_key_never_changes() -> None:
    names = [f"key {number}" for number in range(3000)]
    assert [shard_of(name, 3) for name in ("ann", "kim", "joe")] == [1, 2, 3]
    assert shard_of(7, RANGES) == 3971
    counts = [[shard_of(name, 7) for name in names].count(number) for number in range(1, 8)]
    assert sum(counts) == 3000
    assert min(counts) > 350


@pytest.mark.parametrize("handler", [Cart.add, Cart.total, Cart.watch])
def test_a_call_at_the_wrong_shard_is_refused(env: Environment, handler: Any) -> None:
    carts = env.start(Cart, "carts", shards=3)
    wrong = carts.instances[0]["kim"]
    with pytest.raises(immortal.CallRefused, match="carts-1 is shard 1 of 3, and key 'kim' is of shard 2"):
        wrong.call(handler, *(() if handler is Cart.total else ("tea",) if handler is Cart.add else (0,)))
    wrong.send(Cart.add, "tea")
    env.run()
    assert len(carts.instances[0].dead_letters) == 1
    assert carts.keys == {}


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (5, "Expected `str`, got `int`"),
        ("", "a key of 0 bytes came, 1 to 400 were expected"),
        ("k" * 401, "of 401 bytes"),
    ],
)
def test_what_is_no_key_is_refused(env: Environment, key: Any, said: str) -> None:
    carts = env.start(Cart, "carts")
    with pytest.raises(immortal.CallRefused, match=said):
        carts[key].call(Cart.add, "tea")
    assert carts.state.keys == {}  # type: ignore[attr-defined]


def test_a_handler_that_names_no_key_fails(env: Environment) -> None:
    env.start(Cart, "carts", shards=3)
    shop = env.start(Shop, "shop")
    for wrong in (5, "", "k" * 10_000_000, True, None):
        shop.send(Shop.wrong, wrong)
    env.run()
    said = [letter.text for letter in shop.dead_letters]
    assert len(said) == 5
    assert said[0] == "carts[...]: the key 5 came, a key of type str was expected"
    assert "a key of 10,000,000 bytes came, 1 to 400 were expected" in said[2]
    with pytest.raises(TypeError, match=r"^carts\[\.\.\.\]: the key '\\ud800' can't be encoded"):
        vars(Shop)["carts"].shard("\ud800")


def test_peers_are_no_sequence(env: Environment) -> None:
    class Numbered(Immortal, keyed=int):
        pass

    class Caller(Immortal):
        numbers = peers(Numbered, "numbers")

        @rpc
        def look(self) -> bool:
            return 5 in self.numbers  # type: ignore[operator]

        @rpc
        def walk(self) -> int:
            return next(iter(self.numbers))  # type: ignore[call-overload,no-any-return]

    caller = env.start(Caller, "caller")
    for handler in (Caller.look, Caller.walk):
        with pytest.raises(immortal.CalleeFailed, match=r"not iterable|not a container"):
            caller.call(handler)


def test_a_client_says_how_a_key_is_named() -> None:
    shard: Any = None
    carts = Proxy(shard, None, "carts", None, None, shards=(shard, shard))
    with pytest.raises(UsageError, match=r"a call must name the key: carts\[key\]\.add\(\.\.\.\)$"):
        carts.add  # noqa: B018
    with pytest.raises(TypeError, match="not iterable"):
        iter(carts)  # type: ignore[call-overload]


def test_limits_of_keys() -> None:
    assert (
        key_problem(int, 2**63 - 1) == key_problem(int, -5) == key_problem(str, "ä" * (KEY_SIZE_BYTES_MAX // 2)) == ""
    )
    for kind, key in ((int, 2**63), (int, True), (str, "ä" * KEY_SIZE_BYTES_MAX), (str, "\ud800")):
        assert key_problem(kind, key)


def test_another_number_of_shards_is_refused(env: Environment) -> None:
    carts = env.start(Cart, "carts", shards=2)
    carts["ann"].call(Cart.add, "tea")
    one = carts["ann"].instance
    one.stop()
    one._node.definition = replace(definition_of(Cart), shard=(1, 3))
    with pytest.raises(
        StateError, match=r"(?s)began as shard 1 of 2, and is started as 1 of 3; the app stops.*count = 2"
    ):
        one.recover()
    one._node.crash()
    one._node.definition = replace(definition_of(Cart), shard=(1, 2))
    one.recover()
    assert carts["ann"].call(Cart.add, "tea") == 2


def test_int_keys(env: Environment) -> None:
    class Order(Immortal, keyed=int):
        left: int = 10

        @rpc
        def fill(self, n: int) -> int:
            self.left -= n
            return self.left

    orders = env.start(Order, "orders", shards=2)
    assert orders[-(2**62)].call(Order.fill, 3) == 7
    assert orders[17].call(Order.fill, 1) == 9
    for one in orders.instances:
        one.crash()
        one.recover()
    assert {key: one.left for key, one in orders.keys.items()} == {-(2**62): 7, 17: 9}


def test_an_upgrade_is_of_each_key(env: Environment) -> None:
    @upgrades(Cart)
    class Newer(Immortal, keyed=str):
        names: list[str]

        @classmethod
        def upgrade(cls, old: Cart) -> Newer:
            new = object.__new__(cls)
            new.names = sorted(old.items)
            return new

        @rpc
        def all(self) -> list[str]:
            return self.names

    @upgrades(Cart)
    class Same(Cart):
        more: int = 1

    for cls in (Newer, Same):
        carts = env.start(Cart, f"carts {cls.__name__}")
        carts["ann"].call(Cart.add, "tea")
        carts["ann"].call(Cart.add, "jam")
        newer = carts.upgrade(cls)
        if cls is Newer:
            assert newer["ann"].call(Newer.all) == ["jam", "tea"]
        else:
            assert newer["ann"].call(Same.add, "tea") == 2


def test_attributes_that_are_gone_or_new_are_not_lost_silently(env: Environment) -> None:
    class Fewer(Immortal, keyed=str, formerly=("Cart",)):
        items: dict[str, int]
        label: str

    class More(Cart, formerly=("Cart",)):
        size: int

    for cls, said in ((Fewer, "'count', which the class does not annotate any more"), (More, "from before 'size'")):
        carts = env.start(Cart, f"carts {cls.__name__}")
        carts["ann"].call(Cart.add, "tea")
        with pytest.raises(StateError, match=said):
            carts.upgrade(cls)
        carts._node.crash()
        carts.upgrade(Cart)
        assert carts["ann"].call(Cart.add, "tea") == 2


def with_hook() -> None:
    class Bad(Immortal, keyed=str):
        @on_primary
        def feed(self, impulses: Any) -> None: ...

        @initial
        def begin(self) -> None: ...

        @every("1s")
        def tick(self) -> None: ...

        def prepare(self) -> None: ...


def with_node() -> None:
    class Part(Node): ...

    class Bad(Immortal, keyed=str, nodes=(Part,)): ...


def with_other_keys() -> None:
    class Bad(Immortal, keyed=float): ...  # type: ignore[arg-type]


def with_a_parameter_key() -> None:
    class Bad(Immortal, keyed=str):
        @rpc
        def put(self, key: str) -> None: ...


def with_a_cache() -> None:
    class Bad(Immortal, keyed=str):
        cache: Transient[int]


def with_a_table() -> None:
    class Filed(Immortal, keyed=str):
        rows: Table[int, int]


def with_a_shared_default() -> None:
    class Bad(Immortal, keyed=str):
        items: list[int] = []  # noqa: RUF012 (that is what is wrong)


def with_limit_by() -> None:
    class Bad(Immortal, keyed=str):
        @rpc(limit=1, limit_by="item")
        async def buy(self, item: str) -> None: ...


def with_peer() -> None:
    class Bad(Immortal):
        carts = peer(Cart, "carts")


def with_peers() -> None:
    class Bad(Immortal):
        shops = peers(Shop, "shops")


def with_no_shards() -> None:
    class Bad(Immortal):
        carts = peers(Cart, "carts", shards=0)


def with_a_late_peer() -> None:
    class Bad(Immortal):
        carts = peer(lambda: Cart, "carts")

    definition_of(Bad).peers["carts"].resolve()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            with_hook,
            r"no @every \(tick\) and no @on_primary \(feed\) and no @initial \(begin\) and no method 'prepare'",
        ),
        (with_node, "a keyed class has no nodes"),
        (with_other_keys, "str or int was expected"),
        (with_a_parameter_key, "has the key as its argument 'key': rename this one"),
        (with_a_cache, "'cache': a keyed class has no Transient yet"),
        (with_a_table, "a keyed class has no tables"),
        (with_a_shared_default, "mutable default"),
        (with_limit_by, "in a keyed class limit is for each key"),
        (with_peer, r"Cart is a keyed class: peers\(Cart, ...\) was expected"),
        (with_peers, r"Shop is no keyed class: peer\(Shop, ...\) was expected"),
        (with_no_shards, r"shards=0\): a number from 1"),
        (with_a_late_peer, r"Cart is a keyed class: peers\(Cart, ...\) was expected"),
    ],
)
def test_classes_that_can_not_be(make: Callable[[], None], said: str) -> None:
    with pytest.raises(DefinitionError, match=said):
        make()


def test_functions_outside_of_a_keyed_class(env: Environment) -> None:
    class Plain(Immortal):
        @rpc
        def who(self) -> str:
            return str(immortal.key())

    with pytest.raises(UsageError, match="no handler of a keyed class runs here"):
        Plain().who()
    with pytest.raises(UsageError, match="no keyed class"):
        env.start(Plain, "plain")["ann"]
    with pytest.raises(UsageError, match="a keyed class and a number from 1"):
        env.start(Plain, "other", shards=2)


def test_the_shard_comes_from_the_environment() -> None:
    assert run_options(environment={"IMMORTAL_SHARD": "2/3"}).shard == (2, 3)
    assert run_options(environment={"IMMORTAL_SHARD": "3/4/2"}).shard == (3, 4, 2)
    assert run_options(environment={"IMMORTAL_SHARD": "0/1/3"}).shard == (0, 1, 3)
    assert run_options(environment={}).shard is None
    for wrong in ("3", "0/3", "4/3", "a/b", "1/5000", "1/3/3", "0/1", "0/3/1", "3/4/0", "1/3/2/1"):
        with pytest.raises(OptionError, match=r"IMMORTAL_SHARD=.*: which shard of how many was expected, such as 2/3"):
            run_options(environment={"IMMORTAL_SHARD": wrong})


class Late(Immortal, keyed=str):
    at: float = 0.0

    @rpc
    def look(self) -> None:
        self.at = time.time()

    @rpc
    def other(self) -> None:
        immortal.logger.info("looked")


def test_the_check_and_the_log_know_the_handlers_of_a_key(env: Environment, capsys: pytest.CaptureFixture[str]) -> None:
    assert [(one.where, one.what) for one in check(definition_of(Late))] == [
        ("Late.look", "calls time.time(), which differs at each replay")
    ]
    env.start(Late, "late")["ann"].call(Late.other)
    assert "looked  handler=Late.other record=1:0" in capsys.readouterr().err
