"""Wrong uses: a type checker finds each line that is marked, and no other. It is checked, never run."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from pydantic_ai import Agent
from starlette.requests import Request

import immortal
from immortal import Handle, Immortal, Impulses, Node, impulse, on_primary, peer, query, register_type, rpc, upgrades
from immortal.appsdk.integrations.asgi import progress
from immortal.client import connect
from immortal.embedded import run, start
from immortal.integrations.asgi import Service
from immortal.integrations.pydantic_ai import ImmortalDurability
from immortal.patterns import clone, harmony, pirate, queue
from immortal.patterns.groups import Grouped, group
from immortal.testing import Environment, assert_replays, crash_everywhere


def fetch(url: str) -> bytes:
    return b""


class Bank(Immortal):
    accounts: dict[str, int]

    @rpc
    def debit(self, account: str, amount: int = 1) -> int:
        return amount

    @rpc
    async def quote(self, account: str) -> float:
        return 1.0

    @query
    def balance(self, account: str) -> int:
        return 1

    @query(on_error="keep")  # wrong: of a query nothing is kept
    def total(self) -> int:
        return 1


class Teller(Immortal):
    bank = peer(Bank, "bank")

    @rpc
    def forks(self) -> None:
        self.bank.debit.fork(5)  # wrong: an int for a str
        self.bank.debit.fork()  # wrong: too few
        self.bank.debit.fork("ann", 1, 2)  # wrong: too many
        self.bank.debit.fork("ann", much=1)  # wrong: no such parameter
        self.bank.credit.fork("ann")  # wrong: no such method
        self.forks.fork("ann")  # wrong: of one's own, too many
        self.bank.debit.fork("ann")

    @rpc
    def plain(self) -> None:
        number: int = self.bank.debit("ann")  # wrong: an answer is awaited
        text: str = self.own(1)  # wrong: another type
        self.own("a")  # wrong: a str for an int
        print(number, text)

    @rpc
    def own(self, number: int) -> int:
        return number

    @impulse
    async def awaits(self, account: str) -> bool:
        text: str = await self.bank.debit(account)  # wrong: the result is an int
        await self.bank.debit(account, "5")  # wrong: a str for an int
        await self.bank.credit(account)  # wrong: no such method
        balance: str = await self.bank.balance(account)  # wrong: the result is an int
        await self.bank.balance(5)  # wrong: an int for a str
        half: int = await self.bank.quote(account)  # wrong: the result is a float
        also: int = await self.other(account)  # wrong: the result is a str
        pair: tuple[int, int] = await asyncio.gather(  # wrong: a float
            self.bank.debit(account), self.bank.quote(account)
        )
        first: str = (await immortal.race(self.bank.debit(account), self.bank.debit(account))).value  # wrong: an int
        event: str = await immortal.event("approved", bool)  # wrong: a bool
        await immortal.sleep(5)  # wrong: no timedelta
        await immortal.at(timedelta(days=1))  # wrong: no datetime
        text = await immortal.effect(fetch, "x")  # wrong: the result is bytes
        await immortal.effect(fetch, 5)  # wrong: an int for a str
        await immortal.effect(fetch)  # wrong: too few
        await immortal.effect.options(timeout=5)(fetch, "x")  # wrong: no timedelta
        immortal.signal(5, True)  # wrong: the name is no str
        await immortal.event(5, bool)  # wrong: the name is no str
        print(text, half, also, pair, first, event, balance)
        return 5  # wrong: no bool

    @rpc
    async def other(self, account: str) -> str:
        return account

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        impulses.to(self).awaits(5)  # wrong: an int for a str
        impulses.to(self.bank).debit("ann", "5")  # wrong: a str for an int
        impulses.flush("now")  # wrong: no number


@upgrades(int)  # wrong: no app
class Teller2(Immortal):
    pass


def from_outside() -> None:
    with connect(Bank, "bank") as bank:
        bank.query.balance(5)  # wrong: an int for a str
        bank.query.nothing()  # wrong: no such query
        bank.debit.fork(5)  # wrong: an int for a str
        bank.debit("ann", "5")  # wrong: a str for an int
        bank.credit("ann")  # wrong: no such method
        text: str = bank.debit("ann")  # wrong: the result is an int
        print(text)


def from_a_pool() -> None:
    with pirate.connect(["tcp://127.0.0.1:5701"]) as pool:
        pool.request("hello")  # wrong: a str for bytes
        pool.request(b"hello", timeout="5")  # wrong: a str for a number
        size: str = pool.request(b"hello")  # wrong: the reply is bytes
    with pirate.connect_instances(Bank, "bank-*") as banks:
        banks.debit(5)  # wrong: an int for a str
        banks.credit("ann")  # wrong: no such method
    pirate.serve(len, "tcp://127.0.0.1:*")  # wrong: no function of a request
    print(size)


def from_a_queue() -> None:
    with queue.connect("jobs") as jobs:
        jobs.submit("length", ["abc"], priority="high")  # wrong: a str for a number
        jobs.submit("length", ["abc"], prio=5)  # wrong: no such option
        text: str = jobs.submit("length", ["abc"], returns=int).result()  # wrong: the result is an int
        print(text)
    queue.work("jobs", len)  # wrong: functions have names


def from_a_pipeline() -> None:
    with harmony.connect("cluster") as cluster:
        cluster.batch("squares", "square")  # wrong: no collector
        batch = cluster.batch("squares", "square", collector="results")
        batch.send(5)  # wrong: one task for many
        number: str = next(batch.results()).number  # wrong: it is an int
        print(number)
    harmony.worker("cluster", abs)  # wrong: functions have names


def from_a_clone() -> None:
    with clone.connect("prices", float, policy="never") as unknown:  # wrong: no such policy
        print(unknown)
    with clone.connect("prices", float) as prices:
        prices.put("stocks/ACME", "much")  # wrong: a str for a float
        text: str = prices["stocks/ACME"]  # wrong: it is a float
        print(text)


async def from_asyncio() -> None:
    async with connect(Bank, "bank") as bank:
        bank.quote.fork(5)  # wrong: an int for a str
        bank.debit.step("ann")  # wrong: there is no such thing
        number: int = bank.debit("ann")  # wrong: it is not awaited
        half: int = await bank.quote("ann")  # wrong: the result is a float
        await bank.debit.fork("ann")  # wrong: nothing to await
        print(number, half)


def test_helpers(env: Environment) -> None:
    bank = env.start(Bank, "bank")
    env.start(int, "teller")  # wrong: no app
    env.start(Bank)  # wrong: no name
    env.start(Bank, "late", effects={"fetch": fetch})  # wrong: a name for a function
    bank.call(Bank.debit, 5)  # wrong: an int for a str
    bank.call(Bank.debit)  # wrong: too few
    bank.call(Bank.debit, "ann", 1, 2)  # wrong: too many
    bank.call(Bank.credit, "ann")  # wrong: no such method
    bank.call("debit", "ann")  # wrong: a name for a handler
    text: str = bank.call(Bank.debit, "ann")  # wrong: the result is an int
    half: int = bank.call(Bank.quote, "ann")  # wrong: the result is a float
    bank.send(Bank.debit, amount="5")  # wrong: a str for an int
    late: str = bank.begin(Bank.debit, "ann").result()  # wrong: the result is an int
    print(bank.state.account)  # wrong: no such attribute
    names: list[str] = bank.state.accounts  # wrong: a dict
    bank.upgrade(int)  # wrong: no app
    bank.run_hook(Teller.feed)  # wrong: the hook of another class
    env.advance(3)  # wrong: of what?
    env.advance(hours="3")  # wrong: a str for a number
    env.partition("bank", "teller")  # wrong: names for instances
    assert_replays("golden.log", int)  # wrong: no app
    assert_replays(5, Bank)  # wrong: no path
    for one in crash_everywhere(victims=["disk"]):  # wrong: nothing that crashes
        one.start(Bank, "bank")
    print(text, half, late, names)


web_bank = Service(Bank, "bank")
Service(Bank)  # wrong: no name
Service(Bank, "bank", timeout="5")  # wrong: a str for a number


async def serve(request: Request) -> None:
    await web_bank(request).debit(5)  # wrong: an int for a str
    await web_bank(request).credit("ann")  # wrong: no such method
    text: str = await web_bank(request).debit("ann")  # wrong: the result is an int
    number: int = web_bank(request).debit("ann")  # wrong: it is not awaited
    await web_bank("ann").debit("ann")  # wrong: no request
    await progress(request, web_bank(request).debit("ann"))  # wrong: no function
    print(text, number)


assistant = Agent("test", output_type=int, capabilities=[ImmortalDurability()])
ImmortalDurability(tool_timeout=5)  # wrong: no timedelta


class Assistant(Immortal):
    @rpc
    async def ask(self, question: str) -> str:
        result = await assistant.run(question)
        return result.output  # wrong: an int


register_type(Bank, encode=len, decode=lambda size: Bank())  # wrong: a Bank has no len


class Limited(Immortal):
    @rpc(limit="3")  # wrong: a str for an int
    async def slowly(self, account: str) -> int:
        return len(account)

    @rpc(timeout=5)  # wrong: no timedelta
    async def quickly(self, account: str) -> int:
        return len(account)


def in_one_process() -> None:
    start(Bank)  # wrong: no name
    number: int = start(Bank, "bank")  # wrong: what runs
    print(number)
    run(int, "bank")  # wrong: no app


class Order(Node):
    left: int

    def __init__(self, text: str, size: int = 1) -> None:
        self.left = size

    @rpc
    def fill(self, count: int) -> int:
        return self.left


class Exchange(Immortal, nodes=(Order,)):
    @rpc
    def open(self, given: Handle[Order]) -> None:
        immortal.create_node(Order)  # wrong: too few
        immortal.create_node(Order, 5)  # wrong: an int for a str
        immortal.create_node(Bank)  # wrong: no node
        given.fill.fork("x")  # wrong: a str for an int
        given.sell.fork(1)  # wrong: no such handler
        immortal.node_of(given).fill("x")  # wrong: a str for an int
        immortal.multicast([given]).fill.fork()  # wrong: too few
        immortal.release_handle("x")  # wrong: no handle

    @rpc
    async def ask(self, given: Handle[Order]) -> None:
        text: str = await given.fill(1)  # wrong: another type
        print(text)


class Floor(Grouped):
    prices = group(lambda: Floor, "prices", members=["b1", "b2"])
    banks = group(Bank, "banks", members=["b1"])  # wrong: not below Grouped

    @rpc
    def place(self, order: str) -> int:
        self.prices.place.fork(5)  # wrong: an int for a str
        self.prices.sell.fork("x")  # wrong: no such handler
        return 1

    @rpc
    async def enter(self) -> None:
        text: str = await self.prices.place.all("x")  # wrong: another type
        await self.prices.join(text)  # wrong: too many
