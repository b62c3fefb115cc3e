"""A caller that is deployed before its callee: what was refused is called once the callee's next version knows it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cli import DEADLINE_S, Run, immortal

OLD = """
from immortal import Immortal, rpc

class Counter(Immortal):
    count: int

    def __init__(self) -> None:
        self.count = 0

    @rpc
    def total(self) -> int:
        return self.count
"""

NEW = """
from immortal import Immortal, rpc, upgrades
import old

@upgrades(old.Counter, retry_refused=True)
class Counter(Immortal):
    count: int
    seen: list[int]

    def __init__(self) -> None:
        self.count = 0
        self.seen = []

    @classmethod
    def upgrade(cls, before: old.Counter) -> "Counter":
        return cls()

    @rpc
    def total(self) -> int:
        return self.count

    @rpc
    def add(self, number: int) -> None:
        self.count += number
        self.seen.append(number)

    @rpc
    def numbers(self) -> list[int]:
        return self.seen
"""

CALLER = """
from immortal import Immortal, Impulses, impulse, on_primary, peer
import new

class Early(Immortal):
    counter = peer(new.Counter, "counter")

    def __init__(self) -> None:
        pass

    @impulse
    def tell(self) -> None:
        self.counter.add.fork(5)
        self.counter.add.fork(6)

    @on_primary
    def begin(self, impulses: Impulses) -> None:
        impulses.tell()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "old.py").write_text(OLD)
    (tmp_path / "new.py").write_text(NEW)
    (tmp_path / "early.py").write_text(CALLER)
    for name in ("counter", "early"):
        immortal(tmp_path, "register", name, "--peer", "tcp://127.0.0.1:*")
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*arguments: str) -> Run:
        runs.append(Run(folder, *arguments))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


def letters(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(immortal(folder, "dead-letters", "counter", "--json"))
    return found


def test_a_caller_may_be_deployed_first(folder: Path, start: Callable[..., Run]) -> None:
    counter = start("counter", "old:Counter")
    counter.line("checkpoint taken")
    early = start("early", "early:Early")
    deadline_s = time.monotonic() + DEADLINE_S
    while len(letters(folder)) < 2:
        assert time.monotonic() < deadline_s, counter.text
    assert immortal(folder, "stop", "early").startswith("early is stopped")
    assert early.ended() == 0
    immortal(folder, "upgrade", "counter", "--to", "2", "new:Counter")
    assert "up again: version 2" in immortal(folder, "restart", "counter")
    counter.line("the upgrade to version 2 retries dead letters")
    for _ in range(2):  # a recovery does not call them once more
        assert json.loads(immortal(folder, "call", "counter", "numbers")) == [5, 6]
        assert letters(folder) == []
        immortal(folder, "restart", "counter")
    assert "the upgrade to version 2" in immortal(folder, "log", "show", "counter", "--audit")
