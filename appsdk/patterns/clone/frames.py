"""Messages between clients and publishers: from bytes and to bytes. docs/reference/pattern-frames.md.

0   4  "ICL" and the version
    ?  MessagePack: an array that begins with the name of the message
   -8  8  CRC-64/XZ of all before it, big-endian
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from immortal.protocol import decoding
from immortal.protocol.checksum import crc64
from immortal.protocol.errors import RemoteProtocolError

VERSION = 1
MAGIC = b"ICL" + bytes([VERSION])
_CHECK_SIZE_BYTES = 8
OVERHEAD_BYTES = len(MAGIC) + _CHECK_SIZE_BYTES
Policy = Literal["drop", "block", "disconnect"]
POLICIES: tuple[Policy, ...] = ("drop", "block", "disconnect")


# --- of a client ------------------------------------------------------------------------------------------------------


class Activate(msgspec.Struct, tag="activate", array_like=True, frozen=True, gc=False):
    """Begin a stream, in place of the one before. ``stream``: the client's number for it.

    ``table``, ``number``, ``had``: what it has a copy of, as of when, and which subtrees; "" and 0: nothing.
    ``window_bytes`` may be in flight, ``mark_bytes`` wait; then ``policy`` says what happens. ``relay``: a forwarder,
    which gets everything.
    """

    stream: int
    subtrees: list[str]
    table: str
    number: int
    had: list[str]
    window_bytes: int
    mark_bytes: int
    policy: Policy
    label: str
    relay: bool


class Received(msgspec.Struct, tag="received", array_like=True, frozen=True, gc=False):
    """Acknowledgement: the client has taken in ``total_bytes`` of the stream's parts."""

    stream: int
    total_bytes: int


class Deactivate(msgspec.Struct, tag="deactivate", array_like=True, frozen=True, gc=False):
    """End the stream."""

    stream: int


class Ping(msgspec.Struct, tag="ping", array_like=True, frozen=True, gc=False):
    """Sign of life of a client, once a second, or sooner while it does not know whether anything was lost.

    ``total_bytes``: as in Received.
    """

    stream: int
    total_bytes: int = 0


class Look(msgspec.Struct, tag="look", array_like=True, frozen=True, gc=False):
    """Request for a report, by operators."""


# --- of a publisher ---------------------------------------------------------------------------------------------------


class Activated(msgspec.Struct, tag="activated", array_like=True, frozen=True, gc=False):
    """The stream begins. ``subtrees``: what the client gets of what it asked for.

    ``forgotten``: of keys that were deleted up to this update, not all are known. A forwarder is told of the others.
    """

    stream: int
    table: str
    subtrees: list[str]
    forgotten: int


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True, gc=False):
    """The publisher gives no stream. ``again``: it may later. ``is_behind``: the client's copy is newer."""

    stream: int
    reason: str
    again: bool
    is_behind: bool = False


class Part(msgspec.Struct, tag="part", array_like=True, frozen=True, gc=False):
    """Part of the stream: all changes of the client's subtrees behind ``after``, up to ``number``.

    ``after`` -1: it is everything, in place of what the client has. ``more``: the next part goes on with it, and only
    then it is whole. ``changes``: key, number and value, None for a key that is gone. ``is_conflated``: of a key only
    the last change is there.
    """

    after: int
    number: int
    more: bool
    is_conflated: bool
    changes: list[tuple[str, int, bytes | None]]


class Dropped(msgspec.Struct, tag="dropped", array_like=True, frozen=True, gc=False):
    """Notice that ``count`` changes in all are not told one by one, as the client was too slow: the next part is
    conflated.
    """

    stream: int
    count: int


class Deactivated(msgspec.Struct, tag="deactivated", array_like=True, frozen=True, gc=False):
    """The stream has ended, as the client asked."""

    stream: int


class Finished(msgspec.Struct, tag="finished", array_like=True, frozen=True, gc=False):
    """The publisher has ended the stream. ``again``: the client may begin it anew."""

    stream: int
    reason: str
    again: bool


class Pong(msgspec.Struct, tag="pong", array_like=True, frozen=True, gc=False):
    """Answer to a ping. ``stream`` 0: there is none. ``total_bytes``: of the stream's parts sent so far; -1: the
    publisher, of an earlier build, does not say.
    """

    stream: int
    total_bytes: int = -1


class StreamReport(msgspec.Struct, frozen=True):
    """Report on one stream, for operators. Sizes in bytes: not yet acknowledged; waiting behind that."""

    stream: str
    name: str
    label: str
    subtrees: tuple[str, ...]
    policy: str
    in_flight_bytes: int
    waiting_bytes: int
    mark_bytes: int
    dropped: int
    state: str


class Report(msgspec.Struct, tag="report", array_like=True, frozen=True, gc=False):
    """Report of a publisher. ``ended``: number of streams ended for being slow, and of silent ones, since the start."""

    table: str
    number: int
    rows: int
    upstream: str
    ended_slow: int
    ended_silent: int
    streams: list[StreamReport]


Request = Activate | Received | Deactivate | Ping | Look
Answer = Activated | Refused | Part | Dropped | Deactivated | Finished | Pong | Report

M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()
_requests: decoding.Decoder[Request] = decoding.Decoder(Request)
_answers: decoding.Decoder[Answer] = decoding.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    data = MAGIC + _encoder.encode(message)
    return data + crc64(data).to_bytes(_CHECK_SIZE_BYTES, "big")


def decode_request(data: bytes) -> Request:
    """Decode a client's message. Raises RemoteProtocolError."""
    return _decode(data, _requests)


def decode_answer(data: bytes) -> Answer:
    """Decode a publisher's message. Raises RemoteProtocolError."""
    return _decode(data, _answers)


def _decode(data: bytes, decoder: decoding.Decoder[M]) -> M:
    if len(data) < OVERHEAD_BYTES or data[:3] != MAGIC[:3]:
        raise RemoteProtocolError(f"{len(data)} bytes that are no message of a clone: it begins with {data[:4]!r}")
    if data[3] != VERSION:
        raise RemoteProtocolError(f"a message of version {data[3]}, {VERSION} is known here: upgrade the older side")
    body = memoryview(data)[:-_CHECK_SIZE_BYTES]
    if crc64(body) != int.from_bytes(data[-_CHECK_SIZE_BYTES:], "big"):
        raise RemoteProtocolError(f"a message of {len(data)} bytes was damaged: its check bytes do not match")
    try:
        return decoder.decode(body[len(MAGIC) :])
    except decoding.DecodeError as error:
        raise RemoteProtocolError(f"a message that can't be read: {error}") from None
