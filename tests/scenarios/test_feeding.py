"""The feeding pattern of the README with real processes: a destination is frozen, the app that feeds is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.helpers.cli import Run, immortal, wait_until

APP = """
import os

import immortal
from immortal import Immortal, Impulses, impulse, on_primary, peer, rpc


class Book(Immortal):
    got: list[str]

    def __init__(self) -> None:
        self.got = []

    @rpc
    def place(self, what: str) -> None:
        self.got.append(what)

    @rpc
    def all_of_it(self) -> list[str]:
        return self.got

    @on_primary
    def say(self, impulses: Impulses) -> None:
        print("process", os.getpid(), flush=True)


class Crowd(Immortal):
    east = peer(Book, "east")
    west = peer(Book, "west")
    sent: int

    def __init__(self) -> None:
        self.sent = 0

    @impulse
    def arrive(self, name: str) -> None:
        self.sent += 1
        immortal.multicast([self.east, self.west, type(self)]).place.fork(name)

    @rpc
    def place(self, what: str) -> None:
        pass

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        print("process", os.getpid(), flush=True)
        for number in range(self.sent, 20):
            impulses.arrive(f"guest {number + 1}")
        impulses.flush()
        print("fed", flush=True)
"""


@pytest.mark.parametrize("follower", [False, True], ids=["its app is started again", "a follower takes over"])
def test_a_killed_feeder_goes_on_where_it_was_though_a_destination_is_frozen(tmp_path: Path, follower: bool) -> None:
    (tmp_path / "app.py").write_text(APP)
    runs = {}
    for name in ("east", "west", "crowd"):
        immortal(tmp_path, "register", name, "--peer", "tcp://127.0.0.1:*")
    for name in ("east", "west"):
        runs[name] = Run(tmp_path, name, "app:Book")
    frozen = int(runs["west"].line("process").split()[-1])
    runs["east"].line("process")
    os.kill(frozen, signal.SIGSTOP)
    try:
        crowd = runs["crowd"] = Run(tmp_path, "--restart", "crowd", "app:Crowd")
        crowd.line("fed")
        wait_until(lambda: "it waits for west" in immortal(tmp_path, "health", "crowd"))
        assert "it waits for west" in immortal(tmp_path, "status")
        assert json.loads(immortal(tmp_path, "call", "east", "all_of_it")) == []  # it has to do with none of them
        if follower:
            successor = runs["successor"] = Run(tmp_path, "--follow", "crowd")
            successor.line("following")
            crowd.kill()
            successor.line("recovered")
        else:
            os.kill(int(crowd.line("process").split()[-1]), signal.SIGKILL)
            crowd.line("recovered")
    finally:
        os.kill(frozen, signal.SIGCONT)
    if follower:
        successor.line("fed")
    else:
        crowd.line("fed", 2)
    names = [f"guest {number + 1}" for number in range(20)]
    try:
        wait_until(lambda: all(len(got) >= len(names) for got in _got(tmp_path)))
        assert _got(tmp_path) == [names, names]
    finally:
        for run in runs.values():
            run.kill()


def _got(folder: Path) -> list[list[str]]:
    return [json.loads(immortal(folder, "call", name, "all_of_it")) for name in ("east", "west")]
