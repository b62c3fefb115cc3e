"""kill -9 of an app with tables, again and again, beside checkpoints by forked children and by itself, in small pieces:
no row is lost or left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.helpers.cli import Run, immortal

pytestmark = pytest.mark.kills

APP = """
import os, tempfile
from immortal import Immortal, Impulses, Table, impulse, on_primary
from immortal import table as with_index
from immortal.appsdk.running import app_loop
from immortal.appsdk.state import incoming, table, table_rows
from msgspec import Struct

table_rows.RECENT_SIZE_BYTES_MAX = app_loop.OUTPUT_PENDING_BYTES_MAX = 50_000
table.PIECE_SIZE_BYTES = incoming.PIECE_SIZE_BYTES = 5_000
tempfile.tempdir = "files"
with open("lives", "a") as lives:
    lives.write(".")

class Item(Struct):
    group: int
    text: str

class Store(Immortal, checkpoint="fork" if os.path.getsize("lives") % 2 else "inline"):
    items: Table[int, Item] = with_index(index=["group"])
    done: int = 0

    @impulse
    def put(self, key: int) -> None:
        self.items[key % 997] = Item(key % 7, f"{key:100}")
        self.items.pop(key * 3 % 997, None)
        self.done = key + 1
        if self.done % 1500 == 0:
            groups = [sum(key for key, _ in self.items.by("group", group)) for group in range(7)]
            print("rows", self.done, sum(self.items), *groups, flush=True)
        if key % 500 == 3:
            raise ValueError("after the changes")

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        print("process", os.getpid(), flush=True)
        for key in range(self.done, 6000):
            impulses.put(key)
        impulses.flush()
"""


def model(done: int) -> list[int]:
    """Return what the app prints behind its message ``done``."""
    groups: dict[int, int] = {}
    for key in range(done):
        if key % 500 != 3:  # a call that failed left nothing
            groups[key % 997] = key % 7
            groups.pop(key * 3 % 997, None)
    return [sum(groups), *(sum(key for key, group in groups.items() if group == wanted) for wanted in range(7))]


def test_rows_after_many_kills(tmp_path: Path) -> None:
    (tmp_path / "store.py").write_text(APP)
    (tmp_path / "files").mkdir()
    immortal(tmp_path, "register", "store", "--peer", "tcp://127.0.0.1:*")
    run = Run(tmp_path, "store", "store:Store", "--restart")
    try:
        for number, done in enumerate(range(1500, 6001, 1500), 1):
            line = run.line(f"rows {done} ").split()
            at = line.index("rows")
            assert list(map(int, line[at + 2 :])) == model(done)
            if number < 4:
                immortal(tmp_path, "checkpoint", "store")
            process = run.line("process ", number).split()
            os.kill(int(process[process.index("process") + 1]), signal.SIGKILL)
        run.line("process ", number + 1)
        assert run.stop() == 0
    finally:
        run.kill()
    assert list((tmp_path / "files").iterdir()) == []
