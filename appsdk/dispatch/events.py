"""Events from a dispatcher to its transport, and sampled handler times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msgspec import Struct


class BecamePrimary(Struct, frozen=True):
    """Event: all logged input is handled, so the hooks can start."""


class OutputReady(Struct, frozen=True):
    """Event: output must be sent before more input is handled."""


class Goodbye(Struct, frozen=True):
    """Event: the coordinator stops cleanly, and so must the app."""

    reason: str


class Refusal(Struct, frozen=True):
    """Event: the coordinator closes the connection and says why."""

    reason: str


class SnapshotBegun(Struct, frozen=True):
    """Event: a checkpoint of the present state must be taken beside the handlers, before more input is handled.

    ``encode`` returns its blob: the size in bytes, and the pieces. It raises StateError.
    """

    encode: Callable[[], tuple[int, Iterable[bytes]]]


class Flush(Struct, frozen=True):
    """Event: output must be sent before more input is handled, since the handling can end the process."""


class JournalGrew(Struct, frozen=True):
    """Event: the journals of waiting handlers of one name are long together, or have doubled since the last report."""

    handler: str
    tasks_count: int
    results_count: int
    size_bytes: int


Event = BecamePrimary | OutputReady | Goodbye | Refusal | SnapshotBegun | Flush | JournalGrew


class Blob:
    """Output of a known size whose pieces are made when they are sent: the state in a checkpoint."""

    def __init__(self, size_bytes: int, pieces: Iterator[bytes]) -> None:
        self._size_bytes = size_bytes
        self.pieces = pieces

    def __len__(self) -> int:
        return self._size_bytes


# Times of handlers, sampled.
#
# Timing each message would cost time for each. So nothing is timed until the coordinator asks, about once a second
# where it serves metrics; then the next :data:`TIMED_MAX` messages are timed.


TIMED_MAX = 32


class HandlerTimeSamples:
    """Samples of handler times. ``remaining``: number of messages still to time with ``clock_ns``.

    No replay needs them.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.remaining = 0
        self.clock_ns = clock_ns
        self._samples: list[tuple[str, int]] = []

    def add(self, name: str, duration_ns: int) -> None:
        self.remaining -= 1
        self._samples.append((name, duration_ns))

    def answer(self) -> dict[str, Any]:
        """Return the samples since the last request, as [method, ns], and time the next handlers."""
        samples, self._samples = self._samples, []
        self.remaining = TIMED_MAX
        return {"handler": None, "times": samples}
