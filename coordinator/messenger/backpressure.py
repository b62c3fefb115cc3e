"""Back-pressure: limits on the messages pending for a destination, and on the bytes queued for a client."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import zmq
from msgspec import Struct, field

from immortal.coordinator.messenger.envelope import MessengerError, PendingFullError
from immortal.coordinator.messenger.limits import (
    CLIENT_QUEUED_SIZE_BYTES_MAX,
    CLIENT_SHARE_SIZE_BYTES,
    CLIENTS_QUEUED_SIZE_BYTES_MAX,
    LARGE_PART_SIZE_BYTES,
    PENDING_MAX,
    PENDING_SIZE_BYTES_MAX,
)
from immortal.coordinator.messenger.sockets import NOBLOCK


class PendingLimits(Struct, frozen=True):
    """Limits on the messages pending for one destination, sent or not. One message is always allowed, however large.

    ``wait_s``: longest time that a send waits for room before it is refused; 0: it does not wait; None: no limit. A
    send waits only in another thread than the messenger's, and only while that thread runs.
    """

    count_max: int = PENDING_MAX
    size_bytes_max: int = PENDING_SIZE_BYTES_MAX
    wait_s: float | None = 0.0

    def __post_init__(self) -> None:
        if self.count_max < 1 or self.size_bytes_max < 1 or (self.wait_s is not None and not self.wait_s >= 0):
            raise MessengerError(f"{self}; expected limits of 1 at least, and a wait of 0 s at least or None")


PENDING_LIMITS = PendingLimits()


class _Pending(Struct, eq=False):
    """Running totals for one destination. ``taken``: accepted messages, counted by any thread under the lock;
    ``done``: messages that are no longer pending, counted by the messenger's owner alone."""

    reserved_count: int = 0
    reserved_size_bytes: int = 0
    done_count: int = 0
    done_size_bytes: int = 0


class PendingRoom:
    """Counter of the messages pending for each destination. It blocks or refuses sends beyond the limits.

    ``may_wait``: returns True if the calling thread can wait, since another thread can make room.
    """

    def __init__(self, limits: PendingLimits, may_wait: Callable[[], bool]) -> None:
        self.refused_count = 0
        self.waited_count = 0
        self._limits = limits
        self._may_wait = may_wait
        self._by_destination: dict[str, _Pending] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting_count = 0

    def reserve(self, destination: str, size_bytes: int) -> None:
        """Count a message for ``destination``, after a wait for room. Raises PendingFullError. For any thread."""
        with self._lock:
            pending = self._by_destination.get(destination)
            if pending is None:
                pending = self._by_destination[destination] = _Pending()
            elif not self._has_room(pending, size_bytes):
                self._wait(pending, destination, size_bytes)
            pending.reserved_count += 1
            pending.reserved_size_bytes += size_bytes

    def _has_room(self, pending: _Pending, size_bytes: int) -> bool:
        count = pending.reserved_count - pending.done_count
        if not count:
            return True
        limits = self._limits
        reserved_size_bytes = pending.reserved_size_bytes - pending.done_size_bytes
        return count < limits.count_max and reserved_size_bytes + size_bytes <= limits.size_bytes_max

    def _wait(self, pending: _Pending, destination: str, size_bytes: int) -> None:
        wait_s = self._limits.wait_s
        if wait_s != 0 and self._may_wait():
            self.waited_count += 1
            self._waiting_count += 1
            try:
                self._changed.wait_for(
                    lambda: self._has_room(pending, size_bytes) or not self._may_wait(), timeout=wait_s
                )
            finally:
                self._waiting_count -= 1
        if not self._has_room(pending, size_bytes):
            self.refused_count += 1
            raise PendingFullError(
                f"{pending.reserved_count - pending.done_count} messages with "
                f"{pending.reserved_size_bytes - pending.done_size_bytes} bytes are pending for {destination}, one "
                f"with {size_bytes} bytes came, expected at most {self._limits.count_max} and "
                f"{self._limits.size_bytes_max} bytes: send later, or give the messenger other PendingLimits"
            )

    def release(self, destination: str, size_bytes: int, count: int = 1) -> None:
        """Count ``count`` messages as no longer pending. For the messenger's owner."""
        pending = self._by_destination[destination]
        pending.done_count += count
        pending.done_size_bytes += size_bytes
        if self._waiting_count:
            self.wake()

    def forget(self, destination: str, size_bytes: int, count: int) -> None:
        """Release ``count`` messages and remove the totals of ``destination``. For the messenger's owner."""
        if count:
            self.release(destination, size_bytes, count)
        with self._lock:
            pending = self._by_destination.get(destination)
            if pending is not None and pending.reserved_count == pending.done_count and not self._waiting_count:
                del self._by_destination[destination]

    def wake(self) -> None:
        """Wake waiting senders: there is room, or no thread is left that could make room."""
        with self._changed:
            self._changed.notify_all()


# ZeroMQ limits its queues by messages; clients that do not read need a limit in bytes.
#
# ZeroMQ frees messages in order, each once its connection has taken the bytes. So after every 32 KiB or more, one
# message is sent as a marker: when ZeroMQ has freed it, it has freed all messages before it.


class _SendQueue(Struct, eq=False):
    """Send queue of one connection. ``size_bytes``: all bytes not known to have left ZeroMQ."""

    size_bytes: int = 0
    unmarked_bytes: int = 0
    markers: deque[tuple[zmq.MessageTracker, int]] = field(default_factory=deque)  # (of the marker, bytes up to it)


class ClientSendQueues:
    """Send queues of clients, by routing ID: the bytes that each has in ZeroMQ. An empty queue is removed."""

    def __init__(self) -> None:
        self._queues: dict[bytes, _SendQueue] = {}
        self._size_bytes = 0

    def has_room(self, route: bytes, size_bytes: int) -> bool:
        """Return True if ``size_bytes`` can be sent to ``route`` now. A client with an empty queue can get one message
        of any size, unless the queues of all clients together are full: then only a small one."""
        queued_bytes = self._drop_sent(route) + size_bytes
        if queued_bytes > max(CLIENT_QUEUED_SIZE_BYTES_MAX, size_bytes):
            return False
        if self._size_bytes + size_bytes <= CLIENTS_QUEUED_SIZE_BYTES_MAX:
            return True
        for other in list(self._queues):
            self._drop_sent(other)
        others_bytes = self._size_bytes
        return (
            not others_bytes
            or others_bytes + size_bytes <= CLIENTS_QUEUED_SIZE_BYTES_MAX
            or (queued_bytes <= CLIENT_SHARE_SIZE_BYTES)
        )

    def send(self, send: Callable[..., object], route: bytes, data: bytes) -> None:
        """Send ``data`` as the last part of a message to ``route``, whose first part ZeroMQ has taken."""
        queue = self._queues.setdefault(route, _SendQueue())
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

    def _drop_sent(self, route: bytes) -> int:
        """Drop what ZeroMQ has sent from the queue of ``route``; return the bytes still queued."""
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
