"""The machine's clock jumps under real instances, an hour, three days, ten years, ahead and back."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from immortal.client import ClientError, connect
from tests.faults.clock import HOUR, JUMPS, ShiftedClock
from tests.helpers.cli import HOME, Run, immortal

TIMELY = """
from datetime import timedelta

import immortal
from immortal import Immortal, every, rpc


class Timely(Immortal):
    beats: int

    def __init__(self) -> None:
        self.beats = 0

    @every("200ms")
    def beat(self) -> None:
        self.beats += 1

    @rpc
    def count(self) -> tuple[int, int]:
        return self.beats, immortal.now_ns()

    @rpc
    async def nap(self, ms: int) -> int:
        await immortal.sleep(timedelta(milliseconds=ms))
        return ms
"""
LATE_S = 8.0  # of a nap, on a busy machine


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShiftedClock:
    (tmp_path / "timely.py").write_text(TIMELY)
    monkeypatch.setenv("IMMORTAL_HOME", str(tmp_path / HOME))
    immortal(tmp_path, "register", "timely", "--peer", "tcp://127.0.0.1:*")
    made = ShiftedClock(tmp_path)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def run(clock: ShiftedClock, tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, "timely", "timely:Timely", "--restart")
    try:
        run.line("ready")
        yield run
    finally:
        print(run.text)
        run.kill()


def status(folder: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(immortal(folder, "clock", "timely", "--json"))
    return answer


def naps(timely: Any, ms: int) -> None:
    """It sleeps, for that long."""
    began_s = time.monotonic()
    assert timely.nap(ms) == ms
    assert ms / 1000 <= time.monotonic() - began_s + 0.002 <= ms / 1000 + LATE_S


def sleeps_for_long(timely: Any) -> list[int]:
    """Ten minutes; what it returns is in there once it has woken."""
    woken: list[int] = []

    def nap() -> None:
        with suppress(ClientError):  # it is left at the end
            woken.append(timely.nap(600_000))

    threading.Thread(target=nap, daemon=True).start()
    naps(timely, 100)
    return woken


def beats_go_on(timely: Any) -> None:
    """About five in a second, neither none nor many."""
    before, began_s = timely.count()[0], time.monotonic()
    while (made := timely.count()[0] - before) < 3:
        assert time.monotonic() - began_s < LATE_S
    assert made <= (time.monotonic() - began_s) * 5 + 2


def test_what_sleeps_and_what_runs_in_periods_go_on_through_every_jump(clock: ShiftedClock, run: Run) -> None:
    with connect("timely") as timely:
        last_ns = timely.count()[1]
        for number, jump in enumerate(JUMPS, 1):
            clock.jump(jump)
            naps(timely, 300)
            run.line("the instance's time: that goes on as before", number)
            beats_go_on(timely)
            if number % 2 == 0:
                clock.jump(timedelta(0))
                naps(timely, 100)
            now_ns = timely.count()[1]
            assert last_ns < now_ns < time.time_ns() + 10**9
            last_ns = now_ns


def test_a_nap_through_a_jump_and_back(clock: ShiftedClock, run: Run) -> None:
    with connect("timely") as timely:
        napping = threading.Thread(target=naps, args=(timely, 1500))
        napping.start()
        clock.jump(HOUR)
        naps(timely, 500)
        clock.jump(timedelta(0))
        napping.join(LATE_S)
        assert not napping.is_alive()
        naps(timely, 100)


@pytest.mark.parametrize("jump", [timedelta(days=3), timedelta(days=-3)], ids=["ahead", "behind"])
def test_both_are_killed_and_start_while_the_clock_is_wrong(clock: ShiftedClock, run: Run, jump: timedelta) -> None:
    found = re.search(r"coordinator_pid=(\d+)", run.line("app_pid="))
    assert found is not None
    with connect("timely", timeout=60) as timely:
        clock.jump(jump)
        naps(timely, 100)
        woken = sleeps_for_long(timely)
        os.kill(int(found[1]), signal.SIGKILL)
        run.line("ready", 2)
        naps(timely, 200)
        beats_go_on(timely)
        assert woken == [], "ten minutes have not passed"
        assert abs(timely.count()[1] - time.time_ns()) < 60 * 10**9
        clock.jump(timedelta(0))
        naps(timely, 100)


def test_an_operator_accepts_a_jump_and_nobody_sleeps_less_for_it(
    clock: ShiftedClock, run: Run, tmp_path: Path
) -> None:
    assert "the machine's clock agrees" in immortal(tmp_path, "clock", "timely")
    with connect("timely", timeout=60) as timely:
        woken = sleeps_for_long(timely)
        clock.jump(HOUR)
        shown = immortal(tmp_path, "clock", "timely")
        assert "1 h ahead of the instance's time, and not trusted for another 10 min" in shown
        assert "the machine's clock agrees" in immortal(tmp_path, "clock", "timely", "--accept")
        run.line("and believed now: that is stepped")
        naps(timely, 300)
        beats_go_on(timely)
        ahead_s = (timely.count()[1] - time.time_ns()) / 1e9
        assert 3590 < ahead_s < 3610
        assert woken == []
        clock.jump(timedelta(0))
        assert "5 % slower" in immortal(tmp_path, "clock", "timely", "--accept")
        naps(timely, 300)
        beats_go_on(timely)
        assert status(tmp_path)["slowed"]
    assert run.stop() == 0
    assert "does not run" in immortal(tmp_path, "clock", "timely", status=1)
    immortal(tmp_path, "verify", "timely")
