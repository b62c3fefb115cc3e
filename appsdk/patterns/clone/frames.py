"""Messages between clients and publishers: encoding and decoding. docs/reference/pattern-frames.md.

0   4  "ICL" and the version
    ?  MessagePack: an array that begins with the name of the message
      -8  8  CRC-64/XZ of all bytes before, big-endian
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


# --- from clients -----------------------------------------------------------------------------------------------------


class Activate(msgspec.Struct, tag="activate", array_like=True, frozen=True, gc=False):
    """Request for a stream, which replaces an earlier one. ``stream``: the client's number for it.

    ``table``, ``number``, ``had``: the client's copy: of which table, at which update, which subtrees; "" and 0: none.
    ``window_bytes`` can be in flight and ``mark_bytes`` can wait; above that ``policy`` applies. ``relay``: the client
    is a forwarder, which gets everything.
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
    """Acknowledgement: the client has processed ``total_bytes`` of the stream's parts."""

    stream: int
    total_bytes: int


class Deactivate(msgspec.Struct, tag="deactivate", array_like=True, frozen=True, gc=False):
    """Request to end the stream."""

    stream: int


class Ping(msgspec.Struct, tag="ping", array_like=True, frozen=True, gc=False):
    """Sign of life of a client, once a second, or sooner while parts may have been lost.

    ``total_bytes``: as in Received.
    """

    stream: int
    total_bytes: int = 0


class Look(msgspec.Struct, tag="look", array_like=True, frozen=True, gc=False):
    """Request of an operator for a report."""


# --- from publishers --------------------------------------------------------------------------------------------------


class Activated(msgspec.Struct, tag="activated", array_like=True, frozen=True, gc=False):
    """Begin of a stream. ``subtrees``: the part of the requested ones that the client gets.

    ``forgotten``: deletions up to this update are incomplete. A forwarder gets the others.
    """

    stream: int
    table: str
    subtrees: list[str]
    forgotten: int


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True, gc=False):
    """Refusal of a stream. ``again``: a later request can succeed. ``is_behind``: the client's copy is newer."""

    stream: int
    reason: str
    again: bool
    is_behind: bool = False


class Part(msgspec.Struct, tag="part", array_like=True, frozen=True, gc=False):
    """Part of the stream: all changes of the client's subtrees after ``after``, up to ``number``.

    ``after`` -1: it has everything, and replaces the client's copy. ``more``: the next part continues it, and only
    together they are whole. ``changes``: key, number and value, None for a key that is gone. ``is_conflated``: it has
    only the last change of each key.
    """

    after: int
    number: int
    more: bool
    is_conflated: bool
    changes: list[tuple[str, int, bytes | None]]


class Dropped(msgspec.Struct, tag="dropped", array_like=True, frozen=True, gc=False):
    """Notice that ``count`` changes in all are not sent singly, as the client was too slow: the next part is
    conflated.
    """

    stream: int
    count: int


class Deactivated(msgspec.Struct, tag="deactivated", array_like=True, frozen=True, gc=False):
    """Acknowledgement of the stream's end."""

    stream: int


class Finished(msgspec.Struct, tag="finished", array_like=True, frozen=True, gc=False):
    """End of the stream by the publisher. ``again``: the client can request a new one."""

    stream: int
    reason: str
    again: bool


class Pong(msgspec.Struct, tag="pong", array_like=True, frozen=True, gc=False):
    """Answer to a ping. ``stream`` 0: there is none. ``total_bytes``: of the stream's parts sent so far; -1: unknown,
    from a publisher of an earlier build.
    """

    stream: int
    total_bytes: int = -1


class StreamReport(msgspec.Struct, frozen=True):
    """Report on one stream, for operators. Sizes in bytes: in flight, and waiting beyond that."""

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
    """Report of a publisher. ``ended_slow``, ``ended_silent``: numbers of slow and silent streams that it ended."""

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
