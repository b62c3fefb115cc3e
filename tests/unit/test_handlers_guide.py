"""The program of the guide to handlers that wait runs, and does what the guide shows."""

from __future__ import annotations

import re
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from immortal.coordinator.core import events as ev
from immortal.protocol.system_methods import Order
from immortal.testing import Environment
from tests.helpers.waiting import WaitingInstances

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "handlers.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", GUIDE, re.DOTALL))


def test_kitchen(immortal_env: Environment) -> None:
    module: Any = ModuleType("kitchen")
    sys.modules["kitchen"] = module
    try:
        exec(compile("# kitchen.py\n" + PROGRAMS["kitchen"], "kitchen.py", "exec"), module.__dict__)
        kitchen = immortal_env.start(module.Kitchen, "kitchen")
        began = immortal_env.now
        calls = [kitchen.begin(module.Kitchen.cook_one, f"{number}", "ann") for number in range(3)]
        assert [call.result() for call in calls] == ["0, by ann", "1, by ann", "2, by ann"]
        assert immortal_env.now - began == timedelta(minutes=20)
    finally:
        del sys.modules["kitchen"]


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("orders")
    monkeypatch.setitem(__import__("sys").modules, "orders", module)
    exec(compile("# orders.py\n" + PROGRAMS["orders"], "orders.py", "exec"), module.__dict__)
    return module.Orders


def test_orders(orders: Any, tmp_path: Path) -> None:
    one = WaitingInstances(tmp_path, {"orders": orders})
    one["orders"].impulse("order", 7)
    one["orders"].impulse("order", 8)
    first, second = one.ask("orders", ev.HandlersAsked, 0)["handlers"]
    assert (first["id"], second["id"]) == (1, 4)
    assert f"orders.py:{first['at'][0][-1]['line']}  answer = await immortal.race(" in GUIDE
    ended = one.cancel("orders", first["id"], "out of stock")["text"]
    assert f"orders: {ended} (" in GUIDE
    signal = Order("signal", second["id"], "order 8", "ann", msgspec.Raw(b"\xc3"))
    given = one.ask("orders", ev.HandlerOrdered, signal)["text"]
    assert f"orders: {given} (" in GUIDE
    assert one.app("orders").states == {7: "cancelled: out of stock", 8: "approved: True"}
    one.close()
