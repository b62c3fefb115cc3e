"""The app's process of a replay: started, watched, and gone at the end. What it says is kept, within limits."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections import deque
from pathlib import Path

from immortal.coordinator.app.secret import SECRET_FILE_VARIABLE
from immortal.coordinator.service.parent_death import die_with_parent
from immortal.replay.app import NOTES_VARIABLE, AppCommand
from immortal.replay.errors import ReplayError

HEAD_SIZE_BYTES = 64 << 10  # of what the app says: the SDK's warnings come first
TAIL_SIZE_BYTES = 64 << 10  # ... and what it died of last
LEAVE_S = 5.0  # for an app that was said goodbye to
KILL_AFTER_S = 1.0  # between SIGTERM and SIGKILL: it has nothing to lose

_READ_SIZE_BYTES = 64 << 10


class AppProcess:
    """One running app. ``descriptors`` are readable when it has said something (:meth:`take_output`), or has died."""

    def __init__(self, command: AppCommand, address: str, secret_file: Path, code_notes: Path) -> None:
        """``secret_file``: of the secret that the app is to show at ``address``. ``code_notes``: where it notes what it
        runs. Raises ReplayError."""
        files = {SECRET_FILE_VARIABLE: str(secret_file), NOTES_VARIABLE: str(code_notes)}
        argv = [address if part == "{address}" else part for part in command.argv]
        behind = not command.foreground
        captured = behind and not command.shows_output
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL if behind else None,
                stdout=subprocess.PIPE if captured else None,
                stderr=subprocess.STDOUT if captured else None,
                env={**os.environ, **command.environment, **files},
                process_group=0 if behind else None,  # Ctrl-C in a terminal reaches whoever replays alone
                # Nothing but two system calls, so that a lock held by another thread does no harm. The thread that
                # starts the app lives as long as the replay: the kernel's parent is a thread.
                preexec_fn=die_with_parent(os.getpid()),
            )
        except OSError as error:
            raise ReplayError(f"the app {command.name} can't be started: {argv[0]}: {error.strerror}") from None
        self._death = os.pidfd_open(self._process.pid)
        self._output: int | None = None  # None: in the foreground, or at its end
        if self._process.stdout is not None:
            self._output = self._process.stdout.fileno()
            os.set_blocking(self._output, False)
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size_bytes = 0

    @property
    def descriptors(self) -> list[int]:
        return [self._death] if self._output is None else [self._death, self._output]

    @property
    def exit_status(self) -> int | None:
        """As subprocess gives it; None while it runs."""
        return self._process.poll()

    @property
    def head(self) -> str:
        return bytes(self._head).decode("utf-8", "replace")

    @property
    def tail(self) -> str:
        """The end of what it said; all of it if that is short."""
        said = b"".join(self._tail)
        if len(said) < TAIL_SIZE_BYTES:
            said = bytes(self._head[-(TAIL_SIZE_BYTES - len(said)) :]) + said
        return said[-TAIL_SIZE_BYTES:].decode("utf-8", "replace")

    def take_output(self) -> None:
        """Take what it has said since."""
        while self._output is not None:
            try:
                data = os.read(self._output, _READ_SIZE_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._output = None
                return
            room = HEAD_SIZE_BYTES - len(self._head)
            self._head += data[:room]
            if data := data[room:]:
                self._tail.append(data)
                self._tail_size_bytes += len(data)
            while self._tail and self._tail_size_bytes - len(self._tail[0]) >= TAIL_SIZE_BYTES:
                self._tail_size_bytes -= len(self._tail.popleft())

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status; None if it still runs after that time."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """It is gone behind this, whatever it does."""
        if self.exit_status is None:
            self.send(signal.SIGTERM)
            if self.wait(KILL_AFTER_S) is None:
                self.send(signal.SIGKILL)
                self._process.wait()
        self.take_output()
        os.close(self._death)
        if self._process.stdout is not None:
            self._process.stdout.close()


def exit_text(exit_status: int) -> str:
    if exit_status >= 0:
        return f"status {exit_status}"
    try:
        return signal.Signals(-exit_status).name
    except ValueError:
        return f"signal {-exit_status}"
