"""Two runs over one log: what the code of the second does alike has the number that it had in the first.

Each ``async def`` handler, and each thing that one waits for, has a number, drawn in turn: answers and the results of
effects come back with it, and random numbers follow from it. So code that leaves out a single call would shift all
numbers behind it. In a what-if the old code therefore tells what it draws, and what for, and the new code is told it
before each record. What it does alike takes the same number: the same handler instance, callee, method and arguments,
the first with the first, the second with the second. What has no counterpart has a number below 0, which no log has.

The two need not do it at the same record. What comes for something that the new code has not asked for yet is kept for
it, as long as the handler runs; and where the new code was first, it is given the number once that is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct, field

from immortal.appsdk.calls.context import Context
from immortal.appsdk.state.journal import Described, SavedTasks
from immortal.appsdk.waiting.operations import Call, Operation
from immortal.appsdk.waiting.task import Task
from immortal.appsdk.waiting.tasks import Tasks
from immortal.protocol.numbers import Draw

What = tuple[str, int]
T = TypeVar("T")


class TracedTasks(Tasks):
    """Those of a run that tells its numbers, in ``drawn``, or that is told those of another run."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.drawn: list[Draw] = []
        self.others: Counterparts | None = None
        self._since_copy: list[_Drawn] = []
        self._again: deque[_Drawn] = deque()

    def draw_number(self, operation: Operation | None = None) -> int:
        if self._again:
            drawn = self._again.popleft()
        else:
            drawn = self._draw(operation)
            self._since_copy.append(drawn)
        self._next_number = max(self._next_number, abs(drawn.number) + 1)
        if operation is not None and drawn.outcome is not None:  # it is there already, for when this waits
            self.later(partial(self.resolve, operation, *drawn.outcome))
        return drawn.number

    def _draw(self, operation: Operation | None) -> _Drawn:
        if self.others is not None:
            return self.others.drawn_for(operation)
        number = super().draw_number()
        if operation is None:
            self.drawn.append(Draw(number, 0, "", self.context.message_index))
        else:
            self.drawn.append(Draw(number, operation.task.number, *_what(operation)))
        return _Drawn(number)

    def copied(self) -> None:
        self._since_copy.clear()

    def rewinds(self) -> None:
        self._again = deque(self._since_copy)  # it draws what it drew

    def renumbered(self, own: int, number: int) -> None:
        for drawn in self._since_copy:
            if drawn.number == own:
                drawn.number = number

    def told(self, draws: Sequence[Draw]) -> None:
        """What the other run has drawn in the record that comes next."""
        if self.others is None:
            self.others = Counterparts(self)
        self.others.told(draws)

    def record_ends(self) -> None:
        self._again.clear()
        if self.others is not None:
            self.others.record_ends()

    def runs(self, number: int) -> bool:
        return number in self._tasks

    def restore(self, saved: SavedTasks) -> None:
        super().restore(saved)
        if self.others is not None:
            self.others.restored()

    def _end(self, task: Task) -> None:
        if self.others is not None:
            self.others.forget(task.number)
        super()._end(task)

    def resolve(self, operation: Any, raised: bool, value: bytes) -> None:
        if isinstance(operation, Counterpart):
            operation.outcome = (raised, value)
        else:
            super().resolve(operation, raised, value)


class _Drawn(Struct):
    """``outcome``: what has come for it before it was drawn, (whether it raised, value)."""

    number: int
    outcome: tuple[bool, bytes] | None = None


def _what(operation: Operation) -> What:
    """As a journal has it, but a call by what the log knows of its method: code may give that another name."""
    if isinstance(operation, Call):
        return f"call {operation.target.handler.method_id} of {operation.target.destination}", operation.detail
    return operation.what, operation.detail


class Counterpart:
    """What the old code waits for and the new code does not, so far. It is found in place of an Operation."""

    __slots__ = ("number", "outcome", "what")

    result_may_hold_handles = True

    def __init__(self, number: int, what: str) -> None:
        self.number = number
        self.what = what
        self.outcome: tuple[bool, bytes] | None = None

    def went_to(self, name: str) -> bool:
        return self.what.endswith(f" of {name}")

    def fits(self, saved: Described) -> bool:
        """The old code has asked for what comes for it."""
        return True


