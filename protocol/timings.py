"""Notes of when what happened: files beside a log, for whoever looks at it later. No replay depends on any of it.

A segment is one process's, of one log: a header, then rows of one size, in the order of records. Times are ns of the
machine's monotonic clock, the same for all its processes; a record's own time, in its log, says what time of day that
was.

    header  magic (8) · committer ID (4) · nothing (4)
    row     record (8) · message (4) · kind (1) · nothing (3) · three times (8 each) · CRC-32 of header and row (4)
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import NamedTuple

from immortal.protocol.record import COMMITTER_ID_MAX

MAGIC = b"IMTIMES1"
_HEADER = struct.Struct("<8sii")
HEADER_SIZE_BYTES = _HEADER.size
_ROW = struct.Struct("<qiBxxxqqq")
_CRC = struct.Struct("<I")
ROW_SIZE_BYTES = _ROW.size + _CRC.size


class TimingKind(IntEnum):
    """What the three times of a row are. 0: not known."""

    COMMIT = 1  # of a record: submitted to the log, durable, given to the app
    ARRIVED = 2  # of a batch, ``message`` is its first: came in
    HANDLED = 3  # of a message: its handler began, and returned or waits


class TimingRow(NamedTuple):
    """``message``: its index in the record. Times are ns, monotonic."""

    sequence_id: int
    message: int
    kind: int
    first_ns: int
    second_ns: int = 0
    third_ns: int = 0


def encode_segment_header(committer_id: int) -> bytes:
    return _HEADER.pack(MAGIC, committer_id, 0)


def decode_segment_header(data: bytes) -> int | None:
    """The committer ID of the log; None where these bytes begin no segment."""
    if len(data) < HEADER_SIZE_BYTES:
        return None
    magic, committer_id, nothing = _HEADER.unpack_from(data)
    return committer_id if magic == MAGIC and not nothing and 1 <= committer_id <= COMMITTER_ID_MAX else None


PlainRow = tuple[int, int, int, int, int, int]
"""The fields of a :class:`TimingRow`, which is one: who makes many makes these, in a third of the time."""


def encode_row(row: PlainRow, header_crc: int) -> bytes:
    """``header_crc``: the CRC-32 of the segment's header."""
    body = _ROW.pack(*row)
    return body + _CRC.pack(zlib.crc32(body, header_crc))


def decode_row(data: bytes, header_crc: int) -> TimingRow | None:
    """None for a row that is damaged."""
    body = data[: _ROW.size]
    if len(data) != ROW_SIZE_BYTES or _CRC.unpack_from(data, _ROW.size)[0] != zlib.crc32(body, header_crc):
        return None
    return TimingRow(*_ROW.unpack(body))
