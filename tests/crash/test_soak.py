"""Short soaks: `scripts/soak` itself, with 20 kills of each example, and with 20 faults."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.workloads import WORKLOADS

REPOSITORY = Path(__file__).parents[2]


def soak(*arguments: str) -> str:
    command = [sys.executable, "-m", "tests.soak", "--seed", "20", *arguments]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith("seed 20\n")
    assert " in 1 rounds, " in result.stdout
    return result.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_twenty_kills(workload: str) -> None:
    soak("--kills", "20", "--workload", workload)


@pytest.mark.timeout(300)
def test_twenty_faults() -> None:
    """Of all kinds: tests/soak/faults.py. Three banks and a teller that call each other."""
    assert "20 faults in 1 rounds" in soak("--faults", "20", "--workload", "bank")
