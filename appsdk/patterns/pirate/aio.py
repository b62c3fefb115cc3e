"""A pool for asyncio: requests are awaited, as many at a time as there are."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from immortal.appsdk.client.errors import ClientClosed
from immortal.appsdk.patterns.pirate.driver import Driver, NoReply, Pending
from immortal.appsdk.patterns.pirate.errors import GaveUp
from immortal.protocol.forks import text_after_fork, watch


class AsyncPool:
    """Made within a running loop, and used in that alone; see :class:`Driver`."""

    def __init__(self, make_driver: Callable[[], Driver]) -> None:
        self._loop = asyncio.get_running_loop()
        self._driver = make_driver()
        self._closed = False
        self._why_closed = ""  # in a child of its process
        self._process_id = os.getpid()
        self._descriptors: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None
        self._process()
        watch(self)

    def forked(self) -> None:
        """In a child: its loop is its parent's, so it can't go on there."""
        self._closed = True
        self._why_closed = text_after_fork("the pool", self._process_id, "connect anew, in a loop of this one")

    @property
    def client_id(self) -> str:
        return self._driver.client_id

    @property
    def servers(self) -> Mapping[str, str]:
        """ "live", "dead" or "removed", by server."""
        return {name: state.value for name, state in self._driver.servers.items()}

    async def ask(self, payload: Any, timeout_s: float | None, *, idempotent: bool = False) -> Any:
        """The reply. Raises what the server says, GaveUp, ClientError."""
        return await self._wait(Pending(payload, lambda: None, idempotent=idempotent), timeout_s)

    async def _wait(self, pending: Pending, timeout_s: float | None) -> Any:
        if self._why_closed:
            raise ClientClosed(self._why_closed)
        replied: asyncio.Future[None] = self._loop.create_future()
        pending.done = lambda: None if replied.done() else replied.set_result(None)
        self._driver.submit(pending, timeout_s)
        if self._soon is None:  # once for all requests that are made in this turn of the loop
            self._soon = self._loop.call_soon(self._process)
        try:
            await replied
        except asyncio.CancelledError:
            self._driver.withdraw(pending)
            raise
        outcome = pending.outcome
        if isinstance(outcome, NoReply):
            raise GaveUp(outcome.reason, pending, outcome.tries, lambda timeout_s: self._wait(pending, timeout_s))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _process(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._closed:
            return
        self._driver.process()
        descriptors = self._driver.filenos()
        for descriptor in self._descriptors - descriptors:
            self._loop.remove_reader(descriptor)
        for descriptor in descriptors - self._descriptors:
            self._loop.add_reader(descriptor, self._process)
            self._soon = self._soon or self._loop.call_soon(self._process)  # what it has to tell may have come already
        self._descriptors = descriptors
        if self._timer is not None:
            self._timer.cancel()
        due_s = self._driver.next_deadline_s()
        self._timer = None
        if due_s < float("inf"):
            self._timer = self._loop.call_later(max(0.001, due_s - time.monotonic()), self._process)

    async def close(self) -> None:
        """Requests that wait end with ClientClosed; what was sent may still be done."""
        if self._closed:
            return
        self._closed = True
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        for handle in (self._timer, self._soon):
            if handle is not None:
                handle.cancel()
        self._driver.close()
