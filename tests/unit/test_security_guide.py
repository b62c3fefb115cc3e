"""The table of attacks in docs/guide/security.md names tests that there are, and each file of them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guide" / "security.md").read_text()
# What is tried there is in rows that name a test of another file.
BESIDE = {"test_log_key_cli.py", "test_peer_bounds.py"}


def test_each_attack_names_a_test_that_there_is() -> None:
    table = GUIDE.partition("## Attacks\n")[2].partition("\nBesides")[0]
    named = re.findall(r"\| `(\w+\.py)::(test_\w+)` \|", table)
    assert len(named) == table.count("\n| ") - 2  # the heading, and the line below it
    for file, test in named:
        assert f"\ndef {test}(" in (ROOT / "tests" / "security" / f"test_{file}").read_text(), test
    files = {path.name for path in (ROOT / "tests" / "security").glob("test_*.py")}
    assert {f"test_{file}" for file, _ in named} | BESIDE == files
