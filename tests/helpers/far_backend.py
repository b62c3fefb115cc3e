"""Backend on another machine, in memory: begun appends are done and answered when a test says so."""

from __future__ import annotations

import select
import socket
import threading
from collections import deque

from immortal.coordinator.core.errors import LogUnavailableError, require
from immortal.coordinator.log.backend import Append
from immortal.coordinator.log.backends.memory import MemoryBackend
from immortal.coordinator.log.memory import MemoryLogStore

ANSWER, BROKEN = b".", b"x"


class FarBackend(MemoryBackend):
    """Backend over the tables of ``near``. ``sends``: if False, the connection breaks at the next send."""

    is_remote = True
    appends_max = 3

    def __init__(self, near: MemoryBackend) -> None:
        super().__init__(near.durable, near.label, None)
        self.sends = True
        self.begun: deque[Append] = deque()  # and not answered
        self._done_count = 0  # of these, by the server
        self._answered_count = 0  # of these
        self._is_unknown = False
        self._here, self._there = socket.socketpair()
        self._lock = threading.RLock()  # the writer can be another thread, which reconnects meanwhile

    # --- the server ---------------------------------------------------------------------------------------------------

    def answer(self, count: int) -> None:
        """Do ``count`` more appends, and answer them."""
        with self._lock:
            for _ in range(min(count, len(self.begun) - self._answered_count)):
                if self._done_count == self._answered_count:
                    self.do(1)
                self._answered_count += 1
                self._there.send(ANSWER)

    def do(self, count: int) -> None:
        """Do ``count`` more appends without an answer."""
        with self._lock:
            for append in list(self.begun)[self._done_count : self._done_count + count]:
                super().append(append)
                self._done_count += 1

    def break_off(self) -> None:
        with self._lock:
            self._there.send(BROKEN)

    # --- the writer ---------------------------------------------------------------------------------------------------

    def append(self, append: Append) -> None:
        self._require_known()
        require(not self.begun, "an append between those that were begun")
        super().append(append)

    def begin_append(self, append: Append) -> bool:
        self._require_known()
        with self._lock:
            self.begun.append(append)
        if not self.sends:
            self._is_unknown = True
            raise LogUnavailableError("the connection broke while something was sent")
        return True

    def finish_oldest(self, *, wait: bool) -> bool:
        self._require_known()
        if not select.select([self._here], [], [], None if wait else 0)[0]:
            return False
        if self._here.recv(1) == BROKEN:
            self._is_unknown = True
            raise LogUnavailableError("the connection broke")
        with self._lock:
            self.begun.popleft()
            self._done_count -= 1
            self._answered_count -= 1
        return True

    def poll_target(self) -> tuple[int, int]:
        return self._here.fileno(), select.POLLIN

    def resolve(self) -> int:
        self.raise_failure()
        with self._lock:
            done = self._done_count if self._is_unknown else 0
            self._here.close()
            self._there.close()
            self._here, self._there = socket.socketpair()
            self.begun.clear()
            self._done_count = self._answered_count = 0
            self._is_unknown = False
            self.sends = True
            return done

    def _require_known(self) -> None:
        self.raise_failure()
        if self._is_unknown:
            raise LogUnavailableError("nobody knows what was done")

    def close(self) -> None:
        super().close()
        self._here.close()
        self._there.close()


class FarStore(MemoryLogStore):
    backend: FarBackend

    def __init__(self) -> None:
        super().__init__()
        self.backend = FarBackend(self.backend)
