"""Queries that are not logged, of real processes: what they show and leave behind, and what crashes do to them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from immortal.client import CalleeFailed, CallRefused, CallTimeout, connect, start, with_key, with_timeout
from immortal.coordinator.operator import control
from tests.helpers.cli import DEADLINE_S, HOME, Run, immortal

APP = """
import os
import time

from immortal import Immortal, query, rpc


class Ledger(Immortal):
    entries: list[str]
    ballast: bytes

    def __init__(self) -> None:
        self.entries = []
        self.ballast = b""

    @rpc
    def add(self, entry: str) -> int:
        self.entries.append(entry)
        return len(self.entries)

    @rpc
    def grow(self, size_bytes: int) -> None:
        self.ballast = bytes(size_bytes)

    @rpc
    def hold(self, path: str) -> None:
        while os.path.exists(path):
            time.sleep(0.01)

    @query
    def count(self) -> int:
        return len(self.entries)

    @query
    def all(self) -> list[str]:
        return self.entries

    @query
    def process_id(self) -> int:
        return os.getpid()

    @query
    def cheat(self, deep: bool) -> int:
        if deep:
            self.entries.append("cheated")
        else:
            self.entries = [*self.entries, "cheated"]
        return len(self.entries)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ledger.py").write_text(APP)
    monkeypatch.setenv("IMMORTAL_HOME", str(tmp_path / HOME))
    return tmp_path


@pytest.fixture
def ledger(folder: Path) -> Iterator[Run]:
    immortal(folder, "register", "ledger", "--peer", "tcp://127.0.0.1:*")
    run = Run(folder, "ledger", "ledger:Ledger", "--restart")
    try:
        run.line("ready")
        yield run
    finally:
        run.kill()


def status(folder: Path) -> dict[str, Any]:
    return control.query(folder / HOME / "ledger", "status")


def last_record(folder: Path) -> int:
    found: int = status(folder)["sequence_id"]
    return found


def test_a_hundred_queries_leave_no_record_and_the_log_verifies(folder: Path, ledger: Run) -> None:
    with connect("ledger") as client:
        for number in range(5):
            assert client.add(f"e{number}") == number + 1
        before = last_record(folder)
        for _ in range(100):
            assert client.query.count() == 5
        assert client.query.all() == [f"e{number}" for number in range(5)]
        assert last_record(folder) == before
        assert client.add("e5") == 6
        assert last_record(folder) == before + 1
        assert client.count() == client.query.count() == 6
        assert last_record(folder) == before + 2, "without .query it is a call, with its place in the log"
    assert ledger.stop() == 0
    immortal(folder, "log", "verify", "ledger")
    immortal(folder, "verify", "ledger", "--app", "ledger:Ledger")


def test_what_a_call_came_to_the_next_query_sees_and_no_crash_takes_it_back(folder: Path, ledger: Run) -> None:
    with connect("ledger") as client:
        for number in range(1, 4):
            client.add("x")
            assert client.query.count() == number
            os.kill(client.query.process_id(), signal.SIGKILL)
            assert client.query.count() == number, "asked of the next app, once it works"
        coordinator = re.findall(r"coordinator_pid=(\d+)", ledger.line("coordinator_pid="))[0]
        os.kill(int(coordinator), signal.SIGKILL)
        assert client.query.count() == 3


def test_with_asyncio_many_at_once(folder: Path, ledger: Run) -> None:
    async def ask() -> list[int]:
        async with connect("ledger") as client:
            await client.add("x")
            before = last_record(folder)
            found = await asyncio.gather(*(client.query.count() for _ in range(500)))
            assert last_record(folder) == before
            return found

    assert asyncio.run(ask()) == [1] * 500


def test_one_with_a_key_or_a_handle_is_a_logged_call(folder: Path, ledger: Run) -> None:
    """It is to be one request, whenever it is asked again: only the log can say so."""
    with connect("ledger") as client:
        assert with_key(client, "k").query.count() == 0
        client.add("x")
        assert with_key(client, "k").query.count() == 0
        assert start(client.query.count).result(20.0) == 1


def test_from_the_command_line(folder: Path, ledger: Run) -> None:
    immortal(folder, "call", "ledger", "add", "x")
    before = last_record(folder)
    assert immortal(folder, "call", "--query", "ledger", "count") == "1\n"
    assert "is no query" in immortal(folder, "call", "--query", "ledger", "add", "y", status=1)
    refusal = immortal(folder, "call", "--query", "--key", "k", "ledger", "count", status=2)
    assert "can't be combined with --key or --start" in refusal
    assert "or --start" in immortal(folder, "call", "--query", "--start", "ledger", "count", status=2)
    assert last_record(folder) == before


@pytest.mark.parametrize("deep", [False, True])
def test_a_query_that_changes_the_state_leaves_the_state_of_the_log(folder: Path, ledger: Run, deep: bool) -> None:
    with connect("ledger") as client:
        client.add("x")
        with pytest.raises(CalleeFailed, match=r"has changed self\.entries"):
            client.query.cheat(deep)
        ledger.line("has changed the state")
        with pytest.raises(CallRefused, match="has changed the state"):
            client.query.cheat(deep)
        assert client.query.all() == ["x"]
        assert client.add("y") == 2
        assert client.query.all() == ["x", "y"]
    assert ledger.stop() == 0
    immortal(folder, "verify", "ledger", "--app", "ledger:Ledger")


def test_one_that_changes_a_large_state_costs_a_recovery(folder: Path, ledger: Run) -> None:
    with connect("ledger") as client:
        client.add("x")
        client.grow(3 << 20)
        immortal(folder, "checkpoint", "ledger")
        with pytest.raises((CalleeFailed, CallRefused), match="has changed"):
            client.query.cheat(False)
        ledger.line("the app is recovered from its log")
        assert client.query.all() == ["x"]
        ledger.line("ready", 2)


def test_while_a_handler_runs_a_query_waits_and_says_so(folder: Path, ledger: Run) -> None:
    held = folder / "held"
    held.touch()
    with connect("ledger") as client, connect("ledger") as other:
        client.hold.fork(str(held))
        deadline_s = time.monotonic() + DEADLINE_S
        while last_record(folder) < 1:
            assert time.monotonic() < deadline_s
        with pytest.raises(
            CallTimeout, match=r"no reply of 'ledger'.*changes nothing, and may be asked again"
        ) as caught:
            with_timeout(other, 0.5).query.count()
        held.unlink()
        assert caught.value.again(30.0) == 0


def test_a_paused_instance_answers_as_it_stands(folder: Path, ledger: Run) -> None:
    with connect("ledger") as client:
        client.add("x")
        immortal(folder, "pause", "ledger")
        client.add.fork("y")
        assert client.query.count() == 1
        immortal(folder, "resume", "ledger")
    assert json.loads(immortal(folder, "call", "ledger", "count")) == 2


def test_queries_do_not_starve_calls(ledger: Run) -> None:
    ended = threading.Event()

    def flood() -> None:
        async def ask() -> None:
            async with connect("ledger") as client:

                async def one_after_another() -> None:
                    while not ended.is_set():
                        await client.query.count()

                await asyncio.gather(*(one_after_another() for _ in range(50)))

        asyncio.run(ask())

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        with connect("ledger") as client:
            assert [client.add("x") for _ in range(50)] == list(range(1, 51))
    finally:
        ended.set()
        thread.join()
