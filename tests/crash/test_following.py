"""A follower beside a live instance, as real processes: it takes over when that is killed, and nothing is lost or done
twice."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.instances.registry import Registry
from coordinator.operator import control

CALLS = 4000
WAIT_S = 60.0
POLL_S = 0.02
SOURCE = f"""
import time

from appsdk import Immortal, Impulses, impulse, on_primary, peer, rpc


class Counter(Immortal):
    seen: int
    wrong: int

    def __init__(self) -> None:
        self.seen = self.wrong = 0

    @rpc
    def add(self, number: int) -> None:
        self.wrong += number != self.seen + 1
        self.seen += 1
        self.feeder.noted.fork(number)

    @rpc
    def totals(self) -> tuple[int, int]:
        return self.seen, self.wrong

    feeder = peer(lambda: Feeder, "feeder")


class Feeder(Immortal):
    counter = peer(Counter, "counter")
    sent: int
    answered: int
    wrong: int

    def __init__(self) -> None:
        self.sent = self.answered = self.wrong = 0

    @impulse
    def send(self, number: int) -> None:
        self.sent += 1
        self.counter.add.fork(self.sent)

    @rpc
    def noted(self, number: int) -> None:
        self.wrong += number != self.answered + 1
        self.answered += 1

    @rpc
    def totals(self) -> tuple[int, int, int]:
        return self.sent, self.answered, self.wrong

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        for number in range(self.sent, {CALLS}):
            impulses.send(number)
            if number % 20 == 0:
                time.sleep(0.01)
"""


class Run:
    """One `immortal run`, and what it has said."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.home = home
        self.log = home / f"run-{len(list(home.glob('run-*')))}.log"
        command = [sys.executable, "-m", "coordinator", "--home", str(home), "run", *arguments, "--log-format", "json"]
        with open(self.log, "wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, cwd=home)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def said(self, words: str) -> bool:
        return any(words in line["message"] for line in self.lines)

    def kill(self) -> None:
        """Supervisor, coordinator and app, all at once."""
        started = [line for line in self.lines if line["message"] == "started"][-1]
        for pid in (self.process.pid, started["coordinator_pid"], started["app_pid"]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(WAIT_S)


class House:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.registry = Registry(home)
        (home / "counting.py").write_text(SOURCE)
        for name in ("counter", "feeder"):
            self.registry.register(name, peer="tcp://127.0.0.1:*")
        self.runs: list[Run] = []

    def run(self, *arguments: str) -> Run:
        self.runs.append(Run(self.home, *arguments))
        return self.runs[-1]

    def call(self, name: str, method: str) -> list[int]:
        command = [sys.executable, "-m", "coordinator", "--home", str(self.home), "call", name, method]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True, cwd=self.home)
        found: list[int] = json.loads(done.stdout)
        return found

    def status(self, name: str) -> dict[str, Any]:
        return control.query(self.registry.load(name).folder, "status")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(control.ControlError, subprocess.CalledProcessError):
                if condition():
                    return
            time.sleep(POLL_S)
        said = "\n".join(f"{run.log.name}:\n{run.log.read_text()}" for run in self.runs)
        raise AssertionError(f"not within {WAIT_S:g} s: {what}\n{said}")


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    for run in house.runs:
        run.stop()


def test_a_follower_takes_over_under_load_and_nothing_is_lost_or_done_twice(house: House) -> None:
    first = house.run("counter", "counting:Counter")
    house.until(lambda: first.said("ready"), "the first one is up")
    second = house.run("counter", "--follow")
    house.run("feeder", "counting:Feeder")
    house.until(lambda: house.status("counter")["sequence_id"] > 20, "calls have come")
    house.until(lambda: second.said("recovering"), "the follower has a state")
    place = house.registry.load("counter").folder / "followers" / "1"
    house.until(lambda: control.query(place, "status")["phase"] == "following", "it follows")
    before = house.status("counter")["pid"]
    first.kill()
    house.until(lambda: second.said("recovered"), "it takes over")
    assert second.said("taking over")
    house.until(lambda: house.call("feeder", "totals")[:2] == [CALLS, CALLS], "all calls are answered")
    assert house.call("feeder", "totals")[2] == 0
    assert house.call("counter", "totals") == [CALLS, 0]
    status = house.status("counter")
    assert (status["role"], status["pid"] == before) == ("writing", False)
    assert second.stop() == 0


def test_of_two_followers_one_wins_and_the_other_goes_on(house: House) -> None:
    first = house.run("counter", "counting:Counter")
    house.until(lambda: first.said("ready"), "the first one is up")
    followers = [house.run("counter", "--follow") for _ in range(2)]
    house.until(lambda: all(one.said("recovering") for one in followers), "both follow")
    house.call("counter", "totals")
    first.kill()
    house.until(lambda: any(one.said("ready") for one in followers), "one takes over")
    winner, other = sorted(followers, key=lambda one: not one.said("ready"))
    assert house.call("counter", "totals") == [0, 0]
    assert not other.said("taking over")
    winner.kill()
    house.until(lambda: other.said("ready"), "the other one takes over in its turn")
    assert house.call("counter", "totals") == [0, 0]
    stopped = subprocess.run(
        [sys.executable, "-m", "coordinator", "--home", str(house.home), "stop", "counter"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (stopped.returncode, other.process.wait(WAIT_S)) == (0, 0), stopped.stderr


def test_without_anybody_to_follow_it_is_the_instance_at_once(house: House) -> None:
    alone = house.run("counter", "counting:Counter", "--follow")
    house.until(lambda: alone.said("ready"), "there is no log yet, and nobody who writes one")
    assert not alone.said("following")
    assert house.call("counter", "totals") == [0, 0]
    assert alone.stop() == 0
