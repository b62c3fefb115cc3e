"""A short soak: `scripts/soak` itself, with 20 kills."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.workloads import WORKLOADS

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_twenty_kills(workload: str) -> None:
    command = [sys.executable, "-m", "tests.soak", "--kills", "20", "--seed", "20", "--workload", workload]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith("seed 20\n")
    assert " in 1 rounds, " in result.stdout
