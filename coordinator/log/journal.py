"""A journal in front of LMDB: small commits are appended to a file, with one sync each, and reach the tables together.

An LMDB transaction of one small record writes six pages, syncs, writes its meta page, and syncs again. An entry of the
journal is one write to blocks that the file has already. Entries hold rows of tables, and the ID of the LMDB
transaction that they follow: the next transaction takes them all in, and with that none of them counts any more.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from struct import Struct
from typing import TypeAlias

import lmdb
import msgspec

from coordinator.core.errors import DamagedLogError, require
from coordinator.log.environment import LogIdentity, Tables, sync_folder
from protocol.checksum import crc64

FILE_NAME = "journal"
PARTIAL_FILE_NAME = "journal.new"  # until it has all its blocks: a journal that is shorter was cut
FILE_SIZE_BYTES = 1 << 20  # what a start has to bring into the tables at most: milliseconds
BLOCK_SIZE_BYTES = 4096  # an entry begins with one: what is durable already is never written again
ENTRY_SIZE_BYTES_MAX = 32 << 10  # larger ones gain nothing

Rows: TypeAlias = dict[tuple[str, bytes], bytes]  # by table and key

_MAGIC = b"IMJ1"
_HEADER = Struct("<4sIQQQ")  # magic, size of the rows, LMDB transaction, number of the entry from 0, CRC
_CHECKED = Struct("<4sIQQ")
_IDENTITY = Struct("<QQ")  # committer ID, when the log was made
_encode = msgspec.msgpack.Encoder().encode
_ROWS = msgspec.msgpack.Decoder(list[tuple[str, bytes, bytes]])


class Journal:
    """The writer's end. What is in the tables says that there is one from :meth:`make` until before :meth:`remove`."""

    def __init__(self, folder: Path, identity: LogIdentity) -> None:
        self._path = folder / FILE_NAME
        self._seed = _seed(identity)
        self._descriptor: int | None = None
        self._buffer = mmap.mmap(-1, ENTRY_SIZE_BYTES_MAX)  # aligned, as writes past the page cache must be
        self._transaction_id: int | None = None
        self._offset_bytes = 0
        self._number = 0

    def restart(self, transaction_id: int) -> None:
        """All entries are in the tables, by the LMDB transaction of this ID at the latest."""
        self._transaction_id = transaction_id
        self._offset_bytes = self._number = 0

    def append(self, rows: Rows) -> bool:
        """Make ``rows`` durable; False if they don't fit, or there is no journal. Raises OSError."""
        if self._transaction_id is None or self._descriptor is None:
            return False
        packed = _encode([(table, key, value) for (table, key), value in rows.items()])
        size_bytes = -(-(_HEADER.size + len(packed)) // BLOCK_SIZE_BYTES) * BLOCK_SIZE_BYTES
        if size_bytes > ENTRY_SIZE_BYTES_MAX or self._offset_bytes + size_bytes > FILE_SIZE_BYTES:
            return False
        entry = encode_entry(self._seed, self._transaction_id, self._number, packed)
        self._buffer[: len(entry)] = entry
        with memoryview(self._buffer)[:size_bytes] as blocks:
            written = os.pwrite(self._descriptor, blocks, self._offset_bytes)
        if written != size_bytes:
            raise OSError(0, f"{written} of {size_bytes} bytes were written to {self._path}")
        self._offset_bytes += size_bytes
        self._number += 1
        return True

    def make(self) -> bool:
        """Give the file all its blocks, then its name; False where the disk has no room for them.

        Takes the place of the one before: all entries must be in the tables.
        """
        partial = self._path.with_name(PARTIAL_FILE_NAME)
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                if os.pwrite(descriptor, bytes(FILE_SIZE_BYTES), 0) != FILE_SIZE_BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            partial.rename(self._path)
            sync_folder(self._path.parent)
            try:
                self._descriptor = self._open_checked(os.O_DIRECT)
            except OSError:  # not every file system has O_DIRECT, and some say so only when they are written to
                self._descriptor = self._open_checked(0)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
        return self._descriptor is not None

    def _open_checked(self, flags: int) -> int:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_DSYNC | os.O_CLOEXEC | flags)
        try:
            with memoryview(self._buffer)[:BLOCK_SIZE_BYTES] as block:  # zeros, as all of the file: none was used yet
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
        """Close it. Nothing in it may count any more."""
        self.close()
        self._path.unlink(missing_ok=True)


