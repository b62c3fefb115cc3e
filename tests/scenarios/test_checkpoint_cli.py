"""Checkpoints as a policy: by hand, by age, by the app, by size of log, at a clean stop; with real processes."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.cli import Run, immortal

APP = """
import os, threading
from immortal import Immortal, Impulses, impulse, on_primary

class Counter(Immortal):
    count: int

    def __init__(self) -> None:
        self.count = 0

    @impulse
    def add(self, data: bytes) -> None:
        self.count += 1

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        for _ in range(int(os.environ.get("IMPULSES", "3"))):
            impulses.add(bytes(100_000))
        impulses.flush(20)
        if os.environ.get("ASK"):
            impulses.checkpoint()
        print("fed", flush=True)
"""

Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "counter.py").write_text(APP)
    runs: list[Run] = []

    def begin(*options: str) -> Run:
        immortal(tmp_path, "register", "counter", "--peer", "tcp://127.0.0.1:*", *options)
        runs.append(Run(tmp_path, "counter", "counter:Counter"))
        runs[-1].line("fed")
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


def test_by_hand(start: Start, tmp_path: Path) -> None:
    run = start()
    said = immortal(tmp_path, "checkpoint", "counter")
    assert said.startswith("counter: checkpoint 2 taken, after record "), said
    assert json.loads(immortal(tmp_path, "checkpoint", "counter", "--json"))["id"] == 3
    assert run.stop() == 0
    assert "the coordinator of 'counter' does not run" in immortal(tmp_path, "checkpoint", "counter", status=1)


def test_the_metrics_of_a_running_instance(start: Start, tmp_path: Path) -> None:
    start().kill()
    run = Run(tmp_path, "counter", "--metrics", "127.0.0.1:*")
    try:
        run.line("fed")
        address = run.line("metrics are served").partition("at=")[2].split()[0]
        with urllib.request.urlopen(address, timeout=20) as answer:
            text = answer.read().decode()
        assert 'immortal_up{instance_name="counter"} 1.0' in text
        assert 'immortal_app_connected{instance_name="counter"} 1.0' in text
        assert 'immortal_clock_ahead_seconds{instance_name="counter"} 0.0' in text
        assert 'immortal_clock_jumps{instance_name="counter"} 0.0' in text
    finally:
        run.kill()


def test_by_age(start: Start) -> None:
    assert "checkpoint=2" in start("--checkpoint-age-s", "1").line("checkpoint taken", count=2)


def test_by_size_of_log(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMPULSES", "30")
    assert "checkpoint=2" in start("--log-trigger-mb", "1").line("checkpoint taken", count=2)


def test_by_the_app(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASK", "1")
    assert "checkpoint=2" in start().line("checkpoint taken", count=2)


def test_none_before_the_first_work_of_a_recovery_that_is_promoted(start: Start, tmp_path: Path) -> None:
    start().kill()
    run = Run(tmp_path, "counter", "--promote")
    try:
        run.line("fed")
        assert run.count("checkpoint taken") == 0
        assert run.count("recovered") == 1
        assert run.stop() == 0
        assert "checkpoint=2" in run.line("checkpoint taken")
    finally:
        run.kill()


def test_at_a_clean_stop(start: Start) -> None:
    run = start()
    assert run.stop() == 0
    assert "checkpoint=2" in run.line("checkpoint taken", count=2)
