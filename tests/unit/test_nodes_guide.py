"""The program of the guide to nodes runs, and does what the guide says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from immortal.testing import Environment

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "how-to" / "nodes.md").read_text()
REQUIREMENTS = (ROOT / "tests" / "requirements" / "nodes.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", GUIDE, re.DOTALL))


@pytest.fixture
def market(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("market")
    monkeypatch.setitem(sys.modules, "market", module)
    exec(compile("# market.py\n" + PROGRAMS["market"], "market.py", "exec"), module.__dict__)
    return module


def test_market(market: Any, immortal_env: Environment) -> None:
    broker = immortal_env.start(market.Broker, "broker")
    exchange = immortal_env.start(market.Exchange, "exchange")
    exchange.send(market.Exchange.open, "gold", 10)
    immortal_env.run()
    exchange.send(market.Exchange.open, "tin", 5)
    immortal_env.run()
    assert exchange.state.trades == ["gold: 7 left", "tin: 2 left"]
    exchange.send(market.Exchange.close, "tin")
    immortal_env.run()
    assert broker.state.events == ["an order was closed"]
    broker.send(market.Broker.finish_all)
    immortal_env.run()
    assert exchange.state.trades[2:] == ["gold: 0 left", "nobody works on gold"]
    assert broker.state.working == []


def test_each_statement_has_its_test() -> None:
    tests = "".join(
        (ROOT / "tests" / name).read_text()
        for name in ("unit/test_sdk_nodes.py", "unit/test_nodes_exploration.py", "properties/test_nodes_runs.py")
    )
    named = re.findall(r"`(test_\w+|NoTombstone|OnlyThoseKnown)`", REQUIREMENTS)
    assert len(named) >= 6
    for name in named:
        assert re.search(rf"(def|class) {name}\b", tests), name
