"""Shells around a state machine with sockets: ThreadShell for callers in threads, LoopShell for callers on asyncio.

Clients, pools of servers and copies of tables are such machines, which know neither threads nor loops. A shell waits
for their sockets and deadlines, and lets callers wait for the end of their requests.
"""

from __future__ import annotations

import _thread
import asyncio
import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import zmq

from immortal.appsdk.client.errors import ClientClosed, ClientError
from immortal.protocol.process import after_fork_message, disown_in_child, register


def require_process(process_id: int, name: str, advice: str) -> None:
    """Check that this is the process that created ``name``. Raises ClientClosed in a forked child."""
    if process_id != os.getpid():
        raise ClientClosed(after_fork_message(name, process_id, advice))


class OwnId:
    """Client ID that the user has given: only one process can use it. None: each process makes its own."""

    def __init__(self, given: str | None, instance: str) -> None:
        self.given = given
        self._instance = instance
        self._process_id = 0  # that uses the ID

    def claim(self) -> str | None:
        """Return the ID for this process. Raises ClientClosed if another process uses it."""
        if self.given is not None:
            self._process_id = self._process_id or os.getpid()
            name, advice = f"the client {self.given!r} of {self._instance}", "connect here, with a client_id of its own"
            require_process(self._process_id, name, advice)
        return self.given


class Machine(Protocol):
    """State machine with sockets. Only one thread uses it at a time."""

    def process(self) -> Any:
        """Receive all input, and do what is due."""

    def sockets(self) -> Iterable[zmq.Socket[bytes]]:
        """Return the sockets to wait for. They signal once: :meth:`process` takes all input, and can open others."""

    def next_deadline_s(self) -> float:
        """Return the monotonic time at which :meth:`process` must be called, even without input."""

    def close(self) -> None:
        """Close the sockets, and end all waiting requests."""


M = TypeVar("M", bound=Machine)
N = TypeVar("N", contravariant=True)


class Request(Protocol[N]):
    """Request of one caller to a machine. ``wait_timeout_s``: how long the shell waits for its end; None: no limit.

    All methods but ``value`` are called while nobody else uses the machine.
    """

    @property
    def wait_timeout_s(self) -> float | None: ...

    def start(self, machine: N, done: Callable[[], None]) -> None:
        """Give the request to the machine, which calls ``done`` at its end, possibly at once. Raises ClientError."""

    def withdraw(self, machine: N) -> None:
        """Forget the request: its caller was interrupted."""

    def expire(self, machine: N) -> None:
        """Forget the request after ``wait_timeout_s``, unless it is over."""

    def value(self, execute: Callable[[Request[N]], Any]) -> Any:
        """Return the result. ``execute``: makes another request to this machine. Raises the request's error."""


_SLEEP_S_MAX = 3600.0  # poll() does not accept an infinite time


class WatchedSockets:
    """Set of watched ZeroMQ sockets. ``unwatch`` and ``watch`` end and begin the watch of a file descriptor."""

    def __init__(self, unwatch: Callable[[int], object], watch: Callable[[int], object]) -> None:
        self._unwatch = unwatch
        self._watch = watch
        self._descriptors: dict[zmq.Socket[bytes], int] = {}

    def update(self, sockets: Iterable[zmq.Socket[bytes]]) -> bool:
        """Watch these sockets and no others; return True if one is new, as it can have input already."""
        now = list(sockets)
        for gone in self._descriptors.keys() - now:
            self._unwatch(self._descriptors.pop(gone))
        new = [socket for socket in now if socket not in self._descriptors]
        for socket in new:
            # The number alone does not identify a socket: that of a closed one is used again.
            self._descriptors[socket] = descriptor = int(socket.getsockopt(zmq.FD))
            self._watch(descriptor)
        return bool(new)


class _MachineLock(_thread.RLock):  # type: ignore[misc]  # in C, so that a signal can't come between its steps
    """Lock of a machine. A thread that has it already is told so at once, and does not wait for itself for ever."""

    def __enter__(self) -> bool:  # type: ignore[override]
        if self._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            raise ClientError(
                "a signal handler or a __del__ has interrupted a call in this thread, which must end first: let a "
                "signal handler set a flag or begin a thread, and let __del__ call nobody"
            )
        return super().__enter__()


