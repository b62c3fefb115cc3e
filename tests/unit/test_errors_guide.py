"""docs/reference/errors.md: its program does what the page says."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

import pytest

from immortal import CalleeFailed, errors
from immortal.protocol.verdicts import VerdictKind
from immortal.testing import Environment

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def program() -> Any:
    (source,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    module = types.ModuleType("errors_guide")
    exec(compile(source, "errors_guide.py", "exec"), vars(module))
    return module


def test_the_program_does_what_the_page_says(program: Any) -> None:
    with Environment(fail_alone=True) as env:
        shop, till = env.start(program.Shop, "shop"), env.start(program.Till, "till")
        assert till.call(program.Till.buy, 4) == "paid 25"
        assert till.call(program.Till.buy, 0) == "not sold: ZeroDivisionError"
        assert shop.state.sold == 4
        with pytest.raises(LookupError, match="milk"):
            shop.call(program.Shop.price, "milk")
        with pytest.raises(CalleeFailed, match="more than was sold") as caught:
            shop.call(program.Shop.refund, 5)
        assert caught.value.type_name == "ValueError"
        assert re.fullmatch(r"shop record \d+:0", caught.value.reference)
        shop.send(program.Shop.sell, 0)
        env.run()
        assert [letter.kind for letter in shop.dead_letters] == [VerdictKind.UNDONE]
        assert shop.state.sold == 4


def test_the_page_names_what_there_is() -> None:
    for name in ("CalleeFailed", "CallRefused"):
        assert f"`{name}`" in PAGE
        assert hasattr(errors, name)
