"""The links of a messenger, one to each destination: opened at the first message, and again after each failure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from coordinator.messenger.link import Link
from coordinator.messenger.outbox import Outbox
from coordinator.messenger.readiness import Readiness
from coordinator.messenger.room import Room
from coordinator.messenger.security import Security
from coordinator.messenger.sockets import Context, Counters, Warnings


class Links:
    """``make_outbox`` makes that of a new link, ``listener_changed`` is told of listeners over inproc.

    ``room``: what is acknowledged is given back to it; None: nothing bounds what is pending.

    ``security``: that of connections that are made from now on; None: they are in plain.
    """

    def __init__(
        self,
        context: Context,
        incarnation: int,
        readiness: Readiness,
        counters: Counters,
        warnings: Warnings,
        make_outbox: Callable[[], Outbox],
        listener_changed: Callable[[Link, bool], None],
        room: Room | None = None,
    ) -> None:
        self.security: Security | None = None
        self._context = context
        self._incarnation = incarnation
        self._readiness = readiness
        self._counters = counters
        self._warnings = warnings
        self._make_outbox = make_outbox
        self._listener_changed = listener_changed
        self._room = room
        self._by_destination: dict[str, Link] = {}
        self._ids = itertools.count(1)

    def __iter__(self) -> Iterator[Link]:
        return iter(self._by_destination.values())

    def __contains__(self, destination: str) -> bool:
        return destination in self._by_destination

    def __getitem__(self, destination: str) -> Link:
        return self._by_destination[destination]

    def get(self, destination: str) -> Link | None:
        return self._by_destination.get(destination)

    def open(self, destination: str) -> Link:
        return self._connect(destination, next(self._ids), self._make_outbox(), None)

    def reopen(self, link: Link) -> Link:
        """The same link over a new socket, with the next of the keys that its destination may have."""
        self._readiness.forget(link)
        link.close()
        return self._connect(link.endpoint, link.link_id, link.outbox, link.server_key)

    def drop(self, destination: str) -> Link | None:
        """Close the link to ``destination`` and forget it; None: there was none."""
        link = self._by_destination.pop(destination, None)
        if link is not None:
            self._readiness.forget(link)
            link.close()
        return link

    def is_out_of_date(self, link: Link) -> bool:
        """Whether its connection was made with other keys than ``security`` wants."""
        keys = () if self.security is None else self.security.servers(link.endpoint)
        pair = self.security.own if self.security is not None and keys else None
        expected = link.server_key in keys if keys else link.server_key is None
        return link.pair != pair or not expected

    def _connect(self, destination: str, link_id: int, outbox: Outbox, tried_key: str | None) -> Link:
        keys = () if self.security is None else self.security.servers(destination)
        following = (keys.index(tried_key) + 1) % len(keys) if tried_key in keys else 0
        link = Link(
            self._context,
            destination,
            link_id,
            self._incarnation,
            outbox,
            self._counters,
            self._warnings,
            self.security.own if self.security is not None and keys else None,
            keys[following] if keys else None,
            self._listener_changed,
            self._room,
        )
        self._by_destination[destination] = link
        self._readiness.watch(link)
        return link

    def close(self) -> None:
        for link in self._by_destination.values():
            self._readiness.unwatch(link)
            link.close()
        self._by_destination.clear()
