"""Links to one server: the protocol the driver uses, PlainLink (DEALER) and InstanceLink (a client connection).

A DEALER of its own for each server: so a reply is of that server, and with keys nobody else can send one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import zmq

from immortal.appsdk.client.connection import Connection
from immortal.appsdk.client.discovery import Finder
from immortal.appsdk.client.errors import CalleeFailed, CallRefused, ClientError, NotConnectable, OutcomeUnknown
from immortal.appsdk.client.methods import Method
from immortal.appsdk.client.session import Call
from immortal.appsdk.client.transport import Dealer, Transport
from immortal.appsdk.patterns.pirate.frames import (
    ANSWERS,
    CLOSE_LINGER_MS,
    FRAME_SIZE_BYTES_MAX,
    Frame,
    Kind,
    decode_frame,
    encode_frame,
)
from immortal.protocol.errors import RemoteProtocolError

_NOBLOCK = int(zmq.NOBLOCK)
_OPTIONS = {
    zmq.IMMEDIATE: 1,  # what is sent to nobody would come to whoever listens there later
    zmq.MAXMSGSIZE: FRAME_SIZE_BYTES_MAX,
    zmq.RECONNECT_IVL: 10,
    zmq.RECONNECT_IVL_MAX: 200,
    zmq.CONNECT_TIMEOUT: 1_000,  # TCP alone asks a machine that is gone after longer and longer waits
}
Context = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True, slots=True)
class Reached:
    """The link has a connection."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection is broken."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A ping was answered: see Pool.heard."""

    domain: bytes
    working_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Replied:
    """A request is over. ``outcome``: what the caller gets, an exception is raised."""

    number: int
    outcome: Any


@dataclass(frozen=True, slots=True)
class ServerBusy:
    """The server has no room for it."""

    number: int


@dataclass(frozen=True, slots=True)
class Unsent:
    """The request was not sent, and will not be."""

    number: int


Event = Reached | Lost | Heard | Replied | ServerBusy | Unsent


class Link(Protocol):
    """Link to one server. Used by one thread at a time. ``problem``: why nothing comes, as far as that is known; "" for
    none.
    """

    @property
    def problem(self) -> str: ...

    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        """Return the sockets to wait for. They signal once: :meth:`process` takes all that has come, and may open
        others.
        """

    def process(self) -> Sequence[Event]:
        """Return all events that have come."""

    def send(self, number: int, settled: int, payload: Any) -> bool:
        """Send a request; False: it can't have left. ``settled``: the client is done with all numbers below it."""

    def ping(self) -> None: ...

    def next_deadline_s(self) -> float:
        """Return the time at which :meth:`process` must be called, even if nothing comes."""

    def close(self) -> None: ...


class PlainLink:
    """Link to the plain server at the one endpoint of ``finder``. Raises NotConnectable as it is made."""

    def __init__(self, context: Context, finder: Finder, client_id: str) -> None:
        self._finder = finder
        self._client_id = client_id
        self._endpoint = finder.endpoints[0]
        self._dealer = Dealer(context, _OPTIONS)
        self._watch = self._dealer.watch
        self._connections = 0  # that the pool was told of
        self._was_up = False
        self._attempt = 0
        self._malformed = ""  # what made no sense, last
        self.malformed_count = 0
        self._places = finder.find()
        self._dealer.open(self._endpoint, self._places, 0)

    @property
    def problem(self) -> str:
        return self._watch.problem or self._malformed

    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [self._dealer.socket, self._watch.socket]

    def process(self) -> list[Event]:
        events: list[Event] = []
        self._watch.look()
        if self._was_up and (self._watch.connections > self._connections or not self._watch.is_up):
            events.append(Lost())
        if self._watch.is_up and self._watch.connections > self._connections:
            events.append(Reached())
        self._connections, self._was_up = self._watch.connections, self._watch.is_up
        while self._dealer.has_unread():  # asked first, since it costs more to be told by an exception
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
            self.malformed_count += 1
            return
        events.append(event)

    def send(self, number: int, settled: int, payload: bytes) -> bool:
        return self._dealer.send(encode_frame(Frame(Kind.REQUEST, number, settled, self._client_id, payload)))

    def ping(self) -> None:
        if not self._dealer.send(encode_frame(Frame(Kind.PING))) and self._places.pair is not None:
            self._look_for_keys()

    def _look_for_keys(self) -> None:
        """Look for the server's newer keys, as it is not reached, and try each in turn."""
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
    """Return the event of a frame. Raises RemoteProtocolError for what only clients send."""
    if frame.kind is Kind.PONG:
        return Heard(frame.body, frame.value / 1000)
    if frame.kind is Kind.BUSY:
        return ServerBusy(frame.number)
    if frame.kind not in ANSWERS:
        raise RemoteProtocolError(f"a {frame.kind.name}, which only clients send")
    return Replied(frame.number, frame.body if frame.kind is Kind.REPLY else _error(frame))


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


# The way to an instance, which is found by its name in the registry folder: as any caller from outside.
#
# A request has the key "CLIENT NUMBER" there: the instance does each key once, whoever asks again, and however often.
# An instance finds nobody's replies but its own, so each is a domain of its own.


REQUEST_KEY = "{client_id} {number}"


@dataclass(frozen=True, slots=True)
class InstanceCall:
    """Payload of a request to an instance. ``key``: the user's own; None: one made of the request's number."""

    method: Method
    arguments: bytes
    key: str | None


class InstanceLink:
    """Link to the instance of ``finder``. Raises NotConnectable as it is made."""

    def __init__(self, finder: Finder, client_id: str) -> None:
        self._client_id = client_id
        self._name = finder.name
        self._connection = Connection(finder.name, None, time.monotonic())
        self._transport = Transport(self._connection, finder)
        self._events: list[Event] = []
        self._heard_s = 0.0
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
            self._events.append(Lost())
        if connection.is_talking and not self._was_talking:
            self._events.append(Reached())
        if connection.is_talking and connection.heard_s > self._heard_s:
            self._events.append(Heard(self._name.encode()))
        self._was_talking, self._heard_s = connection.is_talking, connection.heard_s
        events, self._events = self._events, []
        return events

    def send(self, number: int, settled: int, payload: InstanceCall) -> bool:
        """Call the instance. It knows the request by its key, and keeps its reply as for any key."""
        key = payload.key or REQUEST_KEY.format(client_id=self._client_id, number=number)
        call = Call(payload.method.method, payload.arguments, lambda call: self._done(number, payload.method, call))
        self._connection.submit(call, key)
        return True

    def _done(self, number: int, method: Method, call: Call) -> None:
        outcome = call.outcome
        if isinstance(outcome, NotConnectable) and not call.sent:
            self._events.append(Unsent(number))
            return
        if outcome is None or isinstance(outcome, ClientError):
            self._events.append(Replied(number, outcome))
            return
        try:
            value = method.value(outcome)
        except Exception as error:  # what the handler raised
            value = error
        self._events.append(Replied(number, value))

    def ping(self) -> None:
        self._connection.ask_soon(time.monotonic())

    def next_deadline_s(self) -> float:
        return self._transport.next_deadline_s()

    def close(self) -> None:
        self._transport.close()


def instances(home: Path, pattern: str) -> Iterator[str]:
    """Yield the names in the registry folder that match ``pattern``, in the syntax of a shell: "bank-*"."""
    for file in sorted(home.glob("*.toml")):
        if fnmatchcase(file.stem, pattern):
            yield file.stem
