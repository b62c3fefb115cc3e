"""Whatever its handlers leave in the state, and whatever crashes when: the service is there at the end."""

from __future__ import annotations

from random import Random

import pytest

from immortal import CalleeFailed
from immortal.appsdk.testing.instance import Pending
from immortal.testing import Environment
from tests.unit.test_sdk_healing import Forking, Purse, Spender, skip, status

STEPS = 25
AMOUNTS = (1, 2, 5, 60, 90, 500, -40, -500)


def outcome(call: Pending[str]) -> str:
    try:
        return call.result()
    except CalleeFailed as error:
        return str(error)


@pytest.mark.parametrize("seed", range(8))
def test_a_service_that_is_hard_to_save(seed: int) -> None:
    random = Random(seed)
    with Environment(fail_alone=True, seed=seed) as env:
        purse = env.start(random.choice((Purse, Forking)), "purse")
        spender = env.start(Spender, "spender")
        calls = []
        for _ in range(STEPS):
            step = random.choice(("add", "add", "put", "spend", "note", "empty", "checkpoint", "crash", "skip", "time"))
            if step == "add":
                for _ in range(random.randint(1, 4)):
                    purse.send(Purse.add, random.choice(AMOUNTS))
            elif step == "put":
                purse.call(Purse.put, random.choice(AMOUNTS))
            elif step == "spend":
                calls.append(spender.begin(Spender.spend, random.choice(AMOUNTS)))
            elif step == "note":
                purse.call(Purse.note, "n")
            elif step == "empty" and random.random() < 0.3:
                purse.send(Purse.empty)
            elif step == "checkpoint":
                purse.checkpoint()
            elif step == "crash":
                random.choice((purse.crash, purse.crash_app, purse.stop))()
                purse.recover()
            elif step == "skip" and (said := status(purse)) is not None and said["record"] is not None:
                assert skip(env, purse, said["record"], said["message"])
            elif step == "time":
                env.advance(minutes=random.choice((1, 70)))
            env.run()
        env.advance(hours=2)
        purse.send(Purse.empty)
        env.run()
        purse.checkpoint()
        assert status(purse) is None
        assert purse.call(Purse.put, 1) == 1
        assert all(call.done for call in calls)
        assert {outcome(call) for call in calls} <= {"1", "StateError", "Taken_back"}
