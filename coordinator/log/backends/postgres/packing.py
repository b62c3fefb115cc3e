"""Records packed into one value: ``count``, so many sizes in bytes, each a 32-bit unsigned LE number, then the records.

A row of the table ``immortal.records`` is such a pack. Records at its beginning or end may be gone: its row says so.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from immortal.coordinator.core.errors import DamagedLogError, LogError
from immortal.protocol.varint import Readable

PACK_SIZE_BYTES_MAX = 16 << 20
"""A pack is read whole: this is what reading one record may cost. Joined commits are half of it at most."""
RECORD_SIZE_BYTES_MAX = 900 << 20
"""A value of PostgreSQL has less than 1 GiB, with all that goes with it to the server."""


def pack(values: Sequence[Readable]) -> bytes:
    sizes = [len(value) for value in values]
    return b"".join((struct.pack(f"<{len(sizes) + 1}I", len(sizes), *sizes), *values))


def packs(records: Sequence[tuple[int, Readable]]) -> Iterator[tuple[int, int, bytes]]:
    """(first sequence ID, how many, the pack) of ``records``, which follow one another. Raises LogError."""
    values: list[Readable] = []
    first = size_bytes = 0
    for sequence_id, value in records:
        if len(value) > RECORD_SIZE_BYTES_MAX:
            raise LogError(
                f"record {sequence_id} has {len(value)} bytes, PostgreSQL takes {RECORD_SIZE_BYTES_MAX}:"
                " lower group_size_kib_max or rpc_limit_mb"
            )
        if values and size_bytes + len(value) > PACK_SIZE_BYTES_MAX:
            yield first, len(values), pack(values)
            values, size_bytes = [], 0
        if not values:
            first = sequence_id
        values.append(value)
        size_bytes += len(value)
    if values:
        yield first, len(values), pack(values)


def unpack(data: Readable, first: int) -> list[Readable]:
    """The records of a pack. ``first``: the sequence ID of its first one, for the error: DamagedLogError."""
    view = memoryview(data)
    try:
        (count,) = struct.unpack_from("<I", view)
        sizes = struct.unpack_from(f"<{count}I", view, 4)
    except struct.error:
        raise DamagedLogError(f"the pack of record {first} has {len(view)} bytes, and no head", first) from None
    at = 4 + 4 * count
    if at + sum(sizes) != len(view):
        raise DamagedLogError(
            f"the pack of record {first} has {len(view)} bytes, {at + sum(sizes)} were expected", first
        )
    values: list[Readable] = []
    for size_bytes in sizes:
        values.append(view[at : at + size_bytes])
        at += size_bytes
    return values
