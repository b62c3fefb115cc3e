"""`immortal` as a person types it: commands that end, and `immortal run` with its lines as they are printed."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.helpers import commands
from tests.helpers.commands import PYTHON

DEADLINE_S = 40.0
HOME = "home"


def command_line(*arguments: str, python: Sequence[str] = PYTHON, home: str = HOME) -> list[str]:
    return [*python, "-m", "immortal", "--home", home, *arguments]


def immortal(
    folder: Path, *arguments: str, status: int = 0, given: str | None = None, python: Sequence[str] = PYTHON
) -> str:
    """Run a command; return its stdout, then stderr. It must end with ``status`` and without a traceback."""
    result = commands.run(folder, *arguments, home=HOME, given=given, python=python)
    output = result.stdout + result.stderr
    assert result.returncode == status, f"status {result.returncode}: {output}"
    assert "Traceback" not in output, output
    return output


class Run:
    """Process of `immortal run` in ``folder``, or of another ``command`` that keeps running."""

    def __init__(
        self, folder: Path, *arguments: str, command: str = "run", python: Sequence[str] = PYTHON, home: str = HOME
    ) -> None:
        self.process = subprocess.Popen(
            command_line(command, *arguments, python=python, home=home),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": ""},  # otherwise print() writes word by word, and lines mix
        )
        self.lines: list[str] = []
        self._ended = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def count(self, text: str) -> int:
        return sum(text in line for line in self.lines)

    def line(self, text: str, count: int = 1) -> str:
        """Return the ``count``-th line with ``text``, once it is there."""
        with self._changed:
            there = self._changed.wait_for(lambda: self.count(text) >= count or self._ended, DEADLINE_S)
            assert there, f"no line with {text!r} came: {self.text}"
            assert self.count(text) >= count, f"it ended without a line with {text!r}: {self.text}"
            return [line for line in self.lines if text in line][count - 1]

    def ended(self) -> int:
        """Return the exit status, once the process has ended by itself."""
        status = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        return status

    def stop(self) -> int:
        """Stop the process cleanly; return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.ended()

    def kill(self) -> None:
        """Kill the process with kill -9; its children die with it."""
        if self.process.poll() is None:
            self.process.kill()
        self.ended()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)  # between two checks from outside
