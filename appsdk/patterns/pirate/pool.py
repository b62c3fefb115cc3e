"""Rules of a pool: which server gets which request, and when one is given up. No I/O, clock or randomness.

    server    DEAD --any word--> LIVE --a try timed out, silence, connection broken--> DEAD --long silence--> REMOVED
              REMOVED --any word--> LIVE

- A server has one request of this client at a time. A server without one is pinged, whatever its state.
- A request goes to the least recently used server of those that are LIVE and have none.
- **The domain limits the next server**: servers that find each other's replies are of one domain. A request that a
  server may have begun goes to servers of that server's domain only, unless it is idempotent.
- If several servers can have it, each is tried once. If only one can, it is tried several times, and its try continues
  while it gives signs of life.
- The request is given up when no server is left to try, or its time is over. It waits for DEAD servers that were not
  tried, but not for REMOVED ones.

Times are monotonic, in seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush

BUSY_S = 0.1  # before the next request to a server that had no room


@dataclass(frozen=True, slots=True)
class Policy:
    """Policy of a pool: when a server counts as dead, and how often to try a request. Raises ValueError."""

    tries: int = 3  # at one server, if no other can have the request
    try_timeout_s: float = 2.5  # longer than the pauses of a busy machine, as in immortal.appsdk.client
    heartbeat_s: float = 1.0  # between two pings of a server without a request of this client
    silence_s: float = 2.5  # after a ping without an answer: two more were sent meanwhile
    removal_s: float = 60.0  # a server that was silent for so long is only pinged; requests do not wait for it

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise ValueError(f"tries={self.tries}: at least 1 was expected")
        for name in ("try_timeout_s", "heartbeat_s", "silence_s", "removal_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: more than 0 seconds were expected")


class State(Enum):
    LIVE = "live"
    DEAD = "dead"
    REMOVED = "removed"


class Why(Enum):
    """Reason for giving a request up."""

    TIME = "its time is over"
    TRIES = "every server that may have it was tried"
    NOBODY = "no server that may have it has been heard of for long"


@dataclass(frozen=True, slots=True)
class Send:
    """Action: send the request ``number`` to ``server``."""

    server: str
    number: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Action: ask ``server`` for a sign of life."""

    server: str


