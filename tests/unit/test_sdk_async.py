"""``async def`` handlers: two instances with real machines and logs, driven by hand."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import immortal
import immortal.appsdk.waiting.impulses
from immortal import Immortal, Winner, every, impulse, initial, peer, rpc
from immortal.appsdk.dispatch.lifecycle import upgrades
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.running.inspection import inspect_state
from immortal.appsdk.state.journal import JournalError
from immortal.errors import HandlerError, UpgradeError, UsageError
from immortal.testing import Environment
from tests.helpers.waiting import WaitingInstances


class InsufficientFunds(Exception):  # noqa: N818
    def __init__(self, account: str, missing: int) -> None:
        super().__init__(f"{account} lacks {missing}")
        self.missing = missing


class StillMissing(InsufficientFunds):
    """Goes to callers as what its base is declared as."""


class Bank(Immortal):
    accounts: dict[str, int]
    quotes: int

    def __init__(self) -> None:
        self.accounts = {"a": 10, "b": 0}
        self.quotes = 0

    @rpc(raises=[InsufficientFunds])
    def debit(self, account: str, amount: int = 1) -> int:
        if self.accounts[account] < amount:
            kind = StillMissing if amount > 1000 else InsufficientFunds
            raise kind(account, amount - self.accounts[account])
        self.accounts[account] -= amount
        return self.accounts[account]

    @rpc
    def credit(self, account: str, amount: int) -> int:
        self.accounts[account] += amount
        return self.accounts[account]

    @rpc
    def nothing(self) -> None:
        pass

    @rpc
    def counted(self) -> int:
        self.quotes += 1
        return self.quotes

    @rpc
    def moment(self) -> datetime | None:
        return None if self.quotes else immortal.now()

    @rpc(raises=[InsufficientFunds])
    async def quote(self, after_s: int) -> float:
        await immortal.sleep(timedelta(seconds=after_s))
        await immortal.step(self.counted)
        if after_s == 7:
            raise InsufficientFunds("quote", 7)
        return after_s / 2


class Base(Immortal):
    log: list[str]

    @rpc
    def note(self, text: str) -> int:
        self.log.append(text)
        return len(self.log)

    @rpc
    async def inherited(self, text: str) -> str:
        await immortal.step(self.note, f"base {text}")  # type: ignore[misc]
        return f"base {text}"


class Teller(Base):
    LIMIT = 100
    bank = peer(Bank, "bank")
    late = peer(lambda: Bank, "late")
    balance: int

    def __init__(self) -> None:
        self.balance = 0
        self.log = []

    # --- def handlers

    @rpc
    def take(self, amount: int) -> int:
        self.balance += amount
        return self.balance

    @rpc
    def approve(self, name: str, value: Any) -> None:
        immortal.signal(name, value)

    @rpc
    def items(self, given: list[int]) -> list[str]:
        given.append(0)
        return self.log

    @rpc(raises=[InsufficientFunds])
    def strict(self, amount: int) -> None:
        if amount > 5:
            raise InsufficientFunds("strict", amount)
        if amount < 0:
            raise ValueError("a bug")

    def helper(self, text: str) -> str:
        return f"{text} below {self.LIMIT}"

    @property
    def shout(self) -> str:
        return self.helper("SHOUT")

    async def twice(self, account: str) -> int:
        one = await self.bank.credit(account, 1)
        two = await self.bank.credit(account, 1)
        return one + two

    # --- async handlers

    @impulse
    async def transfer(self, a: str, b: str, amount: int) -> bool:
        try:
            await self.bank.debit(a, amount)
        except InsufficientFunds as error:
            await immortal.step(self.note, f"{type(error).__name__} {error}, {error.missing}")
            return False
        await immortal.step(self.take, amount)
        await self.bank.credit(b, amount)
        await immortal.step(self.note, "transferred")
        return True

    @impulse
    async def many(self, kind: str) -> None:
        if kind == "gather":
            one, two, three = await asyncio.gather(
                self.bank.credit("a", 1), immortal.step(self.take, 5), self.twice("b")
            )
            await immortal.step(self.note, f"{one} {two} {three}")
        elif kind == "gather nothing":
            await immortal.step(self.note, f"{await asyncio.gather()}")
        elif kind == "gather fails":
            try:
                await asyncio.gather(self.bank.debit("b", 5), immortal.sleep(timedelta(days=1)), self.twice("a"))
            except InsufficientFunds as error:
                await immortal.step(self.note, f"{error}")
        elif kind == "race":
            first = await immortal.race(self.bank.quote(3600), immortal.sleep(timedelta(seconds=1)))
            await immortal.step(self.note, f"{first}")
        elif kind == "race of coroutines":
            first = await immortal.race(self.slow(), self.twice("a"))
            await immortal.step(self.note, f"{first}")
        elif kind == "race fails":
            try:
                await immortal.race(immortal.sleep(timedelta(days=1)), self.bank.debit("b", 2000))
            except InsufficientFunds as error:
                await immortal.step(self.note, f"{type(error).__name__} {error.missing}")
        elif kind == "nested":
            got = await immortal.race(
                asyncio.gather(self.bank.quote(7), immortal.sleep(timedelta(days=1))), immortal.event("never")
            )
            await immortal.step(self.note, f"{got}")
        elif kind == "shared":
            quote = self.bank.quote(3600)
            first, also = await asyncio.gather(
                immortal.race(asyncio.shield(quote), immortal.sleep(timedelta(seconds=1))), self.shares(quote)
            )
            await immortal.step(self.note, f"{first.index} {also}")
        elif kind == "in time":
            async with asyncio.timeout(3600):
                await self.bank.nothing()
            await immortal.event("never")
        elif kind == "awaited twice":
            call = self.bank.counted()
            await immortal.step(self.note, f"{await call} {await call}")

    async def shares(self, call: Any) -> str:
        return f"got {await call}"

    async def slow(self) -> None:
        try:
            await immortal.sleep(timedelta(days=1))
        finally:
            self.note.fork("slow was given up")

    @impulse
    async def ask(self, kind: str) -> None:
        if kind == "nothing":
            await immortal.step(self.note, f"{await self.bank.nothing()}")
        elif kind == "moment":
            await immortal.step(self.note, type(await self.bank.moment()).__name__)
        elif kind == "default":
            await immortal.step(self.note, f"{await self.bank.debit(account='a')}")
        elif kind == "self":
            await immortal.step(self.note, f"{await self.asked(5)}")
        elif kind == "super":
            await immortal.step(self.note, await self.inherited("x"))
        elif kind == "step raises":
            try:
                await immortal.step(self.strict, 6)
            except InsufficientFunds as error:
                await immortal.step(self.note, f"{error}")
        elif kind == "helpers":
            same = isinstance(self, Teller)
            await immortal.step(
                self.note, f"{self.helper('x')} {self.shout} {self.LIMIT} {same} {self!r} {self.bank!r}"
            )
        elif kind == "copies":
            given = [1]
            got = await immortal.step(self.items, given)
            got.append("not in the state")
            await immortal.step(self.note, f"{given}")

    @rpc
    async def asked(self, number: int) -> int:
        await immortal.sleep(timedelta(seconds=1))
        return number * 2

    @rpc
    async def inherited(self, text: str) -> str:
        return "own " + await super().inherited(text)

    @impulse
    async def moments(self) -> None:
        before = (immortal.now(), immortal.random.random(), immortal.uuid4())
        await immortal.step(self.note, f"before {before}")
        await self.bank.nothing()
        again = (immortal.now(), immortal.random.random(), immortal.uuid4())
        await immortal.step(self.note, f"before {before}")
        await immortal.step(self.note, f"then {again}")
        await immortal.sleep(timedelta(seconds=1))
        await immortal.step(self.note, f"again {before[0] < again[0] < immortal.now()} {before[1:] != again[1:]}")
        await immortal.step(self.note, f"then {again}")

    @impulse
    async def wait(self, name: str, kind: str) -> None:
        if kind == "bool":
            value: Any = await immortal.event(name, bool)
        elif kind == "time":
            value = await immortal.event(name, datetime)
        else:
            value = await immortal.event(name)
        await immortal.step(self.note, f"{name} {value!r}")

    @impulse
    async def wait_later(self, after_s: int) -> None:
        await immortal.sleep(timedelta(seconds=after_s))
        await immortal.step(self.note, f"{await immortal.event('later')} after {after_s}")

    @impulse
    async def effects(self, name: str) -> None:
        self.bank.credit.fork("b", 1)
        self.note.fork("forked")
        immortal.signal(name, "sent")
        await immortal.sleep(timedelta(seconds=1))
        self.bank.credit.fork("b", 10)

    @impulse
    def approve_often(self, name: str, count: int) -> None:
        for number in range(count):
            immortal.signal(name, number)

    @impulse
    async def signals_anyway(self, name: str) -> None:
        with contextlib.suppress(UsageError):
            immortal.signal(name, 1)
        await immortal.step(self.note, "still here")

    @impulse
    async def signals(self, name: str) -> None:
        immortal.signal(name, "from async")
        await immortal.step(self.note, "signalled")

    @impulse
    async def loop_beside(self, count: int) -> None:
        try:
            await asyncio.gather(immortal.event("never"), self.starts_over(count))
        finally:
            self.note.fork(f"left {count}")

    async def starts_over(self, count: int) -> None:
        await immortal.sleep(timedelta(seconds=1))
        immortal.continue_as(count - 1)

    @impulse
    async def loop(self, count: int) -> None:
        await immortal.step(self.take, 1)
        await immortal.sleep(timedelta(seconds=1))
        if count > 1:
            immortal.continue_as(count - 1)
        await immortal.step(self.note, "looped")

    @impulse
    async def wrong(self, kind: str) -> None:
        if kind == "sets":
            self.balance = 1
        elif kind == "deletes":
            del self.balance
        elif kind == "typo":
            self.balanced  # type: ignore[attr-defined]  # noqa: B018
        elif kind == "thread":
            await asyncio.to_thread(len, "x")
        elif kind == "not awaited":
            immortal.step(self.take, 1)
            await self.bank.nothing()
        elif kind == "naive":
            await immortal.at(datetime(2030, 1, 1))
        elif kind == "seconds":
            await immortal.sleep(5)  # type: ignore[arg-type]
        elif kind == "too late":
            await immortal.sleep(timedelta(days=100_000))
        elif kind == "step bug":
            try:
                await immortal.step(self.strict, -1)
            except Exception:
                await immortal.step(self.note, "never")
        elif kind == "swallows":
            try:
                await immortal.step(self.strict, -1)
            except BaseException:
                await immortal.step(self.note, "never")
        elif kind == "raises":
            raise ValueError("oh")
        elif kind == "argument":
            await self.bank.credit("a", object())  # type: ignore[arg-type]
        elif kind == "own raises":
            await immortal.step(self.note, "before")
            raise InsufficientFunds("undeclared", 1)
        elif kind == "gather foreign":
            await asyncio.gather(5)  # type: ignore[call-overload]
        elif kind == "gather list":
            await asyncio.gather([self.bank.nothing(), self.bank.nothing()])  # type: ignore[call-overload]
        elif kind == "added":
            self.bank.nothing() + 2  # type: ignore[operator]
        elif kind == "attribute":
            print(self.bank.nothing().amount)  # type: ignore[attr-defined]
        elif kind == "too many":
            await self.bank.nothing(1, 2)  # type: ignore[call-arg]
        elif kind == "race nobody":
            await immortal.race()
        elif kind == "lost":
            lost = asyncio.gather(immortal.event("x"), immortal.race(immortal.event("y"), self.slow()))
            await immortal.race(immortal.step(self.take, 1), lost)
            await lost
        elif kind == "each other":
            await asyncio.gather(asyncio.Event().wait(), asyncio.Event().wait())
        elif kind == "handler":
            await self.bank.stolen()  # type: ignore[attr-defined]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[WaitingInstances]:
    made = WaitingInstances(tmp_path, {"bank": Bank, "teller": Teller})
    yield made
    made.close()


def log(two: WaitingInstances) -> list[str]:
    found: list[str] = two.app("teller").log
    return found


# --- calls ------------------------------------------------------------------------------------------------------------


def test_a_call_gives_what_was_returned_or_raises_what_was_raised(two: WaitingInstances) -> None:
    two["teller"].impulse("transfer", "a", "b", 4)
    two["teller"].impulse("transfer", "a", "b", 100)
    two["teller"].impulse("transfer", "a", "b", 2000)
    assert two.app("bank").accounts == {"a": 6, "b": 4}
    assert two.app("teller").balance == 4
    assert log(two) == [
        "transferred",
        "InsufficientFunds a lacks 94, 94",
        "InsufficientFunds a lacks 1994, 1994",
    ]
    assert two.waiting_count("teller") == 0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("nothing", ["None"]),
        ("moment", ["datetime"]),
        ("default", ["9"]),
        ("self", ["10"]),
        ("super", ["base x", "own base x"]),
        ("step raises", ["strict lacks 6"]),
        ("helpers", ["x below 100 SHOUT below 100 100 True <Teller in Teller.ask> <peer 'bank'>"]),
        ("copies", ["[1]"]),
    ],
)
def test_what_an_async_handler_can_use(two: WaitingInstances, kind: str, expected: list[str]) -> None:
    two["teller"].impulse("ask", kind)
    two.pass_all_time()
    assert log(two) == expected
    assert two.waiting_count("teller") == 0


@pytest.mark.parametrize("crashed", [[], ["teller"], ["bank"], ["teller", "bank"]])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_caller_and_a_callee_that_crash_while_one_waits(
    two: WaitingInstances, crashed: list[str], checkpoint: bool
) -> None:
    two.kill("bank")
    two["teller"].impulse("transfer", "a", "b", 4)
    assert two.waiting_count("teller") == 1
    if checkpoint:
        two["teller"].checkpoint()
    two.start("bank", Bank) if "bank" not in crashed else None
    if "bank" in crashed:
        two.start("bank", Bank)
        two["bank"].checkpoint()
    two.crash(*crashed)
    assert log(two) == ["transferred"]
    assert two.app("bank").accounts == {"a": 6, "b": 4}
    two.crash("teller", "bank")
    assert (log(two), two.app("bank").accounts) == (["transferred"], {"a": 6, "b": 4})


def test_def_handlers_answer_calls_of_a_class_without_async_ones(two: WaitingInstances) -> None:
    two["bank"].impulses([("credit", ("a", 5)), ("debit", ("a", 1)), ("debit", ("a", 1000))])
    assert two.app("bank").accounts == {"a": 14, "b": 0}  # nobody waits for what the third one raised


# --- gather and race --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("crashing", [False, True])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("gather", ["11 5 3"]),
        ("gather nothing", ["[]"]),
        ("gather fails", ["b lacks 5"]),
        ("race", ["Winner(index=1, value=None)"]),
        ("race of coroutines", ["Winner(index=1, value=23)", "slow was given up"]),
        ("race fails", ["InsufficientFunds 2000"]),
        ("awaited twice", ["1 1"]),
    ],
)
def test_gather_and_race(two: WaitingInstances, kind: str, expected: list[str], crashing: bool) -> None:
    two.kill("bank")
    two["teller"].impulse("many", kind)
    if crashing:
        two["teller"].checkpoint()
        two.crash("teller")
    two.start("bank", Bank)
    two.pass_time(2)
    assert log(two) == expected
    assert two.waiting_count("teller") == 0
    assert two["teller"].dispatcher.tasks.calls == {}
    assert two["teller"].dispatcher.next_due_ns is None  # no cancelled timer stays
    two.pass_all_time()  # the answer that has lost comes in
    assert log(two) == expected


def test_the_timer_of_a_limit_that_was_kept_is_gone(two: WaitingInstances) -> None:
    two["teller"].impulse("many", "in time")
    assert two.waiting_count("teller") == 1
    assert two["teller"].dispatcher.next_due_ns is None


def test_what_loses_a_race_is_executed_all_the_same(two: WaitingInstances) -> None:
    two["teller"].impulse("many", "race")
    two.pass_time(2)
    assert (two.waiting_count("teller"), two.waiting_count("bank")) == (0, 1)
    two.crash("teller")
    two.pass_all_time()
    assert (two.app("bank").quotes, two.waiting_count("bank")) == (1, 0)


@pytest.mark.parametrize("crashing", [False, True])
def test_a_shielded_call_goes_on_when_its_race_is_lost(two: WaitingInstances, crashing: bool) -> None:
    two["teller"].impulse("many", "shared")
    two.pass_time(2)
    assert log(two) == []
    if crashing:
        two["teller"].checkpoint()
        two.crash("teller")
    two.pass_all_time()
    assert log(two) == ["1 got 1800.0"]


def test_an_error_in_what_takes_part_ends_all_of_it(two: WaitingInstances) -> None:
    two["teller"].impulse("many", "nested")
    with pytest.raises(HandlerError, match=r"Teller\.many raised InsufficientFunds"):
        two.pass_time(8)


# --- time and randomness ----------------------------------------------------------------------------------------------


def test_time_and_randomness_are_the_same_when_it_is_run_again(two: WaitingInstances) -> None:
    two.kill("bank")
    two["teller"].impulse("moments")
    two["teller"].checkpoint()
    two.crash("teller")
    two.start("bank", Bank)
    two["teller"].checkpoint()
    two.crash("teller")
    two.pass_time(1)
    before, before_again, then, again, then_again = log(two)
    assert (before, then) == (before_again, then_again)
    assert again == "again True True"


def test_a_timer_that_is_due_while_the_instance_is_down_fires_once_when_it_is_back(two: WaitingInstances) -> None:
    two["teller"].impulse("loop", 1)
    two.kill("teller")
    two.pass_time(100)
    two.start("teller", Teller)
    assert log(two) == []
    two.log_time()
    assert log(two) == ["looped"]
    two.crash("teller")
    two.pass_all_time()
    assert log(two) == ["looped"]


def test_a_second_impulse_for_the_same_time_does_nothing(two: WaitingInstances) -> None:
    two["teller"].impulse("loop", 2)
    dispatcher = two["teller"].dispatcher
    due_ns = dispatcher.next_due_ns
    assert due_ns is not None
    two._time_ns = due_ns
    dispatcher.log_time(due_ns)
    assert dispatcher.next_due_ns is None  # it has been told
    dispatcher.log_time(due_ns)
    two.settle()
    assert two.app("teller").balance == 2
    assert (dispatcher.next_due_ns or 0) > due_ns


class Scheduled(Immortal):
    runs: list[datetime]
    awaited: int

    def __init__(self) -> None:
        self.runs = []
        self.awaited = 0

    @every("10m")
    def run(self) -> None:
        self.runs.append(immortal.now())

    @rpc
    def add(self) -> None:
        self.awaited += 1

    @every(timedelta(hours=1))
    async def later(self) -> None:
        await immortal.sleep(timedelta(minutes=1))
        await immortal.step(self.add)  # type: ignore[func-returns-value]


def test_schedules(tmp_path: Path) -> None:
    one = WaitingInstances(tmp_path, {"one": Scheduled})
    one.log_time()
    assert one.app("one").runs == []
    for _ in range(3):
        one.pass_time(600)
        one.crash("one")
    assert len(one.app("one").runs) == 3
    one["one"].checkpoint()
    one.kill("one")
    one.pass_time(5 * 3600)  # 30 times 10 minutes: made up for by one
    one.start("one", Scheduled)
    one.log_time()
    assert len(one.app("one").runs) == 4
    assert one.app("one").awaited == 0
    one.pass_time(60)
    one.crash("one")
    assert (len(one.app("one").runs), one.app("one").awaited) == (4, 1)
    one.pass_time(540)
    assert len(one.app("one").runs) == 5
    one.close()


# --- events -----------------------------------------------------------------------------------------------------------


def test_events(two: WaitingInstances) -> None:
    teller = two["teller"]
    teller.impulse("wait", "approved", "bool")
    teller.impulse("wait", "approved", "any")
    teller.impulse("wait", "other", "any")
    teller.checkpoint()
    two.crash("teller")
    teller = two["teller"]
    teller.impulses([("signals", ("other",)), ("approve", ("approved", True))])
    assert log(two) == ["signalled", "other 'from async'", "approved True"]
    teller.impulse("approve", "approved", [1])
    assert log(two)[3:] == ["approved [1]"]
    assert two.waiting_count("teller") == 0


def test_signals_that_nobody_waits_for_are_kept_in_order(two: WaitingInstances) -> None:
    two["teller"].impulses([("approve", ("x", 1)), ("approve", ("x", 2))])
    two["teller"].checkpoint()
    two.crash("teller")
    two["teller"].impulse("wait", "x", "any")
    two["teller"].impulse("wait", "x", "any")
    two["teller"].impulse("wait", "x", "any")
    assert log(two) == ["x 1", "x 2"]
    assert two.waiting_count("teller") == 1


@pytest.fixture
def few_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(immortal.appsdk.waiting.impulses, "KEPT_SIGNALS_MAX", 3)
    monkeypatch.setattr(immortal.appsdk.waiting.impulses, "KEPT_SIGNALS_BYTES_MAX", 1000)


TOO_MANY = r"3 signals of 3 bytes wait for nobody, and with this one there would be more than 3"


@pytest.mark.usefixtures("few_signals")
def test_signals_that_nobody_waits_for_have_a_limit(two: WaitingInstances) -> None:
    two["teller"].impulses([("approve", (name, 1)) for name in "xyz"])
    with pytest.raises(HandlerError, match=TOO_MANY):
        two["teller"].impulse("approve", "x", 2)


@pytest.mark.usefixtures("few_signals")
def test_who_waits_gets_a_signal_however_many_wait_for_nobody(two: WaitingInstances) -> None:
    two["teller"].impulse("wait", "awaited", "any")
    two["teller"].impulses([("approve", (name, 1)) for name in "xyz"])
    two["teller"].impulse("approve", "awaited", 2)
    assert log(two) == ["awaited 2"]
    two["teller"].impulse("wait", "x", "any")
    assert log(two) == ["awaited 2", "x 1"]
    two["teller"].impulse("approve", "x", 3)  # there is room again
    two["teller"].checkpoint()
    two.crash("teller")
    with pytest.raises(HandlerError, match=TOO_MANY):
        two["teller"].impulse("approve", "x", 2)


@pytest.mark.usefixtures("few_signals")
def test_many_signals_of_one_handler_count_before_they_are_given(two: WaitingInstances) -> None:
    two["teller"].impulse("wait", "x", "any")
    with pytest.raises(HandlerError, match=r"signals .* wait for nobody"):
        two["teller"].impulse("approve_often", "x", 5)


@pytest.mark.usefixtures("few_signals")
def test_large_signals_count_by_their_bytes(two: WaitingInstances) -> None:
    two["teller"].impulse("approve", "x", "x" * 900)
    with pytest.raises(HandlerError, match=r"1 signals of 903 bytes wait for nobody, .* or 1000 bytes"):
        two["teller"].impulse("approve", "x", "x" * 900)


@pytest.mark.usefixtures("few_signals")
def test_an_async_handler_with_a_signal_too_many_ends_whatever_it_catches(two: WaitingInstances) -> None:
    # Run again from its journal it signals nothing, so it could not be refused again.
    two["teller"].impulses([("approve", (name, 1)) for name in "xyz"])
    with pytest.raises(HandlerError, match=TOO_MANY):
        two["teller"].impulse("signals_anyway", "x")
    assert log(two) == []


@pytest.mark.parametrize("crashing", [False, True])
def test_who_has_waited_longest_gets_the_signal(two: WaitingInstances, crashing: bool) -> None:
    two["teller"].impulses([("wait_later", (3,)), ("wait_later", (1,)), ("wait_later", (2,))])
    two.pass_all_time()
    if crashing:
        two["teller"].checkpoint()
        two.crash("teller")
    two["teller"].impulses([("approve", ("later", number)) for number in range(3)])
    assert log(two) == ["0 after 1", "1 after 2", "2 after 3"]


def test_what_was_sent_is_not_sent_again_when_it_is_run_again(two: WaitingInstances) -> None:
    two["teller"].impulse("effects", "x")
    for _ in range(2):
        two["teller"].checkpoint()
        two.crash("teller")
    two.pass_time(1)
    assert two.app("bank").accounts["b"] == 11
    assert log(two) == ["forked"]
    assert len(two["teller"].dispatcher.tasks.events.kept["x"]) == 1


def test_a_value_that_is_not_what_is_waited_for(two: WaitingInstances) -> None:
    two["teller"].impulse("wait", "approved", "bool")
    with pytest.raises(HandlerError, match=r"event approved failed: .*Expected `bool`, got `str`"):
        two["teller"].impulse("approve", "approved", "yes")


def test_who_may_signal(two: WaitingInstances) -> None:
    with pytest.raises(UsageError, match="only handlers signal"):
        two["teller"].dispatcher.context.run_contexts.run(immortal.signal, "x")
    Teller()
    with pytest.raises(UsageError, match="does not run beside a coordinator"):
        immortal.signal("x")


# --- continue_as ------------------------------------------------------------------------------------------------------


def test_continue_as_cuts_the_journal(two: WaitingInstances) -> None:
    two["teller"].impulse("loop", 50)
    for _ in range(49):
        two.pass_time(1)
    two["teller"].checkpoint()
    (saved,) = two["teller"].dispatcher.tasks.save().tasks
    assert (saved.generation, len(saved.entries), len(saved.pending)) == (49, 1, 1)
    two.crash("teller")
    two.pass_time(1)
    assert (log(two), two.app("teller").balance) == (["looped"], 50)


def test_continue_as_beside_others_ends_them_first(two: WaitingInstances) -> None:
    gc.disable()  # it is not Python's clearing away that ends them
    try:
        two["teller"].impulse("loop_beside", 2)
        two.pass_time(1)
        assert log(two) == ["left 2"]
    finally:
        gc.enable()
    two.crash("teller")
    two.pass_time(1)
    assert log(two) == ["left 2", "left 1"]


# --- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("sets", ["test_sdk_async.py, line ", "Teller.wrong sets self.balance", "'def' handler (@rpc)", "await"]),
        ("deletes", ["Teller.wrong deletes self.balance"]),
        ("typo", ["AttributeError", "'balanced'"]),
        ("thread", ["asks for run_in_executor", "await immortal.effect(<function>, ...)"]),
        ("not awaited", ["step take was made and never awaited"]),
        ("naive", ["with a time zone"]),
        ("seconds", ["a timedelta was expected"]),
        ("too late", ["up to the year 2262"]),
        ("step bug", ["Teller.strict raised ValueError", "a bug"]),
        ("swallows", ["Teller.strict raised ValueError", "a bug"]),
        ("raises", ["Teller.wrong raised ValueError", "oh", "arguments: ('raises')"]),
        ("argument", ["Bank.credit: parameter 'amount' (a object) can't be encoded"]),
        ("own raises", ["Teller.wrong raised InsufficientFunds"]),
        ("gather foreign", ["TypeError", "awaitable is required"]),
        ("gather list", ["TypeError: asyncio.gather takes each awaitable as an argument of its own", "gather(*[...])"]),
        ("added", ["TypeError: call bank.nothing is to be awaited, and is no value yet: write '(await ...)'"]),
        ("attribute", ["AttributeError: call bank.nothing has no 'amount': it is to be awaited"]),
        ("too many", ["TypeError: Bank.nothing(", "too many positional arguments; it was called with 2 arguments"]),
        ("race nobody", ["nothing takes part"]),
        ("lost", ["Teller.wrong raised CancelledError"]),
        ("each other", ["Teller.wrong raised UsageError", "wait for each other"]),
        ("handler", ["Bank has no handler 'stolen'"]),
    ],
)
def test_what_stops_the_app(two: WaitingInstances, kind: str, words: list[str]) -> None:
    with pytest.raises(HandlerError) as caught:
        two["teller"].impulse("wrong", kind)
    for word in words:
        assert word in str(caught.value).replace("',)", "')")
    assert "never" not in log(two)
    assert "/appsdk/" not in str(caught.value)  # the traceback is of the user's code


def test_a_bug_in_the_callee_stops_the_callee(two: WaitingInstances) -> None:
    two["teller"].impulse("many", "awaited twice")
    with pytest.raises(HandlerError, match=r"Bank\.debit raised KeyError .*\n +arguments: \('nobody', 1\)"):
        two["teller"].impulse("transfer", "nobody", "b", 1)


def test_def_handlers_do_not_wait() -> None:
    teller = Teller()
    for call in (
        lambda: immortal.sleep(timedelta(1)),
        lambda: immortal.at(datetime.now(UTC)),
        lambda: immortal.event("x"),
        lambda: immortal.race(),
        lambda: immortal.continue_as(),
    ):
        with pytest.raises(UsageError, match="only an 'async def' handler waits"):
            call()
    with pytest.raises(UsageError, match="only async handlers wait for an answer"):
        teller.bank.credit("a", 1)
    with pytest.raises(UsageError, match=r"started with \.fork"):
        teller.transfer("a", "b", 1)
    with pytest.raises(UsageError, match="only an 'async def' handler waits"):
        immortal.step(Bank().counted)


class Stepping(Immortal):
    bank = peer(Bank, "bank")
    seen: list[int]

    def __init__(self) -> None:
        self.seen = []

    @rpc(raises=[InsufficientFunds])
    def put(self, number: int, times: int = 1) -> int:
        if number > 9:
            raise InsufficientFunds("a", number)
        self.seen += [number] * times
        return len(self.seen)

    @rpc
    async def run(self) -> list[int]:
        counts = [
            await immortal.step(self.put, 1),
            await immortal.step(self.put, 2),
            await immortal.step(functools.partial(self.put, 3), times=2),
        ]
        counts += await asyncio.gather(immortal.step(self.put, 5), self.bank.credit("a", 1))
        try:
            await immortal.step(self.put, 10)
        except InsufficientFunds as error:
            counts.append(error.missing)
        return counts


def test_a_step_that_is_written_out_is_the_same_step() -> None:
    with Environment() as env:
        env.start(Bank, "bank")
        stepping = env.start(Stepping, "stepping")
        assert stepping.call(Stepping.run) == [1, 2, 4, 5, 11, 10]
        assert stepping.state.seen == [1, 2, 3, 3, 5]


class Journaled(Immortal):
    """Changed below, with one name, as the next version of a file would be."""

    bank = peer(Bank, "bank")
    log: list[str]

    def __init__(self) -> None:
        self.log = []

    @rpc
    def note(self, text: str) -> None:
        self.log.append(text)

    @impulse
    async def work(self, text: str) -> None:
        await immortal.step(self.note, f"first {text}")  # type: ignore[func-returns-value]
        await self.bank.credit("a", 1)
        await immortal.sleep(timedelta(seconds=5))
        await immortal.step(self.note, "done")  # type: ignore[func-returns-value]


def changed(body: Any, **keywords: Any) -> type:
    """``Journaled`` with another ``work``."""

    def fill(namespace: dict[str, Any]) -> None:
        body.__name__ = "work"
        body.__qualname__ = "Journaled.work"
        namespace["work"] = impulse(body)
        namespace["__qualname__"] = "Journaled"

    import types

    return types.new_class("Journaled", (Journaled,), keywords, fill)


async def _other_step(self: Any, text: str) -> None:
    await immortal.step(self.note, f"1st {text}")
    await self.bank.credit("a", 1)
    await immortal.sleep(timedelta(seconds=5))


async def _other_call(self: Any, text: str) -> None:
    await immortal.step(self.note, f"first {text}")
    await self.bank.debit("a", 1)
    await immortal.sleep(timedelta(seconds=5))


async def _fewer(self: Any, text: str) -> None:
    await immortal.step(self.note, f"first {text}")


async def _more(self: Any, text: str) -> None:
    await immortal.step(self.note, f"first {text}")
    await immortal.step(self.note, "and")
    await self.bank.credit("a", 1)


async def _other_timer(self: Any, text: str) -> None:
    await immortal.step(self.note, f"first {text}")
    await self.bank.credit("a", 1)
    await immortal.sleep(timedelta(seconds=6))


async def _raises(self: Any, text: str) -> None:
    await immortal.step(self.note, f"first {text}")
    try:
        await self.bank.credit("a", 2)
    except Exception:  # what is wrong is none of its business
        await immortal.sleep(timedelta(seconds=1))


async def _fails(self: Any, text: str) -> None:
    await immortal.step(self.note, f"first {text}")
    await self.bank.credit("a", 1)
    raise ValueError(text)


async def _other_arguments(self: Any, text: int) -> None:
    await immortal.step(self.note, f"first {text}")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (_other_step, ["step 1", "expected step note (arguments ", "got step note (arguments "]),
        (_other_call, ["step 2", "expected call bank.credit", "got call bank.debit"]),
        (_fewer, ["step 2", "expected call bank.credit", "got its end"]),
        (_more, ["step 2", "expected call bank.credit", "got step note"]),
        (_other_timer, ["step 3", "expected timer for 2023-11-14T22:13:25", "got timer for 2023-11-14T22:13:26"]),
        (_raises, ["step 2", "expected call bank.credit (arguments ", "got call bank.credit (arguments "]),
        (_fails, ["step 3", "expected timer for ", "got ValueError: x"]),
        (_other_arguments, ["Journaled.work", "arguments that do not fit its annotations"]),
    ],
)
def test_a_journal_that_does_not_match_the_code(tmp_path: Path, body: Any, words: list[str]) -> None:
    two = WaitingInstances(tmp_path, {"bank": Bank, "one": Journaled})
    two["one"].impulse("work", "x")
    two["one"].checkpoint()
    two.kill("one")
    with pytest.raises(JournalError) as caught:
        two.start("one", changed(body))
    assert caught.value.exit_status == 70
    for word in ["Journaled.work", "@upgrades", *words]:
        assert word in str(caught.value)
    two.kill("one")
    two.start("one", Journaled)  # with the code that it waits in it goes on
    two.pass_time(5)
    assert two.app("one").log == ["first x", "done"]
    two.close()


@upgrades(Journaled)
class Upgraded(Immortal):
    bank = peer(Bank, "bank")
    log: list[str]
    extra: int

    @classmethod
    def upgrade(cls, old: Journaled) -> Upgraded:
        new = cls()
        new.log = [*old.log, "upgraded"]
        new.extra = 1
        return new

    @rpc
    def note(self, text: str) -> None:
        self.log.append(f"{text} {self.extra}")

    @impulse
    async def work(self, text: str) -> None:
        await immortal.step(self.note, f"first {text}")  # type: ignore[func-returns-value]
        await self.bank.credit("a", 1)
        await immortal.sleep(timedelta(seconds=5))
        await immortal.step(self.note, "done")  # type: ignore[func-returns-value]
        await immortal.step(self.note, f"{await self.bank.credit('a', 5)}")  # type: ignore[func-returns-value]


def test_an_upgrade_while_a_handler_waits(tmp_path: Path) -> None:
    two = WaitingInstances(tmp_path, {"bank": Bank, "one": Journaled})
    two["one"].impulse("work", "x")
    two["one"].checkpoint()
    two.kill("one")
    two.classes["one"] = Upgraded
    two.start("one", Upgraded, upgrade_to=2)
    two.crash("one")
    two.pass_time(5)
    assert two.app("one").log == ["first x", "upgraded", "done 1", "16 1"]
    two.close()


def test_an_upgrade_that_lacks_the_handler_that_waits_fails(tmp_path: Path) -> None:
    @upgrades(Journaled)
    class Lacking(Immortal):
        log: list[str]

        @classmethod
        def upgrade(cls, old: Journaled) -> Lacking:
            new = cls()
            new.log = old.log
            return new

    two = WaitingInstances(tmp_path, {"bank": Bank, "one": Journaled})
    two["one"].impulse("work", "x")
    two.kill("one")
    with pytest.raises(
        UpgradeError, match=r"an async handler with the method ID \d+ waits, .*no such handler"
    ) as caught:
        two.start("one", Lacking, upgrade_to=2)
    assert "Fix " not in str(caught.value)  # 'upgrade' is not at fault
    assert "old version. Mend that and start again." in str(caught.value)
    assert str(caught.value).count("the app stops") == 1
    assert "\n" not in caught.value.reason
    two.kill("one")
    two.start("one", Journaled)
    two.pass_time(5)
    assert two.app("one").log == ["first x", "done"]
    two.close()


def test_discarding_what_waits_runs_nothing_of_it(tmp_path: Path) -> None:
    class Old(Immortal):
        bank = peer(Bank, "bank")

        @impulse
        async def work(self) -> None:
            try:
                await immortal.sleep(timedelta(seconds=5))
            finally:
                self.bank.credit.fork("b", 1)

    @upgrades(Old)
    class New(Immortal):
        bank = peer(Bank, "bank")

        @classmethod
        def upgrade(cls, old: Old) -> New:
            return cls()

        @impulse
        async def work(self) -> None:
            await immortal.sleep(timedelta(seconds=5))
            self.bank.credit.fork("b", 10)

    two = WaitingInstances(tmp_path, {"bank": Bank, "one": Old})
    two["one"].impulse("work")
    two.kill("one")
    two.classes["one"] = New
    two.start("one", New, upgrade_to=2)
    two.pass_time(5)
    assert two.app("bank").accounts["b"] == 10
    two.close()


# --- looking at it ----------------------------------------------------------------------------------------------------


def test_what_waits_is_shown(two: WaitingInstances) -> None:
    two.kill("bank")
    two["teller"].impulses([("transfer", ("a", "b", 4)), ("approve", ("x", 1)), ("loop", (3,))])
    blob = b"".join(two["teller"].dispatcher._life.encode())
    shown = inspect_state(definition_of(Teller), blob).to_json()["state"]
    first, second = shown["$waiting"]
    assert (first["handler"], first["arguments"]) == ("transfer", ["a", "b", 4])
    assert first["waits_for"][0].startswith("call bank.debit")
    assert (second["handler"], second["results"][0][1]) == ("loop", 1)
    assert second["waits_for"][0].startswith("timer for 2023-")
    assert shown["$signals"] == {"x": [1]}
    assert shown["balance"] == 1


def test_an_app_without_async_handlers_has_nothing_of_it(tmp_path: Path) -> None:
    class Plain(Immortal):
        count: int

        def __init__(self) -> None:
            self.count = 0

        @initial
        def begin(self) -> None:
            self.count = 1

        @rpc(id=5)
        def add(self) -> None:
            self.count += 1

    one = WaitingInstances(tmp_path, {"one": Plain})
    dispatcher = one["one"].dispatcher
    assert dispatcher.next_due_ns is None
    assert dispatcher.tasks.save() is None
    assert dispatcher._life.delivery._entries[5][1] is definition_of(Plain).handlers["add"].function
    assert b"".join(dispatcher._life.encode())[6] == 3  # the version of a checkpoint without multicasts or handles
    one.close()


def test_winner() -> None:
    assert Winner(1, "x") == Winner(index=1, value="x")
    assert threading.active_count() >= 1
