"""Instance that counts calls and one that makes them, each under `immortal run`, with followers beside it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from tests.helpers import commands

CALLS = 4000
WAIT_S = 60.0
POLL_S = 0.02
SOURCE = f"""
import time

from immortal import Immortal, Impulses, impulse, on_primary, peer, rpc


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
    """Process of `immortal run`, and its log lines."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.home = home
        self.log = home / f"run-{len(list(home.glob('run-*')))}.log"
        command = [
            sys.executable,
            "-m",
            "immortal",
            "--home",
            str(home),
            "run",
            *arguments,
            "--log-format",
            "json",
        ]
        with open(self.log, "wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, cwd=home)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def said(self, words: str) -> bool:
        return any(words in line["message"] for line in self.lines)

    def kill(self) -> None:
        """Kill supervisor, coordinator and app at once, and wait until they have ended and left their locks."""
        started = [line for line in self.lines if line["message"] == "started"][-1]
        with contextlib.ExitStack() as stack:
            killed = []
            for pid in (self.process.pid, started["coordinator_pid"], started["app_pid"]):
                with contextlib.suppress(ProcessLookupError):
                    killed.append(os.pidfd_open(pid))
                    stack.callback(os.close, killed[-1])
            for process in killed:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            for process in killed:
                assert select.select([process], [], [], WAIT_S)[0], "it has not ended"
        self.process.wait()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(WAIT_S)


class House:
    """Instances of a test. ``log``: the URL of a database for the counter's log; None: a folder."""

    def __init__(self, home: Path, log: str | None = None) -> None:
        self.home = home
        self.registry = Registry(home)
        (home / "counting.py").write_text(SOURCE)
        for name in ("counter", "feeder"):
            where = ["--log", log] if log is not None and name == "counter" else []
            done = self.immortal("register", name, "--peer", "tcp://127.0.0.1:*", *where)
            assert done.returncode == 0, done.stderr
        self.runs: list[Run] = []

    def run(self, *arguments: str) -> Run:
        self.runs.append(Run(self.home, *arguments))
        return self.runs[-1]

    def call(self, name: str, method: str) -> list[int]:
        done = self.immortal("call", name, method)
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, done.args, done.stdout, done.stderr)
        found: list[int] = json.loads(done.stdout)
        return found

    def immortal(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return commands.run(self.home, *arguments, home=str(self.home))

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
