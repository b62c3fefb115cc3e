"""A checkpoint beside the handlers, with a real coordinator: taken while calls come in, and recovered from."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.helpers.cli import Run, immortal

APP = """
import os
from immortal import Immortal, Impulses, impulse, on_primary

os.register_at_fork(after_in_parent=lambda: print("forked", flush=True))

class Store(Immortal, checkpoint="fork"):
    texts: dict[int, str]

    def __init__(self) -> None:
        self.texts = {}

    @impulse
    def put(self, key: int) -> None:
        self.texts[key] = f"{key:1000}"
        if len(self.texts) in (5_000, 20_000):
            print("holds", len(self.texts), flush=True)

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        print("process", os.getpid(), "has", len(self.texts), flush=True)
        end = len(self.texts) + 20_000
        for key in range(len(self.texts), end):
            impulses.put(key)
        impulses.flush()
        print("fed", flush=True)
"""


def test_checkpoints_while_calls_come_in(tmp_path: Path) -> None:
    (tmp_path / "store.py").write_text(APP)
    immortal(tmp_path, "register", "store", "--peer", "tcp://127.0.0.1:*")
    run = Run(tmp_path, "store", "store:Store", "--restart")
    try:
        first = run.line(" has ").split()
        run.line("holds 5000")
        taken = json.loads(immortal(tmp_path, "checkpoint", "store", "--json"))
        assert taken["size_bytes"] > 1_000_000
        run.line("fed")
        run.line("holds 20000")
        later = json.loads(immortal(tmp_path, "checkpoint", "store", "--json"))
        assert later["size_bytes"] > 20_000_000
        run.line("forked", 2)
        os.kill(int(first[first.index("process") + 1]), signal.SIGKILL)
        again = run.line(" has ", 2)
        assert again.endswith("has 20000")
        run.line("fed", 2)
        assert run.stop() == 0  # its last checkpoint is one of these too
    finally:
        run.kill()
    run = Run(tmp_path, "store", "store:Store")
    try:
        assert run.line(" has ").endswith("has 40000")
    finally:
        run.kill()
