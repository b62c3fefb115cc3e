# cython: annotation_typing=False
"""Turns a transaction of the core into rows to put and delete. view_queries.py does the reverse.

format.py encodes keys and values, verdicts.py those of verdicts and dead letters. Most changes depend only on the
transaction; the few that depend on the log's content read it from a view.
"""

from __future__ import annotations

from msgspec import Struct, field

from immortal.coordinator.core.errors import require
from immortal.coordinator.core.interfaces import SpilledBatch, Transaction
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log import verdicts, view_queries
from immortal.coordinator.log.backend import Row, Span, View
from immortal.coordinator.log.format import IMPULSES_TABLE, MESSAGE_KEY, SEQUENCE_KEY, SPILLED_TABLE
from immortal.coordinator.log.identity import meta_row


class Changes(Struct):
    """Rows to delete, and then rows to put."""

    puts: list[Row] = field(default_factory=list)
    deletes: list[Span] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.puts or self.deletes)

    def remove(self, table: str, key: bytes) -> None:
        self.deletes.append(Span.of_key(table, key))


def changes_of(transaction: Transaction, now_ns: int) -> Changes:
    """Return the changes that depend only on ``transaction``. ``now_ns``: time of its verdicts, ns since the epoch."""
    changes = Changes()
    puts = changes.puts
    for name, source in transaction.sources.items():
        key = log_format.name_key(name)
        row = (source.committer_id, source.epoch, source.position)
        puts.append(("sources", key, log_format.seal(b"sources", key, row)))
    for name, position in transaction.acknowledged.items():
        key = log_format.name_key(name)
        puts.append(("acknowledged", key, log_format.seal(b"acknowledged", key, position)))
    if transaction.verdicts:
        gone = {MESSAGE_KEY.pack(*removed) for removed in transaction.letters_removed}
        rows = verdicts.verdict_rows(transaction.verdicts, now_ns)
        puts += [row for row in rows if row[0] != "letters" or row[1] not in gone]
    if transaction.suspect is not None:
        puts.append(verdicts.suspect_row(transaction.suspect))
    for name, committer_id in transaction.peers.items():
        key = log_format.name_key(name)
        puts.append(("peers", key, log_format.seal(b"peers", key, committer_id)))
    for removed in transaction.letters_removed:
        changes.remove("letters", MESSAGE_KEY.pack(*removed))
    if transaction.impulses or transaction.impulses_removed:
        _put_impulses(changes, transaction)
    for batch in transaction.spilled:
        _put_spilled(changes, batch)
    if transaction.clients or transaction.replies:
        _put_clients(changes, transaction)
    if transaction.clients_forgotten_ns is not None:
        puts.append(meta_row(log_format.META_CLIENTS_FORGOTTEN, transaction.clients_forgotten_ns))
    if transaction.cut_healed:
        changes.remove("meta", log_format.META_CUT)
    if transaction.epoch is not None:
        puts.append(meta_row(log_format.META_EPOCH, transaction.epoch))
    if transaction.extensions is not None:
        puts.append(meta_row(log_format.META_EXTENSIONS, sorted(transaction.extensions)))
    return changes


def depends_on_log(transaction: Transaction) -> bool:
    """Return True if :func:`add_dependent` or a checkpoint adds changes."""
    return bool(
        transaction.checkpoint is not None
        or transaction.version is not None
        or transaction.spilled_ends
        or transaction.stream_starts
        or transaction.audit
    )


def add_dependent(changes: Changes, transaction: Transaction, view: View) -> None:
    """Add the changes that also depend on the log's content, except those of a checkpoint."""
    for destination, position in transaction.spilled_ends.items():
        left, span = view_queries.end_at(view, destination, position)
        changes.deletes.append(span)
        for batch in left:
            _put_spilled(changes, batch)
    if transaction.stream_starts:
        starts = {**view_queries.stream_starts(view), **transaction.stream_starts}
        rows = {name: (start.offset, start.pending, start.forked) for name, start in sorted(starts.items())}
        changes.puts.append(meta_row(log_format.META_STREAM_STARTS, rows))
    if transaction.version is not None:
        # After the earlier ones: a version can begin more than once.
        last = next((SEQUENCE_KEY.unpack(key)[0] for key, _ in view.scan_back("versions")), 0)
        key = SEQUENCE_KEY.pack(last + 1)
        changes.puts.append(("versions", key, log_format.encode_version_start(key, transaction.version)))
    changes.puts += verdicts.audit_rows(view, transaction.audit)


def _put_impulses(changes: Changes, transaction: Transaction) -> None:
    for destination, first_position in transaction.impulses_removed:
        changes.remove("impulses", log_format.batch_key(destination, first_position))
    for batch in transaction.impulses:
        require(batch.count > 0 and batch.first_position > 0, f"{batch.count} impulses at {batch.first_position}")
        key = log_format.batch_key(batch.destination, batch.first_position)
        value = log_format.encode_batch(IMPULSES_TABLE, key, batch.count, batch.payload)
        changes.puts.append(("impulses", key, value))


def _put_spilled(changes: Changes, batch: SpilledBatch) -> None:
    require(batch.count > 0 and batch.first_position > 0, f"{batch.count} spilled at {batch.first_position}")
    key = log_format.batch_key(batch.destination, batch.first_position)
    changes.puts.append(("spilled", key, log_format.encode_batch(SPILLED_TABLE, key, batch.count, batch.payload)))


def _put_clients(changes: Changes, transaction: Transaction) -> None:
    for client_id, position in transaction.clients.items():
        key = log_format.name_key(client_id)
        if position is None:
            changes.remove("clients", key)
        else:
            changes.puts.append(("clients", key, log_format.encode_client(key, position)))
    for (client_id, number), data in transaction.replies.items():
        key = log_format.batch_key(client_id, number)
        if data is None:
            changes.remove("replies", key)
        else:
            changes.puts.append(("replies", key, log_format.seal_chunk(key, data)))
