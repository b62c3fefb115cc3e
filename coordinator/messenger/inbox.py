"""Receiver's side of a link: the window of received IDs, early messages, kept and delayed replies, callbacks.

IDs grow by one. :class:`ReceiveWindow` accepts a message once, in any order. Beside the highest ID seen, the high-water
mark, it keeps the complement: the IDs below that have not been seen. They are few, and the bits of one integer, so that
a message costs the same whatever its sender has left out. The receiver reports the complement to the sender, which
sends only the missing messages again.

If order is requested, a message that arrives too early is kept until all before it have arrived. Without room it is
dropped, and counts as not seen.

Each message also has the lowest ID that its sender can still send, and the number of IDs right below its own that the
sender will never send again: they were acknowledged, perhaps by an earlier receiver. Such IDs count as seen. So a new
receiver can start in the middle of a link.

A reply is kept until the message's sender has it (the lowest pending ID passes it); if it was lost, it is sent again
for the duplicate of its message. The sender's span limits the number of replies. Their bytes are limited too: beyond
the limit the oldest is dropped, and the duplicate of its message is answered with "acknowledged, but the reply is no
longer kept", so that no sender waits forever.

A callback given with a reply is kept until its message arrives. It belongs to its link: no other sender can address it.
Beyond a number of callbacks the oldest is dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import IntEnum
from typing import Any

from msgspec import Struct, field

from immortal.coordinator.messenger import limits
from immortal.coordinator.messenger.envelope import NOOP, REPLY, REPLY_EXPIRED


class Arrival(IntEnum):
    FIRST = 0
    DUPLICATE = 1
    REFUSED = 2  # further from the sender's lowest pending ID than a sender may go
    EARLY = 3  # the first time, but a message sent before it is missing, and order is requested


FIRST, DUPLICATE, REFUSED, EARLY = Arrival


class ReceiveWindow(Struct, eq=False):
    """Window of received message IDs: accepts each ID once, and knows the missing ones below the highest. No I/O.

    ``highest_seen`` is the highest ID seen (0: none), ``lowest_pending_id`` the lowest ID that can still arrive, first
    or as a duplicate. The missing IDs take ``span_max`` bits: an ID further from the lowest pending one is refused.
    """

    ordered: bool = False
    span_max: int = limits.SPAN_MAX
    highest_seen: int = 0
    lowest_pending_id: int = 1
    missing: int = 0  # bit n: lowest_pending_id + n, which is not above highest_seen, has not been seen

    @property
    def complete_id(self) -> int:
        """Highest ID up to which nothing is missing."""
        if not self.missing:
            return self.highest_seen
        return self.lowest_pending_id + (self.missing & -self.missing).bit_length() - 2

    def mark_received(self, message_id: int, lowest_pending_id: int = 1, skipped_count: int = 0) -> Arrival:
        """Mark ``message_id`` (from 1) as seen; return how it arrived. Its sender will never again send the IDs below
        ``lowest_pending_id``, and the ``skipped_count`` IDs right below ``message_id``."""
        if lowest_pending_id > self.lowest_pending_id:
            if self.missing:
                self.missing >>= min(lowest_pending_id - self.lowest_pending_id, self.span_max)
            self.lowest_pending_id = lowest_pending_id
            if self.highest_seen < lowest_pending_id - 1:
                self.highest_seen = lowest_pending_id - 1
        highest = self.highest_seen
        distance = message_id - self.lowest_pending_id
        if message_id > highest:
            if distance >= self.span_max:
                return REFUSED
            self.highest_seen = message_id
            if message_id - skipped_count == highest + 1:
                return EARLY if self.ordered and self.missing else FIRST
            self.missing |= ((1 << (message_id - highest)) - 1) << (highest + 1 - self.lowest_pending_id)
        elif distance < 0 or not self.missing >> distance & 1:
            return DUPLICATE
        skipped_count = min(skipped_count, distance)
        self.missing &= ~(((2 << skipped_count) - 1) << (distance - skipped_count))
        return EARLY if self.ordered and self.missing and message_id > self.complete_id else FIRST

    def is_missing(self, message_id: int) -> bool:
        """Return True if an ID below the highest has not been seen and can still arrive."""
        distance = message_id - self.lowest_pending_id
        return distance >= 0 and bool(self.missing >> distance & 1)

    def mark_missing(self, message_id: int) -> None:
        """Mark an ID that was seen, and is not below the lowest pending one, as missing."""
        self.missing |= 1 << (message_id - self.lowest_pending_id)


MessageCallback = Callable[..., None]
"""Server loop (listener.py) that was given with a reply, for the message that addresses it."""

EarlyMessage = Any
"""Received (listener.py) that arrived before a message sent earlier."""


class CachedReply(Struct, frozen=True):
    """Reply kept for a duplicate of its message. If its parts were dropped, its ``kind`` is REPLY_EXPIRED."""

    kind: int
    destination_callback_id: int
    source_callback_id: int
    parts: tuple[bytes, ...]
    size_bytes: int


class StoredReplies(Struct, eq=False):
    """Total size of the replies, callbacks and early messages kept for all links of one peer."""

    size_bytes: int = 0


class LinkState(Struct, eq=False):
    """State of one link at its receiver: IDs seen, early messages, routes back, replies, callbacks.

    ``routes`` are the ZeroMQ routing IDs of its sender's latest connections, the newest first, ``peer`` the name that
    its key stands for.
    """

    incarnation: int
    link_id: int
    window: ReceiveWindow
    peer: str | None = None
    replies_size_bytes_max: int = limits.REPLIES_SIZE_BYTES_MAX
    routes: list[bytes] = field(default_factory=lambda: [b""])
    replies: dict[int, CachedReply] = field(default_factory=dict)  # by message ID, oldest reply first
    callbacks: dict[int, MessageCallback] = field(default_factory=dict)  # given with replies, by ID, the oldest first
    replies_size_bytes: int = 0  # with the callbacks
    stored: StoredReplies = field(default_factory=StoredReplies)
    early: dict[int, tuple[EarlyMessage, int]] = field(default_factory=dict)  # with their bytes, by ID
    _early_size_bytes: int = 0
    _popped_id: int = 0  # early messages up to it were taken
    _unexpired: OrderedDict[int, None] = field(default_factory=OrderedDict)  # replies that were not dropped

    def note_route(self, route: bytes) -> None:
        """Remember the connection that a message arrived on. Messages of a broken connection and of its successor can
        be read alternately, so a known route is not taken for a newer one."""
        if route not in self.routes:
            self.routes.insert(0, route)
            del self.routes[limits.ROUTES_MAX :]

    def mark_received(self, message_id: int, lowest_pending_id: int, skipped_count: int = 0) -> Arrival:
        """Mark a received message as seen, and drop the replies that its sender has acknowledged."""
        had = self.window.lowest_pending_id
        arrival = self.window.mark_received(message_id, lowest_pending_id, skipped_count)
        if lowest_pending_id > had and self.replies:
            if lowest_pending_id - had <= len(self.replies):
                acknowledged = [known for known in range(had, lowest_pending_id) if known in self.replies]
            else:
                acknowledged = [known for known in self.replies if known < lowest_pending_id]
            self._count(-sum([self.replies.pop(known).size_bytes for known in acknowledged]))
            for known in acknowledged:
                self._unexpired.pop(known, None)
        return arrival

    def arrived_id(self, message_id: int) -> int:
        """Return the highest ID up to which all have arrived, or ``message_id`` if that is higher."""
        window = self.window
        return max(message_id, window.complete_id) if window.missing else window.highest_seen

    def store_early(self, message_id: int, message: EarlyMessage, parts: Sequence[bytes]) -> bool:
        """Keep a message until :meth:`pop_early` returns it. If there is no room, return False: it counts as not
        seen."""
        size_bytes = sum(map(len, parts)) + limits.PART_OVERHEAD_BYTES * len(parts) + limits.REPLY_OVERHEAD_BYTES
        if self.stored.size_bytes + size_bytes > limits.PEER_REPLIES_SIZE_BYTES_MAX:
            self.window.mark_missing(message_id)
            return False
        self.early[message_id] = message, size_bytes
        self._count_early(size_bytes)
        return True

    def pop_early(self) -> list[EarlyMessage]:
        """Remove and return the early messages before which nothing is missing any more, in the order of sending."""
        complete_id = self.window.complete_id
        if complete_id == self._popped_id:
            return []
        self._popped_id = complete_id
        taken = [self.early.pop(message_id) for message_id in sorted(self.early) if message_id <= complete_id]
        self._count_early(-sum([size_bytes for _, size_bytes in taken]))
        return [message for message, _ in taken]

    def store_reply(
        self,
        message_id: int,
        destination_callback_id: int,
        parts: tuple[bytes, ...],
        source_callback_id: int = NOOP,
        kind: int = REPLY,
    ) -> None:
        """Keep the reply to ``message_id`` as long as the message's sender can ask for it again."""
        if message_id < self.window.lowest_pending_id:
            return
        size_bytes = sum(map(len, parts)) + limits.REPLY_OVERHEAD_BYTES
        self.replies[message_id] = CachedReply(kind, destination_callback_id, source_callback_id, parts, size_bytes)
        self._count(size_bytes)
        if kind != REPLY:
            return  # it has no parts that could be dropped
        self._unexpired[message_id] = None
        while self.replies_size_bytes > self.replies_size_bytes_max and self._unexpired:
            self._expire_reply(self._unexpired.popitem(last=False)[0])

    def _expire_reply(self, message_id: int) -> None:
        """Drop the parts of a reply; keep only that there was one, and for which callback."""
        reply = self.replies[message_id]
        self.replies[message_id] = CachedReply(
            REPLY_EXPIRED, reply.destination_callback_id, reply.source_callback_id, (), limits.REPLY_OVERHEAD_BYTES
        )
        self._count(limits.REPLY_OVERHEAD_BYTES - reply.size_bytes)

    def store_callback(self, callback_id: int, callback: MessageCallback) -> bool:
        """Keep ``callback`` for a message that addresses it; return False if an older one was dropped for it."""
        self.callbacks[callback_id] = callback
        if len(self.callbacks) > limits.CALLBACKS_MAX:
            del self.callbacks[next(iter(self.callbacks))]
            return False
        self._count(limits.CALLBACK_OVERHEAD_BYTES)
        return True

    def pop_callback(self, callback_id: int) -> MessageCallback | None:
        """Remove and return the callback with this ID; None if it was not given here, or was dropped."""
        callback = self.callbacks.pop(callback_id, None)
        if callback is not None:
            self._count(-limits.CALLBACK_OVERHEAD_BYTES)
        return callback

    def _count(self, size_bytes: int) -> None:
        self.replies_size_bytes += size_bytes
        self.stored.size_bytes += size_bytes

    def _count_early(self, size_bytes: int) -> None:
        self._early_size_bytes += size_bytes
        self.stored.size_bytes += size_bytes

    def count_in(self, stored: StoredReplies) -> None:
        """Count the bytes kept here in the total ``stored`` from now on."""
        size_bytes = self.replies_size_bytes + self._early_size_bytes
        self.stored.size_bytes -= size_bytes
        stored.size_bytes += size_bytes
        self.stored = stored


