"""Evidence on streams from the records of a log: rows to be sorted by stream and compared.

Each row belongs to one stream, sender to receiver, and is one of

    MARK   in the sender's log: the stream's position and checksum
    BATCH  in the receiver's log: messages that it executed
    LOG    about the log of ``receiver`` itself (``sender`` is empty): ``items`` sound records from ``sequence_id`` on,
           or, with a reason, one that is damaged; with a ``position``, those up to it could not be read
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from immortal.coordinator.core.errors import DamagedLogError
from immortal.coordinator.core.interfaces import IMPULSES
from immortal.coordinator.log.identity import verify_value
from immortal.coordinator.log.record_contents import packed_batches
from immortal.pipeline.decode import (
    PADDING,
    Longs,
    Values,
    batch_ranges,
    binaries,
    decode_headers,
    decode_messages,
    decode_names,
    decode_trailers,
    ordinals,
    usual_rows,
    verify_checks,
)
from immortal.pipeline.jobs.stream_audit import count_impulses
from immortal.pipeline.reading import Gap, LogRange, read_range, within_time
from immortal.protocol.batch import check_batch
from immortal.protocol.errors import ImmortalError
from immortal.protocol.messages import RpcType
from immortal.protocol.record import HEADER_SIZE_BYTES
from immortal.protocol.trailer import BatchKind, BatchSource

MARK, BATCH, LOG = 0, 1, 2
_FEW_RECORDS_MAX = 16
_FEW_SIZE_BYTES_MAX = 64 << 10
WHOLE_LOG = ""
"""Sender in rows of LOG."""

EVIDENCE = pa.schema(
    [
        ("sender", pa.string()),
        ("receiver", pa.string()),
        ("what", pa.int32()),
        ("sequence_id", pa.int64()),
        ("batch", pa.int32()),
        ("time_ns", pa.int64()),
        ("position", pa.int64()),
        ("items", pa.int32()),
        ("impulses", pa.int32()),
        ("sent_ns", pa.int64()),
        ("checksum", pa.int64()),
        ("payload", pa.binary()),
        ("reason", pa.string()),
    ]
)


class Row(NamedTuple):
    """Row of evidence; a value that does not apply is 0."""

    sender: str
    receiver: str
    what: int
    sequence_id: int
    batch: int = 0  # in its record
    time_ns: int = 0
    position: int = 0
    items: int = 0  # messages of a batch, records of a log
    impulses: int = 0
    sent_ns: int = 0
    checksum: int = 0  # signed, as Spark has it
    payload: bytes | None = None
    reason: str | None = None


# --- many records at once --------------------------------------------------------------------------------------------


def evidence_of_range(
    wanted: LogRange, first_ns: int, last_ns: int, *, streams: bool = True
) -> Iterator[pa.RecordBatch]:
    """Yield the evidence of a range between two times; ``streams``: see :func:`evidence_of_values`.

    Raises the errors of reading, after a row that says how far.
    """
    done = wanted.first
    try:
        for piece in read_range(within_time(wanted, first_ns, last_ns)):
            if isinstance(piece, Gap):
                yield gap_rows(wanted.instance, piece)
            else:
                few = len(piece.start) <= _FEW_RECORDS_MAX and len(piece.raw) <= _FEW_SIZE_BYTES_MAX
                of_values = evidence_of_few if few else partial(evidence_of_values, streams=streams)
                yield from of_values(piece, wanted.instance, wanted.committer_id)
                done = int(piece.sequence_ids[-1]) + 1
    except (ImmortalError, OSError) as error:
        rows = []
        if isinstance(error, DamagedLogError):  # a forged record, say: that one is damage, and those around it unread
            damaged = max(error.sequence_id, done)
            if damaged > done:
                rows.append(Row(WHOLE_LOG, wanted.instance, LOG, done, position=damaged, reason=str(error)))
            rows.append(Row(WHOLE_LOG, wanted.instance, LOG, damaged, reason=str(error)))
            done = damaged + 1
        rows.append(Row(WHOLE_LOG, wanted.instance, LOG, done, position=wanted.end, reason=str(error)))
        yield _from_rows(rows)
        raise


def gap_rows(instance: str, gap: Gap) -> pa.RecordBatch:
    """Return the row that names the missing records."""
    return _from_rows([Row(WHOLE_LOG, instance, LOG, gap.first, reason=gap.reason)])


def evidence_of_raw(
    batches: Iterator[pa.RecordBatch], committer_ids: Mapping[str, int], *, streams: bool = True
) -> Iterator[pa.RecordBatch]:
    """Convert rows of the table "raw" to evidence; ``committer_ids``: by instance. For mapInArrow."""
    for batch in batches:
        instances = batch.column("instance").to_pylist()
        cuts = [index for index in range(1, len(instances)) if instances[index] != instances[index - 1]]
        for first, end in zip([0, *cuts], [*cuts, len(instances)], strict=True):
            if first < end:
                instance = instances[first]
                values = _values(batch.slice(first, end - first))
                yield from evidence_of_values(values, instance, committer_ids[instance], streams=streams)


def _values(rows: pa.RecordBatch) -> Values:
    binary = rows.column("value").cast(pa.large_binary())
    offsets = np.frombuffer(binary.buffers()[1], np.int64)[binary.offset : binary.offset + len(binary) + 1]
    raw = memoryview(binary.buffers()[2])[offsets[0] : offsets[-1]].tobytes() + PADDING
    offsets = offsets - offsets[0]
    sequence_ids = rows.column("sequence_id").to_numpy()
    return Values(raw, sequence_ids, offsets[:-1], offsets[1:])


def evidence_of_values(
    values: Values, instance: str, committer_id: int, *, streams: bool = True
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of evidence in ``values``, in no order; without ``streams``: not of what sound records hold."""
    headers = decode_headers(values, committer_id)
    verify_checks(values, headers)
    trailers = decode_trailers(values, headers, with_marks=True)
    batches, marks = trailers.batches, trailers.marks
    batch_name, batch_names = decode_names(values, headers, batches)
    mark_name, mark_names = decode_names(values, headers, marks)
    messages = decode_messages(values, headers, batches)
    start, end = batch_ranges(values, headers, batches)
    impulses = np.bincount(messages.batch[messages.rpc_type == RpcType.IMPULSE], minlength=len(start))

    usual = headers.usual
    yield _from_rows(list(_runs(values.sequence_ids[usual], trailers.time_ns[usual], instance)))
    yield from evidence_of_few(values, instance, committer_id, np.flatnonzero(~usual).tolist())
    if not streams:
        return
    keep = usual[batches.record]
    kept = usual_rows(batches, usual)
    senders = pa.array([name or instance for name in batch_names] + [IMPULSES], pa.string())
    sender = np.where(kept.kind == BatchKind.IMPULSES, len(batch_names), batch_name.to_numpy()[keep])
    yield _columns(
        len(kept.record),
        BATCH,
        sender=senders.take(pa.array(sender)),
        receiver=_repeat(instance, len(kept.record)),
        sequence_id=values.sequence_ids[kept.record],
        batch=ordinals(kept.record),
        time_ns=trailers.time_ns[kept.record],
        position=kept.first_position,
        items=kept.count,
        impulses=impulses[keep],
        sent_ns=kept.sent_ns,
        payload=binaries(values.raw, start[keep], end[keep]),
    )
    keep = usual[marks.record]
    kept_marks = usual_rows(marks, usual)
    destinations = pa.array([name or instance for name in mark_names], pa.string())
    yield _columns(
        len(kept_marks.record),
        MARK,
        sender=_repeat(instance, len(kept_marks.record)),
        receiver=destinations.take(pa.array(mark_name.to_numpy()[keep])),
        sequence_id=values.sequence_ids[kept_marks.record],
        time_ns=trailers.time_ns[kept_marks.record],
        position=kept_marks.position,
        checksum=kept_marks.checksum,
    )


