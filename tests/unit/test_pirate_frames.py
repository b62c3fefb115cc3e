"""What clients and servers of the pirate say: every byte, and nothing else is taken for it."""

from __future__ import annotations

import random

import pytest

from immortal.appsdk.patterns.pirate.frames import (
    BODY_SIZE_BYTES_MAX,
    MAGIC,
    NUMBER_MAX,
    OVERHEAD_BYTES,
    Frame,
    Kind,
    decode_frame,
    encode_frame,
)
from immortal.protocol.checksum import crc64_reference
from immortal.protocol.errors import LimitExceededError, RemoteProtocolError

FRAMES = [
    Frame(Kind.PING),
    Frame(Kind.PONG, value=2500, body=b"sixteen bytes id"),
    Frame(Kind.PONG),
    Frame(Kind.REQUEST, 7, 3, "monthly-2026-11", b"debit ada 100"),
    Frame(Kind.REQUEST, NUMBER_MAX, 0, "ü", b""),
    Frame(Kind.REPLY, 7, body=b"900"),
    Frame(Kind.FAILED, 7, body=b"ValueError\nno such account"),
    Frame(Kind.GONE, 7),
    Frame(Kind.REFUSED, 7, body=b"why"),
    Frame(Kind.BUSY, 7),
]


def made(head: bytes, rest: bytes = b"") -> bytes:
    """With check bytes that fit."""
    return head + rest + crc64_reference(head + rest).to_bytes(8, "big")


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame.kind.name)
def test_there_and_back(frame: Frame) -> None:
    assert decode_frame(encode_frame(frame)) == frame


def test_its_bytes() -> None:
    head = b"IPR\x01\x03" + (7).to_bytes(8, "big") + (3).to_bytes(8, "big") + b"\x03"
    assert encode_frame(Frame(Kind.REQUEST, 7, 3, "web", b"hello")) == made(head, b"webhello")


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame.kind.name)
def test_no_part_of_it_no_more_of_it_and_no_flipped_bit(frame: Frame) -> None:
    data = encode_frame(frame)
    for size in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            decode_frame(data[:size])
    with pytest.raises(RemoteProtocolError):
        decode_frame(data + b"\0")
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RemoteProtocolError):
            decode_frame(bytes(damaged))


def number(value: int) -> bytes:
    return value.to_bytes(8, "big")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "no frame"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "no frame"),
        (made(MAGIC + b"\x02\x01" + bytes(17)), "version 2, 1 is known here: upgrade"),
        (made(MAGIC + b"\x01\x00" + bytes(17)), "can't be read"),
        (made(MAGIC + b"\x01\x09" + bytes(17)), "can't be read"),
        (made(MAGIC + b"\x01\x03" + number(1) + number(0) + b"\x00"), "REQUEST with the client ID ''"),
        (made(MAGIC + b"\x01\x03" + number(1) + number(0) + b"\x01", b"\xff"), "can't be read"),
        (made(MAGIC + b"\x01\x03" + number(1) + number(0) + b"\x02", b"x"), "cut off"),
        (made(MAGIC + b"\x01\x03" + number(1) + number(0) + b"\x41", b"x" * 65), "client ID of 65 bytes, at most 64"),
        (made(MAGIC + b"\x01\x03" + number(0) + number(0) + b"\x01", b"x"), "request 0"),
        (made(MAGIC + b"\x01\x03" + number(2**63) + number(0) + b"\x01", b"x"), "request 9223372036854775808"),
        (made(MAGIC + b"\x01\x03" + number(3) + number(4) + b"\x01", b"x"), "all below 4 settled"),
        (made(MAGIC + b"\x01\x04" + number(3) + number(0) + b"\x01", b"x"), "REPLY with the client ID 'x'"),
        (made(MAGIC + b"\x01\x04" + number(3) + number(1) + b"\x00"), "REPLY with the value 1"),
        (made(MAGIC + b"\x01\x01" + bytes(17), b"x"), "PING with 1 bytes"),
        (made(MAGIC + b"\x01\x02" + bytes(17), b"x"), "a store has 16"),
    ],
)
def test_what_is_none(data: bytes, text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        decode_frame(data)


def test_a_huge_body() -> None:
    head = MAGIC + b"\x01\x04" + number(1) + number(0) + b"\x00"
    with pytest.raises(LimitExceededError, match=f"{BODY_SIZE_BYTES_MAX + 1} bytes, at most {BODY_SIZE_BYTES_MAX}"):
        decode_frame(head + bytes(BODY_SIZE_BYTES_MAX + 1 + OVERHEAD_BYTES - len(head)))


def test_garbage_raises_what_is_documented() -> None:
    chance = random.Random(1)
    for _ in range(20_000):
        start = chance.choice([b"", MAGIC, MAGIC + b"\x01", MAGIC + b"\x01\x03"])
        data = start + chance.randbytes(chance.randrange(64))
        with pytest.raises(RemoteProtocolError):
            decode_frame(chance.choice([data, made(data[: len(data) // 2]) if len(data) < 40 else data]))
