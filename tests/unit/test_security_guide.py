"""The tables of tests/requirements/attacks.md and SECURITY.md name tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "tests" / "requirements" / "attacks.md").read_text()
# What is tried there is in rows that name a test of another file.
BESIDE = {"test_log_key_cli.py", "test_peer_bounds.py"}


def test_each_attack_names_a_test_that_there_is() -> None:
    named = re.findall(r"\| `(\w+\.py)::(test_\w+)` \|", TABLE)
    assert len(named) == TABLE.count("\n| ") - 2  # the heading, and the line below it
    for file, test in named:
        assert f"\ndef {test}(" in (ROOT / "tests" / "security" / f"test_{file}").read_text(), test
    files = {path.name for path in (ROOT / "tests" / "security").glob("test_*.py")}
    assert {f"test_{file}" for file, _ in named} | BESIDE == files


def test_each_statement_of_what_a_key_allows_names_a_test_that_there_is() -> None:
    section = (ROOT / "SECURITY.md").read_text().partition("## What each key allows")[2].partition("\n## ")[0]
    named = re.findall(r"\| `([\w/]+\.py)::(test_\w+)` \|", section)
    assert len(named) == section.count("\n| ") - 2 > 15  # the heading, and the line below it
    for file, test in named:
        assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(), test
