"""Sender's side of a link: pending messages, retransmission, conversations.

A reply may carry the ID of a callback, which the next message to that receiver can address, once. So two sides can
hold a conversation of any number of turns.

- IDs start at 1 and grow by one. A message is pending until it is acknowledged.
- Messages are sent in ID order. Those in flight lie within ``in_flight_max`` IDs of the lowest pending one.
- On a new connection, everything that was in flight on the one before is sent again first, in ID order.
- On a living connection, an unacknowledged message that has arrived is sent again after a growing delay: its reply is
  late, or lost. The receiver says with each reply how much has arrived. Of the messages sent after that, which are
  still on their way, only the first is sent again.
- The receiver answers each retransmission at once. Until it has answered the last one, only the first due message is
  sent again: so what waits unread for a stuck receiver is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from msgspec import Struct, field

from immortal.coordinator.messenger.limits import (
    IN_FLIGHT_MAX,
    IN_FLIGHT_SIZE_BYTES_MAX,
    SILENCE_DOUBLINGS_MAX,
    SILENCE_NS,
)


class Outcome(Enum):
    """Outcome of a message of a conversation."""

    REPLIED = 1
    REPLY_EXPIRED = 2  # its receiver replied, and keeps the reply no longer
    CALLBACK_UNKNOWN = 3  # its receiver does not know the addressed callback (any more)


class Answer(NamedTuple):
    """Reply to a message of a conversation, as its callback gets it; no parts unless REPLIED.

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
    """Delays before a message is sent again: doubling from ``delay_ns_min`` up to ``delay_ns_max``, less up to
    ``jitter``."""

    delay_ns_min: int = 1_000_000_000
    delay_ns_max: int = 30_000_000_000
    jitter: float = 0.25  # the largest part of the delay that is left out, so that peers do not retry in step

    def delay_ns(self, attempts: int, random_unit: float) -> int:
        """Return the delay after a message was sent ``attempts`` times (from 1); ``random_unit`` is from [0, 1)."""
        doublings = attempts - 1
        delay_ns = self.delay_ns_max
        if doublings < 64:
            delay_ns = min(self.delay_ns_min << doublings, self.delay_ns_max)
        return int(delay_ns * (1.0 - self.jitter * random_unit))


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
    in_flight: bool = False  # sent on the connection that there is
    sent_before: bool = False  # on this connection or one before
    attempts: int = 0  # times sent on that connection
    due_ns: int = 0  # when it is tried again, while in flight
    skipped_count: int = 0  # IDs right below, acknowledged when it was first sent on that connection


