"""`immortal up`, `down`, `ps` and `logs`: a project in the background."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.at_terminal import CTRL_C, AtTerminal
from tests.helpers.cli import wait_until
from tests.helpers.projects import NEXT, SHOP, Development, command, immortal, make_project


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    make_project(tmp_path)
    yield tmp_path
    immortal(tmp_path, "down")


def services(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(immortal(folder, "ps", "--json"))["services"]}


def seen(folder: Path, text: str, *arguments: str) -> str:
    """The line of `immortal logs -f` with ``text``, once it is there."""
    with subprocess.Popen(command("logs", "-f", *arguments), cwd=folder, stdout=subprocess.PIPE, text=True) as follow:
        assert follow.stdout is not None
        line = next((line for line in follow.stdout if text in line), "")
        follow.send_signal(signal.SIGINT)
    assert line, f"{text!r} did not come"
    assert follow.returncode == 0
    return line


def test_a_project_in_the_background(folder: Path) -> None:
    assert immortal(folder, "up") == "till ready\nshop ready\n"
    before = services(folder)
    assert [row["state"] for row in before.values()] == ["running", "running"]
    assert immortal(folder, "up") == "till ready\nshop ready\n"
    assert {name: row["pid"] for name, row in services(folder).items()} == {
        name: row["pid"] for name, row in before.items()
    }  # the same processes
    immortal(folder, "call", "shop", "order", "2")
    assert seen(folder, "till has").startswith("till | ")
    line = seen(folder, "restarting nothing")  # of immortal.logger, which says nothing of the process
    assert re.fullmatch(
        r"till \| \S+Z warning > restarting nothing  cents=200 handler=Till.sold record=\d+:0\n", line
    ), line
    assert [row["state"] for row in services(folder).values()] == ["running", "running"]
    immortal(folder, "doctor", "--bundle", "report.zip", "till")
    with zipfile.ZipFile(folder / "report.zip") as report:
        said = report.read("report/till/output.txt").decode()
    assert " info ready\n" in said
    assert not re.search("cents=|till has", said)  # neither what the app logs nor what it prints
    shown = immortal(folder, "ps")
    assert "running" in shown
    assert "shop:Till" in shown
    assert "\x1b" not in shown
    said = immortal(folder, "down")
    assert "till is stopped, with checkpoint" in said
    assert "shop is stopped, with checkpoint" in said
    assert immortal(folder, "down") == "nothing runs\n"
    assert [row["state"] for row in services(folder).values()] == ["stopped", "stopped"]


def test_what_was_stopped_or_changed_is_started(folder: Path) -> None:
    immortal(folder, "up")
    before = services(folder)
    immortal(folder, "stop", "till")
    assert services(folder)["till"]["state"] == "stopped"
    project = (folder / "immortal.toml").read_text()
    (folder / "immortal.toml").write_text(project + '\n[services.stall]\napp = "shop:Shop"\n')
    assert immortal(folder, "up") == "till ready, started again: it was stopped\nshop ready\nstall ready\n"
    now = services(folder)
    assert now["till"]["pid"] != before["till"]["pid"]
    assert now["shop"]["pid"] == before["shop"]["pid"]
    (folder / "immortal.toml").write_text(project)
    immortal(folder, "up")
    assert services(folder)["stall"]["state"] == "stopped"


def test_one_that_fails_is_said(folder: Path) -> None:
    (folder / "shop.py").write_text(SHOP.replace("self.cents = 0", "raise RuntimeError('no till')"))
    said = immortal(folder, "up", status=1)
    assert "till failed: status 70" in said
    assert "shop ready" in said
    assert "see 'immortal logs till'" in said
    assert services(folder)["till"]["state"] == "failed: status 70"
    assert "failed: status 70" in immortal(folder, "status", "till")
    assert "RuntimeError: no till" in _logs(folder, "till")
    (folder / "shop.py").write_text(SHOP)
    assert immortal(folder, "up") == "till ready, started again: it was failed: status 70\nshop ready\n"


def test_an_upgrade_holds(folder: Path) -> None:
    (folder / "shop2.py").write_text(NEXT)
    project = (folder / "immortal.toml").read_text()
    immortal(folder, "up")
    (folder / "immortal.toml").write_text(project.replace("shop:Till", "shop2:Till"))
    stays = "till stays at version 1, but shop2:Till has version 2; 'immortal up --upgrade' upgrades it\n"
    ready = "till ready, started again: its settings or version have changed\nshop ready\n"
    assert immortal(folder, "up") == f"{stays}{ready}"
    assert (
        "till: it runs version 1, but its class has version 2: to upgrade it, use 'immortal up --upgrade'"
        in immortal(folder, "ps")
    )
    immortal(folder, "call", "shop", "order", "2")
    seen(folder, "till has 200")
    said = immortal(folder, "up", "--upgrade")
    assert said == f"till becomes version 2 with shop2:Till; it was version 1\n{ready}"
    os.kill(services(folder)["till"]["pid"], signal.SIGKILL)
    immortal(folder, "call", "shop", "order", "1")
    seen(folder, "of sales: 1")
    assert services(folder)["till"]["version"] == 2
    (folder / "immortal.toml").write_text(project)
    behind = "till has version 2, but the project names shop:Till, which lacks that version: write"
    said = immortal(folder, "up", status=1)
    assert said.startswith(behind), "and what runs goes on"
    assert "till ready\nshop ready\n" in said
    immortal(folder, "down")
    dev = Development(folder)
    try:
        dev.ready("shop")
        assert behind in dev.lines[0]
    finally:
        dev.close()


def test_a_killed_run_comes_back(folder: Path) -> None:
    immortal(folder, "up")
    before = services(folder)["till"]["pid"]
    os.kill(before, signal.SIGKILL)
    assert " error " in seen(folder, "'immortal run' died: SIGKILL", "till")
    log = folder / ".immortal" / ".project.log"
    wait_until(lambda: "till: restarting: 'immortal run' died: SIGKILL" in log.read_text())
    wait_until(lambda: (till := services(folder)["till"])["state"] == "running" and till["pid"] != before)


def _logs(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        command("logs", *arguments), cwd=folder, capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_logs_of_some_and_the_last_lines(folder: Path) -> None:
    immortal(folder, "up")
    assert {line.split(" ")[0] for line in _logs(folder).splitlines()} == {"till", "shop"}
    assert {line.split(" ")[0] for line in _logs(folder, "shop").splitlines()} == {"shop"}
    assert len(_logs(folder, "-n", "1").splitlines()) == 2
    assert (folder / ".immortal" / "shop" / "output.log").stat().st_mode & 0o777 == 0o600
    assert "error: there is no service 'shpo'; there are: till, shop" in immortal(folder, "logs", "shpo", status=1)


def test_it_says_who_runs_it(folder: Path) -> None:
    immortal(folder, "up")
    assert "the project runs already, by 'immortal up'" in immortal(folder, "dev", status=1)
    immortal(folder, "down")
    dev = Development(folder)
    try:
        dev.ready("till", "shop")
        assert "the project runs already, by 'immortal dev'" in immortal(folder, "up", status=1)
        assert "shop is stopped, with checkpoint" in immortal(folder, "down")
        assert dev.process.wait(20) == 0
    finally:
        dev.close()


def test_nothing_outlives_it(folder: Path) -> None:
    immortal(folder, "up")
    keeper = json.loads(immortal(folder, "ps", "--json"))["keeper"]["pid"]
    deaths = [os.pidfd_open(row["pid"]) for row in services(folder).values()]
    os.kill(keeper, signal.SIGKILL)
    for death in deaths:
        signal_wait(death)
    assert immortal(folder, "up") == "till ready\nshop ready\n"


def signal_wait(descriptor: int) -> None:
    assert select.select([descriptor], [], [], 20)[0], "it lives"
    os.close(descriptor)


def test_the_page_is_a_table_at_a_terminal(folder: Path) -> None:
    shown = AtTerminal(command("ps"), folder)
    try:
        shown.see("not registered yet")
        assert shown.ended() == 0
        assert "\x1b[1m" in shown.screen  # the header
    finally:
        shown.close()


def test_following_ends_with_ctrl_c(folder: Path) -> None:
    immortal(folder, "up")
    shown = AtTerminal(command("logs", "-f", "shop"), folder)
    try:
        shown.see("ready")
        immortal(folder, "restart", "shop")
        shown.see("starting both again")
        shown.type(CTRL_C)
        assert shown.ended() == 0
    finally:
        shown.close()