def evidence_of_few(
    values: Values, instance: str, committer_id: int, which: Sequence[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of those ``values``, or of all, one record after the other: for a few this is faster."""
    rows: list[Row] = []
    for index in range(len(values.start)) if which is None else which:
        rows += evidence_of_record(instance, int(values.sequence_ids[index]), bytes(values.value(index)), committer_id)
    yield _from_rows(rows)


def _runs(sequence_ids: Longs, time_ns: Longs, instance: str) -> Iterator[Row]:
    """Yield one row for each run of consecutive sound records, with the time of its last record."""
    cuts = (np.flatnonzero(np.diff(sequence_ids) != 1) + 1).tolist()
    for first, end in zip([0, *cuts], [*cuts, len(sequence_ids)], strict=True):
        if first < end:
            last_time_ns = int(time_ns[end - 1])
            yield Row(WHOLE_LOG, instance, LOG, int(sequence_ids[first]), time_ns=last_time_ns, items=end - first)


def _repeat(value: str, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, pa.string()), count)


def _columns(length: int, what: int, **columns: Any) -> pa.RecordBatch:
    arrays = []
    for column in EVIDENCE:
        values = columns.get(column.name)
        if values is None:
            no_number = pa.types.is_binary(column.type) or pa.types.is_string(column.type)
            constant = what if column.name == "what" else None if no_number else 0
            values = pa.repeat(pa.scalar(constant, column.type), length)
        arrays.append(values if isinstance(values, pa.Array) else pa.array(values).cast(column.type))
    return pa.RecordBatch.from_arrays(arrays, schema=EVIDENCE)


def _from_rows(rows: list[Row]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else [[] for _ in EVIDENCE]
    arrays = [pa.array(list(values), column.type) for values, column in zip(columns, EVIDENCE, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=EVIDENCE)


# --- one record, in plain Python -------------------------------------------------------------------------------------


def evidence_of_record(instance: str, sequence_id: int, value: bytes, committer_id: int) -> Iterator[Row]:
    """Yield the evidence of one record, with a row of LOG; a damaged record gives only that row."""
    try:
        header, trailer = verify_value(value, sequence_id, committer_id)
        batches = list(packed_batches(value[HEADER_SIZE_BYTES : header.size_bytes], trailer))
        impulses = [_impulses(batch, payload) for batch, payload in batches]
    except ImmortalError as error:
        yield Row(WHOLE_LOG, instance, LOG, sequence_id, items=1, reason=str(error))
        return
    time_ns = trailer.time_ns
    reason = None
    for index, (batch, payload) in enumerate(batches):
        if batch.kind == BatchKind.INITIAL:
            if sequence_id:
                reason = f"record {sequence_id} holds an initial message, which belongs in record 0"
            continue
        yield Row(
            IMPULSES if batch.kind == BatchKind.IMPULSES else batch.name or instance,
            instance,
            BATCH,
            sequence_id,
            index,
            time_ns,
            batch.first_position,
            batch.count,
            impulses[index],
            batch.send_time_ns,
            payload=payload,
        )
    for mark in trailer.outputs:
        yield Row(
            instance,
            mark.destination or instance,
            MARK,
            sequence_id,
            time_ns=time_ns,
            position=mark.position,
            checksum=mark.checksum - (1 << 64) if mark.checksum >> 63 else mark.checksum,
        )
    yield Row(WHOLE_LOG, instance, LOG, sequence_id, time_ns=time_ns, items=1, reason=reason)


def _impulses(batch: BatchSource, payload: bytes) -> int:
    """Count the impulses of a batch. Raises RemoteProtocolError for anything but RPCs."""
    if batch.kind == BatchKind.INITIAL:
        return 0
    check_batch(payload, batch.count)
    return count_impulses(payload)
