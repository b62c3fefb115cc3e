"""CURVE keys and roles, and the ZAP authenticator that admits callers.

Keys are 32 bytes, here always as the 40 characters of their Z85 text.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import zmq
from msgspec import Struct, field
from zmq.utils import z85

from immortal.coordinator.messenger.errors import MessengerError
from immortal.coordinator.messenger.sockets import Context, Socket, WakeupEvent, Warnings, receive_parts

ZAP_DOMAIN = b"immortal"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key and its secret one, which no text of this object shows."""

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
    """Role of a key's owner, which says what it may send."""

    INSTANCE = "instance"  # a peer's messages
    CLIENT = "client"  # clients' frames
    OWNER = "owner"  # the key is the receiver's own: clients' frames of whoever can read its secrets
    OPERATOR = "operator"  # neither: operators ask on the instance's machine, at its control socket

    def may_send(self, clients_frame: bool) -> bool:
        """Return whether the role may send a client's frame (``clients_frame``), else a peer's message."""
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


def serve_with(socket: Socket, pair: KeyPair) -> None:
    """Let ``socket`` take connections only with CURVE, and only if the ZAP authenticator admits them."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an authenticator nobody gets in, instead of everybody


def connect_with(socket: Socket, pair: KeyPair, server_key: str) -> None:
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
    """Admits the keys of ``callers`` and counts the connections (ZAP, ZeroMQ's RFC 27). One per ZeroMQ context.

    ZeroMQ asks it about each CURVE connection by an inproc message with the public key, before it reads what the
    connection brings. A thread of its own answers, so that no caller waits while the owner waits for a disk.
    """

    def __init__(self, context: Context, callers: Mapping[str, str], clock_ns: Callable[[], int]) -> None:
        self.callers = callers
        self.refused = 0
        self.let_in: Counter[str] = Counter()  # connections, by key
        self.last_refused = ""  # key, and where from
        self._warnings = Warnings(clock_ns)
        self._socket: Socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(ZAP_ENDPOINT)
        except zmq.ZMQError as error:
            self._socket.close()
            raise MessengerError(
                f"the ZeroMQ context has a gate already ({error.strerror}): a messenger with keys needs its own context"
            ) from error
        self._wake = WakeupEvent()
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake.descriptor, zmq.POLLIN)
        with self._socket:
            while self._wake.descriptor not in dict(poller.poll()):
                while (parts := receive_parts(self._socket)) is not None:
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
        """Stop answering: nobody is let in any more."""
        self._wake.signal()
        self._thread.join()
        self._wake.close()
