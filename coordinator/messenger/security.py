"""Security of the messenger: CURVE keys and roles, the ZAP authenticator, limits on unauthenticated connections.

Keys are 32 bytes, here always as the 40 characters of their Z85 text.

Connections that have not authenticated yet have limits on bytes, time and number. ZeroMQ has one size limit for all
input. It must admit the largest message, and it holds for the commands of a handshake as well. So a thread asks the
kernel how many bytes each such connection has sent, and ends those that sent more than a handshake has. It duplicates
each descriptor, since ZeroMQ can close it, and the number be reused.

ZeroMQ reports that a handshake succeeded, but not whose. With CURVE the kernel tells: a peer has acknowledged more
bytes than the greeting and the Welcome only if it was sent the Ready, which ends the handshake. Without CURVE nobody is
authenticated. Then as many of the watched connections can send much as handshakes have succeeded: no honest connection
is ended, and of a flood at most as many survive as honest ones arrived in that time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket as tcp_socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import zmq
from msgspec import Struct, field
from zmq.utils import z85

from immortal.coordinator.messenger import limits, sockets
from immortal.coordinator.messenger.envelope import MessengerError
from immortal.protocol.unfinished_messages import UnfinishedMessages

ZAP_DOMAIN = b"immortal"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Pair of a public key and its secret key, which no text of this object shows."""

    public: str
    secret: str = dataclasses.field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    @property
    def matches(self) -> bool:
        """True if the public key belongs to the secret one."""
        try:
            return zmq.curve_public(self.secret.encode()) == self.public.encode()
        except (zmq.ZMQError, ValueError):  # it is no key
            return False


class Role(StrEnum):
    """Role of a key's owner: the kind of messages that it may send."""

    INSTANCE = "instance"  # a peer's messages
    CLIENT = "client"  # clients' frames
    OWNER = "owner"  # the key is the receiver's own: clients' frames of whoever can read its secrets
    OPERATOR = "operator"  # neither: operators ask on the instance's machine, at its control socket

    def may_send(self, clients_frame: bool) -> bool:
        """Return True if the role may send a client's frame (``clients_frame``), else a peer's message."""
        if self is Role.INSTANCE:
            return not clients_frame
        return clients_frame and self is not Role.OPERATOR


class Security(Struct, frozen=True):
    """Keys of a messenger and those of its peers; :meth:`Messenger.secure` replaces it.

    ``own``: the key pair that it shows to others. ``callers``: the name of each public key that may send to it; nobody
    else gets a connection. ``servers``: the public keys that may answer at an endpoint, the likeliest first; with none
    the connection is not encrypted. ``roles``: roles of the keys in ``callers``; a key without one is an instance's.
    """

    own: KeyPair
    callers: Mapping[str, str]
    servers: Callable[[str], Sequence[str]]
    roles: Mapping[str, Role] = field(default_factory=dict)


def serve_with(socket: sockets.Socket, pair: KeyPair) -> None:
    """Let ``socket`` take connections only with CURVE, and only if the ZAP authenticator admits them."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an authenticator nobody gets in, instead of everybody


def connect_with(socket: sockets.Socket, pair: KeyPair, server_key: str) -> None:
    """Let ``socket`` connect as the owner of ``pair``, to whoever has the secret key of ``server_key``."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())


ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_ZAP_REQUEST_PARTS = (
    9  # of a question about CURVE: routing ID, empty, version, request, domain, address, identity, mechanism, key
)


class ZapAuthenticator:
    """ZAP authenticator (ZeroMQ's RFC 27): admits the keys of ``callers`` and counts connections. One per context.

    ZeroMQ asks it about each CURVE connection by an inproc message with the public key, before it reads the
    connection's messages. A thread of its own answers, so that no caller waits while the owner waits for a disk.
    """

    def __init__(self, context: sockets.Context, callers: Mapping[str, str], clock_ns: Callable[[], int]) -> None:
        self.callers = callers
        self.refused = 0
        self.let_in: Counter[str] = Counter()  # connections, by key
        self.last_refused = ""  # key, and where from
        self._warnings = sockets.Warnings(clock_ns)
        self._socket: sockets.Socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(ZAP_ENDPOINT)
        except zmq.ZMQError as error:
            self._socket.close()
            raise MessengerError(
                f"the ZeroMQ context has a gate already ({error.strerror}): a messenger with keys needs its own context"
            ) from error
        self._wake = sockets.WakeupEvent()
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake.descriptor, zmq.POLLIN)
        with self._socket:
            while self._wake.descriptor not in dict(poller.poll()):
                while (parts := sockets.receive_parts(self._socket)) is not None:
                    self._answer(parts)

    def _answer(self, parts: list[bytes]) -> None:
        if len(parts) < 4:
            return  # not a question of ZeroMQ
        known = (
            len(parts) == _ZAP_REQUEST_PARTS
            and parts[2] == _ZAP_VERSION
            and parts[7] == b"CURVE"
            and len(parts[8]) == 32
        )
        key = z85.encode(parts[8]).decode() if known else ""
        if key in self.callers:
            self.let_in[key] += 1
            answer = [b"200", b"OK", key.encode(), b""]
        else:
            answer = [b"400", b"this key may not call here", b"", b""]
            self.refused += 1
            origin = parts[5].decode(errors="replace") if known else "somebody"
            self.last_refused = f"{key} from {origin}"
            self._warnings.warn(f"a connection from {origin}: its key {key} is of nobody who may call here", "refused")
        self._socket.send_multipart([parts[0], b"", _ZAP_VERSION, parts[3], *answer], zmq.NOBLOCK)

    def close(self) -> None:
        """Stop answering: nobody is admitted any more."""
        self._wake.signal()
        self._thread.join()
        self._wake.close()


