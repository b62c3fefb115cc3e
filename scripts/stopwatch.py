"""Times day one: the README's first program, typed at terminals, until its state has survived kill -9.

    scripts/stopwatch                       in a fresh copy of this checkout, which makes its environment first
    scripts/stopwatch --wheel FILE.whl      in an empty folder, with a fresh environment and that wheel
    scripts/stopwatch --environment FOLDER  in an empty folder, with an existing environment: the commands alone

Counted is the time that a person waits: for each command until its prompt is back, or until the line that it was typed
for is printed. The person's own time, to read and to save a file, is not counted. Prints the seconds of each step, and
ends with status 1 if the sum is above --limit-s, or a step does not end. It needs no package.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 60.0
STEP_TIMEOUT_S = 600.0
PROMPT = "stopwatch> "
_COLORS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


class StopwatchError(Exception):
    """Raised when a step does not end."""


class Terminal:
    """Shell at a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "PYENV_ROOT") if name in os.environ}
        self._shell = subprocess.Popen(
            ["/bin/sh", "-i"],
            cwd=folder,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**kept, "PS1": PROMPT, "TERM": "xterm", "HISTFILE": ""},
        )
        os.close(theirs)
        self._screen = ""
        self._consumed = 0
        self.expect(PROMPT)

    def enter(self, line: str) -> None:
        os.write(self._ours, f"{line}\n".encode())

    def run(self, line: str) -> str:
        """Type a command, and wait until it has ended with status 0; return its output. Raises StopwatchError."""
        self.enter(line)
        shown = self.expect(PROMPT)
        self.enter("echo status=$?")
        status = self.expect_pattern(r"status=(\d+)\s")
        self.expect(PROMPT)
        if status != "0":
            raise StopwatchError(f"{line!r} ended with status {status}:\n{shown}")
        return shown

    def interrupt(self) -> None:
        os.write(self._ours, b"\x03")

    def expect(self, text: str) -> str:
        """Return the terminal's output since the last call, up to and with ``text``. Raises StopwatchError."""
        return self._expect(re.compile(f"(?s)(.*?{re.escape(text)})"))

    def expect_pattern(self, pattern: str) -> str:
        """Return the first group of ``pattern`` in the output since the last call. Raises StopwatchError."""
        return self._expect(re.compile(pattern))

    def _expect(self, pattern: re.Pattern[str]) -> str:
        deadline_s = time.monotonic() + STEP_TIMEOUT_S
        while (found := pattern.search(self._screen, self._consumed)) is None:
            rest_s = deadline_s - time.monotonic()
            if rest_s <= 0 or not self._read(rest_s):
                raise StopwatchError(f"no {pattern.pattern!r} came:\n{self._screen[self._consumed :]}")
        self._consumed = found.end()
        return found[1]

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._ours], [], [], timeout_s)[0]:
            return False
        try:
            read = os.read(self._ours, 1 << 16)
        except OSError:  # the shell has ended
            return False
        self._screen += _COLORS.sub("", read.decode("utf-8", "replace").replace("\r", ""))
        return bool(read)

    def close(self) -> None:
        """Hang up the shell and the processes in it."""
        os.close(self._ours)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._shell.pid, signal.SIGHUP)
        try:
            self._shell.wait(10)
        except subprocess.TimeoutExpired:
            self._shell.kill()
            self._shell.wait()


class Stopwatch:
    """Stopwatch that prints the seconds of each step, and adds them up."""

    total_s = 0.0

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        began_s = time.monotonic()
        yield
        took_s = time.monotonic() - began_s
        self.total_s += took_s
        print(f"{took_s:7.2f} s  {name}", flush=True)


def first_program(readme: str) -> tuple[str, list[str], list[str]]:
    """Return the README's first class, and the commands that are typed at two terminals for its program."""
    program = re.search(r"^```python\n.*?(^class .*?)```", readme, re.DOTALL | re.MULTILINE)
    section = readme.partition("## A first program")[2].partition("\n## ")[0]
    typed = re.findall(r"^```\n(.*?)```", section, re.DOTALL | re.MULTILINE)
    if program is None or len(typed) != 2:
        raise StopwatchError("README.md has no program, or no commands at two terminals under 'A first program'")
    first, second = (block.splitlines() for block in typed)
    return program[1], first, second


