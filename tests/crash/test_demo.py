"""The demo on a small input: real processes, real kills, and its own count at the end."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "wordcount" / "demo.py"
LINES = 60_000


def write_input(folder: Path, seed: int) -> list[str]:
    rng = random.Random(seed)
    words = [f"word{number}" for number in range(500)] + ["zähler", "\f", "x" * 300]
    paths = []
    for part in range(3):
        path = folder / f"part{part}.txt"
        path.write_text("\n".join(" ".join(rng.choices(words, k=rng.randrange(6))) for _ in range(LINES // 3)))
        paths.append(str(path))
    return paths


@pytest.mark.parametrize("seed", [5, 6])
def test_the_counts_are_equal_whatever_is_killed(tmp_path: Path, seed: int) -> None:
    command = [sys.executable, str(DEMO), *write_input(tmp_path, seed), "--crashes", "8", "--seed", str(seed)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "equal" in result.stdout.splitlines()
    assert "8 kills" in result.stdout
