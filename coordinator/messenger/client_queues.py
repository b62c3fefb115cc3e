"""What lies in ZeroMQ for clients that do not read: counted in bytes, which ZeroMQ's own limits do not.

ZeroMQ gives a message's memory back once its connection has taken the bytes, and in order. So each time that enough has
gone out, one message is a marker: when that one is given back, so are those before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import zmq
from msgspec import Struct, field

from immortal.coordinator.messenger.limits import (
    CLIENT_QUEUED_SIZE_BYTES_MAX,
    CLIENT_SHARE_SIZE_BYTES,
    CLIENTS_QUEUED_SIZE_BYTES_MAX,
    LARGE_PART_SIZE_BYTES,
)
from immortal.coordinator.messenger.sockets import NOBLOCK


class _Queue(Struct, eq=False):
    """Of one connection. ``size_bytes``: all that is not known to be gone."""

    size_bytes: int = 0
    unmarked_bytes: int = 0
    markers: deque[tuple[zmq.MessageTracker, int]] = field(default_factory=deque)  # (of the marker, bytes up to it)


class ClientQueues:
    """By routing ID; one that is empty is forgotten."""

    def __init__(self) -> None:
        self._queues: dict[bytes, _Queue] = {}
        self._size_bytes = 0

    def has_room(self, route: bytes, size_bytes: int) -> bool:
        """Whether ``size_bytes`` may be sent to ``route`` now. One message always may, unless all together have too
        much: then only small ones."""
        queued_bytes = self._take_gone(route) + size_bytes
        if queued_bytes > max(CLIENT_QUEUED_SIZE_BYTES_MAX, size_bytes):
            return False
        if self._size_bytes + size_bytes <= CLIENTS_QUEUED_SIZE_BYTES_MAX:
            return True
        for other in list(self._queues):
            self._take_gone(other)
        others_bytes = self._size_bytes
        return (
            not others_bytes
            or others_bytes + size_bytes <= CLIENTS_QUEUED_SIZE_BYTES_MAX
            or (queued_bytes <= CLIENT_SHARE_SIZE_BYTES)
        )

    def send(self, send: Callable[..., object], route: bytes, data: bytes) -> None:
        """``data`` as the last part of a message to ``route``, whose beginning was taken."""
        queue = self._queues.setdefault(route, _Queue())
        size_bytes = len(data)
        queue.size_bytes += size_bytes
        queue.unmarked_bytes += size_bytes
        self._size_bytes += size_bytes
        if queue.unmarked_bytes < LARGE_PART_SIZE_BYTES:
            send(data, NOBLOCK)
            return
        frame = zmq.Frame(data, track=True, copy=False, copy_threshold=0)
        queue.markers.append((frame.tracker, queue.unmarked_bytes))
        queue.unmarked_bytes = 0
        send(frame, NOBLOCK, copy=False)

    def _take_gone(self, route: bytes) -> int:
        """What is still queued for ``route``, in bytes."""
        queue = self._queues.get(route)
        if queue is None:
            return 0
        while queue.markers and queue.markers[0][0].done:
            gone_bytes = queue.markers.popleft()[1]
            queue.size_bytes -= gone_bytes
            self._size_bytes -= gone_bytes
        if not queue.markers:  # the rest is less than a marker's worth
            self._size_bytes -= queue.size_bytes
            del self._queues[route]
            return 0
        return queue.size_bytes
