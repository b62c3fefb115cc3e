"""ZeroMQ transport of a client's connection: one DEALER, reopened on silence, and a monitor of its problems."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping

import zmq

from immortal.appsdk.client.connection import Connection
from immortal.appsdk.client.discovery import Finder, Places, ProcessStatus, RegistryWatch, presence
from immortal.appsdk.client.errors import NotConnectable
from immortal.appsdk.client.session import Call

_NOBLOCK = int(zmq.NOBLOCK)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
GOODBYE_LINGER_MS = 100
NO_LISTENER_S = 0.1  # then another endpoint is tried, if nobody listens at this one
MOVED_POLL_S = 0.05  # interval of checks for a new shared registry: each compares two numbers
# How long a stopped instance, or one that refuses the key, gets to start or to read new keys.
STOPPED_S = 1.5
KEY_RETRY_S = 1.0  # an instance looks for new keys and callers once a second
KEY_REFUSED_S = 2.0
_OPTIONS = {
    zmq.SNDHWM: 16_384,  # frames
    zmq.MAXMSGSIZE: 72 << 20,  # a reply can be as large as a message: 64 MiB, with a front
    zmq.RECONNECT_IVL: 10,
    zmq.RECONNECT_IVL_MAX: 200,
}


class Transport:
    """Socket of one connection. Only one thread uses it at a time. Its creation raises NotConnectable."""

    def __init__(self, connection: Connection, finder: Finder) -> None:
        self.connection = connection
        self._finder = finder
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._attempt = 0
        self._dealer = Dealer(self._context, _OPTIONS)
        self._monitor = self._dealer.monitor
        self._refused_since_s: float | None = None  # when the key was first refused
        self._stopped_since_s: float | None = None  # when the instance was first found stopped
        self._check_due_s: float | None = None
        self._registry_watch: RegistryWatch | None = None
        try:
            self._places: Places = finder.find()
            self._open()
            self._registry_watch = finder.watch_registry()
        except BaseException:
            self._dealer.close()
            self._context.term()
            raise

    @property
    def endpoint(self) -> str:
        endpoints = self._places.endpoints
        return endpoints[self._attempt % len(endpoints)]

    def _open(self) -> None:
        places = self._places
        key = self._attempt // len(places.endpoints)
        self._dealer.open(self.endpoint, places, key)
        self._opened_s = time.monotonic()
        self.connection.endpoints_count = len(places.endpoints)

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Return the socket to wait for; after :meth:`process` has reopened it, another one."""
        return [self._dealer.socket]

    def process(self) -> None:
        """Receive all input, and send the messages that are due."""
        connection = self.connection
        now_s = time.monotonic()
        if not connection.is_talking:
            self._check_reachable(now_s)
        if len(self._places.endpoints) > 1 and self._has_no_listener(now_s):
            connection.needs_reconnect = True  # to the next endpoint, to which the instance can have moved
        if self._registry_watch is not None and self._registry_watch.has_moved(self._places):
            self._attempt = -1  # the next attempt is at the first endpoint, with its first key
            connection.needs_reconnect = True
        while True:
            self._receive()
            now_s = time.monotonic()
            data = connection.data_to_send(now_s)
            if connection.needs_reconnect:
                self._reopen(now_s)
                continue
            for one in data:
                self._dealer.send(one)  # a refused message is sent again later
            # Sending can have taken in the signal of new input, which the descriptor gives only once.
            if not data and not self._dealer.has_unread():
                return

    def _check_reachable(self, now_s: float) -> None:
        """Check whether the instance can be reached; if not, end the calls that were not sent."""
        self._monitor.read_events()
        self._check_due_s = None
        refusal = self._places.refusal or self._key_refusal(now_s)
        if not refusal and self._monitor.is_unreachable and not self.connection.was_welcomed:
            refusal = self._absence(now_s)
        if refusal:
            self.connection.refuse(NotConnectable(refusal))
        elif self._monitor.has_key_mismatch and len(self._places.endpoints) == 1:
            self._try_next_key(now_s)

    def _try_next_key(self, now_s: float) -> None:
        """Try the server's known keys one after the other; after the last one, read the registry's keys again."""
        count = len(self._places.server_keys)
        is_last = (self._attempt + 1) % count == 0
        due_s = self._opened_s + KEY_RETRY_S if is_last else now_s
        if now_s >= due_s:
            self.connection.needs_reconnect = True
        else:
            self._check_due_s = due_s

    def _has_no_listener(self, now_s: float) -> bool:
        if now_s - self._opened_s < NO_LISTENER_S:
            return False
        self._monitor.read_events()
        return not self._monitor.is_up and self._monitor.is_unreachable

    def _key_refusal(self, now_s: float) -> str:
        """Return why the key was refused; "" at first, while the server can still read a new key."""
        if not self._monitor.refusals or len(self._places.endpoints) > 1:  # the instance can be at another one
            self._refused_since_s = None
            return ""
        if self._refused_since_s is None:
            self._refused_since_s = now_s
        if now_s - self._refused_since_s >= KEY_REFUSED_S:
            return self.problem
        self._check_due_s = self._opened_s + KEY_RETRY_S
        if now_s >= self._check_due_s:
            self._attempt -= 1  # a server that refuses the caller's key has proved its own
            self.connection.needs_reconnect = True
        return ""

    def _absence(self, now_s: float) -> str:
        found = self._presence
        if not found.stopped:
            self._stopped_since_s = None
            return ""
        if self._stopped_since_s is None:
            self._stopped_since_s = now_s
        if now_s - self._stopped_since_s >= STOPPED_S:
            return found.problem
        self._check_due_s = self._stopped_since_s + STOPPED_S
        return ""

    @property
    def _presence(self) -> ProcessStatus:
        folder = self._places.folder
        return ProcessStatus(False, "") if folder is None else presence(folder)

    @property
    def problem(self) -> str:
        """Reason why no reply comes, if the client knows one; else ""."""
        if self.connection.is_talking:
            return self.connection.problem
        self._monitor.read_events()
        known, seen = self._places.refusal or self._presence.problem, self._monitor.problem
        if known or not seen:
            return known or self.connection.problem
        name = self.connection.instance
        if not self._monitor.refusals:
            return f"{seen} ('immortal status {name}', where it runs, says how it is, and where)"
        pair, caller = self._places.pair, self._finder.caller or name
        key = pair.public if pair is not None else ""
        whose = f"'allow', [peer_keys] and the registry folder of {name!r} say whose keys it lets in"
        return f"{seen} ({key}, of {caller!r}): {whose}"

    def _receive(self) -> None:
        receive, connection = self._dealer.socket.recv, self.connection
        try:
            while True:
                connection.receive(receive(_NOBLOCK), time.monotonic())
        except zmq.Again:
            return

    def _reopen(self, now_s: float) -> None:
        """Open a socket to the next endpoint, with the newest endpoints and keys."""
        self._dealer.close()
        self._attempt += 1
        try:
            self._places = self._finder.find()
        except NotConnectable as error:
            self.connection.problem = str(error)  # and keep the old places
        self._open()
        self.connection.reopened(now_s)

    def next_deadline_s(self) -> float:
        """Monotonic time at which :meth:`process` must be called, even without input."""
        due_s = self.connection.next_deadline_s()
        if self._registry_watch is not None:
            due_s = min(due_s, time.monotonic() + MOVED_POLL_S)
        return due_s if self._check_due_s is None else min(due_s, self._check_due_s)

    def close(self) -> None:
        """Close the socket. Calls without a reply can still be done."""
        if self._dealer.is_open:
            for data in self.connection.goodbye():
                self._dealer.send(data)
        if self._registry_watch is not None:
            self._registry_watch.close()
        self._dealer.close(GOODBYE_LINGER_MS)
        self._context.term()


