"""Front of an SDK app's state: its owner, and the serializer that wrote it.

    0-5 "IMMAPP" · 6 version · 7 zero · 8-11 size of the header, little endian · header (MessagePack map) · state

The header's fields are the SDK's (appsdk/state/schema.py). Processes that only pass a state on read the serializer
alone, since it decides what reading the state can do.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import msgspec

from immortal.protocol import decoding

MAGIC = b"IMMAPP"
FRONT = struct.Struct("<6sBBI")  # magic, version, zero, size of the header
PICKLE = "pickle"
HEADER_SIZE_BYTES_MAX = 1 << 30  # with the tasks of async handlers in it


class _Header(msgspec.Struct):
    serializer: str


_HEADER = decoding.Decoder(_Header)


def serializer_of(chunks: Iterable[bytes]) -> str | None:
    """Return the name of the serializer of the state in ``chunks``; read no more chunks than needed.

    None: the state is not of an SDK app, or no SDK can read it.
    """
    front = bytearray()
    needed_bytes = FRONT.size
    for chunk in chunks:
        front += chunk
        if len(front) >= FRONT.size and needed_bytes == FRONT.size:
            magic, _, _, size_bytes = FRONT.unpack_from(front)
            if magic != MAGIC or size_bytes > HEADER_SIZE_BYTES_MAX:
                return None
            needed_bytes += size_bytes
        if len(front) >= needed_bytes > FRONT.size:
            break
    try:
        return _HEADER.decode(memoryview(front)[FRONT.size : needed_bytes]).serializer
    except decoding.DecodeError:
        return None
