"""The client of asyncio: calls are awaited, as many at a time as there are."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from immortal.appsdk.client.connection import Connection
from immortal.appsdk.client.errors import CallTimeout, ClientClosed, ClientError
from immortal.appsdk.client.forks import Forks
from immortal.appsdk.client.handles import CANCEL, STATUS
from immortal.appsdk.client.lane import Call, Question
from immortal.appsdk.client.places import Finder
from immortal.appsdk.client.results import Method
from immortal.appsdk.client.transport import Transport
from immortal.appsdk.client.words import timeout_text
from immortal.protocol.forks import text_after_fork, watch

C = TypeVar("C", bound=Call)
K = TypeVar("K")


class AsyncClient:
    """Made within a running loop, and used in that alone. Raises NotConnectable."""

    def __init__(self, finder: Finder, client_id: str | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = Connection(finder.name, client_id, time.monotonic())
        self._transport = Transport(self._connection, finder)
        self._forks_done = asyncio.Event()
        self._forks = Forks(finder.name, self._forks_done)
        self._closed = self._is_parents = False
        self._process_id = os.getpid()
        self._why_closed = f"the client of {finder.name!r} is closed"
        self._descriptor = self._transport.fileno()
        self._loop.add_reader(self._descriptor, self._process)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = 0.0
        self._soon: asyncio.Handle | None = None
        self._process_soon()
        watch(self)

    def forked(self) -> None:
        """In a child: its loop is its parent's, so it can't go on there."""
        self._closed = self._is_parents = True
        what, advice = f"the client of {self._connection.instance!r}", "connect anew, in a loop of this one"
        self._why_closed = text_after_fork(what, self._process_id, advice)

    @property
    def client_id(self) -> str:
        return self._connection.client_id

    @property
    def heartbeats(self) -> int:
        return self._connection.heartbeats

    async def call(
        self, method: Method, arguments: bytes, timeout_s: float | None, key: str | None, trace_context: str = ""
    ) -> Any:
        """What the method returned. Raises what it raised, and ClientError."""
        make = partial(Call, method.method, arguments, trace_context=trace_context)
        return await self._made(method, timeout_s, make, self._connection.submit, key)

    async def _made(
        self,
        method: Method,
        timeout_s: float | None,
        make: Callable[[Callable[[Call], None]], C],
        submit: Callable[[C, K], None],
        key: K,
    ) -> Any:
        """What becomes of a call, or of a question."""
        replied: asyncio.Future[None] = self._loop.create_future()
        call = make(lambda call: _end(replied))
        self._require_open()
        submit(call, key)
        self._process_soon()  # once for all calls that are made in this turn of the loop
        return await self._wait(method, call, replied, timeout_s)

    async def query(self, method: Method, arguments: bytes, timeout_s: float | None) -> Any:
        """What the query returned, which is not logged where the instance can do that. Raises as :meth:`call`."""
        replied: asyncio.Future[None] = self._loop.create_future()
        call = Call(method.method, arguments, lambda call: _end(replied))
        self._require_open()
        self._connection.query(call)
        self._process_soon()
        return await self._wait(method, call, replied, timeout_s, partial(self.query, method, arguments))

    # --- requests that have a handle ---------------------------------------------------------------------------------

    async def start(
        self, method: Method, arguments: bytes, timeout_s: float | None, key: str, trace_context: str = ""
    ) -> Any:
        """Until the instance has it. Raises ClientError."""
        self._submit(Call(method.method, arguments, lambda call: None, trace_context), key)
        return await self._made(STATUS, timeout_s, partial(Question, True), self._connection.ask, key)

    async def status(self, timeout_s: float | None, key: str) -> Any:
        return await self._made(STATUS, timeout_s, partial(Question, False), self._connection.ask, key)

    async def result(self, method: Method, timeout_s: float | None, key: str) -> Any:
        make = partial(Call, method.method, b"")
        return await self._made(method, timeout_s, make, self._connection.attach, key)

    async def cancel(self, arguments: bytes, timeout_s: float | None, key: str) -> Any:
        make = partial(Call, CANCEL.method, arguments)
        return await self._made(CANCEL, timeout_s, make, self._connection.cancel, key)

    # -----------------------------------------------------------------------------------------------------------------

    def fork(self, method: Method, arguments: bytes, key: str | None, trace_context: str = "") -> None:
        """The call is on its way. Raises ClientClosed."""
        self._submit(self._forks.call(method, arguments, trace_context), key)

    async def settle(self, timeout_s: float | None) -> None:
        """Until there are replies to all that was forked. Raises ClientError."""
        if self._is_parents:
            self._require_open()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._forks_done.wait(), timeout_s)
        self._forks.check(timeout_s)

    def _submit(self, call: Call, key: str | None) -> None:
        self._require_open()
        self._connection.submit(call, key)
        self._process_soon()

    def _require_open(self) -> None:
        if self._closed:
            raise ClientClosed(self._why_closed)

    async def _wait(
        self,
        method: Method,
        call: Call,
        replied: asyncio.Future[None],
        timeout_s: float | None,
        again: Callable[[float | None], Any] | None = None,
    ) -> Any:
        """``again``: what waits for the same once more; None: as this does."""
        if not replied.done():
            timer = None if timeout_s is None else self._loop.call_later(timeout_s, _end, replied)
            try:
                await replied
            except asyncio.CancelledError:
                self._connection.withdraw(call)
                raise
            finally:
                if timer is not None:
                    timer.cancel()
        outcome = call.outcome
        if outcome is None:
            self._connection.withdraw(call)
            text = timeout_text(self._transport, method.name, call, timeout_s or 0.0)
            raise CallTimeout(text, call, again or partial(self._again, method, call))
        if isinstance(outcome, ClientError):
            raise outcome
        return method.value(outcome)

    async def _again(self, method: Method, call: Call, timeout_s: float | None) -> Any:
        replied: asyncio.Future[None] = self._loop.create_future()
        if call.outcome is None:
            call.done = lambda call: _end(replied)
        else:
            replied.set_result(None)
        return await self._wait(method, call, replied, timeout_s)

    def _process_soon(self) -> None:
        if self._soon is None:
            self._soon = self._loop.call_soon(self._process)

    def _process(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._closed:
            return
        if self._transport.process():
            self._loop.remove_reader(self._descriptor)
            self._descriptor = self._transport.fileno()
            self._loop.add_reader(self._descriptor, self._process)
            self._process_soon()  # what it has to tell may have come already
        due_s = self._transport.next_deadline_s()
        if self._timer is None or due_s < self._timer_due_s or self._timer_due_s <= time.monotonic():
            if self._timer is not None:
                self._timer.cancel()
            self._timer_due_s = due_s
            self._timer = self._loop.call_later(max(0.001, due_s - time.monotonic()), self._process)

    async def close(self) -> None:
        """Calls that wait end with ClientClosed; what was sent may still be done."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        for handle in (self._timer, self._soon):
            if handle is not None:
                handle.cancel()
        self._transport.close()
        self._connection.close(
            ClientClosed(
                f"the client of {self._connection.instance!r} was closed; a call that was sent may still be done"
            )
        )


def _end(replied: asyncio.Future[None]) -> None:
    if not replied.done():
        replied.set_result(None)