# Error texts for users of a client.


def timeout_message(transport: Transport, method: str, call: Call, timeout_s: float) -> str:
    instance = transport.connection.instance
    front = f"{method}: no reply of {instance!r} at {transport.endpoint} within {timeout_s:g} s: {transport.problem}"
    if not call.sent and call.message:  # an unlogged query, which has no number
        return f"{front}; a query changes nothing, and may be asked again"
    if not call.sent:
        return f"{front}; the request was never sent, and will not be"
    return (
        f"{front}; the request (number {(call.leader or call).number} of client {(call.leader or call).client_id!r}) "
        f"may have been done or may still be"
    )


class Dealer:
    """DEALER socket to one endpoint at a time, with its ``monitor``. ``options``: ZeroMQ's socket options."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], options: Mapping[zmq.SocketOption, int]) -> None:
        self.monitor = SocketMonitor(context)
        self._context = context
        self._options = options
        self._socket: zmq.Socket[bytes] | None = None

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    @property
    def socket(self) -> zmq.Socket[bytes]:
        assert self._socket is not None
        return self._socket

    def open(self, endpoint: str, places: Places, key: int) -> None:
        """Connect to ``endpoint``, with the server key number ``key`` of ``places``. Raises NotConnectable."""
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        # Input is limited by outstanding requests. With its own limit, or its heartbeats, ZeroMQ ends the process if a
        # connection breaks that was not read to its end. Pings detect a missing peer.
        socket.setsockopt(zmq.RCVHWM, 0)
        for option, value in self._options.items():
            socket.setsockopt(option, value)
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        if places.pair is not None:
            server_key = places.server_keys[key % len(places.server_keys)]
            socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, places.pair.public.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, places.pair.secret.encode())
        try:
            self.monitor.watch(socket, has_keys=places.pair is not None)
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.monitor.close()
            socket.close()
            raise NotConnectable(f"{endpoint!r} can't be connected to: {error.strerror}") from None
        self._socket = socket

    def has_unread(self) -> bool:
        events = self.socket.getsockopt(_EVENTS)
        assert isinstance(events, int)
        return bool(events & _POLLIN)

    def send(self, data: bytes) -> bool:
        """Send a message; return False if there is no connection yet, or nobody takes messages."""
        try:
            self.socket.send(data, _NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self, linger_ms: int = 0) -> None:
        self.monitor.close()
        if self._socket is not None:
            self._socket.close(linger=linger_ms)
            self._socket = None


# Events of ZeroMQ on a socket's connection, which tell why no input comes.


_EVENT = struct.Struct("=HI")
_UP = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_CONNECTED = int(zmq.EVENT_CONNECTED)
_BROKEN = int(zmq.EVENT_DISCONNECTED)
_NOBODY = int(zmq.EVENT_CLOSED)  # of an attempt that found no listener
_REFUSED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_OTHER_MECHANISM = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_BROKEN_OFF = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_ALL = _UP | _CONNECTED | _BROKEN | _NOBODY | _REFUSED | _OTHER_MECHANISM | _BROKEN_OFF
_NOBODY_LISTENS = "nobody listens there"


class SocketMonitor:
    """Monitor of one socket at a time. ``problem``: text of what keeps the socket from connecting; "" if nothing.

    ``refusals``: how often the key was refused since the last connection or change of listener. ``connections``: their
    total number. ``is_up``: there is a connection. ``has_key_mismatch``: the listener broke off the handshake with this
    socket, as a listener with another key does.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.problem = ""
        self.refusals = 0
        self.connections = 0
        self.is_up = self.has_key_mismatch = False
        self._context = context
        self._count = 0
        self._watched: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._has_keys = False

    def watch(self, socket: zmq.Socket[bytes], *, has_keys: bool) -> None:
        """Monitor ``socket``, which has not connected yet, in place of the previous one."""
        self.close()
        self._watched = socket
        self._count += 1
        self._has_keys = has_keys
        address = f"inproc://watch-{id(self)}-{self._count}"  # of one context
        socket.monitor(address, _ALL)
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # so that ZeroMQ never waits for a reader
        self._monitor.connect(address)
        self.is_up = self.has_key_mismatch = False

    @property
    def is_unreachable(self) -> bool:
        return self.problem == _NOBODY_LISTENS

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """Socket to wait for, while one is monitored. It signals once: :meth:`read_events` takes all events."""
        assert self._monitor is not None
        return self._monitor

    def read_events(self) -> None:
        """Process all events so far."""
        if self._monitor is None:
            return
        try:
            while True:
                event, _ = _EVENT.unpack(self._monitor.recv_multipart(_NOBLOCK)[0])
                self._note(event)
        except zmq.Again:
            return

    def _note(self, event: int) -> None:
        if event == _UP:
            self.problem, self.refusals, self.has_key_mismatch = "", 0, False
            self.is_up = True
            self.connections += 1
        elif event == _BROKEN:
            self.is_up = False
        elif event == _REFUSED:
            self.refusals += 1
            self.problem = "it does not let the caller's key in"
        elif event == _OTHER_MECHANISM and self._has_keys:
            self.problem = "it has no keys, and here it is known with some"
        elif event == _OTHER_MECHANISM:
            self.problem = "it takes only callers with keys, and none of its public keys is known here"
        elif event == _BROKEN_OFF and self._has_keys:
            self.refusals, self.has_key_mismatch = 0, True
            self.problem = "it breaks off the handshake: it has other keys than those that are known here"
        elif event == _NOBODY:
            self.problem = _NOBODY_LISTENS
        elif event == _CONNECTED and self.problem in ("", _NOBODY_LISTENS):  # else the text so far says more
            self.problem = "somebody listens there, and does not answer"

    def close(self) -> None:
        """End monitoring. Call it before the monitored socket is closed.

        Otherwise a later event would make ZeroMQ's thread wait for a reader for ever, and make no more connections.
        """
        if self._watched is not None:
            self._watched.disable_monitor()
            self._watched = None
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