class ThreadShell(Generic[M]):
    """Shell for any threads; its own thread takes input. A forked child gets its own machine at its first use.

    ``create_machine``: creates a machine for this process. ``name``: names this object in messages.
    ``sends_at_once``: the asking thread also sends; otherwise requests of several threads are sent together.
    """

    def __init__(self, create_machine: Callable[[], M], name: str, *, sends_at_once: bool = False) -> None:
        self._create_machine = create_machine
        self._name = name
        self._sends_at_once = sends_at_once
        self.closing = False
        self._reset()
        self._open()
        register(self)

    def _reset(self) -> None:
        """Reset to a shell of this process without a machine."""
        self.is_open = False
        self.error: BaseException | None = None  # that ended the machine
        self._opening = threading.Lock()
        self.lock = _MachineLock()
        self.processed = threading.Condition(self.lock)  # notified after each processing, and at the close
        self._wake_descriptor = -1

    def _open(self) -> None:
        self._machine = self._create_machine()
        self._sleeps_until_s = 0.0
        self._wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.is_open = True
        self._thread = threading.Thread(target=self._run, args=(self._wake_descriptor,), name=self._name, daemon=True)
        self._thread.start()

    def forked_in_child(self) -> None:
        """Leave the machine, with all its requests, to the parent."""
        disown_in_child(self._machine, self._thread)
        self._reset()

    @property
    def machine(self) -> M:
        """Machine of this process, made at its first use. Raises ClientClosed, and what the creation raises."""
        if not self.is_open:
            with self._opening:
                if not self.is_open:
                    if self.closing:
                        raise ClientClosed(f"{self._name} is closed")
                    self._open()
        return self._machine

    def wake(self) -> None:
        """Wake the shell's thread, so that the machine processes new requests."""
        if (wake := self._wake_descriptor) >= 0:
            os.eventfd_write(wake, 1)

    def post(self, act: Callable[[M], None]) -> None:
        """Call ``act`` with the machine, which then processes the changes. Raises what ``act`` raises."""
        machine = self.machine
        with self.lock:
            act(machine)
        self.wake()

    def execute(self, request: Request[M]) -> Any:
        """Make a request and return its result. Raises the request's error."""
        machine = self.machine
        replied = threading.Lock()
        replied.acquire()
        has_begun = False
        try:
            with self.lock:
                request.start(machine, replied.release)
                has_begun = True
                if self._sends_at_once:
                    machine.process()
                rouses = not self._sends_at_once or machine.next_deadline_s() < self._sleeps_until_s
            if rouses:
                self.wake()
            came = replied.acquire(timeout=-1 if request.wait_timeout_s is None else max(0.0, request.wait_timeout_s))
        except BaseException:  # an interrupt
            if has_begun:
                with self.lock:
                    request.withdraw(machine)
            raise
        if not came:
            with self.lock:
                request.expire(machine)
        return request.value(self.execute)

    def _run(self, wake: int) -> None:
        try:
            self._process_until_closed(wake)
        except BaseException as error:
            self.error = error
            raise
        finally:
            with self.lock:
                self.closing = True
                self._machine.close()  # nobody must wait for ever, whatever has happened here
                self.processed.notify_all()

    def _process_until_closed(self, wake: int) -> None:
        poller = select.poll()
        poller.register(wake, select.POLLIN)
        known = WatchedSockets(poller.unregister, lambda descriptor: poller.register(descriptor, select.POLLIN))
        while True:
            with self.lock:
                if self.closing:
                    return
                self._machine.process()
                self.processed.notify_all()
                is_new = known.update(self._machine.sockets())
                self._sleeps_until_s = self._machine.next_deadline_s()
            wait_s = min(max(0.0, self._sleeps_until_s - time.monotonic()), _SLEEP_S_MAX)
            if any(ready == wake for ready, _ in poller.poll(0 if is_new else wait_s * 1000 + 1)):
                os.eventfd_read(wake)

    def close(self) -> None:
        """Close the machine. Waiting requests end with ClientClosed."""
        with self.lock:
            self.closing = True
            wake, self._wake_descriptor = self._wake_descriptor, -1
        if wake >= 0:  # it is open, and no other thread closes it
            os.eventfd_write(wake, 1)
            self._thread.join()
            os.close(wake)


