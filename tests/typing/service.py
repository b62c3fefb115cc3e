"""A service as people write them: nothing to say for mypy without its plugin, nor for pyright at its strictest."""

# pyright: strict

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from typing import assert_type

import immortal
from immortal import Immortal, Impulses, Retry, every, impulse, initial, on_primary, peer, rpc
from immortal.client import Connector, connect, start, with_key, with_timeout
from immortal.patterns import clone, harmony, pirate, queue


class CardRefusedError(Exception):
    pass


class SoldOutError(Exception):
    pass


@dataclass
class Order:
    number: int
    item: str
    cents: int
    paid: bool = False


def charge(customer: str, cents: int) -> str:
    return f"{customer} {cents}"


async def mail(customer: str, text: str) -> None:
    print(customer, text)


class Stock(Immortal):
    there: dict[str, int]

    def __init__(self) -> None:
        self.there = {}

    @rpc(raises=[SoldOutError])
    def take(self, item: str, count: int = 1) -> int:
        left = self.there.get(item, 0) - count
        if left < 0:
            raise SoldOutError(item)
        self.there[item] = left
        return left

    @rpc
    def give_back(self, item: str) -> None:
        self.there[item] = self.there.get(item, 0) + 1

    @rpc
    async def reserve(self, item: str, duration: timedelta) -> bool:
        try:
            await immortal.step(self.take, item)
        except SoldOutError:
            return False
        await immortal.sleep(duration)
        await immortal.step(self.give_back, item)
        return True


class Shop(Immortal):
    stock = peer(Stock, "stock")
    orders: dict[int, Order]
    next_number: int
    reports: list[tuple[int, int]]

    def __init__(self) -> None:
        self.orders = {}
        self.next_number = 1
        self.reports = []

    @initial
    def begin(self) -> None:
        self.note.fork("begun")

    @rpc
    def enter(self, item: str, cents: int) -> Order:
        order = self.orders[self.next_number] = Order(self.next_number, item, cents)
        self.next_number += 1
        return order

    @rpc
    def pay(self, number: int) -> None:
        self.orders[number].paid = True

    @rpc
    def cancel(self, number: int) -> Order | None:
        return self.orders.pop(number, None)

    @rpc
    def totals(self) -> tuple[int, int]:
        return len(self.orders), sum(order.cents for order in self.orders.values())

    @rpc
    def note(self, text: str, level: int = 0) -> None:
        print(level, text)

    @rpc(raises=[CardRefusedError, SoldOutError])
    async def buy(self, customer: str, item: str, cents: int) -> str:
        order = await immortal.step(self.enter, item, cents)
        assert_type(order, Order)
        try:
            left = await self.stock.take(item)
            assert_type(left, int)
            receipt = await immortal.effect.options(retry=Retry(attempts=3), raises=[CardRefusedError])(
                charge, customer, cents
            )
            assert_type(receipt, str)
        except CardRefusedError:
            assert_type(await immortal.step(self.cancel, order.number), Order | None)
            self.stock.give_back.fork(item)
            raise
        await asyncio.gather(immortal.step(self.pay, order.number), immortal.effect(mail, customer, receipt))
        await immortal.step(self.note, "sold", level=1)
        return receipt

    @rpc
    async def count(self) -> int:
        orders, cents = await immortal.step(self.totals)
        assert_type(cents, int)
        first = await immortal.race(immortal.step(self.totals), immortal.step(self.totals))
        assert_type(first.value, tuple[int, int])
        both = await asyncio.gather(immortal.step(self.totals), self.buy("ann", "book", 5))
        assert_type(both, tuple[tuple[int, int], str])
        assert_type(await self.buy("ann", "book", 5), str)
        return orders

    @every("10m")
    async def report(self) -> None:
        await immortal.step(self.add_report, await immortal.step(self.totals))

    @rpc
    def add_report(self, totals: tuple[int, int]) -> None:
        self.reports.append(totals)
        assert_type(self.totals(), tuple[int, int])

    @impulse
    def clicked(self, item: str) -> None:
        self.buy.fork("bob", item, 100)

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        impulses.to(self).clicked("book")


