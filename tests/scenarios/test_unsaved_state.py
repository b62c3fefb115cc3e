"""A state that can't be saved, with real processes: it stops nothing, it is said, and each way out is one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cli import Run, immortal

MONEY = """
from immortal import Immortal, register_type, rpc, upgrades


class Money:
    def __init__(self, cents: int) -> None:
        self.cents = cents


def encode(money: Money) -> int:
    if money.cents > 1000:
        raise OverflowError(f"{money.cents} cents have no room")
    return money.cents


register_type(Money, encode=encode, decode=Money, form=int)


class Till(Immortal, checkpoint="fork"):
    money: list[Money]

    def __init__(self) -> None:
        self.money = [Money(0) for _ in range(5000)]  # so much that not all of it is looked at behind each call

    @rpc
    def take(self, cents: int) -> int:
        self.money[0] = Money(self.money[0].cents + cents)
        return self.money[0].cents
"""
CODEC = MONEY.replace(
    "        raise OverflowError", "        return -money.cents\n        raise OverflowError"
).replace("decode=Money", "decode=lambda cents: Money(abs(cents))")
UPGRADED = f"""{MONEY}

@upgrades(Till)
class Purse(Immortal):
    cents: int

    @classmethod
    def upgrade(cls, old: Till) -> "Purse":
        new = cls()
        new.cents = old.money[0].cents
        return new

    def __init__(self) -> None:
        self.cents = 0

    @rpc
    def take(self, cents: int) -> int:
        self.cents += cents
        return self.cents
"""


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[list[Run]]:
    (tmp_path / "tills.py").write_text(MONEY)
    immortal(tmp_path, "register", "till", "--peer", "tcp://127.0.0.1:*", "--log-limit-mb", "64")
    runs: list[Run] = []
    yield runs
    for run in runs:
        run.kill()


def start(runs: list[Run], folder: Path, app: str = "tills:Till") -> Run:
    runs.append(Run(folder, "till", app, "--restart"))
    runs[-1].line("ready")
    return runs[-1]


def status(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(immortal(folder, "status", "till", "--json"))
    return found


def take(folder: Path, cents: int) -> int:
    return int(immortal(folder, "call", "till", "take", str(cents)))


def test_it_works_on_and_each_way_out_is_one(runs: list[Run], tmp_path: Path) -> None:
    run = start(runs, tmp_path)
    assert take(tmp_path, 5000) == 5000
    said = immortal(tmp_path, "checkpoint", "till", status=1)
    assert "till has no checkpoints" in said
    assert "5000 cents have no room" in said
    assert "Till.take, record 1, message 0, called by the client" in said
    assert "MiB of its 64 MiB are left" in said
    assert "'immortal skip till 1:0 --reason ...'" in said
    for command in (("status", "till"), ("health", "till", "--ready")):
        assert "5000 cents have no room" in immortal(tmp_path, *command)
    assert take(tmp_path, 1) == 5001
    os.kill(status(tmp_path)["pid"], signal.SIGKILL)
    run.line("ready", 2)
    assert take(tmp_path, 1) == 5002
    assert status(tmp_path)["unsaved"]["record"] == 1
    assert "can recover, but its state can't be saved since record 1" in immortal(tmp_path, "recover", "till")
    # By an operator.
    assert "is skipped" in immortal(tmp_path, "skip", "till", "1:0", "--reason", "too much")
    assert status(tmp_path)["unsaved"] is None
    assert "5000 cents have no room" not in immortal(tmp_path, "checkpoint", "till")
    assert take(tmp_path, 1) == 3
    # By an operator, while it is stopped.
    assert take(tmp_path, 2000) == 2003
    place = f"{status(tmp_path)['sequence_id']}:0"
    immortal(tmp_path, "stop", "till")
    other = immortal(tmp_path, "skip", "till", "99:0", "--reason", "too much", "--handled", status=1)
    assert "its state can't be saved since record" in other
    assert "is skipped" in immortal(tmp_path, "skip", "till", place, "--reason", "too much", "--handled")
    start(runs, tmp_path)
    assert take(tmp_path, 1) == 4
    # By a codec.
    assert take(tmp_path, 2000) == 2004
    assert "without a checkpoint of its last" in immortal(tmp_path, "stop", "till")
    assert "can recover, but its state can't be saved since record" in immortal(tmp_path, "recover", "till")
    assert "its state can't be saved since record" in immortal(tmp_path, "doctor", "till", status=1)
    (tmp_path / "tills.py").write_text(CODEC)
    start(runs, tmp_path)
    assert status(tmp_path)["unsaved"] is None
    assert take(tmp_path, 1) == 2005


def test_an_upgrade_is_a_way_out(runs: list[Run], tmp_path: Path) -> None:
    start(runs, tmp_path)
    assert take(tmp_path, 5000) == 5000
    immortal(tmp_path, "stop", "till")
    (tmp_path / "tills.py").write_text(UPGRADED)
    immortal(tmp_path, "upgrade", "till", "tills:Purse", "--to", "2")
    start(runs, tmp_path, "tills:Purse")
    assert take(tmp_path, 1) == 5001
    assert status(tmp_path)["unsaved"] is None