class JournalReader:
    """What a journal holds behind a transaction of LMDB; the next look at the same one reads only what came since."""

    def __init__(self, folder: Path, identity: LogIdentity) -> None:
        self.mended: list[str] = []  # what was found damaged and put right, in words
        self.left_out: list[str] = []  # what was found cut off, in words
        self._path = folder / FILE_NAME
        self._seed = _seed(identity)
        self._transaction_id = -1
        self._offset_bytes = 0
        self._number = 0
        self._rows: Rows = {}
        self._tried = (-1, -1)  # to look for a flipped bit in a large entry takes a second

    def rows(
        self,
        transaction_id: int,
        *,
        is_needed: Callable[[], bool] = lambda: False,
        may_mend: Callable[[], bool] = lambda: True,
    ) -> Rows:
        """The rows behind the LMDB transaction ``transaction_id``. Not to be changed.

        ``is_needed``: whether that transaction says that there is a journal. ``may_mend``: whether an entry that is not
        right can't be one that is being written just now; then a flipped bit is put right.
        Raises DamagedLogError where an entry is damaged, or the file is missing.
        """
        first_look = transaction_id != self._transaction_id
        if first_look:
            self._transaction_id, self._rows = transaction_id, {}
            self._offset_bytes = self._number = 0
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            if not is_needed():
                return self._rows
            raise DamagedLogError(
                f"{self._path} is missing: the log was not stopped, and its last commits are nowhere else; restore both"
                f" files from one copy (where there is none, 'truncate -s {FILE_SIZE_BYTES} {self._path}' stands in for"
                " it: those commits are lost then, of which others may have been told)",
                -1,
            ) from None
        except OSError as error:
            raise DamagedLogError(f"{self._path} cannot be read: {error.strerror}", -1) from error
        try:
            size_bytes = os.fstat(descriptor).st_size
            if size_bytes < FILE_SIZE_BYTES:
                raise DamagedLogError(
                    f"{self._path} is truncated: it has {size_bytes} bytes, a journal has {FILE_SIZE_BYTES}; restore"
                    " the log from a copy",
                    -1,
                )
            self._read_on(descriptor, may_mend)
            if first_look:
                self._check_end(descriptor)
        except OSError as error:
            raise DamagedLogError(f"{self._path} cannot be read: {error.strerror}", -1) from error
        finally:
            os.close(descriptor)
        return self._rows

    def _read_on(self, descriptor: int, may_mend: Callable[[], bool]) -> None:
        rows: Rows = {}
        while True:
            data = os.pread(descriptor, ENTRY_SIZE_BYTES_MAX, self._offset_bytes)
            packed = decode_entry(data, self._seed, self._transaction_id, self._number)
            if packed is None:
                packed = self._mended(data, may_mend)
            if packed is None:
                break
            rows |= {(table, key): value for table, key, value in _ROWS.decode(packed)}
            self._offset_bytes += -(-(_HEADER.size + len(packed)) // BLOCK_SIZE_BYTES) * BLOCK_SIZE_BYTES
            self._number += 1
        if rows:
            self._rows = {**self._rows, **rows}

    def _check_end(self, descriptor: int) -> None:
        """Entries are written one after the other: behind the last one there is none that counts.

        And none names a transaction that is not there: it was durable before the entry was written.
        """
        rest = os.pread(descriptor, FILE_SIZE_BYTES, self._offset_bytes)
        for start in range(0, len(rest) - _HEADER.size + 1, BLOCK_SIZE_BYTES):
            magic, _, transaction_id, number, _ = _HEADER.unpack_from(rest, start)
            if magic != _MAGIC or (transaction_id, number) <= (self._transaction_id, self._number):
                continue
            entry = rest[start : start + ENTRY_SIZE_BYTES_MAX]
            if decode_entry(entry, self._seed, transaction_id, number) is None:
                continue
            if transaction_id > self._transaction_id:
                raise DamagedLogError(
                    f"{self._path} has commits that follow transaction {transaction_id}, and the tables end with"
                    f" {self._transaction_id}: they lost some, or are an older copy; restore both files from one copy"
                    " (a copy of a stopped log has no journal: then remove this one)",
                    -1,
                )
            again = os.pread(descriptor, ENTRY_SIZE_BYTES_MAX, self._offset_bytes)
            if decode_entry(again, self._seed, self._transaction_id, self._number) is not None:
                return  # a live writer has gone on
            raise DamagedLogError(
                f"entry {self._number} of {self._path} is damaged, with commits behind it: restore the log from a copy",
                -1,
            )

    def _mended(self, data: bytes, may_mend: Callable[[], bool]) -> bytes | None:
        """The rows of an entry that differs by one bit from one that would come here."""
        if len(data) < _HEADER.size:
            return None
        magic, size_bytes, transaction_id, number, _ = _HEADER.unpack_from(data)
        differences = (
            (int.from_bytes(magic) ^ int.from_bytes(_MAGIC)).bit_count()
            + (transaction_id ^ self._transaction_id).bit_count()
            + (number ^ self._number).bit_count()
        )
        place = (self._transaction_id, self._number)
        if differences > 1 or place == self._tried or not may_mend():
            return None
        self._tried = place
        entry = bytearray(data)
        end = _HEADER.size + size_bytes if _HEADER.size + size_bytes <= len(data) else _HEADER.size
        for bit in range(8 * end):
            entry[bit // 8] ^= 1 << bit % 8
            packed = decode_entry(bytes(entry), self._seed, self._transaction_id, self._number)
            if packed is not None:
                self.mended.append(f"entry {number} of {self._path} was damaged: one flipped bit was put right")
                return packed
            entry[bit // 8] ^= 1 << bit % 8
        if not differences:
            self.left_out.append(f"entry {number} of {self._path} is not whole: a commit that was cut off is left out")
        return None


def _seed(identity: LogIdentity) -> int:
    """With what each CRC begins: no entry of another log counts, and nobody can put one into a payload."""
    return crc64(_IDENTITY.pack(identity.committer_id, identity.created_ns))


def encode_entry(seed: int, transaction_id: int, number: int, packed: bytes) -> bytes:
    checked = _CHECKED.pack(_MAGIC, len(packed), transaction_id, number)
    return b"".join((checked, crc64(packed, crc64(checked, seed)).to_bytes(8, "little"), packed))


def decode_entry(data: bytes, seed: int, transaction_id: int, number: int) -> bytes | None:
    """The rows of the entry with which ``data`` begins; None unless it is that one, whole."""
    if len(data) < _HEADER.size:
        return None
    magic, size_bytes, of_transaction, own_number, check = _HEADER.unpack_from(data)
    if (magic, of_transaction, own_number) != (_MAGIC, transaction_id, number):
        return None
    packed = data[_HEADER.size : _HEADER.size + size_bytes]
    if len(packed) != size_bytes or check != crc64(packed, crc64(data[: _CHECKED.size], seed)):
        return None
    return packed


def put_rows(write: lmdb.Transaction[memoryview], tables: Tables, rows: Rows) -> None:
    for (table, key), value in rows.items():
        if table == "records":
            require(write.put(key, value, append=True, db=tables.records), f"record {key.hex()} is in the log already")
        else:
            write.put(key, value, db=getattr(tables, table))


def rows_of_table(rows: Mapping[tuple[str, bytes], bytes], table: str) -> list[tuple[bytes, bytes]]:
    """In the order of their keys."""
    return sorted([(key, value) for (name, key), value in rows.items() if name == table])
