"""`immortal what-if --fleet --live`: changed code beside services that run, are killed, and begin again."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from immortal.cli import main
from immortal.client import connect
from tests.helpers.cli import HOME, Run, immortal, wait_until

SHOP = """
import os
import threading
import time

from immortal import Immortal, peer, rpc


class Till(Immortal):
    sold: int

    def __init__(self) -> None:
        self.sold = 0

    @rpc
    def sell(self, count: int) -> int:
        self.sold += count
        return self.sold


class Shop(Immortal):
    till = peer(Till, "till")
    orders: int

    def __init__(self) -> None:
        self.orders = 0

    @rpc
    def order(self, item: str, count: int) -> int:
        self.orders += 1
        self.till.sell.fork(count)
        return self.orders
"""
TRICKS = """
        if item == "twice":
            count *= 2
        elif item == "end":
            os._exit(7)
        elif item == "hang":
            while True:
                try:
                    time.sleep(1)
                except TimeoutError:
                    pass
        elif item == "thread":
            threading.Thread(target=threading.Event().wait).start()  # which the end of the process would wait for
        elif item == "grow":
            Till.held = b"x" * (100 << 20)
        elif item == "grow at once":
            bytes(1 << 40)
        elif item == "leave":
            os.system("touch left")
"""


FOLLOWS = '"follows": true'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "tricky.py").write_text(SHOP.replace("        self.till.sell", f"{TRICKS}        self.till.sell"))
    for name in ("till", "shop"):
        immortal(tmp_path, "register", name, "--peer", "tcp://127.0.0.1:*", "--app", f"shop:{name.title()}")
    return tmp_path


@contextmanager
def running(folder: Path, *arguments: str, until: str, command: str = "run") -> Iterator[Run]:
    run = Run(folder, *arguments, command=command)
    try:
        run.line(until)
        yield run
    finally:
        run.kill()


def live(folder: Path, *options: str) -> AbstractContextManager[Run]:
    """Start the command, and wait until it follows."""
    change = ("--change", "shop=tricky:Shop")
    return running(folder, "--fleet", "--live", *change, *options, "--json", until=FOLLOWS, command="what-if")


def order(folder: Path, *items: str) -> None:
    with connect("shop", home=folder / HOME) as shop:
        for item in items:
            shop.order(item, len(item))


def found(run: Run, text: str, count: int = 1) -> dict[str, Any]:
    """Return the ``count``-th difference with ``text``, once it is there."""
    values: dict[str, Any] = json.loads(run.line(text, count))
    assert values["type"] == "difference", values
    return values


def totals(run: Run) -> dict[str, Any]:
    rows = [json.loads(line) for line in run.lines]
    return dict([row for row in rows if row["type"] == "progress"][-1])


MEMORY = "--memory-limit", "100"
ENDS = {
    "hang": "does not end",
    "end": "ends its process (status 7)",
    "grow": "needs more memory than --memory-limit allows",
}
WOULD_BE = "was Till.sell(5); would be Till.sell(10)"
TWICE = f'{WOULD_BE}", "count"'  # a difference: the consequences have such texts, too


def test_changed_calls_are_told_while_all_processes_are_killed(folder: Path) -> None:
    with ExitStack() as stack:
        shop = stack.enter_context(running(folder, "shop", until="ready"))
        shadow = stack.enter_context(
            live(folder, "--html", "page.html", "--consequences", "--handler-limit", "1", *MEMORY)
        )
        order(folder, "tea", "twice", "twice")
        told = [found(shadow, TWICE, count) for count in (1, 2)]
        assert {(one["service"], one["to"], one["handler"], one["kind"]) for one in told} == {
            ("shop", "till", "Till.sell", "changed")
        }
        assert all(WOULD_BE in one["text"] for one in told)
        assert min(one["lag_s"] for one in told) < 2
        wait_until(lambda: WOULD_BE in (folder / "page.html").read_text())
        outcome = json.loads(shadow.line('"consequences"'))["outcome"]
        assert outcome["services"][0]["name"] == "shop"
        assert outcome["is_different"]

        shop.kill()
        shop = stack.enter_context(running(folder, "shop", until="ready"))
        order(folder, "twice")
        found(shadow, TWICE, 3)

        for times, (item, text) in enumerate(ENDS.items(), 2):
            order(folder, item)
            assert found(shadow, f"the new code {text}")["kind"] == "ends"
            immortal(folder, "checkpoint", "shop")
            shadow.line(FOLLOWS, times)
            order(folder, "twice")
            found(shadow, TWICE, times + 2)

        order(folder, "leave")
        assert "would fail" in found(shadow, "PermissionError: a what-if refuses")["text"]
        assert not (folder / "left").exists()
        order(folder, "grow at once")
        found(shadow, "MemoryError")
        order(folder, "thread", "twice")
        found(shadow, TWICE, 7)
        assert shadow.count(TWICE) == 7
        shadow.process.send_signal(signal.SIGINT)
        assert shadow.ended() == 3
        counts = totals(shadow)  # of all but the three records that ended the process, with the initial message
        assert (counts["record"], counts["messages"], counts["same"]) == (14, 12, 9)

        same = ("what-if", "--fleet", "--live", "--change", "shop=shop:Shop", "--for", "1s")
        assert immortal(folder, *same).endswith("\nno difference\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--for", "1h"), "--for, --consequences and --memory-limit are for --live"),
        (("--live", "--for", "soon"), "a duration was expected"),
        (("--live", "--to", "2026-01-01"), "--to: not with --live"),
        (("--live", "--consequences", "--effects", "ask"), "--effects ask: not with --live"),
        (("--live", "--seeds", "2"), "--seeds: not with --live without --consequences"),
        (("--live", "--without", "till"), "--without: not with --live without --consequences"),
    ],
)
def test_options_that_do_not_fit(options: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(main, ["what-if", "--fleet", "--change", "shop=shop:Shop", *options])
    assert result.exit_code == 2
    assert said in result.stderr
