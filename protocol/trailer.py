# cython: annotation_typing=False
"""Trailer after each record in the log: the source of each of its batches, and the positions of the output streams.

    version (1 byte) · time ns (8) · batches · output marks · CRC (8)          docs/LOG_FORMAT.md has the fields

The CRC covers the record's check bytes first, so that a trailer fits no other record.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

from msgspec import Struct

from immortal.protocol.checksum import crc64
from immortal.protocol.errors import DamagedRecordError, LocalProtocolError, RemoteProtocolError
from immortal.protocol.limits import NAME_SIZE_BYTES_MAX
from immortal.protocol.trace_context import join_name, split_name
from immortal.protocol.varint import INT_MAX, LONG_MAX, Readable, decode_zigzag_int, decode_zigzag_long, encode_zigzag

TRAILER_VERSION = 1
CRC_SIZE_BYTES = 8
TRAILER_SIZE_BYTES_MIN = 1 + 8 + 1 + 1 + CRC_SIZE_BYTES
_BATCH_SIZE_BYTES_MIN = 1 + 1 + 1 + 1 + 8
_MARK_SIZE_BYTES_MIN = 1 + 1 + 8

_VERSION_AND_TIME = struct.Struct("<Bq")
_LONG = struct.Struct("<q")
_CRC = struct.Struct("<Q")


class BatchKind(IntEnum):
    STREAM = 0  # calls from an instance, oneself included
    IMPULSES = 1  # impulses to oneself
    INITIAL = 2  # the initial message
    CLIENT = 3  # requests of a client, which is no instance; the name is "~" and its ID


class BatchSource(Struct):
    """Source of one batch of a record: ``count`` messages from ``first_position`` on; name "" is oneself.

    ``trace_context``: of a client, see :mod:`immortal.protocol.timings`; "" if the client gave none.
    """

    kind: int
    name: str
    first_position: int
    count: int
    send_time_ns: int
    trace_context: str = ""

    @property
    def last_position(self) -> int:
        return self.first_position + self.count - 1


class OutputMarkEntry(Struct):
    """Progress of the stream to ``destination``: its last position, and the CRC-64 of all its messages."""

    destination: str
    position: int
    checksum: int


class Trailer(Struct):
    time_ns: int
    batches: Sequence[BatchSource] = []
    outputs: Sequence[OutputMarkEntry] = []


def encode_trailer(trailer: Trailer, record_check: int) -> bytes:
    """Encode the trailer of the record whose check bytes are ``record_check`` (unsigned).

    Raises LocalProtocolError for a value that the format cannot hold.
    """
    try:
        parts = [_VERSION_AND_TIME.pack(TRAILER_VERSION, trailer.time_ns), encode_zigzag(len(trailer.batches))]
        for batch in trailer.batches:
            name = (join_name(batch.name, batch.trace_context) if batch.trace_context else batch.name).encode()
            if not (
                0 <= batch.kind <= BatchKind.CLIENT
                and len(name) <= NAME_SIZE_BYTES_MAX
                and 0 <= batch.first_position <= LONG_MAX
                and 0 <= batch.count <= INT_MAX
            ):
                raise LocalProtocolError(f"a trailer cannot hold {batch}")
            parts += (
                bytes((batch.kind,)),
                encode_zigzag(len(name)),
                name,
                encode_zigzag(batch.first_position),
                encode_zigzag(batch.count),
                _LONG.pack(batch.send_time_ns),
            )
        parts.append(encode_zigzag(len(trailer.outputs)))
        for mark in trailer.outputs:
            name = mark.destination.encode()
            if not (len(name) <= NAME_SIZE_BYTES_MAX and 0 <= mark.position <= LONG_MAX):
                raise LocalProtocolError(f"a trailer cannot hold {mark}")
            parts += (encode_zigzag(len(name)), name, encode_zigzag(mark.position), _CRC.pack(mark.checksum))
        body = b"".join(parts)
        return body + _CRC.pack(crc64(body, crc64(_CRC.pack(record_check))))
    except (struct.error, UnicodeEncodeError) as error:
        raise LocalProtocolError(f"a trailer cannot hold {trailer}: {error}") from None


def check_trailer(data: Readable, record_check: int) -> None:
    """Check the CRC and the version of a trailer without decoding it.

    Raises DamagedRecordError for a wrong CRC, RemoteProtocolError for another version.
    """
    if len(data) < TRAILER_SIZE_BYTES_MIN:
        raise DamagedRecordError(f"a trailer has at least {TRAILER_SIZE_BYTES_MIN} bytes, here are {len(data)}")
    (stored,) = _CRC.unpack_from(data, len(data) - CRC_SIZE_BYTES)
    actual = crc64(data[:-CRC_SIZE_BYTES], crc64(_CRC.pack(record_check)))
    if stored != actual:
        raise DamagedRecordError(f"its CRC is {stored:016x}, its bytes and its record give {actual:016x}")
    if data[0] != TRAILER_VERSION:
        raise RemoteProtocolError(f"it has trailer version {data[0]}, this program reads version {TRAILER_VERSION}")


def decode_trailer(data: Readable, record_check: int) -> Trailer:
    """Decode ``data``, which is exactly the trailer of the record whose check bytes are ``record_check``.

    Raises DamagedRecordError if the CRC does not match, RemoteProtocolError if the contents are invalid.
    """
    check_trailer(data, record_check)
    body = bytes(data[:-CRC_SIZE_BYTES])
    (time_ns,) = _LONG.unpack_from(body, 1)
    offset = 1 + _LONG.size
    batch_count, offset = _decode_count(body, offset, _BATCH_SIZE_BYTES_MIN, "batches")
    batches = []
    for _ in range(batch_count):
        batch, offset = _decode_batch(body, offset)
        batches.append(batch)
    mark_count, offset = _decode_count(body, offset, _MARK_SIZE_BYTES_MIN, "output marks")
    outputs = []
    for _ in range(mark_count):
        destination, offset = _decode_name(body, offset)
        position, offset = _decode_position(body, offset)
        checksum_bytes, offset = _slice(body, offset, _CRC.size)
        outputs.append(OutputMarkEntry(destination, position, _CRC.unpack(checksum_bytes)[0]))
    if offset != len(body):
        raise RemoteProtocolError(f"a trailer has {len(body) - offset} bytes behind its last field")
    return Trailer(time_ns, batches, outputs)


def _decode_batch(body: bytes, offset: int) -> tuple[BatchSource, int]:
    kind_byte, offset = _slice(body, offset, 1)
    kind = kind_byte[0]
    if kind > BatchKind.CLIENT:
        raise RemoteProtocolError(f"a trailer has a batch of kind {kind}, known are 0 to {int(BatchKind.CLIENT)}")
    name, offset = _decode_name(body, offset)
    first_position, offset = _decode_position(body, offset)
    count, offset = decode_zigzag_int(body, offset)
    if count < 0:
        raise RemoteProtocolError(f"a trailer has a batch of {count} messages")
    time_bytes, offset = _slice(body, offset, _LONG.size)
    (time_ns,) = _LONG.unpack(time_bytes)
    context = ""
    if kind == BatchKind.CLIENT:
        name, context = split_name(name)
    return BatchSource(kind, name, first_position, count, time_ns, context), offset


def _decode_count(body: bytes, offset: int, item_size_bytes_min: int, items: str) -> tuple[int, int]:
    count, offset = decode_zigzag_int(body, offset)
    rest_bytes = len(body) - offset
    if not 0 <= count * item_size_bytes_min <= rest_bytes:
        raise RemoteProtocolError(f"a trailer announces {count} {items}, only {rest_bytes} bytes follow")
    return count, offset


def _decode_name(body: bytes, offset: int) -> tuple[str, int]:
    size_bytes, offset = decode_zigzag_int(body, offset)
    if not 0 <= size_bytes <= NAME_SIZE_BYTES_MAX:
        raise RemoteProtocolError(
            f"a trailer has a name of {size_bytes} bytes, at most {NAME_SIZE_BYTES_MAX} are allowed"
        )
    raw, offset = _slice(body, offset, size_bytes)
    try:
        return raw.decode(), offset
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(f"a trailer has a name that is not UTF-8: {error}") from None


def _decode_position(body: bytes, offset: int) -> tuple[int, int]:
    position, offset = decode_zigzag_long(body, offset)
    if position < 0:
        raise RemoteProtocolError(f"a trailer has the position {position}; positions are not negative")
    return position, offset


def _slice(body: bytes, offset: int, size_bytes: int) -> tuple[bytes, int]:
    end = offset + size_bytes
    if end > len(body):
        raise RemoteProtocolError(f"a trailer's field at byte {offset} runs past its end")
    return body[offset:end], end
