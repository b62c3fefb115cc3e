"""Backend for a log in a folder: an LMDB environment, and a journal of small appends in front of it
(docs/LOG_FORMAT.md).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb

from immortal.coordinator.core.errors import DamagedLogError, LogError, LogFormatError, LogUnavailableError
from immortal.coordinator.fault_points import FaultPoint, reach
from immortal.coordinator.log.backend import Finding, Mac, Options, Place, ReadBackend, Row, Severity, View
from immortal.coordinator.log.backends.lmdb.environment import (
    MappedPages,
    begin_read_transaction,
    describe_unnamed,
    error_of,
    last_transaction_id,
    open_environment,
    open_lmdb,
    remove_log,
    restrict_log_modes,
    unavailable_error,
    unreadable,
)
from immortal.coordinator.log.backends.lmdb.files import (
    DATA_FILE_NAME,
    FolderLock,
    HighWaterMark,
    check_data_file,
    first_unreadable,
    is_locked,
    lock_holder,
    log_exists,
    structure_problems,
    sync_names,
)
from immortal.coordinator.log.backends.lmdb.journal import JournalReader
from immortal.coordinator.log.backends.lmdb.pages import PageError, check_pages
from immortal.coordinator.log.backends.lmdb.tables import (
    JournalRows,
    LmdbView,
    ReadTransaction,
    create_tables,
    journal_nonce,
    open_tables,
    view_of,
)
from immortal.coordinator.log.backends.lmdb.writer import LmdbBackend
from immortal.coordinator.log.identity import LogIdentity, first_and_last_sequence_id, read_identity
from immortal.protocol.files import make_folder


class LmdbReader(ReadBackend):
    """Reader of a log in a folder, beside its writer. No transaction stays open between two views."""

    def __init__(self, folder: Path, instance_name: str | None) -> None:
        """Open the log. Raises LogFormatError, LogIdentityError, DamagedLogError, LogLockedError (open here)."""
        self.label = str(folder)
        self._folder = folder
        self._environment = open_environment(folder, readonly=True, map_size_bytes=0)
        try:
            self._tables = open_tables(self._environment, folder)
            with begin_read_transaction(self._environment, folder, buffers=True) as transaction:
                self.identity = read_identity(LmdbView(transaction, self._tables), self.label, instance_name)
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
                transaction = begin_read_transaction(self._environment, self._folder, buffers=buffers)
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
        for problem in self._journal.skipped:
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


_PARTIAL_FOLDER_NAME = ".new"


if TYPE_CHECKING:
    from immortal.coordinator.log.backends.lmdb import LmdbReader


class LmdbPlace(Place):
    """Place of a log in a folder. Its location is the folder's path."""

    scheme = "lmdb"

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self._folder = Path(location)

    @property
    def label(self) -> str:
        return self.location

    @property
    def key(self) -> tuple[str, str]:
        return self.scheme, os.path.realpath(self._folder)

    def exists(self) -> bool:
        if self._folder.is_file():
            raise LogFormatError(f"{self._folder} is a file: the folder of a log was expected")
        return log_exists(self._folder)

    def create(self, identity: LogIdentity, rows: Sequence[Row], options: Options) -> LmdbBackend:
        """Create the log. Its file gets its name only once it is complete, so an interrupted creation leaves no log."""
        folder = self._folder
        make_folder(folder)
        with _locked(folder) as lock:
            if log_exists(folder):
                check_data_file(folder / DATA_FILE_NAME)
                raise LogFormatError(f"there is a log in {folder} already: open it, or choose another folder")
            _create(folder, rows)
            reach(FaultPoint.LOG_CREATED)
            return _open(folder, lock, identity.instance_name, options)

    def open(self, instance_name: str, options: Options) -> LmdbBackend:
        folder = self._folder
        if not log_exists(folder):
            raise LogFormatError(f"there is no log in {folder}")
        with _locked(folder) as lock:
            return _open(folder, lock, instance_name, options)

    def open_reader(self, instance_name: str | None) -> LmdbReader:
        from immortal.coordinator.log.backends.lmdb import LmdbReader

        try:
            return LmdbReader(self._folder, instance_name)
        except (lmdb.Error, OSError) as error:
            unavailable = unavailable_error(self._folder, error)
            raise unavailable or LogError(f"the log in {self._folder} cannot be opened: {error}") from error

    def is_live(self) -> bool:
        return is_locked(self._folder)

    def holder(self) -> str | None:
        return (lock_holder(self._folder) or "another process") if self.is_live() else None

    def version(self) -> object:
        path = self._folder / DATA_FILE_NAME
        try:
            check_data_file(path)  # of a truncated one, opening it says so; reading on would kill the process
            status = path.stat()
        except (OSError, LogError):
            return None
        return status.st_dev, status.st_ino

    def remove(self) -> None:
        remove_log(self._folder)

    def restrict_access(self) -> str | None:
        return restrict_log_modes(self._folder)

    def lock(self) -> Callable[[], None]:
        return FolderLock(self._folder).release

    def open_locked(self, instance_name: str) -> LmdbBackend:
        return _open(self._folder, None, instance_name, Options())

    def findings(self, *, lock_held: bool) -> Iterator[Finding]:
        """Find damage, up to the first fatal one: reading further could crash this process."""
        folder = self._folder
        path = folder / DATA_FILE_NAME
        try:
            check_data_file(path)
        except LogUnavailableError:
            raise
        except LogError as error:
            yield Finding(Severity.FATAL, "file", str(error))
            return
        unreadable = first_unreadable(path)
        if unreadable is not None:  # mapped, such a page would kill the process
            yield Finding(Severity.FATAL, "file", unreadable)
            return
        if not lock_held and is_locked(folder):
            what = "a coordinator writes this log: the structure of its pages is not checked"
            yield Finding(Severity.NOTE, "file", what)
            return
        problems = structure_problems(path)
        if problems is None:
            yield Finding(Severity.NOTE, "file", "the installed py-lmdb cannot check the structure of the pages")
        for problem in problems or ():
            what = f"LMDB's page structure is damaged: {problem}; restore a copy of the log"
            yield Finding(Severity.FATAL, "file", what)
        with contextlib.suppress(PageError, OSError):  # opening it reports these
            unnamed = check_pages(path)
            if unnamed is not None:
                yield Finding(Severity.NOTE, "file", f"{describe_unnamed(unnamed)}: the next start takes it in")

    def copy(self, source: View, identity: LogIdentity, mac: Mac | None) -> int:
        # Imported here: no running coordinator needs it.
        from immortal.coordinator.log.backends.lmdb.copies import update_copy

        return update_copy(source, identity, mac, self._folder)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[FolderLock]:
    """Hold the folder's lock; release it only if the body fails."""
    try:
        lock = FolderLock(folder)
    except OSError as error:
        if (unavailable := unavailable_error(folder, error)) is None:
            raise
        raise unavailable from error
    try:
        yield lock
    except BaseException:
        lock.release()
        raise


def _open(folder: Path, lock: FolderLock | None, instance_name: str, options: Options) -> LmdbBackend:
    try:
        sync_names(folder)
        return LmdbBackend(folder, lock, instance_name, options)
    except OSError as error:
        raise unavailable_error(folder, error) or error_of(folder, error) from error
    except lmdb.Error as error:
        raise unavailable_error(folder, error) or LogError(f"the log in {folder} cannot be opened: {error}") from error


def _create(folder: Path, rows: Sequence[Row]) -> None:
    """Create a new log's file, which gets its name once it is complete. Raises LogFullError, LogSyncError."""
    partial = folder / _PARTIAL_FOLDER_NAME
    shutil.rmtree(partial, ignore_errors=True)  # left by an interrupted creation
    try:
        make_folder(partial)
        # Without a lock: no other process knows it yet.
        with open_lmdb(partial, map_size=1 << 26, lock=False) as environment:
            tables = create_tables(environment)
            with environment.begin(write=True) as transaction:
                for table, key, value in rows:
                    transaction.put(key, value, db=tables[table])
        (partial / DATA_FILE_NAME).replace(folder / DATA_FILE_NAME)
    except (lmdb.Error, OSError) as error:
        raise error_of(folder, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
