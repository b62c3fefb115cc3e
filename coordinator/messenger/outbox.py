"""Sender's side of a link: pending messages, retransmission, conversations.

A reply can have the ID of a callback, which the next message to that receiver can address, once. So two sides can
hold a conversation of any number of turns.

- IDs start at 1 and grow by one. A message is pending until it is acknowledged.
- Messages are sent in ID order. Those in flight lie within ``in_flight_max`` IDs of the lowest pending one.
- On a new connection, everything that was in flight on the one before is sent again first, in ID order.
- On a living connection, a message is sent again after a delay that follows the measured round-trip time (RFC 6298).
  It doubles each time, until something is received. If the receiver answers that the reply will follow, the message's
  own delay doubles.
- The receiver reports missing messages when a later one arrives; they are sent again after one round trip.
- A message that has arrived but has no reply is sent again too: its reply is late, or lost. Each reply has the ID up to
  which all messages have arrived. Of the messages after that ID, only the first is sent again.
- The receiver answers each retransmission at once. Until it has answered the last one, only the first message is
  sent again: so the data that waits unread for a stuck receiver is limited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple

from msgspec import Struct, field

from immortal.coordinator.messenger import limits


class Outcome(Enum):
    """Outcome of a message of a conversation."""

    REPLIED = 1
    REPLY_EXPIRED = 2  # its receiver replied, and keeps the reply no longer
    CALLBACK_UNKNOWN = 3  # its receiver does not know the addressed callback (any more)


class Answer(NamedTuple):
    """Reply to a message of a conversation, for the message's callback. It has no parts unless REPLIED.

    ``callback_id``: the receiver's callback for one more message, 0 (NOOP) if the conversation is over.
    """

    parts: list[bytes]
    callback_id: int
    outcome: Outcome


AnswerCallback = Callable[[Answer], None]


class ConversationMessage(NamedTuple):
    """Extra fields of a message that belongs to a conversation."""

    destination_callback_id: int  # NOOP: none
    callback: AnswerCallback | None


ReplyCallback = Callable[[list[bytes]], None]
CHECKS_PER_DELAY = 2  # retry checks per shortest delay, at most


class RetryPolicy(Struct, frozen=True):
    """Policy for the delay before a retransmission, in ns: it doubles up to ``delay_ns_max``, less up to ``jitter``.

    The first delay follows the measured round-trip time, and is at most ``delay_ns_min``.
    """

    delay_ns_min: int = 1_000_000_000
    delay_ns_max: int = 30_000_000_000
    jitter: float = 0.25  # largest share of the delay that is left out, so that peers do not all retry at once

    def delay_ns(self, first_ns: int, doublings: int, random_unit: float) -> int:
        """Return the delay after ``doublings`` retransmissions in vain; ``random_unit`` is from [0, 1)."""
        delay_ns = self.delay_ns_max
        if doublings < 64:
            delay_ns = min(min(first_ns, self.delay_ns_min) << doublings, self.delay_ns_max)
        return int(delay_ns * (1.0 - self.jitter * random_unit))


class RoundTrip(Struct, eq=False):
    """Round-trip time as RFC 6298 measures it, in ns: smoothed, with its mean deviation. No clock.

    A message counts as lost after ``timeout_ns``, or after ``gap_timeout_ns`` if one sent later has arrived.
    """

    smoothed_ns: int = 0  # 0: nothing was measured
    deviation_ns: int = 0
    timeout_ns: int = limits.RETRANSMIT_NS_FIRST
    gap_timeout_ns: int = limits.RETRANSMIT_NS_FIRST

    def measure(self, sample_ns: int) -> None:
        """Add a sample: the time from the sending of a message to its answer."""
        if self.smoothed_ns:
            self.deviation_ns += (abs(sample_ns - self.smoothed_ns) - self.deviation_ns) // 4
            self.smoothed_ns += (sample_ns - self.smoothed_ns) // 8
        else:
            self.smoothed_ns, self.deviation_ns = sample_ns, sample_ns // 2
        self.timeout_ns = self.smoothed_ns + max(limits.RETRANSMIT_NS_MIN, 4 * self.deviation_ns)
        self.gap_timeout_ns = self.smoothed_ns + max(limits.RETRANSMIT_GAP_NS_MIN, 4 * self.deviation_ns)


class PendingMessage(Struct, eq=False):
    """State of a message from send_message() to its acknowledgement."""

    message_id: int
    parts: tuple[bytes, ...]
    callback: ReplyCallback | None
    callback_id: int
    conversation: ConversationMessage | None
    size_bytes: int
    pending: bool = True  # not acknowledged
    queued: bool = True  # waits to be sent, or sent again
    in_flight: bool = False  # sent on the current connection
    sent_before: bool = False  # on this connection or an earlier one
    sent_again: bool = False  # then its reply gives no round-trip time (Karn), unless wait_ns is set
    first_sent_ns: int = 0
    sent_ns: int = 0  # when it was last sent
    wait_ns: int = 0  # the receiver announced a late reply: it is not sent again earlier than this after sent_ns
    skipped_count: int = 0  # IDs right below, acknowledged when it was first sent on that connection


class Outbox(Struct, eq=False):
    """Outbox of one link: keeps its pending messages, decides which to send now and which to send again. No I/O."""

    retry: RetryPolicy
    random: Callable[[], float]
    in_flight_max: int = limits.IN_FLIGHT_MAX
    in_flight_size_bytes_max: int = limits.IN_FLIGHT_SIZE_BYTES_MAX
    lowest_pending_id: int = 1  # equal to the next ID when nothing is pending
    retry_check_ns: int | None = None  # no retry is due before
    _in_flight_size_bytes: int = 0
    _pending: dict[int, PendingMessage] = field(default_factory=dict)
    _queue: deque[PendingMessage] = field(default_factory=deque)
    _next_id: int = 1
    _last_sent_id: int = 0  # highest ID that was sent on this connection
    _arrived_id: int = 0  # all messages up to it have arrived, as the receiver has reported on this connection
    _gap_id: int = 0  # highest ID that was reported as missing, or sent again: later messages may wait for it
    _missing: set[int] = field(default_factory=set)  # reported by the receiver last, and not sent again since
    _round_trip: RoundTrip = field(default_factory=RoundTrip)
    _last_resent_ns: int = -1
    _measured_next_ns: int = 0  # one message in each round trip is measured
    _doublings: int = 0  # how often the delay was doubled since something was received
    _random_unit: float = 0.0  # jitter of doubled delays
    _retransmitted_id: int = 0  # last ID that was sent again on this connection; 0 once it is answered
    _retransmitted_ns: int | None = None  # when a message was sent again, with nothing received since
    _silences: int = 0  # connections in a row that were given up with nothing received

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def size_bytes(self) -> int:
        """Sum of the parts of all pending messages, in bytes."""
        return sum(message.size_bytes for message in self._pending.values())

    @property
    def has_conversations(self) -> bool:
        """True if messages of conversations are pending."""
        return any(message.conversation is not None for message in self._pending.values())

    def add(
        self,
        parts: tuple[bytes, ...],
        callback: ReplyCallback | None,
        callback_id: int,
        conversation: ConversationMessage | None = None,
    ) -> PendingMessage:
        """Add a message and give it the next ID."""
        message = PendingMessage(self._next_id, parts, callback, callback_id, conversation, sum(map(len, parts)))
        self._next_id += 1
        self._pending[message.message_id] = message
        self._queue.append(message)
        return message

    @property
    def queued_count(self) -> int:
        """Number of messages that wait to be sent, for the first time or again, or were acknowledged meanwhile."""
        return len(self._queue)

    @property
    def all_sent(self) -> bool:
        """True if no message waits to be sent, for the first time or again."""
        return not any(message.pending for message in self._queue)

    def next_to_send(self) -> PendingMessage | None:
        """Return the next message to send; None if there is none, or the limits on messages in flight are reached."""
        queue = self._queue
        while queue and not queue[0].pending:
            queue.popleft()
        if not queue:
            return None
        message = queue[0]
        if message.message_id - self.lowest_pending_id >= self.in_flight_max:
            return None
        in_flight_size_bytes = self._in_flight_size_bytes
        if (
            in_flight_size_bytes
            and not message.in_flight
            and in_flight_size_bytes + message.size_bytes > self.in_flight_size_bytes_max
        ):
            return None
        return message

    def mark_sent(self, message: PendingMessage, now_ns: int) -> None:
        """Mark ``message``, which next_to_send() returned, as sent on the connection at ``now_ns``."""
        self._queue.popleft()
        message.queued = False
        message.sent_ns = now_ns
        if message.sent_before:
            message.sent_again = True
            self._last_resent_ns = now_ns
        else:
            message.sent_before = True
            message.first_sent_ns = now_ns
        if not message.in_flight:
            message.in_flight = True
            self._in_flight_size_bytes += message.size_bytes
            self._last_sent_id = message.message_id
        else:
            self._missing.discard(message.message_id)
            self._retransmitted_id = message.message_id
            if self._retransmitted_ns is None:
                self._retransmitted_ns = now_ns
        check_ns = self.retry_check_ns
        if check_ns is None or check_ns > now_ns + min(self._round_trip.timeout_ns, self.retry.delay_ns_min):
            self._check_at(now_ns + max(self._delay_ns(), message.wait_ns))

    def _delay_ns(self) -> int:
        expected_ns = self._round_trip.timeout_ns + self._in_flight_size_bytes * limits.RETRANSMIT_NS_PER_BYTE
        return self.retry.delay_ns(expected_ns, self._doublings, self._random_unit)

    def _check_at(self, due_ns: int) -> None:
        if self.retry_check_ns is None or due_ns < self.retry_check_ns:
            self.retry_check_ns = due_ns

    def acknowledge(self, message_id: int) -> PendingMessage | None:
        """Remove the acknowledged message and return it; None if it is not pending."""
        message = self._pending.pop(message_id, None)
        if message is None:
            return None
        message.pending = False
        if message.in_flight:
            self._in_flight_size_bytes -= message.size_bytes
        if message_id == self.lowest_pending_id:
            lowest, pending, next_id = message_id + 1, self._pending, self._next_id
            while lowest < next_id and lowest not in pending:
                lowest += 1
            self.lowest_pending_id = lowest
        return message

    def skipped_count(self, message: PendingMessage) -> int:
        """Return the number of IDs right below that of ``message``, the next to be sent, that are not sent again."""
        if not message.in_flight:  # all that was pending below it has been sent on this connection
            first_id = self._last_sent_id + 1
            if first_id < self.lowest_pending_id:
                first_id = self.lowest_pending_id
            message.skipped_count = message.message_id - first_id
        return message.skipped_count

    def record_reply(self, message_id: int, arrived_id: int, now_ns: int, *, awaited: bool = False) -> None:
        """Record that the receiver has answered ``message_id`` and has all IDs up to ``arrived_id``, unless
        :meth:`record_missing` says less. ``awaited``: the reply itself will follow."""
        self._retransmitted_ns = None
        self._silences = 0
        if message_id == self._retransmitted_id:
            self._retransmitted_id = 0
        if arrived_id > self._arrived_id:
            if self._arrived_id < self._gap_id:
                self._restart(arrived_id, now_ns)
            self._arrived_id = arrived_id
        if self._doublings:
            self._doublings, self._random_unit = 0, 0.0
            self._check_at(now_ns)
        if not awaited and now_ns < self._measured_next_ns:
            return
        message = self._pending.get(message_id)
        if message is None or not message.in_flight:
            return
        if message.sent_again:
            is_measurable = message.wait_ns > 0 and not awaited
        else:  # the reply may have waited for a message that was sent again meanwhile
            is_measurable = awaited or message.first_sent_ns > self._last_resent_ns
        if is_measurable:
            self._round_trip.measure(min(now_ns - message.first_sent_ns, self.retry.delay_ns_min))
            self._measured_next_ns = now_ns + self._round_trip.smoothed_ns
        if awaited:
            message.wait_ns = min(2 * max(message.wait_ns, self._delay_ns()), self.retry.delay_ns_max)

    def _restart(self, last_id: int, now_ns: int) -> None:
        """Restart the delays of messages up to ``last_id``: they may have waited at the receiver for an earlier one."""
        first_id = max(self._arrived_id + 1, self.lowest_pending_id)
        for message_id in range(first_id, min(last_id + 1, self._in_flight_end_id)):
            message = self._pending.get(message_id)
            if message is not None and message.in_flight and message_id not in self._missing:
                message.sent_ns, message.wait_ns = now_ns, 0

    @property
    def _in_flight_end_id(self) -> int:
        return min(self.lowest_pending_id + self.in_flight_max, self._next_id)

    def record_missing(self, missing_ids: Iterable[int]) -> None:
        """Record the IDs that have not arrived, while later ones have. They are due one round trip after sending."""
        self._missing.clear()
        self._gap_id = 0
        gap_timeout_ns = self._round_trip.gap_timeout_ns
        for message_id in missing_ids:
            message = self._pending.get(message_id)
            if message is None or not message.in_flight or message.queued:
                continue
            if not self._missing:
                self._arrived_id = message_id - 1
            self._gap_id = message_id
            self._missing.add(message_id)
            self._check_at(message.sent_ns + gap_timeout_ns)

    @property
    def silence_ns(self) -> int:
        """Longest silence after a retransmission before this connection is given up, in ns."""
        return limits.SILENCE_NS << min(self._silences, limits.SILENCE_DOUBLINGS_MAX)

    @property
    def silence_deadline_ns(self) -> int | None:
        """Time when the connection is given up unless something is received; None if nothing was sent again."""
        return None if self._retransmitted_ns is None else self._retransmitted_ns + self.silence_ns

    def connection_lost(self) -> None:
        """Record that the connection was given up for silence: on the next one a longer silence is allowed."""
        self._retransmitted_ns = None
        self._silences += 1

    def pending(self, message_id: int) -> PendingMessage | None:
        return self._pending.get(message_id)

    def retransmit_all(self) -> None:
        """Queue all pending messages again: there is a new connection, and messages sent on the last one may be
        lost."""
        self._queue = deque(self._pending.values())  # adding is in ID order, and so is a dict
        for message in self._queue:
            message.queued = True
            message.in_flight = False
            message.wait_ns = 0
        self._in_flight_size_bytes = 0
        self.retry_check_ns = None
        self._last_sent_id = self._arrived_id = self._gap_id = self._retransmitted_id = 0
        self._retransmitted_ns = None
        self._missing.clear()
        self._doublings, self._random_unit = 0, 0.0

    def retransmit_due(self, now_ns: int) -> bool:
        """Queue the messages due for retransmission at ``now_ns``, before all others, in ID order; return True if there
        were any."""
        if self.retry_check_ns is None or now_ns < self.retry_check_ns:
            return False
        due: list[PendingMessage] = []
        delay_ns, timed_out, is_first = self._delay_ns(), False, True
        missing_ns = min(self._round_trip.gap_timeout_ns, delay_ns)
        next_check_ns: int | None = None
        for message_id in range(self.lowest_pending_id, self._in_flight_end_id):
            message = self._pending.get(message_id)
            if message is None or not message.in_flight or message.queued:
                continue
            missing = message_id in self._missing
            due_ns = message.sent_ns + (missing_ns if missing else max(delay_ns, message.wait_ns))
            if due_ns <= now_ns:
                if missing or is_first or (not self._retransmitted_id and message_id <= self._arrived_id):
                    message.queued, is_first = True, False
                    due.append(message)
                    if not missing:
                        timed_out, self._gap_id = True, max(self._gap_id, message_id)
                    continue
                due_ns = now_ns + delay_ns
            elif not message.wait_ns:
                is_first = False  # an earlier message is in flight: to send a later one again would tell less
            if next_check_ns is None or due_ns < next_check_ns:
                next_check_ns = due_ns
        self._queue.extendleft(reversed(due))
        if timed_out:
            self._doublings += 1
            self._random_unit = self.random()
        if next_check_ns is not None:  # each check costs a pass over all that is in flight: not one per message
            shortest_ns = missing_ns if self._missing else delay_ns
            next_check_ns = max(next_check_ns, now_ns + shortest_ns // CHECKS_PER_DELAY)
        self.retry_check_ns = next_check_ns
        return bool(due)
