"""Effects: their options for users (Retry, options, context), their functions, and the request that runs one.

    await immortal.effect(fetch, url)
    await immortal.effect.options(retry=Retry(attempts=5), timeout=timedelta(seconds=10))(fetch, url)

Once the app is primary, an effect runs at least once, until the log has its result. The handler only ever sees that
result; a replay takes it from the log and runs nothing. :mod:`immortal.appsdk.effects.runner` runs effects; below,
:class:`EffectRunner` says how another runner replaces it.
"""

from __future__ import annotations

import contextvars
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import msgspec

from immortal.appsdk.calls.codec import ArgumentCodec, check_value, encoder, signature_of
from immortal.appsdk.calls.failures import argument_mismatch
from immortal.appsdk.calls.user_code import copy_of_context, describe_encoded, is_user_failure, user_traceback
from immortal.appsdk.errors import DefinitionError, EffectFailed, UsageError
from immortal.appsdk.state.journal import declared_name, decode_raised, encode_raised
from immortal.protocol import decoding

CONCURRENT_EFFECTS = 32  # at once, by default: more threads than that rarely get more done


PROGRAM_ERRORS: tuple[type[Exception], ...] = (
    TypeError,
    NameError,
    AttributeError,
    LookupError,  # as KeyError, IndexError
    ArithmeticError,  # as ZeroDivisionError
    AssertionError,
    ImportError,
    SyntaxError,
    NotImplementedError,
    RecursionError,
    UsageError,
    DefinitionError,
)
"""Exceptions that are clearly errors of the program: by default they are not retried."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Retry policy of an effect: how often, and after which exceptions (timeouts included).

    ``attempts`` counts the first one too, and starts again after a restart of the app; None: without end. The wait
    after the first attempt is ``first_wait``, each later one ``factor`` times as long, at most ``max_wait``; each wait
    is shortened at random, by half at most. No attempt begins later than ``give_up_after`` after the handler's request
    (None: no limit). An exception is retried if it is one of ``on`` and none of ``not_on``; if it is one of both, the
    class nearer to it decides, and ``on`` if they are equal. Other BaseExceptions, such as SystemExit, count as
    Exception. Raises UsageError.
    """

    attempts: int | None = None
    first_wait: timedelta = timedelta(seconds=1)
    factor: float = 2.0
    max_wait: timedelta = timedelta(minutes=1)
    on: tuple[type[Exception], ...] = (Exception,)
    not_on: tuple[type[Exception], ...] = PROGRAM_ERRORS
    give_up_after: timedelta | None = None

    def __post_init__(self) -> None:
        if self.attempts is not None and (not _is_int(self.attempts) or self.attempts < 1):
            raise UsageError(f"Retry(attempts={self.attempts!r}): a number from 1 was expected, or None: without end")
        for name in ("first_wait", "max_wait", "give_up_after"):
            wait = getattr(self, name)
            if name == "give_up_after" and wait is None:
                continue
            if not isinstance(wait, timedelta) or wait < timedelta():
                raise UsageError(f"Retry({name}={wait!r}): a timedelta was expected, such as timedelta(seconds=1)")
        if not isinstance(self.factor, int | float) or not 1 <= self.factor < float("inf"):
            raise UsageError(f"Retry(factor={self.factor!r}): a number from 1 was expected")
        for name in ("on", "not_on"):
            given = getattr(self, name)
            if not isinstance(given, tuple) or not all(isinstance(e, type) and issubclass(e, Exception) for e in given):
                raise UsageError(
                    f"Retry({name}={given!r}): a tuple of exceptions was expected, such as (ConnectionError,)"
                )

    def is_for(self, error: BaseException) -> bool:
        """Return True if an attempt that raised ``error`` is retried."""
        kinds = type(error).__mro__ if isinstance(error, Exception) else (Exception,)
        nearest = next((one for one in kinds if one in self.on or one in self.not_on), None)
        return nearest in self.on

    def wait_s(self, attempt: int) -> float:
        """Return the longest wait between this attempt (from 1) and the next, in seconds."""
        try:
            wait_s = self.first_wait.total_seconds() * self.factor ** (attempt - 1)
        except OverflowError:
            wait_s = float("inf")
        return min(wait_s, self.max_wait.total_seconds())


