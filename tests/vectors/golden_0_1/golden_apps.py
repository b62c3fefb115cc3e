"""The apps of the golden logs. Their logs are kept: change nothing here but imports."""

import asyncio
import enum
import fractions
import os
import time
from collections import Counter as Multiset
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from uuid import UUID

import immortal
from immortal import (
    CalleeFailed,
    CallRefused,
    Cancelled,
    EffectFailed,
    Handle,
    Immortal,
    Node,
    Retry,
    Transient,
    Winner,
    cron,
    effect_context,
    every,
    impulse,
    initial,
    peer,
    query,
    register_type,
    rpc,
)
from immortal.patterns.groups import Grouped, group

MAKING = "GOLDEN_LOGS_ARE_MADE"  # in the environment of the apps as the logs are made, and never again
MEMBERS = ["b-1", "b-2", "b-3"]


class TooMuchError(Exception):
    pass


class Kind(enum.Enum):
    TOOL = "tool"
    TOY = "toy"


class Place(NamedTuple):
    shelf: str
    number: int


class Money:
    def __init__(self, cents: int, currency: str) -> None:
        self.cents = cents
        self.currency = currency


register_type(
    Money,
    encode=lambda money: (money.cents, money.currency),
    decode=lambda parts: Money(*parts),
    form=tuple[int, str],
)


@dataclass
class Item:
    name: str
    kind: Kind
    price: Decimal
    tags: set[str]
    place: Place
    since: datetime
    worth: Money | None = None


class Store(Immortal, roles={"reader": ["total", "item"], "clerk": ["put"]}):
    """State of every type, randomness, schedules, queries with roles, and calls that fail in each way."""

    items: dict[str, Item]
    numbers: set[int]
    frozen: frozenset[str]
    exact: dict[str, Any]
    drawn: list[tuple[float, int, UUID]]
    folder: PurePosixPath
    ratio: float
    events: list[str]
    times: int
    times_by_the_clock: int
    cache: Transient[dict[str, int]]

    def __init__(self) -> None:
        self.items, self.numbers, self.frozen, self.exact, self.drawn = {}, set(), frozenset(["a", "b"]), {}, []
        self.folder, self.ratio, self.events, self.times, self.times_by_the_clock = PurePosixPath("a/b"), 0.5, [], 0, 0

    def prepare(self) -> None:
        self.cache = {name: len(name) for name in self.items}

    @initial
    def begin(self) -> None:
        self.note.fork("begun")

    @rpc
    def note(self, text: str) -> int:
        self.events.append(text)
        return len(self.events)

    @rpc(raises=[TooMuchError])
    def put(self, item: Item) -> int:
        if item.price > 1000:
            raise TooMuchError(item.name, int(item.price))
        self.items[item.name] = item
        self.cache[item.name] = len(item.name)
        self.numbers |= {immortal.random.randrange(1000), item.place.number}
        self.drawn.append((immortal.random.random(), immortal.random.choice(sorted(self.numbers)), immortal.uuid4()))
        self.exact[item.name] = (
            item.price,
            immortal.now(),
            {1, 2},
            frozenset([3]),
            b"bytes",
            2**80,
            (),
            immortal.uuid4(),
        )
        return len(self.items)

    @rpc
    def fail(self, text: str) -> None:
        self.events.append(text)
        raise ValueError(text)

    @rpc(on_error="keep")
    def fail_and_keep(self, text: str) -> None:
        self.events.append(text)
        raise KeyError(text)

    @rpc
    def spoil(self) -> None:
        self.ratio = fractions.Fraction(1, 3)  # type: ignore[assignment]  # a state that can't be saved

    @rpc
    def die(self) -> None:
        if MAKING in os.environ:
            os._exit(9)
        raise AssertionError("a call with a verdict is made again")

    @query
    def total(self) -> int:
        return len(self.items)

    @query(raises=[KeyError])
    def item(self, name: str) -> Item:
        return self.items[name]

    @query
    def meddle(self) -> int:
        self.events.append("by a query")
        return 0

    @query
    def schedules(self) -> tuple[int, int]:
        return self.times, self.times_by_the_clock

    @query
    def all_events(self) -> list[str]:
        return self.events

    @every("3s")
    def often(self) -> None:
        self.times += 1

    @cron("*/3 * * * * *", tz="Europe/Berlin")
    async def by_the_clock(self) -> None:
        await immortal.step(self.count_by_the_clock)

    @rpc
    def count_by_the_clock(self) -> None:
        self.times_by_the_clock += 1


