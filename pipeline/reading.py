"""Logs open for reading in a worker of Spark, and their values in bounded pieces beside a live writer."""

from __future__ import annotations

import itertools
import os
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import lmdb
import numpy as np

from coordinator.core.errors import LogError
from coordinator.log import format as log_format
from coordinator.log import reading as log_reading
from coordinator.log.environment import (
    DATA_FILE_NAME,
    LogIdentity,
    Tables,
    open_environment,
    open_tables,
    read_identity,
)
from coordinator.log.format import SEQUENCE_KEY
from coordinator.log.residency import MappedPages
from coordinator.log.snapshot import Snapshots
from pipeline.decode import PADDING, Values
from pipeline.errors import LogChangedError

Result = TypeVar("Result")
Operation = Callable[[log_reading.ReadTransaction, Tables], Result]

# One read transaction covers at most this much: it holds back the writer's free pages, and all of it is in memory.
PIECE_SIZE_BYTES = 16 << 20
PIECE_ROWS_MAX = 50_000
SMALL_SIZE_BYTES = 16 << 10  # smaller values are copied faster by LMDB than taken from its memory
OPEN_LOGS_MAX = 64  # each takes two file descriptors


@dataclass(frozen=True, slots=True)
class LogRange:
    """The records ``first`` to ``end`` - 1 of a log, as they were when the range was made."""

    folder: str
    instance: str
    committer_id: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Gap:
    """Records that should be there and are not."""

    first: int
    reason: str


class OpenLog:
    """A log open for reading in this process. No transaction stays open between calls."""

    def __init__(self, folder: str, environment: lmdb.Environment, tables: Tables, identity: LogIdentity) -> None:
        self.folder = folder
        self.identity = identity
        self._environment = environment
        self._snapshots = Snapshots(Path(folder), environment, tables, identity)
        self._mapped_pages = MappedPages(Path(folder) / DATA_FILE_NAME)

    def transact(self, operation: Operation[Result], *, copies: bool = False) -> Result:
        """Run ``operation`` in a read transaction of its own, which gives memory of LMDB's, or ``copies`` of it.

        Copies are faster for small values. As Snapshots.transact, with its errors.
        """
        return self._snapshots.transact(operation, buffers=not copies)

    def have_touched(self, size_bytes: int) -> None:
        """Count what was read: the pages of the map are given back now and then, else they count as this process's."""
        self._mapped_pages.have_touched(size_bytes)

    def release(self) -> None:
        """Give all pages of the map back."""
        self._mapped_pages.release()

    def close(self) -> None:
        self._environment.close()


def open_log(folder: str) -> OpenLog:
    """As :func:`coordinator.log.open_reader`, with the same errors."""
    path = Path(folder)
    environment = open_environment(path, readonly=True, map_size_bytes=0)
    try:
        tables = open_tables(environment, path, create=False)
        with environment.begin(buffers=True) as transaction:
            return OpenLog(folder, environment, tables, read_identity(transaction, tables, path, None))
    except BaseException:
        environment.close()
        raise


_open: OrderedDict[str, tuple[tuple[int, int, int], OpenLog]] = OrderedDict()


def open_shared(folder: str) -> OpenLog:
    """The log open in this process, which LMDB allows once for each file. It stays open for later tasks.

    Raises what :func:`coordinator.log.open_reader` raises.
    """
    try:
        status = os.stat(Path(folder) / DATA_FILE_NAME)
        version = (os.getpid(), status.st_dev, status.st_ino)
    except OSError:
        version = None
    known = _open.pop(folder, None)
    if known is not None and known[0] == version:
        _open[folder] = known
        return known[1]
    if known is not None and known[0][0] == os.getpid():  # else it is the parent's, which fork has copied
        known[1].close()
    log = open_log(folder)
    if version is not None:
        _open[folder] = (version, log)
        while len(_open) > OPEN_LOGS_MAX:
            _open.popitem(last=False)[1][1].close()
    return log


def close_shared() -> None:
    """Close every log that this process has open."""
    while _open:
        _open.popitem()[1][1].close()


def whole_range(folder: str) -> LogRange:
    """All records that the log has now. Raises as :func:`open_shared`."""
    log = open_shared(folder)
    first, last = log.transact(log_reading.first_and_last_sequence_id)
    return LogRange(folder, log.identity.instance_name, log.identity.committer_id, first, last + 1)


