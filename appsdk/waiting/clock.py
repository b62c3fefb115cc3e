"""Timers and schedules: what is due when. It reads no clock: an impulse in the log says what time it is."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.outbox import make_writer
from immortal.appsdk.handlers.decorators import CLOCK_METHOD_ID, Handler
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.handlers.schedules import Cron, Period
from immortal.appsdk.state.journal import SavedTasks
from immortal.appsdk.waiting.operations import Timer
from immortal.protocol.messages import RpcType

_UNUSED_COUNT_MIN = 64
_write_time = make_writer("the clock", CLOCK_METHOD_ID, RpcType.IMPULSE)


class ToldTime(msgspec.Struct, array_like=True, frozen=True):
    """What the log brings, in ns since the Unix epoch. ``decided``: see :meth:`Clock.decide`.

    ``jumped_ns``: the clock was stepped ahead by that, to ``time_ns``; 0: it was not.
    """

    time_ns: int
    decided: dict[int, int] = {}
    jumped_ns: int = 0


class Deadline(msgspec.Struct, frozen=True):
    """By when the handler ``number`` is to have ended: as a timer that began with it. Times in ns since the epoch."""

    number: int
    began_ns: int
    detail: int  # when it is due, as a timer has it


Due: TypeAlias = Timer | Deadline


class Clock:
    """``schedules``: when each handler with a schedule is due next, in ns since the Unix epoch, by method ID.

    ``jumps``: (since, by): what began before ``since`` is due later by as much, for the clock was stepped in between.
    """

    def __init__(self) -> None:
        self.is_needed = False  # something may wait for a time
        self.schedules: dict[int, int] = {}
        self.jumps: list[tuple[int, int]] = []
        self.jumped_to_ns = 0  # by the last jump that the log has
        self._timers: dict[int, Due] = {}
        self._due: list[tuple[int, int]] = []  # a heap of (when, number of the timer), cancelled ones among them
        self._scheduled: list[Handler[Any, Any]] = []

    def use(self, definition: Definition) -> None:
        """From here on it is for this class's handlers. What sleeps may be in records that are still to come."""
        handlers = definition.handlers.values()
        self._scheduled = [handler for handler in handlers if handler.schedule]
        self.is_needed = bool(self._scheduled) or any(handler.is_async for handler in handlers)

    def restore(self, saved: SavedTasks) -> None:
        """No timer is set."""
        self.schedules, self.jumps, self.jumped_to_ns = dict(saved.schedules), list(saved.jumps), saved.jumped_to_ns
        self._timers.clear()
        self._due.clear()

    def add(self, timer: Due) -> None:
        self._timers[timer.number] = timer
        heapq.heappush(self._due, (self.due_ns(timer), timer.number))

    def has(self, timer: Due) -> bool:
        return self._timers.get(timer.number) is timer

    def forget(self, number: int) -> None:
        """The timer of that number, if there is one."""
        self._timers.pop(number, None)
        if len(self._due) > 2 * len(self._timers) + _UNUSED_COUNT_MIN:
            self._make_heap()

    def _make_heap(self) -> None:
        self._due = [(self.due_ns(timer), number) for number, timer in self._timers.items()]
        heapq.heapify(self._due)

    def due_ns(self, timer: Due) -> int:
        began_ns = timer.began_ns
        if not self.jumps or began_ns is None:
            return timer.detail
        return timer.detail + sum(by_ns for since_ns, by_ns in self.jumps if began_ns < since_ns)

    def jumped(self, since_ns: int, by_ns: int) -> None:
        """The clock was stepped: what is to last a while, and what runs in each period, is due later by as much."""
        self.jumps = [*self.jumps_that_count(), (since_ns, by_ns)]
        self.jumped_to_ns = since_ns
        self._make_heap()
        for handler in self._scheduled:
            if isinstance(handler.schedule, Period) and handler.method_id in self.schedules:
                self.schedules[handler.method_id] += by_ns

    def jumps_that_count(self) -> list[tuple[int, int]]:
        """Those that some timer began before."""
        if not self.jumps:
            return []
        first_ns = min((timer.began_ns for timer in self._timers.values() if timer.began_ns is not None), default=None)
        return [] if first_ns is None else [jump for jump in self.jumps if first_ns < jump[0]]

    def next_due_ns(self) -> int | None:
        """When there is something to do next; None: never. A schedule that has not begun is due at once."""
        while self._due and self._due[0][1] not in self._timers:
            heapq.heappop(self._due)
        due = [self.schedules.get(handler.method_id, 0) for handler in self._scheduled]
        due += [self._due[0][0]] if self._due else []
        return min(due, default=None)

    def describe(self) -> list[dict[str, object]]:
        """Each handler with a schedule, in plain values; ``due_ns`` None: it has not begun."""
        return [
            {
                "handler": handler.function.__qualname__,
                "schedule": handler.schedule.text,
                "due_ns": self.schedules.get(handler.method_id),
            }
            for handler in self._scheduled
            if handler.schedule
        ]

    def take_timers(self, time_ns: int) -> list[Due]:
        """Those that are due at ``time_ns``, in the order of their times."""
        found = []
        while self._due and self._due[0][0] <= time_ns:
            _, number = heapq.heappop(self._due)
            timer = self._timers.get(number)
            if timer is not None and self.due_ns(timer) <= time_ns:  # a deadline may have been put off
                found.append(timer)
        return found

    def decide(self, time_ns: int) -> dict[int, int]:
        """For the handlers with cron expressions that are due at ``time_ns``: when they are next. Not for replays."""
        return {
            handler.method_id: handler.schedule.next_ns(time_ns)
            for handler in self._scheduled
            if isinstance(handler.schedule, Cron) and self.schedules.get(handler.method_id, 0) <= time_ns
        }

    def take_schedules(self, time_ns: int, decided: Mapping[int, int]) -> list[Handler[Any, Any]]:
        """The handlers that are due at ``time_ns``, each once, however often it would have been its turn.

        ``decided``: see :meth:`decide`. A schedule that the log knows nothing of, in a replay, has not begun.
        """
        found, schedules = [], {}
        for handler in self._scheduled:
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


