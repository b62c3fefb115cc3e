"""Which sockets have news, behind one descriptor.

ZeroMQ's descriptors tell of news once, and any call on a socket may take the news in. The rule that keeps
wake-ups from being lost: a socket is in ``ready`` from the moment its descriptor, or a look at its events
after sending, says that there is something, until a receive has found nothing.

Links' descriptors are behind an epoll of their own, ``link_epoll``: replies need not wake a patient owner.
"""

from __future__ import annotations

import select
from collections.abc import Sequence

from immortal.coordinator.messenger.limits import PATIENCE_NS
from immortal.coordinator.messenger.link import Link
from immortal.coordinator.messenger.listener import Listener
from immortal.coordinator.messenger.wake import Wake

Source = Link | Listener


class Readiness:
    """Of the sockets of one messenger, and of its ``wake``. For its owner's thread."""

    def __init__(self, wake: Wake) -> None:
        self.ready: dict[Source, None] = {}  # have something to receive, or may have
        self.unread: dict[Link, None] = {}  # have replies, or may have, that nobody waits for before they are due
        self.replies_due_ns: int | None = None  # when links are listened to again; None: they are
        self.link_epoll = select.epoll()
        self._epoll = select.epoll()
        self._epoll.register(self.link_epoll.fileno(), select.EPOLLIN)
        self._wake = wake
        self._epoll.register(wake.descriptor, select.EPOLLIN)
        self._sources: dict[int, Source] = {}  # by descriptor
        self._monitors: dict[int, Link] = {}  # by their monitor's descriptor

    def fileno(self) -> int:
        return self._epoll.fileno()

    def watch(self, source: Source) -> None:
        self._sources[source.descriptor] = source
        self._epoll_of(source).register(source.descriptor, select.EPOLLIN)
        if isinstance(source, Link) and source.monitor_descriptor is not None:
            self._monitors[source.monitor_descriptor] = source
            self._epoll.register(source.monitor_descriptor, select.EPOLLIN)

    def unwatch(self, source: Source) -> None:
        del self._sources[source.descriptor]
        self._epoll_of(source).unregister(source.descriptor)
        if isinstance(source, Link) and source.monitor_descriptor is not None:
            del self._monitors[source.monitor_descriptor]
            self._epoll.unregister(source.monitor_descriptor)

    def _epoll_of(self, source: Source) -> select.epoll:
        return self.link_epoll if isinstance(source, Link) else self._epoll

    def forget(self, link: Link) -> None:
        """It is about to be closed."""
        self.ready.pop(link, None)
        self.unread.pop(link, None)
        self.unwatch(link)

    def collect(self, now_ns: int, *, with_replies: bool) -> Sequence[Link]:
        """Look at what the descriptors tell; the links whose monitors have news."""
        monitored: list[Link] = []
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._wake.descriptor:
                self._wake.clear()
            elif descriptor == self.link_epoll.fileno():
                pass  # looked at below
            elif descriptor in self._monitors:
                monitored.append(self._monitors[descriptor])
            else:
                self.ready[self._sources[descriptor]] = None
        if with_replies:
            for descriptor, _ in self.link_epoll.poll(0):
                self.ready[self._sources[descriptor]] = None
            if self.replies_due_ns is not None and self.replies_due_ns <= now_ns:
                self._listen_to_replies()
            self._take_unread()
        return monitored

    # --- replies to a patient owner ---------------------------------------------------------------------------------

    @property
    def replies_wait(self) -> bool:
        return self.replies_due_ns is not None and bool(self.unread or self.link_epoll.poll(0))

    def put_replies_off(self, now_ns: int) -> None:
        """Until PATIENCE_NS from now they wake nobody."""
        if self.replies_due_ns is None:
            self._epoll.modify(self.link_epoll.fileno(), 0)
        self.replies_due_ns = now_ns + PATIENCE_NS

    def expect_replies(self) -> None:
        """They are waited for: they wake, and what came unread is to be received."""
        if self.replies_due_ns is not None:
            self._listen_to_replies()
        self._take_unread()

    def _listen_to_replies(self) -> None:
        self.replies_due_ns = None
        self._epoll.modify(self.link_epoll.fileno(), select.EPOLLIN)

    def _take_unread(self) -> None:
        for link in self.unread:
            self.ready[link] = None
        self.unread.clear()

    def close(self) -> None:
        """All sources are unwatched."""
        self.ready.clear()
        self.unread.clear()
        self.link_epoll.close()
        self._epoll.close()
