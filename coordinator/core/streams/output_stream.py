"""The sending end of one stream: from this instance to one other.

Every message of the app to that instance takes the stream's next position, from 1. A message is kept until the receiver
has said that it is durable there: the oldest in memory, up to a limit, those behind them in the log. After a crash the
app's replay makes the same messages again, at the same positions: those at or below the acknowledged one are dropped,
the rest are sent. Impulses, which no replay makes, are put back at the positions that they had.

    CLOSED --open--> GREETING --Welcome--> OPEN          Hello asks how much the receiver has; batches follow it
                        |                    |
                        +----- Refused ------+--> FAILED   this stream alone stops; its messages are kept, and it is
                        <--- after a while, or reset ---+  tried again

Positions are those of this instance, for the life of its log. The receiver's differ from them by an offset once the
stream was reset, since its log was wiped or replaced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from coordinator.core.errors import DivergenceError
from coordinator.core.interfaces import ONESELF, ImpulseBatch, OutputBatch, OutputMark, SpilledExtent
from coordinator.core.limits import Limits
from coordinator.core.output_check import OutputCheck
from coordinator.core.pieces import behind, fitting
from coordinator.core.streams.spill import Spill
from protocol.batch import offset_after
from protocol.checksum import crc64
from protocol.client import CLIENTS


class StreamState(Enum):
    CLOSED = "closed"
    GREETING = "greeting"
    OPEN = "open"
    FAILED = "failed"


@dataclass(slots=True)
class _Waiting:
    batch: OutputBatch
    ticket: int  # of the commit that must be durable before it is sent; 0: none


class OutputStream:
    """What one destination is still to get. Messages go in by ``append*``; frames come out of :meth:`next_batch`."""

    def __init__(
        self,
        destination: str,
        limits: Limits,
        *,
        mark: OutputMark | None = None,
        unacknowledged: Sequence[OutputBatch] = (),
        acknowledged: int = 0,
        impulses: Iterable[ImpulseBatch] = (),
        attempt: int = 0,
        check: OutputCheck | None = None,
        spilled: Sequence[SpilledExtent] = (),
        begins_now: bool = False,
    ) -> None:
        self.destination = destination
        self.state = StreamState.CLOSED
        self.error = ""
        self.failure = ""  # what the last failure was about, until the stream is open again
        self.attempt = attempt  # grows when frames on their way are given up; tags what is sent
        self.position = mark.position if mark else 0
        self.checksum = mark.checksum if mark else 0
        self.acknowledged = acknowledged
        self.first_tag = 0  # answers to attempts before it are from before a reset
        self.forked = False  # this log is an older copy of one that has sent more
        self.offset = 0  # the receiver's position p is p + offset here
        self.greeted_position = 0  # what Hello said, in the receiver's positions
        self.window_bytes = limits.peer_window_bytes  # what the receiver grants
        self.spill = Spill(limits.spill_row_bytes, spilled)
        self.called = self.moved_on = False  # since Outbound last looked: by the app, by the receiver
        self.called_ns = self.moved_on_ns = 0  # when it last saw that
        self.spill_credit_bytes = 0  # what may be spilled because as much was sent: while the app is to be slowed
        self._may_spill = destination not in (ONESELF, CLIENTS)  # those go to the log as they are
        # Since the replay is complete: the last one sent, by it or before it; a stream that no replay made sent none.
        self._sent_through: int | None = 0 if begins_now else None
        self._limits = limits
        self._unsent: deque[_Waiting] = deque()
        self._unsent_bytes = 0
        self._in_flight: deque[OutputBatch] = deque()
        self._in_flight_bytes = 0
        self._marked_position = self.position
        self._impulse_ticket = 0  # of the last impulse's commit
        self._opening_ticket = 0  # of the commit without which nothing is sent
        self._check = check  # while a replay makes messages again
        self._kept_impulses = deque(batch for batch in impulses if batch.first_position > self.position)
        self._restore(unacknowledged)

    def _restore(self, unacknowledged: Sequence[OutputBatch]) -> None:
        """A checkpoint holds what was in memory; what it lacks is in the log."""
        position = self.acknowledged
        for batch in unacknowledged:
            self._restore_stored(position + 1, batch.first_position - 1)
            self._enqueue(batch, 0)
            position = max(position, batch.last_position)
        self._restore_stored(position + 1, self.position)

    def _restore_stored(self, first_position: int, last_position: int) -> None:
        if first_position <= last_position and self._may_spill:
            size_bytes = self.spill.size_known(first_position, last_position)
            self.spill.add_stored(first_position, last_position, size_bytes)

    # --- messages in ---------------------------------------------------------------------------------------------

    def append(self, count: int, payload: bytes, ticket: int = 0) -> None:
        """The app's next ``count`` messages (checked before); not sent before the commit ``ticket`` is durable.

        On replay, kept impulses take their places between them. Raises DivergenceError.
        """
        self.called = True
        while self._kept_impulses:
            room = self._kept_impulses[0].first_position - self.position - 1
            if room < 0:
                raise self._misplaced_impulse()
            if room >= count:
                break
            if room:
                offset = offset_after(payload, room, count)
                self._add(room, payload[:offset], ticket)
                payload, count = payload[offset:], count - room
            self._add_kept_impulse()
        self._add(count, payload, ticket)
        self._add_impulses_that_follow()

    def keep_impulses(self, impulses: Sequence[ImpulseBatch]) -> None:
        """The log has these impulses, in the order of their positions: the new ones among them get theirs."""
        last = self._kept_impulses[-1].last_position if self._kept_impulses else self.position
        self._kept_impulses.extend(batch for batch in impulses if batch.first_position > last)

    def room_up_to(self, position: int) -> int:
        """How many messages of the app, impulses left out, the stream takes until it has ``position``."""
        kept = sum([batch.count for batch in self._kept_impulses if batch.first_position <= position])
        return max(0, position - self.position - kept)

    def append_impulses(self, count: int, payload: bytes, ticket: int) -> ImpulseBatch:
        """New impulses; not sent, nor anything behind them, before the commit ``ticket`` is durable."""
        if self._kept_impulses:  # an app that had held calls back sends something new before them
            raise self._misplaced_impulse()
        batch = ImpulseBatch(self.destination, self.position + 1, count, payload)
        self._impulse_ticket = ticket
        self._add(count, payload, ticket, made_by_replay=False)
        return batch

    @property
    def end_of_replay(self) -> int:
        """The position that the stream has at the end of the replay, when this is it."""
        position = self.position
        for impulses in self._kept_impulses:
            if impulses.first_position != position + 1:
                break
            position = impulses.last_position
        return position

    def finish_replay(self, *, all_sent: bool = True) -> None:
        """The replay is complete: impulses that came after the last replayed message go behind it.

        ``all_sent``: the app holds nothing back that its replay made; a base app may, and sends it later. Raises
        DivergenceError where the app has sent less than it once did.
        """
        self._add_impulses_that_follow()
        if all_sent and self._check is not None:
            self._check.finish()
            self._check = None
        self._sent_through = self.position if all_sent else None
        if all_sent and self._kept_impulses:
            raise self._misplaced_impulse()
        if all_sent and self.spill.known_position > self.position:
            raise DivergenceError(
                f"the log holds {self.spill.known_position} messages for {self.destination!r}, the replay made only "
                f"{self.position}: the handlers did not do what they did before"
            )
        if all_sent and self.acknowledged > self.position:
            raise DivergenceError(
                f"{self.destination!r} has {self.acknowledged} messages of this instance, the replay made only "
                f"{self.position}: the handlers did not do what they did before, "
                f"or this log was replaced by an older copy"
            )

    @property
    def has_kept_impulses(self) -> bool:
        """Impulses whose places the replay has not reached; those right behind what it made take theirs now."""
        self._add_impulses_that_follow()
        return bool(self._kept_impulses)

    def heal_cut(self) -> tuple[list[ImpulseBatch], list[int]]:
        """The log was cut: what its lost part had sent is never made again. Go on behind what the receiver has.

        In place of :meth:`finish_replay`. Impulses that the receiver has not are put behind, at new positions. Returns
        the rows that say so from now on, and the first positions of those that they replace. What was spilled behind
        the position that the stream has before this must go.
        """
        self._check = None
        self.spill.end_at(self.position)
        kept, self._kept_impulses = list(self._kept_impulses), deque()
        rows = []
        if self.acknowledged > self.position:
            gap = self.acknowledged - self.position
            rows.append(ImpulseBatch(self.destination, self.position + 1, gap, b""))
            self.position = self._marked_position = self.acknowledged
        for impulses in kept:
            batch = OutputBatch(impulses.first_position, impulses.count, impulses.payload)
            rest = behind(batch, self.acknowledged)
            if rest is not None:
                rows.append(self.append_impulses(rest.count, rest.payload, 0))
        self._sent_through = self.position
        return rows, [impulses.first_position for impulses in kept]

    def _misplaced_impulse(self) -> DivergenceError:
        return DivergenceError(
            f"an impulse to {self.destination!r} has position {self._kept_impulses[0].first_position}, the replay has "
            f"made {self.position} messages where it belongs: the handlers did not do what they did before"
        )

    def _add_impulses_that_follow(self) -> None:
        """Kept impulses whose place is right behind what was made."""
        while self._kept_impulses and self._kept_impulses[0].first_position == self.position + 1:
            self._add_kept_impulse()

    def _add_kept_impulse(self) -> None:
        impulses = self._kept_impulses.popleft()
        if impulses.payload:
            self._add(impulses.count, impulses.payload, 0, made_by_replay=False)
        else:  # acknowledged long ago, or left in the log: its place matters
            self.position = impulses.last_position
            if impulses.left_size_bytes and impulses.last_position > self.acknowledged:
                first_position = max(impulses.first_position, self.acknowledged + 1)
                self.spill.add_stored(first_position, impulses.last_position, impulses.left_size_bytes)
            if self._check is not None:
                empty = OutputBatch(impulses.first_position, impulses.count, b"")
                self._check.made(empty, self.checksum, self.checksum)

    def _add(self, count: int, payload: bytes, ticket: int, *, made_by_replay: bool = True) -> None:
        batch = OutputBatch(self.position + 1, count, payload)
        self.position = batch.last_position
        before = self.checksum
        if made_by_replay:  # only these can be compared with what a replay makes
            self.checksum = crc64(payload, before)
        if self._check is not None:
            self._check.made(batch, before, self.checksum)
        self._enqueue(batch, ticket, logged=not made_by_replay)

    def _enqueue(self, batch: OutputBatch, ticket: int, *, logged: bool = False) -> None:
        rest = behind(batch, self.acknowledged)
        if rest is None:
            return
        if self.spill.active or (self._may_spill and len(rest.payload) > self._room_bytes):
            self.spill.add(rest, ticket, logged=logged)
        else:
            self._put(rest, ticket)

    def _put(self, batch: OutputBatch, ticket: int) -> None:
        self._unsent.append(_Waiting(batch, ticket))
        self._unsent_bytes += len(batch.payload)

    # --- memory and the log --------------------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        """Not acknowledged, and in memory."""
        return self._in_flight_bytes + self._unsent_bytes + self.spill.gathered_bytes

    @property
    def spilled_bytes(self) -> int:
        """Not acknowledged, and in the log alone."""
        return self.spill.stored_bytes

    @property
    def waiting_bytes(self) -> int:
        """Not acknowledged, on its way or not."""
        return self.memory_bytes + self.spilled_bytes

    @property
    def memory_is_full(self) -> bool:
        """More is held than may be; one message alone may be larger than that."""
        return self.memory_bytes > self._limits.output_memory_bytes and (
            len(self._in_flight) + len(self._unsent) > 1 or self.spill.gathered_bytes > 0
        )

    @property
    def _room_bytes(self) -> int:
        """For what is sent before all that is spilled; the rest is for what gathers to be a row."""
        limits = self._limits
        return limits.output_memory_bytes - limits.spill_row_bytes - self._in_flight_bytes - self._unsent_bytes

    def spilled_by_writer(self, extents: Sequence[SpilledExtent]) -> None:
        """Of a stream that follows: the log has these of its messages, which need not stay in memory here."""
        if self._may_spill and extents:
            self.spill.know(extents)

    def next_read(self, durable_ticket: int) -> tuple[int, int, int] | None:
        """Where there is room again: what gathered goes back to the others; (first, last position, size) to read."""
        spill = self.spill
        if self.state is not StreamState.OPEN:
            return None
        while (
            waiting := spill.take_gathered(self._room_bytes, at_least_one=not (self._unsent or self._in_flight))
        ) is not None:
            self._put(*waiting)
        limits = self._limits
        # Not all that there is room for: it would only lie in memory until the window lets it go.
        enough_bytes = min(limits.output_memory_bytes // 2, 2 * self.window_bytes)
        size_bytes = min(limits.read_size_bytes, limits.output_memory_bytes // 4)
        has_enough = self._unsent_bytes >= enough_bytes or self._room_bytes < size_bytes
        if has_enough and (self._unsent or self._in_flight):
            return None
        found = spill.next_read(durable_ticket)
        return None if found is None else (*found, size_bytes)

    def spilled_read(self, first_position: int, batches: Sequence[OutputBatch]) -> None:
        """What was asked for by :meth:`next_read`."""
        for batch in self.spill.take_read(first_position, batches):
            self._put(batch, 0)

    # --- frames out ----------------------------------------------------------------------------------------------

    def next_batch(self, durable_ticket: int) -> OutputBatch | None:
        """The next batch to send now, if the stream is open, the window too, and enough has gathered."""
        unsent = self._unsent
        limits = self._limits
        if (
            self.state is not StreamState.OPEN
            or self._opening_ticket > durable_ticket
            or not unsent
            or unsent[0].ticket > durable_ticket
            or len(self._in_flight) >= limits.peer_window_frames
            or (len(self._in_flight) > 1 and self._unsent_bytes < min(limits.peer_gather_bytes, self.window_bytes))
        ):
            return None
        room_bytes = self.window_bytes - self._in_flight_bytes
        if len(unsent[0].batch.payload) > room_bytes:
            if self._in_flight:
                return None
            # One message that is larger than the window goes alone.
            waiting = unsent.popleft()
            front, rest = fitting(waiting.batch, self.window_bytes)
            if rest is not None:
                unsent.appendleft(_Waiting(rest, waiting.ticket))
            unsent.appendleft(_Waiting(front, waiting.ticket))
        taken = [unsent.popleft().batch]
        size_bytes = len(taken[0].payload)
        frame_bytes_max = min(limits.peer_frame_bytes, room_bytes)
        while (
            unsent
            and unsent[0].ticket <= durable_ticket
            and size_bytes + len(unsent[0].batch.payload) <= frame_bytes_max
        ):
            batch = unsent.popleft().batch
            taken.append(batch)
            size_bytes += len(batch.payload)
        self._unsent_bytes -= size_bytes
        if len(taken) == 1:
            batch = taken[0]
        else:
            payload = b"".join([batch.payload for batch in taken])
            batch = OutputBatch(taken[0].first_position, sum(batch.count for batch in taken), payload)
        self._in_flight.append(batch)
        self._in_flight_bytes += size_bytes
        if self._sent_through is not None and batch.last_position > self._sent_through:
            self._sent_through = batch.last_position
        return batch

    def take_all(self, durable_ticket: int) -> list[OutputBatch]:
        """All that may go, for a receiver that is at hand and needs no window; it is on its way until acknowledged."""
        unsent = self._unsent
        taken: list[OutputBatch] = []
        while unsent and unsent[0].ticket <= durable_ticket:
            taken.append(unsent.popleft().batch)
        size_bytes = sum([len(batch.payload) for batch in taken])
        self._in_flight.extend(taken)
        self._in_flight_bytes += size_bytes
        self._unsent_bytes -= size_bytes
        return taken

    def acknowledge(self, position: int) -> int:
        """Everything up to ``position`` is durable at the receiver; how many bytes of the log that frees."""
        if position <= self.acknowledged:
            return 0
        self.acknowledged = position
        in_flight = self._in_flight
        while in_flight and in_flight[0].last_position <= position:
            size_bytes = len(in_flight.popleft().payload)
            self._in_flight_bytes -= size_bytes
            self.spill_credit_bytes += size_bytes // 2
        self.moved_on = True
        if not in_flight:  # after a restart, when the receiver has more than was known
            self._drop_acknowledged()
        return self.spill.acknowledge(position)

    def _drop_acknowledged(self) -> None:
        """Of what waits to be sent."""
        unsent = self._unsent
        while unsent and unsent[0].batch.first_position <= self.acknowledged:
            waiting = unsent.popleft()
            rest = behind(waiting.batch, self.acknowledged)
            size_bytes = len(waiting.batch.payload) - (len(rest.payload) if rest else 0)
            self._unsent_bytes -= size_bytes
            if rest is not None:
                unsent.appendleft(_Waiting(rest, waiting.ticket))

    def give_up_in_flight(self) -> None:
        """What is on its way will not arrive, or not in order: it is to be sent again, under a new attempt."""
        self.attempt += 1
        for batch in reversed(self._in_flight):
            self._unsent.appendleft(_Waiting(batch, 0))
        self._unsent_bytes += self._in_flight_bytes
        self._in_flight.clear()
        self._in_flight_bytes = 0

    def reset(self) -> None:
        """All that was sent or answered so far counts for nothing."""
        self.give_up_in_flight()
        self._drop_acknowledged()  # of a frame that was acknowledged in part
        self.first_tag = self.attempt
        self.state = StreamState.CLOSED
        self.error = self.failure = ""

    def open(self, ticket: int = 0) -> None:
        """The receiver has said how much it has. Nothing is sent before the commit ``ticket`` is durable."""
        self.state = StreamState.OPEN
        self.error = self.failure = ""
        self._opening_ticket = ticket

    def fail(self, reason: str) -> None:
        self.give_up_in_flight()
        self.state = StreamState.FAILED
        self.error = reason

    @property
    def is_idle(self) -> bool:
        """Nothing is to be done for it, or waited for, until something comes from the app or the receiver."""
        return (
            self.state is StreamState.OPEN
            and not (self._unsent or self._in_flight or self.called or self.moved_on)
            and not self.spill.active
            and not self.spill.kept_bytes
        )

    @property
    def wants_reply(self) -> bool:
        """Whether something here is held up until the receiver answers."""
        return (
            bool(self._unsent)
            or self.spill.active
            or self.spill.kept_bytes > 0
            or self.state is StreamState.GREETING
            or 2 * self._in_flight_bytes > self.window_bytes
        )

    @property
    def sent_through(self) -> int:
        """The last position that the receiver can have of this log. With more, it has something else at those."""
        return self.position if self._sent_through is None else max(self._sent_through, self.acknowledged)

    @property
    def sent(self) -> int:
        """The last position that was sent, on the current attempt or earlier ones."""
        return self._in_flight[-1].last_position if self._in_flight else self.acknowledged

    @property
    def in_flight_bytes(self) -> int:
        return self._in_flight_bytes

    # --- marks ---------------------------------------------------------------------------------------------------

    @property
    def mark(self) -> OutputMark:
        return OutputMark(self.position, self.checksum)

    def take_new_mark(self, ticket: int) -> OutputMark | None:
        """The mark, if the stream has moved since this was last asked: for a record that the commit ``ticket`` holds.

        None as well while an impulse is in it that becomes durable only later: a crash in between would lose it.
        """
        if self.position == self._marked_position or self._impulse_ticket > ticket:
            return None
        self._marked_position = self.position
        return self.mark

    @property
    def unacknowledged(self) -> list[OutputBatch]:
        """What is in memory. What lies between two of these, or behind them, is in the log, or on its way there."""
        return [*self._in_flight, *(waiting.batch for waiting in self._unsent), *self.spill.gathered]
