"""Of many instances that start at once few do so at a time."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from immortal.coordinator.service import process


def test_who_starts_waits_for_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    begun = [process.acquire_start_slot(tmp_path) for _ in range(process.STARTS_PER_PROCESSOR)]
    third: list[object] = []
    waiting = threading.Thread(target=lambda: third.append(process.acquire_start_slot(tmp_path)), daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert not third
    for done in begun:
        done()
        done()  # once more does nothing
    waiting.join(20)
    assert third


def test_a_start_that_does_not_end_gives_its_turn_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(process, "START_TURN_S", 0.05)
    for _ in range(process.STARTS_PER_PROCESSOR + 1):
        process.acquire_start_slot(tmp_path)


def test_who_can_not_wait_for_a_turn_starts(tmp_path: Path) -> None:
    process.acquire_start_slot(tmp_path / "missing")()
