"""The programs of the guide run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from immortal.testing import Environment

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "sdk.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", GUIDE, re.DOTALL))


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    made = {}
    for name, source in PROGRAMS.items():
        module: Any = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(source, f"{name}.py", "exec"), module.__dict__)
        made[name] = module
    return made


def test_the_programs_of_the_guide(programs: dict[str, Any]) -> None:
    assert sorted(programs) == ["archive", "catalogue", "lottery", "own_form", "till", "wordcount", "wordcount2"]
    counter = programs["wordcount"].Counter()
    counter.count("a b a")
    assert counter.words == {"a": 2, "b": 1}
    lottery = programs["lottery"].Lottery()
    lottery.buy("one")
    lottery.buy("two")
    lottery.draw()
    assert len(lottery.tickets) == 1
    catalogue = programs["catalogue"].Catalogue()
    catalogue.prepare()
    catalogue.add("book", 100)
    assert catalogue.by_name["book"].price_cents == 100
    own = programs["own_form"].Own()
    own.add(3)
    own.restore(own.checkpoint())
    assert own.total == 3
    programs["own_form"].Pickled()
    counter.count("A")
    upgraded = programs["wordcount2"].Counter.upgrade(counter)
    upgraded.count("B c")
    assert upgraded.words == {"a": 3, "b": 2, "c": 1}
    archive = programs["archive"].Archive()
    archive.store("name", "text")
    assert archive.documents == {"name": "text"}


def test_the_queries_of_the_guide(programs: dict[str, Any]) -> None:
    till_class = programs["till"].Till
    with Environment() as env:
        till = env.start(till_class, "till")
        till.call(till_class.sell, "pen", 3)
        assert till.call(till_class.total) == till.call(till_class.sold_of, "pen") == 3
        with pytest.raises(KeyError):
            till.call(till_class.sold_of, "ink")