def open_range(wanted: LogRange) -> OpenLog:
    """The log that ``wanted`` is of. Raises LogChangedError where another has taken its place."""
    try:
        log = open_shared(wanted.folder)
    except LogError as error:
        if (Path(wanted.folder) / DATA_FILE_NAME).exists():
            raise
        raise LogChangedError(f"the log in {wanted.folder} was removed while it was read") from error
    if log.identity.committer_id != wanted.committer_id:
        raise LogChangedError(
            f"the log in {wanted.folder} was replaced while it was read: it had committer {wanted.committer_id},"
            f" now it has {log.identity.committer_id}; run it again"
        )
    return log


def read_range(wanted: LogRange) -> Iterator[Values | Gap]:
    """All values of the range in order, unchecked; what is missing is told where it should be.

    Raises LogChangedError when records were trimmed away since the range was made.
    """
    log = open_range(wanted)
    try:
        yield from _read(log, wanted)
    finally:
        log.release()


def _read(log: OpenLog, wanted: LogRange) -> Iterator[Values | Gap]:
    expected = wanted.first
    are_small = True  # what comes is taken to be like what came before
    while expected < wanted.end:
        values = log.transact(partial(_piece, first=expected, end=wanted.end), copies=are_small)
        if values is None:
            yield _gap(log, wanted, expected, wanted.end - 1)
            return
        log.have_touched(len(values.raw))
        are_small = len(values.raw) < len(values.sequence_ids) * SMALL_SIZE_BYTES
        parts = [part for part in _contiguous(values) if part.sequence_ids[0] >= expected]
        if not parts:  # a damaged key led back: there is no way on from here
            yield _gap(log, wanted, expected, wanted.end - 1)
            return
        for part in parts:
            first = int(part.sequence_ids[0])
            if first < expected:
                continue
            if first > expected:
                yield _gap(log, wanted, expected, first - 1)
            yield part
            expected = first + len(part.sequence_ids)


def _gap(log: OpenLog, wanted: LogRange, first: int, last: int) -> Gap:
    trimmed = log.transact(
        lambda transaction, tables: log_reading.meta_value(transaction, tables, log_format.META_TRIMMED, log_format.INT)
    )
    if trimmed is not None and trimmed >= first:
        raise LogChangedError(
            f"the log of {wanted.instance!r} in {wanted.folder} was trimmed up to record {trimmed} while record {first}"
            " was to be read: run it again, or let the instance keep more checkpoints (keep_checkpoints)"
        )
    return Gap(first, f"record {first} is missing" if first == last else f"records {first} to {last} are missing")


def _piece(transaction: log_reading.ReadTransaction, tables: Tables, first: int, end: int) -> Values | None:
    """The next values: about PIECE_SIZE_BYTES of them, at least one if there is one."""
    keys: list[bytes | memoryview] = []
    found: list[bytes | memoryview] = []
    rest_bytes = PIECE_SIZE_BYTES
    with transaction.cursor(tables.records) as cursor:
        if not cursor.set_range(SEQUENCE_KEY.pack(first)):
            return None
        for key, value in cursor.iternext():
            keys.append(key)
            found.append(value)
            rest_bytes -= len(value)
            if rest_bytes <= 0 or len(keys) == PIECE_ROWS_MAX:
                break
    joined = b"".join(keys)
    if len(joined) != SEQUENCE_KEY.size * len(keys):
        raise struct.error(f"a key behind record {first} is no sequence ID")
    sequence_ids = np.frombuffer(joined, ">u8").astype(np.int64)
    outside = np.flatnonzero(sequence_ids >= end)
    count = int(outside[0]) if outside.size else len(sequence_ids)
    if not count:
        return None
    del found[count:]
    ends = np.cumsum(np.fromiter(map(len, found), np.int64, count))
    starts = np.concatenate(([0], ends[:-1]))
    return Values(b"".join((*found, PADDING)), sequence_ids[:count], starts, ends)


def _contiguous(values: Values) -> Iterator[Values]:
    """Cut where a sequence ID does not follow the one before."""
    cuts = np.flatnonzero(np.diff(values.sequence_ids) != 1) + 1
    if not cuts.size:
        yield values
        return
    for first, end in itertools.pairwise([0, *cuts.tolist(), len(values.sequence_ids)]):
        part = slice(first, end)
        yield Values(values.raw, values.sequence_ids[part], values.start[part], values.end[part])
