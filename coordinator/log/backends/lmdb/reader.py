"""Reads a log in LMDB beside a process that can write it: a snapshot of LMDB, and the journal's new entries on top."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import lmdb

from immortal.coordinator.core.errors import DamagedLogError
from immortal.coordinator.log.backend import Finding, Mac, ReadBackend, Severity
from immortal.coordinator.log.backends.lmdb.environment import (
    MappedPages,
    begin_reading,
    last_transaction_id,
    open_environment,
    unreadable,
)
from immortal.coordinator.log.backends.lmdb.files import DATA_FILE_NAME, HighWaterMark, is_locked
from immortal.coordinator.log.backends.lmdb.journal import JournalReader
from immortal.coordinator.log.backends.lmdb.tables import (
    JournalRows,
    LmdbView,
    ReadTransaction,
    journal_nonce,
    open_tables,
    view_of,
)
from immortal.coordinator.log.identity import first_and_last_sequence_id, read_identity


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
