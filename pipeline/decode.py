"""Decoder of a log's records into arrays: headers, trailers, messages.

It decodes as `log.record_contents` (docs/LOG_FORMAT.md, docs/WIRE.md). A record that is not ``usual`` at the end is
decoded there: that gives its rows, or the reason why it has none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from immortal.protocol.checksum import crc64
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.extensions import RECORD_TIME_SIZE_BYTES
from immortal.protocol.limits import NAME_SIZE_BYTES_MAX, RECORD_SIZE_BYTES_MAX, RPC_SIZE_BYTES_MAX
from immortal.protocol.messages import MessageType, RpcKind, RpcType
from immortal.protocol.record import HEADER_SIZE_BYTES
from immortal.protocol.trace_context import split_name
from immortal.protocol.trailer import CRC_SIZE_BYTES, TRAILER_SIZE_BYTES_MIN, TRAILER_VERSION, BatchKind
from immortal.protocol.varint import decode_zigzag_int

PADDING = bytes(32)  # after the last value, so that a gather of a few bytes never leaves the array
_STEPS_MIN = 16  # a record with more batches or marks is decoded by plain Python, unless many records have as many
_BATCH_SIZE_BYTES_MIN, _MARK_SIZE_BYTES_MIN = 12, 10  # at least; docs/LOG_FORMAT.md


@dataclass(slots=True)
class Values:
    """Values of consecutive keys, one after the other in ``raw``, with PADDING at the end."""

    raw: bytes
    sequence_ids: Longs  # the keys
    start: Longs
    end: Longs

    def value(self, index: int) -> memoryview:
        return memoryview(self.raw)[self.start[index] : self.end[index]]


@dataclass(slots=True)
class Headers:
    """Headers of values. ``usual`` is True for each record that is sound so far and that this module can decode."""

    data: Bytes
    size_bytes: Longs
    check: npt.NDArray[np.uint64]
    content_end: Longs  # where the trailer begins
    usual: Flags


@dataclass(slots=True)
class Batches:
    """The batches of all trailers, in order."""

    record: Longs  # index of the value
    kind: Longs
    name_start: Longs
    name_end: Longs
    first_position: Longs
    count: Longs
    sent_ns: Longs


@dataclass(slots=True)
class Marks:
    """The output marks of all trailers, in order."""

    record: Longs
    name_start: Longs
    name_end: Longs
    position: Longs
    checksum: Longs


Rows = TypeVar("Rows", Batches, Marks, "Messages")


@dataclass(slots=True)
class Trailers:
    time_ns: Longs
    batches: Batches
    marks: Marks


@dataclass(slots=True)
class Messages:
    """The RPC messages of all usual records, in order."""

    record: Longs
    batch: Longs  # index in Batches
    index: Longs  # in the record
    position: Longs
    rpc_kind: Longs
    rpc_type: Longs
    method_id: Longs
    arguments_start: Longs
    arguments_end: Longs


def decode_headers(values: Values, committer_id: int) -> Headers:
    """Decode each header within bounds; its sequence ID must equal the key's, and its committer the log's."""
    data = np.frombuffer(values.raw, np.uint8)
    size_bytes = fixed(data, values.start + 4, "<i4").astype(np.int64)
    content_end = values.start + size_bytes
    usual = (
        (fixed(data, values.start, "<i4") == committer_id)
        & (fixed(data, values.start + 16, "<i8") == values.sequence_ids)
        & (size_bytes >= HEADER_SIZE_BYTES)
        & (size_bytes <= RECORD_SIZE_BYTES_MAX)
        & (content_end + TRAILER_SIZE_BYTES_MIN <= values.end)
    )
    return Headers(data, size_bytes, fixed(data, values.start + 8, "<u8"), content_end, usual)


def verify_checks(values: Values, headers: Headers) -> None:
    """Compare the checksums of usual records and their trailers; a mismatch sets ``headers.usual`` to False."""
    view = memoryview(values.raw)
    raw = values.raw
    usual = headers.usual
    indices = np.flatnonzero(usual)
    trailer_crcs = fixed(headers.data, values.end[indices] - CRC_SIZE_BYTES, "<u8").tolist()
    starts, ends = values.start[indices].tolist(), values.end[indices].tolist()
    content_ends = headers.content_end[indices].tolist()
    checks = headers.check[indices].tolist()
    damaged = []
    rows = zip(indices.tolist(), starts, content_ends, ends, checks, trailer_crcs, strict=True)
    for index, start, content_end, end, check, trailer_crc in rows:
        head = crc64(raw[start : start + 8] + raw[start + 16 : start + 24])
        if (
            crc64(view[start + HEADER_SIZE_BYTES : content_end], head) != check
            or crc64(raw[content_end : end - CRC_SIZE_BYTES], crc64(raw[start + 8 : start + 16])) != trailer_crc
        ):
            damaged.append(index)
    usual[damaged] = False


def decode_trailers(values: Values, headers: Headers, *, with_marks: bool) -> Trailers:
    """Decode the trailers of usual records; a damaged one, or very many batches, sets ``headers.usual`` to False."""
    data, usual = headers.data, headers.usual
    end = values.end - CRC_SIZE_BYTES
    at = headers.content_end
    usual &= data.take(at, mode="clip") == TRAILER_VERSION
    time_ns = fixed(data, at + 1, "<i8").astype(np.int64)
    batch_count, at, ok = zigzag(data, at + 9, end)
    usual &= ok & (batch_count >= 0) & (batch_count * _BATCH_SIZE_BYTES_MIN <= end - at)
    batches, at = _decode_batches(data, usual, batch_count, at, end)
    marks = Marks(*_in_order([], 5))
    if with_marks:
        mark_count, at, ok = zigzag(data, at, end)
        usual &= ok & (mark_count >= 0) & (mark_count * _MARK_SIZE_BYTES_MIN <= end - at)
        marks, at = _decode_marks(data, usual, mark_count, at, end)
        usual &= at == end
    return Trailers(time_ns, usual_rows(batches, usual), usual_rows(marks, usual))


def _decode_batches(data: Bytes, usual: Flags, count: Longs, at: Longs, end: Longs) -> tuple[Batches, Longs]:
    at = at.copy()
    steps: list[tuple[Longs, ...]] = []
    for active in _steps(usual, count):
        limit = end[active]
        offset = at[active]
        kind = data.take(offset, mode="clip").astype(np.int64)
        name_start, name_end, ok = _name(data, offset + 1, limit)
        first_position, offset, ok_position = zigzag(data, name_end, limit, 64)
        messages, offset, ok_count = zigzag(data, offset, limit)
        sent_ns = fixed(data, offset, "<i8").astype(np.int64)
        offset += 8
        ok &= ok_position & ok_count & (kind <= int(BatchKind.CLIENT)) & (first_position >= 0) & (messages >= 0)
        usual[active] = ok & (offset <= limit)
        at[active] = offset
        steps.append((active, kind, name_start, name_end, first_position, messages, sent_ns))
    return Batches(*_in_order(steps, 7)), at


def _decode_marks(data: Bytes, usual: Flags, count: Longs, at: Longs, end: Longs) -> tuple[Marks, Longs]:
    at = at.copy()
    steps: list[tuple[Longs, ...]] = []
    for active in _steps(usual, count):
        limit = end[active]
        name_start, name_end, ok = _name(data, at[active], limit)
        position, offset, ok_position = zigzag(data, name_end, limit, 64)
        checksum = fixed(data, offset, "<i8").astype(np.int64)
        offset += 8
        usual[active] = ok & ok_position & (position >= 0) & (offset <= limit)
        at[active] = offset
        steps.append((active, name_start, name_end, position, checksum))
    return Marks(*_in_order(steps, 5)), at


def _steps(usual: Flags, count: Longs) -> Iterator[Longs]:
    """Yield for each n from 0 the records with over n entries; set ``usual`` to False for a few with very many."""
    for step in itertools.count():
        active = np.flatnonzero(usual & (count > step))
        if step >= _STEPS_MIN and active.size < ITEMS_MIN:
            usual[active] = False
            return
        if not active.size:
            return
        yield active


def _name(data: Bytes, at: Longs, end: Longs) -> tuple[Longs, Longs, Flags]:
    """Return for each name its first offset, the offset after its end, and True if the name is sound."""
    size, start, ok = zigzag(data, at, end)
    ok &= (size >= 0) & (size <= NAME_SIZE_BYTES_MAX)
    size = np.where(ok, size, 0)
    return start, start + size, ok & (start + size <= end)


def _in_order(steps: list[tuple[Longs, ...]], width: int) -> list[Longs]:
    if not steps:
        return [np.empty(0, np.int64)] * width
    if len(steps) == 1:
        return list(steps[0])
    columns = [np.concatenate(column) for column in zip(*steps, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return [column[order] for column in columns]


def usual_rows(rows: Rows, usual: Flags) -> Rows:
    """Keep the rows whose record is still usual."""
    return select_rows(rows, usual[rows.record])


def select_rows(rows: Rows, keep: Flags) -> Rows:
    """Keep the rows that have a flag."""
    if keep.all():
        return rows
    return type(rows)(*(getattr(rows, name)[keep] for name in rows.__dataclass_fields__))


def decode_names(values: Values, headers: Headers, rows: Batches | Marks) -> tuple[pa.Array, list[str]]:
    """Decode the names of ``rows``: (index of each, distinct names). A wrong name sets ``headers.usual`` to False.

    A client's name loses its trace context.
    """
    encoded = binaries(values.raw, rows.name_start, rows.name_end).dictionary_encode()
    names: list[str] = []
    wrong = []
    for number, name in enumerate(encoded.dictionary.to_pylist()):
        try:
            names.append(name.decode())
        except UnicodeDecodeError:
            names.append("")
            wrong.append(number)
    if wrong:
        headers.usual[rows.record[np.isin(encoded.indices.to_numpy(), wrong)]] = False
    plain = [split_name(name)[0] for name in names]
    if plain == names:
        return encoded.indices, names
    numbers = {name: number for number, name in enumerate(dict.fromkeys(plain))}
    merged = np.array([numbers[name] for name in plain], np.int32)
    return pa.array(merged[encoded.indices.to_numpy()]), list(numbers)


def decode_messages(values: Values, headers: Headers, batches: Batches) -> Messages:
    """Decode the messages of usual records; anything but RPCs and their batches sets ``headers.usual`` to False."""
    data, usual = headers.data, headers.usual
    usual[batches.record[batches.kind == BatchKind.INITIAL]] = False
    at, end = batch_ranges(values, headers, batches)
    batch, start, ok = message_starts(data, values.raw, at, end)
    usual[batches.record[~ok]] = False
    counted = np.bincount(batch, minlength=len(at))
    usual[batches.record[counted != batches.count]] = False

    size, type_at, _ = zigzag(data, start, end[batch])  # message_starts has checked that these are right
    message_end = type_at + size
    kind = data.take(type_at + 1, mode="clip").astype(np.int64)
    method_id, rpc_type_at, ok = zigzag(data, type_at + 2, message_end)
    rpc_type = data.take(rpc_type_at, mode="clip").astype(np.int64)
    ok &= (data.take(type_at, mode="clip") == MessageType.RPC) & (kind <= int(RpcKind.RAISED))
    ok &= (rpc_type_at < message_end) & (rpc_type <= int(RpcType.IMPULSE)) & (size <= RPC_SIZE_BYTES_MAX)
    record = batches.record[batch]
    usual[record[~ok]] = False

    keep = usual[record]
    record, batch = record[keep], batch[keep]
    position = batches.first_position[batch] + ordinals(batch)
    arguments_start, arguments_end = rpc_type_at[keep] + 1, message_end[keep]
    return Messages(
        record,
        batch,
        ordinals(record),
        position,
        kind[keep],
        rpc_type[keep],
        method_id[keep],
        arguments_start,
        arguments_end,
    )


def batch_ranges(values: Values, headers: Headers, batches: Batches) -> tuple[Longs, Longs]:
    """Return where the messages of each batch begin and end; the batches of unusual records are empty.

    Batches are the top-level messages in order, without the record's time, which is the first message if present.
    """
    data, usual = headers.data, headers.usual
    content_start = np.where(usual, values.start + HEADER_SIZE_BYTES, headers.content_end)
    record, start, ok = message_starts(data, values.raw, content_start, headers.content_end)
    usual &= ok
    size, type_at, _ = zigzag(data, start, headers.content_end[record])
    message_type = data.take(type_at, mode="clip")
    is_time = (message_type == MessageType.RECORD_TIME) & (ordinals(record) == 0)
    usual[record[is_time & (size != RECORD_TIME_SIZE_BYTES - 1)]] = False
    record, start, message_type = record[~is_time], start[~is_time], message_type[~is_time]
    type_at, end = type_at[~is_time], (type_at + size)[~is_time]

    usual &= np.bincount(record, minlength=len(usual)) == np.bincount(batches.record, minlength=len(usual))
    is_batch = message_type == MessageType.RPC_BATCH
    is_replayable = message_type == MessageType.COUNT_REPLAYABLE_RPC_BATCH
    usual[record[~(is_batch | is_replayable | (message_type == MessageType.RPC))]] = False
    several = is_batch | is_replayable
    count, behind, ok = zigzag(data, type_at + 1, end)
    replayable, behind_both, ok_both = zigzag(data, behind, end)
    ok &= ~is_replayable | (ok_both & (replayable >= 0) & (replayable <= count))
    inner = np.where(is_replayable, behind_both, behind)
    usual[record[several & ~ok]] = False

    # Only now is it known that the top-level messages and the trailer's batches correspond one to one.
    mine, theirs = usual[record], usual[batches.record]
    at = np.zeros(len(theirs), np.int64)
    stop = np.zeros(len(theirs), np.int64)
    at[theirs] = np.where(several, inner, start)[mine]
    stop[theirs] = end[mine]
    wrong = theirs.copy()
    wrong[theirs] = several[mine] & (count[mine] != batches.count[theirs])
    usual[batches.record[wrong]] = False
    return at, stop


# Many small values decoded at once: numpy takes one step for all of them, then the next.
#
# ``data`` is an array of bytes; ``at`` and ``end`` are offsets in it, one of each for every item. No input is trusted:
# an offset outside ``data`` reads its last byte, and an item that goes past its ``end`` is returned as not ``ok``.


Bytes: TypeAlias = npt.NDArray[np.uint8]
Longs: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

ITEMS_MIN = 32  # with fewer, a step of numpy costs more than plain Python needs for all of them


def zigzag(data: Bytes, at: Longs, end: Longs, bits: int = 32) -> tuple[Longs, Longs, Flags]:
    """Decode a ZigZagInt (or, with 64 ``bits``, a ZigZagLong) at each offset: (values, offsets after them, ok)."""
    size_bytes_max = 5 if bits == 32 else 10
    last_byte_max = (1 << (bits - 7 * (size_bytes_max - 1))) - 1
    first = data.take(at, mode="clip")
    after = at + 1
    ok = after <= end
    value = (first & 0x7F).astype(np.uint64)
    more = np.flatnonzero(first >= 0x80)
    for index in range(1, size_bytes_max):
        if not more.size:
            break
        behind = after[more]
        group = data.take(behind, mode="clip")
        ok[more] &= behind < end[more]
        if index == size_bytes_max - 1:
            ok[more] &= group <= last_byte_max
        value[more] |= (group & 0x7F).astype(np.uint64) << np.uint64(7 * index)
        after[more] = behind + 1
        more = more[group >= 0x80]
    ok[more] = False
    negative = (value & np.uint64(1)).astype(np.int64)
    return (value >> np.uint64(1)).astype(np.int64) ^ -negative, after, ok


def fixed(data: Bytes, at: Longs, dtype: str) -> npt.NDArray[Any]:
    """Read the little-endian number at each offset; ``dtype`` is such as "<q"."""
    size_bytes = np.dtype(dtype).itemsize
    gathered = data.take(at[:, None] + np.arange(size_bytes), mode="clip")
    return gathered.view(dtype).ravel()


def message_starts(data: Bytes, raw: bytes, at: Longs, end: Longs) -> tuple[Longs, Longs, Flags]:
    """Find the messages packed from each ``at`` to ``end``: (index of the range, offset), in order.

    The flags are per range: its messages fill it exactly. ``raw`` is ``data``.
    """
    ok = np.ones(len(at), np.bool_)
    owners: list[Longs] = []
    starts: list[Longs] = []
    active = np.flatnonzero(at < end)
    offset = at[active]
    while active.size >= ITEMS_MIN:
        owners.append(active)
        starts.append(offset)
        size, behind, sound = zigzag(data, offset, end[active])
        offset = behind + size
        sound &= (size >= 1) & (offset <= end[active])
        ok[active[~sound]] = False
        going_on = sound & (offset < end[active])
        active, offset = active[going_on], offset[going_on]
    for index, first, last in zip(active.tolist(), offset.tolist(), end[active].tolist(), strict=True):
        found, sound_one = _walk(raw, first, last)
        owners.append(np.full(len(found), index, np.int64))
        starts.append(np.array(found, np.int64))
        ok[index] &= sound_one
    if not owners:
        return np.empty(0, np.int64), np.empty(0, np.int64), ok
    owner, start = np.concatenate(owners), np.concatenate(starts)
    order = np.argsort(owner, kind="stable")
    return owner[order], start[order], ok


def _walk(data: bytes, offset: int, end: int) -> tuple[list[int], bool]:
    starts = []
    while offset < end:
        starts.append(offset)
        first = data[offset]
        if first < 0x80:
            if first & 1 or not first:
                return starts, False
            offset += 1 + (first >> 1)
            continue
        try:
            size_bytes, offset = decode_zigzag_int(data, offset)
        except RemoteProtocolError:
            return starts, False
        if size_bytes < 1:
            return starts, False
        offset += size_bytes
    return starts, offset == end


def ordinals(owner: Longs) -> Longs:
    """Number the items of each owner from 0; ``owner`` is sorted."""
    if not owner.size:
        return owner
    first = np.concatenate(([True], owner[1:] != owner[:-1]))
    index = np.arange(len(owner))
    return index - np.maximum.accumulate(np.where(first, index, 0))


def binaries(raw: bytes, start: Longs, end: Longs) -> pa.Array:
    """Return a binary array of ``raw[start:end]`` for each pair; the pairs are in order and do not overlap.

    Arrow copies them: one array alternates between wanted bytes and the bytes between, and every second item is taken.
    """
    if not len(start):
        return pa.array([], pa.binary())
    offsets = np.empty(2 * len(start), np.int32)
    offsets[0::2] = start
    offsets[1::2] = end
    both = pa.Array.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(raw)])
    return both.take(pa.array(np.arange(0, len(offsets), 2)))
