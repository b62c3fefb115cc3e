"""Sending end of one stream, from this instance to another one.

Every message of the app to that instance gets the stream's next position, from 1. A message is kept until the receiver
says that it is durable there: the oldest in memory, up to a limit, those after them in the log. After a crash the app's
replay makes the same messages again, at the same positions: acknowledged ones are dropped, the others are sent.
Impulses, which no replay makes, return to the positions that they had.

    CLOSED --open--> GREETING --Welcome--> OPEN          Hello asks how much the receiver has; batches follow it
                        |                    |
                        +----- Refused ------+--> FAILED   this stream alone stops; its messages are kept, and it is
                        <--- after a while, or reset ---+  tried again

Positions are those of this instance, for the lifetime of its log. After a reset, because the receiver's log was wiped
or replaced, the receiver's positions differ from them by an offset.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum

from immortal.coordinator.core.errors import DivergenceError
from immortal.coordinator.core.interfaces import ONESELF, ImpulseBatch, OutputBatch, OutputMark, SpilledExtent
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.output.output_check import OutputCheck
from immortal.coordinator.core.output.send_buffer import KeptImpulses, SendBuffer, Spill, part_after
from immortal.protocol.batch import offset_after
from immortal.protocol.checksum import crc64
from immortal.protocol.client_frames import CLIENTS


class StreamState(Enum):
    """State of an output stream."""

    CLOSED = "closed"
    GREETING = "greeting"
    OPEN = "open"
    FAILED = "failed"


class OutputStream:
    """Sending end of one stream. ``append*`` adds messages; :meth:`next_batch` returns what to send."""

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
        self.failure = ""  # kind of the last failure, until the stream is open again
        self.attempt = attempt  # grows when frames in flight are given up; tags what is sent
        self.position = mark.position if mark else 0
        self.checksum = mark.checksum if mark else 0
        self.acknowledged = acknowledged
        self.first_tag = 0  # answers to earlier attempts are from before a reset
        self.forked = False  # this log is an older copy of one that has sent more
        self.offset = 0  # the receiver's position p is p + offset here
        self.greeted_position = 0  # position in the last Hello, by the receiver's numbers
        self.window_bytes = limits.peer_window_bytes  # window that the receiver grants
        self.buffer = SendBuffer(limits)
        self.spill = Spill(limits.spill_row_bytes, spilled)  # messages after those in the buffer
        self.called = self.moved_on = False  # since Outbound's last look: the app called, the receiver acknowledged
        self.called_ns = self.moved_on_ns = 0  # when Outbound last saw that
        self.spill_credit_bytes = 0  # bytes that can be spilled because twice as many were sent, to slow the app
        self._may_spill = destination not in (ONESELF, CLIENTS)  # the messages of these two go to the log anyway
        # Once the replay is complete: the last position sent; 0 for a stream that began after it.
        self._sent_through: int | None = 0 if begins_now else None
        self._limits = limits
        self._marked_position = self.position
        self._impulse_ticket = 0  # of the last impulse's commit
        self._opening_ticket = 0  # commit that must be durable before anything is sent
        self._check = check  # while a replay makes messages again
        self._gates: deque[tuple[int, int]] = deque()  # (position, barrier): what comes after waits for the barrier
        self._kept_impulses = KeptImpulses(destination)
        self._kept_impulses.keep(impulses, self.position)
        self._restore(unacknowledged)

    def _restore(self, unacknowledged: Sequence[OutputBatch]) -> None:
        """Restore the messages that a checkpoint had in memory; the others are in the log."""
        position = self.acknowledged
        for batch in unacknowledged:
            self._restore_stored(position + 1, batch.first_position - 1)
            self._enqueue(batch, 0)
            position = max(position, batch.last_position)
        self._restore_stored(position + 1, self.position)

    def _restore_stored(self, first_position: int, last_position: int) -> None:
        if first_position <= last_position and self._may_spill:
            size_bytes = self.spill.estimate_size(first_position, last_position)
            self.spill.add_stored(first_position, last_position, size_bytes)

    # --- messages in ---------------------------------------------------------------------------------------------

    def append(self, count: int, payload: bytes, ticket: int = 0) -> None:
        """Add the app's next ``count`` checked messages; they wait for the commit ``ticket``.

        In a replay, kept impulses take their places between them. Raises DivergenceError.
        """
        self.called = True
        while (room := self._kept_impulses.room(self.position, count)) < count:
            if room:
                offset = offset_after(payload, room, count)
                self._add(room, payload[:offset], ticket)
                payload, count = payload[offset:], count - room
            self._add_impulses_that_follow()
        self._add(count, payload, ticket)
        self._add_impulses_that_follow()

    def keep_impulses(self, impulses: Sequence[ImpulseBatch]) -> None:
        """Keep the new ones of these logged impulses, ordered by position, until the stream reaches their positions."""
        self._kept_impulses.keep(impulses, self.position)

    def room_before(self, position: int) -> int:
        """Return how many messages of the app, impulses not counted, fit before ``position``."""
        return max(0, position - self.position - self._kept_impulses.count_up_to(position))

    def append_impulses(self, count: int, payload: bytes, ticket: int) -> ImpulseBatch:
        """Add new impulses; they and all later messages wait for the commit ``ticket``."""
        if len(self._kept_impulses):  # the app sends something new before the calls that it held back
            raise self._kept_impulses.misplaced(self.position)
        batch = ImpulseBatch(self.position + 1, count, payload, self.destination)
        self._impulse_ticket = ticket
        self._add(count, payload, ticket, made_by_replay=False)
        return batch

    @property
    def end_of_replay(self) -> int:
        """Position of the stream if the replay ended here."""
        return self._kept_impulses.end_after(self.position)

    def finish_replay(self, *, all_sent: bool = True) -> None:
        """Complete the replay: impulses that followed the last replayed message go after it.

        ``all_sent``: the app has sent all outputs of its replay; a base app can send some later. Raises DivergenceError
        if the app has sent less than before.
        """
        self._add_impulses_that_follow()
        if all_sent and self._check is not None:
            self._check.finish()
            self._check = None
        self._sent_through = self.position if all_sent else None
        if all_sent and len(self._kept_impulses):
            raise self._kept_impulses.misplaced(self.position)
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
        """True if impulses wait for positions that the replay has not reached. Add those whose position is next."""
        self._add_impulses_that_follow()
        return len(self._kept_impulses) > 0

    def heal_cut(self) -> tuple[list[ImpulseBatch], list[int]]:
        """Continue after the receiver's last message in a cut log, whose lost part is never made again.

        Replaces :meth:`finish_replay`. Impulses that the receiver lacks get new positions. Returns the new rows of the
        table of impulses, and the first positions of the rows that they replace. Spilled messages after the position
        that the stream has before this call must be removed.
        """
        self._check = None
        self.spill.truncate_after(self.position)
        kept = self._kept_impulses.pop_all()
        rows = []
        if self.acknowledged > self.position:
            gap = self.acknowledged - self.position
            rows.append(ImpulseBatch(self.position + 1, gap, b"", self.destination))
            self.position = self._marked_position = self.acknowledged
        for impulses in kept:
            batch = OutputBatch(impulses.first_position, impulses.count, impulses.payload)
            rest = part_after(batch, self.acknowledged)
            if rest is not None:
                rows.append(self.append_impulses(rest.count, rest.payload, 0))
        self._sent_through = self.position
        return rows, [impulses.first_position for impulses in kept]

    def _add_impulses_that_follow(self) -> None:
        while (impulses := self._kept_impulses.pop_following(self.position)) is not None:
            self._add_kept(impulses)

    def _add_kept(self, impulses: ImpulseBatch) -> None:
        if impulses.payload:
            self._add(impulses.count, impulses.payload, 0, made_by_replay=False)
        else:  # acknowledged long ago, or left in the log: only its position matters
            self.position = impulses.last_position
            if impulses.left_size_bytes and impulses.last_position > self.acknowledged:
                first_position = max(impulses.first_position, self.acknowledged + 1)
                self.spill.add_stored(first_position, impulses.last_position, impulses.left_size_bytes)
            if self._check is not None:
                empty = OutputBatch(impulses.first_position, impulses.count, b"")
                self._check.add_made(empty, self.checksum, self.checksum)

    def _add(self, count: int, payload: bytes, ticket: int, *, made_by_replay: bool = True) -> None:
        batch = OutputBatch(self.position + 1, count, payload)
        self.position = batch.last_position
        before = self.checksum
        if made_by_replay:  # only these can be compared in a later replay
            self.checksum = crc64(payload, before)
        if self._check is not None:
            self._check.add_made(batch, before, self.checksum)
        self._enqueue(batch, ticket, logged=not made_by_replay)

    def _enqueue(self, batch: OutputBatch, ticket: int, *, logged: bool = False) -> None:
        rest = part_after(batch, self.acknowledged)
        if rest is None:
            return
        if self.spill.active or (self._may_spill and len(rest.payload) > self.buffer.room_bytes):
            self.spill.add(rest, ticket, logged=logged)
        else:
            self.buffer.enqueue(rest, ticket)

    # --- memory and the log --------------------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        """Unacknowledged bytes in memory."""
        return self.buffer.in_flight_bytes + self.buffer.unsent_bytes + self.spill.gathered_bytes

    @property
    def spilled_bytes(self) -> int:
        """Unacknowledged bytes that are only in the log."""
        return self.spill.stored_bytes

    @property
    def waiting_bytes(self) -> int:
        """Unacknowledged bytes, in flight or not."""
        return self.memory_bytes + self.spilled_bytes

    @property
    def memory_is_full(self) -> bool:
        """True if memory holds more than the limit. A single message can be larger than the limit."""
        return self.memory_bytes > self._limits.output_memory_bytes and (
            len(self.buffer) > 1 or self.spill.gathered_bytes > 0
        )

    def spilled_by_writer(self, extents: Sequence[SpilledExtent]) -> None:
        """Drop messages from memory that the writer of the followed log has spilled."""
        if self._may_spill and extents:
            self.spill.replace_known(extents)

    def next_read(self, durable_ticket: int) -> tuple[int, int, int] | None:
        """Move gathered messages back to the buffer if it has room; return (first position, last position, size) to
        read back."""
        buffer, spill = self.buffer, self.spill
        if self.state is not StreamState.OPEN:
            return None
        while (waiting := spill.pop_gathered(buffer.room_bytes, at_least_one=buffer.is_empty)) is not None:
            buffer.enqueue(*waiting)
        limits = self._limits
        # Not as much as there is room for: it would only occupy memory until the window opens.
        enough_bytes = min(limits.output_memory_bytes // 2, 2 * self.window_bytes)
        size_bytes = min(limits.read_size_bytes, limits.output_memory_bytes // 4)
        has_enough = buffer.unsent_bytes >= enough_bytes or buffer.room_bytes < size_bytes
        if has_enough and not buffer.is_empty:
            return None
        found = spill.next_read(durable_ticket)
        return None if found is None else (*found, size_bytes)

    def spilled_read(self, first_position: int, batches: Sequence[OutputBatch]) -> None:
        """Handle the result of :meth:`next_read`."""
        for batch in self.spill.accept_read(first_position, batches):
            self.buffer.enqueue(batch, 0)

    # --- barriers: messages that wait for other streams ---------------------------------------------------------------

    def wait_for(self, number: int) -> None:
        """Hold back later messages until the barrier ``number`` is passed."""
        if not self._gates or self._gates[-1][1] < number:
            self._gates.append((self.position, number))

    def last_sendable_position(self, passed: int) -> int | None:
        """Return the last position that can be sent; None: all can."""
        gates = self._gates
        while gates and gates[0][1] <= passed:
            gates.popleft()
        return gates[0][0] if gates else None

    # --- frames out ----------------------------------------------------------------------------------------------

    def next_batch(self, durable_ticket: int, last_position: int | None = None) -> OutputBatch | None:
        """Return the next batch to send now, if stream and window are open and enough has gathered; none that begins
        after ``last_position``."""
        if self.state is not StreamState.OPEN or self._opening_ticket > durable_ticket:
            return None
        batch = self.buffer.next_batch(durable_ticket, self.window_bytes, last_position)
        if batch is not None and self._sent_through is not None and batch.last_position > self._sent_through:
            self._sent_through = batch.last_position
        return batch

    def acknowledge(self, position: int) -> int:
        """Note that the receiver has everything up to ``position``; return how many bytes of the log this frees."""
        if position <= self.acknowledged:
            return 0
        self.acknowledged = position
        self.spill_credit_bytes += self.buffer.acknowledge(position) // 2
        self.moved_on = True
        return self.spill.acknowledge(position)

    def requeue_in_flight(self) -> None:
        """Return batches in flight to the buffer, for a new attempt: they will not arrive, or not in order."""
        self.attempt += 1
        self.buffer.requeue_in_flight()

    def reset(self) -> None:
        """Close the stream; ignore later answers to anything sent so far."""
        self.requeue_in_flight()
        self.buffer.acknowledge(self.acknowledged)  # removes the acknowledged part of a frame
        self.first_tag = self.attempt
        self.state = StreamState.CLOSED
        self.error = self.failure = ""

    def open(self, ticket: int = 0) -> None:
        """Open the stream: the receiver has said how much it has. Nothing is sent before the commit ``ticket`` is
        durable."""
        self.state = StreamState.OPEN
        self.error = self.failure = ""
        self._opening_ticket = ticket

    def fail(self, reason: str) -> None:
        self.requeue_in_flight()
        self.state = StreamState.FAILED
        self.error = reason

    @property
    def is_idle(self) -> bool:
        """True if the stream has nothing to do until the app or the receiver sends something."""
        return (
            self.state is StreamState.OPEN
            and self.buffer.is_empty
            and not (self.called or self.moved_on)
            and not self.spill.active
            and not self.spill.kept_bytes
        )

    @property
    def awaits_reply(self) -> bool:
        """True if something in this stream waits for the receiver's answer."""
        return (
            self.buffer.has_unsent
            or self.spill.active
            or self.spill.kept_bytes > 0
            or self.state is StreamState.GREETING
            or 2 * self.buffer.in_flight_bytes > self.window_bytes
        )

    @property
    def sent_through(self) -> int:
        """Last position of this log that the receiver can have. If it has more, its messages are from another log."""
        return self.position if self._sent_through is None else max(self._sent_through, self.acknowledged)

    # --- marks ---------------------------------------------------------------------------------------------------

    @property
    def mark(self) -> OutputMark:
        return OutputMark(self.position, self.checksum)

    @property
    def is_unmarked(self) -> bool:
        """True if the stream has moved since its last mark."""
        return self.position != self._marked_position

    def has_confirmed(self, mark: OutputMark) -> bool:
        """Return True if the log's marks prove that the replay equals the original up to ``mark``."""
        return self._check is not None and self._check.has_confirmed(mark)

    def pop_new_mark(self, ticket: int) -> OutputMark | None:
        """Return the mark if the stream has moved since the last call, for a record of the commit ``ticket``.

        Also None while it holds an impulse that becomes durable only later: a crash in between would lose it.
        """
        if self.position == self._marked_position or self._impulse_ticket > ticket:
            return None
        self._marked_position = self.position
        return self.mark

    @property
    def unacknowledged(self) -> list[OutputBatch]:
        """Unacknowledged batches in memory. Gaps between or after them are in the log, or being written to it."""
        return [*self.buffer.batches, *self.spill.gathered]
