"""examples/orderbook on a small scale: real processes, real kills; five books that three traders feed end alike."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from immortal.pipeline.jobs.audit import TOLERANCE_MS
from immortal.pipeline.jobs.ordering import OrderingAudit, ordered_results
from tests.helpers.fleet import audit_here, evidence_here

EXAMPLE = Path(__file__).parents[2] / "examples" / "orderbook"


def executed(audit: OrderingAudit, log: str) -> list[tuple[str, int, int, int]]:
    """The runs that a log has executed, in its order: sender, number, timestamp, count of calls."""
    words = sorted(word for word in audit._facts[log] if word.kind == "executed")
    return [(word.sender, word.number, word.timestamp, word.calls) for word in words]


def test_five_books_end_alike_after_kills(tmp_path: Path) -> None:
    numbers = ["--orders", "400", "--kills", "4", "--keep", str(tmp_path / "kept")]
    command = [sys.executable, str(EXAMPLE / "trading.py"), *numbers]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "five books alike: " in result.stdout
    assert "4 kills" in result.stdout
    books = [str(tmp_path / "kept" / "registry" / name / "log") for name in ("b1", "b2", "b3", "b4", "b5")]
    # Each instance has a clock of its own, which follows the machine's slowly: they differ by a little.
    assert audit_here(books, tolerance_ns=TOLERANCE_MS * 1_000_000).violations == []
    audit = OrderingAudit()
    for row in evidence_here(books):
        for _, *result in ordered_results(row):
            audit.add(*result)
    first, *others = (executed(audit, name) for name in ("b1", "b2", "b3", "b4", "b5"))
    assert all(other == first for other in others)
    assert sum(count for *_, count in first) == 1200
    environment = {**os.environ, "IMMORTAL_HOME": str(tmp_path / "kept" / "registry"), "ORDERBOOK_ORDERS": "400"}
    for work in (["verify", "b1", "--all"], ["what-if", "b2", "--app", "orderbook:Book"]):
        command = [sys.executable, "-m", "immortal", *work]
        result = subprocess.run(command, cwd=EXAMPLE, env=environment, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, f"{work}: {result.stdout}{result.stderr}"
