"""A pool for plain code: requests wait for their replies, in any thread; a thread of its own takes what comes."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from appsdk.patterns.pirate.driver import Driver, NoReply, Pending
from appsdk.patterns.pirate.errors import GaveUp


class ThreadedPool:
    """Open from the moment that it is made; see :class:`Driver`."""

    def __init__(self, make_driver: Callable[[], Driver]) -> None:
        self._driver = make_driver()
        self._lock = threading.Lock()  # of the driver
        self._closing = False
        self._sleeps_until_s = 0.0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="pool of servers", daemon=True)
        self._thread.start()

    @property
    def client_id(self) -> str:
        return self._driver.client_id

    @property
    def servers(self) -> Mapping[str, str]:
        """ "live", "dead" or "removed", by server."""
        with self._lock:
            return {name: state.value for name, state in self._driver.servers.items()}

    def ask(self, payload: Any, timeout_s: float | None, *, idempotent: bool = False) -> Any:
        """The reply. Raises what the server says, GaveUp, ClientError."""
        return self._wait(Pending(payload, _ignore, idempotent=idempotent), timeout_s)

    def _wait(self, pending: Pending, timeout_s: float | None) -> Any:
        replied = threading.Lock()
        replied.acquire()
        pending.done = replied.release
        with self._lock:
            self._driver.submit(pending, timeout_s)
            self._driver.process()  # it is on its way before another thread has to run
            if self._driver.next_deadline_s() < self._sleeps_until_s:
                os.eventfd_write(self._wake, 1)
        try:
            replied.acquire()
        except BaseException:  # an interrupt
            with self._lock:
                self._driver.withdraw(pending)
            raise
        outcome = pending.outcome
        if isinstance(outcome, NoReply):
            raise GaveUp(outcome.reason, pending, outcome.tries, lambda timeout_s: self._wait(pending, timeout_s))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _run(self) -> None:
        try:
            self._take_turns()
        finally:
            with self._lock:
                self._driver.close()  # nobody waits for what does not come any more, whatever has happened here

    def _take_turns(self) -> None:
        while True:
            with self._lock:
                if self._closing:
                    return
                self._driver.process()
                poller = select.poll()
                poller.register(self._wake, select.POLLIN)
                for descriptor in self._driver.filenos():
                    poller.register(descriptor, select.POLLIN)
                self._sleeps_until_s = self._driver.next_deadline_s()
            wait_s = min(max(0.0, self._sleeps_until_s - time.monotonic()), threading.TIMEOUT_MAX / 1000)
            if any(ready == self._wake for ready, _ in poller.poll(wait_s * 1000 + 1)):
                os.eventfd_read(self._wake)

    def close(self) -> None:
        """Requests that wait end with ClientClosed; what was sent may still be done."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)


def _ignore() -> None:
    """Until somebody waits."""
