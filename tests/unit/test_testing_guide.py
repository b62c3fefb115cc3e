"""The guide to testing: its tests run in a pytest of their own, and fail where it says so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[2] / "docs" / "how-to"
GUIDE = (GUIDES / "testing.md").read_text()
PROGRAM = re.compile(r"```python\n# (\w+)\.py(.*?)\n(.*?)```", re.DOTALL)

RECORD = """
from immortal.testing import Environment
from bank import Bank

with Environment() as env:
    bank = env.start(Bank, "bank")
    bank.call(Bank.debit, "ann", 5)
    bank.export_log("tests/golden.log")
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest says of all the guide's tests."""
    folder = tmp_path_factory.mktemp("guide")
    for source in (GUIDE, (GUIDES / "async.md").read_text(), (GUIDES / "effects.md").read_text()):
        for name, _, program in PROGRAM.findall(source):
            (folder / f"{name}.py").write_text(program)
    (folder / "tests").mkdir()
    subprocess.run([sys.executable, "-c", RECORD], cwd=folder, check=True)
    options = ["-p", "no:immortal", "-p", "immortal.appsdk.testing.pytest_plugin", "-p", "no:cacheprovider", "-rA"]
    command = [sys.executable, "-m", "pytest", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False).stdout


def test_the_tests_of_the_guide_pass(said: str) -> None:
    names = re.findall(r"def (test_\w+)", GUIDE)
    assert len(names) == 7
    for name in names:
        assert re.search(rf"^PASSED \S+::{name}$", said, re.MULTILINE), said


def test_the_mistake_of_the_guide_is_found_in_its_words(said: str) -> None:
    assert re.search(r"^ERROR \S+::test_somebody_wins", said, re.MULTILINE), said
    assert "1 error in" in said
    shown = GUIDE.partition("```text\n")[2].partition("```")[0]
    for line in shown.splitlines():
        pattern = re.sub(r"\d+\\\.\d\d s|then \d+, now \d+", ".*", re.escape(line).replace(r"\ ", " "))
        assert re.search(pattern, said), f"{line!r} in\n{said}"
