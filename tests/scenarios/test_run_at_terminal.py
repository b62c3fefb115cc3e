"""`immortal run` at a terminal: a service that stops in the debugger can be debugged, and Ctrl-C still stops all."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.at_terminal import CTRL_C, CTRL_Z, AtTerminal
from tests.helpers.cli import command_line, immortal

APP = """
import os
from datetime import timedelta
from immortal import Immortal, Impulses, impulse, on_primary

class Counter(Immortal%s):
    total: int

    def __init__(self) -> None:
        self.total = 0

    @impulse
    def add(self, number: int) -> None:
        if number == 2 and not os.path.exists("looked"):
            breakpoint()
        self.total += number

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        for number in range(self.total, 3):
            impulses.add(number)
        impulses.flush(20)
        print("total", self.total, flush=True)
"""

Start = Callable[..., AtTerminal]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    begun: list[AtTerminal] = []
    immortal(tmp_path, "register", "counter", "--peer", "tcp://127.0.0.1:*")
    (tmp_path / "counter.py").write_text(APP % "")

    def begin(*arguments: str, options: str = "") -> AtTerminal:
        (tmp_path / "counter.py").write_text(APP % options)
        begun.append(AtTerminal(command_line("run", "counter", "counter:Counter", *arguments), tmp_path))
        return begun[-1]

    yield begin
    for one in begun:
        one.close()


def dead_letters(folder: Path) -> str:
    return immortal(folder, "dead-letters", "counter")


def test_a_breakpoint_is_debugged(tmp_path: Path, start: Start) -> None:
    run = start("--restart")
    run.see("(Pdb) ")
    run.type("p 'sum', 20 + self.total\n")
    run.see("('sum', 21)")
    run.see("(Pdb) ")
    run.type("c\n")
    run.see("total 3")
    run.type(CTRL_C)
    run.see("both stopped")
    assert run.ended() == 0
    assert "not with status 0" not in run.screen
    assert "the app died" not in run.screen
    assert immortal(tmp_path, "stop", "counter") == "counter does not run\n"
    assert dead_letters(tmp_path) == "counter has no dead letters\n"


def test_its_lines_are_edited_as_at_any_prompt(start: Start) -> None:
    pytest.importorskip("readline")
    run = start()
    run.see("(Pdb) ")
    run.type("p 'ab' + 'X'\x1b[D\x7fcd\n")  # one to the left, delete, two letters
    run.see("'abcd'")
    run.type("p 6 * 7\n")
    run.see("42")
    run.type("\x1b[A\x1b[A\n")  # the last but one again
    run.see("'abcd'")


def test_ctrl_c_at_the_prompt_waits_for_the_handler(tmp_path: Path, start: Start) -> None:
    run = start("--restart")
    run.see("(Pdb) ")
    run.type(CTRL_C)
    run.see("stopping")
    run.type("c\n")
    run.see("both stopped")
    assert run.ended() == 0
    assert run.echoes()
    assert dead_letters(tmp_path) == "counter has no dead letters\n"


def test_ctrl_c_again_ends_all_and_loses_nothing(tmp_path: Path, start: Start) -> None:
    run = start("--restart")
    run.see("(Pdb) ")
    assert not run.echoes()  # the line editor has it
    run.type(CTRL_C)
    run.see("stopping")
    assert run.insist(CTRL_C) == 1
    assert run.echoes()
    (tmp_path / "looked").touch()
    again = AtTerminal(command_line("run", "counter"), tmp_path)
    try:
        again.see("total 3")
        again.type(CTRL_C)
        assert again.ended() == 0
    finally:
        again.close()
    assert dead_letters(tmp_path) == "counter has no dead letters\n"


@pytest.mark.usefixtures("start")
def test_it_is_a_job_of_the_shell(tmp_path: Path) -> None:
    run = shlex.join(command_line("run", "counter", "counter:Counter"))
    shell = AtTerminal(["bash", "-c", f"set -m; {run}; echo in the shell; fg; echo at the end"], tmp_path)
    try:
        shell.see("(Pdb) ")
        shell.type(CTRL_Z)
        shell.see("in the shell")
        shell.type("p 6 * 7\n")
        shell.see("\n42")
        shell.type("c\n")
        shell.see("total 3")
        shell.type(CTRL_C)
        shell.see("both stopped")
        shell.see("at the end")
        assert shell.ended() == 0
    finally:
        shell.close()


def test_time_in_the_debugger_is_no_handlers_time(start: Start) -> None:
    run = start(options=", handler_time_limit=timedelta(seconds=1)")
    run.see("(Pdb) ")
    run.type("import time; time.sleep(2.5)\n")  # the watchdog looks meanwhile, and its last resort is re-armed
    run.see("(Pdb) ")
    run.type("c\n")
    run.see("total 3")
    assert "has not come back" not in run.screen


def test_without_a_terminal_the_app_reads_nothing(tmp_path: Path, start: Start) -> None:
    run = start("--no-interactive")
    run.see("BdbQuit")
