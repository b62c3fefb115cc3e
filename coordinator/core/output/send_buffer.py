"""Memory of one output stream: batches in flight, batches not sent yet, kept impulses, and spilled messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from immortal.coordinator.core.errors import DivergenceError, require
from immortal.coordinator.core.interfaces import ImpulseBatch, OutputBatch, SpilledExtent
from immortal.coordinator.core.limits import Limits
from immortal.protocol.batch import offset_after


@dataclass(slots=True, eq=False, repr=False)
class _Waiting:
    batch: OutputBatch
    ticket: int  # commit that must be durable before the batch is sent; 0: none


class SendBuffer:
    """Batches of one stream that wait to be sent, or are in flight. :meth:`enqueue` adds them in order."""

    def __init__(self, limits: Limits) -> None:
        self.in_flight_bytes = 0
        self.unsent_bytes = 0
        self._limits = limits
        self._in_flight: deque[OutputBatch] = deque()
        self._unsent: deque[_Waiting] = deque()

    def __len__(self) -> int:
        return len(self._in_flight) + len(self._unsent)

    @property
    def is_empty(self) -> bool:
        return not (self._in_flight or self._unsent)

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def sent_position(self) -> int:
        """The last position in flight; 0: none."""
        return self._in_flight[-1].last_position if self._in_flight else 0

    @property
    def batches(self) -> list[OutputBatch]:
        return [*self._in_flight, *(waiting.batch for waiting in self._unsent)]

    @property
    def room_bytes(self) -> int:
        """Free bytes, less the room for messages that gather to be a row of the log."""
        limits = self._limits
        return limits.output_memory_bytes - limits.spill_row_bytes - self.in_flight_bytes - self.unsent_bytes

    def enqueue(self, batch: OutputBatch, ticket: int) -> None:
        self._unsent.append(_Waiting(batch, ticket))
        self.unsent_bytes += len(batch.payload)

    def next_batch(
        self, durable_ticket: int, window_bytes: int, last_position: int | None = None
    ) -> OutputBatch | None:
        """Return the next batch to send now, if the window is open and enough has gathered; see :meth:`_dequeue`."""
        unsent = self._unsent
        limits = self._limits
        if (
            not unsent
            or unsent[0].ticket > durable_ticket
            or (last_position is not None and unsent[0].batch.first_position > last_position)
            or len(self._in_flight) >= limits.peer_window_frames
            or (len(self._in_flight) > 1 and self.unsent_bytes < min(limits.peer_gather_bytes, window_bytes))
        ):
            return None
        room_bytes = window_bytes - self.in_flight_bytes
        if len(unsent[0].batch.payload) > room_bytes:
            if self._in_flight:
                return None
            # One message that is larger than the window goes alone.
            waiting = unsent.popleft()
            front, rest = split_to_fit(waiting.batch, window_bytes)
            if rest is not None:
                unsent.appendleft(_Waiting(rest, waiting.ticket))
            unsent.appendleft(_Waiting(front, waiting.ticket))
        batch = join(self._dequeue(durable_ticket, min(limits.peer_frame_bytes, room_bytes), last_position))
        self._in_flight.append(batch)
        return batch

    def pop_all(self, durable_ticket: int, last_position: int | None = None) -> list[OutputBatch]:
        """Take everything that can be sent, for a local receiver without a window; it is in flight then."""
        taken = self._dequeue(durable_ticket, self.unsent_bytes, last_position)
        self._in_flight.extend(taken)
        return taken

    def _dequeue(self, durable_ticket: int, size_bytes_max: int, last_position: int | None) -> list[OutputBatch]:
        """Take unsent batches up to ``size_bytes_max``, but at least one. None begins after ``last_position``; None: no
        limit."""
        unsent = self._unsent
        taken: list[OutputBatch] = []
        size_bytes = 0
        while (
            unsent
            and unsent[0].ticket <= durable_ticket
            and (last_position is None or unsent[0].batch.first_position <= last_position)
            and (not taken or size_bytes + len(unsent[0].batch.payload) <= size_bytes_max)
        ):
            batch = unsent.popleft().batch
            taken.append(batch)
            size_bytes += len(batch.payload)
        self.unsent_bytes -= size_bytes
        self.in_flight_bytes += size_bytes
        return taken

    def acknowledge(self, position: int) -> int:
        """Drop everything up to ``position``; return how many bytes of it were in flight."""
        in_flight, unsent = self._in_flight, self._unsent
        size_bytes = 0
        while in_flight and in_flight[0].last_position <= position:
            size_bytes += len(in_flight.popleft().payload)
        self.in_flight_bytes -= size_bytes
        if not in_flight:  # after a restart, if the receiver has more than was known
            while unsent and unsent[0].batch.first_position <= position:
                waiting = unsent.popleft()
                self.unsent_bytes -= len(waiting.batch.payload)
                rest = part_after(waiting.batch, position)
                if rest is not None:
                    self.unsent_bytes += len(rest.payload)
                    unsent.appendleft(_Waiting(rest, waiting.ticket))
        return size_bytes

    def requeue_in_flight(self) -> None:
        """Return batches in flight to the unsent ones: they will not arrive, or not in order."""
        for batch in reversed(self._in_flight):
            self._unsent.appendleft(_Waiting(batch, 0))
        self.unsent_bytes += self.in_flight_bytes
        self._in_flight.clear()
        self.in_flight_bytes = 0


# Kept impulses: logged impulses of one output stream whose positions the replay has not reached.
#
# No replay makes them. They return between its messages, at the positions that they had.


class KeptImpulses:
    """Kept impulses by position. The parameter ``position`` is that of the stream at the time of the call."""

    def __init__(self, destination: str) -> None:
        self._destination = destination
        self._batches: deque[ImpulseBatch] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def keep(self, impulses: Iterable[ImpulseBatch], position: int) -> None:
        """Keep the new ones of these impulses until the stream reaches their positions."""
        last = self._batches[-1].last_position if self._batches else position
        self._batches.extend(batch for batch in impulses if batch.first_position > last)

    def room(self, position: int, count: int) -> int:
        """Return how many of the app's next ``count`` messages precede the next impulse. Raises DivergenceError."""
        if not self._batches:
            return count
        room = self._batches[0].first_position - position - 1
        if room < 0:
            raise self.misplaced(position)
        return min(room, count)

    def pop_following(self, position: int) -> ImpulseBatch | None:
        """Take the next impulses if their position follows ``position``."""
        if self._batches and self._batches[0].first_position == position + 1:
            return self._batches.popleft()
        return None

    def pop_all(self) -> list[ImpulseBatch]:
        taken, self._batches = self._batches, deque()
        return list(taken)

    def end_after(self, position: int) -> int:
        """Return the position of the stream once all impulses that follow without a gap are added."""
        for impulses in self._batches:
            if impulses.first_position != position + 1:
                break
            position = impulses.last_position
        return position

    def count_up_to(self, position: int) -> int:
        return sum([batch.count for batch in self._batches if batch.first_position <= position])

    def misplaced(self, position: int) -> DivergenceError:
        """Return the error for an impulse whose position has passed, or is never reached by the replay."""
        return DivergenceError(
            f"an impulse to {self._destination!r} has position {self._batches[0].first_position}, the replay has "
            f"made {position} messages where it belongs: the handlers did not do what they did before"
        )


