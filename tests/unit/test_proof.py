"""The ledger of proof: the page is that of the ledger, and a run is recorded only for a commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import proof


def test_the_page_is_that_of_the_ledger() -> None:
    assert proof.PAGE.read_text() == proof.page(proof.runs()), "python -m tests.proof writes it anew"
    assert {run.campaign for run in proof.runs()} <= set(proof.CAMPAIGNS)


def test_a_page_has_the_newest_run_and_all_that_failed() -> None:
    first = proof.Run("kills", "abc", "2026-01-01", "one", 3600, {"kills": 1000}, "failed, status 1", "soak --seed 1")
    second = proof.Run("kills", "def", "2026-01-02", "two", 1800, {"kills": 200}, "passed", "soak --seed 2")
    (row,) = [line for line in proof.page([first, second]).splitlines() if "commit" in line and line[0] == "|"]
    assert "2026-01-02, commit def: 200 kills in 30.0 min: `soak --seed 2` | passed" in row
    assert "| 2, 1 failed: 1,200 kills in 1.5 h |" in row
    assert "Not recorded yet: simulation, faults," in proof.page([first, second])


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(proof, "LEDGER", tmp_path / "proof.jsonl")
    monkeypatch.setattr(proof, "PAGE", tmp_path / "proof.md")
    (tmp_path / "proof.jsonl").touch()
    return tmp_path


def test_a_run_is_recorded_with_its_status(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_git", lambda command, *_: "" if command == "status" else "0123456789")
    assert proof.Recorder(is_on=True).end("fuzzing", "scripts/fuzz", 3, {"inputs": 7}) == 3
    (run,) = proof.runs()
    assert (run.commit, run.counts, run.result) == ("0123456789", {"inputs": 7}, "failed, status 3")
    assert "7 inputs" in (ledger / "proof.md").read_text()
    assert proof.Recorder(is_on=False).end("fuzzing", "scripts/fuzz", 0, {}) == 0
    assert len(proof.runs()) == 1, "nothing is recorded that was not asked for"


def test_changes_that_are_not_committed_are_no_proof(
    ledger: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(proof, "_git", lambda *_: " M protocol/varint.py")
    with pytest.raises(SystemExit, match="2"):
        proof.Recorder(is_on=True)
    assert "M protocol/varint.py" in capsys.readouterr().err
