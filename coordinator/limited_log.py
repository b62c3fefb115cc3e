"""Warnings that a stranger, a peer, a client or an app can cause at any rate: a few lines of each kind, and counts."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass

from coordinator.logs import Events
from protocol.rate_limit import BURST, RateLimit

LINES_MAX = BURST  # of one kind at once


@dataclass(slots=True)
class _LeftOut:
    """The last line of its kind."""

    level: str
    message: str
    values: dict[str, object]


class LimitedLog:
    """Lines say how many of their kind were left out before them; the last one that was left out is written later."""

    def __init__(self, log: Events) -> None:
        self._log = log
        self._limit = RateLimit()
        self._left_out: dict[Hashable, _LeftOut] = {}

    def warning(self, message: str, *, kind: Hashable = "", **values: object) -> None:
        """``kind``: what it is about, without what a stranger can make up."""
        self.log("warning", message, kind=kind, **values)

    def log(self, level: str, message: str, *, kind: Hashable = "", **values: object) -> None:
        left_out = self._limit.admit(kind, time.monotonic_ns())
        kind = self._limit.counted_as(kind)
        if left_out is None:
            self._left_out[kind] = _LeftOut(level, message, values)
        else:
            self._left_out.pop(kind, None)
            self._write(level, message, values, left_out)

    def next_deadline_ns(self) -> int | None:
        """When :meth:`process` is to be called, on the monotonic clock."""
        return min(map(self._limit.next_ns, self._left_out)) if self._left_out else None

    def process(self) -> None:
        if not self._left_out:
            return
        now_ns = time.monotonic_ns()
        for kind, one in list(self._left_out.items()):
            if self._limit.next_ns(kind) <= now_ns:
                del self._left_out[kind]
                left_out = self._limit.admit(kind, now_ns) or 1
                self._write(one.level, one.message, one.values, left_out - 1)  # it was counted as well

    def _write(self, level: str, message: str, values: dict[str, object], left_out: int) -> None:
        if left_out:
            values = {**values, "left_out": left_out}
        getattr(self._log, level)(message, **values)
