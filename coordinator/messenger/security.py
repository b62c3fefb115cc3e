"""Who a messenger is, whom it lets in, and whom it expects to answer: CURVE keys and the names that they stand for.

Keys are 32 bytes, here always as the 40 characters of their Z85 text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import zmq
from msgspec import Struct, field

from immortal.coordinator.messenger.sockets import Socket

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
    def fits(self) -> bool:
        """Whether the public key is that of the secret one."""
        try:
            return zmq.curve_public(self.secret.encode()) == self.public.encode()
        except (zmq.ZMQError, ValueError):  # it is no key
            return False


class Role(StrEnum):
    """What the owner of a key is, and so what it may send."""

    INSTANCE = "instance"  # a peer's messages
    CLIENT = "client"  # clients' frames
    OWNER = "owner"  # the key is the receiver's own: clients' frames of whoever can read its secrets
    OPERATOR = "operator"  # neither: operators ask on the instance's machine, at its control socket

    def may_send(self, clients_frame: bool) -> bool:
        """A client's frame, or else a peer's message."""
        if self is Role.INSTANCE:
            return not clients_frame
        return clients_frame and self is not Role.OPERATOR


class Security(Struct, frozen=True):
    """What a messenger goes by until it is given another one; see :meth:`Messenger.secure`.

    ``own``: what it shows to others. ``callers``: the name of each public key that may send to it; nobody else gets
    a connection. ``servers``: the public keys that may answer at an endpoint, the likeliest first; with none the
    endpoint is connected to in plain. ``roles``: of the keys of ``callers``; one that is not in there is an instance's.
    """

    own: KeyPair
    callers: Mapping[str, str]
    servers: Callable[[str], Sequence[str]]
    roles: Mapping[str, Role] = field(default_factory=dict)


def serve_with(socket: Socket, pair: KeyPair) -> None:
    """Let ``socket`` take connections only with CURVE, and only after the gate's consent."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a gate nobody gets in, instead of everybody


def connect_with(socket: Socket, pair: KeyPair, server_key: str) -> None:
    """Let ``socket`` connect as the owner of ``pair``, to whoever has the secret key of ``server_key``."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
