"""Frames between clients and servers: encoding, decoding, and the errors. docs/reference/pattern-frames.md.

0   3  "IPR"
3   1  version
4   1  type
5   8  number, big-endian: of the request that it is about
13  8  value, big-endian: REQUEST: all numbers below it are settled. PONG: ms spent on the present request
21  1  size of the client ID, n
22  n  client ID, UTF-8: of a REQUEST
    ?  body
      -8  8  CRC-64/XZ of all bytes before, big-endian
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Any

from immortal.appsdk.client.errors import CallTimeout, ClientError, Request
from immortal.protocol.checksum import crc64
from immortal.protocol.errors import ImmortalError, LimitExceededError, RemoteProtocolError

CLIENT_ID_SIZE_BYTES_MAX = 64
BODY_SIZE_BYTES_MAX = 16 << 20
CLOSE_LINGER_MS = 100  # as the messenger's: ZeroMQ can end the process if it is cut off in a message
MAGIC = b"IPR"
VERSION = 1
STORE_ID_SIZE_BYTES = 16
NUMBER_MAX = 2**63 - 1
_HEAD = Struct(">3sBBQQB")
_CHECK_SIZE_BYTES = 8
OVERHEAD_BYTES = _HEAD.size + _CHECK_SIZE_BYTES
FRAME_SIZE_BYTES_MAX = OVERHEAD_BYTES + CLIENT_ID_SIZE_BYTES_MAX + BODY_SIZE_BYTES_MAX


class Kind(IntEnum):
    PING = 1  # asks for a sign of life
    PONG = 2  # answers. Body: the ID of the store; empty if replies are not stored
    REQUEST = 3
    REPLY = 4  # body: the function's result
    FAILED = 5  # the function raised: the name of the type, "\n", the text
    GONE = 6  # the number is below the kept ones: it is not done now
    REFUSED = 7  # it will not be done; body: the reason
    BUSY = 8  # no room: the server did not take it


ANSWERS = frozenset({Kind.REPLY, Kind.FAILED, Kind.GONE, Kind.REFUSED})
"""Kinds of frames that end a request."""
_EMPTY = frozenset({Kind.PING, Kind.GONE, Kind.BUSY})


@dataclass(frozen=True, slots=True)
class Frame:
    """Frame between a client and a server. ``client_id``: of a REQUEST; "" in other frames."""

    kind: Kind
    number: int = 0
    value: int = 0
    client_id: str = ""
    body: bytes = b""


def encode_frame(frame: Frame) -> bytes:
    client_id = frame.client_id.encode()
    head = _HEAD.pack(MAGIC, VERSION, frame.kind, frame.number, frame.value, len(client_id))
    data = b"".join((head, client_id, frame.body))
    return data + crc64(data).to_bytes(_CHECK_SIZE_BYTES, "big")


def decode_frame(data: bytes) -> Frame:
    """Decode one message. Raises RemoteProtocolError."""
    if data[:3] != MAGIC or len(data) < OVERHEAD_BYTES:
        raise RemoteProtocolError(f"{len(data)} bytes that are no frame: {MAGIC!r} and {OVERHEAD_BYTES} were expected")
    _, version, kind, number, value, id_size = _HEAD.unpack_from(data)
    if version != VERSION:
        raise RemoteProtocolError(f"a frame of version {version}, {VERSION} is known here: upgrade the older side")
    body_at = _HEAD.size + id_size
    body_size = len(data) - body_at - _CHECK_SIZE_BYTES
    if id_size > CLIENT_ID_SIZE_BYTES_MAX:
        raise LimitExceededError("a client ID", id_size, CLIENT_ID_SIZE_BYTES_MAX)
    if body_size > BODY_SIZE_BYTES_MAX:
        raise LimitExceededError("a body", body_size, BODY_SIZE_BYTES_MAX)
    if body_size < 0:
        raise RemoteProtocolError(f"a frame of {len(data)} bytes with a client ID of {id_size}: it was cut off")
    if crc64(memoryview(data)[:-_CHECK_SIZE_BYTES]) != int.from_bytes(data[-_CHECK_SIZE_BYTES:], "big"):
        raise RemoteProtocolError(f"a frame of {len(data)} bytes was damaged: its check bytes do not match")
    try:
        frame = Frame(
            Kind(kind),
            number,
            value,
            data[_HEAD.size : body_at].decode(),
            data[body_at : len(data) - _CHECK_SIZE_BYTES],
        )
    except ValueError as error:  # UnicodeDecodeError is one
        raise RemoteProtocolError(f"a frame that can't be read: {error}") from None
    _check(frame)
    return frame


def _check(frame: Frame) -> None:
    """Check that a frame's fields match its kind. Raises RemoteProtocolError."""
    is_request = frame.kind is Kind.REQUEST
    if is_request != bool(frame.client_id):
        raise RemoteProtocolError(f"a {frame.kind.name} with the client ID {frame.client_id!r}")
    if is_request and not 1 <= max(frame.value, 1) <= frame.number <= NUMBER_MAX:
        raise RemoteProtocolError(f"request {frame.number}, with all below {frame.value} settled")
    if not is_request and frame.kind is not Kind.PONG and frame.value:
        raise RemoteProtocolError(f"a {frame.kind.name} with the value {frame.value}")
    if frame.body and frame.kind in _EMPTY:
        raise RemoteProtocolError(f"a {frame.kind.name} with {len(frame.body)} bytes")
    if frame.kind is Kind.PONG and len(frame.body) not in (0, STORE_ID_SIZE_BYTES):
        raise RemoteProtocolError(f"a PONG with {len(frame.body)} bytes: the ID of a store has {STORE_ID_SIZE_BYTES}")


# Errors, beside those of immortal.appsdk.client.errors: CalleeFailed, CallRefused, OutcomeUnknown, ClientClosed.


class ServerError(ImmortalError):
    """Raised if a server can't serve in its present setup; the message says what to do."""


class StoreError(ServerError):
    """Raised if the store of replies can't be opened, read or written."""


class GaveUp(CallTimeout):
    """Raised if no reply arrived and the request is no longer sent. ``tries``: by server.

    ``sent`` False: no server has got it, and none will. Otherwise it may have been done, or may still be:
    ``again(timeout)`` continues with the same request (with asyncio: ``await error.again(timeout)``).
    """

    def __init__(self, reason: str, request: Request, tries: Mapping[str, int], again: Any) -> None:
        super().__init__(reason, request, again)
        self.tries = dict(tries)


class TooManyRequests(ClientError):  # noqa: N818
    """Raised if a request was not sent because the client has the allowed number of open requests."""