# Cutting and joining batches between messages.


def cut(batch: OutputBatch, count: int) -> tuple[OutputBatch, OutputBatch]:
    """Split ``batch`` after ``count`` messages; both parts are non-empty."""
    require(0 < count < batch.count, f"cut {count} of {batch.count} messages")
    return _cut_at(batch, count, offset_after(batch.payload, count, batch.count))


def part_after(batch: OutputBatch, position: int) -> OutputBatch | None:
    """Return the part of ``batch`` after ``position``; None if there is none."""
    if batch.first_position > position:
        return batch
    if batch.last_position <= position:
        return None
    return cut(batch, position - batch.first_position + 1)[1]


def split_to_fit(batch: OutputBatch, size_bytes_max: int) -> tuple[OutputBatch, OutputBatch | None]:
    """Split ``batch`` so that the first part fits into ``size_bytes_max``, but has at least one message.

    The position of the split is estimated, as if all messages had one size.
    """
    count, offset = batch.count, len(batch.payload)
    while offset > size_bytes_max and count > 1:
        count = max(1, min(count - 1, count * size_bytes_max // offset))
        offset = offset_after(batch.payload, count, batch.count)
    return (batch, None) if count == batch.count else _cut_at(batch, count, offset)


def join(batches: Sequence[OutputBatch]) -> OutputBatch:
    """Join batches, each of which continues the one before it."""
    if len(batches) == 1:
        return batches[0]
    payload = b"".join([batch.payload for batch in batches])
    return OutputBatch(batches[0].first_position, sum([batch.count for batch in batches]), payload)


def _cut_at(batch: OutputBatch, count: int, offset: int) -> tuple[OutputBatch, OutputBatch]:
    return (
        OutputBatch(batch.first_position, count, batch.payload[:offset]),
        OutputBatch(batch.first_position + count, batch.count - count, batch.payload[offset:]),
    )


# Spilled messages of one output stream: they are stored in the log, since memory has no room for them.
#
# A stream's oldest waiting messages are in memory, the newer ones here. Messages gather here until they are worth a row
# of the log's table ``spilled``; impulses are in the log anyway. So this is a queue of segments, each gathered or
# stored. Its front returns to memory when there is room. Stored rows stay in the log until they are acknowledged.
#
# After a crash the replay makes the same messages at the same positions. Those in the log are not written again.


COUNTED_SIZE_BYTES = 1 << 20  # rows are counted together up to this size, so that the count takes little memory


@dataclass(slots=True, eq=False, repr=False)
class _Gathered:
    """Messages in memory. ``ticket``: the commit that must be durable before they are sent; ``logged``: impulses."""

    batch: OutputBatch
    ticket: int
    logged: bool


@dataclass(slots=True, eq=False, repr=False)
class _Stored:
    """Messages that are in the log once the commit ``ticket`` is durable."""

    first_position: int
    last_position: int
    size_bytes: int
    ticket: int


class Spill:
    """Spilled part of one stream. ``row_bytes``: approximate size of a row; ``extents``: messages in the log that a
    replay makes again."""

    def __init__(self, row_bytes: int, extents: Iterable[SpilledExtent] = ()) -> None:
        self._row_bytes = row_bytes
        self.gathered_bytes = 0
        self.stored_bytes = 0  # to be read back
        self.kept_bytes = 0  # in the log and not acknowledged, also if they were read back
        self.reading = False
        self._segments: deque[_Gathered | _Stored] = deque()
        self._known: deque[SpilledExtent] = deque(extents)
        self._kept: deque[tuple[int, int]] = deque()  # (last position, size in bytes)
        self._read_position = 0
        for extent in self._known:
            self._keep(extent.last_position, extent.size_bytes)

    @property
    def active(self) -> bool:
        """True if segments wait here, so new messages must follow them."""
        return bool(self._segments)

    @property
    def known_position(self) -> int:
        """The last logged position that a replay must still make again; 0 if none is left."""
        return self._known[-1].last_position if self._known else 0

    @property
    def gathered(self) -> list[OutputBatch]:
        return [segment.batch for segment in self._segments if isinstance(segment, _Gathered)]

    # --- in ------------------------------------------------------------------------------------------------------

    def add(self, batch: OutputBatch, ticket: int, *, logged: bool) -> None:
        """Add the stream's next messages. ``logged``: impulses, which the commit ``ticket`` writes to the log."""
        known = self._known
        rest: OutputBatch | None = batch
        while rest is not None:
            while known and known[0].last_position < rest.first_position:
                known.popleft()
            if logged or not known or known[0].first_position > rest.last_position:
                self._gather(rest, ticket, logged)
                return
            before = known[0].first_position - rest.first_position
            if before > 0:
                front, rest = cut(rest, before)
                self._gather(front, ticket, logged)
            front, rest = _split_after(rest, known[0].last_position)
            self.add_stored(front.first_position, front.last_position, len(front.payload))

    def replace_known(self, extents: Iterable[SpilledExtent]) -> None:
        """Replace the known extents by those of another writer; gathered messages among them count as stored."""
        segments, self._segments = self._segments, deque()
        self._known, self._kept = deque(extents), deque()
        self.gathered_bytes = self.stored_bytes = self.kept_bytes = 0
        for extent in self._known:
            self._keep(extent.last_position, extent.size_bytes)
        for segment in segments:
            if isinstance(segment, _Gathered):
                self.add(segment.batch, segment.ticket, logged=segment.logged)
            else:
                self.add_stored(segment.first_position, segment.last_position, segment.size_bytes, segment.ticket)

    def _gather(self, batch: OutputBatch, ticket: int, logged: bool) -> None:
        self._segments.append(_Gathered(batch, ticket, logged))
        self.gathered_bytes += len(batch.payload)

    def add_stored(self, first_position: int, last_position: int, size_bytes: int, ticket: int = 0) -> None:
        """Add the stream's next messages, which the log has, or will have after the commit ``ticket``."""
        self.stored_bytes += size_bytes
        last = self._segments[-1] if self._segments else None
        if isinstance(last, _Stored) and last.ticket == ticket and last.last_position + 1 == first_position:
            last.last_position = last_position
            last.size_bytes += size_bytes
            return
        self._segments.append(_Stored(first_position, last_position, size_bytes, ticket))

    def estimate_size(self, first_position: int, last_position: int) -> int:
        """Estimate how many bytes the log has of these positions."""
        size_bytes = 0
        for extent in self._known:
            first = max(first_position, extent.first_position)
            count = min(last_position, extent.last_position) - first + 1
            if count > 0:
                size_bytes += extent.size_bytes * count // (extent.last_position - extent.first_position + 1)
        return size_bytes

    def store(self, ticket: int) -> list[OutputBatch]:
        """Move all gathered messages to the stored ones; return the rows that the commit ``ticket`` must write."""
        rows: list[OutputBatch] = []
        joined: list[OutputBatch] = []
        joined_bytes = 0
        tail: deque[_Gathered | _Stored] = deque()
        while self.gathered_bytes:
            segment = self._segments.pop()
            tail.appendleft(segment)
            if isinstance(segment, _Gathered):
                self.gathered_bytes -= len(segment.batch.payload)
            else:
                self.stored_bytes -= segment.size_bytes
        for segment in tail:
            if isinstance(segment, _Stored):
                self.add_stored(segment.first_position, segment.last_position, segment.size_bytes, segment.ticket)
                continue
            batch = segment.batch
            follows = not segment.logged and joined and joined[-1].last_position + 1 == batch.first_position
            if joined and (not follows or joined_bytes >= self._row_bytes):
                rows.append(join(joined))
                joined, joined_bytes = [], 0
            if not segment.logged:
                joined.append(batch)
                joined_bytes += len(batch.payload)
            self.add_stored(batch.first_position, batch.last_position, len(batch.payload), ticket)
        if joined:
            rows.append(join(joined))
        for row in rows:
            self._keep(row.last_position, len(row.payload))
        return rows

    def _keep(self, last_position: int, size_bytes: int) -> None:
        self.kept_bytes += size_bytes
        if self._kept and self._kept[-1][1] + size_bytes <= COUNTED_SIZE_BYTES:
            size_bytes += self._kept.pop()[1]
        self._kept.append((last_position, size_bytes))

    # --- out -----------------------------------------------------------------------------------------------------

    def pop_gathered(self, size_bytes_max: int, *, at_least_one: bool) -> tuple[OutputBatch, int] | None:
        """Take the oldest messages with their ticket, if they are in memory and fit into ``size_bytes_max``."""
        segment = self._segments[0] if self._segments else None
        if not isinstance(segment, _Gathered):
            return None
        if len(segment.batch.payload) > size_bytes_max and not at_least_one:
            return None
        self._segments.popleft()
        self.gathered_bytes -= len(segment.batch.payload)
        return segment.batch, segment.ticket

    def next_read(self, durable_ticket: int) -> tuple[int, int] | None:
        """Return the first and last position to read back next, if they are in the log and not being read."""
        segment = self._segments[0] if self._segments else None
        if self.reading or not isinstance(segment, _Stored) or segment.ticket > durable_ticket:
            return None
        self.reading = True
        self._read_position = segment.first_position
        return segment.first_position, segment.last_position

    def accept_read(self, first_position: int, batches: Sequence[OutputBatch]) -> list[OutputBatch]:
        """Return the part of the read batches that goes to memory now."""
        if not self.reading or first_position != self._read_position:
            return []  # for a stream before a crash of the app
        self.reading = False
        taken = []
        for batch in batches:
            rest: OutputBatch | None = batch
            while rest is not None and self._segments:
                segment = self._segments[0]
                rest = part_after(rest, segment.first_position - 1) if isinstance(segment, _Stored) else None
                if rest is None or not isinstance(segment, _Stored):
                    break
                require(rest.first_position == segment.first_position, "a gap in what was read back")
                front, rest = _split_after(rest, segment.last_position)
                taken.append(front)
                self._drop_front(segment, front.last_position, len(front.payload))
        return taken

    def _drop_front(self, segment: _Stored, position: int, size_bytes: int) -> None:
        segment.first_position = position + 1
        if segment.first_position > segment.last_position:
            self._segments.popleft()
            size_bytes = segment.size_bytes
        size_bytes = min(size_bytes, segment.size_bytes)
        segment.size_bytes -= size_bytes
        self.stored_bytes -= size_bytes

    def acknowledge(self, position: int) -> int:
        """Drop everything up to ``position``; return how many bytes of the log this frees."""
        while self._segments:
            segment = self._segments[0]
            if isinstance(segment, _Stored):
                if segment.first_position > position:
                    break
                through = min(position, segment.last_position)
                count = segment.last_position - segment.first_position + 1
                share = segment.size_bytes * (through - segment.first_position + 1) // count
                self._drop_front(segment, through, share)
            else:
                if segment.batch.first_position > position:
                    break
                rest = part_after(segment.batch, position)
                self.gathered_bytes -= len(segment.batch.payload) - (len(rest.payload) if rest else 0)
                if rest is not None:
                    segment.batch = rest
                    break
                self._segments.popleft()
        freed_bytes = 0
        while self._kept and self._kept[0][0] <= position:
            freed_bytes += self._kept.popleft()[1]
        self.kept_bytes -= freed_bytes
        return freed_bytes

    def truncate_after(self, position: int) -> None:
        """Forget logged messages after ``position``: they belong to a part that was cut off."""
        self._known = deque(
            SpilledExtent(extent.first_position, min(extent.last_position, position), extent.size_bytes)
            for extent in self._known
            if extent.first_position <= position
        )
        while self._kept and self._kept[-1][0] > position:
            self.kept_bytes -= self._kept.pop()[1]


def _split_after(batch: OutputBatch, position: int) -> tuple[OutputBatch, OutputBatch | None]:
    """Split ``batch`` after ``position``; the second part is None if nothing is left."""
    if batch.last_position <= position:
        return batch, None
    return cut(batch, position - batch.first_position + 1)
