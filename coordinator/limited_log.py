"""Warnings of what strangers can make happen at any rate: a few lines in a while, and the count of all."""

from __future__ import annotations

import time

from coordinator.logs import Events

LINES_MAX = 5  # in one period: enough to see what is going on
PERIOD_S = 10.0


class LimitedLog:
    """The lines of one kind of event. Each says how many there have been; of those left out, the last is told later."""

    def __init__(self, log: Events) -> None:
        self._log = log
        self._count = 0
        self._lines = 0  # in this period
        self._period_ends_ns = 0  # on the monotonic clock
        self._left_out: str | None = None

    def warning(self, message: str) -> None:
        self._count += 1
        now_ns = time.monotonic_ns()
        if now_ns >= self._period_ends_ns:
            self._lines = 0
            self._period_ends_ns = now_ns + int(PERIOD_S * 1e9)
        if self._lines < LINES_MAX:
            self._write(message)
        else:
            self._left_out = message

    def next_deadline_ns(self) -> int | None:
        """When :meth:`process` is to be called, on the monotonic clock."""
        return None if self._left_out is None else self._period_ends_ns

    def process(self) -> None:
        if self._left_out is not None and time.monotonic_ns() >= self._period_ends_ns:
            self._lines = 0
            self._period_ends_ns = time.monotonic_ns() + int(PERIOD_S * 1e9)
            self._write(self._left_out)

    def _write(self, message: str) -> None:
        self._lines += 1
        self._left_out = None
        self._log.warning(message, count=self._count)
