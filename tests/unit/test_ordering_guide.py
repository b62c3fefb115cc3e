"""The programs of the guide to ordered multicasts run, and the table of its requirements names tests that there are."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from immortal.testing import Environment

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "how-to" / "ordering.md").read_text()
REQUIREMENTS = (ROOT / "tests" / "requirements" / "ordering.md").read_text()


def program(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    source = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", GUIDE, re.DOTALL))[name]
    module: Any = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(source, f"{name}.py", "exec"), module.__dict__)
    return module


def test_a_group_gets_a_third_member(monkeypatch: pytest.MonkeyPatch) -> None:
    module = program("floor", monkeypatch)
    with Environment() as env:
        floors = [env.start(module.Floor, name) for name in ("b1", "b2", "b3")]
        broker = env.start(module.Broker, "broker")
        broker.call(module.Broker.trade, "one")
        floors[2].call(module.Floor.enter)
        assert broker.call(module.Broker.trade_and_wait, "two")
        assert [floor.state.orders for floor in floors] == [["one", "two"], ["one", "two"], ["two"]]
        assert floors[0].call(module.Floor.group_known, "prices")[1].members == ("b1", "b2", "b3")


def test_two_books_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    module = program("books", monkeypatch)
    for order in range(10):
        with Environment(order=order) as env:
            east, west = env.start(module.Book, "east"), env.start(module.Book, "west")
            traders = [env.start(module.Trader, f"trader{number}") for number in range(3)]
            pending = [trader.begin(module.Trader.trade_and_wait, "waited") for trader in traders]
            for trader in traders:
                trader.send(module.Trader.trade, "sent")
            env.run()
            assert all(one.result() for one in pending)
            assert east.state.orders == west.state.orders
            assert len(east.state.orders) == 6


def test_each_statement_names_a_test_that_there_is() -> None:
    table = REQUIREMENTS.partition("| statement |")[2].partition("\n\n")[0]
    source = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    named = set(re.findall(r"`(test_\w+)`", table))
    assert len(named) > 7
    assert {name for name in named if f"def {name}(" not in source} == set()
    files = set(re.findall(r"`(?:tests/)?(?:\w+/)*(\w+\.py)", table))
    assert files <= {path.name for path in (ROOT / "tests").rglob("*.py")}
