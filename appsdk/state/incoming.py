"""Bytes of a checkpoint as they arrive, in pieces of any size: whole MessagePack values are taken from them.

Methods that need bytes are generators: they yield while the bytes are missing, and return what was asked for.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import TypeVar

from immortal.protocol.decoding import DecodeError
from immortal.protocol.nesting import whole_values
from immortal.protocol.readers import Pieces

T = TypeVar("T")
Waiting = Generator[None, None, T]

PIECE_SIZE_BYTES = 256 << 10


def finish(waiting: Waiting[T]) -> T:
    """Return the result of a generator of this module, whose bytes are all there."""
    try:
        while True:
            next(waiting)
    except StopIteration as ended:
        result: T = ended.value
        return result


def map_front(count: int) -> bytes:
    """Return the header of a MessagePack map of ``count`` entries."""
    if count < 1 << 4:
        return bytes((0x80 | count,))
    return b"\xde" + count.to_bytes(2, "big") if count < 1 << 16 else b"\xdf" + count.to_bytes(4, "big")


class Incoming:
    """Bytes that come from ``source``, which yields None while there are none yet."""

    def __init__(self, source: Iterable[bytes | None]) -> None:
        self._source: Iterator[bytes | None] = iter(source)
        self._pieces = Pieces()
        self._is_whole = False  # all bytes have come

    @classmethod
    def of(cls, data: memoryview) -> Incoming:
        """Return bytes that are there already."""
        return cls(bytes(data[at : at + PIECE_SIZE_BYTES]) for at in range(0, len(data), PIECE_SIZE_BYTES))

    def _wait_for(self, size_bytes: int) -> Waiting[tuple[bytes, int]]:
        """Wait for ``size_bytes``, or all if there are fewer; return (bytes, where they begin)."""
        pieces = self._pieces
        while pieces.size_bytes < size_bytes and not self._is_whole:
            try:
                piece = next(self._source)
            except StopIteration:
                self._is_whole = True
                break
            if piece is None:
                yield
            else:
                pieces.append(piece)
        return pieces.view(size_bytes)

    def view(self, size_bytes: int) -> Waiting[bytes]:
        """Return the next ``size_bytes``, or all if there are fewer, without taking them."""
        data, start = yield from self._wait_for(size_bytes)
        return data[start : start + size_bytes]

    def read(self, size_bytes: int) -> Waiting[bytes]:
        """Return the next ``size_bytes``, or all if there are fewer."""
        data = yield from self.view(size_bytes)
        self._pieces.skip(len(data))
        return data

    def rest(self) -> Waiting[bytes]:
        """Return all bytes up to the end."""
        return (yield from self.read(1 << 62))

    def _values(self, count: int, parts: int, size_bytes: int) -> Waiting[tuple[int, memoryview]]:
        """Take some of the next ``count`` groups of ``parts`` values: their number, above 0, and their bytes."""
        while True:
            data, start = yield from self._wait_for(size_bytes)
            found, end = whole_values(data, start, count, parts)
            if found:
                self._pieces.skip(end - start)
                return found, memoryview(data)[start:end]
            if self._is_whole:
                raise DecodeError("it ends in the middle of a value")
            size_bytes = 2 * self._pieces.size_bytes  # each byte is looked at twice at most

    def value(self) -> Waiting[bytes]:
        """Take the next value. Raises DecodeError."""
        _, data = yield from self._values(1, 1, 1)
        return bytes(data)

    def entries(self, count: int) -> Waiting[tuple[int, bytes]]:
        """Take some of the next ``count`` entries of a map: their number, above 0, and a map of these alone.

        Raises DecodeError.
        """
        found, data = yield from self._values(count, 2, PIECE_SIZE_BYTES)
        return found, b"".join((map_front(found), data))

    def map_count(self) -> Waiting[int]:
        """Return the number of entries of the map that begins. Raises DecodeError."""
        first = (yield from self.read(1)) or b"\xc1"
        if 0x80 <= first[0] < 0x90:
            return first[0] & 0x0F
        size_bytes = {0xDE: 2, 0xDF: 4}.get(first[0], 0)
        count = yield from self.read(size_bytes)
        if not size_bytes or len(count) < size_bytes:
            raise DecodeError("a map was expected")
        return int.from_bytes(count, "big")

    def end(self) -> Waiting[None]:
        """Check that no bytes are left. Raises DecodeError."""
        if (yield from self.view(1)):
            raise DecodeError("bytes follow it")
