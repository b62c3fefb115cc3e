"""Drivers of a pool over its links: Driver without a loop, ThreadedPool and AsyncPool on top of it."""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Any

from immortal.appsdk.client.errors import ClientClosed, ClientError, NotConnectable
from immortal.appsdk.patterns.pirate.frames import GaveUp, TooManyRequests
from immortal.appsdk.patterns.pirate.limits import GIVEN_UP_MAX, OPEN_REQUESTS_MAX, REGISTRY_POLL_S
from immortal.appsdk.patterns.pirate.links import Event, Heard, Link, Lost, Reached, Replied, ServerBusy
from immortal.appsdk.patterns.pirate.pool import AttemptHistory, GiveUp, Ping, Policy, Pool, Send, State, Why
from immortal.protocol.process import after_fork_message, disown_in_child, register

Connect = Callable[[str], Link]
Look = Callable[[], Iterable[str]]


@dataclass(frozen=True, slots=True)
class NoReply:
    """Outcome of a request that was given up: the reason, and the number of tries by server."""

    reason: str
    tries: dict[str, int]


class Pending:
    """Request of a caller. Once it is over, ``outcome`` is set, and ``done`` called: a reply, an exception to raise, or
    NoReply.
    """

    __slots__ = ("client_id", "done", "idempotent", "number", "outcome", "payload", "timeout_s", "trail")

    def __init__(self, payload: Any, done: Callable[[], None], *, idempotent: bool = False) -> None:
        self.payload = payload
        self.done = done
        self.idempotent = idempotent
        self.client_id = ""
        self.number = 0
        self.outcome: Any = None
        self.timeout_s: float | None = None
        self.trail = AttemptHistory()

    @property
    def sent(self) -> bool:
        """Tell, of a request that was given up, whether a server may have it."""
        return bool(self.trail.asked)

    def finish(self, outcome: Any) -> None:
        self.outcome = outcome
        self.done()


