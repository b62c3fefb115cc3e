"""The bank of the examples, whole, in one process: no crash at any point makes or loses money."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from immortal.testing import crash_everywhere
from tests.helpers.effort import effort
from tests.helpers.recorded import load_module

FOLDER = Path(__file__).parents[2] / "examples" / "bank"
TRANSFERS = 12


@pytest.fixture
def bank(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = load_module(FOLDER, "bank")
    monkeypatch.setattr(module, "TRANSFERS", TRANSFERS)
    monkeypatch.setattr(module, "WAIT_S", 0)
    return module


def test_every_transfer_is_settled_once_wherever_the_crash_comes(bank: Any) -> None:
    outcomes: set[str] = set()
    for env in crash_everywhere(runs_max=effort(15)):
        with env:
            banks = [env.start(bank.Bank, name) for name in bank.BANKS]
            teller = env.start(bank.Teller, "teller")
            for number in range(1, TRANSFERS + 1):
                teller.send(bank.Teller.take_order, bank.order(number))
            env.run()
            settled = teller.state.outcomes
            assert settled.keys() == set(range(1, TRANSFERS + 1))
            assert all(len(how) == 1 for how in settled.values())
            money = sum(sum(one.state.balances.values()) for one in banks)
            assert money == len(banks) * bank.ACCOUNTS * bank.OPENING_BALANCE
            outcomes |= {how[0] for how in settled.values()}
    assert len(outcomes) > 1


def test_the_hook_goes_on_from_the_state_after_each_crash(bank: Any) -> None:
    for env in crash_everywhere(runs_max=effort(15)):
        with env:
            for name in bank.BANKS:
                env.start(bank.Bank, name)
            teller = env.start(bank.Teller, "teller")
            teller.run_hook(bank.Teller.take_orders)
            assert teller.state.outcomes.keys() == set(range(1, TRANSFERS + 1))
