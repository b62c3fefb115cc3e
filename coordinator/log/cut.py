"""Cutting the end of a log off by hand, where a damaged record keeps its instance from recovering.

What is cut is kept: it is first copied, byte for byte and durably, into a log of its own in a folder beside. Then it is
removed in one transaction, so that a crash leaves the log whole or cut.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import lmdb

from coordinator.core.errors import DamagedLogError, LogError
from coordinator.log import format as log_format
from coordinator.log import reading
from coordinator.log.authentication import LogKey, Macs, cut_seals, find_key, read_marker
from coordinator.log.checkpoint_store import WriteTransaction
from coordinator.log.cut_plan import CutPlan, plan_cut
from coordinator.log.environment import (
    DATA_FILE_NAME,
    Tables,
    last_transaction_id,
    log_exists,
    open_environment,
    open_tables,
    read_identity,
    sync_folder,
)
from coordinator.log.findings import Finding
from coordinator.log.folder import MAP_SIZE_BYTES
from coordinator.log.format import CHUNK_KEY, SEQUENCE_KEY
from coordinator.log.high_water import HighWaterMark
from coordinator.log.journal import Journal, JournalReader, put_rows
from coordinator.log.lock import FolderLock
from coordinator.log.trim import Budget, delete_range
from protocol.private_files import make_folder

COPIED_SIZE_BYTES_MAX = 32 << 20  # in one transaction
_PARTIAL_PREFIX = ".cut-"
_BEHIND_ALL = b"\xff" * 16

Row = tuple[bytes, bytes]


class LogCutter:
    """Holds a log's lock, so that no coordinator writes it, from the plan to the cut."""

    def __init__(
        self, folder: str | os.PathLike[str], instance_name: str, keys: Sequence[LogKey] | None = None
    ) -> None:
        """``keys``: those that the log may be authenticated with.

        Raises LogLockedError where a coordinator writes the log, LogFormatError where there is none."""
        self._folder = Path(folder)
        self._instance_name = instance_name
        self._keys = keys
        if not log_exists(self._folder):
            raise LogError(f"there is no log in {self._folder}")
        self._lock = FolderLock(self._folder)

    def __enter__(self) -> LogCutter:
        return self

    def __exit__(self, *args: object) -> None:
        self._lock.release()

    def plan(
        self, sequence_id: int, *, force: bool = False, on_finding: Callable[[Finding], None] = lambda finding: None
    ) -> CutPlan:
        """What cutting at ``sequence_id`` means; nothing is changed. As :func:`coordinator.log.cut_plan.plan_cut`."""
        return plan_cut(
            self._folder, self._instance_name, sequence_id, force=force, on_finding=on_finding, keys=self._keys
        )

    def cut(self, plan: CutPlan) -> Path:
        """Carry out ``plan``; the folder where what was cut is kept, as a log that can be opened for reading.

        What stays of an authenticated log is so with the same key; what was cut off is not. Raises LogError; the log is
        as it was then.
        """
        map_size_bytes = max(MAP_SIZE_BYTES, 2 * (self._folder / DATA_FILE_NAME).stat().st_size)
        environment = open_environment(self._folder, readonly=False, map_size_bytes=map_size_bytes)
        try:
            tables = open_tables(environment, self._folder, create=False)
            with environment.begin(buffers=True) as transaction:
                identity = read_identity(transaction, tables, self._folder, self._instance_name)
                nonce = reading.journal_nonce(transaction, tables)
                marker = read_marker(transaction, tables)
            macs = None
            if marker is not None:
                macs = Macs(find_key(self._keys or (), marker, self._instance_name), identity, marker)
            journaled = JournalReader(self._folder, identity).rows(
                last_transaction_id(environment), nonce=lambda: nonce
            )
            with environment.begin(write=True, buffers=True) as write:
                put_rows(write, tables, journaled)
                write.delete(log_format.META_JOURNAL, db=tables.meta)
            Journal(self._folder, identity).remove()
            with environment.begin(buffers=True) as transaction:
                checkpoint_ids = _cut_checkpoint_ids(transaction, tables, plan.sequence_id)
            kept = self._keep(environment, tables, plan, checkpoint_ids)
            HighWaterMark(self._folder, identity).remove()
            with environment.begin(write=True, buffers=True) as write:
                remove_from(write, tables, plan.sequence_id, checkpoint_ids)
                if macs is not None:
                    cut_seals(write, tables, macs, plan.sequence_id, checkpoint_ids)
            return kept
        except lmdb.Error as error:
            raise LogError(f"the log in {self._folder} could not be cut, it is as it was: {error}") from error
        finally:
            environment.close()

    def _keep(self, environment: lmdb.Environment, tables: Tables, plan: CutPlan, checkpoint_ids: list[int]) -> Path:
        """Copy what is to be cut; the folder has its name only once everything in it is durable."""
        for left_over in self._folder.glob(f"{_PARTIAL_PREFIX}*"):
            shutil.rmtree(left_over, ignore_errors=True)
        name = f"cut-{plan.sequence_id}-{plan.last_sequence_id}"
        number = 1
        while (final := self._folder / f"{name}-{number}").exists():
            number += 1
        partial = self._folder / f".{final.name}"
        try:
            make_folder(partial)
            self._copy(environment, tables, partial, plan, checkpoint_ids)
            sync_folder(partial)
            partial.rename(final)
            sync_folder(self._folder)
        except (OSError, lmdb.Error) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise LogError(
                f"what is to be cut off cannot be kept in {final}, so nothing was cut: {error}; make room first"
            ) from error
        return final

    def _copy(
        self, environment: lmdb.Environment, tables: Tables, folder: Path, plan: CutPlan, checkpoint_ids: list[int]
    ) -> None:
        size_bytes = (self._folder / DATA_FILE_NAME).stat().st_size
        target = open_environment(folder, readonly=False, map_size_bytes=2 * size_bytes + (64 << 20))
        try:
            target_tables = open_tables(target, folder, create=True)
            with environment.begin(buffers=True) as source:

                def copy(table: str, ranges: Iterable[tuple[bytes, bytes]]) -> None:
                    if getattr(tables, table) is None:
                        return  # the log is older
                    rows = (row for first, end in ranges for row in _rows(source, getattr(tables, table), first, end))
                    _put_rows(target, getattr(target_tables, table), rows)

                copy("records", [(SEQUENCE_KEY.pack(plan.sequence_id), _BEHIND_ALL)])
                for table in ("verdicts", "letters"):
                    copy(table, [(log_format.record_key(plan.sequence_id), _BEHIND_ALL)])
                copy("checkpoints", [(SEQUENCE_KEY.pack(one), SEQUENCE_KEY.pack(one + 1)) for one in checkpoint_ids])
                for table in ("chunks", "outputs"):
                    copy(table, [(CHUNK_KEY.pack(one, 0), CHUNK_KEY.pack(one + 1, 0)) for one in checkpoint_ids])
                for table in ("sources", "acknowledged", "peers", "clients", "replies", "versions", "meta"):
                    copy(table, [(b"\0", _BEHIND_ALL)])
            with target.begin(write=True) as transaction:
                # It begins where the cut was, and a cut at its beginning means nothing to it.
                _put_meta(transaction, target_tables, log_format.META_TRIMMED, plan.sequence_id - 1)
                transaction.delete(log_format.META_CUT, db=target_tables.meta)
                if transaction.delete(log_format.META_AUTHENTICATED, db=target_tables.meta):
                    transaction.delete(log_format.META_SEAL, db=target_tables.meta)
                    _put_meta(transaction, target_tables, log_format.META_FORMAT, log_format.FORMAT_VERSION)
            target.sync(True)
        finally:
            target.close()