class Driver:
    """Driver of a pool over its links. Used by one thread at a time. Raises NotConnectable as it is made.

    ``look`` says which servers there are; ``looks_again``: it may say something else later. ``keeps_replies``: servers
    are never told that a reply is of no interest any more. ``end`` is called when all links are closed.
    """

    def __init__(
        self,
        look: Look,
        connect: Connect,
        policy: Policy,
        client_id: str,
        *,
        keeps_replies: bool,
        looks_again: bool = False,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self.client_id = client_id
        self.strays = 0  # replies that nobody waits for from there
        self._look = look
        self._connect = connect
        self._end = end
        self._keeps_replies = keeps_replies
        self._links: dict[str, Link] = {}
        self._pending: dict[int, Pending] = {}
        self._given_up: OrderedDict[int, None] = OrderedDict()  # they may be asked again
        self._numbers: list[int] = []  # heap of those that are open or given up, and some more
        self._next_number = 1
        self._closed = False
        now_s = time.monotonic()
        self._look_due_s = now_s + REGISTRY_POLL_S if looks_again else float("inf")
        names = list(look())
        try:
            for name in names:
                self._links[name] = connect(name)
        except BaseException:
            self._close_links()
            raise
        self._pool = Pool(names, policy, now_s)

    @property
    def servers(self) -> Mapping[str, State]:
        return self._pool.servers

    # --- requests ----------------------------------------------------------------------------------------------------

    def submit(self, pending: Pending, timeout_s: float | None) -> None:
        """Send a request as soon as possible. One that was given up is sent again. Raises ClientError."""
        if self._closed:
            raise ClientClosed("the client of the pool is closed")
        if len(self._pending) >= OPEN_REQUESTS_MAX:
            raise TooManyRequests(f"{len(self._pending)} requests of this client are open, which is as many as may be")
        if not pending.number:
            pending.number, self._next_number = self._next_number, self._next_number + 1
            pending.client_id = self.client_id
            heappush(self._numbers, pending.number)
        elif pending.number in self._pending:
            raise ClientError(f"request {pending.number} is being asked for again already")
        self._given_up.pop(pending.number, None)
        self._pending[pending.number] = pending
        pending.outcome, pending.timeout_s = None, timeout_s
        deadline_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        self._pool.submit(pending.number, deadline_s, idempotent=pending.idempotent, trail=pending.trail)

    def withdraw(self, pending: Pending) -> None:
        """Forget a request that no caller waits for any more."""
        if self._pending.pop(pending.number, None) is not None:
            self._pool.withdraw(pending.number)

    @property
    def _settled(self) -> int:
        """Number below which all requests are over, and not asked for again."""
        if self._keeps_replies:
            return 0
        while self._numbers[0] not in self._pending and self._numbers[0] not in self._given_up:
            heappop(self._numbers)
        return self._numbers[0]

    # --- the world ---------------------------------------------------------------------------------------------------

    def process(self) -> None:
        """Receive what has come, and do what is due."""
        while not self._closed:
            self._look_again(time.monotonic())
            events = [(name, event) for name, link in self._links.items() for event in link.process()]
            now_s = time.monotonic()
            for name, event in events:
                self._note(name, event, now_s)
            actions = self._pool.actions(now_s)
            for action in actions:
                self._do(action, now_s)
            # Sending may have taken in the news that something has come, of which the descriptor tells only once.
            if not actions:
                return

    def _look_again(self, now_s: float) -> None:
        if now_s < self._look_due_s:
            return
        self._look_due_s = now_s + REGISTRY_POLL_S
        names = set(self._look())
        for name in self._links.keys() - names:
            self._links.pop(name).close()
        for name in sorted(names - self._links.keys()):
            with suppress(NotConnectable):  # not yet; it is looked at again
                self._links[name] = self._connect(name)
        self._pool.update(self._links, now_s)

    def _note(self, name: str, event: Event, now_s: float) -> None:
        pool = self._pool
        if isinstance(event, Replied):
            if pool.replied(name, event.number, now_s):
                self._pending.pop(event.number).finish(event.outcome)
            else:
                self.strays += 1
        elif isinstance(event, Heard):
            pool.heard(name, event.domain, event.working_s, now_s)
        elif isinstance(event, Reached):
            pool.reached(name, now_s)
        elif isinstance(event, Lost):
            pool.lost(name, now_s)
        elif isinstance(event, ServerBusy):
            pool.turned_away(name, event.number, now_s)
        else:
            pool.unsent(name, event.number, now_s)

    def _do(self, action: Send | Ping | GiveUp, now_s: float) -> None:
        if isinstance(action, Send):
            payload = self._pending[action.number].payload
            if not self._links[action.server].send(action.number, self._settled, payload):
                self._pool.unsent(action.server, action.number, now_s)
        elif isinstance(action, Ping):
            self._links[action.server].ping()
        else:
            self._give_up(action)

    def _give_up(self, action: GiveUp) -> None:
        pending = self._pending.pop(action.number)
        pending.trail = action.trail
        self._given_up[action.number] = None
        if len(self._given_up) > GIVEN_UP_MAX:
            self._given_up.popitem(last=False)
        pending.finish(NoReply(self._text(action, pending), action.tries))

    def _text(self, action: GiveUp, pending: Pending) -> str:
        where = "; ".join(self._word(name, action.tries.get(name, 0)) for name in self._links) or "there are no servers"
        front = f"no reply to request {action.number} of client {self.client_id!r}"
        if action.why is Why.TIME:
            front += f" within {pending.timeout_s:g} s"
        may = "it may have been done or may still be" if pending.sent else "it was never sent, and will not be"
        return f"{front}: {action.why.value} ({where}); {may}"

    def _word(self, name: str, tries: int) -> str:
        problem = self._links[name].problem
        state = self._pool.servers[name].value
        return f"{name}: {state}, tried {tries} times{f', {problem}' if problem else ''}"

    def filenos(self) -> set[int]:
        """File descriptors to wait for; :meth:`process` may change them."""
        return {descriptor for link in self._links.values() for descriptor in link.filenos()}

    def next_deadline_s(self) -> float:
        """Monotonic time at which :meth:`process` must be called, even if nothing comes."""
        due_s = [self._pool.next_deadline_s(), self._look_due_s]
        due_s += [link.next_deadline_s() for link in self._links.values()]
        return min(due_s)

    def _close_links(self) -> None:
        for link in self._links.values():
            link.close()
        self._end()

    def close(self) -> None:
        """Close all links. Requests that wait end with ClientClosed; a server may still do what was sent."""
        if self._closed:
            return
        self._closed = True
        self._close_links()
        pending, self._pending = self._pending, {}
        for one in pending.values():
            one.finish(ClientClosed("the client of the pool was closed; a request that was sent may still be done"))


# A pool for plain code: requests wait for their replies, in any thread; a thread of its own takes what comes.


class ThreadedPool:
    """Pool for threads; open from the moment that it is made, in a forked child from its first use. See
    :class:`Driver`.
    """

    def __init__(self, make_driver: Callable[[], Driver]) -> None:
        self._make_driver = make_driver
        self._closing = False
        self._begin()
        self._open()
        register(self)

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

    def forked_in_child(self) -> None:
        """Become another client in a forked child, with an ID of its own."""
        disown_in_child(self._own, self._thread)
        self._begin()

    @property
    def _driver(self) -> Driver:
        """Driver of this process; made at its first use. Raises ClientClosed, NotConnectable."""
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
        """State of each server, by name: "live", "dead" or "removed"."""
        driver = self._driver
        with self._lock:
            return {name: state.value for name, state in driver.servers.items()}

    def ask(self, payload: Any, timeout_s: float | None, *, idempotent: bool = False) -> Any:
        """Send a request and return its reply. Raises what the server says, GaveUp, ClientError."""
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
            raise ClientClosed(after_fork_message("a request to a pool", process_id, "only there its reply comes"))
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
        """Close the pool. Requests that wait end with ClientClosed; a server may still do what was sent."""
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
    """Do nothing: ``done`` of a request that no caller waits for yet."""


# A pool for asyncio: requests are awaited, as many at a time as there are.


class AsyncPool:
    """Pool for one asyncio loop, the one that runs when it is made; see :class:`Driver`."""

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
        register(self)

    def forked_in_child(self) -> None:
        """Refuse use in a forked child: the loop is its parent's."""
        self._closed = True
        self._why_closed = after_fork_message("the pool", self._process_id, "connect anew, in a loop of this one")

    @property
    def client_id(self) -> str:
        return self._driver.client_id

    @property
    def servers(self) -> Mapping[str, str]:
        """State of each server, by name: "live", "dead" or "removed"."""
        return {name: state.value for name, state in self._driver.servers.items()}

    async def ask(self, payload: Any, timeout_s: float | None, *, idempotent: bool = False) -> Any:
        """Send a request and return its reply. Raises what the server says, GaveUp, ClientError."""
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
        """Close the pool. Requests that wait end with ClientClosed; a server may still do what was sent."""
        if self._closed:
            return
        self._closed = True
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        for handle in (self._timer, self._soon):
            if handle is not None:
                handle.cancel()
        self._driver.close()
