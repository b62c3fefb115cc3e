"""Driver of a pool over its links: the machine in the shells of :mod:`immortal.appsdk.client.shells`."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Any

import zmq

from immortal.appsdk.client.errors import ClientClosed, ClientError, NotConnectable
from immortal.appsdk.patterns.pirate.frames import GaveUp, TooManyRequests
from immortal.appsdk.patterns.pirate.links import Event, Heard, Link, Lost, Reached, Replied, ServerBusy
from immortal.appsdk.patterns.pirate.pool import AttemptHistory, GiveUp, Ping, Policy, Pool, Send, State, Why
from immortal.protocol.process import after_fork_message

OPEN_REQUESTS_MAX = 65_536  # of one client: each keeps its body in memory. As many as an instance takes
GIVEN_UP_MAX = 4096  # numbers that may be asked again: as many replies as a server keeps for one client
REGISTRY_POLL_S = 2.0  # for the instances that a pattern means

Connect = Callable[[str], Link]
Look = Callable[[], Iterable[str]]


@dataclass(frozen=True, slots=True)
class NoReply:
    """Outcome of a request that was given up: the reason, and the number of tries by server."""

    reason: str
    tries: dict[str, int]


class Pending:
    """Request of a caller, for a shell. ``outcome`` is set once it is over: a reply, an exception to raise, or
    NoReply.
    """

    patience_s: float | None = None  # the pool gives it up in time

    __slots__ = (
        "_done",
        "_process_id",
        "client_id",
        "idempotent",
        "number",
        "outcome",
        "payload",
        "timeout_s",
        "trail",
    )

    def __init__(self, payload: Any, timeout_s: float | None, *, idempotent: bool = False) -> None:
        self.payload = payload
        self.timeout_s = timeout_s
        self.idempotent = idempotent
        self.client_id = ""
        self.number = 0
        self.outcome: Any = None
        self.trail = AttemptHistory()
        self._done: Callable[[], None] = _nobody_waits
        self._process_id = os.getpid()

    @property
    def sent(self) -> bool:
        """Tell, of a request that was given up, whether a server may have it."""
        return bool(self.trail.asked)

    def finish(self, outcome: Any) -> None:
        self.outcome = outcome
        self._done()

    # --- a request of a shell ----------------------------------------------------------------------------------------

    def begin(self, driver: Driver, done: Callable[[], None]) -> None:
        driver.submit(self)
        self._done = done

    def withdraw(self, driver: Driver) -> None:
        driver.withdraw(self)

    def expire(self, driver: Driver) -> None:
        """Do nothing: it has no other end."""

    def value(self, ask: Callable[[Pending], Any]) -> Any:
        """Return the reply. Raises what the server says, GaveUp, ClientError."""
        outcome = self.outcome
        if isinstance(outcome, NoReply):
            raise GaveUp(outcome.reason, self, outcome.tries, partial(self._again, ask))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _again(self, ask: Callable[[Pending], Any], timeout_s: float | None) -> Any:
        """Wait once more, if that is this process's request. Raises as :meth:`value`."""
        if self._process_id != os.getpid():
            what, advice = "a request to a pool", "only there its reply comes"
            raise ClientClosed(after_fork_message(what, self._process_id, advice))
        self.timeout_s = timeout_s
        return ask(self)


def _nobody_waits() -> None:
    """Do nothing: the end of a request that no caller waits for."""


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

    def submit(self, pending: Pending) -> None:
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
        pending.outcome = None
        deadline_s = float("inf") if pending.timeout_s is None else time.monotonic() + pending.timeout_s
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

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Return the sockets to wait for; :meth:`process` may open others."""
        return [socket for link in self._links.values() for socket in link.sockets()]

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