class Outbox(Struct, eq=False):
    """Pending messages of one link: what may be sent now, and what is to be sent again. No I/O."""

    retry: RetryPolicy
    random: Callable[[], float]
    in_flight_max: int = IN_FLIGHT_MAX
    in_flight_size_bytes_max: int = IN_FLIGHT_SIZE_BYTES_MAX
    lowest_pending_id: int = 1  # equal to the next ID when nothing is pending
    retry_check_ns: int | None = None  # no retry is due before
    _in_flight_size_bytes: int = 0
    _pending: dict[int, PendingMessage] = field(default_factory=dict)
    _queue: deque[PendingMessage] = field(default_factory=deque)
    _next_id: int = 1
    _last_sent_id: int = 0  # for the first time on this connection
    _arrived_id: int = 0  # the highest that the receiver has reported on this connection
    _retransmitted_id: int = 0  # the last that was sent again on this connection, if it was not answered since
    _retransmitted_ns: int | None = None  # when a message was sent again, with nothing heard since
    _silences: int = 0  # connections in a row that were given up with nothing heard

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
        """Take a message over and give it the next ID."""
        message = PendingMessage(self._next_id, parts, callback, callback_id, conversation, sum(map(len, parts)))
        self._next_id += 1
        self._pending[message.message_id] = message
        self._queue.append(message)
        return message

    @property
    def all_sent(self) -> bool:
        """True if nothing waits to be sent, first or again."""
        return not any(message.pending for message in self._queue)

    def next_to_send(self) -> PendingMessage | None:
        """Return the message to be sent now; None if there is none, or the limits on what is in flight are reached."""
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
        """Note that ``message``, the one that next_to_send() gave, went out on the connection at ``now_ns``."""
        self._queue.popleft()
        message.queued = False
        message.sent_before = True
        message.attempts += 1
        if not message.in_flight:
            message.in_flight = True
            self._in_flight_size_bytes += message.size_bytes
            self._last_sent_id = message.message_id
        else:
            self._retransmitted_id = message.message_id
            if self._retransmitted_ns is None:
                self._retransmitted_ns = now_ns
        message.due_ns = now_ns + self.retry.delay_ns(message.attempts, self.random())
        if self.retry_check_ns is None or message.due_ns < self.retry_check_ns:
            self.retry_check_ns = message.due_ns

    def acknowledge(self, message_id: int) -> PendingMessage | None:
        """Forget the message and return it; None if no such one is pending."""
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
        """Return how many IDs right below that of ``message``, which is about to be sent, will not be sent again."""
        if not message.in_flight:  # all that was pending below it has been sent on this connection
            first_id = self._last_sent_id + 1
            if first_id < self.lowest_pending_id:
                first_id = self.lowest_pending_id
            message.skipped_count = message.message_id - first_id
        return message.skipped_count

    def record_reply(self, message_id: int, arrived_id: int) -> None:
        """Note that the receiver has answered ``message_id`` in some way and received IDs up to ``arrived_id``."""
        self._retransmitted_ns = None
        self._silences = 0
        if message_id == self._retransmitted_id:
            self._retransmitted_id = 0
        if arrived_id > self._arrived_id:
            self._arrived_id = arrived_id

    @property
    def silence_ns(self) -> int:
        """Longest silence after a retransmission before this connection is given up, in ns."""
        return SILENCE_NS << min(self._silences, SILENCE_DOUBLINGS_MAX)

    @property
    def silence_deadline_ns(self) -> int | None:
        """Time when the connection is given up unless something is received; None if nothing was sent again."""
        return None if self._retransmitted_ns is None else self._retransmitted_ns + self.silence_ns

    def connection_lost(self) -> None:
        """Note that the connection was given up for silence: the next one may be silent for longer."""
        self._retransmitted_ns = None
        self._silences += 1

    def pending(self, message_id: int) -> PendingMessage | None:
        return self._pending.get(message_id)

    def retransmit_all(self) -> None:
        """Queue all pending messages again: a new connection was made, and what was sent on the one before may be
        lost."""
        self._queue = deque(self._pending.values())  # adding is in ID order, and so is a dict
        for message in self._queue:
            message.queued = True
            message.in_flight = False
            message.attempts = 0
        self._in_flight_size_bytes = 0
        self.retry_check_ns = None
        self._last_sent_id = self._arrived_id = self._retransmitted_id = 0
        self._retransmitted_ns = None

    def retransmit_due(self, now_ns: int) -> bool:
        """Queue what is due at ``now_ns`` and may be sent again, before everything else, in ID order; return True if
        there was any."""
        if self.retry_check_ns is None or now_ns < self.retry_check_ns:
            return False
        due: list[PendingMessage] = []
        next_check_ns: int | None = None
        last_in_flight_id = self.lowest_pending_id + self.in_flight_max
        for message_id in range(self.lowest_pending_id, min(last_in_flight_id, self._next_id)):
            message = self._pending.get(message_id)
            if message is None or not message.in_flight or message.queued:
                continue
            if message.due_ns <= now_ns:
                if not due or (not self._retransmitted_id and message_id <= self._arrived_id):
                    message.queued = True
                    due.append(message)
                    continue
                message.due_ns = now_ns + self.retry.delay_ns(message.attempts, self.random())
            if next_check_ns is None or message.due_ns < next_check_ns:
                next_check_ns = message.due_ns
        self._queue.extendleft(reversed(due))
        if next_check_ns is not None:  # each check costs a pass over all that is in flight: not one per message
            next_check_ns = max(next_check_ns, now_ns + self.retry.delay_ns_min // CHECKS_PER_DELAY)
        self.retry_check_ns = next_check_ns
        return bool(due)
