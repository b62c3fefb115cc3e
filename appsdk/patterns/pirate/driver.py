"""Driver of a pool of servers: a state machine that a shell of :mod:`immortal.appsdk.client.shells` runs.

A link is the way to one server: PlainLink to a plain one, InstanceLink to an instance. Each plain server has its own
DEALER: so a reply is from that server, and with keys nobody else can send one.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, ClassVar, Protocol

import zmq

from immortal.appsdk.client.connection import Connection
from immortal.appsdk.client.discovery import Finder
from immortal.appsdk.client.errors import (
    CalleeFailed,
    CallRefused,
    ClientClosed,
    ClientError,
    NotConnectable,
    OutcomeUnknown,
)
from immortal.appsdk.client.methods import Method
from immortal.appsdk.client.session import Call
from immortal.appsdk.client.shells import require_process
from immortal.appsdk.client.transport import Dealer, Transport
from immortal.appsdk.patterns.pirate.frames import (
    ANSWERS,
    CLOSE_LINGER_MS,
    FRAME_SIZE_BYTES_MAX,
    Frame,
    GaveUp,
    Kind,
    TooManyRequests,
    decode_frame,
    encode_frame,
)
from immortal.appsdk.patterns.pirate.pool import AttemptHistory, GiveUp, Ping, Policy, Pool, Send, State, Why
from immortal.protocol.errors import RemoteProtocolError

OPEN_REQUESTS_MAX = 65_536  # of one client: each keeps its body in memory. As many as an instance accepts
GIVEN_UP_MAX = 4096  # numbers that can be submitted again: as many replies as a server keeps for one client
REGISTRY_POLL_S = 2.0  # for the instances that match a pattern
_NOBLOCK = int(zmq.NOBLOCK)
_OPTIONS = {
    zmq.IMMEDIATE: 1,  # else a process that listens there later would get messages sent before
    zmq.MAXMSGSIZE: FRAME_SIZE_BYTES_MAX,
    zmq.RECONNECT_IVL: 10,
    zmq.RECONNECT_IVL_MAX: 200,
    zmq.CONNECT_TIMEOUT: 1_000,  # TCP alone waits longer and longer for a machine that is gone
}
Context = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True, slots=True)
class Event:
    """Event of a link, for the method ``note`` of the pool: ``arguments`` go between the server's name and the time.

    ``outcome``: of a request that is over: the caller's result; an exception is raised.
    """

    note: Callable[..., bool | None]
    arguments: tuple[Any, ...] = ()
    outcome: Any = None


class Link(Protocol):
    """Link to one server, used by one thread at a time.

    ``problem``: the known reason why nothing arrives, or ""."""

    @property
    def problem(self) -> str: ...

    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        """Return the sockets to wait for. Each signals once: :meth:`process` takes all input, and can open others."""

    def process(self) -> Sequence[Event]:
        """Return all events that have arrived."""

    def send(self, number: int, settled: int, payload: Any) -> bool:
        """Send a request; return False if it has certainly not left. ``settled``: lower-numbered requests are over."""

    def ping(self) -> None: ...

    def next_deadline_s(self) -> float:
        """Return the time at which :meth:`process` must be called, even if nothing arrives."""

    def close(self) -> None: ...


class PlainLink:
    """Link to the plain server at the one endpoint of ``finder``. Its constructor raises NotConnectable."""

    def __init__(self, context: Context, finder: Finder, client_id: str) -> None:
        self._finder = finder
        self._client_id = client_id
        self._endpoint = finder.endpoints[0]
        self._dealer = Dealer(context, _OPTIONS)
        self._monitor = self._dealer.monitor
        self._connections = 0  # reported to the pool
        self._was_up = False
        self._attempt = 0
        self._malformed = ""  # the last invalid message, described
        self._places = finder.find()
        self._dealer.open(self._endpoint, self._places, 0)

    @property
    def problem(self) -> str:
        return self._monitor.problem or self._malformed

    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [self._dealer.socket, self._monitor.socket]

    def process(self) -> list[Event]:
        events: list[Event] = []
        self._monitor.read_events()
        if self._was_up and (self._monitor.connections > self._connections or not self._monitor.is_up):
            events.append(Event(Pool.lost))
        if self._monitor.is_up and self._monitor.connections > self._connections:
            events.append(Event(Pool.reached))
        self._connections, self._was_up = self._monitor.connections, self._monitor.is_up
        while self._dealer.has_unread():  # checked first, since an exception costs more
            self._received(self._dealer.socket.recv(_NOBLOCK, copy=False), events)
        return events

    def _received(self, first: zmq.Frame, events: list[Event]) -> None:
        try:
            if first.more:
                more = True
                while more:
                    more = self._dealer.socket.recv(_NOBLOCK, copy=False).more
                raise RemoteProtocolError("a message of several parts, 1 was expected")
            frame = decode_frame(first.bytes)
            event = _event(frame)
        except RemoteProtocolError as error:
            self._malformed = f"it sends {error}"
            return
        events.append(event)

    def send(self, number: int, settled: int, payload: bytes) -> bool:
        return self._dealer.send(encode_frame(Frame(Kind.REQUEST, number, settled, self._client_id, payload)))

    def ping(self) -> None:
        if not self._dealer.send(encode_frame(Frame(Kind.PING))) and self._places.pair is not None:
            self._try_newer_keys()

    def _try_newer_keys(self) -> None:
        """Find newer keys of the unreachable server, and try each in turn."""
        try:
            places = self._finder.find()
        except NotConnectable:
            return
        if places.server_keys == self._places.server_keys and len(places.server_keys) < 2:
            return
        self._dealer.close()
        self._places = places
        self._attempt += 1
        self._was_up = False
        self._dealer.open(self._endpoint, places, self._attempt)

    def next_deadline_s(self) -> float:
        return float("inf")

    def close(self) -> None:
        self._dealer.close(CLOSE_LINGER_MS)


def _event(frame: Frame) -> Event:
    """Return the event of a frame. Raises RemoteProtocolError for a frame that only clients send."""
    if frame.kind is Kind.PONG:
        return Event(Pool.ponged, (frame.body, frame.value / 1000))
    if frame.kind is Kind.BUSY:
        return Event(Pool.turned_away, (frame.number,))
    if frame.kind not in ANSWERS:
        raise RemoteProtocolError(f"a {frame.kind.name}, which only clients send")
    return Event(Pool.replied, (frame.number,), frame.body if frame.kind is Kind.REPLY else _error(frame))


def _error(frame: Frame) -> ClientError:
    text = frame.body.decode(errors="replace")
    if frame.kind is Kind.FAILED:
        name, _, text = text.partition("\n")
        return CalleeFailed(f"request {frame.number}", name, text, "")
    if frame.kind is Kind.REFUSED:
        return CallRefused(f"the request was refused: {text}")
    return OutcomeUnknown(
        f"request {frame.number} is behind what the server keeps of this client: it was done before, or never will be"
    )


# Link to an instance, which is found by its name in the registry folder, as for any client.
#
# A request has the key "CLIENT NUMBER" there: the instance does each key once, however often it is requested. An
# instance finds only its own replies, so each instance is its own domain.


REQUEST_KEY = "{client_id} {number}"


@dataclass(frozen=True, slots=True)
class InstanceCall:
    """Payload of a request to an instance. ``key``: the user's own; None: one built from the request's number."""

    method: Method
    arguments: bytes
    key: str | None


class InstanceLink:
    """Link to the instance of ``finder``. Its constructor raises NotConnectable."""

    def __init__(self, finder: Finder, client_id: str) -> None:
        self._client_id = client_id
        self._name = finder.name
        self._connection = Connection(finder.name, None, time.monotonic())
        self._transport = Transport(self._connection, finder)
        self._events: list[Event] = []
        self._last_received_s = 0.0
        self._was_talking = False

    @property
    def problem(self) -> str:
        return self._transport.problem

    def sockets(self) -> list[zmq.Socket[bytes]]:
        return self._transport.sockets()

    def process(self) -> list[Event]:
        self._transport.process()
        connection = self._connection
        if self._was_talking and not connection.is_talking:
            self._events.append(Event(Pool.lost))
        if connection.is_talking and not self._was_talking:
            self._events.append(Event(Pool.reached))
        if connection.is_talking and connection.last_received_s > self._last_received_s:
            self._events.append(Event(Pool.ponged, (self._name.encode(), 0.0)))
        self._was_talking, self._last_received_s = connection.is_talking, connection.last_received_s
        events, self._events = self._events, []
        return events

    def send(self, number: int, settled: int, payload: InstanceCall) -> bool:
        """Call the instance, which recognizes a repeated request by its key, and keeps the reply."""
        key = payload.key or REQUEST_KEY.format(client_id=self._client_id, number=number)
        call = Call(payload.method.method, payload.arguments, lambda call: self._done(number, payload.method, call))
        self._connection.submit(call, key)
        return True

    def _done(self, number: int, method: Method, call: Call) -> None:
        outcome: Any = call.outcome
        if isinstance(outcome, NotConnectable) and not call.sent:
            self._events.append(Event(Pool.unsent, (number,)))
            return
        if outcome is not None and not isinstance(outcome, ClientError):
            try:
                outcome = method.value(outcome)
            except Exception as error:  # raised by the handler
                outcome = error
        self._events.append(Event(Pool.replied, (number,), outcome))

    def ping(self) -> None:
        self._connection.ping_soon(time.monotonic())

    def next_deadline_s(self) -> float:
        return self._transport.next_deadline_s()

    def close(self) -> None:
        self._transport.close()


def instances(home: Path, pattern: str) -> Iterator[str]:
    """Yield the names in the registry folder that match ``pattern``, in a shell's syntax: "bank-*"."""
    for file in sorted(home.glob("*.toml")):
        if fnmatchcase(file.stem, pattern):
            yield file.stem


