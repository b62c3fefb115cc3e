"""A named group with real coordinators and processes: members join and leave, one is killed and expelled meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from immortal.coordinator.operator import control
from tests.helpers.cli import DEADLINE_S, HOME, Run, command_line, immortal, wait_until

APP = """
import os

from immortal import Impulses, on_primary, rpc
from immortal.patterns.groups import Grouped, group

MEMBERS = ["b1", "b2", "b3"]


class Book(Grouped):
    prices = group(lambda: Book, "prices", members=MEMBERS)
    seen: list[str]

    def __init__(self) -> None:
        self.seen = []

    @rpc
    def place(self, order: str) -> int:
        self.seen.append(order)
        return len(self.seen)

    @rpc
    def all_of_it(self) -> list[str]:
        return self.seen

    @rpc
    async def enter(self) -> None:
        await self.prices.join()

    @rpc
    async def exit(self) -> None:
        await self.prices.leave()

    def on_expelled(self, name: str) -> None:
        print("expelled from", name, flush=True)

    @on_primary
    def say(self, impulses: Impulses) -> None:
        print("process", os.getpid(), flush=True)


class Trader(Grouped):
    prices = group(Book, "prices", members=MEMBERS)

    @rpc
    def feed(self, name: str, first: int, count: int) -> None:
        for number in range(first, first + count):
            self.prices.place.fork(f"{name}{number}")

    @rpc
    async def ask(self, order: str) -> int:
        return len(await self.prices.place.all(order))

    @on_primary
    def say(self, impulses: Impulses) -> None:
        print("process", os.getpid(), flush=True)
