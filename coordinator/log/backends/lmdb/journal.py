"""Journal in front of LMDB: small commits are appended to a file with one sync each, and reach the tables together.

An LMDB transaction of one small record writes six pages, syncs, writes its meta page, and syncs again. A journal entry
is one write to existing blocks. An entry has rows of tables, and the ID of the LMDB transaction that it follows. The
next LMDB transaction puts all entries into the tables, which makes them obsolete.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from immortal.coordinator.log.backend import Row
from immortal.coordinator.log.identity import LogIdentity
from immortal.protocol import decoding
from immortal.protocol.checksum import crc64
from immortal.protocol.files import opened, sync_folder

FILE_NAME = "journal"
PARTIAL_FILE_NAME = "journal.new"  # its name until it has all its blocks, so that a shorter journal is a truncated one
FILE_SIZE_BYTES = 1 << 20  # limits what a start moves into the tables: milliseconds
ENTRY_SIZE_BYTES_MAX = 32 << 10  # larger ones gain nothing


_encode = msgspec.msgpack.Encoder().encode


class Journal:
    """Journal of a writer. The tables refer to it from :meth:`make` until just before :meth:`remove`."""

    def __init__(self, folder: Path, identity: LogIdentity) -> None:
        self.nonce = secrets.randbits(63) | 2  # unique to this opening of the log
        self._path = folder / FILE_NAME
        self._seed = identity.check
        self._descriptor: int | None = None
        self._buffer = mmap.mmap(-1, ENTRY_SIZE_BYTES_MAX)  # aligned, as writes past the page cache require
        self._transaction_id: int | None = None
        self._offset_bytes = 0
        self._number = 0

    def restart(self, transaction_id: int) -> None:
        """Start again at offset 0: the LMDB transaction ``transaction_id`` has all entries."""
        self._transaction_id = transaction_id
        self._offset_bytes = self._number = 0

    def append(self, rows: Sequence[Row]) -> bool:
        """Make ``rows`` durable; return False if they don't fit, or there is no journal. Raises OSError."""
        if self._transaction_id is None or self._descriptor is None:
            return False
        packed = _encode(rows)
        size_bytes = blocks_size_bytes(packed)
        if size_bytes > ENTRY_SIZE_BYTES_MAX or self._offset_bytes + size_bytes > FILE_SIZE_BYTES:
            return False
        entry = encode_entry(self._seed, self._transaction_id, self._number, self.nonce, packed)
        self._buffer[: len(entry)] = entry
        with memoryview(self._buffer)[:size_bytes] as blocks:
            written = os.pwrite(self._descriptor, blocks, self._offset_bytes)
        if written != size_bytes:
            raise OSError(0, f"{written} of {size_bytes} bytes were written to {self._path}")
        self._offset_bytes += size_bytes
        self._number += 1
        return True

    def make(self) -> bool:
        """Create the file with all its blocks, then give it its name; return False if the disk has no room for them.

        It replaces the earlier journal: all entries must be in the tables.
        """
        partial = self._path.with_name(PARTIAL_FILE_NAME)
        try:
            with opened(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
                if os.pwrite(descriptor, bytes(FILE_SIZE_BYTES), 0) != FILE_SIZE_BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(descriptor)
            partial.rename(self._path)
            sync_folder(self._path.parent)
            try:
                self._descriptor = self._open_checked(os.O_DIRECT)
            except OSError:  # not every file system has O_DIRECT, and some report that only at a write
                self._descriptor = self._open_checked(0)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
        return self._descriptor is not None

    def _open_checked(self, flags: int) -> int:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_DSYNC | os.O_CLOEXEC | flags)
        try:
            with memoryview(self._buffer)[:BLOCK_SIZE_BYTES] as block:  # zeros, like the rest of the unused file
                os.pwrite(descriptor, block, 0)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def remove(self) -> None:
        """Close the journal and remove its file. No entry may be needed any more."""
        self.close()
        self._path.unlink(missing_ok=True)


# The entries of a journal, byte by byte: docs/LOG_FORMAT.md, "The journal". No I/O.


BLOCK_SIZE_BYTES = 4096  # an entry begins with a block, so that durable bytes are never written again
MAGIC = b"IMJ2"
CHECKED = struct.Struct("<4sIQQQ")  # covered by the CRC that follows: magic, size of the rows, the fields of Place
_CRC_SIZE_BYTES = 8
HEADER_SIZE_BYTES = CHECKED.size + _CRC_SIZE_BYTES
ROWS = decoding.Decoder(list[tuple[str, bytes, bytes]])


class Place(Struct, frozen=True):
    """Place of an entry in its journal. Entries are in this order."""

    transaction_id: int  # LMDB transaction that the entry follows
    number: int  # counts entries after that transaction, from 0
    nonce: int  # unique to the opening of the log that wrote the entry


def place_of(data: bytes) -> Place | None:
    """Return the place in the entry at the start of ``data``; None: there is no entry."""
    if data[:4] != MAGIC or len(data) < HEADER_SIZE_BYTES:
        return None
    return Place(*CHECKED.unpack_from(data)[2:])


def blocks_size_bytes(packed: bytes) -> int:
    """Return the size of an entry with the rows ``packed``, in whole blocks."""
    return -(-(HEADER_SIZE_BYTES + len(packed)) // BLOCK_SIZE_BYTES) * BLOCK_SIZE_BYTES


def encode_entry(seed: int, transaction_id: int, number: int, nonce: int, packed: bytes) -> bytes:
    checked = CHECKED.pack(MAGIC, len(packed), transaction_id, number, nonce)
    return b"".join((checked, crc64(packed, crc64(checked, seed)).to_bytes(_CRC_SIZE_BYTES, "little"), packed))


def decode_entry(data: bytes, seed: int, place: Place) -> bytes | None:
    """Decode the rows of the entry at the start of ``data``; None if it is not the expected entry, or incomplete."""
    if place_of(data) != place:
        return None
    checked = data[: CHECKED.size]
    size_bytes = CHECKED.unpack(checked)[1]
    packed = data[HEADER_SIZE_BYTES : HEADER_SIZE_BYTES + size_bytes]
    check = int.from_bytes(data[CHECKED.size : HEADER_SIZE_BYTES], "little")
    if len(packed) != size_bytes or check != crc64(packed, crc64(checked, seed)):
        return None
    return packed
