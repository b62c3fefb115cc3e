"""immortal.testing: several immortals in one process, on a clock of the test's own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import immortal
from immortal import Immortal, every, rpc, upgrades
from immortal.appsdk.testing.world import LivelockError
from immortal.coordinator.core.effects import Effect
from immortal.coordinator.core.events import Event
from immortal.coordinator.core.machine import Machine
from immortal.errors import StateError, UsageError
from immortal.testing import Environment, Instance, NoAnswerError
from tests.helpers.bank_apps import Bank, InsufficientFundsError, RichBank, Teller

HOUR = timedelta(hours=1)


class Fragile(Immortal):
    values: list[int]

    def __init__(self) -> None:
        self.values = []

    @rpc
    def put(self, value: int) -> None:
        self.values.append(100 // value)

    @rpc
    def forever(self) -> None:
        self.forever.fork()


class Repaired(Fragile, formerly=("Fragile",)):
    @rpc
    def put(self, value: int) -> None:
        self.values.append(-value)


def both(env: Environment) -> tuple[Instance[Bank], Instance[Teller]]:
    return env.start(Bank, "bank"), env.start(Teller, "teller")


def test_calls_from_outside_give_what_handlers_return_and_raise() -> None:
    with Environment() as env:
        bank, teller = both(env)
        assert bank.call(Bank.debit, "ann", 30) == 70
        assert bank.call(Bank.debit, account="ann") == 69
        with pytest.raises(InsufficientFundsError) as caught:
            bank.call(Bank.debit, "ann", 100)
        assert caught.value.missing == 31
        assert teller.call(Teller.count, 5) == 5
        assert bank.state.accounts == {"ann": 69, "bob": 0}


def test_the_state_is_a_copy() -> None:
    with Environment() as env:
        bank = env.start(Bank, "bank")
        bank.state.accounts["ann"] = 5
        assert bank.state.accounts["ann"] == 100


def test_the_clock_moves_by_the_test_and_by_calls_that_wait() -> None:
    start = datetime(2031, 5, 6, tzinfo=UTC)
    with Environment(start=start) as env:
        _, teller = both(env)
        assert teller.state.began == env.now == start
        pending = teller.begin(Teller.transfer, "ann", "bob", 10)
        env.run()
        assert not pending.done
        env.advance(minutes=59)
        assert not pending.done
        env.advance(minutes=1)
        assert pending.done
        assert pending.result() is True
        assert env.now == start + HOUR
        assert teller.call(Teller.transfer, "ann", "bob", 10) is True
        assert env.now == start + 2 * HOUR
        env.advance(days=2)
        assert teller.state.ticks == [start + timedelta(days=1), start + timedelta(days=2)]


class Ticking(Immortal):
    seen: list[datetime]

    def __init__(self) -> None:
        self.seen = []

    @every("5s")
    def tick(self) -> None:
        self.seen.append(immortal.now())

    @rpc
    async def wait(self, duration: timedelta) -> None:
        await immortal.sleep(duration)


def test_a_clock_that_jumps_makes_up_for_what_was_due_with_one_run() -> None:
    with Environment() as env:
        ticking = env.start(Ticking, "ticking")
        env.advance(seconds=10)
        pending = ticking.begin(Ticking.wait, timedelta(days=1))
        began = env.now
        env.skip(days=2, seconds=3)
        assert (env.now, pending.done) == (began + timedelta(days=2, seconds=3), True)
        env.advance(seconds=2)
        seconds = [(moment - began).total_seconds() for moment in ticking.state.seen]
        assert seconds == [-5, 0, 2 * 86_400 + 3, 2 * 86_400 + 5]


@pytest.mark.source
def test_time_costs_turns_only_where_something_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0
    handle = Machine.handle

    def counted(machine: Machine, events: Sequence[Event], now_ns: int) -> list[Effect]:
        nonlocal turns
        turns += 1
        return handle(machine, events, now_ns)

    monkeypatch.setattr(Machine, "handle", counted)
    with Environment() as env:
        env.start(Bank, "bank")
        waiting = env.start(Ticking, "ticking")
        env.run()
        turns = 0
        env.advance(minutes=5)
        assert (len(waiting.state.seen), turns) == (60, 60 * 5)  # two records for each run, and what each asks for
    with Environment() as env:
        env.start(Bank, "bank")
        turns = 0
        env.advance(days=365)
        assert turns == 0


def test_impulses_are_handled_in_order_when_the_environment_runs() -> None:
    with Environment() as env:
        bank, teller = both(env)
        for amount in range(1, 6):
            teller.send(Teller.feeds, "bob", amount)
        assert bank.state.accounts["bob"] == 0
        env.run()
        assert bank.state.accounts["bob"] == 15


@pytest.mark.parametrize("how", ["crash", "crash_app", "stop"])
def test_what_has_gone_down_comes_back_as_it_was(how: str) -> None:
    with Environment() as env:
        bank, teller = both(env)
        pending = teller.begin(Teller.transfer, "ann", "bob", 10)
        env.run()
        for one in (bank, teller):
            getattr(one, how)()
            assert not one.is_up
        with pytest.raises(UsageError, match="is down"):
            _ = teller.state
        env.advance(hours=2)
        teller.recover()
        bank.recover()
        assert pending.result() is True
        assert bank.state.accounts == {"ann": 90, "bob": 10}


def test_a_crash_loses_what_was_not_durable_and_nothing_else() -> None:
    with Environment() as env:
        bank = env.start(Bank, "bank")
        pending = [bank.begin(Bank.debit, "ann", 1) for _ in range(10)]
        bank.crash()  # before anything of it has run
        env.run()
        assert not any(one.done for one in pending)
        bank.recover()
        assert [one.result() for one in pending] == list(range(99, 89, -1))


def test_who_is_parted_waits() -> None:
    with Environment() as env:
        bank, teller = both(env)
        env.partition(bank, teller)
        pending = teller.begin(Teller.transfer, "ann", "bob", 10)
        env.advance(hours=5)
        assert (pending.done, bank.state.accounts["ann"]) == (False, 100)
        env.heal()
        assert bank.state.accounts["ann"] == 90
        assert pending.result() is True


def test_a_hook_runs_to_its_end() -> None:
    with Environment() as env:
        bank, teller = both(env)
        teller.run_hook(Teller.feed)
        assert (teller.state.moved, bank.state.accounts["bob"]) == (3, 7)


def test_an_upgrade_takes_the_state_over() -> None:
    with Environment() as env:
        bank, teller = both(env)
        assert teller.call(Teller.transfer, "ann", "bob", 10)
        rich = bank.upgrade(RichBank)
        assert rich.state.accounts == {"ann": 900, "bob": 100}
        assert teller.call(Teller.transfer, "ann", "bob", 10)
        rich.crash()
        rich.recover()
        assert (rich.state.accounts, rich.state.fees) == ({"ann": 890, "bob": 110}, 1)


def test_a_failed_upgrade_raises_what_the_upgrade_raised() -> None:
    @upgrades(Bank)
    class Broken(Immortal):
        @classmethod
        def upgrade(cls, old: Bank) -> Broken:
            raise LookupError("no way")

    with Environment() as env:
        bank = env.start(Bank, "bank")
        with pytest.raises(LookupError, match="no way"):
            bank.upgrade(Broken)
        assert bank.upgrade(Bank).state.accounts["ann"] == 100


def test_a_handler_that_raises_fails_the_test_with_its_own_traceback_and_can_be_repaired() -> None:
    with Environment() as env:
        fragile = env.start(Fragile, "fragile")
        fragile.call(Fragile.put, 4)
        with pytest.raises(ZeroDivisionError) as caught:
            fragile.call(Fragile.put, 0)
        assert caught.traceback[-1].name == "put"
        assert "Fragile.put raised ZeroDivisionError at record 2, message 0; the app stops" in caught.value.__notes__
        assert "in the instance 'fragile'" in caught.value.__notes__
        assert not fragile.is_up
        with pytest.raises(ZeroDivisionError):
            fragile.recover()  # a replay repeats it
        repaired = fragile.upgrade(Repaired)
        assert repaired.state.values == [-4, 0]


def test_a_failed_handler_is_no_difference_at_the_end() -> None:
    with Environment() as env:
        fragile = env.start(Fragile, "fragile")
        fragile.send(Fragile.put, 0)
        with pytest.raises(ZeroDivisionError):
            env.run()


def test_an_answer_that_can_not_come_says_why() -> None:
    with Environment() as env:
        bank = env.start(Bank, "bank")
        teller = env.start(Teller, "teller")
        pending = teller.begin(Teller.approved)
        with pytest.raises(NoAnswerError, match=r"within 7 days.*\n.*1 async handlers that wait"):
            pending.result()
        teller.send(Teller.approve, "fine")
        assert pending.result() == "fine"
        bank.crash()
        with pytest.raises(NoAnswerError, match="'bank' is down"):
            bank.call(Bank.debit, "ann")
        bank.recover()
    with Environment() as env:
        lonely = env.start(Teller, "teller")
        with pytest.raises(NoAnswerError, match="a peer 'bank', which was not started"):
            lonely.begin(Teller.transfer, "ann", "bob", 1).result(patience=HOUR)


def test_handlers_that_go_on_for_ever_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("immortal.appsdk.testing.world.STEPS_MAX", 500)
    env = Environment()
    fragile = env.start(Fragile, "fragile")
    with pytest.raises(LivelockError, match="after 500 steps"):
        fragile.call(Fragile.forever)


def _transfers(**options: Any) -> tuple[dict[str, int], list[float]]:
    with Environment(**options) as env:
        bank, teller = both(env)
        pending = [teller.begin(Teller.transfer, "ann", "bob", amount) for amount in (60, 30, 20, 5)]
        results = [one.result() for one in pending]
        assert results == [True, True, False, True]
        return bank.state.accounts, teller.state.draws


def test_the_same_numbers_give_the_same_run() -> None:
    assert _transfers() == _transfers()
    assert _transfers(seed=1)[1] != _transfers()[1]
    for order in range(20):
        first = _transfers(order=order)
        assert first == _transfers(order=order)
        assert first[0] == {"ann": 5, "bob": 95}


def test_no_thread_is_started() -> None:
    before = set(threading.enumerate())
    with Environment() as env:
        both(env)
        assert set(threading.enumerate()) <= before


def test_wrong_uses_say_what_is_right() -> None:
    with Environment() as env:
        bank = env.start(Bank, "bank")
        with pytest.raises(UsageError, match="an instance of this environment"):
            env.start(Bank, "bank")
        with pytest.raises(UsageError, match="the test itself"):
            env.start(Bank, "test")
        with pytest.raises(UsageError, match="1 to 255 bytes"):
            env.start(Bank, "")
        with pytest.raises(UsageError, match=r"Teller\.count is no handler of <Bank 'bank'>: it has Bank\.credit"):
            bank.call(Teller.count, 5)
        with pytest.raises(TypeError, match="missing a required argument: 'account'"):
            bank.call(Bank.debit)  # type: ignore[call-arg]
        with pytest.raises(UsageError, match="is up"):
            bank.recover()
        with pytest.raises(UsageError, match="the clock goes on only"):
            env.advance(hours=-1)
        with pytest.raises(UsageError, match=r"env\.skip: -1 day, 23:00:00: the clock goes on only"):
            env.skip(hours=-1)
        with pytest.raises(UsageError, match="time zone"):
            Environment(start=datetime(2030, 1, 1))
    with pytest.raises(UsageError, match="closed"):
        env.run()


def test_a_state_that_no_checkpoint_keeps_fails_where_it_is_seen() -> None:
    class Forgetful(Immortal):
        @rpc
        def keep(self) -> None:
            self.kept = 5

    env = Environment()
    forgetful = env.start(Forgetful, "forgetful")
    with pytest.raises(StateError, match="'kept' is set but not annotated"):
        forgetful.call(Forgetful.keep)
