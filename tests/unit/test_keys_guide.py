"""The program of the guide to keys runs, and does what the guide says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from immortal.testing import Environment

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "keys.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", GUIDE, re.DOTALL))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = ModuleType("carts")
    monkeypatch.setitem(sys.modules, "carts", made)
    exec(compile("# carts.py\n" + PROGRAMS["carts"], "carts.py", "exec"), made.__dict__)
    return made


def test_carts(module: Any, immortal_env: Environment) -> None:
    carts, shop = immortal_env.start(module.Cart, "carts", shards=3), immortal_env.start(module.Shop, "shop")
    assert shop.call(module.Shop.order, "ann", "tea") == 1
    assert shop.call(module.Shop.order, "joe", "tea") == 1
    assert carts["ann"].call(module.Cart.total) == 2
    leaves = carts["ann"].begin(module.Cart.check_out)
    carts["joe"].call(module.Cart.pay)
    immortal_env.advance(hours=1)
    assert not leaves.done
    carts["ann"].call(module.Cart.pay)
    immortal_env.advance(minutes=6)
    assert leaves.result() == "ann: 2 pieces"
    assert list(carts.keys) == ["joe"]
