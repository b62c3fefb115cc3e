"""Tasks become results: the functions of a worker. No I/O but that of the functions, no clock."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from immortal.appsdk.calls.annotations import resolve_hints
from immortal.appsdk.calls.codec import ValueDecoder, encode_value
from immortal.appsdk.calls.failures import text_of
from immortal.appsdk.calls.run_failures import is_failure
from immortal.appsdk.patterns.harmony.limits import REASON_SIZE_CHARS_MAX, TASK_SIZE_BYTES_MAX
from immortal.appsdk.patterns.harmony.runs import Response, Run, array, split

Function = Callable[[Any], Any]
_NIL = b"\xc0"


class Skill:
    """One function. Tasks are checked against the annotation of its parameter, where it has one.

    Raises TypeError for a function that can't take one task.
    """

    def __init__(self, name: str, function: Function) -> None:
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise TypeError(f"{name!r}: a function of one task was expected, not {function!r}")
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except ValueError:  # a built-in one that does not say
            parameters = []
        hint: Any = Any
        if parameters and parameters[0].annotation is not inspect.Parameter.empty:
            hint = resolve_hints(function)[parameters[0].name]
        try:
            self._one = ValueDecoder(hint)
            self._many = ValueDecoder(list[hint])
        except TypeError as error:
            raise TypeError(f"{name!r}: tasks of type {hint!r} can't be sent: {error}") from None
        self.function = function

    def tasks(self, run: Run) -> Sequence[Any]:
        """One for each, or a :class:`Misfit`."""
        try:
            found: list[Any] = self._many.decode(run.tasks)
        except BaseException as error:  # one of them does not fit
            if not is_failure(error):
                raise
            return [self._task(raw) for raw in split(run.tasks)]
        return found

    def _task(self, raw: msgspec.Raw) -> Any:
        try:
            return self._one.decode(raw)
        except BaseException as error:
            if not is_failure(error):
                raise
            return Misfit(text_of(error))


class Misfit:
    """A task that is not what the function takes."""

    def __init__(self, why: str) -> None:
        self.why = why


def skills(functions: Mapping[str, Function]) -> dict[str, Skill]:
    """Raises TypeError."""
    if not isinstance(functions, Mapping) or not functions:
        raise TypeError(f'{functions!r}: functions by name were expected, such as {{"square": square}}')
    return {name: Skill(name, function) for name, function in functions.items()}


class Results:
    """Of some tasks of a run, one after the other, until they are sent."""

    def __init__(self, batch: str, first: int) -> None:
        self._batch = batch
        self._first = first
        self._values: list[bytes] = []
        self._failures: dict[int, str] = {}
        self.size_bytes = 0

    @property
    def count(self) -> int:
        return len(self._values)

    def do(self, function: Function, task: Any) -> None:
        """An exception is a result as well: the task would raise it again."""
        try:
            if isinstance(task, Misfit):
                raise TypeError(f"the task is not what the function takes: {task.why}")
            value = encode_value(function(task))
            if len(value) > TASK_SIZE_BYTES_MAX:
                raise ValueError(f"a result of {len(value)} bytes, at most {TASK_SIZE_BYTES_MAX} were expected")
        except BaseException as error:
            if not is_failure(error):
                raise
            reason = f"{type(error).__name__}: {text_of(error)}"
            self._failures[self._first + self.count] = reason[:REASON_SIZE_CHARS_MAX]
            value = _NIL
        self._values.append(value)
        self.size_bytes += len(value)

    def take(self) -> Response:
        """What is done; the next begins behind it."""
        response = Response(self._batch, self._first, self.count, array(self._values), self._failures)
        self._first += self.count
        self._values, self._failures, self.size_bytes = [], {}, 0
        return response