class TimeImpulses:
    """The time, put into the log as impulses to oneself: once something is due, and where the clock was stepped.

    None before :meth:`start`. Times in ns since the Unix epoch.
    """

    def __init__(self, context: Context, clock: Clock) -> None:
        self._context = context
        self._clock = clock
        self._is_primary = False
        self._told_ns: int | None = None  # the time in one that is on its way
        self._jumps: list[tuple[int, int]] = []  # to be told once it is primary

    @property
    def next_due_ns(self) -> int | None:
        """When :meth:`tell` is to be called; None: not yet, or never."""
        if not self._is_primary or self._told_ns is not None:
            return None
        due_ns, late_ns = self._clock.next_due_ns(), self._context.multicasts.due_ns
        return due_ns if late_ns is None or (due_ns is not None and due_ns < late_ns) else late_ns

    def start(self) -> None:
        """The app is primary: what it says comes back by the log."""
        self._is_primary = True
        self._tell_jumps()

    def tell(self, time_ns: int) -> None:
        """It is ``time_ns``."""
        self._told_ns = time_ns
        decided = self._clock.decide(time_ns)
        self._context.outbox.impulses.append_own(_write_time, (time_ns, decided) if decided else (time_ns,))

    def came_back(self, time_ns: int) -> None:
        if self._told_ns is not None and time_ns >= self._told_ns:
            self._told_ns = None

    def jumped(self, time_ns: int, jumped_ns: int) -> None:
        """The clock was stepped by ``jumped_ns``, to ``time_ns``."""
        self._jumps.append((time_ns, jumped_ns))
        self._tell_jumps()

    def _tell_jumps(self) -> None:
        """What sleeps is to sleep no less for it: that is for the log to say, to each replay."""
        if self._is_primary:
            for time_ns, jumped_ns in self._jumps:
                if self._clock.is_needed and time_ns > self._clock.jumped_to_ns:  # else the log has it
                    told = time_ns, self._clock.decide(time_ns), jumped_ns
                    self._context.outbox.impulses.append_own(_write_time, told)
            self._jumps.clear()