@dataclass(frozen=True, slots=True)
class AttemptHistory:
    """Servers that may have a request, needed to submit it again. Empty: no server can have begun it."""

    domain: bytes | None = None
    asked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Action: stop sending the request ``number``; ``tries`` by server."""

    number: int
    why: Why
    tries: dict[str, int]
    trail: AttemptHistory


Action = Send | Ping | GiveUp


@dataclass(slots=True)
class _Server:
    name: str
    last_seen_s: float  # time of the last sign of life, or of its creation
    ping_due_s: float
    state: State = State.DEAD
    domain: bytes | None = None  # None: not known yet
    used: int = 0  # order of its last use: lower is longer ago
    unanswered_ping_s: float | None = None  # time of the first ping without an answer
    number: int | None = None  # of the request that it has from this client
    try_started_s: float = 0.0
    try_due_s: float = 0.0
    room_s: float = 0.0  # time at which it can have room again


@dataclass(slots=True)
class _Request:
    number: int
    deadline_s: float
    idempotent: bool
    domain: bytes | None
    asked: set[str]  # servers that may have it, also from before it was given up
    tries: dict[str, int] = field(default_factory=dict)
    server: str | None = None  # the server that has it now


class Pool:
    """Servers and open requests of one client. ``servers``: unique names; each is DEAD until it has answered."""

    def __init__(self, servers: Iterable[str], policy: Policy, now_s: float) -> None:
        self._policy = policy
        self._servers: dict[str, _Server] = {}
        self._requests: dict[int, _Request] = {}
        self._waiting: OrderedDict[int, None] = OrderedDict()  # to send, for the first time or again
        self._deadlines: list[tuple[float, int]] = []  # heap; also has deadlines of requests that are over
        self._unjudged: set[int] = set()  # waiting requests that may have no server left
        self._uses = 0
        self.update(servers, now_s)

    @property
    def servers(self) -> dict[str, State]:
        return {server.name: server.state for server in self._servers.values()}

    # --- events ------------------------------------------------------------------------------------------------------

    def update(self, servers: Iterable[str], now_s: float) -> None:
        """Set the servers. A request at a removed server moves to another one, if allowed."""
        names = list(dict.fromkeys(servers))
        for name in self._servers.keys() - set(names):
            self._fail(self._servers[name], now_s)
            del self._servers[name]
            self._unjudged.update(self._waiting)
        for name in names:
            if name not in self._servers:
                self._servers[name] = _Server(name, now_s, now_s)

    def submit(
        self, number: int, deadline_s: float, *, idempotent: bool = False, trail: AttemptHistory | None = None
    ) -> None:
        """Add a request. ``trail``: its history, if it was given up before."""
        trail = trail or AttemptHistory()
        self._requests[number] = _Request(number, deadline_s, idempotent, trail.domain, set(trail.asked))
        self._waiting[number] = None
        self._unjudged.add(number)
        heappush(self._deadlines, (deadline_s, number))

    def withdraw(self, number: int) -> None:
        """Drop a request whose caller no longer waits."""
        if (request := self._requests.get(number)) is not None:
            self._remove(request)

    def reached(self, name: str, now_s: float) -> None:
        """Note that there is a connection to the server."""
        if (server := self._servers.get(name)) is not None:
            server.ping_due_s = now_s

    def ponged(self, name: str, domain: bytes, working_s: float, now_s: float) -> None:
        """Note that the server answered a ping. ``working_s``: time that it has spent on its present request; 0: it is
        idle.
        """
        if (server := self._servers.get(name)) is None:
            return
        self._mark_alive(server, now_s)
        if server.domain != domain:
            server.domain = domain
            self._unjudged.update(self._waiting)
        if working_s >= self._policy.try_timeout_s and server.number is None:
            server.state = State.DEAD  # it answers pings but makes no progress with another client's request

    def replied(self, name: str, number: int, now_s: float) -> bool:
        """Note that a reply has arrived; return False if no request waits for one from that server."""
        if (server := self._servers.get(name)) is None:
            return False
        request = self._requests.get(number)
        if server.number == number:
            server.number = None
        elif request is None or name not in request.asked:
            return False
        self._mark_alive(server, now_s)
        if request is None:
            return False
        self._remove(request)
        return True

    def turned_away(self, name: str, number: int, now_s: float) -> None:
        """Note that the server has no room: it has not begun the request."""
        if (server := self._servers.get(name)) is not None and server.number == number:
            self._mark_alive(server, now_s)
            server.room_s = now_s + BUSY_S
            self._not_begun(server)

    def unsent(self, name: str, number: int, now_s: float) -> None:
        """Note that the server can't be reached: the request was not sent."""
        if (server := self._servers.get(name)) is not None and server.number == number:
            self._not_begun(server)
            server.state = State.DEAD
            server.ping_due_s = now_s + self._policy.heartbeat_s

    def lost(self, name: str, now_s: float) -> None:
        """Note that the connection is broken: the server may have lost the request, or done it."""
        if (server := self._servers.get(name)) is not None:
            self._fail(server, now_s)

    # --- actions -----------------------------------------------------------------------------------------------------

    def actions(self, now_s: float) -> list[Action]:
        """Return the actions that are due now."""
        for server in self._servers.values():
            self._check_server(server, now_s)
        actions: list[Action] = [*self._give_up(now_s)]
        actions += self._send(now_s)
        actions += self._ping(now_s)
        return actions

    def next_deadline_s(self) -> float:
        """Return the time at which :meth:`actions` must be called even without events; infinity for none."""
        self._drop_deadlines()
        due_s = [self._deadlines[0][0]] if self._deadlines else []
        for server in self._servers.values():
            if server.number is not None:
                due_s.append(server.try_due_s)
                continue
            due_s.append(server.ping_due_s)
            if server.state is State.LIVE:
                if server.unanswered_ping_s is not None:
                    due_s.append(server.unanswered_ping_s + self._policy.silence_s)
                if self._waiting and server.room_s:
                    due_s.append(server.room_s)
            elif server.state is State.DEAD:
                due_s.append(server.last_seen_s + self._policy.removal_s)
        return min(due_s, default=float("inf"))

    # --- servers -----------------------------------------------------------------------------------------------------

    def _mark_alive(self, server: _Server, now_s: float) -> None:
        server.last_seen_s = now_s
        server.unanswered_ping_s = None
        server.state = State.LIVE
        server.ping_due_s = now_s + self._policy.heartbeat_s

    def _check_server(self, server: _Server, now_s: float) -> None:
        policy = self._policy
        if server.number is not None:
            if now_s >= server.try_due_s:
                self._end_try(server, now_s)
        elif (
            server.state is State.LIVE
            and server.unanswered_ping_s is not None
            and now_s >= server.unanswered_ping_s + policy.silence_s
        ):
            server.state = State.DEAD
        if server.state is State.DEAD and now_s >= server.last_seen_s + policy.removal_s:
            server.state = State.REMOVED
            self._unjudged.update(self._waiting)
        if server.room_s and now_s >= server.room_s:
            server.room_s = 0.0

    def _end_try(self, server: _Server, now_s: float) -> None:
        """End a try without a reply. If the server has given signs of life and no other can have the request, the
        request stays there.
        """
        request = self._requests.get(server.number or 0)
        if request is None or server.last_seen_s <= server.try_started_s or self._other_may_have(request, server):
            self._fail(server, now_s)
        else:
            self._start_try(server, now_s)

    def _start_try(self, server: _Server, now_s: float) -> None:
        server.try_started_s = now_s
        server.try_due_s = now_s + self._policy.try_timeout_s

    def _fail(self, server: _Server, now_s: float) -> None:
        """Count the server as dead, and its request as failed there."""
        if server.state is State.LIVE:
            server.state = State.DEAD
            server.ping_due_s = now_s
        if (request := self._released(server)) is not None:
            self._wait_again(request)

    def _released(self, server: _Server) -> _Request | None:
        number, server.number = server.number, None
        return None if number is None else self._requests.get(number)

    # --- requests ----------------------------------------------------------------------------------------------------

    def _wait_again(self, request: _Request) -> None:
        request.server = None
        self._waiting[request.number] = None
        self._waiting.move_to_end(request.number, last=False)  # it is older than the waiting ones
        self._unjudged.add(request.number)

    def _not_begun(self, server: _Server) -> None:
        if (request := self._released(server)) is None:
            return
        request.tries[server.name] -= 1
        if not request.tries[server.name]:
            del request.tries[server.name]
            request.asked.discard(server.name)
        if not request.asked:
            request.domain = None
        self._wait_again(request)

    def _remove(self, request: _Request) -> None:
        del self._requests[request.number]
        self._waiting.pop(request.number, None)
        self._unjudged.discard(request.number)
        if request.server is not None and (server := self._servers.get(request.server)) is not None:
            server.number = None

    def _may_have(self, request: _Request, server: _Server) -> bool:
        return request.domain is None or server.domain == request.domain

    def _may_try(self, request: _Request, server: _Server) -> bool:
        """Return True if the server can have the request, for the first time or again."""
        tries = request.tries.get(server.name, 0)
        if not tries or tries >= self._policy.tries:
            return not tries
        return not self._other_may_have(request, server)

    def _other_may_have(self, request: _Request, server: _Server) -> bool:
        """Return True if another server can have the request."""
        return any(
            other is not server and other.state is not State.REMOVED and self._may_have(request, other)
            for other in self._servers.values()
        )

    def _give_up(self, now_s: float) -> Iterator[GiveUp]:
        self._drop_deadlines()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            yield self._given_up(self._requests[self._deadlines[0][1]], Why.TIME)
            self._drop_deadlines()
        unjudged, self._unjudged = self._unjudged, set()
        for number in sorted(unjudged & self._waiting.keys()):
            request = self._requests[number]
            left = [
                server
                for server in self._servers.values()
                if server.state is not State.REMOVED and self._may_have(request, server)
            ]
            if not any(self._may_try(request, server) for server in left):
                yield self._given_up(request, Why.TRIES if request.tries else Why.NOBODY)

    def _given_up(self, request: _Request, why: Why) -> GiveUp:
        self._remove(request)
        trail = AttemptHistory(request.domain, tuple(sorted(request.asked)))
        return GiveUp(request.number, why, dict(request.tries), trail)

    def _drop_deadlines(self) -> None:
        """Drop the deadlines of requests that are over or were submitted again."""
        while self._deadlines:
            deadline_s, number = self._deadlines[0]
            if (request := self._requests.get(number)) is not None and request.deadline_s == deadline_s:
                return
            heappop(self._deadlines)

    def _send(self, now_s: float) -> Iterator[Send]:
        free = [
            server
            for server in self._servers.values()
            if server.state is State.LIVE and server.number is None and not server.room_s
        ]
        free.sort(key=lambda server: server.used)
        chosen: list[tuple[_Request, _Server]] = []
        for number in self._waiting:
            if not free:
                break
            request = self._requests[number]
            for server in free:
                if self._may_have(request, server) and self._may_try(request, server):
                    free.remove(server)
                    chosen.append((request, server))
                    break
        for request, server in chosen:
            self._assign(request, server, now_s)
            yield Send(server.name, request.number)

    def _assign(self, request: _Request, server: _Server, now_s: float) -> None:
        self._uses += 1
        server.used = self._uses
        server.number = request.number
        self._start_try(server, now_s)
        server.unanswered_ping_s = None
        request.server = server.name
        request.tries[server.name] = request.tries.get(server.name, 0) + 1
        request.asked.add(server.name)
        if not request.idempotent:
            request.domain = server.domain
        del self._waiting[request.number]

    def _ping(self, now_s: float) -> Iterator[Ping]:
        for server in self._servers.values():
            if server.number is None and now_s >= server.ping_due_s:
                server.ping_due_s = now_s + self._policy.heartbeat_s
                if server.unanswered_ping_s is None:
                    server.unanswered_ping_s = now_s
                yield Ping(server.name)
