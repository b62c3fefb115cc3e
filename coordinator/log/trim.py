"""Removing what no kept checkpoint needs, in bounded steps (docs/decisions/0002-trim-in-steps.md)."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import lmdb

from coordinator.core.errors import DamagedLogError, require
from coordinator.core.interfaces import CheckpointHeader
from coordinator.log import format as log_format
from coordinator.log.environment import Tables
from coordinator.log.format import CHUNK_KEY, IMPULSES_TABLE, SEQUENCE_KEY

STEP_ROWS_MAX = 1024  # a commit waits for at most one step: a millisecond or two
STEP_SIZE_BYTES_MAX = 16 << 20


@dataclass(slots=True)
class Budget:
    """How much one step may still remove; the row that uses it up is removed too."""

    rows_left: int
    bytes_left: int

    @classmethod
    def step(cls) -> Budget:
        return cls(STEP_ROWS_MAX, STEP_SIZE_BYTES_MAX)

    @classmethod
    def unlimited(cls) -> Budget:
        return cls(1 << 62, 1 << 62)

    @property
    def exhausted(self) -> bool:
        return self.rows_left <= 0 or self.bytes_left <= 0


@dataclass(frozen=True, slots=True)
class Retention:
    """What is to be kept: the newest ``keep_checkpoints`` (None: what ``keep_since_ns`` asks for alone counts), and
    all that a replay from ``keep_since_ns`` on needs (ns since the Unix epoch; None: no more than that)."""

    keep_checkpoints: int | None
    keep_since_ns: int | None

    def __post_init__(self) -> None:
        require(
            self.keep_checkpoints is None or self.keep_checkpoints >= 1,
            f"{self.keep_checkpoints} checkpoints cannot be kept, it must be at least one",
        )

    def oldest_kept(self, newest_first: Iterable[CheckpointHeader]) -> CheckpointHeader | None:
        """The oldest checkpoint to keep; None where there is none at all."""
        oldest = None
        for kept, header in enumerate(newest_first, start=1):
            oldest = header
            enough = self.keep_checkpoints is None or kept >= self.keep_checkpoints
            if enough and (self.keep_since_ns is None or header.time_ns <= self.keep_since_ns):
                break
        return oldest


def delete_range(
    transaction: lmdb.Transaction[memoryview], table: lmdb._Database, first: bytes, end: bytes, budget: Budget
) -> bytes | None:
    """Delete rows with ``first`` <= key < ``end`` while the budget lasts; the last deleted key, None if none."""
    last_key = None
    rows_left, bytes_left = budget.rows_left, budget.bytes_left
    with transaction.cursor(table) as cursor:
        found = cursor.set_range(first)
        while found and rows_left > 0 and bytes_left > 0:
            key = bytes(cursor.key())
            if key >= end:
                break
            rows_left -= 1
            bytes_left -= len(cursor.value())
            cursor.delete()  # moves to the next row
            last_key = key
            found = bool(cursor.key())
    budget.rows_left, budget.bytes_left = rows_left, bytes_left
    return last_key


def valid_headers(
    transaction: lmdb.Transaction[memoryview], tables: Tables, damaged_ids: Collection[int]
) -> Iterator[CheckpointHeader]:
    """The headers of all checkpoints, newest first; those that are known to be damaged do not count."""
    with transaction.cursor(tables.checkpoints) as cursor:
        found = cursor.last()
        while found:
            with contextlib.suppress(DamagedLogError):
                header = log_format.decode_header(bytes(cursor.key()), bytes(cursor.value())).header
                if header.checkpoint_id not in damaged_ids:
                    yield header
            found = cursor.prev()


def trim_step(
    transaction: lmdb.Transaction[memoryview],
    tables: Tables,
    keep: Retention,
    damaged_ids: Collection[int],
    acknowledged: Mapping[str, int],
    budget: Budget,
) -> None:
    """Remove one step; the budget is exhausted if more may remain.

    The order matters: a header goes before its chunks, and headers before the records that they need, so that a
    crash between two steps never leaves a checkpoint that looks whole and is not.
    """
    oldest = keep.oldest_kept(valid_headers(transaction, tables, damaged_ids))
    if oldest is None:
        return
    oldest_key = SEQUENCE_KEY.pack(oldest.checkpoint_id)
    delete_range(transaction, tables.checkpoints, b"\0", oldest_key, budget)
    for table in (tables.chunks, tables.outputs):
        delete_range(transaction, table, b"\0", CHUNK_KEY.pack(oldest.checkpoint_id, 0), budget)
    last_key = delete_range(transaction, tables.records, b"\0", SEQUENCE_KEY.pack(oldest.sequence_id + 1), budget)
    if last_key is not None:
        (sequence_id,) = SEQUENCE_KEY.unpack(last_key)
        value = log_format.seal(b"meta", log_format.META_TRIMMED, sequence_id)
        transaction.put(log_format.META_TRIMMED, value, db=tables.meta)
    if not budget.exhausted and tables.verdicts is not None:
        delete_range(transaction, tables.verdicts, b"\0", log_format.record_key(oldest.sequence_id + 1), budget)
    for destination, mark in oldest.outputs.items():
        if not budget.exhausted:
            # Also those before the checkpoint, while they wait: it may have left them where they are.
            position = min(mark.position, acknowledged.get(destination, 0))
            _trim_impulses(transaction, tables, destination, position, budget)


def _trim_impulses(
    transaction: lmdb.Transaction[memoryview], tables: Tables, destination: str, position: int, budget: Budget
) -> None:
    """Delete the rows of one stream that end at or below ``position``."""
    with transaction.cursor(tables.impulses) as cursor:
        found = cursor.set_range(log_format.batch_key(destination, 0))
        while found and not budget.exhausted:
            key = bytes(cursor.key())
            row_destination, first_position = log_format.batch_of_key(IMPULSES_TABLE, key)
            value = cursor.value()
            if row_destination != destination or first_position > position:
                break
            if first_position + log_format.decode_batch_count(IMPULSES_TABLE, key, value) - 1 > position:
                break
            budget.rows_left -= 1
            budget.bytes_left -= len(value)
            cursor.delete()
            found = bool(cursor.key())
