"""Queries of the page: a process each, a few at a time, ended when it takes too long."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

import msgspec

from immortal.coordinator.web.errors import WebError
from immortal.coordinator.web.sql_job import Found, Order
from immortal.protocol import decoding

AT_ONCE_MAX = 2  # each may replay several services
ANSWER_S = 120.0  # the first query of a large log writes its columns
SAID_CHARACTERS_MAX = 2000  # of the last words of a process that gave no answer


class _Answer(msgspec.Struct):
    found: Found | None = None
    error: str = ""


class SqlRuns:
    """For all threads."""

    def __init__(self) -> None:
        self._room = threading.Semaphore(AT_ONCE_MAX)
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()

    def run(self, order: Order) -> Found:
        """Raises WebError."""
        if not self._room.acquire(blocking=False):
            raise WebError(f"{AT_ONCE_MAX} queries run already: try again when one of them is done", 409)
        try:
            answer = self._ask(order)
        finally:
            self._room.release()
        if answer.found is None:
            raise WebError(answer.error, 422)
        return answer.found

    def close(self) -> None:
        with self._lock:
            for process in self._running:
                _end(process)

    def _ask(self, order: Order) -> _Answer:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "immortal.coordinator.web.sql_job"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")},
            start_new_session=True,  # ended with the replays that it has started
        )
        with self._lock:
            self._running.add(process)
        try:
            said, complaints = process.communicate(msgspec.json.encode(order), timeout=ANSWER_S)
            return decoding.decode_json(said, type=_Answer)
        except subprocess.TimeoutExpired:
            return _Answer(error=f"it took longer than {ANSWER_S:.0f} s, and was ended: 'immortal sql' waits longer")
        except decoding.DecodeError:
            last = complaints.decode("utf-8", "replace")[-SAID_CHARACTERS_MAX:].strip()
            return _Answer(error=f"its process ended with status {process.returncode}\n{last}".strip())
        finally:
            with self._lock:
                self._running.discard(process)
            _end(process)
            process.communicate()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