def _restore_retry(retry: Retry, state: list[Any]) -> None:
    """Restore a pickled Retry; a Retry of an earlier version lacks the last fields."""
    fields = dataclasses.fields(retry)
    for one, value in zip(fields, [*state, *(one.default for one in fields[len(state) :])], strict=True):
        object.__setattr__(retry, one.name, value)


Retry.__setstate__ = _restore_retry  # type: ignore[attr-defined]  # dataclass replaces one in the class, in Python 3.11.2


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class EffectOptions:
    """Options given to ``immortal.effect.options(...)``. ``raises``: exceptions by name."""

    retry: Retry = Retry()
    timeout: timedelta | None = None
    raises: dict[str, type[Exception]] = dataclasses.field(default_factory=dict)
    key: str | None = None


# --- inside an effect -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EffectContext:
    """Context of a function that runs as an effect.

    ``key``: idempotency key of this effect: the same for all attempts, after crashes too. ``attempt``: the number of
    this attempt since the start of the app, from 1.
    """

    key: str
    attempt: int


current_context: ContextVar[Callable[[], EffectContext]] = ContextVar("effect context")


def effect_context() -> EffectContext:
    """Return key and attempt of the effect that runs or calls this function. Raises UsageError outside of effects."""
    try:
        return current_context.get()()
    except LookupError:
        raise UsageError("effect_context(): only a function that is run by immortal.effect(...) has one") from None


# Between the handler that asks for an effect and the runner that runs it.
#
# The runner of an app's process is :mod:`appsdk.effects.runner`. Another one, for example a test's, is given to
# :class:`appsdk.dispatch.dispatcher.Dispatcher` as ``effects``. It is an :class:`EffectRunner`. Once the app is primary
# it gets each effect as an :class:`EffectRequest`, runs it in any way (``request.call()`` runs the user's function),
# and answers with ``request.returned(value)`` or ``request.raised(error)``, at once or later, from any thread. The
# answer is sent as an impulse to oneself. Without a runner, as in each replay, effects wait.


FAILURE_TEXT_CHARACTERS_MAX = 10_000  # of the message, and of the traceback's end: both are logged
_FAILED = ""  # the name under which an EffectFailed travels: no class has it


class EffectFunction:
    """Function of an effect, with the codec of its arguments and result. Raises UsageError, DefinitionError."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = _checked_name(function)
        self.is_async = inspect.iscoroutinefunction(function)
        try:
            self.codec = ArgumentCodec(function, _checked_signature(self.name, function))
            self.decode_result = self.codec.decode_result
        except NameError as error:
            raise DefinitionError(f"{self.name}: an annotation can't be resolved: {error}") from error

    def encode_arguments(self, arguments: tuple[Any, ...]) -> bytes:
        """Encode arguments by position. Raises TypeError for arguments that do not fit the annotations."""
        _, encoded = self.codec.encoded(arguments)
        try:
            self.arguments(encoded)
        except Exception as error:
            raise TypeError(argument_mismatch(self.codec, error, encoded, 0)) from None
        return encoded

    def arguments(self, encoded: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Decode arguments by position and by name."""
        return self.codec.split_keywords(self.codec.decode(encoded))

    def describe(self, encoded: bytes) -> str:
        """Return the call as text, without secrets: ``unlock(bike=7)``."""
        return f"{self.name}{describe_encoded(encoded, self.codec.signature.parameters, self.name)}"

    def encode_result(self, value: Any) -> bytes:
        """Encode a result. Raises TypeError for a value that does not fit its annotation."""
        try:
            encoded = self.codec.encode_result(value)
            check_value("it", encoded)
            self.decode_result(encoded)
        except BaseException as error:  # msgspec's own, and what a type's __post_init__ raises
            if not is_user_failure(error):
                raise
            raise TypeError(
                f"{self.name} returned a {type(value).__name__} that can't be kept: {encodable(error)}"
            ) from error
        return encoded

    def encode_error(self, error: BaseException, attempts: int, raises: Mapping[str, type[Exception]]) -> bytes:
        """Encode an error as itself if it is declared and can be encoded; otherwise as an EffectFailed."""
        if (name := declared_name(raises, error)) is not None:
            try:
                return encode_raised(name, error)
            except BaseException as problem:
                if not is_user_failure(problem):
                    raise
                error = TypeError(f"{name}, which {self.name} raised, can't be encoded: {encodable(problem)}")
        message = encodable(error)[:FAILURE_TEXT_CHARACTERS_MAX]
        trace = encodable(user_traceback(error))[-FAILURE_TEXT_CHARACTERS_MAX:]
        return encoder.encode((_FAILED, (self.name, type(error).__name__, message, trace, attempts), {}))

    def decode_error(self, data: bytes, raises: Mapping[str, type[Exception]]) -> Exception:
        """Decode an error that :meth:`encode_error` encoded. Raises msgspec.DecodeError, LookupError."""
        name, arguments = decoding.decode(data, type=tuple[str, list[Any], Any])[:2]
        if name == _FAILED:
            return EffectFailed(*msgspec.convert(arguments, tuple[str, str, str, str, int]))
        return decode_raised(raises, f"the effect {self.name}", data)


