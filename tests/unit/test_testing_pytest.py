"""The fixture `immortal_env`, in a pytest of its own."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]

TESTS = """
import random
import immortal
from immortal import Immortal, rpc

class Dice(Immortal):
    thrown: float
    def __init__(self) -> None:
        self.thrown = 0

    @rpc
    def throw(self, sides: int) -> None:
        self.thrown = random.random() * sides

    @rpc
    def fair(self, sides: int) -> float:
        return immortal.random.random() * sides

def test_fair(immortal_env):
    assert immortal_env.start(Dice, "dice").call(Dice.fair, 6) < 6

def test_unfair(immortal_env):
    immortal_env.start(Dice, "dice").call(Dice.throw, 6)

def test_fails(immortal_env):
    immortal_env.start(Dice, "dice").call(Dice.throw, 6)
    assert False, "of its own accord"

def test_without():
    pass
"""


def _pytest(folder: Path, *options: str) -> str:
    # The plugin is named, since this repository need not be installed; if it is, its entry point is left out.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:immortal",
        "-p",
        "immortal.appsdk.testing.pytest_plugin",
        *options,
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False).stdout


def test_a_test_is_replayed_at_its_end_unless_it_has_failed(tmp_path: Path) -> None:
    (tmp_path / "test_dice.py").write_text(TESTS)
    said = _pytest(tmp_path, "-p", "no:cacheprovider", "-rA")
    assert "3 passed, 1 failed, 1 error" in said.replace("1 failed, 3 passed", "3 passed, 1 failed"), said
    assert "ERROR test_dice.py::test_unfair" in said
    assert "FAILED test_dice.py::test_fails" in said
    assert "thrown: then" in said
    assert "two replays have two states: record 1: Dice.throw(6) as call 1 of test" in said
    report, _ = said.split("short test summary info")  # which is cut off at the terminal's width, but not under CI
    assert report.count("DIVERGED") == 1


def test_pytest_finds_it_by_itself_where_this_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"immortal": "immortal.appsdk.testing.pytest_plugin"}
