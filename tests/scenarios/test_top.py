"""`immortal top` at a terminal, by what a person does there, and behind a pipe."""

from __future__ import annotations

import fcntl
import re
import struct
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.at_terminal import CTRL_C, CTRL_Z, AtTerminal
from tests.helpers.cli import HOME, command_line, immortal
from tests.helpers.logged_fleet import leave_dead, write_fleet

CALLERS = {"desk": ["shop"], "ledger": ["desk", "shop"], "shop": [], "spare": []}
INTO, OUT_OF = "\x1b[?1049h", "\x1b[?1049l"
"""Where the terminal begins to show the screen, and where it shows again what was there before."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("top")
    write_fleet(made / HOME, CALLERS, {"desk": ["ledger"]})
    leave_dead(made / HOME, "ledger")
    return made


@pytest.fixture
def terminal(folder: Path) -> Iterator[AtTerminal]:
    made = AtTerminal(command_line("top"), folder)
    made.see(INTO)
    yield made
    made.close()


def frame(terminal: AtTerminal, is_meant: Callable[[str], bool]) -> str:
    """Return the first frame that is meant, in its words alone."""
    while not is_meant(seen := re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.see("\x1b[H"))):
        pass
    return seen


def instances(shown: str) -> list[str]:
    return re.findall(r"^(\w+) +(?:stopped|not started)", shown, re.MULTILINE)


def is_clean(terminal: AtTerminal) -> bool:
    """Return True if the terminal is as before: the old screen, keys that are shown, Ctrl-Z that suspends."""
    suspends = termios.tcgetattr(terminal.terminal)[6][termios.VSUSP] == CTRL_Z.encode()
    return terminal.screen.rindex(OUT_OF) > terminal.screen.rindex(INTO) and terminal.echoes() and suspends


def test_keys_sort_and_end_it(terminal: AtTerminal) -> None:
    shown = frame(terminal, lambda one: len(instances(one)) == 4)
    assert instances(shown) == ["ledger", "desk", "shop", "spare"]
    assert "its process has died: 'immortal run ledger' recovers it" in shown
    assert re.search(r"\x1b\[31mledger", terminal.screen), "it is red"
    assert re.search(r"^shop +ledger .*3\.0 ms", shown, re.MULTILINE)
    assert "by problems; 4 instances: 0 running, 1 with problems, in " in shown
    terminal.type("s")
    shown = frame(terminal, lambda one: "by instance" in one)
    assert instances(shown) == ["desk", "ledger", "shop", "spare"]
    terminal.type("\x1b[Dr")
    frame(terminal, lambda one: "by problems" in one and instances(one)[-1] == "ledger")
    terminal.type("q")
    assert terminal.ended() == 0
    assert is_clean(terminal)


def test_it_fits_each_terminal(terminal: AtTerminal) -> None:
    frame(terminal, lambda one: "has died" in one and "checkpoint" in one)
    fcntl.ioctl(terminal.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 8, 45, 0, 0))
    shown = frame(terminal, lambda one: one.count("\n") == 7 and "in/s" not in one)
    assert max(map(len, shown.split("\n"))) <= 45
    assert re.search(r"instance +state +records/s +problems", shown)
    assert instances(shown) == ["ledger"], "there is room for one, and for two streams"
    terminal.type(" ")
    frame(terminal, lambda one: instances(one) == ["desk"])
    terminal.type(CTRL_C)
    assert terminal.ended() == 0
    assert is_clean(terminal)


def test_it_comes_back_from_a_suspension(terminal: AtTerminal) -> None:
    terminal.type(CTRL_Z)
    terminal.see(OUT_OF)
    terminal.see(INTO)  # no shell is there to suspend it
    terminal.process.terminate()
    assert terminal.ended() == 0
    assert is_clean(terminal)


def test_a_pipe_gets_all_of_it_once(folder: Path) -> None:
    printed = immortal(folder, "top", "--interval", "0.5", "--sort", "instance").splitlines()
    assert printed[0].split()[:4] == ["instance", "state", "role", "records/s"]
    assert [line.split()[0] for line in printed[1:5]] == ["desk", "ledger", "shop", "spare"]
    assert [" to ".join(line.split()[:2]) for line in printed[7:]] == [
        "desk to ledger",
        "ledger to desk",
        "shop to desk",
        "shop to ledger",
    ]
    printed = immortal(folder, "top", "--once", "--interval", "0.5", "shop").splitlines()
    assert [line.split(maxsplit=1)[0] for line in printed if line] == ["instance", "shop", "from", "shop", "shop"]
    assert "there is no instance 'nobody'" in immortal(folder, "top", "nobody", status=1)
