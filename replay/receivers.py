"""What a receiver has in its log is what was sent then: the best witness of a stream, message by message."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from immortal.coordinator.log.contents import batches, record_of
from immortal.coordinator.log.source import RecordSource
from immortal.protocol.batch import offset_after
from immortal.protocol.messages import decode_message
from immortal.protocol.trailer import BatchKind, decode_trailer


class Difference(Struct, frozen=True):
    """The first message of a stream that is another one now; both are whole RPC messages in incoming form."""

    position: int
    then: bytes
    now: bytes


class _Segment(Struct):
    """Consecutive messages, ``count`` of them left."""

    position: int  # of the first one left
    count: int
    payload: bytes

    def take(self, count: int) -> bytes:
        """The next ``count`` messages."""
        offset = offset_after(self.payload, count, self.count)
        taken, self.payload = self.payload[:offset], self.payload[offset:]
        self.position += count
        self.count -= count
        return taken


def received(
    source: RecordSource, sender: str, first_sequence_id: int | None = None
) -> Iterator[tuple[int, int, bytes]]:
    """What the log ``source`` holds of ``sender`` ("": of its own instance): (first position, count, payload).

    From the record ``first_sequence_id`` on; None: from its first one.
    """
    first = source.summary().first_sequence_id if first_sequence_id is None else first_sequence_id
    for value in source.values(first):
        record = record_of(value)
        trailer = decode_trailer(value[record.header.size_bytes :], record.header.check)
        if not any(batch.kind == BatchKind.STREAM and batch.name == sender for batch in trailer.batches):
            continue
        for batch, content in zip(trailer.batches, batches(record.content), strict=True):
            if batch.kind == BatchKind.STREAM and batch.name == sender:
                yield batch.first_position, batch.count, content.payload


class Witness:
    """Compares what a replay makes with what was received then. Positions must only grow.

    ``compared_position``: of the last message that both sides have. What the receiver does not have, since it was
    trimmed there or had not arrived, is passed over, and so are impulses, which only it has.
    """

    def __init__(self, segments: Iterator[tuple[int, int, bytes]]) -> None:
        self.compared_position = 0
        self.difference: Difference | None = None
        self._segments = segments
        self._then: _Segment | None = self._next()

    def _next(self) -> _Segment | None:
        segment = next(self._segments, None)
        return None if segment is None else _Segment(*segment)

    def made(self, first_position: int, count: int, payload: bytes) -> None:
        """The replay has made these; ``difference`` is set at the first that was another one."""
        now = _Segment(first_position, count, payload)
        while now.count and self._then is not None and self.difference is None:
            then = self._then
            if not then.count or then.position + then.count <= now.position:
                self._then = self._next()
            elif then.position < now.position:
                then.take(now.position - then.position)
            elif now.position < then.position:
                now.take(min(now.count, then.position - now.position))
            else:
                self._compare(then, now, min(then.count, now.count))

    def _compare(self, then: _Segment, now: _Segment, count: int) -> None:
        position = now.position
        old, new = then.take(count), now.take(count)
        self.compared_position = position + count - 1
        if old == new:
            return
        for index in range(count):
            old_end, new_end = decode_message(old, 0)[2], decode_message(new, 0)[2]
            if old[:old_end] != new[:new_end]:
                self.difference = Difference(position + index, old[:old_end], new[:new_end])
                return
            old, new = old[old_end:], new[new_end:]
