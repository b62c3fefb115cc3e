"""Effect stubs: functions of the test run in place of effects that work in the outside world."""

from __future__ import annotations

import asyncio
import heapq
import inspect
import itertools
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from immortal.appsdk.calls.user_code import is_user_failure
from immortal.appsdk.effects.effect import EffectRequest, current_context, encodable
from immortal.appsdk.errors import UsageError

EffectStubs = Mapping[Callable[..., Any], Callable[..., Any]]
"""By the function that ``immortal.effect`` is given: what runs in its place, with its arguments."""


class StubEffectRunner:
    """EffectRunner without a thread: :meth:`run` makes the attempts that are due, by the test's clock.

    ``stand_ins`` of one life of an app; what it has not answered the next one asks for again.
    """

    def __init__(self, stand_ins: EffectStubs, now_ns: Callable[[], int]) -> None:
        self._stand_ins = stand_ins
        self._now_ns = now_ns
        self._due: list[tuple[int, int, EffectRequest, int]] = []  # a heap of (when, number, request, attempt)
        self._numbers = itertools.count()

    def start(self, request: EffectRequest) -> None:
        self._plan(request, self._now_ns(), 1)

    def cancel(self, request: EffectRequest) -> None:
        """Do nothing: the attempt is dropped when it is due."""

    def _plan(self, request: EffectRequest, time_ns: int, attempt: int) -> None:
        heapq.heappush(self._due, (time_ns, next(self._numbers), request, attempt))

    @property
    def next_due_ns(self) -> int | None:
        while self._due and self._due[0][2].is_cancelled:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def run(self) -> None:
        """Make each attempt that is due.

        Raises UsageError where there is nothing to run, TypeError for a result that is none of the function's.
        """
        while (due_ns := self.next_due_ns) is not None and due_ns <= self._now_ns():
            _, _, request, attempt = heapq.heappop(self._due)
            stand_in = self._stand_ins.get(request.function)
            if stand_in is None:
                positional, named = request.arguments
                given = ", ".join([*map(repr, positional), *(f"{name}={value!r}" for name, value in named.items())])
                raise UsageError(
                    f"a handler asks for the effect {request.name}({given}), and the test does not say what is to run "
                    f"in its place: env.start(..., effects={{{request.function.__name__}: ...}})"
                )
            request.attempt = attempt
            try:
                value = self._call(stand_in, request, attempt)
            except BaseException as error:
                if not is_user_failure(error):
                    raise
                wait_s = request.wait_s(error, attempt, self._now_ns())
                if wait_s is None:
                    request.raised(error, attempt)
                else:
                    request.failure = f"{type(error).__name__}: {encodable(error)}"
                    self._plan(request, due_ns + int(wait_s * 1e9), attempt + 1)
            else:
                request.returned(value)

    @staticmethod
    def _call(stand_in: Callable[..., Any], request: EffectRequest, attempt: int) -> Any:
        def call() -> Any:
            current_context.set(partial(request.context, attempt))
            positional, named = request.arguments
            value = stand_in(*positional, **named)
            return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value

        return request.new_context().run(call)


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value
