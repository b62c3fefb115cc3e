"""What both forms of lines share: which notices are lines, and that a line that can't be written stops nobody."""

from __future__ import annotations

import contextlib
import threading
from typing import TextIO

from immortal.coordinator.core.notices import Level, Notice

LOG_LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error")


class Lines:
    """A sink: one line of ``stream`` for each notice of ``level`` or above. Threads may share it."""

    def __init__(self, instance: str, stream: TextIO, level: Level) -> None:
        self.instance = instance
        self._stream = stream
        self._levels = frozenset(LOG_LEVELS[LOG_LEVELS.index(level) :])
        self._lock = threading.Lock()

    def take(self, notice: Notice) -> None:
        if notice.level in self._levels:
            line = self.line(notice)
            with self._lock, contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                self._stream.write(f"{line}\n")
                self._stream.flush()

    def line(self, notice: Notice) -> str:
        """``notice`` as one line, without its end; what is printable is in one."""
        raise NotImplementedError
