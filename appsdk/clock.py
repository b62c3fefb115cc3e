"""Timers and schedules: what is due when. It reads no clock: an impulse in the log says what time it is."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from appsdk.handlers import Handler
from appsdk.operations import Timer
from appsdk.schedules import Cron, Period

_UNUSED_COUNT_MIN = 64


class ToldTime(msgspec.Struct, array_like=True, frozen=True):
    """What the log brings, both in ns since the Unix epoch. ``decided``: see :meth:`Clock.decide`."""

    time_ns: int
    decided: dict[int, int] = {}


class Clock:
    """``schedules``: when each handler with a schedule is due next, in ns since the Unix epoch, by method ID."""

    def __init__(self) -> None:
        self.schedules: dict[int, int] = {}
        self._timers: dict[int, Timer] = {}
        self._due: list[tuple[int, int]] = []  # a heap of (when, number of the timer), cancelled ones among them

    def add(self, timer: Timer) -> None:
        self._timers[timer.number] = timer
        heapq.heappush(self._due, (timer.detail, timer.number))

    def remove(self, timer: Timer) -> None:
        self._timers.pop(timer.number, None)
        if len(self._due) > 2 * len(self._timers) + _UNUSED_COUNT_MIN:
            self._due = [(timer.detail, number) for number, timer in self._timers.items()]
            heapq.heapify(self._due)

    def next_due_ns(self, scheduled: Iterable[Handler[Any, Any]]) -> int | None:
        """When there is something to do next; None: never. A schedule that has not begun is due at once."""
        while self._due and self._due[0][1] not in self._timers:
            heapq.heappop(self._due)
        due = [self.schedules.get(handler.method_id, 0) for handler in scheduled]
        due += [self._due[0][0]] if self._due else []
        return min(due, default=None)

    def take_timers(self, time_ns: int) -> list[Timer]:
        """Those that are due at ``time_ns``, in the order of their times."""
        found = []
        while self._due and self._due[0][0] <= time_ns:
            _, number = heapq.heappop(self._due)
            if (timer := self._timers.get(number)) is not None:
                found.append(timer)
        return found

    def decide(self, time_ns: int, scheduled: Iterable[Handler[Any, Any]]) -> dict[int, int]:
        """For the handlers with cron expressions that are due at ``time_ns``: when they are next. Not for replays."""
        return {
            handler.method_id: handler.schedule.next_ns(time_ns)
            for handler in scheduled
            if isinstance(handler.schedule, Cron) and self.schedules.get(handler.method_id, 0) <= time_ns
        }

    def take_schedules(
        self, time_ns: int, decided: Mapping[int, int], scheduled: Iterable[Handler[Any, Any]]
    ) -> list[Handler[Any, Any]]:
        """The handlers that are due at ``time_ns``, each once, however often it would have been its turn.

        ``decided``: see :meth:`decide`. A schedule that the log knows nothing of, in a replay, has not begun.
        """
        found, schedules = [], {}
        for handler in scheduled:
            due_ns = self.schedules.get(handler.method_id)
            if due_ns is not None and due_ns <= time_ns:
                found.append(handler)
            next_ns = due_ns
            if due_ns is None or due_ns <= time_ns:
                if isinstance(handler.schedule, Period):
                    next_ns = handler.schedule.next_ns(time_ns, due_ns)
                else:
                    next_ns = decided.get(handler.method_id)
            if next_ns is not None:
                schedules[handler.method_id] = next_ns
        self.schedules = schedules
        return found
