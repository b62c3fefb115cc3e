"""What an app and its coordinator prove to each other, and what of it depends on what."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from msgspec.structs import replace

from immortal.protocol.app_handshake import (
    Answer,
    Handshake,
    Role,
    channel_of,
    decode_answer,
    decode_challenge,
    decode_proof,
    encode_answer,
    encode_challenge,
    encode_proof,
)
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.messages import MessageType, decode_message

SECRET = b"a" * 64
HANDSHAKE = Handshake(b"\1" * 32, b"\2" * 32, "counter", "127.0.0.1 40001 127.0.0.1 7002")


@pytest.mark.parametrize(("role", "front"), [(Role.APP, b"\x06app"), (Role.COORDINATOR, b"\x16coordinator")])
def test_a_proof_is_as_documented(role: Role, front: bytes) -> None:
    """Written down from docs/WIRE.md, without the encoders."""
    said = front + b"\1" * 32 + b"\2" * 32 + b"\x0ecounter" + b"\x3c" + HANDSHAKE.channel.encode()
    assert HANDSHAKE.proof(SECRET, role) == hmac.new(SECRET, said, hashlib.sha256).digest()


def test_whatever_differs_makes_another_proof() -> None:
    others = [
        replace(HANDSHAKE, app_nonce=b"\3" * 32),
        replace(HANDSHAKE, coordinator_nonce=b"\3" * 32),
        replace(HANDSHAKE, app_nonce=HANDSHAKE.coordinator_nonce, coordinator_nonce=HANDSHAKE.app_nonce),
        replace(HANDSHAKE, instance="counte"),
        replace(HANDSHAKE, channel="127.0.0.1 40002 127.0.0.1 7002"),
        replace(HANDSHAKE, channel=""),
    ]
    proof = HANDSHAKE.proof(SECRET, Role.APP)
    assert HANDSHAKE.is_proven(SECRET, Role.APP, proof)
    assert not HANDSHAKE.is_proven(SECRET, Role.COORDINATOR, proof)
    assert not HANDSHAKE.is_proven(SECRET[:-1] + b"b", Role.APP, proof)
    assert not HANDSHAKE.is_proven(SECRET, Role.APP, proof[:-1])
    assert not any(other.is_proven(SECRET, Role.APP, proof) for other in others)


@pytest.mark.parametrize(
    ("app", "coordinator", "channel"),
    [
        (("127.0.0.1", 40001), ("127.0.0.1", 7002), "127.0.0.1 40001 127.0.0.1 7002"),
        (("::ffff:127.0.0.1", 40001, 0, 0), ("127.0.0.2", 7002), "127.0.0.1 40001 127.0.0.2 7002"),
        (("::1", 40001, 0, 0), ("::1", 7002, 0, 0), "::1 40001 ::1 7002"),
        (("192.0.2.1", 40001), ("127.0.0.1", 7002), ""),
        (("127.0.0.1", 40001), ("192.0.2.1", 7002), ""),
        ("", "/run/app.sock", ""),
        (b"\0abstract", "", ""),
    ],
)
def test_what_a_connection_is_called(app: object, coordinator: object, channel: str) -> None:
    assert channel_of(app, coordinator) == channel


def test_messages_there_and_back() -> None:
    def data_of(message: bytes, expected: int) -> bytes:
        message_type, start, end = decode_message(message)
        assert (message_type, end) == (expected, len(message))
        return message[start:end]

    answer = Answer(b"\2" * 32, b"\3" * 32, "counter")
    assert decode_challenge(data_of(encode_challenge(b"\1" * 32), MessageType.CHALLENGE)) == b"\1" * 32
    assert decode_answer(data_of(encode_answer(answer), MessageType.PROOF)) == answer
    assert decode_proof(data_of(encode_proof(b"\3" * 32), MessageType.PROOF)) == b"\3" * 32


@pytest.mark.parametrize("data", [b"", b"\1", b"\1" * 32, b"\2" + b"\1" * 32, b"\1" * 34])
def test_what_is_no_challenge(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="Challenge"):
        decode_challenge(data)


@pytest.mark.parametrize("data", [b"", bytes(64), bytes(64) + b"\x04a", bytes(64) + b"\x02ab", bytes(64) + b"\x02\xff"])
def test_what_is_no_answer(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_answer(data)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_what_is_no_proof(size: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"an app's Proof of {size} bytes, 32 were expected"):
        decode_proof(bytes(size))
