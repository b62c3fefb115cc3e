"""Rows of a log as one object: what a segment, a checkpoint's part and the state of a moment are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec
import zstandard
from blake3 import blake3

from immortal.coordinator.objects.errors import DamagedObjectError
from immortal.protocol import decoding

PackedRow: TypeAlias = tuple[str, bytes, bytes | None]
"""Table, key, value; None: the row is gone since the moment before."""
_MAGIC = b"IMMPACK1"
_DIGEST_SIZE_BYTES = 16
_LEVEL = 3  # of zstd: the disk's pace on one processor
_SIZE_BYTES_MAX = 1 << 32  # MessagePack has no longer value
_encode = msgspec.msgpack.Encoder().encode
_ROWS = decoding.Decoder(list[PackedRow])


def pack(rows: Sequence[PackedRow]) -> bytes:
    """Compressed, and with a checksum of its own (zstd's, XXH64)."""
    return _MAGIC + zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(_encode(rows))


def unpack(data: bytes, name: str) -> list[PackedRow]:
    """``name``: of the object, for the error. Raises DamagedObjectError."""
    if not data.startswith(_MAGIC):
        raise DamagedObjectError(f"the object {name} begins with {data[:8]!r}, {_MAGIC!r} was expected")
    try:
        size_bytes = zstandard.frame_content_size(data[len(_MAGIC) :])
        if not 0 <= size_bytes <= _SIZE_BYTES_MAX:
            said = "does not say its size" if size_bytes < 0 else f"says that {size_bytes} bytes are in it"
            raise DamagedObjectError(f"the object {name} {said}: at most {_SIZE_BYTES_MAX} were expected")
        return _ROWS.decode(zstandard.ZstdDecompressor().decompress(data[len(_MAGIC) :]))
    except (decoding.DecodeError, zstandard.ZstdError) as error:
        raise DamagedObjectError(f"the object {name} is damaged: {error}") from None


def digest(data: bytes) -> str:
    """Of an object as it is stored, or of a value: 16 bytes of BLAKE3, in hex."""
    return blake3(data).hexdigest(_DIGEST_SIZE_BYTES)


def digest_of_rows(digests: Iterable[tuple[tuple[str, bytes], bytes]]) -> str:
    """Of a state, by the digests of its rows, whatever their order."""
    whole = blake3()
    for (table, key), of_value in sorted(digests):
        whole.update(_encode((table, key, of_value)))
    return whole.hexdigest(_DIGEST_SIZE_BYTES)
