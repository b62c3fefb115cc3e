"""What of one output stream is in memory, and sent from there: first what is on its way, then what was not sent yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from immortal.coordinator.core.interfaces import OutputBatch
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.pieces import behind, fitting, join


@dataclass(slots=True, eq=False, repr=False)
class _Waiting:
    batch: OutputBatch
    ticket: int  # of the commit that must be durable before it is sent; 0: none


class SendBuffer:
    """Batches go in by :meth:`put`, in order; they stay until the receiver has them."""

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
        """The last position on its way; 0: nothing is."""
        return self._in_flight[-1].last_position if self._in_flight else 0

    @property
    def batches(self) -> list[OutputBatch]:
        return [*self._in_flight, *(waiting.batch for waiting in self._unsent)]

    @property
    def room_bytes(self) -> int:
        """For what is sent before all that is spilled; the rest is for what gathers to be a row."""
        limits = self._limits
        return limits.output_memory_bytes - limits.spill_row_bytes - self.in_flight_bytes - self.unsent_bytes

    def put(self, batch: OutputBatch, ticket: int) -> None:
        self._unsent.append(_Waiting(batch, ticket))
        self.unsent_bytes += len(batch.payload)

    def next_batch(
        self, durable_ticket: int, window_bytes: int, last_position: int | None = None
    ) -> OutputBatch | None:
        """The next batch to send now, if the window is open, and enough has gathered; see :meth:`_take`."""
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
            front, rest = fitting(waiting.batch, window_bytes)
            if rest is not None:
                unsent.appendleft(_Waiting(rest, waiting.ticket))
            unsent.appendleft(_Waiting(front, waiting.ticket))
        batch = join(self._take(durable_ticket, min(limits.peer_frame_bytes, room_bytes), last_position))
        self._in_flight.append(batch)
        return batch

    def take_all(self, durable_ticket: int, last_position: int | None = None) -> list[OutputBatch]:
        """All that may go, for a receiver that is at hand and needs no window; it is on its way until acknowledged."""
        taken = self._take(durable_ticket, self.unsent_bytes, last_position)
        self._in_flight.extend(taken)
        return taken

    def _take(self, durable_ticket: int, size_bytes_max: int, last_position: int | None) -> list[OutputBatch]:
        """What was not sent yet and may be, as much as fits into ``size_bytes_max``; one batch fits always. No batch
        that begins behind ``last_position``; None: any."""
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
        """The receiver has everything up to ``position``; how many bytes of that were on their way."""
        in_flight, unsent = self._in_flight, self._unsent
        size_bytes = 0
        while in_flight and in_flight[0].last_position <= position:
            size_bytes += len(in_flight.popleft().payload)
        self.in_flight_bytes -= size_bytes
        if not in_flight:  # after a restart, when the receiver has more than was known
            while unsent and unsent[0].batch.first_position <= position:
                waiting = unsent.popleft()
                self.unsent_bytes -= len(waiting.batch.payload)
                rest = behind(waiting.batch, position)
                if rest is not None:
                    self.unsent_bytes += len(rest.payload)
                    unsent.appendleft(_Waiting(rest, waiting.ticket))
        return size_bytes

    def give_up_in_flight(self) -> None:
        """What is on its way will not arrive, or not in order: it is to be sent again."""
        for batch in reversed(self._in_flight):
            self._unsent.appendleft(_Waiting(batch, 0))
        self.unsent_bytes += self.in_flight_bytes
        self._in_flight.clear()
        self.in_flight_bytes = 0
