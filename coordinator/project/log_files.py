"""What the services of a project say, in files: <home>/NAME/output.log, and what was before in output.log.1 and on.

Each line begins with its time and level; "-" is the app's. The files are their owner's alone.

    2026-11-22T23:59:59.123Z info ready
    2026-11-22T23:59:59.250Z - till has 100
"""

from __future__ import annotations

import heapq
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from logging import LogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO

from immortal.coordinator.core.notices import Level
from immortal.protocol.private_files import make_folder, opener
from immortal.protocol.shown import printable

FILE_NAME = "output.log"
SIZE_BYTES_MAX = 10 << 20  # of one file
OLD_COUNT = 3  # files before it


class _Rotating(RotatingFileHandler):
    def _open(self) -> IO[str]:  # type: ignore[override]
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=opener)


class LogFiles:
    """Writes them. ``size_bytes_max``: of one file, after which the next begins."""

    def __init__(self, home: Path, changed: Callable[[], None], size_bytes_max: int = SIZE_BYTES_MAX) -> None:
        self._home = home
        self._changed = changed
        self._size_bytes_max = size_bytes_max
        self._files: dict[str, _Rotating] = {}

    def line(self, name: str, text: str, level: Level | None = None, clock: str = "") -> None:
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

    def asks(self, name: str, text: str, answer: Callable[[str], None]) -> None:
        """Nobody is here who could answer."""
        self.line(name, text)

    def ended(self, name: str) -> None:
        pass

    def changed(self) -> None:
        self._changed()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


# --- reading them -----------------------------------------------------------------------------------------------------


class Tail:
    """The lines of one service as they come, from the oldest that is kept."""

    def __init__(self, home: Path, name: str) -> None:
        self.name = name
        self._path = home / name / FILE_NAME
        self._file: IO[bytes] | None = None
        self._rest = b""

    def kept(self) -> Iterator[str]:
        """All that there is now; :meth:`more` goes on behind it."""
        for number in range(OLD_COUNT, 0, -1):
            old = self._path.with_name(f"{FILE_NAME}.{number}")
            if old.exists():
                yield from old.read_text("utf-8", "replace").splitlines()
        yield from self.more()

    def more(self) -> Iterator[str]:
        """What has come since, also across the end of a file."""
        while True:
            if self._file is None:
                try:
                    self._file = self._path.open("rb")
                except FileNotFoundError:
                    return
            *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in lines)
            if not self._is_old():
                return
            self._file.close()
            self._file = None

    def _is_old(self) -> bool:
        """Whether it was put aside. What was written before that has been read or is still to be."""
        assert self._file is not None
        try:
            now = self._path.stat()
        except FileNotFoundError:
            return False  # it is being put aside
        here = os.fstat(self._file.fileno())
        return (now.st_dev, now.st_ino) != (here.st_dev, here.st_ino) and self._file.tell() == here.st_size


def in_order(tails: Iterable[Tail], count: int | None = None) -> Iterator[tuple[str, str]]:
    """(name, line) of all that is kept, by time; the last ``count`` of each."""

    def of(tail: Tail) -> Iterator[tuple[str, str, str]]:
        lines = tail.kept()
        for line in lines if count is None else deque(lines, count):
            yield line.partition(" ")[0], tail.name, line

    return ((name, line) for _, name, line in heapq.merge(*(of(tail) for tail in tails), key=lambda one: one[0]))
