"""examples/orderbook on a small scale: real processes, real kills; five books that three traders feed end alike."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "orderbook"


def test_five_books_end_alike_after_kills() -> None:
    command = [sys.executable, str(EXAMPLE / "trading.py"), "--orders", "400", "--kills", "4"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "five books alike: " in result.stdout
    assert "4 kills" in result.stdout
