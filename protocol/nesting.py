"""Measurement of MessagePack's nesting depth and of whole values, without recursion and before decoding.

A decoder calls itself for each nested array or map, until Python's recursion limit stops it. The nesting limit is far
below that limit, and is checked on arrival. `docs/WIRE.md`, part 10.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from immortal.protocol.batch import common_size
from immortal.protocol.varint import Readable, decode_zigzag_int

if TYPE_CHECKING:
    import cython

_FRONT_SIZE_BYTES = 5  # least size of a message's front: size, type, kind, method ID, RPC type
_DEEPEST = 1 << 62
_OTHERS_MAX = 15  # items whose values are replaced: none of the SDK's messages has more
_SIZES_OF_NUMBERS = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_SIZES_OF_EXTENSIONS = {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # bytes that give it
_SAYS_LENGTH = 0xFF
_SIZES = bytes(
    (_SIZES_OF_NUMBERS | _SIZES_OF_EXTENSIONS | dict.fromkeys(_LENGTHS, _SAYS_LENGTH)).get(first, first & 0x1F)
    if 0xA0 <= first < 0xDC and not 0xC0 <= first <= 0xC3
    else 0
    for first in range(256)
)
"""Number of bytes after a value's first byte, by that byte, for values other than arrays and maps."""
_WIDTHS = bytes(_LENGTHS.get(first, 0) for first in range(256))


def is_nested_beyond(data: Readable, start: int, end: int, limit: int) -> bool:
    """Return True if arrays and maps of the value ``data[start:end]`` are nested more than ``limit`` deep.

    Invalid or incomplete MessagePack counts up to the place where a decoder stops.
    """
    if end - start <= limit:  # each level takes at least one byte
        return False
    return _walk(data if type(data) is bytes else bytes(data), start, end, limit) > limit


def nesting_depth(data: Readable) -> int:
    """Return the depth of the most deeply nested array or map in a value."""
    return _walk(bytes(data), 0, len(data), _DEEPEST)


def _walk(data: bytes, start: int, end: int, limit: int) -> int:
    """Compute :func:`nesting_depth`, but stop at ``limit`` + 1."""
    octets: cython.p_const_uchar = data
    table = _SIZES
    sizes: cython.p_const_uchar = table
    table = _WIDTHS
    widths: cython.p_const_uchar = table
    at: cython.Py_ssize_t = start
    stop: cython.Py_ssize_t = end
    deepest_allowed: cython.Py_ssize_t = limit
    first: cython.Py_ssize_t
    width: cython.Py_ssize_t
    count: cython.Py_ssize_t
    left: cython.Py_ssize_t = 1  # values to come in the innermost array or map
    depth: cython.Py_ssize_t = 0
    deepest: cython.Py_ssize_t = 0
    outer: list[int] = []  # values to come in each array or map around it
    while True:
        while left == 0:
            if depth == 0:
                return deepest
            left = outer.pop()
            depth -= 1
        if at >= stop:
            return deepest
        left -= 1
        first = octets[at]
        at += 1
        if 0x80 <= first < 0xA0:
            count = first & 0x0F
            if first < 0x90:
                count *= 2
        elif 0xDC <= first < 0xE0:
            width = 4 if first & 1 else 2
            if at + width > stop:
                return deepest
            count = octets[at] << 8 | octets[at + 1]
            if width == 4:
                count = count << 16 | octets[at + 2] << 8 | octets[at + 3]
            at += width
            if first >= 0xDE:
                count *= 2
        else:
            count = sizes[first]
            if count == _SAYS_LENGTH:
                width = widths[first]
                if at + width > stop:
                    return deepest
                count = octets[at]
                if width >= 2:
                    count = count << 8 | octets[at + 1]
                if width == 4:
                    count = count << 16 | octets[at + 2] << 8 | octets[at + 3]
                count += width
                if 0xC7 <= first <= 0xC9:  # an extension's type
                    count += 1
            at += count
            continue
        outer.append(left)
        left = count
        depth += 1
        if depth > deepest:
            deepest = depth
            if deepest > deepest_allowed:
                return deepest