class CardRefusedError(Exception):
    pass


def pay(customer: str, cents: int) -> tuple[str, Money]:
    if customer == "eve":
        raise CardRefusedError(customer, cents)
    if customer == "mallory":
        raise LookupError("no such customer")
    return f"receipt {effect_context().attempt}", Money(cents, "EUR")


def slow(text: str) -> str:
    if MAKING in os.environ:
        time.sleep(1000)
    return f"{text}, at last"


async def flaky(text: str) -> str:
    if MAKING in os.environ:
        raise ConnectionError(text)
    return f"{text}, at last"


class Teller(Grouped):
    """Handlers that wait for all that there is to wait for."""

    store = peer(Store, "store")
    b1 = peer(lambda: Book, "b-1")
    b2 = peer(lambda: Book, "b-2")
    prices = group(lambda: Book, "prices", members=MEMBERS)
    notes: dict[str, list[str]]

    def __init__(self) -> None:
        self.notes = {}

    @rpc
    def note(self, about: str, text: str) -> int:
        self.notes.setdefault(about, []).append(text)
        return len(self.notes[about])

    @query
    def all_notes(self) -> dict[str, list[str]]:
        return self.notes

    @rpc
    async def stock(self, name: str, price: Decimal) -> int:
        item = Item(name, Kind.TOY, price, {name}, Place("s", len(name)), immortal.now(), Money(7, "EUR"))
        try:
            return await self.store.put(item)
        except TooMuchError as error:
            return await immortal.step(self.note, "stock", f"{error.args}")

    @impulse
    async def fail(self) -> None:
        calls = {"fail": self.store.fail, "keep": self.store.fail_and_keep}
        for name, call in calls.items():
            try:
                await call("from teller")
            except CalleeFailed as failed:
                await immortal.step(self.note, "failures", f"{name}: {failed.type_name}: {failed.message}")
        for name, other in {"spoil": self.store.spoil, "meddle": self.store.meddle}.items():
            try:
                await other()
            except (CalleeFailed, CallRefused) as failed:
                await immortal.step(
                    self.note, "failures", f"{name}: {type(failed).__name__} {getattr(failed, 'type_name', '')}"
                )
        self.store.fail.fork("nobody waits")
        await immortal.sleep(timedelta(seconds="long"))  # type: ignore[arg-type]  # which fails this handler

    @rpc
    async def sleeps(self) -> str:
        await immortal.sleep(timedelta(seconds=40))
        await immortal.step(self.note, "sleeps", "woke")
        return "woken"

    @rpc
    async def decide(self, number: int) -> None:
        answer = await immortal.race(immortal.event(f"decide {number}", bool), immortal.sleep(timedelta(days=2000)))
        await immortal.step(self.note, "decide", f"{number}: {answer}")

    @rpc
    def signals(self, number: int, value: bool) -> None:
        immortal.signal(f"decide {number}", value)

    @rpc
    async def gathers(self) -> None:
        found = await asyncio.gather(
            self.store.total(), immortal.event("gather", int), self.part("a"), immortal.step(self.note, "gather", "-")
        )
        await immortal.step(self.note, "gather", f"{tuple(found)}")

    async def part(self, text: str) -> str:
        first = await self.store.note(text)
        value: int = await immortal.event("part", int)
        return f"{first} {value}"

    @rpc
    def signals_parts(self, value: int) -> None:
        immortal.signal("gather", value)
        immortal.signal("part", value + 1)

    @rpc
    def signals_nobody(self) -> None:
        immortal.signal("nobody", Decimal("1.5"))

    @rpc
    async def takes_signal(self) -> Decimal:
        value: Decimal = await immortal.event("nobody", Decimal)
        return value

    @rpc
    async def pays(self, customer: str) -> str:
        careful = immortal.effect.options(raises=[CardRefusedError], timeout=timedelta(seconds=30))
        try:
            receipt, money = await careful(pay, customer, 500)
        except CardRefusedError as error:
            text = f"refused {error.args}"
        except EffectFailed as failed:
            text = f"{failed.effect} {failed.type_name} {failed.message} {failed.attempts}"
        else:
            text = f"{receipt} {money.cents}"
        await immortal.step(self.note, "pays", text)
        return text

    @rpc
    async def pays_slowly(self) -> None:
        await immortal.step(self.note, "slow", await immortal.effect(slow, "slow"))

    @rpc
    async def pays_flakily(self) -> None:
        often = immortal.effect.options(
            retry=Retry(attempts=None, first_wait=timedelta(hours=1), max_wait=timedelta(hours=2))
        )
        await immortal.step(self.note, "flaky", await often(flaky, "flaky"))

    @rpc
    async def polls(self, first: int) -> None:
        value: int = await immortal.event("poll", int)
        await immortal.step(self.note, "polls", f"{first} {value}")
        return immortal.continue_as(first + 1)  # type: ignore[no-any-return]

    @rpc
    def signals_poll(self, value: int) -> None:
        immortal.signal("poll", value)

    @rpc(limit=1, timeout=timedelta(days=3000))
    async def one_at_a_time(self, name: str) -> None:
        await immortal.event(f"turn {name}", type(None))
        await immortal.step(self.note, "turns", name)

    @rpc
    def signals_turn(self, name: str) -> None:
        immortal.signal(f"turn {name}", None)

    @rpc
    async def is_cancelled(self) -> None:
        try:
            await immortal.event("never", int)
        except Cancelled as cancelled:
            await immortal.step(self.note, "cancelled", str(cancelled))
            raise

    @rpc
    def trade(self, order: str) -> None:
        immortal.multicast([self.b1, self.b2]).place.fork(order)
        self.prices.place.fork(f"{order} of the group")

    @rpc
    async def trade_and_wait(self, order: str) -> None:
        await immortal.step(
            self.note, "trades", f"{len(await immortal.multicast([self.b1, self.b2]).place.all(order))}"
        )
        await immortal.step(self.note, "trades", f"{len(await self.prices.place.all(f'{order} of the group'))}")

    @rpc
    async def asks_b2(self) -> None:
        places = await self.b2.place("asked")
        await immortal.step(self.note, "asks", f"answered: {places > 0}")