"""

CLASSES = {"b1": "Book", "b2": "Book", "b3": "Book", "b4": "Book", "x": "Trader", "y": "Trader"}


class Group:
    """``options``: of an instance at its registration, by name."""

    def __init__(self, folder: Path, options: Callable[[str], Sequence[str]] = lambda name: ()) -> None:
        (folder / "app.py").write_text(APP)
        self.folder = folder
        self.runs: dict[str, Run] = {}
        for name in CLASSES:
            immortal(folder, "register", name, "--peer", "tcp://127.0.0.1:*", *options(name))

    def start(self, *names: str) -> None:
        for name in names:
            self.runs[name] = Run(self.folder, name, f"app:{CLASSES[name]}")
        for name in names:
            self.runs[name].line("process")

    def kill(self, name: str) -> None:
        """The coordinator and its app."""
        self.runs[name].kill()

    def call(self, name: str, *arguments: str) -> Any:
        return json.loads(immortal(self.folder, "call", name, *arguments) or "null")

    def begin(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = command_line("call", "--timeout", "100", name, *arguments)
        return subprocess.Popen(command, cwd=self.folder, stdout=subprocess.DEVNULL)

    def seen(self, name: str) -> list[str]:
        found: list[str] = self.call(name, "all_of_it")
        return found

    def show(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(immortal(self.folder, "group", "show", "prices", "--json"))
        return found


def test_members_join_leave_and_are_expelled(tmp_path: Path) -> None:
    group = Group(tmp_path)
    try:
        group.start(*CLASSES)
        group.call("x", "feed", "x", "0", "30")
        group.call("b4", "enter")
        group.call("y", "feed", "y", "0", "30")
        immortal(tmp_path, "checkpoint", "b2")
        wait_until(lambda: len(group.seen("b1")) == 60)
        os.kill(int(group.runs["b3"].line("process").split()[-1]), signal.SIGKILL)
        group.kill("b3")
        feeds = [
            group.begin(name, "feed", name, "30", "30") for name in ("x", "y")
        ]  # they answer once all of it stands
        wait_until(lambda: "waits for b3" in immortal(tmp_path, "status", "x"))
        for name in ("b1", "x"):  # in the middle of multicasts
            immortal(tmp_path, "checkpoint", name)
        os.kill(int(group.runs["x"].line("process").split()[-1]), signal.SIGKILL)
        group.kill("x")
        group.start("x")
        shown = group.show()
        assert (shown["members"], shown["silent"]) == (["b1", "b2", "b3", "b4"], ["b3"])
        assert "not running here: b3" in immortal(tmp_path, "group", "show", "prices")
        assert "is not a member" in immortal(tmp_path, "group", "expel", "prices", "x", "--yes", status=1)
        assert "(groups here: prices)" in immortal(tmp_path, "group", "expel", "rates", "b3", "--yes", status=1)
        assert "Aborted" in immortal(tmp_path, "group", "expel", "prices", "b3", given="n\n", status=1)
        said = immortal(tmp_path, "group", "expel", "prices", "b3", "--yes")
        assert "b3 is expelled from prices: view 3, b1, b2, b4" in said
        assert [one.wait(DEADLINE_S) for one in feeds] == [0, 0]
        wait_until(lambda: len(group.seen("b1")) == 120)
        group.start("b3")
        assert "prices" in group.runs["b3"].line("expelled from")
        assert group.call("x", "ask", "q") == 3
        group.call("b2", "exit")
        group.call("b3", "enter")
        assert group.call("y", "ask", "r") == 3
        whole = group.seen("b1")
        for name in ("x", "y"):
            assert [one for one in whole if one[0] == name] == [f"{name}{number}" for number in range(60)]
        assert group.seen("b2") == whole[:-1]
        assert whole[-len(group.seen("b4")) :] == group.seen("b4")
        old = group.seen("b3")
        assert old[-1] == "r"
        assert old[:-1] == whole[: len(old) - 1]
        assert "expel" in immortal(tmp_path, "audit", "b1") + immortal(tmp_path, "audit", "b4")
        for run in group.runs.values():
            assert run.stop() == 0
    finally:
        for run in group.runs.values():
            run.kill()
    for name in CLASSES:
        assert json.loads(immortal(tmp_path, "verify", name, "--json"))["same"]


@pytest.mark.parametrize("where", ["a keyed log", "a log in a database"])
def test_a_failover_in_the_middle_of_a_multicast(tmp_path: Path, where: str, request: pytest.FixtureRequest) -> None:
    follow: tuple[str, ...] = ("--follow",)
    if where == "a keyed log":
        group = Group(tmp_path, lambda name: ("--log-key",))
    else:
        url = request.getfixturevalue("postgres").url()
        group = Group(
            tmp_path, lambda name: ("--log", f"{url}#{tmp_path.name}-{name}") if name in {"b1", "b2", "x"} else ()
        )
        follow = ()  # who can't have the log follows
    try:
        group.start("b1", "b2", "x")  # b3 was never there
        standby = group.runs["standby"] = Run(tmp_path, "b1", *follow)
        feed = group.begin("x", "feed", "x", "0", "30")
        wait_until(lambda: "waits for b3" in immortal(tmp_path, "status", "x"))
        wait_until(lambda: "waits for x" in immortal(tmp_path, "status", "b1"))
        place = tmp_path / HOME / "b1" / "followers" / "1"
        wait_until(
            lambda: control.running(place) is not None and control.query(place, "status")["phase"] == "following"
        )
        group.kill("b1")
        standby.line("process")
        assert "b3 is expelled" in immortal(tmp_path, "group", "expel", "prices", "b3", "--yes")
        assert feed.wait(DEADLINE_S) == 0
        wait_until(lambda: len(group.seen("b1")) == 30)
        assert group.seen("b1") == group.seen("b2")
        for name in ("standby", "b2", "x"):
            assert group.runs[name].stop() == 0
    finally:
        for run in group.runs.values():
            run.kill()
    for name in ("b1", "b2", "x"):
        assert json.loads(immortal(tmp_path, "verify", name, "--json"))["same"]
    for name, app in (("b2", "app:Book"), ("x", "app:Trader")):
        immortal(tmp_path, "what-if", name, "--app", app)  # it ends with 0 where nothing differs