def remove_from(transaction: WriteTransaction, tables: Tables, sequence_id: int, checkpoint_ids: list[int]) -> None:
    """Remove the records from ``sequence_id`` on with what is said of them, those checkpoints, and the versions that
    began there."""

    def remove(table: lmdb._Database, first: bytes, end: bytes) -> None:
        delete_range(transaction, table, first, end, Budget.unlimited())

    remove(tables.records, SEQUENCE_KEY.pack(sequence_id), _BEHIND_ALL)
    for table in (tables.verdicts, tables.letters):
        if table is not None:
            remove(table, log_format.record_key(sequence_id), _BEHIND_ALL)
    transaction.delete(log_format.META_SUSPECT, db=tables.meta)
    for checkpoint_id in checkpoint_ids:
        transaction.delete(SEQUENCE_KEY.pack(checkpoint_id), db=tables.checkpoints)
        for table in (tables.chunks, tables.outputs):
            remove(table, CHUNK_KEY.pack(checkpoint_id, 0), CHUNK_KEY.pack(checkpoint_id + 1, 0))
    with transaction.cursor(tables.versions) as cursor:
        began = [(bytes(key), log_format.decode_version_start(bytes(key), bytes(value))) for key, value in cursor]
    for key, start in began:
        if start.sequence_id >= sequence_id:
            transaction.delete(key, db=tables.versions)
    earlier = reading.meta_value(transaction, tables, log_format.META_CUT, log_format.INT)
    cuts = reading.meta_value(transaction, tables, log_format.META_CUTS, log_format.INTS) or []
    _put_meta(transaction, tables, log_format.META_CUT, sequence_id if earlier is None else min(earlier, sequence_id))
    # A cut in what is cut off now is no longer in this log.
    _put_meta(transaction, tables, log_format.META_CUTS, [one for one in cuts if one < sequence_id] + [sequence_id])


def _cut_checkpoint_ids(transaction: reading.ReadTransaction, tables: Tables, sequence_id: int) -> list[int]:
    """The checkpoints that have seen the record: sequence IDs never shrink from one checkpoint to the next.

    One with an unreadable header goes with those behind the last that stays: it is of no use in either place.
    """
    headers = list(reading.stored_headers(transaction, tables))
    staying = [
        checkpoint_id
        for checkpoint_id, stored in headers
        if not isinstance(stored, DamagedLogError) and stored.header.sequence_id < sequence_id
    ]
    last_staying = max(staying, default=0)
    return [checkpoint_id for checkpoint_id, _ in headers if checkpoint_id > last_staying]


def _rows(source: reading.ReadTransaction, table: lmdb._Database, first: bytes, end: bytes) -> Iterator[Row]:
    """Rows with ``first`` <= key < ``end``, as they are."""
    with source.cursor(table) as cursor:
        if not cursor.set_range(first):
            return
        for key_view, value in cursor:
            key = bytes(key_view)
            if key >= end:
                return
            yield key, bytes(value)


def _put_rows(target: lmdb.Environment, table: lmdb._Database, rows: Iterable[Row]) -> None:
    """Put ``rows``, which come in the order of their keys, in transactions of a bounded size."""
    waiting = iter(rows)
    more = True
    while more:
        more = False
        size_bytes = 0
        with target.begin(write=True) as transaction:
            for key, value in waiting:
                transaction.put(key, value, append=True, db=table)
                size_bytes += len(value)
                if size_bytes >= COPIED_SIZE_BYTES_MAX:
                    more = True
                    break


def _put_meta(
    transaction: WriteTransaction | lmdb.Transaction[bytes], tables: Tables, key: bytes, value: object
) -> None:
    transaction.put(key, log_format.seal(b"meta", key, value), db=tables.meta)
