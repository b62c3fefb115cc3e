"""Repairs damaged rows of the table ``sources`` from other data of the log.

A row with one flipped bit is restored. Another row is rebuilt from the last record with a batch of that stream, if the
log also has the sender's committer ID: otherwise a sender with another log could be taken for the original one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from msgspec import Struct

from immortal.coordinator.core.errors import DamagedLogError
from immortal.coordinator.core.interfaces import IMPULSES, ONESELF, SourcePosition
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log import view_queries
from immortal.coordinator.log.backend import Span, View
from immortal.coordinator.log.format import SEQUENCE_KEY
from immortal.coordinator.log.identity import meta_value, verify_value
from immortal.coordinator.log.rows import Changes
from immortal.protocol.trailer import BatchKind

_TABLE = b"sources"


class RepairedSource(Struct, frozen=True):
    """Row to replace the damaged one at ``damaged_key``. ``how``: message about the source of its value."""

    damaged_key: bytes
    key: bytes
    source: SourcePosition
    how: str


def plan_source_repair(view: View, committer_id: int) -> list[RepairedSource]:
    """Plan the replacement of each damaged row. Raises DamagedLogError if the right value can't be known."""
    plan = []
    from_records: dict[str, tuple[bytes, str]] = {}
    for key, value, problem in _damaged_rows(view):
        repaired = _with_one_bit_flipped(key, value)
        if repaired is not None:
            plan.append(RepairedSource(key, *repaired, f"{problem}: one flipped bit was corrected"))
        else:
            from_records[log_format.name_of_key(key)] = (key, problem)
    if from_records:
        committers = _committers(view, committer_id)
        for name, (_, problem) in from_records.items():
            if name not in committers:
                raise DamagedLogError(f"{problem}, and nothing else in the log has the ID of the log of {name!r}", -1)
        found = _last_positions(view, committer_id, from_records)
        for name, (key, problem) in from_records.items():
            if name not in found:
                raise DamagedLogError(f"{problem}, and no kept record has a position of that stream", -1)
            sequence_id, position = found[name]
            source = SourcePosition(committers[name], 0, position)
            plan.append(
                RepairedSource(key, key, source, f"{problem}: position {position} is taken from record {sequence_id}")
            )
    return plan


def repair_sources(view: View, committer_id: int) -> tuple[Changes, list[str]]:
    """Return changes that repair damaged rows, and messages about them. Raises DamagedLogError if it is impossible."""
    plan = plan_source_repair(view, committer_id)
    changes = Changes()
    if plan:  # the whole table is written again: rows with damaged keys can't be found by their order
        damaged = {row.damaged_key for row in plan}
        changes.deletes.append(Span("sources"))
        kept = ((key, value) for key, value in Span("sources").rows(view) if key not in damaged)
        changes.puts += [("sources", key, bytes(value)) for key, value in kept]
    for row in plan:
        payload = (row.source.committer_id, row.source.epoch, row.source.position)
        changes.puts.append(("sources", row.key, log_format.seal(_TABLE, row.key, payload)))
    return changes, [row.how for row in plan]


def _damaged_rows(view: View) -> Iterator[tuple[bytes, bytes, str]]:
    for key, value in Span("sources").rows(view):
        try:
            log_format.unseal(_TABLE, key, bytes(value), log_format.SOURCE)
        except DamagedLogError as error:
            yield key, bytes(value), str(error)


def _with_one_bit_flipped(key: bytes, value: bytes) -> tuple[bytes, SourcePosition] | None:
    """Return the row with the right CRC that differs from this one by one bit, of key or value; None: no row."""
    row = bytearray(key + value)
    for bit in range(8 * len(row)):
        row[bit // 8] ^= 1 << bit % 8
        try:
            right_key = bytes(row[: len(key)])
            fields = log_format.unseal(_TABLE, right_key, bytes(row[len(key) :]), log_format.SOURCE)
            return right_key, SourcePosition(*fields)
        except DamagedLogError:
            row[bit // 8] ^= 1 << bit % 8
    return None


def _committers(view: View, committer_id: int) -> dict[str, int]:
    """Return the committer IDs of known senders by name, for streams that were never reset."""
    receivers = view_queries.named_rows(view, "peers", log_format.INT)
    began_anew = view_queries.stream_starts(view)  # the last record can be from before the reset
    known = {name: receiver for name, receiver in receivers.items() if name not in began_anew}
    return {**known, ONESELF: committer_id, IMPULSES: committer_id}


def _last_positions(view: View, committer_id: int, names: Collection[str]) -> dict[str, tuple[int, int]]:
    """Return the sequence ID of the last record with a batch of each source, and that batch's last position.

    Sources not found are left out. Raises DamagedLogError for an unreadable record, as it can have such a batch.
    """
    cuts = meta_value(view, log_format.META_CUTS, log_format.INTS) or [0]
    found: dict[str, tuple[int, int]] = {}
    for key, value in view.scan_back("records"):
        (sequence_id,) = SEQUENCE_KEY.unpack(key)
        if sequence_id < cuts[-1] or len(found) == len(names):
            break  # records cut off there count as received, and are not in the log
        _, trailer = verify_value(bytes(value), sequence_id, committer_id)
        for batch in trailer.batches:
            source = IMPULSES if batch.kind == BatchKind.IMPULSES else batch.name
            if source in names and batch.kind != BatchKind.INITIAL:
                before = found.get(source, (sequence_id, 0))
                if before[0] == sequence_id:
                    found[source] = (sequence_id, batch.last_position)
    return found
