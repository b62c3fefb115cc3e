"""Writes a log in LMDB: small appends go to the journal, and the next LMDB transaction moves them into the tables."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import lmdb

from immortal.coordinator.core.errors import DamagedLogError, LogError, LogFullError, fail
from immortal.coordinator.core.interfaces import LogSpace
from immortal.coordinator.fault_points import armed, reach
from immortal.coordinator.log.backend import Append, Backend, Mac, Options, Row
from immortal.coordinator.log.backends.lmdb.environment import (
    MAP_SIZE_BYTES,
    MappedPages,
    begin_read_transaction,
    clear_dead_readers,
    error_of,
    last_transaction_id,
    open_environment,
    unreadable,
)
from immortal.coordinator.log.backends.lmdb.files import DATA_FILE_NAME, FolderLock, HighWaterMark, extend_data_file
from immortal.coordinator.log.backends.lmdb.journal import ENTRY_SIZE_BYTES_MAX, Journal, JournalReader
from immortal.coordinator.log.backends.lmdb.tables import (
    JournalRows,
    LmdbView,
    TableWriter,
    journal_nonce,
    open_tables,
    view_of,
)
from immortal.coordinator.log.format import (
    ALL_TABLES,
    META_JOURNAL,
    META_SEAL,
    META_SUSPECT,
    SEQUENCE_KEY,
)
from immortal.coordinator.log.identity import first_and_last_sequence_id, meta_row, read_identity

MAP_SIZE_BYTES_MAX = 1 << 40
# Tables of small appends, which go to the journal with one sync. Other appends need LMDB's two.
_JOURNALED = frozenset(("sources", "acknowledged", "verdicts", "letters", "record_seals"))
_JOURNALED_META = frozenset((META_SUSPECT, META_SEAL))

Result = TypeVar("Result")


class LmdbBackend(Backend):
    """Backend that writes a log in LMDB. A lock excludes other writers, so it has no term."""

    fence = 0

    def __init__(self, folder: Path, lock: FolderLock | None, instance_name: str, options: Options) -> None:
        """``lock``: owned by this object from now on; None: this process already holds it. Raises like Place.open."""
        self.label = str(folder)
        self.repairs: list[str] = []
        self._folder = folder
        self._folder_lock = lock
        self._map_size_bytes_max = options.map_size_bytes_max or MAP_SIZE_BYTES_MAX
        self._write_lock = threading.RLock()
        self._sync_delay_s = sync_delay_s()
        self._map_lock = threading.Lock()  # held while a read transaction is open, since the map must not move then
        self._mapped_pages = MappedPages(folder / DATA_FILE_NAME)
        self._has_journal: bool | None = None  # None: unknown until the first small append creates it
        self.environment = open_environment(
            folder, readonly=False, map_size_bytes=options.map_size_bytes or MAP_SIZE_BYTES, repairs=self.repairs
        )
        try:
            self._begin(instance_name)
        except BaseException:
            self.environment.close()
            raise

    def _begin(self, instance_name: str) -> None:
        """Read the log's identity and its journal.

        Raises LogFormatError, LogIdentityError, DamagedLogError, LogError.
        """
        self.tables = open_tables(self.environment, self._folder)
        with self.environment.begin(buffers=True) as transaction:
            identity = read_identity(LmdbView(transaction, self.tables), self.label, instance_name)
        self.identity = identity
        journal = JournalReader(self._folder, identity)
        try:
            self.environment.sync(True)  # the log can be a copy: entries of the journal follow its content
        except lmdb.Error as error:
            raise error_of(self._folder, error) from error
        transaction_id = last_transaction_id(self.environment)
        with self.environment.begin(buffers=True) as transaction:
            nonce = journal_nonce(LmdbView(transaction, self.tables))
        self._needs_journal = nonce is not None  # the tables refer to a journal
        # Durable entries after that transaction are in no table yet: the next write to LMDB adds them.
        rows = journal.rows(transaction_id, nonce=lambda: nonce)
        try:
            if rows:
                journal.make_durable()
        except OSError as error:
            raise error_of(self._folder, error) from error
        self.repairs += journal.repairs + journal.skipped
        self.journaled: tuple[int, JournalRows] = transaction_id, {**rows}
        self._journal = Journal(self._folder, identity)
        if not rows:
            self._journal.restart(transaction_id)
        self._high_water_mark = HighWaterMark(self._folder, identity)
        with self.view() as view:
            self._last_sequence_id = first_and_last_sequence_id(view)[1]
        extend_data_file(self._folder / DATA_FILE_NAME)

    @contextlib.contextmanager
    def view(self, *, copies: bool = False) -> Iterator[LmdbView]:
        with self._map_lock:
            try:
                while True:
                    self.raise_failure()
                    transaction_id, rows = self.journaled
                    rows = dict(rows)  # an append in another thread can continue
                    with begin_read_transaction(self.environment, self._folder, buffers=not copies) as transaction:
                        if not rows or transaction.id() == transaction_id:
                            yield view_of(transaction, self.tables, rows)
                            return
            except (lmdb.Error, struct.error) as error:
                raise unreadable(self._folder, error, self.environment) from error

    def is_live(self) -> bool:
        return True

    def count_bytes_touched(self, size_bytes: int) -> None:
        with self._map_lock:
            self._mapped_pages.count_bytes_touched(size_bytes)

    def release(self) -> None:
        with self._map_lock:
            self._mapped_pages.release()

    def space(self) -> LogSpace:
        with self.view() as view:
            used_bytes = sum(view.size(table).size_bytes for table in ALL_TABLES)
        state = os.statvfs(self._folder)
        return LogSpace(used_bytes, state.f_bavail * state.f_frsize)

    def append(self, append: Append) -> None:
        with self._write_lock:
            records, last = append.records, self._last_sequence_id
            if append.expected_last_sequence_id != last:
                fail(f"an append follows record {append.expected_last_sequence_id}, the log ends with {last}")
            size_bytes = sum([len(value) for _, value in records])
            is_small = size_bytes <= ENTRY_SIZE_BYTES_MAX and _is_small(append)
            if not (is_small and self._append_to_journal(append)):
                self._append_to_tables(append)
            if records:
                self._last_sequence_id, value = records[-1]
                self._high_water_mark.put(self._last_sequence_id, value)
                self.count_bytes_touched(size_bytes)

    def _append_to_tables(self, append: Append) -> None:
        removes_much = any(not span.is_one for span in append.deletes)
        at_end = any(span.table == "records" and span.end is None for span in append.deletes)
        if removes_much:
            clear_dead_readers(self.environment, self._folder)
        if at_end:
            self._high_water_mark.remove()  # an operator's cut makes it obsolete
        self._write(lambda writing: writing.put(append))
        if at_end:
            with self.view() as view:
                self._last_sequence_id = first_and_last_sequence_id(view)[1]
        if removes_much:
            extend_data_file(self._folder / DATA_FILE_NAME)

    def _append_to_journal(self, append: Append) -> bool:
        """Make the append durable without LMDB; return False if there is no room, or no journal."""
        self.raise_failure()
        if self._has_journal is None:
            self._create_journal()
        if armed:
            for point in append.points:
                reach(point)
        rows: list[Row] = [("records", SEQUENCE_KEY.pack(number), value) for number, value in append.records]
        rows += append.puts
        began_s = time.perf_counter()
        try:
            appended = self._journal.append(rows)
        except OSError as error:
            self.failure = error_of(self._folder, error)
            raise self.failure from error
        if appended:
            self._report_sync(began_s)
            journaled = self.journaled[1]
            for table, key, value in rows:
                journaled[table, key] = value
            if self._sync_delay_s:
                time.sleep(self._sync_delay_s)
        return appended

    def _create_journal(self) -> None:
        """Create the journal. Its file exists as long as the tables refer to it."""
        self.flush()  # an existing file can have valid entries
        made = self._journal.create()
        if made:
            self._needs_journal = True  # set before the commit, which can be durable even if it fails
            row = meta_row(META_JOURNAL, self._journal.nonce)
            self._write(lambda writing: writing.put_rows((row,)))
        self._has_journal = made

    def _write(self, operation: Callable[[TableWriter], None]) -> None:
        with self._write_lock:
            self.raise_failure()
            while True:
                try:
                    with self.environment.begin(write=True, buffers=True) as transaction:
                        writing = TableWriter(self.environment, transaction, self.tables)
                        writing.apply_journal(self.journaled[1])
                        operation(writing)
                        began_s = time.perf_counter()
                    self._report_sync(began_s)
                    self.tables = writing.tables
                    transaction_id = last_transaction_id(self.environment)
                    self.journaled = transaction_id, {}
                    self._journal.restart(transaction_id)
                    if self._sync_delay_s:
                        time.sleep(self._sync_delay_s)
                    return
                except lmdb.MapFullError:
                    self._grow()  # the transaction was aborted, and is done again: nothing is lost
                except lmdb.Error as error:
                    self.failure = error_of(self._folder, error)
                    raise self.failure from error

    def _report_sync(self, began_s: float) -> None:
        if self.synced is not None:
            self.synced(time.perf_counter() - began_s)

    def _grow(self) -> None:
        size_bytes = self.environment.info()["map_size"]
        if size_bytes >= self._map_size_bytes_max:
            self.failure = LogFullError(
                f"the log in {self._folder} has reached its limit of {self._map_size_bytes_max} bytes:"
                " raise the limit, or keep fewer checkpoints"
            )
            raise self.failure
        with self._map_lock:
            self.environment.set_mapsize(min(size_bytes * 2, self._map_size_bytes_max))

    def check_end(self, mac: Mac | None) -> list[str]:
        self._high_water_mark = HighWaterMark(self._folder, self.identity, mac)
        try:
            mark = self._high_water_mark.read()
        except (OSError, ValueError) as error:
            return [str(error)]
        with self.view() as view:
            lacking = self._high_water_mark.missing_data(view, mark)
        if lacking is not None:
            raise DamagedLogError(lacking, -1)
        return []

    def mark_end(self, mac: Mac | None) -> None:
        self._high_water_mark.remove()
        self._high_water_mark = HighWaterMark(self._folder, self.identity, mac)
        with self.view() as view:
            value = view.get("records", SEQUENCE_KEY.pack(max(self._last_sequence_id, 0)))
            if value is not None:
                self._high_water_mark.put(self._last_sequence_id, value)

    def export_cut_rows(self, name: str, rows: Iterable[Row]) -> Path:
        # Imported here: no running coordinator needs it.
        from immortal.coordinator.log.backends.lmdb.copies import export_cut_rows

        return export_cut_rows(self._folder, name, rows)

    def flush(self) -> None:
        if self.journaled[1]:
            self._write(lambda writing: None)

    def close(self) -> None:
        with contextlib.suppress(LogError):  # otherwise the next start does it
            if self._needs_journal:
                self._write(TableWriter.forget_journal)
                self._needs_journal = False
            self.flush()
        self.close_uncleanly()

    def close_uncleanly(self) -> None:
        with self._write_lock, self._map_lock:
            if self.failure is None:
                self.failure = LogError(f"the log in {self._folder} is closed")
            if self._needs_journal or self.journaled[1]:
                self._journal.close()
            else:
                with contextlib.suppress(OSError):  # its content is no longer valid
                    self._journal.remove()
            self._high_water_mark.close()
            self.environment.close()
            if self._folder_lock is not None:
                self._folder_lock.release()


def _is_small(append: Append) -> bool:
    """Return True for an append that goes to the journal: records or verdicts, with their small rows."""
    if append.deletes:
        return False
    has_messages = bool(append.records)
    for table, key, _ in append.puts:
        if table not in _JOURNALED and not (table == "meta" and key in _JOURNALED_META):
            return False
        has_messages = has_messages or table == "verdicts"
    return has_messages


# Simulation of a slower disk for benchmarks: each commit takes some milliseconds more.
#
# IMMORTAL_BENCH_SYNC_DELAY_MS is read only when a log is opened for writing.


VARIABLE = "IMMORTAL_BENCH_SYNC_DELAY_MS"
DELAY_MS_MAX = 10_000.0


def sync_delay_s(environment: Mapping[str, str] = os.environ) -> float:
    """Return the seconds that each commit waits after its sync; 0 by default. Raises LogError for an invalid number."""
    given = environment.get(VARIABLE, "")
    if not given:
        return 0.0
    try:
        delay_ms = float(given)
    except ValueError:
        delay_ms = -1.0
    if not 0 <= delay_ms <= DELAY_MS_MAX:
        raise LogError(f"{VARIABLE} is {given!r}: milliseconds from 0 to {DELAY_MS_MAX:,.0f} were expected; unset it")
    return delay_ms / 1e3
