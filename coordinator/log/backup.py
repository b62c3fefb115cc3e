"""A copy of a log, as of one moment, beside the coordinator that writes it; the next one copies only what came since.

A backup is a log: any command reads it, and an instance starts from it. All of it changes in one transaction of LMDB,
so that a backup that is cut off leaves the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import lmdb

from coordinator.core.errors import LogError
from coordinator.log import format as log_format
from coordinator.log.authentication import LogKey
from coordinator.log.environment import (
    DATA_FILE_NAME,
    READERS_FILE_NAME,
    LogIdentity,
    Tables,
    failure_of,
    log_exists,
    make_seal_tables,
    open_environment,
    open_tables,
    read_identity,
)
from coordinator.log.findings import Severity
from coordinator.log.folder import MAP_SIZE_BYTES, open_reader, sync_names
from coordinator.log.format import CHUNK_KEY, SEQUENCE_KEY
from coordinator.log.high_water import HighWaterMark
from coordinator.log.lock import LOCK_FILE_NAME, FolderLock
from coordinator.log.modes import tighten_log
from coordinator.log.reading import ReadTransaction, first_and_last_sequence_id
from coordinator.log.verify import LogVerification, verify_log
from protocol.private_files import make_folder

_WITH_CHECKPOINTS = ("chunks", "outputs")
_LEFT_OVER = {DATA_FILE_NAME, LOCK_FILE_NAME, READERS_FILE_NAME}  # by a first backup that was cut off
_BY_THEMSELVES = ("records", "checkpoints", *_WITH_CHECKPOINTS)


@dataclass(frozen=True, slots=True)
class Backup:
    first_sequence_id: int
    last_sequence_id: int
    records_copied: int
    checkpoints: int


class BackupError(LogError):
    """No backup was made; one that was there is as it was."""


def back_up(folder: Path, instance_name: str, target: Path, keys: Sequence[LogKey] | None = None) -> Backup:
    """Bring the backup in ``target``, a new or empty folder at first, to the last commit of the log in ``folder``.

    ``keys``: those that the log may be authenticated with; the backup is so as well. Log and backup are verified, byte
    by byte. Raises BackupError, LogError, OSError.
    """
    _check_sound(verify_log(folder, instance_name, keys=keys), f"the log of {instance_name!r}")
    make_folder(target)
    if not log_exists(target) and {path.name for path in target.iterdir()} - _LEFT_OVER:
        raise BackupError(f"{target} holds something, and no backup: name a new folder, or an empty one")
    lock = FolderLock(target)
    try:
        backup = _copy(folder, instance_name, target, keys)
        tighten_log(target)
        sync_names(target)
    finally:
        lock.release()
    _check_sound(verify_log(target, instance_name, keys=keys), f"the backup in {target}")
    return backup


def _check_sound(verification: LogVerification, what: str) -> None:
    wrong = [str(finding.message) for finding in verification.findings() if finding.severity is not Severity.NOTE]
    if wrong:
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise BackupError(f"{what} is damaged: {wrong[0]}{others}")


def _copy(folder: Path, instance_name: str, target: Path, keys: Sequence[LogKey] | None) -> Backup:
    is_new = not log_exists(target)
    if is_new:
        (target / DATA_FILE_NAME).unlink(missing_ok=True)  # of a first backup that was cut off
    environment = open_environment(target, readonly=False, map_size_bytes=MAP_SIZE_BYTES)
    try:
        tables = open_tables(environment, target, create=is_new)
        with open_reader(folder, instance_name, keys=keys, check=False) as reader:
            if not is_new:
                with environment.begin(buffers=True) as transaction:
                    _check_same_log(reader.identity, read_identity(transaction, tables, target, None), target)

            def copy(source: ReadTransaction, source_tables: Tables) -> Backup:
                try:
                    with environment.begin(write=True, buffers=True) as write:
                        nonlocal tables
                        if source_tables.record_seals is not None:
                            tables = make_seal_tables(environment, tables, write)
                        return _bring_up(source, source_tables, write, tables, target)
                except lmdb.Error as error:
                    raise failure_of(target, error) from error

            backup = reader.transact(copy)
            mark = HighWaterMark(target, reader.identity, reader.macs)
        with environment.begin(buffers=True) as transaction:
            last = transaction.get(SEQUENCE_KEY.pack(max(backup.last_sequence_id, 0)), db=tables.records)
            if last is not None:
                mark.put(backup.last_sequence_id, last)
                mark.close()
        return backup
    finally:
        environment.close()


def _check_same_log(ours: LogIdentity, theirs: LogIdentity, target: Path) -> None:
    names = ("instance_name", "committer_id", "created_ns")
    if any(getattr(ours, name) != getattr(theirs, name) for name in names):
        raise BackupError(f"{target} has a backup of another log, of {theirs.instance_name!r}: name another folder")


def _bring_up(
    source: ReadTransaction, source_tables: Tables, write: lmdb.Transaction[memoryview], tables: Tables, target: Path
) -> Backup:
    """Make ``tables`` what ``source_tables`` are, without what both have."""
    first, last = first_and_last_sequence_id(source, source_tables)
    copied = _bring_up_records(source, source_tables, write, tables, target)
    checkpoints = _bring_up_checkpoints(source, source_tables, write, tables)
    for name in Tables.__dataclass_fields__:
        ours, theirs = getattr(tables, name), getattr(source_tables, name)
        if name not in _BY_THEMSELVES and ours is not None:
            write.drop(ours, delete=False)
            for key, value in _rows(source, theirs, b"") if theirs is not None else ():
                write.put(key, value, append=True, db=ours)
    write.delete(log_format.META_JOURNAL, db=tables.meta)  # what it had is in the tables here
    return Backup(first, last, copied, checkpoints)


def _bring_up_records(
    source: ReadTransaction, source_tables: Tables, write: lmdb.Transaction[memoryview], tables: Tables, target: Path
) -> int:
    first, last = first_and_last_sequence_id(source, source_tables)
    _, have = first_and_last_sequence_id(write, tables)
    ours, theirs = (
        transaction.get(SEQUENCE_KEY.pack(max(have, 0)), db=of.records)
        for transaction, of in ((write, tables), (source, source_tables))
    )
    if have > last or (ours is not None and theirs is not None and bytes(ours) != bytes(theirs)):
        raise BackupError(
            f"the backup in {target} has records that the log has not: the log was cut, or replaced by an older copy,"
            " since; name another folder"
        )
    _remove(write, tables.records, b"", SEQUENCE_KEY.pack(first))
    begin = max(first, have + 1)
    for key, value in _rows(source, source_tables.records, SEQUENCE_KEY.pack(begin)):
        write.put(key, value, append=True, db=tables.records)
    return last - begin + 1


def _bring_up_checkpoints(
    source: ReadTransaction, source_tables: Tables, write: lmdb.Transaction[memoryview], tables: Tables
) -> int:
    """Those whose header is the same are: it has the checks of all that belongs to them."""
    theirs = dict(_rows(source, source_tables.checkpoints, b""))
    ours = dict(_rows(write, tables.checkpoints, b""))
    for key in ours.keys() - {key for key, header in theirs.items() if ours.get(key) == header}:
        write.delete(key, db=tables.checkpoints)
        for name in _WITH_CHECKPOINTS:
            _remove(write, getattr(tables, name), *_span(key))
    for key in sorted(theirs.keys() - {key for key, header in ours.items() if theirs.get(key) == header}):
        write.put(key, theirs[key], db=tables.checkpoints)
        first, end = _span(key)
        for name in _WITH_CHECKPOINTS:
            for row, value in _rows(source, getattr(source_tables, name), first):
                if row >= end:
                    break
                write.put(row, value, db=getattr(tables, name))
    return len(theirs)


def _span(key: bytes) -> tuple[bytes, bytes]:
    """From the first to behind the last key of what belongs to a checkpoint."""
    (checkpoint_id,) = SEQUENCE_KEY.unpack(key)
    return CHUNK_KEY.pack(checkpoint_id, 0), CHUNK_KEY.pack(checkpoint_id + 1, 0)


def _rows(transaction: ReadTransaction, table: lmdb._Database, first: bytes) -> Iterator[tuple[bytes, bytes]]:
    with transaction.cursor(table) as cursor:
        if cursor.set_range(first) if first else cursor.first():
            for key, value in cursor:
                yield bytes(key), bytes(value)


def _remove(write: lmdb.Transaction[memoryview], table: lmdb._Database, first: bytes, end: bytes) -> None:
    with write.cursor(table) as cursor:
        found = cursor.set_range(first) if first else cursor.first()
        while found and bytes(cursor.key()) < end:
            found = cursor.delete()
