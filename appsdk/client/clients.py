"""The two clients over one connection: Client for threads, AsyncClient for asyncio."""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from immortal.appsdk.client.connection import Connection
from immortal.appsdk.client.discovery import Finder
from immortal.appsdk.client.errors import CallRaised, CallTimeout, ClientClosed, ClientError
from immortal.appsdk.client.methods import CANCEL, STATUS, Method
from immortal.appsdk.client.session import Call, Question
from immortal.appsdk.client.transport import Transport, timeout_message
from immortal.protocol.process import after_fork_message, disown_in_child, register

C = TypeVar("C", bound=Call)
K = TypeVar("K")


class Client:
    """Client of one instance for threads; open from the moment that it is made. A forked child gets a client of its own
    at its first use. Raises NotConnectable.
    """

    def __init__(self, finder: Finder, client_id: str | None) -> None:
        self._finder = finder
        self._client_id = client_id
        self._closing = False
        self._begin()
        self._open()
        register(self)

    def _begin(self) -> None:
        """Reset to a client of this process without a connection and without calls."""
        self._is_open = False
        self._opening = threading.Lock()
        self._lock = threading.Lock()  # of connection, transport and forks
        self._forks_done = threading.Event()
        self._forks = ForkTracker(self._finder.name, self._forks_done)

    def _open(self) -> None:
        self._own = Connection(self._finder.name, self._client_id, time.monotonic())
        self._transport = Transport(self._own, self._finder)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._process_id = os.getpid()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name=f"client of {self._finder.name}", daemon=True)
        self._thread.start()

    def forked_in_child(self) -> None:
        """Become another client in a forked child: with an ID of its own, and without its parent's calls."""
        disown_in_child(self._own, self._transport, self._forks, self._thread)
        self._begin()

    @property
    def _connection(self) -> Connection:
        """Connection of this process; made at its first use. Raises ClientClosed, NotConnectable."""
        if not self._is_open:
            with self._opening:
                if not self._is_open:
                    self._open_in_child()
        return self._own

    def _open_in_child(self) -> None:
        if self._closing:
            raise ClientClosed(f"the client of {self._finder.name!r} is closed")
        if self._client_id is not None:
            raise self._not_ours(f"the client {self._client_id!r}", "connect here, with a client_id of its own")
        self._open()

    def _not_ours(self, what: str, advice: str) -> ClientClosed:
        return ClientClosed(after_fork_message(f"{what} of {self._finder.name!r}", self._process_id, advice))

    @property
    def client_id(self) -> str:
        return self._client_id or self._connection.client_id

    @property
    def heartbeats(self) -> int:
        return self._connection.heartbeats

    def call(
        self, method: Method, arguments: bytes, timeout_s: float | None, key: str | None, trace_context: str = ""
    ) -> Any:
        """Call the method and return what it returned. Raises what it raised, and ClientError."""
        make = partial(Call, method.method, arguments, trace_context=trace_context)
        return self._made(method, timeout_s, make, self._connection.submit, key)

    def _made(
        self,
        method: Method,
        timeout_s: float | None,
        make: Callable[[Callable[[Call], None]], C],
        submit: Callable[[C, K], None],
        key: K,
    ) -> Any:
        """Submit a call or a status query and wait for its outcome."""
        replied = threading.Lock()
        replied.acquire()
        call = make(lambda call: replied.release())
        with self._lock:
            self._require_open()
            submit(call, key)
        os.eventfd_write(self._wake, 1)
        return self._wait(method, call, replied, timeout_s)

    def query(self, method: Method, arguments: bytes, timeout_s: float | None) -> Any:
        """Ask a query and return its value, beside the log where the instance can do that. Raises as :meth:`call`."""
        replied = threading.Lock()
        replied.acquire()
        call = Call(method.method, arguments, lambda call: replied.release())
        connection = self._connection
        with self._lock:
            self._require_open()
            connection.query(call)
        os.eventfd_write(self._wake, 1)
        return self._wait(method, call, replied, timeout_s, partial(self.query, method, arguments))

    # --- requests that have a handle ---------------------------------------------------------------------------------

    def start(
        self, method: Method, arguments: bytes, timeout_s: float | None, key: str, trace_context: str = ""
    ) -> Any:
        """Submit a call and wait until the instance has it. Raises ClientError."""
        connection = self._connection
        with self._lock:
            self._require_open()
            connection.submit(Call(method.method, arguments, lambda call: None, trace_context), key)
        return self._made(STATUS, timeout_s, partial(Question, True), self._connection.ask, key)

    def status(self, timeout_s: float | None, key: str) -> Any:
        return self._made(STATUS, timeout_s, partial(Question, False), self._connection.ask, key)

    def result(self, method: Method, timeout_s: float | None, key: str) -> Any:
        return self._made(method, timeout_s, partial(Call, method.method, b""), self._connection.attach, key)

    def cancel(self, arguments: bytes, timeout_s: float | None, key: str) -> Any:
        make = partial(Call, CANCEL.method, arguments)
        return self._made(CANCEL, timeout_s, make, self._connection.cancel, key)

    # -----------------------------------------------------------------------------------------------------------------

    def fork(self, method: Method, arguments: bytes, key: str | None, trace_context: str = "") -> None:
        """Send a call without waiting for its reply. Raises ClientClosed."""
        connection = self._connection
        with self._lock:
            self._require_open()
            connection.submit(self._forks.call(method, arguments, trace_context), key)
        os.eventfd_write(self._wake, 1)

    def settle(self, timeout_s: float | None) -> None:
        """Wait until each call that this process forked has a reply. Raises ClientError."""
        self._forks_done.wait(timeout_s)
        with self._lock:
            self._forks.check(timeout_s)

    def _require_open(self) -> None:
        if self._closing:
            raise ClientClosed(f"the client of {self._finder.name!r} is closed")

    def _wait(
        self,
        method: Method,
        call: Call,
        replied: threading.Lock,
        timeout_s: float | None,
        again: Callable[[float | None], Any] | None = None,
    ) -> Any:
        """Wait for the outcome of ``call``. ``again``: the function by which a CallTimeout waits once more; None: this
        one.
        """
        if replied.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            replied.release()  # for who asks again
        else:
            again = again or partial(self._again, self._process_id, method, call, replied)
            self._give_up(method, call, timeout_s, again)
        outcome = call.outcome
        if isinstance(outcome, ClientError):
            raise outcome
        assert outcome is not None
        return method.value(outcome)

    def _again(
        self, process_id: int, method: Method, call: Call, replied: threading.Lock, timeout_s: float | None = None
    ) -> Any:
        """Wait once more, if that is this process's call. Raises ClientError."""
        if process_id != os.getpid():
            raise self._not_ours("a call", "only there its reply comes")
        return self._wait(method, call, replied, timeout_s)

    def _give_up(
        self, method: Method, call: Call, timeout_s: float | None, again: Callable[[float | None], Any]
    ) -> None:
        """Raise CallTimeout, unless the reply comes at the same moment."""
        with self._lock:
            if call.outcome is not None:
                return
            self._connection.withdraw(call)
            text = timeout_message(self._transport, method.name, call, timeout_s or 0.0)
        raise CallTimeout(text, call, again)

    def _run(self) -> None:
        descriptor = self._transport.fileno()
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        poller.register(descriptor, select.POLLIN)
        while True:
            with self._lock:
                if self._closing:
                    return
                if self._transport.process():
                    poller.unregister(descriptor)
                    descriptor = self._transport.fileno()
                    poller.register(descriptor, select.POLLIN)
                    continue  # what it has to tell may have come already
                timeout_s = self._transport.next_deadline_s() - time.monotonic()
            if any(ready == self._wake for ready, _ in poller.poll(max(0.0, timeout_s) * 1000 + 1)):
                os.eventfd_read(self._wake)

    def close(self) -> None:
        """Close the client. Calls that wait end with ClientClosed; the instance may still do what was sent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        if not self._is_open:
            return
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._transport.close()
        os.close(self._wake)
        error = ClientClosed(
            f"the client of {self._connection.instance!r} was closed; a call that was sent may still be done"
        )
        self._connection.close(error)


# The client of asyncio: calls are awaited, as many at a time as there are.


class AsyncClient:
    """Client of one instance for one asyncio loop, the one that runs when it is made. Raises NotConnectable."""

    def __init__(self, finder: Finder, client_id: str | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = Connection(finder.name, client_id, time.monotonic())
        self._transport = Transport(self._connection, finder)
        self._forks_done = asyncio.Event()
        self._forks = ForkTracker(finder.name, self._forks_done)
        self._closed = self._is_parents = False
        self._process_id = os.getpid()
        self._why_closed = f"the client of {finder.name!r} is closed"
        self._descriptor = self._transport.fileno()
        self._loop.add_reader(self._descriptor, self._process)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = 0.0
        self._soon: asyncio.Handle | None = None
        self._process_soon()
        register(self)

    def forked_in_child(self) -> None:
        """Refuse use in a forked child: the loop is its parent's."""
        self._closed = self._is_parents = True
        what, advice = f"the client of {self._connection.instance!r}", "connect anew, in a loop of this one"
        self._why_closed = after_fork_message(what, self._process_id, advice)

    @property
    def client_id(self) -> str:
        return self._connection.client_id

    @property
    def heartbeats(self) -> int:
        return self._connection.heartbeats

    async def call(
        self, method: Method, arguments: bytes, timeout_s: float | None, key: str | None, trace_context: str = ""
    ) -> Any:
        """Call the method and return what it returned. Raises what it raised, and ClientError."""
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
        """Submit a call or a status query and wait for its outcome."""
        replied: asyncio.Future[None] = self._loop.create_future()
        call = make(lambda call: _end(replied))
        self._require_open()
        submit(call, key)
        self._process_soon()  # once for all calls that are made in this turn of the loop
        return await self._wait(method, call, replied, timeout_s)

    async def query(self, method: Method, arguments: bytes, timeout_s: float | None) -> Any:
        """Ask a query and return its value, beside the log where the instance can do that. Raises as :meth:`call`."""
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
        """Submit a call and wait until the instance has it. Raises ClientError."""
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
        """Send a call without waiting for its reply. Raises ClientClosed."""
        self._submit(self._forks.call(method, arguments, trace_context), key)

    async def settle(self, timeout_s: float | None) -> None:
        """Wait until each call that was forked has a reply. Raises ClientError."""
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
        """Wait for the outcome of ``call``. ``again``: the function by which a CallTimeout waits once more; None: this
        one.
        """
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
            text = timeout_message(self._transport, method.name, call, timeout_s or 0.0)
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
        """Close the client. Calls that wait end with ClientClosed; the instance may still do what was sent."""
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