class _Handler(Struct):
    """One that both run. ``ahead``: what only the old code has done so far; ``behind``: numbers of what only the new
    code has."""

    ahead: dict[What, deque[Counterpart]] = field(default_factory=dict)
    behind: dict[What, deque[int]] = field(default_factory=dict)


def _taken(waiting: dict[What, deque[T]], what: What) -> T | None:
    """The first of them, which waits no longer."""
    if (found := waiting.get(what)) is None:
        return None
    first = found.popleft()
    if not found:
        del waiting[what]
    return first


class Counterparts:
    """What the other run has drawn, for ``tasks``."""

    def __init__(self, tasks: TracedTasks) -> None:
        self._tasks = tasks
        self._starts: dict[int, int] = {}  # of the handlers that start in this record: by the index of their message
        self._handlers: dict[int, _Handler] = {}
        self._last_own = 0

    # --- the other run ----------------------------------------------------------------------------------------------

    def told(self, draws: Sequence[Draw]) -> None:
        for draw in draws:
            if not draw.task:
                self._starts[draw.detail] = draw.number
                self._handlers[draw.number] = _Handler()
            elif (handler := self._handler(draw.task)) is not None:
                what = (draw.what, draw.detail)
                if (own := _taken(handler.behind, what)) is not None:
                    self._renumber(own, draw.number)
                else:
                    counterpart = Counterpart(draw.number, draw.what)
                    handler.ahead.setdefault(what, deque()).append(counterpart)
                    self._register(counterpart)

    def record_ends(self) -> None:
        """What the other run has started in it and this one has not will never run here."""
        for number in self._starts.values():
            self.forget(number)
        self._starts.clear()

    def forget(self, number: int) -> None:
        """The handler of that number has ended here, or never begun."""
        handler = self._handlers.pop(number, None)
        if handler is not None:
            for counterparts in handler.ahead.values():
                for counterpart in counterparts:
                    self._unregister(counterpart)

    def restored(self) -> None:
        """All that waits was registered anew."""
        for handler in self._handlers.values():
            for counterparts in handler.ahead.values():
                for counterpart in counterparts:
                    self._register(counterpart)

    # --- this run ---------------------------------------------------------------------------------------------------

    def drawn_for(self, operation: Operation | None) -> _Drawn:
        """None: for the handler that starts."""
        if operation is None:
            number = self._starts.pop(self._tasks.context.message_index, None)
            return self._own() if number is None else _Drawn(number)
        handler = self._handler(operation.task.number)
        if handler is None:
            return self._own()
        what = _what(operation)
        counterpart = _taken(handler.ahead, what)
        if counterpart is None:
            own = self._own()
            handler.behind.setdefault(what, deque()).append(own.number)
            return own
        self._unregister(counterpart)
        return _Drawn(counterpart.number, counterpart.outcome)

    def _own(self) -> _Drawn:
        self._last_own -= 1
        return _Drawn(self._last_own)

    def _handler(self, number: int) -> _Handler | None:
        """None for one that does not run here, or not there."""
        handler = self._handlers.get(number)
        if handler is None and number > 0 and self._tasks.runs(number):  # it waits since before the replay
            handler = self._handlers[number] = _Handler()
        return handler

    # --- whom what comes in finds -----------------------------------------------------------------------------------

    def _register(self, counterpart: Any) -> None:
        self._tasks.calls[counterpart.number] = counterpart
        self._tasks.effects.add(counterpart)

    def _unregister(self, counterpart: Any) -> None:
        self._tasks.calls.pop(counterpart.number, None)
        self._tasks.effects.remove(counterpart)

    def _renumber(self, own: int, number: int) -> None:
        """What waits under ``own`` is found by ``number`` from here on. Timers and events are found without."""
        operation = self._tasks.calls.get(own) or self._tasks.effects.get(own)
        if operation is not None:
            self._tasks.unregister(operation)
            operation.number = number
            self._tasks.register(operation)
            self._tasks.renumbered(own, number)
