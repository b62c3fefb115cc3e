"""Which message IDs of one link have been seen: all up to the highest, and none above it.

IDs grow by one, and a message is taken only once all those sent before it have been: what comes too early, as it can
where a connection breaks, is left to be sent again. So the unseen IDs below the highest, which a set would otherwise
hold, do not exist, and a tracker is two numbers however many messages there are.

Every message also says the lowest ID that its sender may still send, and how many IDs right below its own it will
never send again: they were acknowledged, perhaps by a receiver that is no more. What is neither sent nor missing any
more counts as seen. So a tracker that starts in the middle of a link (the receiver is new, the link is not) starts
right there.
"""

from __future__ import annotations

from enum import IntEnum

from coordinator.messenger.limits import SPAN_MAX


class Sighting(IntEnum):
    FIRST = 0
    DUPLICATE = 1
    REFUSED = 2  # further from the sender's lowest pending ID than a sender may go
    EARLY = 3  # one that was sent before it has not been seen


class DuplicateTracker:
    """Tells the first sighting of a message ID, in order, from others. No I/O.

    ``highest_seen`` is the highest ID seen (0: none), ``lowest_pending_id`` the lowest ID that may still come or come
    again.
    """

    __slots__ = ("highest_seen", "lowest_pending_id", "span_max")

    def __init__(self, span_max: int = SPAN_MAX) -> None:
        self.span_max = span_max
        self.highest_seen = 0
        self.lowest_pending_id = 1

    def see(self, message_id: int, lowest_pending_id: int = 1, skipped_count: int = 0) -> Sighting:
        """Note ``message_id`` (from 1), whose sender will send nothing below ``lowest_pending_id`` again, and none of
        the ``skipped_count`` IDs right below ``message_id``."""
        if lowest_pending_id > self.lowest_pending_id:
            self.lowest_pending_id = lowest_pending_id
            if self.highest_seen < lowest_pending_id - 1:
                self.highest_seen = lowest_pending_id - 1
        highest = self.highest_seen
        if message_id <= highest:
            return Sighting.DUPLICATE
        if message_id - self.lowest_pending_id >= self.span_max:
            return Sighting.REFUSED
        if message_id - skipped_count > highest + 1:
            return Sighting.EARLY
        self.highest_seen = message_id
        return Sighting.FIRST