class Order(Node):
    text: str
    left: int

    def __init__(self, text: str, left: int) -> None:
        self.text = text
        self.left = left

    @rpc
    def fill(self, count: int) -> int:
        self.left -= min(count, self.left)
        self.owner.trades.append(f"{self.text}: {self.left} left")
        return self.left


class Book(Grouped):
    prices = group(lambda: Book, "prices", members=MEMBERS)
    orders: list[str]
    held: list[Handle[Order]]

    def __init__(self) -> None:
        self.orders = []
        self.held = []

    @rpc
    def place(self, order: str) -> int:
        self.orders.append(order)
        return len(self.orders)

    @rpc
    def hold(self, order: Handle[Order]) -> None:
        self.held.append(order)
        order.fill.fork(1)

    @query
    def all_orders(self) -> list[str]:
        return self.orders

    def on_destroyed(self, order: Handle[Order]) -> None:
        self.held.remove(order)
        self.orders.append("an order is destroyed")

    def on_expelled(self, name: str) -> None:
        self.orders.append(f"expelled from {name}")


class Exchange(Immortal, nodes=(Order,)):
    broker = peer(lambda: Broker, "broker")
    b2 = peer(Book, "b-2")
    orders: dict[str, Handle[Order]]
    trades: list[str]

    def __init__(self) -> None:
        self.orders = {}
        self.trades = []

    @impulse
    def open(self, text: str, size: int) -> None:
        self.orders[text] = immortal.create_node(Order, text, size)
        self.broker.work_on.fork(text, self.orders[text])
        if text == "shared":
            self.b2.hold.fork(self.orders[text])

    @impulse
    def close(self, text: str) -> None:
        immortal.destroy(self.orders.pop(text))

    @query
    def all_trades(self) -> list[str]:
        return self.trades

    def on_last_release(self, handle: Handle[Order]) -> None:
        self.trades.append(f"nobody works on {immortal.node_of(handle).text}")


