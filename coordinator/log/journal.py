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
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from struct import Struct
from typing import TypeAlias

import lmdb
import msgspec

from coordinator.core.errors import DamagedLogError, require
from coordinator.log.environment import LogIdentity, Tables, sync_folder
from protocol.checksum import crc64
from protocol.private_files import FILE_MODE

FILE_NAME = "journal"
PARTIAL_FILE_NAME = "journal.new"  # until it has all its blocks: a journal that is shorter was cut
FILE_SIZE_BYTES = 1 << 20  # what a start has to bring into the tables at most: milliseconds
BLOCK_SIZE_BYTES = 4096  # an entry begins with one: what is durable already is never written again
ENTRY_SIZE_BYTES_MAX = 32 << 10  # larger ones gain nothing

Rows: TypeAlias = dict[tuple[str, bytes], bytes]  # by table and key

NO_NONCE = 1  # what the tables of version 4 say


@dataclass(frozen=True, slots=True)
class _Place:
    """Which entry it is: entries of one journal come in this order."""

    transaction_id: int  # the one of LMDB that it follows
    number: int  # of those that follow it, from 0
    nonce: int = NO_NONCE  # of the life that wrote it


@dataclass(frozen=True, slots=True)
class _Form:
    """How an entry begins: what its CRC covers, the CRC, and then the rows."""

    magic: bytes
    checked: Struct  # magic, size of the rows, then the fields of _Place

    @property
    def header_size_bytes(self) -> int:
        return self.checked.size + _CRC_SIZE_BYTES


_CRC_SIZE_BYTES = 8
_FORM = _Form(b"IMJ2", Struct("<4sIQQQ"))
_FORM_4 = _Form(b"IMJ1", Struct("<4sIQQ"))  # of version 4
_FORMS = {form.magic: form for form in (_FORM, _FORM_4)}
_encode = msgspec.msgpack.Encoder().encode
_ROWS = msgspec.msgpack.Decoder(list[tuple[str, bytes, bytes]])