_ACCEPTED = int(zmq.EVENT_ACCEPTED)
_SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_OTHER_MECHANISM = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_SILENT = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
_MONITORED = _ACCEPTED | _SUCCEEDED | _OTHER_MECHANISM | _SILENT | _DISCONNECTED

_TCP_INFO = struct.Struct("=120xQQ")  # bytes acknowledged, bytes received: since Linux 4.1
_BEFORE_READY_BYTES = 64 + 2 + 168  # what a CURVE server sends before its Ready: greeting, Welcome


class HandshakeGuard:
    """Guard that ends unauthenticated connections at ``socket`` which send too much, or are too many.

    ``socket`` is not bound yet. ``refused``: number of ended connections; with ``secured``, also of those that failed
    by themselves. ``unfinished``: gets all connections, and is checked in this guard's thread.
    """

    def __init__(
        self,
        context: sockets.Context,
        socket: sockets.Socket,
        address: str,
        secured: bool,
        warnings: sockets.Warnings,
        unfinished: UnfinishedMessages | None = None,
    ) -> None:
        self.refused = 0
        self.endpoint = ""
        self._secured = secured
        self._warnings = warnings
        self._socket = socket
        self._monitor = sockets.open_monitor(context, socket, address, _MONITORED)
        self._unauthenticated: dict[int, tcp_socket.socket] = {}  # by ZeroMQ's descriptor, the oldest first
        self._accepted_s: dict[int, float] = {}  # when each of these was accepted
        self._oversized_since_s: dict[int, float] = {}  # when each of them was first seen to have sent too much
        self._succeeded_count = 0  # of these; without CURVE
        self._handshake_failed = False  # the connection that ends next had not succeeded
        self._ending: dict[int, tcp_socket.socket] = {}  # until ZeroMQ has noticed
        self._unfinished = unfinished
        self._wake = sockets.WakeupEvent()
        self._thread = threading.Thread(target=self._run, name="handshakes", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._wake.descriptor, zmq.POLLIN)
        unfinished = self._unfinished
        if unfinished is not None:
            poller.register(unfinished.descriptor, zmq.POLLIN)
        check_due_s = 0.0
        while self._wake.descriptor not in (ready := dict(poller.poll(self._wait_ms()))):
            if self._monitor in ready:
                self._read_monitor()
            if unfinished is not None:
                unfinished.check()
            now_s = time.monotonic()
            if self._unauthenticated and now_s >= check_due_s:
                check_due_s = now_s + limits.HANDSHAKE_POLL_MS / 1000
                self._check_sizes()

    def _wait_ms(self) -> int | None:
        wait_ms = None if self._unfinished is None else self._unfinished.wait_ms()
        return min(wait_ms or limits.HANDSHAKE_POLL_MS, limits.HANDSHAKE_POLL_MS) if self._unauthenticated else wait_ms

    def _read_monitor(self) -> None:
        for event, value in sockets.monitored_events(self._monitor):
            if event == _ACCEPTED:
                self._accepted(value)
            elif event == _DISCONNECTED:
                self._forget(value, succeeded=not self._handshake_failed)
                if self._unfinished is not None:
                    self._unfinished.remove(value)
                self._handshake_failed = False
            elif event == _SUCCEEDED:
                self._succeeded_count += 1
            else:
                self._handshake_failed = True
                if self._secured:
                    self.refused += 1
                    what = "a connection was refused that has no key, or expects another one here"
                    self._warnings.warn(f"at {self.endpoint}: {what}")

    def _accepted(self, descriptor: int) -> None:
        self._forget(descriptor)
        connection = self._duplicate(descriptor)
        if connection is not None:
            if self._unfinished is not None:
                self._unfinished.endpoint = self.endpoint
                self._unfinished.add(descriptor)
            self._unauthenticated[descriptor] = connection
            self._accepted_s[descriptor] = time.monotonic()
        if len(self._unauthenticated) > limits.HANDSHAKES_MAX:
            oldest = next(iter(self._unauthenticated))  # a handshake takes milliseconds: this one most likely idles
            self._end(oldest, f"more than {limits.HANDSHAKES_MAX} connections have not shown who they are")

    def _duplicate(self, descriptor: int) -> tcp_socket.socket | None:
        """Duplicate ZeroMQ's descriptor; None if the connection has ended by now, as the number can be reused."""
        own = -1
        try:
            own = os.dup(descriptor)
            connection = tcp_socket.socket(fileno=own)
        except OSError:
            if own >= 0:
                os.close(own)
            return None
        if connection.family != tcp_socket.AF_UNIX and self.endpoint:
            with contextlib.suppress(OSError):
                if self.endpoint.endswith(f":{connection.getsockname()[1]}"):
                    return connection
        elif self.endpoint.startswith("ipc:") == (connection.family == tcp_socket.AF_UNIX):
            return connection
        connection.close()
        return None

    def _check_sizes(self) -> None:
        too_much = []
        now_s = time.monotonic()
        succeeded_s = now_s - limits.HANDSHAKE_TIMEOUT_MS / 1000 - 1  # after that time ZeroMQ has ended all others
        for descriptor, connection in list(self._unauthenticated.items()):
            acknowledged_bytes, received_bytes = _tcp_byte_counts(connection)
            is_known = self._secured and acknowledged_bytes > _BEFORE_READY_BYTES
            if is_known or self._accepted_s[descriptor] < succeeded_s:
                self._forget(descriptor, succeeded=True)
            elif received_bytes > limits.HANDSHAKE_SIZE_BYTES_MAX:
                # Without CURVE a message may follow at once, while ZeroMQ is busy with other connections.
                too_much_s = self._oversized_since_s.setdefault(descriptor, now_s)
                if self._secured or now_s - too_much_s >= limits.HANDSHAKE_PLAIN_GRACE_MS / 1000:
                    too_much.append((received_bytes, descriptor))
        if too_much and not self._secured:
            self._read_monitor()  # a success may have come before the bytes were counted
            too_much = sorted(one for one in too_much if one[1] in self._unauthenticated)[self._succeeded_count :]
        for received_bytes, descriptor in too_much:
            self._end(
                descriptor,
                f"a connection has sent {received_bytes} bytes and not shown who it is, "
                f"{limits.HANDSHAKE_SIZE_BYTES_MAX} are enough",
            )

    def _end(self, descriptor: int, reason: str) -> None:
        connection = self._ending[descriptor] = self._unauthenticated.pop(descriptor)
        with contextlib.suppress(OSError):
            connection.shutdown(tcp_socket.SHUT_RDWR)
        if not self._secured:  # else ZeroMQ reports the failure
            self.refused += 1
        self._warnings.warn(f"at {self.endpoint}: {reason}", "ended")

    def _forget(self, descriptor: int, *, succeeded: bool = False) -> None:
        self._accepted_s.pop(descriptor, None)
        self._oversized_since_s.pop(descriptor, None)
        if (connection := self._unauthenticated.pop(descriptor, None)) is not None:
            connection.close()
            if succeeded:
                self._succeeded_count = max(0, self._succeeded_count - 1)
        if (connection := self._ending.pop(descriptor, None)) is not None:
            connection.close()

    def close(self) -> None:
        """Stop watching. The owner of the socket calls this before it closes the socket."""
        self._wake.signal()
        self._thread.join()
        self._wake.close()
        self._socket.disable_monitor()
        self._monitor.close()
        for descriptor in (*self._unauthenticated, *self._ending):
            self._forget(descriptor)
        if self._unfinished is not None:
            self._unfinished.close()


def _tcp_byte_counts(connection: tcp_socket.socket) -> tuple[int, int]:
    """Return the bytes (acknowledged by the other end, received from it); (0, 0) if the kernel does not count them."""
    try:
        info = connection.getsockopt(tcp_socket.IPPROTO_TCP, tcp_socket.TCP_INFO, _TCP_INFO.size)
    except OSError:  # a Unix socket: the file system decides who may use it
        return 0, 0
    acknowledged_bytes, received_bytes = _TCP_INFO.unpack(info)
    return acknowledged_bytes, received_bytes
