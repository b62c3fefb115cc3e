"""Command at a terminal of its own, as a person runs it: tests type keys, and read the screen until a text is there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.helpers.fork_server import take_terminal

DEADLINE_S = 20.0
CTRL_C, CTRL_Z = "\x03", "\x1a"


class AtTerminal:
    """Process ``argv`` as the leader of a session whose terminal is ours. Line ends of ``screen`` are ``\\n``."""

    def __init__(self, argv: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self._ours, theirs = os.openpty()
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
        self.process = subprocess.Popen(
            list(argv),
            cwd=folder,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=take_terminal,
            env={**inherited, "TERM": "xterm", "PYTHONUNBUFFERED": "", **(environment or {})},
        )
        self.terminal = theirs  # kept open, so that the last output stays readable
        self.screen = ""
        self._looked = 0

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def see(self, text: str) -> str:
        """Return the output since the last call, up to and with ``text``."""
        deadline_s = time.monotonic() + DEADLINE_S
        while (found := self.screen.find(text, self._looked)) < 0:
            rest_s = deadline_s - time.monotonic()
            assert rest_s > 0, f"no {text!r} came:\n{self.screen}"
            if self._take(min(rest_s, 0.2)):
                continue
            assert self.process.poll() is None or self._take(0), f"it ended without {text!r}:\n{self.screen}"
        seen = self.screen[self._looked : found + len(text)]
        self._looked = found + len(text)
        return seen

    def _take(self, timeout_s: float) -> bool:
        if not select.select([self._ours], [], [], timeout_s)[0]:
            return False
        self.screen += os.read(self._ours, 1 << 16).decode("utf-8", "replace").replace("\r\n", "\n")
        return True

    def ended(self) -> int:
        """Wait until the process has ended by itself; return its exit status. ``screen`` then has all output."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline_s, f"it does not end:\n{self.screen}"
            self._take(0.05)
        while self._take(0):
            pass
        return self.process.returncode

    def insist(self, keys: str) -> int:
        """Type ``keys`` until the process has ended; return its exit status."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline_s, f"it does not end:\n{self.screen}"
            self.type(keys)
            self._take(0.2)
        return self.ended()

    def echoes(self) -> bool:
        """Return True if the terminal shows typed keys, as a shell needs it afterwards."""
        return bool(termios.tcgetattr(self.terminal)[3] & termios.ECHO)

    def close(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
        os.close(self.terminal)
