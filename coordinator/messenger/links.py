"""The links of a messenger, one to each destination: opened at the first message, and again after each failure."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator

from immortal.coordinator.messenger.envelope import NOOP
from immortal.coordinator.messenger.link import Link
from immortal.coordinator.messenger.outbox import Outbox, ReplyCallback
from immortal.coordinator.messenger.readiness import Readiness
from immortal.coordinator.messenger.room import Room
from immortal.coordinator.messenger.security import Security
from immortal.coordinator.messenger.sockets import Shared
from immortal.coordinator.messenger.turns import Turn
from immortal.coordinator.messenger.wake import Wake


class Links:
    """``make_outbox`` makes that of a new link, ``wake`` wakes the owner where a listener over inproc comes or goes.

    ``room``: what is acknowledged is given back to it; None: nothing bounds what is pending.
    """

    def __init__(
        self, shared: Shared, readiness: Readiness, make_outbox: Callable[[], Outbox], wake: Wake, room: Room | None
    ) -> None:
        self.sending: dict[Link, None] = {}  # have something to send, or may send again
        self.listener_news: deque[tuple[Link, bool]] = deque()  # of inproc links; appended to by any thread
        self._security: Security | None = None  # of connections that are made from now on; None: they are in plain
        self._shared = shared
        self._readiness = readiness
        self._make_outbox = make_outbox
        self._wake = wake
        self._room = room
        self._by_destination: dict[str, Link] = {}
        self._link_ids = itertools.count(1)
        self._callback_ids = itertools.count(NOOP + 1)

    def __iter__(self) -> Iterator[Link]:
        return iter(self._by_destination.values())

    def __contains__(self, destination: object) -> bool:
        return destination in self._by_destination

    def __getitem__(self, destination: str) -> Link:
        return self._by_destination[destination]

    def get(self, destination: str) -> Link | None:
        return self._by_destination.get(destination)

    def outbox(self, destination: str) -> Outbox:
        """That of the link, or an empty one."""
        link = self._by_destination.get(destination)
        return self._make_outbox() if link is None else link.outbox

    # --- messages ----------------------------------------------------------------------------------------------------

    def add(
        self, destination: str, parts: tuple[bytes, ...], callback: ReplyCallback | None, turn: Turn | None
    ) -> None:
        """A message for ``destination``, to be sent by :meth:`transmit`."""
        link = self._by_destination.get(destination)
        if link is None:
            link = self._connect(destination, next(self._link_ids), self._make_outbox(), None)
        waits = callback is not None or (turn is not None and turn.callback is not None)
        link.outbox.add(parts, callback, next(self._callback_ids) if waits else NOOP, turn)
        self.sending[link] = None

    def transmit(self, now_ns: int, *, patient: bool) -> None:
        """Send what may be sent, where there is something. ``patient``: nobody waits for the replies to it."""
        for link in self.sending:
            if link.transmit(now_ns):
                self._readiness.unread[link] = None
        self.sending.clear()
        # What could not be sent waits for news of its link, be it room or a reply.
        if patient and all(link.outbox.all_sent for link in self):
            self._readiness.put_replies_off(now_ns)
        else:
            self._readiness.expect_replies()

    def retry_due(self, now_ns: int) -> None:
        """Queue what is to be sent again, and give up connections on which nothing is heard."""
        for link in list(self):
            silent_ns = link.silent_ns
            if silent_ns is not None and silent_ns <= now_ns:
                link.give_up()
                self.reopen(link)
            elif link.connected and link.outbox.requeue_due(now_ns):
                self.sending[link] = None

    # --- connections -------------------------------------------------------------------------------------------------

    def reopen_due(self, now_ns: int) -> None:
        """Take up again what failed for reasons that may be over."""
        for link in list(self):
            if link.reopen_due_ns is not None and link.reopen_due_ns <= now_ns:
                self.reopen(link)

    def reopen(self, link: Link) -> Link:
        """The same link over a new socket, with the next of the keys that its destination may have."""
        self._close(link)
        return self._connect(link.endpoint, link.link_id, link.outbox, link.server_key)

    def drop(self, destination: str) -> int:
        """Close the link to ``destination`` and forget it, with so many messages."""
        link = self._by_destination.pop(destination, None)
        if link is None:
            return 0
        self._close(link)
        count = len(link.outbox)
        if self._room is not None:
            self._room.forget(destination, link.outbox.size_bytes, count)
        return count

    def _close(self, link: Link) -> None:
        self.sending.pop(link, None)
        self._readiness.forget(link)
        link.close()

    def secure(self, security: Security) -> None:
        """Make connections anew that have other keys than ``security`` wants."""
        self._security = security
        for link in list(self):
            keys = security.servers(link.endpoint)
            expected = link.server_key in keys if keys else link.server_key is None
            if link.pair != (security.own if keys else None) or not expected:
                self.reopen(link)

    def _connect(self, destination: str, link_id: int, outbox: Outbox, tried_key: str | None) -> Link:
        keys = () if self._security is None else self._security.servers(destination)
        following = (keys.index(tried_key) + 1) % len(keys) if tried_key in keys else 0
        link = Link(
            self._shared,
            destination,
            link_id,
            outbox,
            self._security.own if self._security is not None and keys else None,
            keys[following] if keys else None,
            self._listener_changed,
            self._room,
        )
        self._by_destination[destination] = link
        self._readiness.watch(link)
        return link

    def _listener_changed(self, link: Link, listening: bool) -> None:
        self.listener_news.append((link, listening))
        self._wake.signal()

    def take_listener_news(self) -> None:
        """Make anew what inproc itself does not."""
        while self.listener_news:
            link, listening = self.listener_news.popleft()
            if link.closed:
                continue
            if not listening:
                link.connected = False
            elif not link.connected:
                reopened = self.reopen(link)
                reopened.outbox.requeue_all()
                self.sending[reopened] = None

    def close(self) -> None:
        for link in self:
            self._readiness.unwatch(link)
            link.close()
        self._by_destination.clear()
        self.sending.clear()
