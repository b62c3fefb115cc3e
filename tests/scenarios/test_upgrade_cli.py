"""Upgrades as an operator meets them: real processes, the real command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.cli import Run, immortal

OLD = """
from immortal import Immortal, Impulses, impulse, on_primary

class Counter(Immortal):
    counts: dict[str, int]

    def __init__(self) -> None:
        self.counts = {}

    @impulse
    def add(self, word: str) -> None:
        self.counts[word] = self.counts.get(word, 0) + 1

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        for word in ("The", "the", "END"):
            impulses.add(word)
        impulses.flush(20)
        print("old:", self.counts, flush=True)
"""

NEW = """
import os, signal
from immortal import Immortal, Impulses, impulse, on_primary, upgrades
import old

@upgrades(old.Counter)
class Counter(Immortal):
    counts: dict[str, int]
    total: int

    def __init__(self) -> None:
        self.counts = {}
        self.total = 0

    @classmethod
    def upgrade(cls, before: old.Counter) -> "Counter":
        new = cls()
        for word, count in before.counts.items():
            new.counts[word.lower()] = new.counts.get(word.lower(), 0) + count
        new.total = sum(new.counts.values())
        %s
        return new

    @impulse
    def add(self, word: str) -> None:
        word = word.lower()
        self.counts[word] = self.counts.get(word, 0) + 1
        self.total += 1

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        impulses.add("AND")
        impulses.flush(20)
        print("new:", self.total, self.counts, flush=True)
"""

DOWN = """
from immortal import Immortal, Impulses, impulse, on_primary, upgrades
import new

@upgrades(new.Counter)
class Counter(Immortal, version=1):
    counts: dict[str, int]

    def __init__(self) -> None:
        self.counts = {}

    @classmethod
    def upgrade(cls, before: new.Counter) -> "Counter":
        older = cls()
        older.counts = before.counts
        return older

    @impulse
    def add(self, word: str) -> None:
        self.counts[word] = self.counts.get(word, 0) + 1

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        print("down:", self.counts, flush=True)
"""

Start = Callable[..., Run]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "old.py").write_text(OLD)
    (tmp_path / "new.py").write_text(NEW % "pass")
    immortal(tmp_path, "register", "counter", "--peer", "tcp://127.0.0.1:*")
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def begin(*arguments: str) -> Run:
        runs.append(Run(folder, "counter", *arguments))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


def lived(start: Start) -> None:
    """A first life with the old version."""
    first = start("old:Counter")
    assert first.line("old:") == "old: {'The': 1, 'the': 1, 'END': 1}"
    assert first.stop() == 0


def test_an_upgrade_and_the_way_back(folder: Path, start: Start) -> None:
    lived(start)
    marked = immortal(folder, "upgrade", "counter", "--to", "2", "new:Counter")
    assert marked == (
        "counter: version 1 becomes version 2 at the next start, with new:Counter\n"
        "start it with: immortal run counter\n"
    )
    assert "the next start upgrades it to version 2" in immortal(folder, "upgrade", "counter")
    second = start()
    assert second.line("new:") == "new: 4 {'the': 2, 'end': 1, 'and': 1}"
    assert "from_version=1 to_version=2 after_record=" in second.line("upgraded")
    assert second.stop() == 0
    assert immortal(folder, "upgrade", "counter") == "counter: version 2; no upgrade is requested\n"
    assert 'app = "new:Counter"' in (folder / "home" / "counter.toml").read_text()
    assert "has version 2 already" in immortal(folder, "upgrade", "counter", "--to", "2", status=1)

    third = start()  # the new version goes on from its own state
    assert third.line("new:") == "new: 5 {'the': 2, 'end': 1, 'and': 2}"
    third.kill()

    (folder / "down.py").write_text(DOWN)
    immortal(folder, "upgrade", "counter", "--to", "1", "down:Counter")
    fourth = start()
    assert fourth.line("down:") == "down: {'the': 2, 'end': 1, 'and': 2}"
    fourth.line("upgraded")  # only then does it count
    assert fourth.stop() == 0
    assert json.loads(immortal(folder, "status", "counter", "--json"))["version"] == 1


def test_an_upgrade_that_raises_leaves_the_old_version_running(folder: Path, start: Start) -> None:
    lived(start)
    (folder / "new.py").write_text(NEW % "raise ValueError('not today')")
    immortal(folder, "upgrade", "counter", "--to", "2", "new:Counter")
    run = start()
    assert run.line("old:") == "old: {'The': 2, 'the': 2, 'END': 2}"
    assert "the upgrade to version 2 failed: Counter.upgrade raised ValueError: not today" in run.line(
        "version 1 stays in use"
    )
    assert run.count("starting the version before again") == 1
    assert run.stop() == 0
    told = immortal(folder, "upgrade", "counter")
    assert "version 1; the upgrade to version 2 failed: Counter.upgrade raised ValueError: not today" in told
    again = start()  # it is not tried again by itself
    assert again.line("old:")
    assert again.stop() == 0
    assert "is cancelled" in immortal(folder, "upgrade", "counter", "--cancel")
    assert immortal(folder, "upgrade", "counter") == "counter: version 1; no upgrade is requested\n"


def test_an_app_of_another_version_than_asked_for_leaves_the_old_one_running(folder: Path, start: Start) -> None:
    lived(start)
    immortal(folder, "upgrade", "counter", "--to", "7", "new:Counter")
    run = start("--restart")
    assert run.line("old:")
    assert "the app is of version 2, the upgrade is to version 7; version 1 stays in use" in run.text


def test_an_upgrade_that_is_killed_is_tried_again(folder: Path, start: Start) -> None:
    lived(start)
    once = "\n        ".join(
        (
            "if not os.path.exists('died'):",
            "    open('died', 'w').close()",
            "    os.kill(os.getpid(), signal.SIGKILL)",
        )
    )
    (folder / "new.py").write_text(NEW % once)
    immortal(folder, "upgrade", "counter", "--to", "2", "new:Counter")
    run = start("--restart")
    assert run.line("new:") == "new: 4 {'the': 2, 'end': 1, 'and': 1}"
    assert run.count("was interrupted: the old version is whole") == 1 or run.count("the app died: SIGKILL") == 1


def test_what_can_be_asked_for_wrongly(folder: Path, start: Start) -> None:
    assert "has not been started yet" in immortal(folder, "upgrade", "counter", "--to", "2", status=1)
    assert "--to VERSION is missing" in immortal(folder, "upgrade", "counter", "new:Counter", status=2)
    assert "--cancel can't be combined with" in immortal(
        folder, "upgrade", "counter", "--cancel", "--to", "2", status=2
    )
    assert immortal(folder, "upgrade", "counter", "--cancel") == "counter: no upgrade is requested\n"
    lived(start)
    (folder / "home" / "counter" / "upgrade.json").write_text("{")
    assert "upgrade.json can't be read" in immortal(folder, "upgrade", "counter", status=1)