class Journal:
    """The writer's end. What is in the tables says that there is one from :meth:`make` until before :meth:`remove`."""

    def __init__(self, folder: Path, identity: LogIdentity) -> None:
        self.nonce = secrets.randbits(63) | 2  # of this life
        self._path = folder / FILE_NAME
        self._seed = identity.check
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
        size_bytes = _blocks_size_bytes(_FORM, packed)
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
        """Give the file all its blocks, then its name; False where the disk has no room for them.

        Takes the place of the one before: all entries must be in the tables.
        """
        partial = self._path.with_name(PARTIAL_FILE_NAME)
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
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
        self._seed = identity.check
        self._next = _Place(-1, 0)
        self._offset_bytes = 0
        self._rows: Rows = {}
        self._tried = self._next  # to look for a flipped bit in a large entry takes a second

    def rows(
        self,
        transaction_id: int,
        *,
        nonce: Callable[[], int | None] = lambda: None,
        may_mend: Callable[[], bool] = lambda: True,
    ) -> Rows:
        """The rows behind the LMDB transaction ``transaction_id``. Not to be changed.

        ``nonce``: which one that transaction says that the journal has, None where it says that there is none.
        ``may_mend``: whether an entry that is not right can't be one that is being written just now; then a flipped bit
        is put right. Raises DamagedLogError where an entry is damaged, or the file is missing.
        """
        first_look = transaction_id != self._next.transaction_id
        if first_look:
            self._next, self._offset_bytes, self._rows = _Place(transaction_id, 0, nonce() or 0), 0, {}
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
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

    def make_durable(self) -> None:
        """All entries whose rows were given. Raises OSError.

        One of a write that failed can be read and may be on no disk; to sync it once more would do nothing, since the
        kernel believes that it wrote it.
        """
        descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            data = os.pread(descriptor, self._offset_bytes, 0)
            if os.pwrite(descriptor, data, 0) != self._offset_bytes:
                raise OSError(0, f"{self._path} was not written whole")
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def _read_on(self, descriptor: int, may_mend: Callable[[], bool]) -> None:
        rows: Rows = {}
        while True:
            data = os.pread(descriptor, ENTRY_SIZE_BYTES_MAX, self._offset_bytes)
            packed = decode_entry(data, self._seed, self._next)
            if packed is None:
                packed = self._mended(data, may_mend)
            if packed is None:
                break
            rows |= {(table, key): value for table, key, value in _ROWS.decode(packed)}
            self._offset_bytes += _blocks_size_bytes(_form_of(self._next), packed)
            self._next = replace(self._next, number=self._next.number + 1)
        if rows:
            self._rows = {**self._rows, **rows}

    def _check_end(self, descriptor: int) -> None:
        """Entries are written one after the other: behind the last one there is none that counts.

        And none names a transaction that is not there, since that was durable before the entry was written; nor another
        life of this log, since each begins a file of its own.
        """
        rest = os.pread(descriptor, FILE_SIZE_BYTES, self._offset_bytes)
        for start in range(0, len(rest) - _FORM.header_size_bytes + 1, BLOCK_SIZE_BYTES):
            entry = rest[start : start + ENTRY_SIZE_BYTES_MAX]
            place = _place_of(entry)
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
                return  # a live writer has gone on
            raise DamagedLogError(
                f"entry {self._next.number} of {self._path} is damaged, with commits behind it: restore the log from a"
                " copy",
                -1,
            )

    def _mended(self, data: bytes, may_mend: Callable[[], bool]) -> bytes | None:
        """The rows of an entry that differs by one bit from one that would come here."""
        form = _form_of(self._next)
        if len(data) < form.header_size_bytes:
            return None
        magic, size_bytes, *place = form.checked.unpack_from(data)
        expected = form.checked.pack(form.magic, size_bytes, *_fields(form, self._next))
        differences = (int.from_bytes(data[: len(expected)]) ^ int.from_bytes(expected)).bit_count()
        is_meant = (magic, *place[:2]) == (form.magic, self._next.transaction_id, self._next.number)
        if not (differences <= 1 or is_meant) or self._next == self._tried or not may_mend():
            return None
        self._tried = self._next
        number = self._next.number
        packed = self._with_one_bit_flipped(data, form.header_size_bytes + size_bytes) if differences <= 1 else None
        if packed is not None:
            self.mended.append(f"entry {number} of {self._path} was damaged: one flipped bit was put right")
        elif is_meant:
            self.left_out.append(f"entry {number} of {self._path} is not whole: a commit that was cut off is left out")
        return packed

    def _with_one_bit_flipped(self, data: bytes, size_bytes: int) -> bytes | None:
        entry = bytearray(data)
        for bit in range(8 * (size_bytes if size_bytes <= len(data) else _form_of(self._next).header_size_bytes)):
            entry[bit // 8] ^= 1 << bit % 8
            packed = decode_entry(bytes(entry), self._seed, self._next)
            if packed is not None:
                return packed
            entry[bit // 8] ^= 1 << bit % 8
        return None


def _form_of(place: _Place) -> _Form:
    return _FORM_4 if place.nonce == NO_NONCE else _FORM


def _fields(form: _Form, place: _Place) -> tuple[int, ...]:
    numbers = (place.transaction_id, place.number)
    return numbers if form is _FORM_4 else (*numbers, place.nonce)


def _place_of(data: bytes) -> _Place | None:
    """Where the entry with which ``data`` begins says that it belongs."""
    form = _FORMS.get(data[:4])
    if form is None or len(data) < form.header_size_bytes:
        return None
    return _Place(*form.checked.unpack_from(data)[2:])


def _blocks_size_bytes(form: _Form, packed: bytes) -> int:
    return -(-(form.header_size_bytes + len(packed)) // BLOCK_SIZE_BYTES) * BLOCK_SIZE_BYTES


def encode_entry(seed: int, transaction_id: int, number: int, nonce: int, packed: bytes) -> bytes:
    checked = _FORM.checked.pack(_FORM.magic, len(packed), transaction_id, number, nonce)
    return b"".join((checked, crc64(packed, crc64(checked, seed)).to_bytes(_CRC_SIZE_BYTES, "little"), packed))


def decode_entry(data: bytes, seed: int, place: _Place) -> bytes | None:
    """The rows of the entry with which ``data`` begins; None unless it is that one, whole."""
    form = _form_of(place)
    if data[:4] != form.magic or _place_of(data) != place:
        return None
    checked = data[: form.checked.size]
    size_bytes = form.checked.unpack(checked)[1]
    packed = data[form.header_size_bytes : form.header_size_bytes + size_bytes]
    check = int.from_bytes(data[form.checked.size : form.header_size_bytes], "little")
    if len(packed) != size_bytes or check != crc64(packed, crc64(checked, seed)):
        return None
    return packed


def put_rows(write: lmdb.Transaction[memoryview], tables: Tables, rows: Rows) -> None:
    for (table, key), value in rows.items():
        if table == "records":
            require(write.put(key, value, append=True, db=tables.records), f"record {key.hex()} is in the log already")
        elif getattr(tables, table) is not None:
            write.put(key, value, db=getattr(tables, table))
        else:
            raise DamagedLogError(f"the log's journal has a row for the table {table!r}, which the log has not", -1)


def rows_of_table(rows: Mapping[tuple[str, bytes], bytes], table: str) -> list[tuple[bytes, bytes]]:
    """In the order of their keys."""
    return sorted([(key, value) for (name, key), value in rows.items() if name == table])
