"""Notices that a stranger, a peer, a client or an app can cause at any rate: a few of each kind, and counts."""

from __future__ import annotations

import time
from collections.abc import Hashable

from msgspec.structs import replace

from immortal.coordinator.core.notices import Notice
from immortal.coordinator.notices.sink import Sink
from immortal.protocol.rate_limit import BURST, RateLimit

LINES_MAX = BURST  # of one kind at once


class Limited:
    """A sink that gives ``sink`` a few notices of each kind; the last one that was left out is given later."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._limit = RateLimit()
        self._left_out: dict[Hashable, Notice] = {}  # the last one of its kind

    def take(self, notice: Notice) -> None:
        kind = notice.kind()
        if kind is None:
            self._sink.take(notice)
            return
        left_out = self._limit.admit(kind, time.monotonic_ns())
        kind = self._limit.counted_as(kind)
        if left_out is None:
            self._left_out[kind] = notice
        else:
            self._left_out.pop(kind, None)
            self._give(notice, left_out)

    def next_deadline_ns(self) -> int | None:
        """When :meth:`process` is to be called, on the monotonic clock."""
        return min(map(self._limit.next_ns, self._left_out)) if self._left_out else None

    def process(self) -> None:
        """Give what was left out and is due."""
        if not self._left_out:
            return
        now_ns = time.monotonic_ns()
        for kind, notice in list(self._left_out.items()):
            if self._limit.next_ns(kind) <= now_ns:
                del self._left_out[kind]
                left_out = self._limit.admit(kind, now_ns) or 1
                self._give(notice, left_out - 1)  # it was counted as well

    def _give(self, notice: Notice, left_out: int) -> None:
        self._sink.take(replace(notice, left_out=left_out) if left_out else notice)
