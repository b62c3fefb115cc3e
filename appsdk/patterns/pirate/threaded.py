"""A pool for plain code: requests wait for their replies, in any thread; a thread of its own takes what comes."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from immortal.appsdk.client.errors import ClientClosed
from immortal.appsdk.patterns.pirate.driver import Driver, NoReply, Pending
from immortal.appsdk.patterns.pirate.errors import GaveUp
from immortal.protocol.forks import leave_to_parent, text_after_fork, watch


class ThreadedPool:
    """Open from the moment that it is made, and in a child of its process from its first use; see :class:`Driver`."""

    def __init__(self, make_driver: Callable[[], Driver]) -> None:
        self._make_driver = make_driver
        self._closing = False
        self._begin()
        self._open()
        watch(self)

    def _begin(self) -> None:
        self._is_open = False
        self._opening = threading.Lock()
        self._lock = threading.Lock()  # of the driver

    def _open(self) -> None:
        self._own = self._make_driver()
        self._sleeps_until_s = 0.0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._process_id = os.getpid()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="pool of servers", daemon=True)
        self._thread.start()

    def forked(self) -> None:
        """In a child: it is another client there, with an ID of its own."""
        leave_to_parent(self._own, self._thread)
        self._begin()

    @property
    def _driver(self) -> Driver:
        """This process's own. Raises ClientClosed, NotConnectable."""
        if not self._is_open:
            with self._opening:
                if not self._is_open:
                    if self._closing:
                        raise ClientClosed("the pool is closed")
                    self._open()
        return self._own

    @property
    def client_id(self) -> str:
        return self._driver.client_id

    @property
    def servers(self) -> Mapping[str, str]:
        """ "live", "dead" or "removed", by server."""
        driver = self._driver
        with self._lock:
            return {name: state.value for name, state in driver.servers.items()}

    def ask(self, payload: Any, timeout_s: float | None, *, idempotent: bool = False) -> Any:
        """The reply. Raises what the server says, GaveUp, ClientError."""
        return self._wait(Pending(payload, _ignore, idempotent=idempotent), timeout_s)

    def _wait(self, pending: Pending, timeout_s: float | None) -> Any:
        replied = threading.Lock()
        replied.acquire()
        pending.done = replied.release
        driver = self._driver
        with self._lock:
            driver.submit(pending, timeout_s)
            driver.process()  # it is on its way before another thread has to run
            if driver.next_deadline_s() < self._sleeps_until_s:
                os.eventfd_write(self._wake, 1)
        try:
            replied.acquire()
        except BaseException:  # an interrupt
            with self._lock:
                driver.withdraw(pending)
            raise
        outcome = pending.outcome
        if isinstance(outcome, NoReply):
            again = partial(self._again, self._process_id, pending)
            raise GaveUp(outcome.reason, pending, outcome.tries, again)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _again(self, process_id: int, pending: Pending, timeout_s: float | None) -> Any:
        """Wait once more, if that is this process's request. Raises as :meth:`ask`."""
        if process_id != os.getpid():
            raise ClientClosed(text_after_fork("a request to a pool", process_id, "only there its reply comes"))
        return self._wait(pending, timeout_s)

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
        if not self._is_open:
            return
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)


def _ignore() -> None:
    """Until somebody waits."""
