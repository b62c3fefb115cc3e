"""The section on takeovers in docs/benchmarks/figures.txt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed: 'scripts/setup dev' does it")

from scripts.benchmarks.failover import HOW
from scripts.benchmarks.report import render

WAITS_MS = {"peer": [900.0, 940.0, 960.0, 1010.0], "client": [905.0]}
MACHINE = {"processor": "X", "cores": 2, "commit": "abc"}


def test_each_caller_of_each_run_has_a_line() -> None:
    run: dict[str, Any] = {"state_mib": 1024, "lease_s": 1, "machine": MACHINE, "load": [[0.5], [1.5]]}
    text = render("failover.md", runs=[{"how": "kill", "waits_ms": WAITS_MS, **run}], how=HOW)
    peer = "| kill -9 of the machine | 1,024 MiB | 1 s | 4 | a peer | 960 ms | 1,010 ms | 1,010 ms | 1,010 ms |\n"
    assert f"{peer}| kill -9 of the machine | 1,024 MiB | 1 s | 1 | a client | 905 ms |" in text
    assert "X, 2 cores, commit abc; load average 0.5 at the start, 1.5 at the end." in text


def test_the_figures_have_the_section_that_was_written_last() -> None:
    root = Path(__file__).parents[2]
    section = (root / "scripts" / "benchmarks" / "takeovers.md").read_text()
    assert section in (root / "docs" / "benchmarks" / "figures.txt").read_text()
