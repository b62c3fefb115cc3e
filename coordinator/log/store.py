"""The writer: a LogStore in LMDB."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

import lmdb

from coordinator.core.errors import (
    DamagedCheckpointError,
    DamagedLogError,
    LogError,
    LogFullError,
    fail,
    require,
)
from coordinator.core.interfaces import (
    Letter,
    LogSpace,
    LogSummary,
    OutputBatch,
    StoredClients,
    StreamStart,
    Transaction,
    VersionStart,
)
from coordinator.fault_points import FaultPoint, reach
from coordinator.log import format as log_format
from coordinator.log import reading, spilled, trim, verdicts
from coordinator.log.authentication import (
    LogKey,
    LogKeyError,
    Macs,
    Sealer,
    are_authentic,
    authentic_prefix,
    find_key,
    not_authenticated,
    read_chunk,
    read_marker,
    seal_all,
    unseal_all,
)
from coordinator.log.checkpoint_store import CheckpointWriter, remove_half_written
from coordinator.log.environment import (
    DATA_FILE_NAME,
    LogIdentity,
    Tables,
    extend_data_file,
    failure_of,
    last_transaction_id,
    make_missing_tables,
)
from coordinator.log.format import SEQUENCE_KEY, StoredHeader
from coordinator.log.high_water import HighWaterMark
from coordinator.log.journal import ENTRY_SIZE_BYTES_MAX, Journal, JournalReader, Rows, put_rows
from coordinator.log.lock import FolderLock
from coordinator.log.overlay import laid_over
from coordinator.log.rebuild import rebuild
from coordinator.log.residency import MappedPages
from coordinator.log.sync_delay import sync_delay_s
from coordinator.log.values import check_value
from protocol.varint import Readable
from protocol.verdicts import MessageKey

Result = TypeVar("Result")
WriteTransaction: TypeAlias = "lmdb.Transaction[memoryview]"
_RECORD_HEADER = struct.Struct("<iiQq")


class LmdbLogStore:
    """The log of one instance, open for writing. Made by :func:`coordinator.log.folder.open_log` or ``create_log``.

    commit, write_checkpoint_chunk and trim may run in one thread while read, read_checkpoint_chunk and summary
    run in another. After a LogFullError or LogSyncError every call but :meth:`close` raises it again: what is on
    disk is unknown until the log is opened anew.
    """

    def __init__(
        self,
        folder: Path,
        environment: lmdb.Environment,
        tables: Tables,
        lock: FolderLock,
        identity: LogIdentity,
        map_size_bytes_max: int,
        keys: Sequence[LogKey] = (),
        *,
        adopt: bool = False,
        accept: bool = False,
    ) -> None:
        self.identity = identity
        self.macs: Macs | None = None  # None: the log is not authenticated
        self.problems: list[str] = []  # what was found damaged and could be left out, in words
        self.rebuilt: list[str] = []  # what was found damaged when it was opened and was put right, in words
        self._folder = folder
        self._environment = environment
        self._tables = tables
        self._folder_lock = lock
        self._map_size_bytes_max = map_size_bytes_max
        self._write_lock = threading.Lock()
        self._sync_delay_s = sync_delay_s()
        self.synced: Callable[[float], None] | None = None  # told how many seconds each write took of the disk
        self._map_lock = threading.Lock()  # held while a read transaction is open: the map must not move then
        self._failure: LogError | None = None
        self._damaged_checkpoint_ids: set[int] = set()
        self._mapped_pages = MappedPages(folder / DATA_FILE_NAME)
        environment.reader_check()
        journal = JournalReader(folder, identity)
        try:
            environment.sync(True)  # a copy, say: entries of the journal follow a transaction, which must outlive them
        except lmdb.Error as error:
            raise failure_of(self._folder, error) from error
        transaction_id = last_transaction_id(environment)
        with environment.begin(buffers=True) as transaction:
            nonce = reading.journal_nonce(transaction, tables)
        self._needs_journal = nonce is not None  # as the tables say
        # What is durable, and in no table yet, behind that transaction: the next write to LMDB takes it in.
        rows = journal.rows(transaction_id, nonce=lambda: nonce)
        try:
            if rows:
                journal.make_durable()
        except OSError as error:
            raise failure_of(folder, error) from error
        self._journaled: tuple[int, Rows] = transaction_id, {**rows}
        self._journal = Journal(folder, identity)
        self._has_journal: bool | None = None  # None: the first small commit makes it
        if not self._journaled[1]:
            self._journal.restart(transaction_id)
        self._sealer: Sealer | None = None
        if identity.format_version < log_format.FORMAT_VERSION:
            self._tables = self._write(self._make_current)
        marker = self._read(lambda transaction: read_marker(transaction, self._tables))
        rebuilt: list[str] = []
        if marker is not None:  # a row that was put right has to be what it was
            rebuilt = self._rebuild()
        if marker is not None and not accept:
            self.macs = Macs(find_key(keys, marker, identity.instance_name), identity, marker)
            self._sealer = self._make_sealer(self.macs)
        elif keys and not (adopt or accept):
            raise LogKeyError(not_authenticated(identity.instance_name))
        tables = self._tables
        self._checkpoint_writer = CheckpointWriter(tables)
        _, self._last_sequence_id = self._read(
            lambda transaction: reading.first_and_last_sequence_id(transaction, tables)
        )
        self._high_water_mark = HighWaterMark(folder, identity, self.macs)
        mended = [] if accept else self._check_high_water_mark()
        while self._write_if_needed(lambda transaction: remove_half_written(transaction, tables)):
            pass
        self.rebuilt = rebuilt + (self._rebuild() if self._sealer is None else [])
        self.rebuilt += mended + journal.mended + journal.left_out
        if keys and (self.macs is None or self.macs.marker.key_id != keys[0].id):
            self._give_key(keys[0], None if marker is None or accept else marker.first_sequence_id)
        extend_data_file(folder / DATA_FILE_NAME)

    def _rebuild(self) -> list[str]:
        with self._naming_remedy():
            committer_id = self.identity.committer_id
            return self._write_if_needed(lambda write: rebuild(write, self._tables, committer_id)) or []

    def _give_key(self, key: LogKey, first_sequence_id: int | None) -> None:
        """Authenticate all that is in the log as it is now; ``first_sequence_id``: as it was with another key."""
        self._sealer = None
        self.macs, self._tables = self._write(
            lambda write: seal_all(self._environment, write, self._tables, key, self.identity, first_sequence_id)
        )
        self._sealer = self._make_sealer(self.macs)
        self._checkpoint_writer = CheckpointWriter(self._tables)
        self._high_water_mark.close()
        self._high_water_mark = HighWaterMark(self._folder, self.identity, self.macs)
        last = self._last_sequence_id
        value = self._read(
            lambda read: read.get(SEQUENCE_KEY.pack(last), db=self._tables.records) if last >= 0 else None
        )
        if value is not None:
            self._high_water_mark.put(last, value)

    def _make_sealer(self, macs: Macs) -> Sealer:
        tables, name = self._tables, self.identity.instance_name
        sealer = self._read(lambda transaction: Sealer(macs, transaction, tables, name))
        with self._map_lock:
            self._mapped_pages.release()  # all tables but those of records and chunks were read
        return sealer

    def forget_key(self) -> None:
        """Make it a log without authentication, as far as the disk goes: close it then."""
        self._sealer = None
        self._write(lambda write: unseal_all(write, self._tables))
        self._high_water_mark.remove()

    def _check_high_water_mark(self) -> list[str]:
        """Whether all that was committed is there; what is wrong with the mark itself. Raises DamagedLogError."""
        try:
            mark = self._high_water_mark.read()
        except (OSError, ValueError) as error:
            return [str(error)]
        lacking = self._read(lambda transaction: self._high_water_mark.lacking(transaction, self._tables, mark))
        if lacking is not None:
            raise DamagedLogError(lacking, -1)
        return []

    def summary(self) -> LogSummary:
        """The log's state. A damaged checkpoint header is left out and described in :attr:`problems`.

        Impulses whose batch is acknowledged whole come with an empty payload: their positions count, their bytes
        do not.
        Raises DamagedLogError with sequence ID -1 for a damaged position, peer or meta value.
        """
        problems: list[str] = []
        with self._naming_remedy():
            summary = self._read(
                lambda transaction: reading.load_summary(
                    transaction, self._tables, self.identity.committer_id, self._load_outputs, problems
                )
            )
        self.problems = problems
        with self._map_lock:
            self._mapped_pages.release()  # the heads of rows were looked at, and whole rows mapped
        return summary

    def clients(self) -> StoredClients:
        """What is known of clients. A damaged reply counts as not kept any more and is described in :attr:`problems`.

        Raises DamagedLogError with sequence ID -1 for a damaged position.
        """
        problems: list[str] = []
        with self._naming_remedy():
            clients = self._read(lambda transaction: reading.load_clients(transaction, self._tables, problems))
        self.problems = problems
        return clients

    def commit(self, transaction: Transaction) -> None:
        """Make ``transaction`` durable, whole. Raises LogFullError or LogSyncError, then refuses everything."""
        records = transaction.records
        if records:
            check_records(records, self._last_sequence_id, self.identity.committer_id)
        is_small = _is_small(transaction)
        if is_small and self._has_journal is None:
            self._make_journal()
        if not (is_small and self._append_to_journal(transaction)):
            self._write(lambda write: self._put(write, transaction))
        if records:
            self._last_sequence_id = records[-1][0]
            self._high_water_mark.put(*records[-1])
            self._have_touched(sum(len(value) for _, value in records))
        if transaction.checkpoint is not None:
            self._checkpoint_writer.header_committed()

    def read(self, first_sequence_id: int, size_bytes_max: int) -> list[bytes]:
        """Checked values from ``first_sequence_id`` on: at most ``size_bytes_max``, but one if there is one.

        Raises DamagedLogError if the first of them is damaged or missing; those before a damaged one are returned.
        """
        last = self._last_sequence_id  # before the transaction: what was committed by now must be there

        def collect(transaction: reading.ReadTransaction) -> tuple[list[bytes], list[bool], DamagedLogError | None]:
            values, gap = reading.collect_values(transaction, self._tables, first_sequence_id, size_bytes_max)
            rows = enumerate(values, first_sequence_id)
            return values, are_authentic(transaction, self._tables, self.macs, rows), gap

        with self._naming_remedy():
            values, are, gap = self._read(collect)
            if not values:
                if gap is not None:
                    raise gap
                if first_sequence_id <= last:
                    raise DamagedLogError(
                        f"record {first_sequence_id} is missing: the last is record {last}", first_sequence_id
                    )
            self._have_touched(sum(map(len, values)))
            checked = checked_prefix(values, first_sequence_id, self.identity.committer_id)
            return authentic_prefix(checked, are[: len(checked)], first_sequence_id)

    @contextlib.contextmanager
    def _naming_remedy(self) -> Iterator[None]:
        """What stops a recovery says which command looks into it."""
        try:
            yield
        except DamagedLogError as error:
            remedy = f"'immortal recover {self.identity.instance_name}' says what can be done"
            raise DamagedLogError(f"{error}: {remedy}", error.sequence_id) from error

    def _have_touched(self, size_bytes: int) -> None:
        with self._map_lock:
            self._mapped_pages.have_touched(size_bytes)

    def write_checkpoint_chunk(self, checkpoint_id: int, index: int, data: Readable) -> None:
        """Keep one chunk; chunks come in order, index 0 begins anew. An empty one is not stored."""
        if not data:
            return
        self._write(lambda write: self._checkpoint_writer.put_chunk(write, checkpoint_id, index, data))
        self._checkpoint_writer.chunk_committed(checkpoint_id, index, data)

    def read_checkpoint_chunk(self, checkpoint_id: int, index: int) -> bytes:
        """Chunk ``index``, b"" after the last.

        Raises DamagedCheckpointError; from then on trim does not count that checkpoint among those to keep.
        """
        try:
            chunk = self._read(
                lambda transaction: read_chunk(transaction, self._tables, self.macs, checkpoint_id, index)
            )
            self._have_touched(len(chunk))
            return chunk
        except DamagedCheckpointError:
            self._damaged_checkpoint_ids.add(checkpoint_id)
            raise

    def trim(self, *, keep_checkpoints: int | None, keep_since_ns: int | None = None) -> bool:
        """Remove one bounded step of what need not be kept; True if more remains.

        Kept are the newest ``keep_checkpoints`` with the records after them and, where ``keep_since_ns`` (ns since the
        Unix epoch) is given, the newest checkpoint taken at or before that moment with all that came after it.
        ``keep_checkpoints`` None: only ``keep_since_ns`` counts, and without it everything is kept. The newest valid
        checkpoint and the records after it always stay. Spilled outputs go as soon as they are acknowledged.
        """
        keep = None
        if keep_checkpoints is not None or keep_since_ns is not None:
            keep = trim.Retention(keep_checkpoints, keep_since_ns)
        budget = trim.Budget.step()
        from_spilled = False

        def step(write: WriteTransaction) -> None:
            nonlocal budget, from_spilled
            self._environment.reader_check()  # a killed reader's slot would keep freed pages from being used again
            budget = trim.Budget.step()  # a retry with a larger map begins anew
            acknowledged = reading.acknowledged_positions(write, self._tables)
            spilled.trim(write, self._tables, acknowledged, budget)
            from_spilled = budget.rows_left < trim.STEP_ROWS_MAX
            if from_spilled:
                reach(FaultPoint.DURING_SPILL_TRIM)
            if keep is not None and not budget.exhausted:
                trim.trim_step(write, self._tables, keep, self._damaged_checkpoint_ids, acknowledged, budget)
            reach(FaultPoint.DURING_TRIM)

        self._write(step)
        if from_spilled:
            reach(FaultPoint.AFTER_SPILL_TRIM)
        if budget.rows_left < trim.STEP_ROWS_MAX:
            extend_data_file(self._folder / DATA_FILE_NAME)
        return budget.exhausted

    def read_spilled(
        self, destination: str, first_position: int, last_position: int, size_bytes_max: int
    ) -> list[OutputBatch]:
        """As LogStore.read_spilled."""
        with self._naming_remedy():
            batches = self._read(
                lambda transaction: spilled.read(
                    transaction, self._tables, destination, first_position, last_position, size_bytes_max
                )
            )
        self._have_touched(sum(len(batch.payload) for batch in batches))
        return batches

    def letter(self, key: MessageKey) -> Letter | None:
        """As LogStore.letter."""
        return self._read(lambda transaction: verdicts.load_letter(transaction, self._tables, key))

    def space(self) -> LogSpace:
        """What the log needs of its file: the pages of all tables, and what the disk has left."""
        used_bytes = self._read(lambda transaction: reading.used_bytes(transaction, self._tables))
        state = os.statvfs(self._folder)
        return LogSpace(used_bytes, state.f_bavail * state.f_frsize)

    def size_bytes(self) -> int:
        """The size of the log's file."""
        return (self._folder / DATA_FILE_NAME).stat().st_size

    def settle(self) -> None:
        """Bring what is in the journal into the tables."""
        if self._journaled[1]:
            self._write(lambda write: None)

    def close(self) -> None:
        """Close the log and let others write it. Harmless when closed already."""
        with contextlib.suppress(LogError):  # the next start takes it in
            if self._needs_journal:
                self._write(lambda write: write.delete(log_format.META_JOURNAL, db=self._tables.meta))
                self._needs_journal = False
            self.settle()
        with self._write_lock, self._map_lock:
            if self._failure is None:
                self._failure = LogError(f"the log in {self._folder} is closed")
            if self._needs_journal or self._journaled[1]:
                self._journal.close()
            else:
                with contextlib.suppress(OSError):  # what is in it does not count
                    self._journal.remove()
            self._high_water_mark.close()
            self._environment.close()
            self._folder_lock.release()

    # Inside

    def _make_current(self, write: WriteTransaction) -> Tables:
        """Give an older log the tables of this format, and its number."""
        self._put_meta(write, log_format.META_FORMAT, log_format.FORMAT_VERSION)
        return make_missing_tables(self._environment, self._tables, write)

    def _put(self, write: WriteTransaction, transaction: Transaction) -> None:
        tables = self._tables
        put_rows(write, tables, _rows(transaction))
        for destination, first_position in transaction.impulses_removed:
            write.delete(log_format.batch_key(destination, first_position), db=tables.impulses)
        for batch in transaction.impulses:
            require(batch.count > 0 and batch.first_position > 0, f"{batch.count} impulses at {batch.first_position}")
            key = log_format.batch_key(batch.destination, batch.first_position)
            value = log_format.encode_batch(log_format.IMPULSES_TABLE, key, batch.count, batch.payload)
            write.put(key, value, db=tables.impulses)
        for destination, position in transaction.spilled_ends.items():
            spilled.end_at(write, tables, destination, position)
        for piece in transaction.spilled:
            require(piece.count > 0 and piece.first_position > 0, f"{piece.count} spilled at {piece.first_position}")
            spilled.put(write, tables, piece)
        for name, committer_id in transaction.peers.items():
            key = log_format.name_key(name)
            write.put(key, log_format.seal(b"peers", key, committer_id), db=tables.peers)
        if transaction.clients or transaction.replies:
            self._put_clients(write, transaction)
        if transaction.stream_starts:
            self._put_stream_starts(write, transaction.stream_starts)
        if transaction.checkpoint is not None:
            self._checkpoint_writer.put_header(write, transaction.checkpoint)
        if transaction.version is not None:
            self._put_version(write, transaction.version)
        verdicts.remove_letters(write, tables, transaction.letters_removed)
        verdicts.put_audit(write, tables, transaction.audit)
        if transaction.cut_healed:
            write.delete(log_format.META_CUT, db=tables.meta)
        if transaction.epoch is not None:
            self._put_meta(write, log_format.META_EPOCH, transaction.epoch)
        if transaction.extensions is not None:
            self._put_meta(write, log_format.META_EXTENSIONS, sorted(transaction.extensions))
        reach(FaultPoint.DURING_COMMIT)

    def _put_clients(self, write: WriteTransaction, transaction: Transaction) -> None:
        tables = self._tables
        for client_id, position in transaction.clients.items():
            key = log_format.name_key(client_id)
            if position is None:
                write.delete(key, db=tables.clients)
            else:
                write.put(key, log_format.encode_client(key, position), db=tables.clients)
        for (client_id, number), data in transaction.replies.items():
            key = log_format.reply_key(client_id, number)
            if data is None:
                write.delete(key, db=tables.replies)
            else:
                write.put(key, log_format.seal_chunk(key, data), db=tables.replies)
        if transaction.clients_forgotten_ns is not None:
            self._put_meta(write, log_format.META_CLIENTS_FORGOTTEN, transaction.clients_forgotten_ns)

    def _put_version(self, write: WriteTransaction, start: VersionStart) -> None:
        """Versions are kept in the order in which they began: one may come back."""
        table = self._tables.versions
        with write.cursor(table) as cursor:
            number = SEQUENCE_KEY.unpack(cursor.key())[0] + 1 if cursor.last() else 1
        key = SEQUENCE_KEY.pack(number)
        write.put(key, log_format.encode_version_start(key, start), db=table)

    def _put_stream_starts(self, write: WriteTransaction, changed: Mapping[str, StreamStart]) -> None:
        starts = {**reading.stream_starts(write, self._tables), **changed}
        rows = {name: (start.offset, start.pending, start.forked) for name, start in sorted(starts.items())}
        self._put_meta(write, log_format.META_STREAM_STARTS, rows)

    def _put_meta(self, write: WriteTransaction, key: bytes, payload: object) -> None:
        write.put(key, log_format.seal(b"meta", key, payload), db=self._tables.meta)

    def _load_outputs(self, stored: StoredHeader) -> dict[str, list[OutputBatch]]:
        return self._read(lambda transaction: reading.load_outputs(transaction, self._tables, stored))

    def _make_journal(self) -> None:
        """There is a file before the tables say so, and until they say so no more."""
        self.settle()  # the file may hold entries that count
        made = self._journal.make()
        if made:
            self._needs_journal = True  # should that commit fail, the next start may find that it did not
            self._write(lambda write: self._put_meta(write, log_format.META_JOURNAL, self._journal.nonce))
        self._has_journal = made

    def _append_to_journal(self, transaction: Transaction) -> bool:
        """Make it durable without LMDB; False where there is no room."""
        if sum([len(value) for _, value in transaction.records]) > ENTRY_SIZE_BYTES_MAX:
            return False  # before it is packed and authenticated for nothing
        with self._write_lock:
            self._refuse_after_failure()
            reach(FaultPoint.DURING_COMMIT)
            rows = _rows(transaction)
            change = None
            if self._sealer is not None:
                rows, change = self._sealer.seal_journaled(rows)
            began_s = time.perf_counter()
            try:
                appended = self._journal.append(rows)
            except OSError as error:
                self._failure = failure_of(self._folder, error)
                raise self._failure from error
            if appended:
                self._tell_synced(began_s)
                self._journaled[1].update(rows)
                if self._sealer is not None and change is not None:
                    self._sealer.adopt(change)
                if self._sync_delay_s:
                    time.sleep(self._sync_delay_s)
            return appended

    def _tell_synced(self, began_s: float) -> None:
        if self.synced is not None:
            self.synced(time.perf_counter() - began_s)

    def _read(self, operation: Callable[[reading.ReadTransaction], Result]) -> Result:
        with self._map_lock:
            try:
                while True:
                    self._refuse_after_failure()
                    transaction_id, rows = self._journaled
                    rows = dict(rows)  # a commit in another thread may go on
                    with self._environment.begin(buffers=True) as transaction:
                        if not rows or transaction.id() == transaction_id:
                            return operation(laid_over(transaction, self._tables, rows))
            except (lmdb.Error, struct.error) as error:
                raise DamagedLogError(f"the log in {self._folder} cannot be read: {error}", -1) from error

    def _write(self, operation: Callable[[WriteTransaction], Result]) -> Result:
        with self._write_lock:
            self._refuse_after_failure()
            while True:
                try:
                    with self._environment.begin(write=True, buffers=True) as transaction:
                        put_rows(transaction, self._tables, self._journaled[1])
                        sealed = None
                        if self._sealer is None:
                            result = operation(transaction)
                        else:
                            sealed = self._sealer.begin(transaction, self._tables)
                            result = operation(sealed.as_transaction())
                            sealed.finish()
                        began_s = time.perf_counter()
                    self._tell_synced(began_s)
                    if self._sealer is not None and sealed is not None:
                        self._sealer.adopt(sealed.change)
                    transaction_id = last_transaction_id(self._environment)
                    self._journaled = transaction_id, {}
                    self._journal.restart(transaction_id)
                    if self._sync_delay_s:
                        time.sleep(self._sync_delay_s)
                    return result
                except lmdb.MapFullError:
                    self._grow()  # the transaction was aborted: nothing of it is lost, it is done again
                except lmdb.Error as error:
                    self._failure = failure_of(self._folder, error)
                    raise self._failure from error

    def _write_if_needed(self, operation: Callable[[WriteTransaction], Result]) -> Result | None:
        """Without anything to do for it nothing is written: so a log can be opened on a full disk."""

        def attempt(write: WriteTransaction) -> Result:
            result = operation(write)
            if not result:
                raise _NothingToDoError
            return result

        try:
            return self._write(attempt)
        except _NothingToDoError:
            return None

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)

    def _grow(self) -> None:
        size_bytes = self._environment.info()["map_size"]
        if size_bytes >= self._map_size_bytes_max:
            self._failure = LogFullError(
                f"the log in {self._folder} has reached its limit of {self._map_size_bytes_max} bytes:"
                " raise the limit, or keep fewer checkpoints"
            )
            raise self._failure
        with self._map_lock:
            self._environment.set_mapsize(min(size_bytes * 2, self._map_size_bytes_max))


