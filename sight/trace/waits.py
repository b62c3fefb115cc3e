"""What ``async def`` handlers wait for: when an effect or a timer began, which no log says, but a replay does.

A replay tells the number of each wait as it begins (:mod:`protocol.numbers`); the result of an effect has that number
in the log, and a timer is over with the first message of the clock that says that it is due.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import Struct

from immortal.protocol.numbers import Draw, decode_numbers

KNOWN_MAX = 1_000_000  # of handlers, and of effects without a result: the oldest beyond are forgotten
_EFFECT, _TIMER = "effect ", "timer"  # what a journal calls them

T = TypeVar("T")


class Drawn(msgspec.Struct, array_like=True, frozen=True):
    """What a replay has told of one record, whose time is ``time_ns``."""

    sequence_id: int
    time_ns: int
    draws: list[Draw]


class Begun(Struct, frozen=True):
    """A wait. ``handler``: the record and message that started whose it is; None: before the replay."""

    number: int
    name: str
    sequence_id: int
    time_ns: int
    handler: tuple[int, int] | None


class Telling:
    """Makes :class:`Drawn` of what a sink of a replay is told."""

    def __init__(self) -> None:
        self._times_ns: deque[tuple[int, int]] = deque()  # of the records whose numbers are not known yet

    def record(self, sequence_id: int, time_ns: int) -> None:
        self._times_ns.append((sequence_id, time_ns))

    def numbers(self, sequence_id: int | None, data: bytes, *, complete: bool) -> Drawn | None:
        if sequence_id is None:  # an app that tells none
            return None
        while self._times_ns and self._times_ns[0][0] < sequence_id + complete:
            self._times_ns.popleft()
        if complete or not self._times_ns:
            return None
        return Drawn(sequence_id, self._times_ns[0][1], decode_numbers(data).draws)


class Waits:
    """Those of one instance that are open. ``told``: what the replay tells next, by records; None: nothing so far."""

    def __init__(self, told: Callable[[], Drawn | None]) -> None:
        self._told = told
        self._next: Drawn | None = None
        self._handlers: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._effects: OrderedDict[int, Begun] = OrderedDict()
        self._timers: list[tuple[int, int, Begun]] = []  # a heap: when due, number

    def effect(self, number: int, before: int) -> Begun | None:
        """The effect whose result is in the record ``before``: once."""
        self._advance(before)
        return self._effects.pop(number, None)

    def timers(self, since_ns: int, told_ns: int, before: int) -> list[Begun]:
        """Those due from ``since_ns`` to ``told_ns``, which a message of the record ``before`` says: each once."""
        self._advance(before)
        found = []
        while self._timers and self._timers[0][0] <= told_ns:
            due_ns, _, begun = heapq.heappop(self._timers)
            if due_ns >= since_ns:
                found.append(begun)
        return found

    def _advance(self, before: int) -> None:
        while True:
            drawn = self._next or self._told()
            self._next = None
            if drawn is None:
                return
            if drawn.sequence_id >= before:
                self._next = drawn
                return
            for draw in drawn.draws:
                self._add(drawn, draw)

    def _add(self, drawn: Drawn, draw: Draw) -> None:
        if not draw.task:
            _put(self._handlers, draw.number, (drawn.sequence_id, draw.detail))
            return
        name = draw.what.removeprefix(_EFFECT)
        begun = Begun(draw.number, name, drawn.sequence_id, drawn.time_ns, self._handlers.get(draw.task))
        if draw.what.startswith(_EFFECT):
            _put(self._effects, draw.number, begun)
        elif draw.what == _TIMER:
            heapq.heappush(self._timers, (draw.detail, draw.number, begun))


def _put(known: OrderedDict[int, T], number: int, value: T) -> None:
    known[number] = value
    if len(known) > KNOWN_MAX:
        known.popitem(last=False)
