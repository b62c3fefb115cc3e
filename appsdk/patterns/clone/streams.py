"""One stream: how far its client has got, what may be on its way, what happens when it is slow. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable

from immortal.appsdk.patterns.clone.frames import Activate, Dropped, StreamReport, encode
from immortal.appsdk.patterns.clone.views import EVERYTHING, View, Walk

Send = Callable[[bytes], None]


class Stream:
    """It is in step with its view; or it walks; or it is to walk from ``after`` on: then both others are None.

    ``id``: its name in the whole tree of publishers. ``route``: of its client's connection.
    """

    def __init__(self, key: str, route: bytes, name: str, asked: Activate, view: View, after: int, now_ns: int) -> None:
        self.id = key
        self.route = route
        self.name = name
        self.asked = asked
        self.view = view
        self.after = after
        self.heard_ns = now_ns
        self.over_since_ns: int | None = None  # its high-water mark
        self._dropped = 0
        self._told_changes: int | None = None  # of all that its view had; None: it has had nothing of this view
        self.walk: Walk | None = None
        self._next: int | None = None  # index of the view's part that it gets next
        self._part = 0  # of the walk
        self._sent_bytes = 0
        self._received_bytes = 0
        self._told_dropped = 0

    @property
    def is_waiting(self) -> bool:
        """For a walk."""
        return self.walk is None and self._next is None

    @property
    def has_room(self) -> bool:
        return self._sent_bytes - self._received_bytes < self.asked.window_bytes

    @property
    def waiting_bytes(self) -> int:
        """Of its view, and not on their way."""
        return 0 if self._next is None else self.view.end_bytes - self.view.begin_bytes(self._next)

    @property
    def needed(self) -> int:
        """The index of the first of its view's parts that it is to get. One that walks does not hold on to parts."""
        return self.view.end if self._next is None else self._next

    def received(self, total_bytes: int) -> None:
        """More than was sent counts as all."""
        self._received_bytes = max(self._received_bytes, min(total_bytes, self._sent_bytes))

    @property
    def dropped(self) -> int:
        """Changes that it is not told one by one."""
        told, waits = self._told_changes, self.is_waiting
        return self._dropped + (self.view.end_changes - told if waits and told is not None else 0)

    def start(self, walk: Walk) -> None:
        if self._told_changes is not None:
            self._dropped += walk.then_changes - self._told_changes
        self._told_changes = walk.then_changes
        self.walk, self._part = walk, 0

    def start_anew(self, view: View, after: int = EVERYTHING) -> None:
        """With another view."""
        self.view, self.after = view, after
        self._told_changes = None
        self.walk = self._next = None
        self.over_since_ns = None

    def drop(self) -> None:
        """All that waits. The keys that it has to do with come again, as they are then."""
        self._next = None
        self.over_since_ns = None

    def pump(self, send: Send) -> None:
        """As much as there is room for."""
        if self._dropped > self._told_dropped and self.has_room:
            self._told_dropped = self._dropped
            send(encode(Dropped(self.asked.stream, self._dropped)))
        view = self.view
        while self.has_room:
            if self.walk is not None:
                data = self.walk.part(self._part)
                self._part += 1
                if self._part == self.walk.parts:
                    self._next, self.after, self.walk = self.walk.then, self.walk.number, None
            elif self._next is not None and view.first <= self._next < view.end:
                chunk = view[self._next]
                self._next += 1
                self.after, self._told_changes = chunk.number, chunk.end_changes
                data = chunk.data
            else:
                if self._next is not None and self._next < view.first:
                    self._next = None  # it has walked for so long that what follows is not kept any more
                return
            self._sent_bytes += len(data)
            send(data)

    def report(self) -> StreamReport:
        if self.over_since_ns is not None:
            state = "holds up writers"
        elif self.walk is not None or self.is_waiting:
            state = "is brought up to date"
        else:
            state = "in step" if not self.waiting_bytes else "behind"
        return StreamReport(
            self.id,
            self.name,
            self.asked.label,
            self.view.visible,
            self.asked.policy,
            self._sent_bytes - self._received_bytes,
            self.waiting_bytes,
            self.asked.mark_bytes,
            self.dropped,
            state,
        )
