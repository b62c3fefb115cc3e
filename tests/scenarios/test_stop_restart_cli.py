"""`immortal stop` and `immortal restart`: whoever started the instance, and whatever state it is in."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from immortal.coordinator.instances.registry import Registry
from tests.helpers.cli import HOME, Run, immortal
from tests.helpers.processes import CoordinatorProcess
from tests.scenarios.test_upgrade_cli import NEW, OLD

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


def status(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(immortal(folder, "status", "counter", "--json"))
    return found


def app_pid(run: Run) -> int:
    found = re.search(r"app_pid=(\d+)", run.line("app_pid="))
    assert found is not None
    return int(found[1])


def test_a_stop_is_clean_and_stays_one(folder: Path, start: Start) -> None:
    run = start("old:Counter", "--restart")
    run.line("old: {'The': 1")
    told = immortal(folder, "stop", "counter")
    assert re.fullmatch(r"counter is stopped, with checkpoint \d+ after record \d+\n", told), told
    assert run.ended() == 0
    assert run.count("started  coordinator_pid") == 1
    assert status(folder)["phase"] == "stopped"
    assert "supervisor_pid" not in status(folder)
    assert immortal(folder, "stop", "counter") == "counter does not run\n"
    assert "counter does not run: 'immortal run counter' starts it" in immortal(folder, "restart", "counter", status=1)


def test_a_restart_runs_the_code_as_it_is_now(folder: Path, start: Start) -> None:
    run = start("old:Counter")  # also without --restart
    run.line("old: {'The': 1")
    before = status(folder)
    assert before["supervisor_pid"] == run.process.pid
    assert f"{before['pid']} under {run.process.pid}" in immortal(folder, "status")
    (folder / "old.py").write_text(OLD.replace("old:", "mended:"))
    told = immortal(folder, "restart", "counter")
    after = status(folder)
    assert told.splitlines()[0] == f"counter is up again: version 1, process {after['pid']}"
    assert after["pid"] != before["pid"]
    assert after["supervisor_pid"] == run.process.pid
    assert run.line("mended:") == "mended: {'The': 2, 'the': 2, 'END': 2}"
    assert run.count("checkpoint taken") >= 2  # the stop was a clean one
    assert immortal(folder, "stop", "counter").startswith("counter is stopped, with checkpoint")
    assert run.ended() == 0


def test_a_restart_upgrades(folder: Path, start: Start) -> None:
    run = start("old:Counter", "--restart")
    run.line("old: {'The': 1")
    told = immortal(folder, "upgrade", "counter", "--to", "2", "new:Counter")
    assert told.endswith("it is running; to upgrade it now: immortal restart counter\n")
    assert "up again: version 2" in immortal(folder, "restart", "counter")
    run.line("new: 4 ")
    assert "up again: version 2" in immortal(folder, "restart", "counter")  # the registered one by now
    assert run.line("new: 5 ") == "new: 5 {'the': 2, 'end': 1, 'and': 2}"


def test_a_restart_whose_upgrade_fails_says_so(folder: Path, start: Start) -> None:
    run = start("old:Counter", "--restart")
    run.line("old: {'The': 1")
    (folder / "new.py").write_text(NEW % "raise ValueError('not today')")
    immortal(folder, "upgrade", "counter", "--to", "2", "new:Counter")
    told = immortal(folder, "restart", "counter", status=1)
    failed = "the upgrade to version 2 failed: Counter.upgrade raised ValueError: not today"
    assert f"counter is up again with version 1; {failed}" in told
    assert run.line("old:", 2) == "old: {'The': 2, 'the': 2, 'END': 2}"


def test_a_restart_with_broken_code_ends_and_says_so(folder: Path, start: Start) -> None:
    run = start("old:Counter", "--restart")
    run.line("old: {'The': 1")
    (folder / "old.py").write_text("1 / 0\n")
    *waits, said = immortal(folder, "restart", "counter", status=1).splitlines()
    assert said == "error: counter stopped and did not start again: see the output of its 'immortal run'"
    assert all(line.startswith("counter: waits for ") for line in waits), waits  # on a busy machine
    assert run.ended() == 1
    assert run.count("ZeroDivisionError") == 1


def test_what_a_stop_waits_for_is_said(folder: Path, start: Start) -> None:
    run = start("old:Counter")
    run.line("old: {'The': 1")
    os.kill(app_pid(run), signal.SIGSTOP)
    told = immortal(folder, "stop", "counter", "--timeout-s", "3", status=1)
    waits = "waits for its app, in the phase 'taking a checkpoint'"
    assert told == (
        f"counter: {waits}\n"
        f"error: counter is not stopped within 3 s, but still tries: it {waits} ('immortal status counter')\n"
    )
    os.kill(app_pid(run), signal.SIGCONT)
    assert run.ended() == 0


def test_while_it_waits_to_be_started_again(folder: Path, start: Start) -> None:
    run = start("old:Counter", "--restart")
    run.line("old: {'The': 1")
    (folder / "old.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    os.kill(app_pid(run), signal.SIGKILL)
    run.line("pause_s=1.6")
    assert f"'counter' runs, as process {run.process.pid}" in immortal(folder, "run", "counter", status=1)
    assert status(folder)["supervisor_pid"] == run.process.pid
    assert "counter is stopped" in immortal(folder, "stop", "counter")
    assert run.ended() in (0, 1)  # 1: of two that were running


def test_a_coordinator_that_was_started_by_hand(folder: Path) -> None:
    home = folder / HOME
    process = CoordinatorProcess(Registry(home).load("counter"), home)
    try:
        told = immortal(folder, "restart", "counter", status=1)
        assert "run 'immortal stop counter', then start the coordinator and the app as before" in told
        assert immortal(folder, "stop", "counter") == "counter is stopped, without a checkpoint\n"
        assert process.ended()[0] == 0
    finally:
        process.kill()