class Slip(Node):
    """A node of a class whose states pickle writes."""

    words: list[str]

    def __init__(self) -> None:
        self.words = []

    @rpc
    def hear(self, word: str) -> int:
        self.words.append(word)
        self.owner.words[word] += 1
        return len(self.words)


class Broker(Immortal, nodes=(Slip,), serializer="pickle"):
    """States that pickle writes, with what it names by module: ours and the user's."""

    working: dict[str, Handle[Order]]
    slips: list[Handle[Slip]]
    words: Multiset[str]
    kept: dict[str, Any]

    def __init__(self) -> None:
        self.working, self.slips, self.words = {}, [], Multiset()
        self.kept = {"retry": Retry(attempts=3), "winner": Winner(1, "x")}
        self.kept["items"] = [Item("i", Kind.TOOL, Decimal("2.50"), {"t"}, Place("s", 1), datetime(2020, 1, 2), None)]
        self.kept["errors"] = [TooMuchError("much", 3), CallRefused("refused"), Cancelled("why")]

    @rpc
    def work_on(self, text: str, order: Handle[Order]) -> None:
        self.working[text] = order
        order.fill.fork(3)
        self.slips.append(immortal.create_node(Slip))
        immortal.multicast([self.slips[-1]]).hear.fork(text)
        self.finish.fork(text, order, self.slips[-1])

    @rpc
    async def finish(self, text: str, order: Handle[Order], slip: Handle[Slip]) -> None:
        winner = await immortal.race(immortal.event(f"finish {text}", int), immortal.sleep(timedelta(days=2000)))
        left = await order.fill(winner.value or 0)
        await slip.hear(f"{text} {left}")
        await immortal.step(self.done, text, left, winner.index)

    @rpc
    def done(self, text: str, left: int, index: int) -> None:
        self.kept[text] = Winner(index, left)
        immortal.release_handle(self.working.pop(text))

    @rpc
    def signals(self, text: str, count: int) -> None:
        immortal.signal(f"finish {text}", count)

    @query
    def show(self) -> str:
        return f"{sorted(self.working)} {sorted(self.words.items())} {self.kept}"

    def on_destroyed(self, order: Handle[Order]) -> None:
        self.words["destroyed"] += 1
        self.working = {text: one for text, one in self.working.items() if one != order}


class Counter(Immortal):
    """The first version; golden_upgrade has the second one."""

    words: dict[str, int]

    def __init__(self) -> None:
        self.words = {}

    @rpc
    def count(self, line: str) -> None:
        for word in line.split():
            self.words[word] = self.words.get(word, 0) + 1

    @rpc
    async def waits(self, name: str) -> None:
        await immortal.event(name, type(None))
        await immortal.step(self.count, f"{name} came")

    @rpc
    def signals(self, name: str) -> None:
        immortal.signal(name, None)

    @query
    def show(self) -> str:
        return f"1: {sorted(self.words.items())}"


class Own(Immortal, checkpoint="fork"):
    """A state in a form of its own, written by a process of its own."""

    def __init__(self) -> None:
        self.total = 0

    def checkpoint(self) -> bytes:
        return str(self.total).encode()

    def restore(self, blob: bytes) -> None:
        self.total = int(blob)

    @rpc
    def add(self, amount: int) -> int:
        self.total += amount
        return self.total