def plain() -> None:
    with connect(Shop, "shop", timeout=5.0) as shop:
        assert_type(shop.totals(), tuple[int, int])
        assert_type(shop.cancel(5), Order | None)
        shop.note.fork("hello", level=2)
        shop.buy.fork("ann", "book", 100)
        assert_type(with_key(shop, "order-5").enter("book", 5), Order)
        assert_type(start(shop.cancel, 5).result(), Order | None)
        assert_type(start(shop.buy, "ann", "book", cents=100).result(2.5), str)
        assert_type(start(with_key(shop, "order-5").enter, "book", 5).cancel("late"), bool)


def length(request: pirate.Request) -> bytes:
    request.rows[b"last"] = request.body
    assert_type(request.rows.get(b"last"), bytes | None)
    return b"%d" % len(request.body)


def pooled() -> None:
    pirate.serve(length, "tcp://127.0.0.1:*", store="store")
    with pirate.connect(["tcp://127.0.0.1:5701"], policy=pirate.Policy(tries=5)) as pool:
        assert_type(pool.request(b"hello", timeout=None), bytes)
    with pirate.connect_instances(Shop, "shop-*") as shops:
        assert_type(shops.totals(), tuple[int, int])
        assert_type(with_key(shops, "order-5").enter("book", 5), Order)


async def pooled_and_awaited() -> None:
    async with pirate.connect(["tcp://127.0.0.1:5701"]) as pool:
        assert_type(await pool.request(b"hello", timeout=2.5), bytes)
    async with pirate.connect_instances(Shop, ["shop-1", "shop-2"]) as shops:
        assert_type(await shops.totals(), tuple[int, int])


def queued() -> None:
    with queue.connect("jobs") as jobs:
        assert_type(jobs.submit("length", ["abc"], returns=int, priority=5, delay=2.5).result(30), int)
        assert_type(jobs.task(5, returns=str), queue.Job[str])
        jobs.limit("length", running=2, starts=100, per=60)
    queue.work("jobs", {"length": len}, heartbeat=0.5)


async def queued_and_awaited() -> None:
    async with queue.connect("jobs") as jobs:
        job = await jobs.submit("length", ["abc"], returns=int, dedup="order-5")
        assert_type(await job.result(), int)


async def awaited() -> None:
    connector = connect(Shop, "shop")
    assert_type(connector, Connector[Shop, type[Shop]])
    async with connector as shop:
        assert_type(await shop.totals(), tuple[int, int])
        assert_type(await shop.buy("ann", "book", 100), str)
        started = await start(shop.buy, "ann", "book", 100)
        assert_type(await started.result(), str)
        assert_type(await (await start(shop.totals)).result(), tuple[int, int])
        assert_type(await with_timeout(shop, 2.5).cancel(5), Order | None)
        shop.note.fork("hello", level=2)


def piped() -> None:
    with harmony.connect("cluster") as cluster:
        batch = cluster.batch("squares", "square", collector="results")
        batch.send(range(5), report=print)
        assert_type(batch.progress(), harmony.Progress)
        assert_type([result.number for result in batch.results(timeout=5)], list[int])
    harmony.worker("cluster", {"square": abs}, task_timeout_s=2)


def cloned() -> None:
    with clone.connect("prices", float, subtrees=["stocks"], policy="disconnect") as prices:
        assert_type(prices["stocks/ACME"], float)
        assert_type(prices.put("stocks/ACME", 12.5, ttl=5), int)
        assert_type(prices.snapshot(), tuple[int, dict[str, float]])
        assert_type([change.value for change in prices.changes(timeout=1)], list[float | None])
        assert_type(prices.get("bonds"), float | None)


async def cloned_later() -> None:
    async with clone.connect("prices", float) as prices:
        assert_type(prices["stocks/ACME"], float)
        assert_type(await prices.put("stocks/ACME", 12.5), int)
        async for change in prices.changes(timeout=1):
            assert_type(change.value, float | None)
