"""Receiver's side of a link: duplicate detection, stored replies, callbacks.

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

from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum

from msgspec import Struct, field

from immortal.coordinator.messenger.envelope import NOOP, REPLY, REPLY_EXPIRED
from immortal.coordinator.messenger.limits import (
    CALLBACK_OVERHEAD_BYTES,
    CALLBACKS_MAX,
    CONVERSATIONS_MAX,
    PEER_CONVERSATIONS_MAX,
    PEER_REPLIES_SIZE_BYTES_MAX,
    REPLIES_SIZE_BYTES_MAX,
    REPLY_OVERHEAD_BYTES,
    ROUTES_MAX,
    SPAN_MAX,
)


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


# The receiver's side of every link, without I/O: what was seen, where replies go, and the replies themselves.
#
# A reply is kept until its sender says that it has it (the lowest pending ID passes it), so a lost one is
# sent again for the duplicate of its message. The sender's span bounds their number. Their bytes are bounded
# too: beyond the limit the oldest is let go, and the duplicate of its message is answered with "acknowledged,
# but the reply is no longer kept", so that no sender waits forever.
#
# A callback that was given with a reply is kept until its message has come. It belongs to the link that it was given
# to: nobody else can address it. Beyond a number of them the oldest is let go.


MessageCallback = Callable[..., None]
"""A server loop (listener.py), given with a reply: for the message that addresses it."""


class CachedReply(Struct, frozen=True):
    """A reply that may be asked for again; of ``kind`` REPLY_EXPIRED, without parts, once it was let go."""

    kind: int
    destination_callback_id: int
    source_callback_id: int
    parts: tuple[bytes, ...]
    size_bytes: int


class Kept(Struct, eq=False):
    """What the replies of one peer's links take together, and the callbacks given with them."""

    size_bytes: int = 0


class Conversation(Struct, eq=False):
    """One link as its receiver sees it. ``routes`` are the ZeroMQ routing IDs of its sender's latest connections, the
    newest first, ``peer`` the name that its key stands for."""

    incarnation: int
    link_id: int
    tracker: OrderedTracker | DuplicateTracker
    peer: str | None = None
    replies_size_bytes_max: int = REPLIES_SIZE_BYTES_MAX
    routes: list[bytes] = field(default_factory=lambda: [b""])
    replies: dict[int, CachedReply] = field(default_factory=dict)  # by message ID, oldest reply first
    callbacks: dict[int, MessageCallback] = field(default_factory=dict)  # given with replies, by ID, the oldest first
    replies_size_bytes: int = 0  # with the callbacks
    kept: Kept = field(default_factory=Kept)
    _whole: OrderedDict[int, None] = field(default_factory=OrderedDict)  # replies that were not let go

    def came_by(self, route: bytes) -> None:
        """Note where a message came from. Where a connection breaks, what it has still brought is read in turns with
        what the next one brings: so one that is known is not taken for a newer one."""
        if route not in self.routes:
            self.routes.insert(0, route)
            del self.routes[ROUTES_MAX:]

    def see(self, message_id: int, lowest_pending_id: int, skipped_count: int = 0) -> Sighting:
        """Note a message that came in, and let go of the replies that its sender has."""
        had = self.tracker.lowest_pending_id
        sighting = self.tracker.see(message_id, lowest_pending_id, skipped_count)
        if lowest_pending_id > had and self.replies:
            if lowest_pending_id - had <= len(self.replies):
                acknowledged = [known for known in range(had, lowest_pending_id) if known in self.replies]
            else:
                acknowledged = [known for known in self.replies if known < lowest_pending_id]
            self._count(-sum([self.replies.pop(known).size_bytes for known in acknowledged]))
            for known in acknowledged:
                self._whole.pop(known, None)
        return sighting

    def keep_reply(
        self,
        message_id: int,
        destination_callback_id: int,
        parts: tuple[bytes, ...],
        source_callback_id: int = NOOP,
        kind: int = REPLY,
    ) -> None:
        """Keep the reply to ``message_id`` for as long as its sender may ask for it again."""
        if message_id < self.tracker.lowest_pending_id:
            return
        size_bytes = sum(map(len, parts)) + REPLY_OVERHEAD_BYTES
        self.replies[message_id] = CachedReply(kind, destination_callback_id, source_callback_id, parts, size_bytes)
        self._count(size_bytes)
        if kind != REPLY:
            return  # there is nothing of it to be let go
        self._whole[message_id] = None
        while self.replies_size_bytes > self.replies_size_bytes_max and self._whole:
            self._let_go(self._whole.popitem(last=False)[0])

    def _let_go(self, message_id: int) -> None:
        """Only that there was a reply is remembered, and which callback came with it."""
        reply = self.replies[message_id]
        self.replies[message_id] = CachedReply(
            REPLY_EXPIRED, reply.destination_callback_id, reply.source_callback_id, (), REPLY_OVERHEAD_BYTES
        )
        self._count(REPLY_OVERHEAD_BYTES - reply.size_bytes)

    def expect(self, callback_id: int, callback: MessageCallback) -> bool:
        """Keep ``callback`` for a message that addresses it; False if another one was let go for it."""
        self.callbacks[callback_id] = callback
        if len(self.callbacks) > CALLBACKS_MAX:
            del self.callbacks[next(iter(self.callbacks))]
            return False
        self._count(CALLBACK_OVERHEAD_BYTES)
        return True

    def take_callback(self, callback_id: int) -> MessageCallback | None:
        """The callback with this ID, once; None if it was not given here, or is not kept any more."""
        callback = self.callbacks.pop(callback_id, None)
        if callback is not None:
            self._count(-CALLBACK_OVERHEAD_BYTES)
        return callback

    def _count(self, size_bytes: int) -> None:
        self.replies_size_bytes += size_bytes
        self.kept.size_bytes += size_bytes

    def goes_with(self, kept: Kept) -> None:
        """Count what is kept here to ``kept`` from now on."""
        self.kept.size_bytes -= self.replies_size_bytes
        kept.size_bytes += self.replies_size_bytes
        self.kept = kept