class _NothingToDoError(Exception):
    """A transaction is given up."""


def _is_small(transaction: Transaction) -> bool:
    """Nothing but records, positions and verdicts: what most commits are."""
    return bool(transaction.records or transaction.verdicts) and transaction == Transaction(
        transaction.records,
        transaction.sources,
        transaction.acknowledged,
        verdicts=transaction.verdicts,
        suspect=transaction.suspect,
    )


def _rows(transaction: Transaction) -> Rows:
    """The records, positions and verdicts."""
    rows: Rows = {("records", SEQUENCE_KEY.pack(sequence_id)): value for sequence_id, value in transaction.records}
    for name, source in transaction.sources.items():
        key = log_format.name_key(name)
        row = (source.committer_id, source.epoch, source.position)
        rows["sources", key] = log_format.seal(b"sources", key, row)
    for name, position in transaction.acknowledged.items():
        key = log_format.name_key(name)
        rows["acknowledged", key] = log_format.seal(b"acknowledged", key, position)
    if transaction.verdicts:
        rows |= verdicts.verdict_rows(transaction.verdicts, time.time_ns())
    if transaction.suspect is not None:
        rows |= verdicts.suspect_row(transaction.suspect)
    return rows


def check_records(records: Sequence[tuple[int, Readable]], last_sequence_id: int, committer_id: int) -> None:
    """Check that ``records`` follow the last one and that their headers say so too: else the caller has a bug."""
    expected = last_sequence_id + 1
    for sequence_id, value in records:
        if sequence_id != expected:
            fail(f"record {sequence_id} is to be written after record {expected - 1}")
        if len(value) <= _RECORD_HEADER.size:
            fail(f"record {sequence_id} has only {len(value)} bytes")
        committer, size_bytes, _, inner = _RECORD_HEADER.unpack_from(value)
        if committer != committer_id or inner != sequence_id or size_bytes >= len(value):
            fail(
                f"record {sequence_id} says it is record {inner} of committer {committer} with {size_bytes} bytes;"
                f" the log belongs to committer {committer_id}, the value has {len(value)} bytes"
            )
        expected += 1


def checked_prefix(values: list[bytes], first_sequence_id: int, committer_id: int) -> list[bytes]:
    """Those of ``values`` before the first damaged one. Raises DamagedLogError if that is the first."""
    for index, value in enumerate(values):
        try:
            check_value(value, first_sequence_id + index, committer_id)
        except DamagedLogError:
            if index == 0:
                raise
            return values[:index]
    return values
