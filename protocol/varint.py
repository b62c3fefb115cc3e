# cython: annotation_typing=False
# (Compiled annotations of built-in types would refuse subclasses. The directive works only in the first line.)
"""Variable-length integers ZigZagInt and ZigZagLong: zig-zag, then base-128 groups, lowest first (as in Protobuf)."""

from __future__ import annotations

from immortal.protocol.errors import LocalProtocolError, RemoteProtocolError

INT_MIN, INT_MAX = -(1 << 31), (1 << 31) - 1
LONG_MIN, LONG_MAX = -(1 << 63), (1 << 63) - 1
INT_SIZE_BYTES_MAX = 5
LONG_SIZE_BYTES_MAX = 10

Readable = bytes | bytearray | memoryview


def _encode(value: int, bits: int) -> bytes:
    rest = (value << 1) ^ (value >> (bits - 1))
    if rest < 0x80:
        return bytes((rest,))
    groups = bytearray()
    while rest >= 0x80:
        groups.append(rest & 0x7F | 0x80)
        rest >>= 7
    groups.append(rest)
    return bytes(groups)


# Sizes and counts are almost always small and non-negative: a table has their encodings.
_SMALL = tuple(_encode(value, 64) for value in range(4096))


def encode_zigzag(value: int) -> bytes:
    """Encode ``value`` (LONG_MIN .. LONG_MAX). Within INT_MIN .. INT_MAX the bytes are those of a ZigZagInt.

    Raises LocalProtocolError if it does not fit into 64 bits.
    """
    if 0 <= value < 4096:
        return _SMALL[value]
    if not LONG_MIN <= value <= LONG_MAX:
        raise LocalProtocolError(f"{value} does not fit into a ZigZagLong (64 bits)")
    return _encode(value, 64)


def _decode(data: Readable, offset: int, size_bytes_max: int, name: str, top: int) -> tuple[int, int]:
    value = shift = 0
    position = offset
    end = len(data)
    while True:
        if position >= end:
            raise RemoteProtocolError(f"a {name} at byte {offset} runs past the end of its message")
        group = data[position]
        position += 1
        value |= (group & 0x7F) << shift
        if group < 0x80:
            break
        shift += 7
        if position - offset >= size_bytes_max:
            raise RemoteProtocolError(f"a {name} at byte {offset} is longer than {size_bytes_max} bytes")
    if value > top:
        raise RemoteProtocolError(f"a {name} at byte {offset} is larger than its type allows")
    return (value >> 1) ^ -(value & 1), position


def decode_zigzag_int(data: Readable, offset: int = 0) -> tuple[int, int]:
    """Decode a ZigZagInt at ``offset``: (value, offset after it). Raises RemoteProtocolError."""
    if offset < len(data) and (first := data[offset]) < 0x80:
        return (first >> 1) ^ -(first & 1), offset + 1
    return _decode(data, offset, INT_SIZE_BYTES_MAX, "ZigZagInt", 0xFFFFFFFF)


def decode_zigzag_long(data: Readable, offset: int = 0) -> tuple[int, int]:
    """Decode a ZigZagLong at ``offset``: (value, offset after it). Raises RemoteProtocolError."""
    return _decode(data, offset, LONG_SIZE_BYTES_MAX, "ZigZagLong", 0xFFFFFFFFFFFFFFFF)
