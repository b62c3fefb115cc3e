"""Which message IDs of one link have been seen: the highest, and those below it that have not.

IDs grow by one and nearly all arrive, so the unseen ones below the highest are few: the complement is what
is stored. Every message also says the lowest ID that its sender may still send: what is below counts as
seen. So a tracker that starts in the middle of a link (the receiver is new, the link is not) starts right
there, and it holds less than ``span_max`` IDs.
"""

from __future__ import annotations

from enum import IntEnum

from coordinator.messenger.limits import SPAN_MAX


class Sighting(IntEnum):
    FIRST = 0
    DUPLICATE = 1
    REFUSED = 2  # further from the sender's lowest pending ID than a sender may go


class DuplicateTracker:
    """Tells the first sighting of a message ID from later ones. No I/O.

    ``highest_seen`` is the highest ID seen (0: none), ``missing`` the unseen ones below it that may still come,
    ``lowest_pending_id`` the lowest ID that may still come or come again.
    """

    __slots__ = ("highest_seen", "lowest_pending_id", "missing", "span_max")

    def __init__(self, span_max: int = SPAN_MAX) -> None:
        self.span_max = span_max
        self.highest_seen = 0
        self.lowest_pending_id = 1
        self.missing: set[int] = set()

    def see(self, message_id: int, lowest_pending_id: int = 1) -> Sighting:
        """Note ``message_id`` (from 1), whose sender will send nothing below ``lowest_pending_id`` again."""
        if lowest_pending_id > self.lowest_pending_id:
            self._forget_below(lowest_pending_id)
        highest = self.highest_seen
        if message_id > highest:
            if message_id - self.lowest_pending_id >= self.span_max:
                return Sighting.REFUSED
            if message_id > highest + 1:
                self.missing.update(range(highest + 1, message_id))
            self.highest_seen = message_id
            return Sighting.FIRST
        if message_id in self.missing:
            self.missing.remove(message_id)
            return Sighting.FIRST
        return Sighting.DUPLICATE

    def _forget_below(self, lowest_pending_id: int) -> None:
        self.lowest_pending_id = lowest_pending_id
        if self.missing:
            self.missing = {unseen for unseen in self.missing if unseen >= lowest_pending_id}
        if self.highest_seen < lowest_pending_id - 1:
            self.highest_seen = lowest_pending_id - 1