# The machine: requests, and the messages for each server.


Connect = Callable[[str], Link]
FindServers = Callable[[], Iterable[str]]


@dataclass(slots=True, eq=False, repr=False)
class Pending:
    """Request of a caller, for a shell. ``outcome`` after its end: a reply, or an exception to raise."""

    wait_timeout_s: ClassVar[float | None] = None  # the pool gives it up in time

    payload: Any
    timeout_s: float | None
    idempotent: bool = field(default=False, kw_only=True)
    client_id: str = ""
    number: int = 0
    outcome: Any = None
    trail: AttemptHistory = field(default_factory=AttemptHistory)
    _done: Callable[[], None] = lambda: None  # nobody waits for its end
    _process_id: int = field(default_factory=os.getpid)

    @property
    def sent(self) -> bool:
        """True if a server may have received this request before the pool gave it up."""
        return bool(self.trail.asked)

    def finish(self, outcome: Any) -> None:
        self.outcome = outcome
        self._done()

    # --- a request of a shell ----------------------------------------------------------------------------------------

    def start(self, driver: Driver, done: Callable[[], None]) -> None:
        driver.submit(self)
        self._done = done

    def withdraw(self, driver: Driver) -> None:
        driver.withdraw(self)

    def expire(self, driver: Driver) -> None:
        """Do nothing: the pool ends the request."""

    def value(self, execute: Callable[[Pending], Any]) -> Any:
        """Return the reply. Raises the server's error, GaveUp (which can try again by ``execute``), ClientError."""
        outcome = self.outcome
        if isinstance(outcome, GaveUp):
            outcome._again = partial(self._retry, execute)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _retry(self, execute: Callable[[Pending], Any], timeout_s: float | None) -> Any:
        """Submit the request again, in the process that created it. Raises the errors of :meth:`value`."""
        require_process(self._process_id, "a request to a pool", "only there its reply comes")
        self.timeout_s = timeout_s
        return execute(self)


