"""Many small things decoded at once: numpy takes one step in all of them, then the next.

``data`` is an array of bytes, ``at`` and ``end`` are offsets in it, one of each for every item. Nothing here trusts
what it reads: offsets outside of ``data`` read its last byte, and whatever leaves its ``end`` comes back as not ``ok``.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.varint import decode_zigzag_int

Bytes: TypeAlias = npt.NDArray[np.uint8]
Longs: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

ITEMS_MIN = 32  # with fewer, a step of numpy costs more than plain Python needs for all of them


def zigzag(data: Bytes, at: Longs, end: Longs, bits: int = 32) -> tuple[Longs, Longs, Flags]:
    """A ZigZagInt (or, with 64 ``bits``, a ZigZagLong) at each offset: (values, offsets behind them, ok)."""
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
    """The little-endian number at each offset, such as "<q"."""
    size_bytes = np.dtype(dtype).itemsize
    gathered = data.take(at[:, None] + np.arange(size_bytes), mode="clip")
    return gathered.view(dtype).ravel()


def message_starts(data: Bytes, raw: bytes, at: Longs, end: Longs) -> tuple[Longs, Longs, Flags]:
    """Where the messages begin that are packed from each ``at`` to ``end``: (index of the range, offset), in order.

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
    """:func:`message_starts` of one range."""
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
    """For each item of a sorted array its number among those of the same owner, from 0."""
    if not owner.size:
        return owner
    first = np.concatenate(([True], owner[1:] != owner[:-1]))
    index = np.arange(len(owner))
    return index - np.maximum.accumulate(np.where(first, index, 0))


def binaries(raw: bytes, start: Longs, end: Longs) -> pa.Array:
    """A binary array of ``raw[start:end]`` for each pair; the pairs are in order and do not overlap.

    Arrow copies them: what is wanted and what lies between alternate in one array, of which every second is taken.
    """
    if not len(start):
        return pa.array([], pa.binary())
    offsets = np.empty(2 * len(start), np.int32)
    offsets[0::2] = start
    offsets[1::2] = end
    both = pa.Array.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(raw)])
    return both.take(pa.array(np.arange(0, len(offsets), 2)))
