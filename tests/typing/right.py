"""Right uses: a type checker has nothing to say. It is checked, never run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from typing import assert_type

from pydantic_ai import Agent, RunContext
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

import immortal
from immortal import (
    Handle,
    Immortal,
    Impulses,
    Node,
    Retry,
    Winner,
    cron,
    every,
    impulse,
    initial,
    on_primary,
    peer,
    peers,
    query,
    register_type,
    rpc,
    upgrades,
)
from immortal.appsdk.integrations.asgi import progress
from immortal.client import connect, connect_keys, with_key, with_timeout
from immortal.embedded import run, start
from immortal.integrations.asgi import ImmortalMiddleware, Service
from immortal.integrations.pydantic_ai import ImmortalDurability, run_step
from immortal.patterns.groups import Grouped, group
from immortal.testing import Environment, Instance, Pending, assert_replays, crash_everywhere


class InsufficientFundsError(Exception):
    pass


def fetch(url: str, *, times: int = 1) -> bytes:
    return b""


async def ping(number: int) -> float:
    return 1.0


class Bank(Immortal):
    accounts: dict[str, int]

    def __init__(self) -> None:
        self.accounts = {}

    @rpc(raises=[InsufficientFundsError])
    def debit(self, account: str, amount: int = 1) -> int:
        return self.accounts[account] - amount

    @rpc
    def rename(self, old: str, *, _new: str = "") -> None:
        self.accounts[old] = self.debit(old)
        assert_type(self.debit(old, 3), int)

    @rpc
    async def quote(self, account: str) -> float:
        return 1.0

    @query
    def balance(self, account: str) -> int:
        assert_type(self.total(), int)
        return self.accounts[account]

    @query(raises=[InsufficientFundsError], id=7)
    def total(self, above: int = 0) -> int:
        return sum(self.accounts.values())


def asks() -> None:
    with connect(Bank, "bank") as bank:
        assert_type(bank.query.total(above=3), int)
        assert_type(with_timeout(bank, 2.0).query.balance("ann"), int)


async def asks_and_waits() -> None:
    async with connect(Bank, "bank") as bank:
        assert_type(await bank.query.total(3), int)


class Teller(Immortal):
    bank = peer(Bank, "bank")
    late = peer(lambda: Bank, "late")
    other_teller = peer(lambda: Teller, "other")
    moved: int

    def __init__(self) -> None:
        self.moved = 0

    @initial
    def begin(self) -> None:
        self.bank.debit.fork("ann", amount=2)
        self.later.fork(1)

    @rpc
    def later(self, amount: int) -> None:
        self.bank.rename.fork("ann")
        self.transfer.fork("ann", amount)
        immortal.signal("approved", True)

    @rpc
    def keep(self, amount: int) -> int:
        return amount

    @impulse
    async def transfer(self, account: str, amount: int) -> bool:
        assert_type(await self.bank.debit(account, amount), int)
        assert_type(await self.late.quote(account), float)
        assert_type(await self.other(account), str)
        assert_type(await self.bank.balance(account), int)
        assert_type(await self.bank.total(above=3), int)
        assert_type(await asyncio.gather(self.bank.debit(account), self.bank.quote(account)), tuple[int, float])
        same: Winner[int] = await immortal.race(self.bank.debit(account), self.bank.debit(account, 2))
        assert_type(same.value, int)
        first = await immortal.race(self.bank.debit(account), self.bank.quote(account), immortal.event("x", str))
        assert_type(first.value, int | float | str)
        if first.index == 1:
            assert_type(first.value, float)
        timed = await immortal.race(self.bank.debit(account), immortal.sleep(timedelta(hours=1)))
        either: Winner[int | None] = timed
        assert_type(either.value, int | None)
        if timed.index == 1:
            assert_type(timed.value, None)
        else:
            assert_type(timed.value, int)
        assert_type(await immortal.event("approved", bool), bool)
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            kept = group.create_task(immortal.step(self.keep, 5))
            noted = group.create_task(immortal.effect(fetch, "x"))
            group.create_task(immortal.sleep(timedelta(seconds=1)))
        assert_type(kept.result(), int)
        assert_type(noted.result(), bytes)
        assert_type(await asyncio.wait_for(self.bank.quote(account), 5), float)
        assert_type(await immortal.step(lambda: self.moved), int)
        await immortal.sleep(timedelta(seconds=1))
        await immortal.at(immortal.now() + timedelta(days=1))
        assert_type(await immortal.effect(fetch, "x", times=2), bytes)
        careful = immortal.effect.options(
            retry=Retry(attempts=3), timeout=timedelta(seconds=5), raises=[KeyError], key="x"
        )
        assert_type(await asyncio.gather(careful(ping, 5), careful(fetch, url="x")), tuple[float, bytes])
        self.bank.debit.fork(account, amount)
        both = immortal.multicast([self.bank, self.late])
        both.debit.fork(account, amount=2)
        assert_type(await both.quote.all(account), tuple[float, ...])
        immortal.multicast([self.other_teller, type(self)]).later.fork(3)
        if amount:
            return immortal.continue_as(account, 0)
        return True

    @rpc
    async def other(self, account: str) -> str:
        return account

    @every("10m")
    def tick(self) -> None:
        self.moved += 1

    @cron("0 3 * * *", tz="Europe/Berlin")
    async def nightly(self) -> None:
        await self.other("x")

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        impulses.line("untyped")
        impulses.to(self).transfer("ann", 1)
        impulses.to(self.bank).debit("ann", 4)
        impulses.flush(5.0)
        assert_type(Bank.debit(Bank(), "ann", 5), int)


@upgrades(Teller)
class Teller2(Immortal, checkpoint="fork"):
    bank = peer(Bank, "bank")

    @classmethod
    def upgrade(cls, old: Teller) -> Teller2:
        return cls()


def test_transfer(immortal_env: Environment) -> None:
    bank = immortal_env.start(Bank, "bank", effects={fetch: lambda url, times: b"", ping: fetch})
    teller = immortal_env.start(Teller, "teller")
    assert_type(bank, Instance[Bank])
    assert_type(bank.call(Bank.debit, "ann", 5), int)
    assert_type(bank.call(Bank.debit, "ann", amount=5), int)
    assert_type(bank.call(Bank.quote, "ann"), float)
    assert_type(bank.call(Bank.balance, "ann"), int)
    assert_type(teller.begin(Teller.transfer, "ann", 5), Pending[bool])
    assert_type(teller.begin(Teller.transfer, "ann", 5).result(patience=timedelta(days=1)), bool)
    teller.send(Teller.later, 1)
    assert_type(bank.state.accounts, dict[str, int])
    immortal_env.advance(hours=3, minutes=0.5)
    immortal_env.skip(days=2)
    bank.crash()
    bank.recover()
    teller.run_hook(Teller.feed)
    assert_type(teller.upgrade(Teller2), Instance[Teller2])
    immortal_env.partition(bank, teller)
    assert_replays("golden.log", Bank)


def everywhere() -> Iterator[Environment]:
    for env in crash_everywhere(victims=["app"], runs_max=10):
        with env as same:
            assert_type(same, Environment)
        yield env


web_bank = Service(Bank, "bank", timeout=5.0, calls_max=10)
web_other = Service("other")
app = Starlette(middleware=[Middleware(ImmortalMiddleware, services=[web_bank, web_other], statuses={KeyError: 404})])
app.add_middleware(ImmortalMiddleware, services=[web_bank], key_scope=lambda request: request.url.path)


async def serve(request: Request) -> Response:
    assert_type(web_bank, Service[type[Bank]])
    assert_type(await web_bank(request).debit("ann"), int)
    assert_type(await web_bank(request).quote("ann"), float)
    assert_type(await with_key(web_bank(request), "order-5").balance("ann"), int)
    assert_type(await with_timeout(web_bank(request), 2.5).debit("ann", amount=3), int)
    web_bank(request).rename.fork("ann")
    await web_other(request).anything(1, 2)

    async def entries(after: int) -> list[str]:
        return []

    return await progress(request, entries, is_last=lambda entry: entry == "end", pause_max=0.5)


assistant = Agent("test", deps_type=str, output_type=int, capabilities=[ImmortalDurability[str](tool_retry=Retry())])


@assistant.tool(metadata={"immortal": False})
async def wait_for(ctx: RunContext[str], number: int) -> float:
    return await ping(number)


class Assistant(Immortal):
    @rpc
    async def ask(self, question: str) -> int:
        result = await assistant.run(question, deps="x")
        assert_type(result.output, int)
        first = await immortal.race(assistant.run(question, deps="x"), immortal.sleep(timedelta(minutes=1)))
        if first.index == 0:
            assert_type(first.value.output, int)
        return result.output


def test_assistant(immortal_env: Environment) -> None:
    assistant = immortal_env.start(Assistant, "assistant", effects={run_step: run_step})
    assert_type(assistant.call(Assistant.ask, "x"), int)


class Money:
    def __init__(self, cents: int) -> None:
        self.cents = cents


def cents(money: Money) -> int:
    return money.cents


register_type(Money, encode=cents, decode=Money, form=int)


class Limited(Immortal):
    @rpc(timeout=timedelta(seconds=5), limit=3, limit_by="account")
    async def slowly(self, account: str) -> int:
        return len(account)


def in_one_process() -> None:
    with start(Bank, "bank", log_level="info") as bank:
        assert_type(bank.running, bool)
        assert_type(bank.stop(), int)
    run(Bank, "bank", home="elsewhere")


class Order(Node):
    left: int

    def __init__(self, text: str, size: int = 1) -> None:
        self.left = size

    @rpc
    def fill(self, count: int) -> int:
        assert_type(self.fill(1), int)
        self.fill.fork(2)
        return self.left


class Exchange(Immortal, nodes=(Order,)):
    teller = peer(Teller, "teller")
    orders: dict[str, Handle[Order]]

    def __init__(self) -> None:
        self.orders = {}

    @rpc
    def open(self, text: str) -> Handle[Order]:
        handle = immortal.create_node(Order, text, size=3)
        assert_type(handle, Handle[Order])
        self.orders[text] = handle
        assert_type(immortal.node_of(handle), Order)
        assert_type(immortal.revoke(handle), Handle[Order])
        immortal.revoke(handle, self.teller)
        assert_type(immortal.holders_of(handle), list[str])
        immortal.destroy(handle)
        return handle

    def on_last_release(self, handle: Handle[Order]) -> None:
        immortal.destroy(handle)


class Trader(Immortal):
    exchange = peer(Exchange, "exchange")

    @rpc
    def take(self, order: Handle[Order], others: list[Handle[Order]]) -> None:
        order.fill.fork(3)
        immortal.multicast([order, *others]).fill.fork(count=2)
        immortal.release_handle(order)

    @rpc
    async def finish(self, order: Handle[Order]) -> int:
        assert_type(await order.fill(3), int)
        assert_type(await immortal.multicast([order]).fill.all(1), tuple[int, ...])
        assert_type(await self.exchange.open("x"), Handle[Order])
        return await order.fill(4)


class Floor(Grouped):
    prices = group(lambda: Floor, "prices", members=["b1", "b2"])

    @rpc
    def place(self, order: str, count: int = 1) -> int:
        self.prices.place.fork(order, count=2)
        return count

    @rpc
    async def enter(self) -> None:
        assert_type(await self.prices.join(), None)
        assert_type(await self.prices.place.all("x"), tuple[int, ...])
        assert_type(await self.prices.leave(), None)


class Broker(Grouped):
    prices = group(Floor, "prices", members=["b1", "b2"])

    @rpc
    def trade(self, order: str) -> None:
        self.prices.place.fork(order)


class Cart(Immortal, keyed=str):
    items: dict[str, int]

    @rpc
    def add(self, item: str, n: int = 1) -> int:
        assert_type(self.add(item), int)
        return n


class Shop(Immortal):
    carts = peers(Cart, "carts", shards=3)
    late = peers(lambda: Cart, "late")

    @rpc
    async def order(self, who: str) -> int:
        self.carts[who].add.fork("tea", n=2)
        return await self.late[who].add("tea")


async def keys() -> None:
    with connect_keys(Cart, "carts") as carts:
        assert_type(carts["ann"].add("tea"), int)
        assert_type(with_key(carts["ann"], "once").add("tea"), int)
    async with connect_keys(Cart, "carts", timeout=2.0) as later:
        assert_type(await later["ann"].add("tea"), int)
    with Environment() as env:
        assert_type(env.start(Cart, "carts", shards=3)["ann"].call(Cart.add, "tea"), int)
        assert_type(env.start(Cart, "one")["ann"].state.items, dict[str, int])
