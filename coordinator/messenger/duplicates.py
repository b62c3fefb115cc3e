"""Which message IDs of one link have been seen, in two numbers, however many messages there are.

IDs grow by one. :class:`DuplicateTracker` takes a message once, wherever it comes in the order. Beside the highest ID
seen it keeps the complement: those below it that have not been seen, few as most messages arrive. They are the bits
of one integer, so that a message costs the same whatever its sender has left out.

:class:`OrderedTracker` takes a message only once all those sent before it have been: what comes too early, as it can
where a connection breaks, is left to be sent again. So there is no complement, and the highest ID is all it keeps.

Every message also says the lowest ID that its sender may still send, and how many IDs right below its own it will
never send again: they were acknowledged, perhaps by a receiver that is no more. What is neither sent nor missing any
more counts as seen. So a tracker that starts in the middle of a link (the receiver is new, the link is not) starts
right there.
"""

from __future__ import annotations

from enum import IntEnum

from msgspec import Struct

from immortal.coordinator.messenger.limits import SPAN_MAX


class Sighting(IntEnum):
    FIRST = 0
    DUPLICATE = 1
    REFUSED = 2  # further from the sender's lowest pending ID than a sender may go
    EARLY = 3  # one that was sent before it has not been seen


FIRST, DUPLICATE, REFUSED, EARLY = Sighting


class OrderedTracker(Struct, eq=False):
    """Tells the first sighting of a message ID, in order, from others. No I/O.

    ``highest_seen`` is the highest ID seen (0: none), ``lowest_pending_id`` the lowest ID that may still come or come
    again.
    """

    span_max: int = SPAN_MAX
    highest_seen: int = 0
    lowest_pending_id: int = 1

    def see(self, message_id: int, lowest_pending_id: int = 1, skipped_count: int = 0) -> Sighting:
        """Note ``message_id`` (from 1), whose sender will send nothing below ``lowest_pending_id`` again, and none of
        the ``skipped_count`` IDs right below ``message_id``."""
        if lowest_pending_id > self.lowest_pending_id:
            self.lowest_pending_id = lowest_pending_id
            if self.highest_seen < lowest_pending_id - 1:
                self.highest_seen = lowest_pending_id - 1
        highest = self.highest_seen
        if message_id <= highest:
            return DUPLICATE
        if message_id - self.lowest_pending_id >= self.span_max:
            return REFUSED
        if message_id - skipped_count > highest + 1:
            return EARLY
        self.highest_seen = message_id
        return FIRST


class DuplicateTracker(Struct, eq=False):
    """Tells the first sighting of a message ID from others, in any order. Fields as above. No I/O.

    The complement has ``span_max`` bits at most: no ID further from the lowest pending one is taken.
    """

    span_max: int = SPAN_MAX
    highest_seen: int = 0
    lowest_pending_id: int = 1
    _unseen: int = 0  # bit n: lowest_pending_id + n, which is below highest_seen, has not been seen

    @property
    def unseen_count(self) -> int:
        """How many IDs below the highest may still come for the first time."""
        return self._unseen.bit_count()

    def see(self, message_id: int, lowest_pending_id: int = 1, skipped_count: int = 0) -> Sighting:
        """As above, but never EARLY."""
        if lowest_pending_id > self.lowest_pending_id:
            if self._unseen:
                self._unseen >>= min(lowest_pending_id - self.lowest_pending_id, self.span_max)
            self.lowest_pending_id = lowest_pending_id
            if self.highest_seen < lowest_pending_id - 1:
                self.highest_seen = lowest_pending_id - 1
        highest = self.highest_seen
        distance = message_id - self.lowest_pending_id
        if message_id <= highest:
            if distance < 0 or not self._unseen >> distance & 1:
                return DUPLICATE
            self._unseen ^= 1 << distance
            return FIRST
        if distance >= self.span_max:
            return REFUSED
        left_out_count = message_id - skipped_count - (highest + 1)
        if left_out_count > 0:
            self._unseen |= ((1 << left_out_count) - 1) << (highest + 1 - self.lowest_pending_id)
        self.highest_seen = message_id
        return FIRST