class Shelf(Struct, eq=False):
    """The conversations of one peer, or of all that show no key."""

    conversations_max: int
    conversations: OrderedDict[tuple[int, int], Conversation] = field(default_factory=OrderedDict)  # the last used last
    kept: Kept = field(default_factory=Kept)

    def add(self, key: tuple[int, int], conversation: Conversation) -> None:
        self.conversations[key] = conversation
        conversation.goes_with(self.kept)

    def take(self, key: tuple[int, int]) -> Conversation | None:
        conversation = self.conversations.pop(key, None)
        if conversation is not None:
            conversation.goes_with(Kept())
        return conversation

    def stay_within(self) -> None:
        """Forget those that were unused for longest; never the last."""
        conversations = self.conversations
        while len(conversations) > 1 and (
            len(conversations) > self.conversations_max or self.kept.size_bytes > PEER_REPLIES_SIZE_BYTES_MAX
        ):
            self.take(next(iter(conversations)))


class Inbox:
    """The conversations of one listening endpoint, the least recently used of which is forgotten beyond
    ``conversations_max``, fewer for one peer, or what their replies may take. No peer makes those of another go.

    ``ordered``: messages are taken in the order of sending alone.
    """

    def __init__(self, conversations_max: int = CONVERSATIONS_MAX, *, ordered: bool = False) -> None:
        self._tracker = OrderedTracker if ordered else DuplicateTracker
        self._plain = Shelf(conversations_max)
        self._shelves: dict[str | None, Shelf] = {None: self._plain}

    def __len__(self) -> int:
        return sum([len(shelf.conversations) for shelf in self._shelves.values()])

    def conversation(self, incarnation: int, link_id: int, peer: str | None = None) -> Conversation:
        """That of the link, new if it is not known (any more). Nobody gets at one of another ``peer``; one that was
        begun in plain goes on when its sender shows a key."""
        key = (incarnation, link_id)
        shelf = self._shelves.get(peer)
        if shelf is None:
            shelf = self._shelves[peer] = Shelf(PEER_CONVERSATIONS_MAX)
        conversation = shelf.conversations.get(key)
        if conversation is None:
            known = self._plain.take(key) if peer is not None else None
            conversation = known or Conversation(incarnation, link_id, self._tracker())
            conversation.peer = peer
            shelf.add(key, conversation)
        else:
            shelf.conversations.move_to_end(key)
        shelf.stay_within()
        return conversation
