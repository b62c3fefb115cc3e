"""Events from a dispatcher to its transport, and sampled handler times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct


class BecamePrimary(Struct, frozen=True):
    """Event: all that was logged is handled, so the hooks may start."""


class OutputReady(Struct, frozen=True):
    """Event: output must be sent before more input is handled: a batch or more."""


class Goodbye(Struct, frozen=True):
    """Event: the coordinator stops cleanly; so does the app."""

    reason: str


class Refusal(Struct, frozen=True):
    """Event: the coordinator closes the connection and says why."""

    reason: str


class SnapshotBegun(Struct, frozen=True):
    """Event: a checkpoint of the present state is to be taken beside the handlers, before more input is handled.

    ``encode`` makes the pieces of its blob; it raises StateError.
    """

    encode: Callable[[], tuple[bytes, bytes]]


class Flush(Struct, frozen=True):
    """Event: output must be sent before more input is handled, as that may end the process."""


class JournalGrew(Struct, frozen=True):
    """Event: journals of waiting handlers of one name have grown long together, or have doubled since that was told."""

    handler: str
    tasks_count: int
    results_count: int
    size_bytes: int


Event = BecamePrimary | OutputReady | Goodbye | Refusal | SnapshotBegun | Flush | JournalGrew


# How long handlers take, sampled: some messages are timed each time that somebody has asked, and all others are not.
#
# To time each message would cost each. So nothing is timed until the coordinator asks, which it does where it serves
# metrics, about once a second; then the next :data:`TIMED_MAX` are.


TIMED_MAX = 32


class HandlerTimeSamples:
    """Samples of handler times. ``left``: how many next messages are timed, by ``clock_ns``. No replay needs it."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.left = 0
        self.clock_ns = clock_ns
        self._taken: list[tuple[str, int]] = []

    def add(self, name: str, duration_ns: int) -> None:
        self.left -= 1
        self._taken.append((name, duration_ns))

    def answer(self) -> dict[str, Any]:
        """Answer a request for samples: [method, ns] of what was timed since the last one.

        The next handlers are timed.
        """
        taken, self._taken = self._taken, []
        self.left = TIMED_MAX
        return {"handler": None, "times": taken}
