"""The programs of the guide to async handlers run."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.helpers.waiting import WaitingInstances

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "async.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", GUIDE, re.DOTALL))


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    made = {}
    for name, source in PROGRAMS.items():
        module: Any = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(source, f"{name}.py", "exec"), module.__dict__)
        made[name] = module
    yield made
    assert sorted(made) == ["bank", "orders", "poller"]


def test_bank(programs: dict[str, Any], tmp_path: Path) -> None:
    bank, teller = programs["bank"].Bank, programs["bank"].Teller
    both = WaitingInstances(tmp_path, {"bank": bank, "teller": teller})
    both["teller"].impulse("transfer", "ann", "bob", 30)
    both["teller"].impulse("transfer", "ann", "bob", 100)
    assert both.app("bank").accounts == {"ann": 70, "bob": 0, "bank": 0}
    both["teller"].checkpoint()
    both["bank"].checkpoint()
    both.crash("teller", "bank")
    both.pass_time(3600)
    assert both.app("bank").accounts == {"ann": 70, "bob": 29, "bank": 1}
    assert (both.app("teller").moved, both.app("teller").refused) == (30, 1)
    both.close()


def test_orders(programs: dict[str, Any], tmp_path: Path) -> None:
    one = WaitingInstances(tmp_path, {"orders": programs["orders"].Orders})
    one.log_time()
    for number in range(3):
        one["orders"].impulse("order", number)
    one["orders"].impulse("decide", 1, True)
    one["orders"].impulse("decide", 2, False)
    one.crash("orders")
    one.pass_time(2 * 86_400)
    assert one.app("orders").states == {0: "expired", 1: "approved", 2: "refused"}
    assert one.app("orders").reports == [3]
    one["orders"].impulse("order", 3)
    one.pass_time(5 * 86_400)  # the next Monday has come, and clears them
    assert one.app("orders").states == {}
    one.close()


def test_poller(programs: dict[str, Any], tmp_path: Path) -> None:
    programs["poller"].ROUNDS = 3
    one = WaitingInstances(tmp_path, {"poller": programs["poller"].Poller})
    for _ in range(7):
        one.pass_time(60)
    assert one.app("poller").rounds == 8
    saved = one["poller"].dispatcher.tasks.save()
    assert saved is not None
    assert (saved.tasks[0].generation, len(saved.tasks[0].entries)) == (2, 3)
    one.close()
