"""Effects: work in the outside world for an ``async def`` handler, which gets its logged result.

    await self.effect(fetch, url)
    await self.effect.options(retry=Retry(attempts=5), timeout=timedelta(seconds=10))(fetch, url)

An effect is run once the app is primary, at least once, until the log has a result of it. That result is the only one
that the handler ever sees; a replay takes it from the log, and runs nothing. What runs effects, and how something else
takes its place: :mod:`immortal.appsdk.effects.request`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, overload

from immortal.appsdk.calls.failures import checked_raises
from immortal.appsdk.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

CONCURRENT_EFFECTS = 32  # that run at once, by default: more threads than that rarely get more done


@dataclass(frozen=True, slots=True)
class Retry:
    """How often an effect is tried, and what for: after an exception of a type in ``on``, timeouts included.

    ``attempts`` counts the first one; None: without end. Between the first two attempts lies ``first_wait``, then each
    time ``factor`` times as much, at most ``max_wait``. After a restart of the app counting begins anew.
    Raises UsageError.
    """

    attempts: int | None = 5
    first_wait: timedelta = timedelta(seconds=1)
    factor: float = 2.0
    max_wait: timedelta = timedelta(minutes=1)
    on: tuple[type[Exception], ...] = (Exception,)

    def __post_init__(self) -> None:
        if self.attempts is not None and (not _is_int(self.attempts) or self.attempts < 1):
            raise UsageError(f"Retry(attempts={self.attempts!r}): a number from 1 was expected, or None: without end")
        for name in ("first_wait", "max_wait"):
            wait = getattr(self, name)
            if not isinstance(wait, timedelta) or wait < timedelta():
                raise UsageError(f"Retry({name}={wait!r}): a timedelta was expected, such as timedelta(seconds=1)")
        if not isinstance(self.factor, int | float) or not 1 <= self.factor < float("inf"):
            raise UsageError(f"Retry(factor={self.factor!r}): a number from 1 was expected")
        given: Any = self.on
        if not isinstance(given, tuple) or not all(isinstance(e, type) and issubclass(e, Exception) for e in given):
            raise UsageError(f"Retry(on={given!r}): a tuple of exceptions was expected, such as (ConnectionError,)")

    def wait_s(self, attempt: int) -> float:
        """Seconds between this attempt (from 1) and the next."""
        try:
            wait_s = self.first_wait.total_seconds() * self.factor ** (attempt - 1)
        except OverflowError:
            wait_s = float("inf")
        return min(wait_s, self.max_wait.total_seconds())


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


ONCE = Retry(attempts=1)


@dataclass(frozen=True, slots=True)
class EffectOptions:
    """What ``self.effect.options(...)`` was given. ``raises``: by name."""

    retry: Retry = ONCE
    timeout: timedelta | None = None
    raises: dict[str, type[Exception]] = dataclasses.field(default_factory=dict)
    key: str | None = None


class Effects:
    """``self.effect``. This one is of a plain object and of ``def`` handlers, which do not wait."""

    __slots__ = ("_options",)

    def __init__(self, options: EffectOptions | None = None) -> None:
        self._options = options or EffectOptions()

    def _with(self, options: EffectOptions) -> Effects:
        return Effects(options)

    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]: ...
    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """``await self.effect(fetch, url)``: run it outside, and wait for what it returns.

        ``function`` is a plain one of a module, with annotations: a ``def`` runs in a thread, an ``async def`` on an
        asyncio loop. It gets copies of its arguments. It is run at least once; its result is seen exactly once.
        Raises EffectFailed, and what the options declare; UsageError, TypeError for what can't be run.
        """
        raise UsageError("self.effect: only an 'async def' handler waits: a 'def' handler runs to its end at once")

    def options(
        self,
        *,
        retry: Retry | None = None,
        timeout: timedelta | None = None,
        raises: Iterable[type[Exception]] | None = None,
        key: str | None = None,
    ) -> Effects:
        """The same with other options; what is not given stays. Raises UsageError, DefinitionError.

        ``retry``: by default, one attempt. ``timeout``: of each attempt. ``raises``: exceptions that are raised in the
        handler as what they are, at once; all others become EffectFailed. ``key``: in place of the key that the SDK
        makes (see :func:`effect_context`).
        """
        options = self._options
        if retry is not None:
            if not isinstance(retry, Retry):
                raise UsageError(f"self.effect.options(retry={retry!r}): Retry(attempts=...) was expected")
            options = replace(options, retry=retry)
        if timeout is not None:
            if not isinstance(timeout, timedelta) or timeout <= timedelta():
                raise UsageError(
                    f"self.effect.options(timeout={timeout!r}): a timedelta was expected, such as timedelta(seconds=5)"
                )
            options = replace(options, timeout=timeout)
        if raises is not None:
            options = replace(options, raises=checked_raises("self.effect.options", raises))
        if key is not None:
            if not isinstance(key, str) or not key:
                raise UsageError(f"self.effect.options(key={key!r}): a str was expected that is not empty")
            options = replace(options, key=key)
        return self._with(options)


# --- inside an effect -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EffectContext:
    """What a function that runs as an effect can know of itself.

    ``key``: one for each effect that a handler asks for; the same for all attempts, after crashes too. ``attempt``:
    which one this is since the app was started, from 1.
    """

    key: str
    attempt: int


current_context: ContextVar[Callable[[], EffectContext]] = ContextVar("effect context")


def effect_context() -> EffectContext:
    """In a function that runs as an effect, and what it calls: its key and attempt. Raises UsageError elsewhere."""
    try:
        return current_context.get()()
    except LookupError:
        raise UsageError("effect_context(): only a function that is run by self.effect(...) has one") from None
