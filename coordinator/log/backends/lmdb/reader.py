"""Reads a log in LMDB beside a process that can write it: a snapshot of LMDB, and the journal's new entries on top.

A writer reads the journal in the same way when it starts.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import lmdb
from msgspec.structs import replace

from immortal.coordinator.core.errors import DamagedLogError
from immortal.coordinator.log.backend import Finding, Mac, ReadBackend, Severity
from immortal.coordinator.log.backends.lmdb.environment import (
    MappedPages,
    begin_reading,
    last_transaction_id,
    open_environment,
    unavailable_error,
    unreadable,
)
from immortal.coordinator.log.backends.lmdb.files import DATA_FILE_NAME, HighWaterMark, is_locked
from immortal.coordinator.log.backends.lmdb.journal import (
    BLOCK_SIZE_BYTES,
    CHECKED,
    ENTRY_SIZE_BYTES_MAX,
    FILE_NAME,
    FILE_SIZE_BYTES,
    HEADER_SIZE_BYTES,
    MAGIC,
    ROWS,
    Place,
    blocks_size_bytes,
    decode_entry,
    place_of,
)
from immortal.coordinator.log.backends.lmdb.tables import (
    JournalRows,
    LmdbView,
    ReadTransaction,
    journal_nonce,
    open_tables,
    view_of,
)
from immortal.coordinator.log.identity import LogIdentity, first_and_last_sequence_id, read_identity
from immortal.protocol.files import opened


class JournalReader:
    """Reader of journal entries after an LMDB transaction. Repeated reads of one journal read only new entries."""

    def __init__(self, folder: Path, identity: LogIdentity) -> None:
        self.repairs: list[str] = []  # messages about repaired damage
        self.left_out: list[str] = []  # messages about incomplete entries
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
                packed = self._repaired(data, may_repair)
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

    def _repaired(self, data: bytes, may_repair: Callable[[], bool]) -> bytes | None:
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
            self.repairs.append(f"entry {number} of {self._path} was damaged: one flipped bit was put right")
        elif is_meant:
            self.left_out.append(f"entry {number} of {self._path} is not whole: a commit that was cut off is left out")
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


class LmdbReader(ReadBackend):
    """Reader of a log in a folder, beside its writer. No transaction stays open between two views."""

    def __init__(self, folder: Path, instance_name: str | None) -> None:
        """Open the log. Raises LogFormatError, LogIdentityError, DamagedLogError, LogLockedError (open here)."""
        self.where = str(folder)
        self._folder = folder
        self._environment = open_environment(folder, readonly=True, map_size_bytes=0)
        try:
            self._tables = open_tables(self._environment, folder)
            with begin_reading(self._environment, folder, buffers=True) as transaction:
                self.identity = read_identity(LmdbView(transaction, self._tables), self.where, instance_name)
        except BaseException:
            self._environment.close()
            raise
        self._journal = JournalReader(folder, self.identity)
        self._journal_lock = threading.Lock()
        self._mapped_pages = MappedPages(folder / DATA_FILE_NAME)

    @contextlib.contextmanager
    def view(self, *, copies: bool = False) -> Iterator[LmdbView]:
        try:
            transaction, rows = self._begin(buffers=not copies)
            with transaction:
                yield view_of(transaction, self._tables, rows)
        except (lmdb.Error, struct.error) as error:
            raise unreadable(self._folder, error, self._environment) from error

    def _begin(self, *, buffers: bool) -> tuple[ReadTransaction, JournalRows]:
        """Begin a transaction; return it with the journal's rows after it. Raises lmdb.Error, DamagedLogError."""
        abandoned_id = None
        while True:
            try:
                transaction = begin_reading(self._environment, self._folder, buffers=buffers)
            except lmdb.MapResizedError:
                self._environment.set_mapsize(0)  # the writer's new size
                continue
            try:
                transaction_id = transaction.id()
                rows = self._journaled(transaction_id, LmdbView(transaction, self._tables))
                if transaction_id in (last_transaction_id(self._environment), abandoned_id):
                    if isinstance(rows, DamagedLogError):
                        raise rows
                    return transaction, rows
            except BaseException:
                transaction.abort()
                raise
            transaction.abort()
            # The writer has continued, and its journal may have begun again. Or it died before it told LMDB's readers
            # its last commit: then they stay at that transaction, and the journal is unchanged since.
            abandoned_id = None if self.is_live() else transaction_id

    def _journaled(self, transaction_id: int, tables: LmdbView) -> JournalRows | DamagedLogError:
        try:
            with self._journal_lock:
                return self._journal.rows(
                    transaction_id, nonce=partial(journal_nonce, tables), may_repair=lambda: not self.is_live()
                )
        except DamagedLogError as error:
            return error

    def is_live(self) -> bool:
        return is_locked(self._folder)

    def findings(self, mac: Mac | None) -> Iterator[Finding]:
        with self.view():
            pass  # this reads the journal
        for problem in self._journal.repairs:
            yield Finding(Severity.DAMAGE, "journal", f"{problem}; the next start makes that last")
        for problem in self._journal.left_out:
            yield Finding(Severity.NOTE, "journal", problem)
        high_water_mark = HighWaterMark(self._folder, self.identity, mac)
        try:
            mark = high_water_mark.read()  # before the log, since a live writer can continue
        except (OSError, ValueError) as error:
            yield Finding(Severity.NOTE if mac is None else Severity.DAMAGE, "high-water mark", str(error))
            return
        with self.view() as view:
            if mark is None and mac is not None and first_and_last_sequence_id(view)[1] >= 0:
                what = f"{high_water_mark.path} is missing: records that were removed at the end would not be missed"
                yield Finding(Severity.NOTE, "high-water mark", what)
            lacking = high_water_mark.missing_data(view, mark)
        if lacking is not None:
            yield Finding(Severity.FATAL, "high-water mark", f"{lacking}; the log cannot be opened")

    def count_bytes_touched(self, size_bytes: int) -> None:
        self._mapped_pages.count_bytes_touched(size_bytes)

    def release(self) -> None:
        self._mapped_pages.release()

    def close(self) -> None:
        self._environment.close()
