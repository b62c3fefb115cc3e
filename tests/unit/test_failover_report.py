"""The section on takeovers in docs/benchmarks/figures.txt, and histograms for the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed: 'scripts/setup dev' does it")

from scripts.benchmarks.failover import histogram, put, section, section_of
from scripts.benchmarks.report import write_report

WAITS_MS = {"peer": [900.0, 940.0, 960.0, 1010.0], "client": [905.0]}
MACHINE = {
    "processor": "X",
    "cores": 2,
    "memory_gib": 24.0,
    "kernel": "6",
    "system": "Linux",
    "filesystem": "ext4",
    "python": "3.11",
    "commit": "abc",
    "packages": {},
}


def run(how: str) -> dict[str, Any]:
    return {
        "how": how,
        "state_mib": 1024,
        "lease_s": 1,
        "machine": MACHINE,
        "load": [[0.5], [1.5]],
        "waits_ms": WAITS_MS,
    }


def test_a_histogram_has_a_line_for_each_step() -> None:
    assert histogram([900.0, 940.0, 941.0, 955.0]) == [
        "   900 to    910 ms    1 #",
        "   910 to    920 ms    0 ",
        "   920 to    930 ms    0 ",
        "   930 to    940 ms    0 ",
        "   940 to    950 ms    2 ##",
        "   950 to    960 ms    1 #",
    ]
    lines = histogram([float(wait) for wait in range(0, 400, 2)])
    assert len(lines) == 20
    assert lines[-1] == "   380 to    400 ms   10 " + "#" * 10


def test_a_new_section_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "benchmarks.md"
    path.write_text("# Benchmarks\n\nfigures\n")
    for how in ("migrate", "kill"):
        put(path, section([run(how)]))
    text = path.read_text()
    assert text.startswith("# Benchmarks\n\nfigures\n\n<!-- failover -->\n")
    assert "migrate" not in text
    peer = "| kill -9 of the machine | 1,024 MiB | 1 s | 4 | a peer | 960 ms | 1,010 ms | 1,010 ms | 1,010 ms |"
    assert peer in text
    assert "X, 2 cores, commit abc; load average 0.5 at the start, 1.5 at the end." in text


def test_the_page_that_is_written_anew_keeps_it(tmp_path: Path) -> None:
    result = {
        "parts": {},
        "skipped": {},
        "machine": MACHINE,
        "load": {"start": [0.5], "end": [0.5]},
        "begun": "then",
        "ended": "later",
        "repeats": 1,
        "quick": False,
    }
    path = write_report([result], tmp_path)
    put(path, section([run("kill")]))
    kept = section_of(path.read_text())
    write_report([result], tmp_path)
    assert section_of(path.read_text()) == kept
    assert path.read_text().count("<!-- failover -->") == 1