Receiver = tuple[int, str | None]
"""Receiver of a reply: a messenger's incarnation, and the name that its key stands for."""


class DelayedReplies(Struct, eq=False):
    """Replies that nobody waits for: each leaves with the next message to its receiver, or at ``due_ns``. No I/O."""

    due_ns: int | None = None
    reachable: set[Receiver] = field(default_factory=set)  # links send to them, so a message may follow
    _waiting: dict[Receiver, dict[bytes, Any]] = field(default_factory=dict)
    """Reply (listener.py) by its bytes as part of a message, the oldest first."""

    def has_room(self, receiver: Receiver) -> bool:
        return receiver in self.reachable and len(self.waiting(receiver)) < limits.PIGGYBACKED_MAX

    def add(self, receiver: Receiver, reply: Any, data: bytes, now_ns: int) -> None:
        self._waiting.setdefault(receiver, {})[data] = reply
        if self.due_ns is None:
            self.due_ns = now_ns + limits.REPLY_DELAY_NS_MAX

    def waiting(self, receiver: Receiver) -> Collection[bytes]:
        """Return the bytes of the replies for one receiver."""
        return self._waiting.get(receiver, ())

    def pop(self, receiver: Receiver) -> Iterable[Any]:
        """Remove and return the replies for one receiver."""
        taken = self._waiting.pop(receiver, {})
        if not self._waiting:
            self.due_ns = None
        return taken.values()

    def pop_all(self) -> list[Any]:
        waiting, self._waiting, self.due_ns = self._waiting, {}, None
        return [reply for replies in waiting.values() for reply in replies.values()]


