"""Output of a project's services: on one screen (Console), in files (LogFiles), and read from the files (Tail).

On the screen each line has the service's name in its color, with a line of states below, and questions. Lines wait
while a question is open, so that a debugger's prompt stays where it is; typed text answers the question that is shown.
Colors and the line of states are for terminals; elsewhere, and with NO_COLOR, the output is plain text.

The files are <home>/NAME/output.log and older ones, output.log.1 and so on, readable by their owner alone. Each line
begins with its time and level; "-" stands for what the app prints, ">" for what it logs:

    2026-11-22T23:59:59.123Z info ready
    2026-11-22T23:59:59.250Z - till has 100
    2026-11-22T23:59:59.251Z warning > sold much  cents=100
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from logging import LogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, TextIO

from immortal.coordinator.core.notices import Level
from immortal.protocol.files import make_folder, opener
from immortal.protocol.safe_output import printable

LINES_HELD_MAX = 10_000  # while a question is open; beyond it the oldest are dropped
_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_LEVEL_COLORS = {"warning": 33, "error": 31, "debug": 2}
_DIM = 2
_ERASE = "\r\x1b[2K"
_READ_SIZE_BYTES = 4096

Answer = Callable[[str], None]


class Console:
    """Screen for the output of many services. ``names``: of the services; the longest sets the width of their column.
    ``states``: returns the line of states."""

    def __init__(self, names: list[str], stream: TextIO, states: Callable[[], str] = lambda: "") -> None:
        self._stream = stream
        self._states = states
        self._is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._colored = self._is_terminal and not os.environ.get("NO_COLOR")
        self._width = max(map(len, names), default=0)
        self._names = list(names)
        self._questions: deque[tuple[str, str, Answer]] = deque()  # service, text, and callback for the answer
        self._queued_lines: deque[tuple[str, str, Level | None, str]] = deque()
        self._lost_count = 0
        self._drawn = False  # the line of states
        self._typed = b""

    def write_line(self, name: str, text: str, level: Level | None = None, clock: str = "") -> None:
        if self._questions:
            self._queued_lines.append((name, text, level, clock))
            if len(self._queued_lines) > LINES_HELD_MAX:
                self._queued_lines.popleft()
                self._lost_count += 1
        else:
            self._write(self._format_line(name, text, level, clock))

    def interrupt(self, name: str, text: str) -> None:
        """Show a line at once; an open question is shown again after it."""
        if self._questions:
            self._write(f"\n{self._format_line(name, text, None, '')}")
            self._show_question()
        else:
            self.write_line(name, text)

    def on_changed(self) -> None:
        if not self._questions and self._is_terminal:
            self._write("")

    def _format_line(self, name: str, text: str, level: Level | None, clock: str) -> str:
        shown = printable(text)
        if level is not None:
            front = f"{clock} {level:<7} " if clock else "" if level == "info" else f"{level}: "
            shown = self._color(f"{front}{shown}", _LEVEL_COLORS[level]) if level in _LEVEL_COLORS else front + shown
        return f"{self._name_column(name)} {shown}\n"

    def _name_column(self, name: str) -> str:
        if name not in self._names:
            self._names.append(name)
        return self._color(f"{name:<{self._width}} |", _COLORS[self._names.index(name) % len(_COLORS)])

    def _color(self, text: str, color: int) -> str:
        return f"\x1b[{color}m{text}\x1b[0m" if self._colored else text

    def _write(self, text: str) -> None:
        erased = _ERASE if self._drawn else ""
        states = self._states() if self._is_terminal and not self._questions else ""
        if states:
            states = self._color(states[: max(1, shutil.get_terminal_size().columns - 1)], _DIM)
        self._drawn = bool(states)
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            self._stream.write(f"{erased}{text}{states}")
            self._stream.flush()

    def add_question(self, name: str, text: str, answer: Answer) -> None:
        self._questions.append((name, text, answer))
        if len(self._questions) == 1:
            self._show_question()

    def on_ended(self, name: str, state: str) -> None:
        """Drop the questions of ``name``, which has ended."""
        self._drop(lambda question: question[0] == name)

    async def ask(self, name: str, text: str, choices: str) -> str:
        """Ask until one of the letters ``choices`` is typed, and return it. If cancelled, the question is dropped."""
        answered: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def on_answer(line: str) -> None:
            letter = line.strip().lower()[:1]
            if letter and letter in choices:
                answered.set_result(letter)
            else:
                self.add_question(name, text, on_answer)

        self.add_question(name, text, on_answer)
        try:
            return await answered
        finally:
            self._drop(lambda question: question[2] is on_answer)

    def _drop(self, which: Callable[[tuple[str, str, Answer]], bool]) -> None:
        if not self._questions:
            return
        shown = self._questions[0]
        self._questions = deque(one for one in self._questions if not which(one))
        if not self._questions or self._questions[0] is not shown:
            self._write("\n")
            self._show_next()

    def _show_question(self) -> None:
        name, text, _ = self._questions[0]
        self._write(f"{self._name_column(name)} {printable(text)}")

    def _show_next(self) -> None:
        if self._questions:
            self._show_question()
            return
        if self._lost_count:
            self._write(f"... {self._lost_count} lines are left out\n")
            self._lost_count = 0
        while self._queued_lines and not self._questions:
            self._write(self._format_line(*self._queued_lines.popleft()))
        self.on_changed()

    def listen(self) -> None:
        """Read answers from stdin until :meth:`close`."""
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._read)

    def close(self) -> None:
        """Stop reading, drop all questions, and end the screen with a whole line."""
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        self._states = lambda: ""
        self._questions.clear()
        self._show_next()
        self._write("")

    def _read(self) -> None:
        try:
            data = os.read(sys.stdin.fileno(), _READ_SIZE_BYTES)
        except OSError:  # the terminal is gone
            data = b""
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        *lines, self._typed = (self._typed + data).split(b"\n")
        for line in lines:
            self._drawn = False  # the terminal is at the next line
            if self._questions:
                answer = self._questions.popleft()[2]
                answer(line.decode("utf-8", "replace").rstrip("\r"))
                self._show_next()


FILE_NAME = "output.log"
SIZE_BYTES_MAX = 10 << 20  # of one file
OLD_COUNT = 3  # older files that are kept


class _Rotating(RotatingFileHandler):
    def _open(self) -> IO[str]:  # type: ignore[override]
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=opener)


class LogFiles:
    """Log files with the output of services. ``size_bytes_max``: size of a file at which the next one begins."""

    def __init__(self, home: Path, on_changed: Callable[[], None], size_bytes_max: int = SIZE_BYTES_MAX) -> None:
        self._home = home
        self.on_changed = on_changed
        self._size_bytes_max = size_bytes_max
        self._files: dict[str, _Rotating] = {}

    def write_line(self, name: str, text: str, level: Level | None = None, clock: str = "") -> None:
        if name not in self._files:
            make_folder(self._home / name)
            path = self._home / name / FILE_NAME
            self._files[name] = _Rotating(
                path, maxBytes=self._size_bytes_max, backupCount=OLD_COUNT, encoding="utf-8", errors="replace"
            )
        now_s = time.time()
        at = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now_s))}.{int(now_s % 1 * 1000):03d}Z"
        whole = f"{at} {level or '-'} {printable(text)}"
        self._files[name].emit(LogRecord(name, 0, "", 0, whole, None, None))

    def add_question(self, name: str, text: str, answer: Callable[[str], None]) -> None:
        """Write the question as a line: nobody can answer it."""
        self.write_line(name, text)

    def on_ended(self, name: str, state: str) -> None:
        """Write the end of a service that nobody stopped to stderr, which is the daemon's own log."""
        if state != "stopped":
            print(f"{name}: {state}", file=sys.stderr, flush=True)  # noqa: T201 (to the file of the daemon)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class Tail:
    """Reader of the lines of one service from its files, from the oldest one on, while they grow."""

    def __init__(self, home: Path, name: str) -> None:
        self.name = name
        self._path = home / name / FILE_NAME
        self._file: IO[bytes] | None = None
        self._rest = b""

    def all_lines(self) -> Iterator[str]:
        """Yield all lines so far; :meth:`new_lines` continues after them."""
        for number in range(OLD_COUNT, 0, -1):
            old = self._path.with_name(f"{FILE_NAME}.{number}")
            if old.exists():
                yield from old.read_text("utf-8", "replace").splitlines()
        yield from self.new_lines()

    def new_lines(self) -> Iterator[str]:
        """Yield the lines after those of the last call, also across files."""
        while True:
            if self._file is None:
                try:
                    self._file = self._path.open("rb")
                except FileNotFoundError:
                    return
            *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in lines)
            if not self._is_rotated():
                return
            self._file.close()
            self._file = None

    def _is_rotated(self) -> bool:
        """Return True if the open file was rotated and is read to its end."""
        assert self._file is not None
        try:
            now = self._path.stat()
        except FileNotFoundError:
            return False  # it is being rotated
        here = os.fstat(self._file.fileno())
        return (now.st_dev, now.st_ino) != (here.st_dev, here.st_ino) and self._file.tell() == here.st_size


def merge_by_time(tails: Iterable[Tail], count: int | None = None) -> Iterator[tuple[str, str]]:
    """Yield (name, line) of all services, ordered by time. ``count``: number of last lines of each; None: all."""

    def dated(tail: Tail) -> Iterator[tuple[str, str, str]]:
        lines = tail.all_lines()
        for line in lines if count is None else deque(lines, count):
            yield line.partition(" ")[0], tail.name, line

    return ((name, line) for _, name, line in heapq.merge(*(dated(tail) for tail in tails), key=lambda one: one[0]))
