"""A service in one process, as its guide says: programs, debuggers, threads; and its log moves between both ways."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from immortal.coordinator.instances.registry import Registry
from tests.helpers.cli import DEADLINE_S, HOME, Run, immortal

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "embedded.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", GUIDE, re.DOTALL))
OUTPUTS = dict(re.findall(r"```output (\w+)\n(.*?)```", GUIDE, re.DOTALL))

ODD = """
import os
from immortal import Immortal, rpc
from immortal.embedded import run


class Odd(Immortal, checkpoint="fork"):
    numbers: list[int]
    ballast: bytes

    def __init__(self) -> None:
        self.numbers = []
        self.ballast = b""

    @rpc
    def note(self, number: int) -> int:
        self.numbers.append(number)
        return len(self.numbers)

    @rpc
    def grow(self, mib: int) -> None:
        self.ballast = b"x" * (mib << 20)

    @rpc
    def fails(self) -> None:
        self.numbers.append(-1)
        raise ValueError("not today")

    @rpc(on_error="stop")
    def stops(self) -> None:
        raise ValueError("no further")

    @rpc
    def dies(self) -> None:
        os._exit(9)

    @rpc
    def never_comes_back(self) -> None:
        print("in it", flush=True)
        while True:
            pass

    @rpc
    def asks(self) -> None:
        answer = 41
        breakpoint()
        self.numbers.append(answer)


if __name__ == "__main__":
    run(Odd, "odd")
"""


SEEDED = {**os.environ, "PYTHONHASHSEED": "0"}  # without it each program starts itself once more


class Program:
    """``python FILE`` in ``folder``; its lines are those of `immortal run`."""

    def __init__(self, folder: Path, file: str, environment: Mapping[str, str] = SEEDED) -> None:
        self.folder = folder
        with (folder / "lines").open("a") as lines:
            self.process = subprocess.Popen(
                [sys.executable, file],
                cwd=folder,
                env={**environment, "IMMORTAL_HOME": HOME},
                stdout=lines,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        return (self.folder / "lines").read_text()

    def line(self, text: str, count: int = 1) -> Program:
        """Once it has said that so often, with what others said before it."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self.text.count(text) < count:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline_s, self.text
        return self

    def ended(self) -> int:
        return self.process.wait(DEADLINE_S)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "odd.py").write_text(ODD)
    return tmp_path


@pytest.fixture
def odd(folder: Path) -> Iterator[Program]:
    program = Program(folder, "odd.py")
    try:
        yield program.line("checkpoint taken")
    finally:
        program.kill()


def call(folder: Path, *arguments: str) -> str:
    return immortal(folder, "call", *arguments).strip()


def test_a_log_moves_between_one_process_and_two(folder: Path) -> None:
    program = Program(folder, "shop.py", os.environ).line("checkpoint taken")
    assert Registry(folder / HOME).load("shop").log_key == "file"
    assert call(folder, "shop", "sell", "3") == "3"
    program.kill()
    program = Program(folder, "shop.py").line("recovered")
    assert call(folder, "shop", "sell", "2") == "5"
    program.process.send_signal(signal.SIGINT)
    assert program.ended() == 0, program.text
    assert "Traceback" not in program.text
    pair = Run(folder, "shop")  # its app is written down
    try:
        pair.line("recovered")
        assert call(folder, "shop", "sell", "1") == "6"
    finally:
        pair.kill()
    program = Program(folder, "shop.py").line("recovered", 2)
    try:
        assert call(folder, "shop", "sell", "4") == "10"
        assert "shop is stopped, with checkpoint" in immortal(folder, "stop", "shop")
        assert program.ended() == 0
    finally:
        program.kill()
    immortal(folder, "log", "verify", "shop")
    immortal(folder, "verify", "shop")