def encodable(text: object) -> str:
    """Return the text of an object with unencodable characters replaced."""
    try:
        return str(text).encode("utf-8", "replace").decode()
    except BaseException as error:  # a __str__ of the user's
        if not is_user_failure(error):
            raise
        return f"its str() raises {type(error).__name__}"


def _checked_name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", None)
    problem = ""
    if not isinstance(name, str) or isinstance(function, type) or not callable(function):
        problem = "call handlers without immortal.effect, and anything else in a function of your own"
    elif inspect.ismethod(function):
        problem = "an effect runs beside the handlers, where there is no self"
    elif "<" in name:
        problem = "one inside another shares variables with it, of which no log knows: pass them as arguments"
    if problem:
        raise UsageError(
            f"immortal.effect({name or repr(function)}, ...): a function of a module was expected: {problem}"
        )
    return str(name)


def _checked_signature(name: str, function: Callable[..., Any]) -> inspect.Signature:
    try:
        signature = signature_of(function)
    except ValueError as error:
        raise UsageError(
            f"immortal.effect({name}, ...): it has no signature: write a function of your own that calls it"
        ) from error
    for parameter in signature.parameters.values():
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise UsageError(
                f"immortal.effect({name}, ...): its parameters are not listed one by one ({parameter}): write a "
                f"function of your own that calls it"
            )
    empty = inspect.Parameter.empty
    missing = [one.name for one in signature.parameters.values() if one.annotation is empty]
    missing += ["return"] if signature.return_annotation is empty else []
    if missing:
        raise UsageError(
            f"immortal.effect({name}, ...): {', '.join(missing)}: no annotation to encode and check values by: "
            f"add it, or write a function of your own that calls it"
        )
    return signature


