"""The shop of the examples, as one instance and as three: the same orders, the same goods in the end."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from immortal.testing import crash_everywhere
from tests.helpers.cli import DEADLINE_S
from tests.helpers.projects import immortal
from tests.helpers.recorded import load_module

ROOT = Path(__file__).parents[2]


def test_both_have_the_same_in_the_end_as_the_page_says(tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "examples" / "shops", tmp_path / "shops")
    try:
        immortal(folder, "up")
        done = subprocess.run(
            [sys.executable, "orders.py"], cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=True
        )
    finally:
        immortal(folder, "down")
    assert f"$ immortal up && python orders.py; immortal down\n{done.stdout}```" in (
        ROOT / "docs" / "explanation" / "one-or-many.md"
    ).read_text("utf-8")


def test_what_is_lent_to_another_instance_arrives_once_wherever_the_crash_comes() -> None:
    folder = ROOT / "examples" / "shops"
    load_module(folder, "one")
    many: Any = load_module(folder, "many")
    for env in crash_everywhere(runs_max=30):
        with env:
            shops = {name: env.start(many.Shop, name) for name in ("shops-1", "shops-2", "shops-3")}
            lender, borrower = shops[many.place_of("ann")], shops[many.place_of("bob")]
            assert lender is not borrower
            assert lender.call(many.Shop.deliver, "ann", "tea", 10) == 10
            assert lender.call(many.Shop.lend, "ann", "bob", "tea", 4)
            assert not lender.call(many.Shop.lend, "ann", "bob", "tea", 7)
            assert [shop.call(many.Shop.total, "tea") for shop in (lender, borrower)] == [6, 4]