class LinkStates(Struct, eq=False):
    """States of the links of one peer, or of all senders without a key."""

    links_max: int
    links: OrderedDict[tuple[int, int], LinkState] = field(default_factory=OrderedDict)  # the last used last
    stored: StoredReplies = field(default_factory=StoredReplies)

    def add(self, key: tuple[int, int], link: LinkState) -> None:
        self.links[key] = link
        link.count_in(self.stored)

    def remove(self, key: tuple[int, int]) -> LinkState | None:
        link = self.links.pop(key, None)
        if link is not None:
            link.count_in(StoredReplies())
        return link

    def evict(self) -> None:
        """Remove the least recently used links beyond the limits; never the last one."""
        links = self.links
        while len(links) > 1 and (
            len(links) > self.links_max or self.stored.size_bytes > limits.PEER_REPLIES_SIZE_BYTES_MAX
        ):
            self.remove(next(iter(links)))


class Inbox:
    """States of all links to one listening endpoint. The least recently used is removed beyond ``links_max``,
    PEER_LINKS_MAX of one peer, or the limit on the bytes of replies. No peer can displace the links of another.

    ``ordered``: messages are delivered in the order of sending.
    """

    def __init__(self, links_max: int = limits.LINKS_MAX, *, ordered: bool = False) -> None:
        self._ordered = ordered
        self._plain = LinkStates(links_max)
        self._caches: dict[str | None, LinkStates] = {None: self._plain}

    def __len__(self) -> int:
        return sum([len(cache.links) for cache in self._caches.values()])

    def link(self, incarnation: int, link_id: int, peer: str | None = None) -> LinkState:
        """Return the state of the link; create it if it is not known (any more). A sender reaches only links of its own
        ``peer`` name; a link that began without a key continues when its sender shows one."""
        key = (incarnation, link_id)
        cache = self._caches.get(peer)
        if cache is None:
            cache = self._caches[peer] = LinkStates(limits.PEER_LINKS_MAX)
        link = cache.links.get(key)
        if link is None:
            known = self._plain.remove(key) if peer is not None else None
            link = known or LinkState(incarnation, link_id, ReceiveWindow(self._ordered))
            link.peer = peer
            cache.add(key, link)
        else:
            cache.links.move_to_end(key)
        cache.evict()
        return link
