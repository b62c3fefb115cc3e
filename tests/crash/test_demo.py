"""The demo on a small input: real processes, real kills, and its own count at the end."""

from __future__ import annotations

import os
import random
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.namespaces import Namespaces

DEMO = Path(__file__).parents[2] / "examples" / "wordcount" / "demo.py"
LINES = 60_000


def write_input(folder: Path, seed: int) -> list[str]:
    rng = random.Random(seed)
    words = [f"word{number}" for number in range(500)] + ["zähler", "\f", "x" * 300, "$word"]
    paths = []
    for part in range(3):
        path = folder / f"part{part}.txt"
        path.write_text("\n".join(" ".join(rng.choices(words, k=rng.randrange(6))) for _ in range(LINES // 3)))
        paths.append(str(path))
    return paths


def test_the_counts_are_equal_whatever_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, str(DEMO), *write_input(tmp_path, 5), "--crashes", "8", "--seed", "5"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "equal" in result.stdout.splitlines()
    assert "8 kills" in result.stdout


def test_between_two_networks_with_keys(tmp_path: Path) -> None:
    with Namespaces():
        pass  # skips where there are none
    command = [sys.executable, str(DEMO), *write_input(tmp_path, 7), "--crashes", "4", "--seed", "7", "--peer", "tcp"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as demo:
        said, _ = demo.communicate(timeout=110)
    assert demo.returncode == 0, said
    assert "equal" in said.splitlines()
    assert "4 kills" in said
    assert "in two networks" in said
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"immortal-demo-{demo.pid}-" not in left


def test_two_networks_without_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["demo", "--peer", "tcp"])
    monkeypatch.syspath_prepend(DEMO.parent)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(DEMO), run_name="__main__")
    assert "which only root can: sudo scripts/demo --peer tcp" in capsys.readouterr().err