# A strong reference: Python's garbage collection of sockets along with their ZeroMQ context can wait for ever.
_unclosed: set[LoopShell[Any]] = set()


class LoopShell(Generic[M]):
    """Shell for the asyncio loop that runs at its creation. A forked child can't use it.

    ``create_machine``: creates the machine. ``name``: names this object in messages.
    """

    is_open = True  # its machine exists
    lock = nullcontext()  # no other thread is on the loop

    def __init__(self, create_machine: Callable[[], M], name: str) -> None:
        self._loop = asyncio.get_running_loop()
        for left in [shell for shell in _unclosed if shell._loop.is_closed()]:
            with suppress(RuntimeError):  # of its loop
                left._close()
        self.machine = create_machine()
        self._name = name
        self._closed = False
        self._refusal = ""  # in a child
        self._process_id = os.getpid()
        self._watched = WatchedSockets(
            self._loop.remove_reader, lambda descriptor: self._loop.add_reader(descriptor, self._process)
        )
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = 0.0
        self._scheduled: asyncio.Handle | None = None
        self._process()
        register(self)
        _unclosed.add(self)

    def forked_in_child(self) -> None:
        """Refuse use in a child: the loop belongs to its parent."""
        self._closed = True
        self._refusal = after_fork_message(self._name, self._process_id, "connect anew, in a loop of this one")

    def wake(self) -> None:
        """Let the machine process new requests: once for all requests of this turn of the loop."""
        if self._scheduled is None:
            self._scheduled = self._loop.call_soon(self._process)

    def post(self, act: Callable[[M], None]) -> None:
        """Call ``act`` with the machine, which then processes the changes. Raises what ``act`` raises, ClientClosed."""
        if self._refusal or asyncio._get_running_loop() is not self._loop:
            elsewhere = f"{self._name} belongs to the asyncio loop that ran where it was made: connect in this one, too"
            raise ClientClosed(self._refusal or elsewhere)
        act(self.machine)
        self.wake()

    async def execute(self, request: Request[M]) -> Any:
        """Make a request and return its result. Raises the request's error."""
        replied: asyncio.Future[None] = self._loop.create_future()
        self.post(lambda machine: request.start(machine, partial(_end, replied)))
        if not replied.done():
            wait_timeout_s = request.wait_timeout_s
            timer = None if wait_timeout_s is None else self._loop.call_later(wait_timeout_s, _end, replied)
            try:
                await replied
            except BaseException:  # cancelled
                request.withdraw(self.machine)
                raise
            finally:
                if timer is not None:
                    timer.cancel()
        request.expire(self.machine)
        return request.value(self.execute)

    def _process(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        if self._closed:
            return
        try:
            self.machine.process()
            is_new = self._watched.update(self.machine.sockets())
            due_s = self.machine.next_deadline_s()
        except BaseException:
            self._close()  # nobody must wait for ever
            raise
        if is_new:
            self.wake()
        now_s = time.monotonic()
        if self._timer is None or not now_s < self._timer_due_s <= due_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_due_s = min(due_s, now_s + _SLEEP_S_MAX)
            self._timer = self._loop.call_later(max(0.001, self._timer_due_s - now_s), self._process)

    async def close(self) -> None:
        """Close the machine. Waiting requests end with ClientClosed."""
        self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self._loop.is_closed():
            self._watched.update(())
        for handle in (self._timer, self._scheduled):
            if handle is not None:
                handle.cancel()
        self.machine.close()
        _unclosed.discard(self)


def _end(replied: asyncio.Future[None]) -> None:
    if not replied.done():
        replied.set_result(None)
