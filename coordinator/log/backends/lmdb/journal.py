"""Journal in front of LMDB: small commits are appended to a file with one sync each, and reach the tables together.

An LMDB transaction of one small record writes six pages, syncs, writes its meta page, and syncs again. A journal entry
is one write to existing blocks. An entry has rows of tables, and the ID of the LMDB transaction that it follows. The
next LMDB transaction puts all entries into the tables, which makes them obsolete. A reader of the log reads the entries
beside its writer; a writer reads them when it starts.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from immortal.coordinator.core.errors import DamagedLogError
from immortal.coordinator.log.backend import Row
from immortal.coordinator.log.backends.lmdb.environment import unavailable_error
from immortal.coordinator.log.backends.lmdb.files import PARTIAL_FILE_NAME
from immortal.coordinator.log.backends.lmdb.tables import JournalRows
from immortal.coordinator.log.identity import LogIdentity
from immortal.protocol import decoding
from immortal.protocol.checksum import crc64
from immortal.protocol.files import opened, sync_folder

FILE_NAME = "journal"
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

    def create(self) -> bool:
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


class JournalReader:
    """Reader of journal entries after an LMDB transaction. Repeated reads of one journal read only new entries."""

    def __init__(self, folder: Path, identity: LogIdentity) -> None:
        self.repairs: list[str] = []  # messages about repaired damage
        self.skipped: list[str] = []  # messages about incomplete entries
        self._path = folder / FILE_NAME
        self._seed = identity.check
        self._next = Place(-1, 0, 0)
        self._offset_bytes = 0
        self._rows: JournalRows = {}
        self._tried = self._next  # last failed search for a flipped bit, which takes a second for a large entry

    def rows(
        self,
        transaction_id: int,
        *,
        nonce: Callable[[], int | None] = lambda: None,
        may_repair: Callable[[], bool] = lambda: True,
    ) -> JournalRows:
        """Return the rows of entries after the LMDB transaction ``transaction_id``. Don't change them.

        ``nonce``: returns the journal's nonce in that transaction; None: there is no journal. ``may_repair``: returns
        True if no process can be writing an invalid entry now; then a flipped bit is repaired. Raises DamagedLogError
        if an entry is damaged, or the file is missing.
        """
        first_look = transaction_id != self._next.transaction_id
        if first_look:
            self._next, self._offset_bytes, self._rows = Place(transaction_id, 0, nonce() or 0), 0, {}
        try:
            with opened(self._path, os.O_RDONLY) as descriptor:
                size_bytes = os.fstat(descriptor).st_size
                if size_bytes < FILE_SIZE_BYTES:
                    raise DamagedLogError(
                        f"{self._path} is truncated: it has {size_bytes} bytes, a journal has {FILE_SIZE_BYTES};"
                        " restore the log from a copy",
                        -1,
                    )
                self._read_on(descriptor, may_repair)
                if first_look:
                    self._check_end(descriptor)
        except FileNotFoundError:
            if nonce() is None:
                return self._rows
            raise DamagedLogError(
                f"{self._path} is missing: the log was not stopped, and its last commits are nowhere else; restore both"
                f" files from one copy (where there is none, 'truncate -s {FILE_SIZE_BYTES} {self._path}' stands in for"
                " it: those commits are lost then, of which others may have been told)",
                -1,
            ) from None
        except OSError as error:
            damaged = DamagedLogError(f"{self._path} cannot be read: {error.strerror}", -1)
            raise unavailable_error(self._path.parent, error) or damaged from error
        return self._rows

    def make_durable(self) -> None:
        """Make all returned entries durable. Raises OSError.

        An entry of a failed write can be readable without being on disk. Another sync would do nothing, since the
        kernel believes that it has written the entry; so it is written again.
        """
        with opened(self._path, os.O_RDWR) as descriptor:
            data = os.pread(descriptor, self._offset_bytes, 0)
            if os.pwrite(descriptor, data, 0) != self._offset_bytes:
                raise OSError(0, f"{self._path} was not written whole")
            os.fdatasync(descriptor)

    def _read_on(self, descriptor: int, may_repair: Callable[[], bool]) -> None:
        rows: JournalRows = {}
        while True:
            data = os.pread(descriptor, ENTRY_SIZE_BYTES_MAX, self._offset_bytes)
            packed = decode_entry(data, self._seed, self._next)
            if packed is None:
                packed = self._repair_entry(data, may_repair)
            if packed is None:
                break
            rows |= {(table, key): value for table, key, value in ROWS.decode(packed)}
            self._offset_bytes += blocks_size_bytes(packed)
            self._next = replace(self._next, number=self._next.number + 1)
        if rows:
            self._rows = {**self._rows, **rows}

    def _check_end(self, descriptor: int) -> None:
        """Check that no valid entry follows the last one, since entries are written one after the other.

        No entry may follow a missing transaction, which was durable before the entry was written. None may be from
        another opening of this log, since each opening begins a new file.
        """
        rest = os.pread(descriptor, FILE_SIZE_BYTES, self._offset_bytes)
        for start in range(0, len(rest) - HEADER_SIZE_BYTES + 1, BLOCK_SIZE_BYTES):
            entry = rest[start : start + ENTRY_SIZE_BYTES_MAX]
            place = place_of(entry)
            if place is None or decode_entry(entry, self._seed, place) is None:
                continue
            if place.transaction_id > self._next.transaction_id:
                raise DamagedLogError(
                    f"{self._path} has commits that follow transaction {place.transaction_id}, and the tables end with"
                    f" {self._next.transaction_id}: they lost some, or are an older copy; restore both files from one"
                    " copy (a copy of a stopped log has no journal: then remove this one)",
                    -1,
                )
            if place.nonce != self._next.nonce and self._next.nonce:
                raise DamagedLogError(
                    f"{self._path} is of another life of this log than the tables: one of them is from another copy;"
                    " restore both files from one copy",
                    -1,
                )
            if (place.transaction_id, place.number) <= (self._next.transaction_id, self._next.number):
                continue
            again = os.pread(descriptor, ENTRY_SIZE_BYTES_MAX, self._offset_bytes)
            if decode_entry(again, self._seed, self._next) is not None:
                return  # a live writer has continued
            raise DamagedLogError(
                f"entry {self._next.number} of {self._path} is damaged, with commits behind it: restore the log from a"
                " copy",
                -1,
            )

    def _repair_entry(self, data: bytes, may_repair: Callable[[], bool]) -> bytes | None:
        """Return the rows of an entry that differs by one bit from the expected entry; None if it does not."""
        if len(data) < HEADER_SIZE_BYTES:
            return None
        magic, size_bytes, *place = CHECKED.unpack_from(data)
        expected = CHECKED.pack(MAGIC, size_bytes, self._next.transaction_id, self._next.number, self._next.nonce)
        differences = (int.from_bytes(data[: len(expected)]) ^ int.from_bytes(expected)).bit_count()
        is_meant = (magic, *place[:2]) == (MAGIC, self._next.transaction_id, self._next.number)
        if not (differences <= 1 or is_meant) or self._next == self._tried or not may_repair():
            return None
        self._tried = self._next
        number = self._next.number
        packed = self._with_one_bit_flipped(data, HEADER_SIZE_BYTES + size_bytes) if differences <= 1 else None
        if packed is not None:
            self.repairs.append(f"entry {number} of {self._path} was damaged: one flipped bit was corrected")
        elif is_meant:
            self.skipped.append(f"entry {number} of {self._path} is not whole: a commit that was cut off is left out")
        return packed

    def _with_one_bit_flipped(self, data: bytes, size_bytes: int) -> bytes | None:
        entry = bytearray(data)
        for bit in range(8 * (size_bytes if size_bytes <= len(data) else HEADER_SIZE_BYTES)):
            entry[bit // 8] ^= 1 << bit % 8
            packed = decode_entry(bytes(entry), self._seed, self._next)
            if packed is not None:
                return packed
            entry[bit // 8] ^= 1 << bit % 8
        return None
