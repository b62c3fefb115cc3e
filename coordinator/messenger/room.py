"""How much may be pending for each destination, and who waits for room."""

from __future__ import annotations

import threading
from collections.abc import Callable

from msgspec import Struct

from immortal.coordinator.messenger.errors import MessengerError, PendingFullError
from immortal.coordinator.messenger.limits import PENDING_MAX, PENDING_SIZE_BYTES_MAX


class PendingLimits(Struct, frozen=True):
    """What may be pending, sent or not, for one destination; one message always may, however large.

    ``wait_s``: how long a send waits for room before it is refused; 0: not at all, None: as long as it takes. It waits
    only in other threads than the messenger's, and only while that runs.
    """

    count_max: int = PENDING_MAX
    size_bytes_max: int = PENDING_SIZE_BYTES_MAX
    wait_s: float | None = 0.0

    def __post_init__(self) -> None:
        if self.count_max < 1 or self.size_bytes_max < 1 or (self.wait_s is not None and not self.wait_s >= 0):
            raise MessengerError(f"{self}; expected limits of 1 at least, and a wait of 0 s at least or None")


PENDING_LIMITS = PendingLimits()


class _Pending(Struct, eq=False):
    """To one destination, ever: what was taken, by any thread under the lock, and what of it is pending no more, which
    only the messenger's owner writes."""

    taken_count: int = 0
    taken_size_bytes: int = 0
    done_count: int = 0
    done_size_bytes: int = 0


class Room:
    """What is pending for each destination. ``may_wait``: whether the calling thread may wait, as there is another that
    can make room."""

    def __init__(self, limits: PendingLimits, may_wait: Callable[[], bool]) -> None:
        self.refused_count = 0
        self.waited_count = 0
        self._limits = limits
        self._may_wait = may_wait
        self._by_destination: dict[str, _Pending] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting_count = 0

    def take(self, destination: str, size_bytes: int) -> None:
        """Count one more message. Raises PendingFullError. For any thread."""
        with self._lock:
            pending = self._by_destination.get(destination)
            if pending is None:
                pending = self._by_destination[destination] = _Pending()
            elif not self._has_room(pending, size_bytes):
                self._wait(pending, destination, size_bytes)
            pending.taken_count += 1
            pending.taken_size_bytes += size_bytes

    def _has_room(self, pending: _Pending, size_bytes: int) -> bool:
        count = pending.taken_count - pending.done_count
        if not count:
            return True
        limits = self._limits
        taken_size_bytes = pending.taken_size_bytes - pending.done_size_bytes
        return count < limits.count_max and taken_size_bytes + size_bytes <= limits.size_bytes_max

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
                f"{pending.taken_count - pending.done_count} messages with "
                f"{pending.taken_size_bytes - pending.done_size_bytes} bytes are pending for {destination}, one with "
                f"{size_bytes} bytes came, expected at most {self._limits.count_max} and "
                f"{self._limits.size_bytes_max} bytes: send later, or give the messenger other PendingLimits"
            )

    def give_back(self, destination: str, size_bytes: int, count: int = 1) -> None:
        """``count`` messages are not pending any more. For the messenger's owner."""
        pending = self._by_destination[destination]
        pending.done_count += count
        pending.done_size_bytes += size_bytes
        if self._waiting_count:
            self.wake()

    def forget(self, destination: str, size_bytes: int, count: int) -> None:
        """``count`` messages are not pending any more, and no more are to come. For the messenger's owner."""
        if count:
            self.give_back(destination, size_bytes, count)
        with self._lock:
            pending = self._by_destination.get(destination)
            if pending is not None and pending.taken_count == pending.done_count and not self._waiting_count:
                del self._by_destination[destination]

    def wake(self) -> None:
        """Let those that wait look again: there is room, or nobody to make any."""
        with self._changed:
            self._changed.notify_all()
