"""A client's pool and its links together: does what the pool says, and tells it what has come. It has no loop."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from immortal.appsdk.client.errors import ClientClosed, ClientError, NotConnectable
from immortal.appsdk.patterns.pirate.errors import TooManyRequests
from immortal.appsdk.patterns.pirate.limits import GIVEN_UP_MAX, OPEN_REQUESTS_MAX, REGISTRY_LOOK_S
from immortal.appsdk.patterns.pirate.links import Event, Heard, Link, Lost, Reached, Replied, TurnedAway
from immortal.appsdk.patterns.pirate.pool import GiveUp, Ping, Policy, Pool, Send, State, Trail, Why

Connect = Callable[[str], Link]
Look = Callable[[], Iterable[str]]


@dataclass(frozen=True, slots=True)
class NoReply:
    """What becomes of a request that is given up: why, and the number of tries by server."""

    reason: str
    tries: dict[str, int]


class Pending:
    """A request. ``outcome`` is set, and ``done`` called, once it is over: a reply, an exception to raise, NoReply."""

    __slots__ = ("client_id", "done", "idempotent", "number", "outcome", "payload", "timeout_s", "trail")

    def __init__(self, payload: Any, done: Callable[[], None], *, idempotent: bool = False) -> None:
        self.payload = payload
        self.done = done
        self.idempotent = idempotent
        self.client_id = ""
        self.number = 0
        self.outcome: Any = None
        self.timeout_s: float | None = None
        self.trail = Trail()

    @property
    def sent(self) -> bool:
        """Once it was given up: whether a server may have it."""
        return bool(self.trail.asked)

    def finish(self, outcome: Any) -> None:
        self.outcome = outcome
        self.done()


class Driver:
    """Used by one thread at a time. Raises NotConnectable as it is made.

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
        self._look_due_s = now_s + REGISTRY_LOOK_S if looks_again else float("inf")
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
        """Send it as soon as it can be. One that was given up is sent again. Raises ClientError."""
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
        """Nobody waits for it any more."""
        if self._pending.pop(pending.number, None) is not None:
            self._pool.withdraw(pending.number)

    @property
    def _settled(self) -> int:
        """All numbers below it are over, and not asked for again."""
        if self._keeps_replies:
            return 0
        while self._numbers[0] not in self._pending and self._numbers[0] not in self._given_up:
            heappop(self._numbers)
        return self._numbers[0]

    # --- the world ---------------------------------------------------------------------------------------------------

    def process(self) -> None:
        """Take what has come, do what is to be done."""
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
        self._look_due_s = now_s + REGISTRY_LOOK_S
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
        elif isinstance(event, TurnedAway):
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
        """What to wait for; others after :meth:`process`."""
        return {descriptor for link in self._links.values() for descriptor in link.filenos()}

    def next_deadline_s(self) -> float:
        """When :meth:`process` is to be called, whatever happens; monotonic."""
        due_s = [self._pool.next_deadline_s(), self._look_due_s]
        due_s += [link.next_deadline_s() for link in self._links.values()]
        return min(due_s)

    def _close_links(self) -> None:
        for link in self._links.values():
            link.close()
        self._end()

    def close(self) -> None:
        """Requests that wait end with ClientClosed; what was sent may still be done."""
        if self._closed:
            return
        self._closed = True
        self._close_links()
        pending, self._pending = self._pending, {}
        for one in pending.values():
            one.finish(ClientClosed("the client of the pool was closed; a request that was sent may still be done"))
