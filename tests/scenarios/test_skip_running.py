"""`immortal skip` of the very message that a running app is stuck in: the app ends, and comes back without it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.cli import Run, immortal

STOCK = """
from immortal import Immortal, rpc

class Stock(Immortal):
    def __init__(self) -> None:
        pass

    @rpc
    def order(self, item: str) -> str:
        if item == "glue":
            print("it sticks", flush=True)
        while item == "glue":
            pass
        return item
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    (tmp_path / "stock.py").write_text(STOCK)
    immortal(tmp_path, "register", "stock", "--peer", "tcp://127.0.0.1:*")
    run = Run(tmp_path, "stock", "stock:Stock", "--restart")
    yield run
    run.kill()


def test_a_message_that_loops_is_skipped(run: Run, tmp_path: Path) -> None:
    run.line("ready")
    immortal(tmp_path, "call", "stock", "order", "glue", "--timeout", "0.5", "--key", "k", status=1)
    run.line("it sticks")
    while (handling := json.loads(immortal(tmp_path, "status", "stock", "--json"))["handling"]) is None:
        pass
    place = f"{handling['record']}:{handling['message']}"
    assert "is skipped" in immortal(tmp_path, "skip", "stock", place, "--reason", "it loops")
    run.line("and the coordinator has ended the connection: the process ends")
    assert immortal(tmp_path, "call", "stock", "order", "tea") == '"tea"\n'
    told = immortal(tmp_path, "call", "stock", "order", "glue", "--key", "k", status=1)
    assert re.search(r"order failed .*it loops", told), told
    assert immortal(tmp_path, "stop", "stock").startswith("stock is stopped")
