# cython: annotation_typing=False
"""Log records: a 24-byte header, then messages. The log stores the same bytes that the app receives.

    0-3 committer ID · 4-7 size of the whole record · 8-15 check bytes · 16-23 sequence ID    (little endian)

The check bytes are the CRC-64/XZ of bytes 0-7, then 16-23, then the content.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from msgspec import Struct

from immortal.protocol.checksum import crc64
from immortal.protocol.errors import DamagedRecordError, LimitExceededError, LocalProtocolError, RemoteProtocolError
from immortal.protocol.limits import RECORD_SIZE_BYTES_MAX
from immortal.protocol.varint import LONG_MAX, Readable

HEADER_SIZE_BYTES = 24
CONTROL_SEQUENCE_ID = -1  # a control record, never logged
CHECKPOINT_SEQUENCE_ID = -2  # carries a Checkpoint message, never logged; the blob follows the record
COMMITTER_ID_MAX = (1 << 31) - 1

_HEADER = struct.Struct("<iiQq")
_CHECKED_FIRST = struct.Struct("<ii")
_CHECKED_SECOND = struct.Struct("<q")


class RecordHeader(Struct, frozen=True):
    committer_id: int
    size_bytes: int  # of the whole record, header included
    check: int
    sequence_id: int


def encode_header(committer_id: int, sequence_id: int, chunks: Iterable[Readable]) -> bytes:
    """Encode the 24-byte header of the record whose content is ``chunks``, joined.

    Raises LocalProtocolError for a size, committer ID or sequence ID that no record can have.
    """
    chunks = list(chunks)
    size_bytes = HEADER_SIZE_BYTES + sum(map(len, chunks))
    if size_bytes > RECORD_SIZE_BYTES_MAX:
        raise LocalProtocolError(f"a record of {size_bytes} bytes, at most {RECORD_SIZE_BYTES_MAX} are allowed")
    if not 1 <= committer_id <= COMMITTER_ID_MAX:
        raise LocalProtocolError(f"committer ID {committer_id}, 1 to {COMMITTER_ID_MAX} are allowed")
    if not CHECKPOINT_SEQUENCE_ID <= sequence_id <= LONG_MAX:
        raise LocalProtocolError(f"sequence ID {sequence_id}, {CHECKPOINT_SEQUENCE_ID} to {LONG_MAX} are allowed")
    check = crc64(_CHECKED_FIRST.pack(committer_id, size_bytes) + _CHECKED_SECOND.pack(sequence_id))
    for chunk in chunks:
        check = crc64(chunk, check)
    return _HEADER.pack(committer_id, size_bytes, check, sequence_id)


def encode_record(committer_id: int, sequence_id: int, content: bytes) -> bytes:
    """Encode a whole record."""
    return encode_header(committer_id, sequence_id, (content,)) + content


def decode_header(data: Readable, offset: int = 0) -> RecordHeader:
    """Decode and bounds-check the header at ``offset``; :func:`verify_record` checks the check bytes.

    Raises RemoteProtocolError or LimitExceededError.
    """
    if len(data) - offset < HEADER_SIZE_BYTES:
        raise RemoteProtocolError(f"a record header has {HEADER_SIZE_BYTES} bytes, {len(data) - offset} came")
    committer_id, size_bytes, check, sequence_id = _HEADER.unpack_from(data, offset)
    if size_bytes > RECORD_SIZE_BYTES_MAX:
        raise LimitExceededError(f"record {sequence_id}", size_bytes, RECORD_SIZE_BYTES_MAX)
    if size_bytes < HEADER_SIZE_BYTES:
        raise RemoteProtocolError(
            f"record {sequence_id} gives its size as {size_bytes} bytes, less than its header's {HEADER_SIZE_BYTES}"
        )
    return RecordHeader(committer_id, size_bytes, check, sequence_id)


def verify_record(value: Readable) -> RecordHeader:
    """Check the record at the start of ``value`` and return its header. Bytes after the record are ignored.

    Raises DamagedRecordError, also for an invalid header.
    """
    try:
        header = decode_header(value)
    except RemoteProtocolError as error:
        raise DamagedRecordError(f"damaged record header: {error}") from None
    if header.size_bytes > len(value):
        raise DamagedRecordError(
            f"record {header.sequence_id} has {len(value)} bytes, its header says {header.size_bytes}"
        )
    view = memoryview(value)
    check = crc64(view[HEADER_SIZE_BYTES : header.size_bytes], crc64(bytes(view[0:8]) + bytes(view[16:24])))
    if check != header.check:
        raise DamagedRecordError(
            f"record {header.sequence_id}: the check bytes are {header.check:016x}, its bytes give {check:016x}"
        )
    return header