def test_two_instances_in_threads(folder: Path) -> None:
    for _ in range(2):
        said = subprocess.run(
            [sys.executable, "both.py"],
            cwd=folder,
            env={**os.environ, "IMMORTAL_HOME": HOME},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert said.stderr == ""
        immortal(folder, "verify", "orders")
        if "order 1" in said.stdout:
            assert said.stdout == OUTPUTS["both"]
    assert said.stdout == "order 3: 2 left\norder 4: 0 left\n", "the second run goes on where the first one was"


def test_a_call_fails_alone_and_the_app_goes_on(folder: Path, odd: Program) -> None:
    assert call(folder, "odd", "note", "1") == "1"
    assert "not today" in immortal(folder, "call", "odd", "fails", status=1)
    assert call(folder, "odd", "note", "2") == "2"
    # A state too large for a copy in memory is rewound by a recovery, in this very process.
    call(folder, "odd", "grow", "40")
    immortal(folder, "checkpoint", "odd")
    assert call(folder, "odd", "note", "3") == "3"
    assert "not today" in immortal(folder, "call", "odd", "fails", status=1)
    assert call(folder, "odd", "note", "4") == "4"
    assert odd.text.count("coordinator started") == 1
    immortal(folder, "stop", "odd")
    assert odd.ended() == 0, odd.text
    immortal(folder, "verify", "odd")


def test_an_error_that_stops_the_app_is_the_exit_status(folder: Path, odd: Program) -> None:
    immortal(folder, "call", "--timeout", "1", "odd", "stops", status=1)
    assert odd.ended() == 70, odd.text
    assert "no further" in odd.text
    assert odd.text.count("stopped") == 1


def test_what_ends_the_process_is_passed_over_by_two(folder: Path, odd: Program) -> None:
    immortal(folder, "call", "--timeout", "1", "odd", "dies", status=1)
    assert odd.ended() == 9
    pair = Run(folder, "odd", "odd:Odd", "--restart")
    try:
        pair.line("recovered")
        assert call(folder, "odd", "note", "1") == "1"
        assert pair.stop() == 0
    finally:
        pair.kill()
    again = Program(folder, "odd.py").line("recovered")
    try:
        assert call(folder, "odd", "note", "2") == "2"
    finally:
        again.kill()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_handler_that_does_not_come_back_can_be_left(
    folder: Path, odd: Program, number: signal.Signals, status: int
) -> None:
    caller = subprocess.Popen(
        [sys.executable, "-m", "immortal", "--home", HOME, "call", "odd", "never_comes_back"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        odd.line("in it")
        deadline_s = time.monotonic() + DEADLINE_S
        while odd.process.poll() is None and time.monotonic() < deadline_s:
            odd.process.send_signal(number)  # several at one moment are one wish
            select.select([], [], [], 0.1)
        assert odd.ended() == status
        assert "Traceback" not in odd.text
    finally:
        caller.kill()
        caller.wait()


def test_breakpoints_have_the_terminal(folder: Path) -> None:
    immortal(folder, "register", "odd", "--peer", "tcp://127.0.0.1:*")
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(folder)
        os.environ.pop("PYTHONBREAKPOINT", None)
        command = [sys.executable, "-m", "immortal", "--home", HOME, "run", "odd", "odd:Odd", "--embedded"]
        os.execv(sys.executable, command)
    said = b""

    def until(text: bytes) -> None:
        nonlocal said
        deadline_s = time.monotonic() + DEADLINE_S
        while text not in said:
            assert select.select([terminal], [], [], max(0.0, deadline_s - time.monotonic()))[0], said
            said += os.read(terminal, 4096)

    caller = None
    try:
        until(b"checkpoint taken")
        command = [sys.executable, "-m", "immortal", "--home", HOME, "call", "odd", "asks"]
        caller = subprocess.Popen(command, cwd=folder)
        until(b"(Pdb) ")
        said = b""
        os.write(terminal, b"p answer\n")
        until(b"41")
        os.write(terminal, b"c\n")
        assert caller.wait(DEADLINE_S) == 0
        said = b""
        os.write(terminal, b"\x03")  # Ctrl-C: no other debugger, but a clean stop
        until(b"stopped")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        pid = 0
    finally:
        if caller is not None and caller.poll() is None:
            caller.kill()
            caller.wait()
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(terminal)
    with_it = Program(folder, "odd.py", {**os.environ, "PYTHONBREAKPOINT": "0"}).line("recovered")
    try:
        assert call(folder, "odd", "note", "7") == "2", "41, which is what the code says, and 7"
    finally:
        with_it.kill()


def test_what_cannot_be_run(folder: Path, odd: Program) -> None:
    second = Program(folder, "odd.py")
    assert second.ended() == 1
    assert "app Odd: 'odd' runs, as process" in odd.text
    (folder / "given.py").write_text("from odd import Odd, run\nrun(Odd, 'odd', keep_checkpoints=4)\n")
    third = Program(folder, "given.py")
    assert third.ended() == 1
    assert "keep_checkpoints can't be given here" in odd.text
    assert "Traceback" not in odd.text
    immortal(folder, "stop", "odd")
    assert "--strict" in immortal(folder, "run", "odd", "--embedded", "--restart", status=2)


@pytest.mark.parametrize("file", ["08-x.py", "a.b c.py", "place/__main__.py"])
def test_a_program_may_have_any_name(folder: Path, file: str) -> None:
    """Its class is known by its path where nothing could import it, and `immortal run` finds it by that."""
    program = folder / file
    program.parent.mkdir(exist_ok=True)
    start = "with start(Odd, 'odd') as odd: print('started')"
    program.write_text(ODD.replace('run(Odd, "odd")', start).replace("import run", "import run, start"))
    environment = {**os.environ, "IMMORTAL_HOME": HOME}
    given = "place" if file.startswith("place") else file
    done = subprocess.run(
        [sys.executable, given], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr
    app = Registry(folder / HOME).load("odd").app
    assert app == f"{file}:Odd"
    load = f"from immortal.appsdk.running.runner import load_or_report; print(load_or_report({app!r}).__name__)"
    found = subprocess.run([sys.executable, "-c", load], cwd=folder, capture_output=True, text=True, check=False)
    assert found.stdout == "Odd\n", found.stderr
