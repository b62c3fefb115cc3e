"""Copies logs into folders: the part that an operator has cut off, and backups."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import lmdb

from immortal.coordinator.core.errors import LogError
from immortal.coordinator.log.backend import Mac, Row, Span, View, batches
from immortal.coordinator.log.backends.lmdb.environment import (
    MAP_SIZE_BYTES,
    error_of,
    open_environment,
    restrict_log_modes,
)
from immortal.coordinator.log.backends.lmdb.files import (
    DATA_FILE_NAME,
    LOCK_FILE_NAME,
    READERS_FILE_NAME,
    FolderLock,
    HighWaterMark,
    log_exists,
    sync_names,
)
from immortal.coordinator.log.backends.lmdb.tables import LmdbView, Tables, TableWriter, create_tables, open_tables
from immortal.coordinator.log.format import ALL_TABLES, META_JOURNAL, SEQUENCE_KEY
from immortal.coordinator.log.identity import LogIdentity, first_and_last_sequence_id, read_identity
from immortal.protocol.files import make_folder, sync_folder

COPIED_SIZE_BYTES_MAX = 32 << 20  # limit of one transaction
_PARTIAL_PREFIX = ".cut-"
_WITH_CHECKPOINTS = ("chunks", "outputs")
_LEFT_OVER = {DATA_FILE_NAME, LOCK_FILE_NAME, READERS_FILE_NAME}  # left by an interrupted first backup
_COPIED_INCREMENTALLY = ("records", "checkpoints", *_WITH_CHECKPOINTS)


def export_cut_rows(log: Path, name: str, rows: Iterable[Row]) -> Path:
    """Write ``rows`` into a separate log below ``log``; return its folder, which gets its name once it is durable.

    Raises LogError.
    """
    for left_over in log.glob(f"{_PARTIAL_PREFIX}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    number = 1
    while (final := log / f"{name}-{number}").exists():
        number += 1
    partial = log / f".{final.name}"
    try:
        make_folder(partial)
        _write(partial, rows, 2 * (log / DATA_FILE_NAME).stat().st_size + (64 << 20))
        sync_folder(partial)
        partial.rename(final)
        sync_folder(log)
    except (OSError, lmdb.Error) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise LogError(
            f"what is to be cut off cannot be kept in {final}, so nothing was cut: {error}; make room first"
        ) from error
    return final


def _write(folder: Path, rows: Iterable[Row], map_size_bytes: int) -> None:
    with open_environment(folder, readonly=False, map_size_bytes=map_size_bytes) as target:
        tables = create_tables(target)
        for table, of_table in groupby(rows, key=lambda row: row[0]):
            put_rows(target, tables, table, of_table)
        target.sync(True)


def put_rows(target: lmdb.Environment, tables: Tables, table: str, rows: Iterable[Row]) -> None:
    """Put ``rows`` in transactions of a bounded size."""
    for batch in batches(rows, COPIED_SIZE_BYTES_MAX):
        with target.begin(write=True) as transaction:
            for _, key, value in batch:
                if table != "meta" or key != META_JOURNAL:  # a copy's tables include the journal's rows
                    transaction.put(key, value, db=tables[table])


def update_copy(source: View, identity: LogIdentity, mac: Mac | None, target: Path) -> int:
    """Update the copy in ``target`` from ``source``; return the number of records copied.

    One LMDB transaction does the whole update, so an interrupted one changes nothing. Raises ValueError if ``target``
    has something else.
    """
    make_folder(target)
    if not log_exists(target) and {path.name for path in target.iterdir()} - _LEFT_OVER:
        raise ValueError(f"{target} holds something, and no backup: name a new folder, or an empty one")
    lock = FolderLock(target)
    try:
        copied = _copy_log(source, identity, mac, target)
        restrict_log_modes(target)
        sync_names(target)
        return copied
    finally:
        lock.release()


def _copy_log(source: View, identity: LogIdentity, mac: Mac | None, target: Path) -> int:
    is_new = not log_exists(target)
    if is_new:
        (target / DATA_FILE_NAME).unlink(missing_ok=True)  # left by an interrupted first backup
    with open_environment(target, readonly=False, map_size_bytes=MAP_SIZE_BYTES) as environment:
        tables = create_tables(environment) if is_new else open_tables(environment, target)
        if not is_new:
            with environment.begin(buffers=True) as transaction:
                theirs = read_identity(LmdbView(transaction, tables), str(target), None)
            names = ("instance_name", "committer_id", "created_ns", "is_encrypted")  # free pages keep what was plain
            if any(getattr(identity, name) != getattr(theirs, name) for name in names):
                raise ValueError(
                    f"{target} has a backup of another log, of {theirs.instance_name!r}: name another folder"
                )
        try:
            with environment.begin(write=True, buffers=True) as transaction:
                writing = TableWriter(environment, transaction, tables)
                copied = _copy_records(source, writing, target)
                _copy_checkpoints(source, writing)
                for table in ALL_TABLES:
                    if table not in _COPIED_INCREMENTALLY:
                        writing.delete(Span(table))
                        writing.put_rows((table, bytes(key), value) for key, value in source.scan(table))
                writing.fit_seal_tables()
                writing.forget_journal()  # a copy's tables include the journal's rows
        except lmdb.Error as error:
            raise error_of(target, error) from error
        last = first_and_last_sequence_id(source)[1]
        value = source.get("records", SEQUENCE_KEY.pack(max(last, 0)))
        if value is not None:
            mark = HighWaterMark(target, identity, mac)
            mark.put(last, value)
            mark.close()
        return copied


def _copy_records(source: View, writing: TableWriter, target: Path) -> int:
    first, last = first_and_last_sequence_id(source)
    target_view = writing.view()
    _, have = first_and_last_sequence_id(target_view)
    key = SEQUENCE_KEY.pack(max(have, 0))
    ours, theirs = target_view.get("records", key), source.get("records", key)
    if have > last or (ours is not None and theirs is not None and bytes(ours) != bytes(theirs)):
        raise ValueError(
            f"the backup in {target} has records that the log has not: the log was cut, or replaced by an older copy,"
            " since; name another folder"
        )
    writing.delete(Span("records", end=SEQUENCE_KEY.pack(first)))
    begin = max(first, have + 1)
    writing.put_rows(("records", bytes(key), value) for key, value in source.scan("records", SEQUENCE_KEY.pack(begin)))
    return last - begin + 1


def _copy_checkpoints(source: View, writing: TableWriter) -> None:
    """Copy the checkpoints that differ.

    A header has the checks of its parts, so equal headers mean equal checkpoints.
    """
    theirs = {bytes(key): bytes(value) for key, value in source.scan("checkpoints")}
    ours = {bytes(key): bytes(value) for key, value in writing.view().scan("checkpoints")}
    for key in [key for key, header in ours.items() if theirs.get(key) != header]:
        writing.delete(Span.of_key("checkpoints", key))
        for span in _spans(key):
            writing.delete(span)
    for key in [key for key, header in theirs.items() if ours.get(key) != header]:
        writing.put_rows([("checkpoints", key, theirs[key])])
        for span in _spans(key):
            writing.put_rows((span.table, row, value) for row, value in span.rows(source))


def _spans(checkpoint_key: bytes) -> list[Span]:
    (checkpoint_id,) = SEQUENCE_KEY.unpack(checkpoint_key)
    return [Span.of_checkpoint(table, checkpoint_id) for table in _WITH_CHECKPOINTS]