def copy_checkout(folder: Path) -> None:
    """Copy git's files as they are now; no environment, and nothing compiled."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=False,
    )
    if listed.returncode != 0:
        left_out = shutil.ignore_patterns(".venv", "build", "dist", "_compiled", "__pycache__", ".git", ".immortal")
        shutil.copytree(ROOT, folder, symlinks=True, dirs_exist_ok=True, ignore=left_out)
        return
    for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
        if os.path.lexists(ROOT / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)


def measure(folder: Path, wheel: Path | None, environment: Path | None) -> float:
    """Run all steps, and return their seconds. Raises StopwatchError."""
    watch = Stopwatch()
    source, at_first, at_second = first_program((ROOT / "README.md").read_text())
    if at_first[-1] != "immortal dev" or sum(line.startswith("kill -9 ") for line in at_second) != 1:
        raise StopwatchError(f"'immortal dev' and one 'kill -9' were expected in README.md: {at_first}, {at_second}")
    if wheel is None and environment is None:
        copy_checkout(folder)
    with contextlib.closing(Terminal(folder)) as first, contextlib.closing(Terminal(folder)) as second:
        if wheel is not None:
            for command in ("python3 -m venv .venv", f".venv/bin/pip install {shlex.quote(str(wheel))}"):
                with watch.step(command):
                    first.run(command)
        elif environment is not None:
            (folder / ".venv").symlink_to(environment)
        for command in at_first[:-1]:
            if command == "scripts/setup" and (wheel is not None or environment is not None):
                continue
            with watch.step(command):
                first.run(command)
            if command.startswith("export "):
                second.run(command)
        if source not in (folder / "corner-shop" / "shop.py").read_text():
            raise StopwatchError("the class that README.md shows is not in the project that 'immortal init' makes")
        with watch.step("immortal dev, until both are ready"):
            first.enter("immortal dev")
            pids = [first.expect_pattern(rf"{role}_pid=(\d+)") for _ in range(2) for role in ("coordinator", "app")]
            for _ in range(2):
                first.expect_pattern(r"(info +ready)")
        left = 10
        for command in at_second:
            if command.startswith("kill -9 "):
                with watch.step("kill -9 of all four processes, until both have recovered"):
                    second.run(f"kill -9 {' '.join(pids)} || true")  # an app can have ended with its coordinator
                    for _ in range(2):
                        first.expect_pattern(r"(info +recovered)")
            elif command.startswith("immortal call "):
                left -= 2
                with watch.step(f"{command}: {left} are left"):
                    if '"2 tea: sold"' not in second.run(command):
                        raise StopwatchError(f"{command!r} did not sell")
                    first.expect(f"2 tea taken, {left} left")
            else:
                second.run(command)
        first.interrupt()  # not counted
        first.expect(PROMPT)
    return watch.total_s


def end_compiling(folder: Path) -> None:
    """End the compilation of scripts/setup in the background: its folder is removed."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        os.killpg(os.getpgid(int((folder / ".venv" / ".compiling").read_text())), signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/stopwatch", description=__doc__.partition("\n")[0])
    parser.add_argument("--wheel", type=Path, help="install this wheel into a fresh environment")
    parser.add_argument("--environment", type=Path, help="take this environment, which has Immortal")
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, help="more than this ends with status 1 (%(default)s)"
    )
    options = parser.parse_args()
    for given in (options.wheel, options.environment):
        if given is not None and not given.exists():
            parser.error(f"{given} is not there")
    with tempfile.TemporaryDirectory(prefix="immortal-stopwatch-") as folder:
        try:
            paths = (one.resolve() if one is not None else None for one in (options.wheel, options.environment))
            total_s = measure(Path(folder), *paths)
        except StopwatchError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        finally:
            end_compiling(Path(folder))
    print(f"{total_s:7.2f} s  in all, of {options.limit_s:g} s")
    return int(total_s > options.limit_s)


if __name__ == "__main__":
    sys.exit(main())
