"""A handler that no replay can repeat: the recovery stops, and says enough to find the line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.cli import Run, immortal

ECHO = """
from immortal import Immortal, rpc

class Echo(Immortal):
    heard: list[float]

    def __init__(self) -> None:
        self.heard = []

    @rpc
    def say(self, number: float) -> None:
        self.heard.append(number)
"""

CLOCK = """
import time
from immortal import Immortal, Impulses, impulse, on_primary, peer
from echo import Echo

class Clock(Immortal):
    echo = peer(Echo, "echo")

    @impulse
    def tick(self) -> None:
        self.echo.say.fork(time.time())

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        for _ in range(3):
            impulses.tick()
            impulses.flush(20)
        print("ticked", flush=True)
"""

Start = Callable[..., Run]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "echo.py").write_text(ECHO)
    (tmp_path / "clock.py").write_text(CLOCK)
    for name in ("echo", "clock"):
        immortal(tmp_path, "register", name, "--peer", "tcp://127.0.0.1:*")
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def begin(*arguments: str) -> Run:
        runs.append(Run(folder, *arguments))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


def test_with_strict_it_never_starts(folder: Path, start: Start) -> None:
    run = start("clock", "clock:Clock", "--strict")
    assert run.ended() == 1
    assert "clock.py, line 11" in run.line("time.time()")
    assert run.count("it was called wrongly") == 1


def test_a_handler_that_reads_the_clock_is_found_by_the_recovery(folder: Path, start: Start) -> None:
    start("echo", "echo:Echo").line("ready")
    first = start("clock", "clock:Clock")
    assert "Clock.tick" in first.line("time.time()")  # the warning, with its file and line
    assert "clock.py, line 11" in first.line("time.time()")
    first.line("ticked")
    first.kill()

    second = start("clock", "--restart")
    error = second.line("'clock' does not do again what it did before")
    assert "the calls to 'echo' had reached number" in error
    assert "(now: 1: Echo.say(" in error
    assert "'immortal verify clock' finds where" in error
    assert second.count("clock.py, line 11") == 1, "the line is named beside it"
    assert second.ended() == 1, "a restart would find the same"
    assert second.count("its log can't be replayed as it is, a restart would not help") == 1
    assert "clock can NOT recover: 'clock' does not do again" in immortal(folder, "recover", "clock", status=1)
    assert "its next start stops there" in immortal(folder, "doctor", "clock", status=1)
