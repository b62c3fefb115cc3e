"""A web server over an instance, a few seconds of load, and kills of all that there is: each order is taken once.

Also where some orders' handlers raise, and some end their process: those alone fail, and are told so.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

LOAD = Path(__file__).parents[2] / "examples" / "http" / "load.py"


def loaded(*options: str) -> list[str]:
    """The lines that it printed."""
    command = [sys.executable, str(LOAD), "--seconds", "4", "--connections", "16", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert "each order was taken once, none was lost" in lines
    return lines


def test_each_order_is_taken_once() -> None:
    lines = loaded("--kills", "2", "--web-kills", "1")
    (killed,) = [line for line in lines if line.startswith("kill -9 of ")]
    assert sorted(killed.removeprefix("kill -9 of ").split(", ")) == ["app", "coordinator", "web server"]


def test_orders_that_fail_are_told_so_and_harm_no_others() -> None:
    lines = loaded("--kills", "2", "--web-kills", "1", "--failing", "3", "--killing", "0.5")
    (told,) = [line for line in lines if line.startswith("besides, ")]
    match = re.fullmatch(
        r"besides, (\d+) orders whose handler raised and (\d+) that ended their process were told so", told
    )
    assert match is not None, told
    assert min(map(int, match.groups())) > 0
