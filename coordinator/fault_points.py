"""Fault points: named places at which a test kills, stops or delays a process. Without a test they do nothing.

IMMORTAL_FAULT_POINTS, read once at import, names a file. If that file says "2 kill after commit", the process that
reaches the point for the second time removes the file, so that its successor is spared, and kills itself with SIGKILL.
Actions: kill; stop (SIGSTOP, until somebody sends SIGCONT); delay=SECONDS.
"""

from __future__ import annotations

import enum
import os
import signal
import threading
import time
from pathlib import Path

VARIABLE = "IMMORTAL_FAULT_POINTS"


class FaultPoint(enum.Enum):
    """Names of all fault points. "before" and "after" a commit: before its transaction begins, and after its sync."""

    BEFORE_COMMIT = "before commit"
    DURING_COMMIT = "during commit"  # all rows are put, LMDB's own commit has not begun
    AFTER_COMMIT = "after commit"  # durable, and not answered yet
    BEFORE_EPOCH = "before epoch"
    AFTER_EPOCH = "after epoch"
    AFTER_CHUNK = "after chunk"
    BEFORE_HEADER = "before header"  # all chunks of a checkpoint are durable
    AFTER_HEADER = "after header"
    BEFORE_VERSION = "before version"
    AFTER_VERSION = "after version"  # an upgrade is durable, its request not yet forgotten
    BEFORE_RESET = "before reset"
    AFTER_RESET = "after reset"
    BEFORE_SPILL = "before spill"
    AFTER_SPILL = "after spill"  # the spilled messages are durable
    SPILL_READ = "spill read"  # on its way back to memory
    DURING_SPILL_TRIM = "during spill trim"  # the removal is put, and not committed
    AFTER_SPILL_TRIM = "after spill trim"
    DURING_TRIM = "during trim"
    AFTER_TRIM = "after trim"
    LOG_CREATED = "log created"  # its identity is durable, its folder's name perhaps not
    LOG_LOADED = "log loaded"
    CHECKPOINT_READ = "checkpoint read"
    RECORDS_READ = "records read"  # on their way to the app, at a recovery or because it lagged behind
    BEFORE_SEND = "before send"  # of a frame to a peer
    BEFORE_ANSWER = "before answer"  # to a peer: TrimTo, Welcome, Resend
    FRAME_RECEIVED = "frame received"
    CONTROL = "control"  # a question of an operator
    ANNOUNCED = "announced"
    STOPPING = "stopping"
    BEFORE_REPLACE = "before replace"  # of a file of the registry
    AFTER_REPLACE = "after replace"


class _Plan:
    """Plan for one fault, in a file; counts how often its point was reached since the file was written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._version: tuple[int, int] | None = None
        self._reached = 0

    def reach(self, point: FaultPoint) -> None:
        try:
            status = self._path.stat()
            count, action, name = self._path.read_text().split(maxsplit=2)
        except FileNotFoundError:
            return
        if name.strip() != point.value:
            return
        with self._lock:
            version = (status.st_ino, status.st_mtime_ns)
            if version != self._version:
                self._version, self._reached = version, 0
            self._reached += 1
            if self._reached != int(count):
                return
            try:
                self._path.unlink()
            except FileNotFoundError:
                return  # another process of the instance was there first
        _act(action)


def _act(action: str) -> None:
    verb, _, argument = action.partition("=")
    if verb == "delay":
        time.sleep(float(argument))
    elif verb in ("kill", "stop"):
        # Sent to this thread: a signal to the whole process stops this thread only once it is scheduled.
        signal.pthread_kill(threading.get_ident(), signal.SIGKILL if verb == "kill" else signal.SIGSTOP)
    else:
        raise ValueError(f"{action!r} is no action of a fault point: kill, stop or delay=SECONDS is expected")


def _nothing(point: FaultPoint) -> None:
    """Do nothing: the default if no test plants a fault."""


_PATH = os.environ.get(VARIABLE)
armed = bool(_PATH)  # frequent code checks only this
reach = _Plan(Path(_PATH)).reach if _PATH else _nothing
