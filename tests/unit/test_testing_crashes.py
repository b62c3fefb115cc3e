"""immortal.testing.crash_everywhere: the same test with a crash at each point."""

from __future__ import annotations

import pytest

from immortal import Immortal, Transient, rpc
from immortal.errors import UsageError
from immortal.testing import ReplayDiffers, crash_everywhere
from tests.helpers.bank_apps import Bank, RichBank, Teller


class Leaky(Immortal):
    """Counts in what a crash takes away."""

    count: int
    cache: Transient[int]

    def __init__(self) -> None:
        self.count = 0

    def prepare(self) -> None:
        self.cache = self.count

    @rpc
    def add(self) -> int:
        self.cache += 1
        return self.cache


@pytest.mark.slow
@pytest.mark.parametrize("order", [None, 3])
def test_no_crash_changes_a_result(order: int | None) -> None:
    runs = 0
    for env in crash_everywhere(order=order):
        with env:
            runs += 1
            bank, teller = env.start(Bank, "bank"), env.start(Teller, "teller")
            teller.send(Teller.feeds, "bob", 5)
            assert teller.call(Teller.transfer, "ann", "bob", 30) is True
            assert bank.state.accounts == {"ann": 70, "bob": 35}
            assert teller.state.moved == 30
    assert runs > 100


@pytest.mark.slow
def test_an_upgrade_is_done_once_wherever_the_crash_comes() -> None:
    for env in crash_everywhere():
        with env:
            bank = env.start(Bank, "bank")
            bank.call(Bank.debit, "ann", 10)
            rich = bank.upgrade(RichBank)
            assert rich.call(RichBank.debit, "ann", 1) == 899
            assert rich.state.fees == 1


def test_what_a_crash_takes_away_is_found_and_the_place_is_said() -> None:
    def check() -> None:
        for env in crash_everywhere(victims=["instance"]):
            with env:
                leaky = env.start(Leaky, "leaky")
                leaky.call(Leaky.add)
                assert leaky.call(Leaky.add) == 2

    with pytest.raises(ReplayDiffers) as caught:  # a recovery's checkpoint has lost the cache
        check()
    assert "with app and coordinator of 'leaky' crashed at point " in caught.value.__notes__[-1]


def test_the_number_of_runs_is_bounded_and_they_are_spread() -> None:
    happened = []
    for env in crash_everywhere(runs_max=11):
        with env:
            env.start(Bank, "bank").call(Bank.credit, "ann", 1)
        happened.append(env.crash)
    assert len(happened) == 11
    assert happened[0] == ""
    assert sum("with the app of 'bank'" in one for one in happened) == 5
    assert sum("with app and coordinator of 'bank'" in one for one in happened) == 5


def test_an_environment_is_used_in_a_with_statement() -> None:
    environments = crash_everywhere()
    next(environments).start(Bank, "bank")
    with pytest.raises(UsageError, match="with env:"):
        next(environments)