# Calls that nobody waits for: what is still to be heard of them before the client is closed.


class ForkTracker:
    """Forked calls that have no reply yet, and the first error among them. ``all_done`` is called when no reply is
    missing. Used under the lock, or on the loop, of the client.
    """

    def __init__(self, instance: str, all_done: threading.Event | asyncio.Event) -> None:
        self._instance = instance
        self._all_done = all_done
        self._missing_count = 0
        self._error: ClientError | None = None  # the first
        all_done.set()

    def call(self, method: Method, arguments: bytes, trace_context: str = "") -> Call:
        """Make a call whose reply is counted here, for the caller to submit."""
        self._missing_count += 1
        self._all_done.clear()
        return Call(method.method, arguments, lambda call: self._done(method, call), trace_context)

    def _done(self, method: Method, call: Call) -> None:
        self._missing_count -= 1
        if not self._missing_count:
            self._all_done.set()
        try:
            if isinstance(call.outcome, ClientError):
                raise call.outcome
            if call.outcome is not None:
                method.value(call.outcome)
        except CallRaised:
            pass  # it was done, and nobody is told how it ended
        except ClientError as error:
            self._error = self._error or error
        except Exception:  # noqa: S110 (what the handler declares to raise)
            pass

    def check(self, timeout_s: float | None) -> None:
        """Raise ClientError for the first forked call that may not have been done, after a wait of ``timeout_s``."""
        if self._error is not None:
            raise self._error
        if self._missing_count:
            raise ClientClosed(
                f"{self._missing_count} calls that were forked to {self._instance!r} have no reply within "
                f"{timeout_s:g} s: they may have been done or not"
            )