@dataclass(slots=True, eq=False, repr=False)
class EffectRequest:
    """Request to run one effect. ``number``: unique in the life of the instance; for the rest see ``immortal.effect``.
    ``encoded``: the arguments.

    ``stand_in``: function that :meth:`call` and :meth:`call_async` call in place of the user's; None: none.
    ``is_done``: it has been answered. ``is_cancelled``: nobody waits for it any more. ``attempt``: the last one that
    began, from 1; 0: none yet. ``failure``: text of the previous attempt's error. ``since_ns``: time of the handler's
    request, by the instance's clock; 0: not in the log. ``report``: called with the error and the number of attempts
    when the effect fails for good.
    """

    number: int
    _function: EffectFunction
    encoded: bytes
    options: EffectOptions
    _make_key: Callable[[], str]
    _send: Callable[[bool, bytes], None]
    _variables: contextvars.Context = dataclasses.field(default_factory=contextvars.Context)
    since_ns: int = 0
    report: Callable[[BaseException, int], None] = lambda error, attempts: None
    stand_in: Callable[..., Any] | None = None
    attempt: int = 0
    failure: str = ""
    is_done: bool = False
    is_cancelled: bool = False
    try_now: Callable[[], bool] | None = None  # begins the next attempt now; returns True if one was waiting

    def __repr__(self) -> str:
        return f"<effect {self.name}, {self.key}>"

    @property
    def key(self) -> str:
        """Idempotency key of the effect, computed at each use: few functions ask for it."""
        return self._make_key()

    @property
    def name(self) -> str:
        return self._function.name

    @property
    def function(self) -> Callable[..., Any]:
        """User's function; together with :attr:`arguments` for runners that do something else instead."""
        return self._function.function

    @property
    def arguments(self) -> tuple[Sequence[Any], dict[str, Any]]:
        """Copies of the arguments by position and by name."""
        return self._function.arguments(self.encoded)

    @property
    def is_async(self) -> bool:
        """True if the function is an ``async def``."""
        return self._function.is_async if self.stand_in is None else inspect.iscoroutinefunction(self.stand_in)

    def call(self, attempt: int = 1) -> Any:
        """Call the function, a plain ``def``; return and raise what it does."""
        return self.new_context().run(self._call, attempt)

    def new_context(self) -> contextvars.Context:
        """Copy the context variables that the handler had when it began the effect, for one attempt."""
        return copy_of_context(self._variables)

    def _call(self, attempt: int) -> Any:
        current_context.set(partial(self.context, attempt))
        arguments, keywords = self.arguments
        return (self.stand_in or self.function)(*arguments, **keywords)

    async def call_async(self, attempt: int = 1) -> Any:
        """Call the function, an ``async def``, in an asyncio task with :meth:`new_context`; else like :meth:`call`."""
        # Never reset: the task's context ends with it, and a coroutine that does not end can be closed in another one.
        current_context.set(partial(self.context, attempt))
        arguments, keywords = self.arguments
        return await (self.stand_in or self.function)(*arguments, **keywords)

    def context(self, attempt: int) -> EffectContext:
        """Return the EffectContext of an attempt."""
        return EffectContext(self.key, attempt)

    def wait_s(self, error: BaseException, attempt: int, now_ns: int) -> float | None:
        """Return the longest wait after a failed attempt (from 1), in seconds; None: it was the last attempt.

        ``now_ns``: the instance's time."""
        retry = self.options.retry
        if declared_name(self.options.raises, error) is not None or not retry.is_for(error):
            return None
        if retry.attempts is not None and attempt >= retry.attempts:
            return None
        wait_s = retry.wait_s(attempt)
        if retry.give_up_after is not None and self.since_ns:
            left_s = retry.give_up_after.total_seconds() - (now_ns - self.since_ns) / 1e9
            return None if wait_s > left_s else wait_s
        return wait_s

    def returned(self, value: Any) -> None:
        """Complete the effect with a value.

        Raises TypeError for a value that does not fit its annotation, UsageError for one that is too large. Then the
        effect is not complete.
        """
        self.answer(False, self._function.encode_result(value))

    def raised(self, error: BaseException, attempts: int = 1) -> None:
        """Complete the effect with an error after this number of attempts."""
        if not self.is_cancelled:
            self.report(error, attempts)
        try:
            self.answer(True, self._function.encode_error(error, attempts, self.options.raises))
        except UsageError as problem:  # a declared exception that is too large
            self.answer(True, self._function.encode_error(problem, attempts, {}))

    def answer(self, raised: bool, value: bytes) -> None:
        """Complete the effect with an encoded value, or an encoded error."""
        if not self.is_cancelled:
            self._send(raised, value)
        self.is_done = True


class EffectRunner(Protocol):
    """Interface that runs effects beside the handlers. The handlers' thread calls both methods; they return at once."""

    def start(self, request: EffectRequest) -> None:
        """Run an effect when there is room, and call its ``returned`` or ``raised`` once."""

    def cancel(self, request: EffectRequest) -> None:
        """Cancel a request that nobody waits for any more. Its answer is dropped, even if its function continues."""