class Driver:
    """Driver of a pool: sends requests over links to servers, in one thread. Its constructor raises NotConnectable.

    ``find_servers`` returns the servers' names; ``polls_servers``: they can change. ``keeps_replies``: servers
    are never told that a reply is not needed any more. ``end`` is called when all links are closed.
    """

    def __init__(
        self,
        find_servers: FindServers,
        connect: Connect,
        policy: Policy,
        client_id: str,
        *,
        keeps_replies: bool,
        polls_servers: bool = False,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self.client_id = client_id
        self.strays = 0  # replies that no request waits for
        self._find_servers = find_servers
        self._connect = connect
        self._end = end
        self._keeps_replies = keeps_replies
        self._links: dict[str, Link] = {}
        self._pending: dict[int, Pending] = {}
        self._given_up: OrderedDict[int, None] = OrderedDict()  # numbers that can be submitted again
        self._numbers: list[int] = []  # heap of numbers that are open or given up, and some more
        self._next_number = 1
        self._closed = False
        now_s = time.monotonic()
        self._refresh_due_s = now_s + REGISTRY_POLL_S if polls_servers else float("inf")
        names = list(find_servers())
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
        """Send a request as soon as possible; send it again if it was given up. Raises ClientError."""
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
        """Drop a request that no caller waits for any more."""
        if self._pending.pop(pending.number, None) is not None:
            self._pool.withdraw(pending.number)

    @property
    def _settled(self) -> int:
        """Number below which all requests are over, and are not submitted again."""
        if self._keeps_replies:
            return 0
        while self._numbers[0] not in self._pending and self._numbers[0] not in self._given_up:
            heappop(self._numbers)
        return self._numbers[0]

    # --- the world ---------------------------------------------------------------------------------------------------

    def process(self) -> None:
        """Process arrived messages, and do what is due."""
        while not self._closed:
            self._refresh_servers(time.monotonic())
            events = [(name, event) for name, link in self._links.items() for event in link.process()]
            now_s = time.monotonic()
            for name, event in events:
                is_expected = event.note(self._pool, name, *event.arguments, now_s)
                if is_expected:
                    self._pending.pop(event.arguments[0]).finish(event.outcome)
                elif event.note is Pool.replied:
                    self.strays += 1
            actions = self._pool.actions(now_s)
            for action in actions:
                self._do(action, now_s)
            # Sending can have consumed the signal of an arrival, which the descriptor gives only once.
            if not actions:
                return

    def _refresh_servers(self, now_s: float) -> None:
        if now_s < self._refresh_due_s:
            return
        self._refresh_due_s = now_s + REGISTRY_POLL_S
        names = set(self._find_servers())
        for name in self._links.keys() - names:
            self._links.pop(name).close()
        for name in sorted(names - self._links.keys()):
            with suppress(NotConnectable):  # not yet; the next poll tries again
                self._links[name] = self._connect(name)
        self._pool.update(self._links, now_s)

    def _do(self, action: Send | Ping | GiveUp, now_s: float) -> None:
        if isinstance(action, Send):
            payload = self._pending[action.number].payload
            if not self._links[action.server].send(action.number, self._settled, payload):
                self._pool.unsent(action.server, action.number, now_s)
        elif isinstance(action, Ping):
            self._links[action.server].ping()
        else:
            pending = self._pending.pop(action.number)
            pending.trail = action.trail
            self._given_up[action.number] = None
            if len(self._given_up) > GIVEN_UP_MAX:
                self._given_up.popitem(last=False)
            pending.finish(GaveUp(self._give_up_message(action, pending), pending, action.tries, None))

    def _give_up_message(self, action: GiveUp, pending: Pending) -> str:
        where = (
            "; ".join(self._describe_server(name, action.tries.get(name, 0)) for name in self._links)
            or "there are no servers"
        )
        front = f"no reply to request {action.number} of client {self.client_id!r}"
        if action.why is Why.TIME:
            front += f" within {pending.timeout_s:g} s"
        may = "it may have been done or may still be" if pending.sent else "it was never sent, and will not be"
        return f"{front}: {action.why.value} ({where}); {may}"

    def _describe_server(self, name: str, tries: int) -> str:
        problem = self._links[name].problem
        state = self._pool.servers[name].value
        return f"{name}: {state}, tried {tries} times{f', {problem}' if problem else ''}"

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Return the sockets to wait for; :meth:`process` can open others."""
        return [socket for link in self._links.values() for socket in link.sockets()]

    def next_deadline_s(self) -> float:
        """Return the monotonic time at which :meth:`process` must be called, even if nothing arrives."""
        due_s = [self._pool.next_deadline_s(), self._refresh_due_s]
        due_s += [link.next_deadline_s() for link in self._links.values()]
        return min(due_s)

    def _close_links(self) -> None:
        for link in self._links.values():
            link.close()
        self._end()

    def close(self) -> None:
        """Close all links. Waiting requests end with ClientClosed; a server can still do a request that was sent."""
        if self._closed:
            return
        self._closed = True
        self._close_links()
        pending, self._pending = self._pending, {}
        for one in pending.values():
            one.finish(ClientClosed("the client of the pool was closed; a request that was sent may still be done"))
