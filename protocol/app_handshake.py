"""Handshake in which an app and its coordinator prove that both know the instance's secret, without sending it.

    app          Challenge    its nonce
    coordinator  Proof        its nonce, its proof, the instance's name
    app          Proof        its proof

A proof is an HMAC-SHA256 with the secret as its key, over its maker's role, both nonces, the instance and the
connection. So a proof that is repeated, from the other side, or of another connection is wrong. No I/O here.
"""

from __future__ import annotations

import enum
import hmac

from msgspec import Struct

from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.messages import MessageType, decode_name, encode_message, encode_name, require_end

CHALLENGE_VERSION = 1
NONCE_SIZE_BYTES = 32
PROOF_SIZE_BYTES = 32
ANSWER_SIZE_BYTES_MAX = 4096  # limit before the other side is known: a Proof has about 370 bytes, a Refusal more

_MAPPED = "::ffff:"  # prefix of an IPv4 address on an IPv6 socket


class Role(enum.StrEnum):
    """Side that makes a proof."""

    APP = "app"
    COORDINATOR = "coordinator"


class Handshake(Struct, frozen=True):
    """Values of one connection that both sides know. ``channel``: see :func:`channel_of`."""

    app_nonce: bytes
    coordinator_nonce: bytes
    instance: str
    channel: str

    def proof(self, secret: bytes, role: Role) -> bytes:
        """Return the proof of ``role``, PROOF_SIZE_BYTES bytes."""
        said = encode_name(role) + self.app_nonce + self.coordinator_nonce
        return hmac.digest(secret, said + encode_name(self.instance) + encode_name(self.channel), "sha256")

    def is_proven(self, secret: bytes, role: Role, proof: bytes) -> bool:
        """Compare ``proof`` with that of ``role``, in constant time."""
        return hmac.compare_digest(proof, self.proof(secret, role))


def channel_of(app: object, coordinator: object) -> str:
    """Return the text that ties a proof to one TCP connection on this machine.

    ``app``, ``coordinator``: the ends' socket addresses.

    Both ends see the same two addresses, unless a process between them relays the messages. The text is "" for a Unix
    socket, whose owner is known, and for addresses of other machines, which can be translated on the way.
    """
    ends = [(end[0].removeprefix(_MAPPED), end[1]) for end in (app, coordinator) if isinstance(end, tuple)]
    if len(ends) < 2 or not all(host.startswith("127.") or host == "::1" for host, _ in ends):
        return ""
    return " ".join(f"{host} {port}" for host, port in ends)


class Answer(Struct, frozen=True):
    """Proof message of a coordinator."""

    coordinator_nonce: bytes
    proof: bytes
    instance: str


def encode_challenge(app_nonce: bytes) -> bytes:
    """Encode a Challenge, the first message of an app that has a secret."""
    return encode_message(MessageType.CHALLENGE, bytes((CHALLENGE_VERSION,)) + app_nonce)


def decode_challenge(data: bytes) -> bytes:
    """Decode a Challenge: the app's nonce. Raises RemoteProtocolError."""
    if not data or data[0] != CHALLENGE_VERSION:
        raise RemoteProtocolError(f"a Challenge of version {data[0] if data else 'none'}, expected {CHALLENGE_VERSION}")
    return _check_size("a Challenge's nonce", data[1:], NONCE_SIZE_BYTES)


def encode_answer(answer: Answer) -> bytes:
    """Encode the coordinator's Proof message, which needs its own control record."""
    return encode_message(MessageType.PROOF, answer.coordinator_nonce + answer.proof + encode_name(answer.instance))


def decode_answer(data: bytes) -> Answer:
    """Decode a coordinator's Proof. Raises RemoteProtocolError."""
    at = NONCE_SIZE_BYTES + PROOF_SIZE_BYTES
    if len(data) <= at:
        raise RemoteProtocolError(f"a coordinator's Proof of {len(data)} bytes, more than {at} were expected")
    instance, end = decode_name(data, at)
    require_end("a coordinator's Proof", data, end)
    return Answer(data[:NONCE_SIZE_BYTES], data[NONCE_SIZE_BYTES:at], instance)


def encode_proof(proof: bytes) -> bytes:
    """Encode the app's Proof message; its Hello must follow."""
    return encode_message(MessageType.PROOF, proof)


def decode_proof(data: bytes) -> bytes:
    """Decode an app's Proof. Raises RemoteProtocolError."""
    return _check_size("an app's Proof", data, PROOF_SIZE_BYTES)


def _check_size(name: str, data: bytes, size_bytes: int) -> bytes:
    if len(data) != size_bytes:
        raise RemoteProtocolError(f"{name} of {len(data)} bytes, {size_bytes} were expected")
    return data
