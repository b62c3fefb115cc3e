"""The README's first program, typed as it stands there: scripts/stopwatch, in the environment of the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.stopwatch import StopwatchError, first_program

ROOT = Path(__file__).parents[2]


def test_its_commands_at_a_terminal() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "stopwatch.py"), "--environment", sys.prefix, "--limit-s", "inf"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [line.partition(" s  ")[2] for line in done.stdout.splitlines()]
    assert steps[-2:] == ["immortal call shop order tea 2: 6 are left", "in all, of inf s"]


def test_a_readme_without_a_program() -> None:
    with pytest.raises(StopwatchError, match=r"README\.md has no program"):
        first_program("# Immortal\n\n## A first program\n\nSoon.\n")