def whole_values(data: bytes, start: int, count: int, parts: int) -> tuple[int, int]:
    """Return how many of ``count`` groups of ``parts`` values are complete from ``start`` on, and the offset behind.

    Invalid bytes count as values: a decoder must read what is found.
    """
    octets: cython.p_const_uchar = data
    table = _SIZES
    sizes: cython.p_const_uchar = table
    table = _WIDTHS
    widths: cython.p_const_uchar = table
    at: cython.Py_ssize_t = start
    stop: cython.Py_ssize_t = len(data)
    first: cython.Py_ssize_t
    width: cython.Py_ssize_t
    size: cython.Py_ssize_t
    is_container: cython.bint
    left: cython.Py_ssize_t  # values to come, in all arrays and maps that are open
    groups: cython.Py_ssize_t = count
    size_of_group: cython.Py_ssize_t = parts
    seen: cython.Py_ssize_t = 0
    end: cython.Py_ssize_t = start
    while seen < groups:
        left = size_of_group
        while left > 0:
            if at >= stop:
                return seen, end
            left -= 1
            first = octets[at]
            at += 1
            if 0x80 <= first < 0xA0:
                left += 2 * (first & 0x0F) if first < 0x90 else first & 0x0F
                continue
            is_container = 0xDC <= first < 0xE0
            width = (4 if first & 1 else 2) if is_container else widths[first]
            if at + width > stop:
                return seen, end
            size = sizes[first]
            if width:
                size = 0
                for _ in range(width):
                    size = size << 8 | octets[at]
                    at += 1
            if is_container:
                left += 2 * size if first >= 0xDE else size
            else:
                at += size + (0xC7 <= first <= 0xC9)  # an extension's type
        if at > stop:
            break
        seen += 1
        end = at
    return seen, end


def without_values(data: bytes, count: int) -> bytes | None:
    """Copy an array's first ``count`` items, with nil in place of each other item.

    Returns None if the array has fewer items, or one of these items is an array or a map.
    """
    first = data[0] if data else 0
    front_size_bytes = {0xDC: 3, 0xDD: 5}.get(first, 1)
    if front_size_bytes == 1 and not 0x90 <= first <= 0x9F:
        return None
    length = first & 0x0F if front_size_bytes == 1 else int.from_bytes(data[1:front_size_bytes], "big")
    at = front_size_bytes
    for _ in range(count):
        first = data[at] if at < len(data) else 0xC1
        if 0x80 <= first < 0xA0 or 0xDC <= first < 0xE0 or first == 0xC1:
            return None
        width = _LENGTHS.get(first)
        at += 1 + _SIZES[first]
        if width is not None:
            start = at - _SAYS_LENGTH
            at = start + width + (0xC7 <= first <= 0xC9) + int.from_bytes(data[start : start + width], "big")
    if at > len(data) or not count <= length <= count + _OTHERS_MAX:
        return None
    return data[:at] + b"\xc0" * (length - count)


def messages_nested_too_deep(payload: bytes, count: int, limit: int) -> list[tuple[int, int]]:
    """Find the RPC messages whose arguments are nested too deeply: (index, start of the message's data).

    The array of the arguments itself does not count; arguments that are no array are not checked. ``payload`` has
    ``count`` packed messages and was checked (:func:`immortal.protocol.batch.check_batch`).
    """
    if len(payload) <= limit + _FRONT_SIZE_BYTES or 0 < common_size(payload, count) <= limit + _FRONT_SIZE_BYTES:
        return []
    found: list[tuple[int, int]] = []
    octets: cython.p_const_uchar = payload
    offset: cython.Py_ssize_t = 0
    size_bytes: cython.Py_ssize_t
    shallow: cython.Py_ssize_t = limit + _FRONT_SIZE_BYTES - 1
    for index in range(count):
        size_bytes = octets[offset]
        offset += 1
        if size_bytes < 0x80:
            size_bytes >>= 1
        else:
            size_bytes, offset = decode_zigzag_int(payload, offset - 1)
        if size_bytes > shallow:
            arguments = decode_zigzag_int(payload, offset + 2)[1] + 1
            is_array = octets[arguments] >> 4 == 0x9 or octets[arguments] in (0xDC, 0xDD)
            if is_array and is_nested_beyond(payload, arguments, offset + size_bytes, limit + 1):
                found.append((index, offset + 1))
        offset += size_bytes
    return found
