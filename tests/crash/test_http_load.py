"""A web server over an instance, a few seconds of load, and kills of all that there is: each order is taken once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LOAD = Path(__file__).parents[2] / "examples" / "http" / "load.py"


def test_each_order_is_taken_once() -> None:
    command = [sys.executable, str(LOAD), "--seconds", "4", "--kills", "2", "--web-kills", "1", "--connections", "16"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "each order was taken once, none was lost" in result.stdout.splitlines()
    (killed,) = [line for line in result.stdout.splitlines() if line.startswith("kill -9 of ")]
    assert sorted(killed.removeprefix("kill -9 of ").split(", ")) == ["app", "coordinator", "web server"]
