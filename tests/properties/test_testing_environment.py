"""An environment under whatever a test may do: transfers arrive once, and each run replays."""

from __future__ import annotations

import random

import pytest

from immortal.testing import Environment
from tests.helpers.bank_apps import Bank, Teller

ACTIONS = 40


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_done_each_call_is_handled_once(seed: int) -> None:
    rng = random.Random(seed)
    with Environment(order=seed if seed % 2 else None) as env:
        bank, teller = env.start(Bank, "bank"), env.start(Teller, "teller")
        transfers = []
        sent = 0
        for _ in range(ACTIONS):
            one = rng.choice([bank, teller])
            action = rng.choice(["down", "up", "up", "checkpoint", "advance", "send", "begin", "run", "part", "heal"])
            if action == "down" and one.is_up:
                rng.choice([one.crash, one.crash_app, one.stop])()
            elif action == "up" and not one.is_up:
                one.recover()
            elif action == "checkpoint" and one.is_up:
                one.checkpoint()
            elif action == "advance":
                env.advance(minutes=rng.choice([1, 30, 90]))
            elif action == "send":
                teller.send(Teller.feeds, "bob", 1)
                sent += 1
            elif action == "begin":
                transfers.append(teller.begin(Teller.transfer, "ann", "bob", 1))
            elif action == "run":
                env.run()
            elif action == "part":
                env.partition(bank, teller)
            elif action == "heal":
                env.heal()
        env.heal()
        for one in (bank, teller):
            if not one.is_up:
                one.recover()
        env.advance(hours=3)
        assert [transfer.done and transfer.result() for transfer in transfers] == [True] * len(transfers)
        assert bank.state.accounts == {"ann": 100 - len(transfers), "bob": sent + len(transfers)}
