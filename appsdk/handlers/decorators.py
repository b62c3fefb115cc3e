"""Decorators ``@rpc``, ``@query``, ``@impulse``, ``@every``, ``@cron``, ``@initial``, ``@on_primary``.

In the class a handler becomes a :class:`Handler`. This is a property; its value on an instance is a
:class:`BoundHandler`: a call of it is a plain call, ``.fork(...)`` sends the call through the log. An ``async def``
handler has another ``self``, see :mod:`appsdk.waiting.task_self`. (The property has a getter written in C: reading
``self.count`` costs 60 ns, with a Python ``__get__`` 75.)

The next run of a period follows from the one before. The next run of a cron expression also depends on time zone data,
which differ between machines and years: it is computed once, and its time goes into the log.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from copy import deepcopy
from datetime import UTC, datetime, timedelta, tzinfo
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload
from zoneinfo import ZoneInfo

from msgspec import Struct

from immortal.appsdk.calls.codec import signature_of
from immortal.appsdk.calls.context import Context, datetime_of
from immortal.appsdk.calls.failures import checked_on_error, checked_raises
from immortal.appsdk.errors import DefinitionError, OnError
from immortal.protocol import system_methods

TIME_NS_MAX = (1 << 63) - 1  # since the Unix epoch: the limit of 8 bytes, the year 2262

_UNITS_NS = {
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
    "d": 86_400 * 10**9,
    "w": 7 * 86_400 * 10**9,
}


class Period:
    """Schedule of ``@every``. Raises DefinitionError."""

    def __init__(self, given: object) -> None:
        self.period_ns = _period_ns(given)
        self.text = f"every {given}"  # as the app's class gives it

    def next_ns(self, time_ns: int, due_ns: int | None) -> int:
        """Return the first time after ``time_ns``, both ns since the Unix epoch; ``due_ns``: any of its times."""
        if due_ns is None:
            return time_ns + self.period_ns
        return due_ns + ((time_ns - due_ns) // self.period_ns + 1) * self.period_ns


def _period_ns(period: object) -> int:
    period_ns = 0
    if isinstance(period, timedelta):
        period_ns = period // timedelta(microseconds=1) * 1000
    elif isinstance(period, str) and (found := re.fullmatch(r"(\d{1,9})(ms|s|m|h|d|w)", period.strip())):
        period_ns = int(found[1]) * _UNITS_NS[found[2]]
    if period_ns <= 0:
        raise DefinitionError(
            f'@every({period!r}): a period was expected, such as "10m" (ms, s, m, h, d or w) or timedelta(minutes=10)'
        )
    return period_ns


class Cron:
    """Schedule of ``@cron``. Raises DefinitionError."""

    def __init__(self, expression: object, zone: object) -> None:
        from cronsim import CronSim, CronSimError  # here: few apps need it

        self._cronsim = CronSim
        if not isinstance(expression, str):
            raise DefinitionError(f'@cron({expression!r}): a cron expression was expected, such as "0 3 * * mon"')
        self._expression = expression
        self._zone = _zone(zone)
        self.text = f"{expression} ({zone})"
        try:
            never = next(CronSim(expression, datetime(2000, 1, 1, tzinfo=UTC)), None) is None
        except CronSimError as error:
            raise DefinitionError(
                f"@cron({expression!r}): {error}: five fields were expected, minute, hour, day of the month, month and "
                f'day of the week, such as "0 3 * * mon"'
            ) from None
        if never:
            raise DefinitionError(f"@cron({expression!r}): there is no such day")

    def next_ns(self, time_ns: int) -> int:
        """Return the first time after ``time_ns``, both ns since the Unix epoch. Not for replays: see the module."""
        moment = next(self._cronsim(self._expression, datetime_of(time_ns).astimezone(self._zone)), None)
        if moment is None:  # none within 50 years
            return TIME_NS_MAX
        return min((moment - datetime_of(0)) // timedelta(microseconds=1) * 1000, TIME_NS_MAX)


def _zone(name: object) -> tzinfo:
    if name == "UTC":
        return UTC
    try:
        if not isinstance(name, str):
            raise TypeError
        return ZoneInfo(name)
    except (OSError, ValueError, KeyError, TypeError):
        raise DefinitionError(
            f'@cron(..., tz={name!r}): this machine knows no such time zone: a name such as "Europe/Berlin" was '
            f"expected (without any, install the package tzdata)"
        ) from None


Schedule = Period | Cron

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

DERIVED_METHOD_ID_MIN = 8192  # smaller IDs are set by hand: they take 2 bytes of a message, up to 63 only 1
METHOD_ID_MAX = 1_048_575  # the largest ID of 3 bytes
INITIAL_METHOD_ID = -1  # the RPC in the initial message; negative IDs are the system's
CLOCK_METHOD_ID = -2  # the impulse with the time, for timers and schedules
EFFECT_METHOD_ID = system_methods.EFFECT_METHOD_ID


def method_id_of_name(name: str) -> int:
    """Return a handler's method ID, computed from its name alone: DERIVED_METHOD_ID_MIN .. METHOD_ID_MAX.

    >>> method_id_of_name("count")
    343311
    """
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    count = METHOD_ID_MAX + 1 - DERIVED_METHOD_ID_MIN
    return DERIVED_METHOD_ID_MIN + int.from_bytes(digest, "little") % count


_keys = itertools.count()


def definition_key(name: str) -> str:
    """Return a name for one definition of ``name``, unique in this process. (No dots: attrgetter follows them.)"""
    return f"{name}/{next(_keys)}"


class BoundHandler(Generic[P, R]):
    """Handler of one instance: ``self.count(...)`` calls it, ``self.count.fork(...)`` sends the call through the log.

    ``fork`` sends the call and returns at once. The call is executed once, in the order of calls, also after crashes.
    It raises TypeError for arguments that do not fit the handler, UsageError outside of handlers. (In async handlers
    this is an :class:`immortal.appsdk.waiting.task_self.TaskHandler`.)
    """

    __slots__ = ("_call", "fork")

    fork: Callable[P, None]

    def __init__(self, call: Callable[P, R], fork: Callable[P, None]) -> None:
        self._call = call
        self.fork = fork

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._call(*args, **kwargs)


class ImmortalProtocol(Protocol):
    """Type of an instance of a class below :class:`immortal.Immortal`, for type checkers."""

    _immortal_context: Context


if TYPE_CHECKING:

    class RemoteHandler(Generic[P, R]):
        """Type of a peer's handler, for type checkers, which take ``peer(Bank, "bank")`` for the class Bank."""

        def fork(self, *args: P.args, **kwargs: P.kwargs) -> None: ...

        # For a multicast: ``await immortal.multicast([...]).count(...)`` with a type.
        def all(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[tuple[R, ...]]: ...

        @overload
        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]: ...
        @overload  # ``Counter.count(counter, ...)``, a plain call
        def __call__(self, instance: ImmortalProtocol, /, *args: P.args, **kwargs: P.kwargs) -> R: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...  # type: ignore[misc]


Raises = Iterable[type[Exception]]


class Running(Struct, frozen=True):
    """Limits of an ``async def`` handler's runs. ``timeout``: of one run. ``limit``: how many run at once; with
    ``limit_by``, how many for each value of that parameter."""

    timeout: timedelta | None = None
    limit: int | None = None
    limit_by: str | None = None

    def check(self, handler: Handler[Any, Any]) -> None:
        """Check the limits of ``handler``. Raises DefinitionError."""
        where, given = f"{handler.name}: @{handler.decorator}", self.limit
        if self == Running():
            return
        if not handler.is_async:
            raise DefinitionError(f"{where}: timeout and limit are for an 'async def': a 'def' runs to its end at once")
        if self.timeout is not None and (not isinstance(self.timeout, timedelta) or self.timeout <= timedelta()):
            raise DefinitionError(
                f"{where}(timeout={self.timeout!r}): a timedelta was expected, such as timedelta(minutes=5)"
            )
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
            raise DefinitionError(f"{where}(limit={given!r}): a number from 1 was expected")
        if self.limit_by is not None and given is None:
            raise DefinitionError(f"{where}(limit_by={self.limit_by!r}): limit=... says how many of each")
        if self.limit_by is not None and self.limit_by not in handler.signature.parameters:
            known = ", ".join(map(repr, handler.signature.parameters)) or "none"
            raise DefinitionError(f"{where}(limit_by={self.limit_by!r}): a parameter was expected, of {known}")


class Handler(property, Generic[P, R]):
    """Method that logged messages call. ``function``: the decorated function; ``call`` takes arguments by position.

    ``raises``: exceptions that its caller gets, by name. ``schedule``: the times at which it runs by itself.
    ``on_error``: effect of any other exception on the state; None: as in the class. ``running``: limits of an ``async
    def``. ``is_keyed``: its first argument is the key, of a keyed class.
    """

    def __init__(
        self,
        function: Callable[..., R],
        method_id: int | None = None,
        *,
        decorator: str,
        raises: Raises = (),
        schedule: Schedule | None = None,
        on_error: OnError | None = None,
        running: Running | None = None,
        labels: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.decorator = decorator
        self.name = getattr(function, "__name__", repr(function))
        self.signature = check_handler_signature(function, decorator)
        self.function = with_own_defaults(function)
        self.call: Callable[..., R] = by_position(self.function, self.signature)
        self.is_async = inspect.iscoroutinefunction(function)
        self.is_query = decorator == "query"
        self.is_keyed = False
        self.raises = checked_raises(f"{self.name}: @{decorator}", raises)
        self.schedule = schedule
        self.on_error = None if on_error is None else checked_on_error(f"{self.name}: @{decorator}", on_error)
        running = running or Running()
        running.check(self)
        self.timeout, self.limit, self.limit_by = running.timeout, running.limit, running.limit_by
        self.method_id = self._checked_id(method_id)
        self.labels = None if labels is None else self._checked_labels(labels)
        self.key = ""
        self.__doc__ = function.__doc__

    def _checked_labels(self, labels: Sequence[str]) -> tuple[str, ...]:
        parameters = self.signature.parameters
        if isinstance(labels, str) or not set(labels) <= parameters.keys():
            raise DefinitionError(
                f"{self.name}: @{self.decorator}(labels={labels!r}): a tuple of its parameters was expected, of"
                f" {', '.join(map(repr, parameters)) or 'none'}"
            )
        return tuple(labels)

    def _checked_id(self, method_id: int | None) -> int:
        if method_id is None:
            return method_id_of_name(self.name)
        if isinstance(method_id, bool) or not isinstance(method_id, int) or not 1 <= method_id <= METHOD_ID_MAX:
            raise DefinitionError(
                f"{self.name}: @{self.decorator}(id={method_id!r}): an ID is a number from 1 to {METHOD_ID_MAX}"
            )
        return method_id

    def __set_name__(self, owner: type, name: str) -> None:
        # No checks here: Python 3.11 wraps errors of this method in a RuntimeError; definition.py checks. Each
        # definition has its own key, so that super().count(...) in a subclass reaches the overridden one.
        self.key = definition_key(name)
        property.__init__(self, attrgetter(f"_immortal_context.handlers.{self.key}"))

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def __get__(self, instance: None, owner: type, /) -> RemoteHandler[P, R]: ...
        @overload
        def __get__(self, instance: object, owner: type | None = None, /) -> BoundHandler[P, R]: ...
        def __get__(self, instance: object, owner: type | None = None, /) -> Any: ...

    def __call__(self, instance: object, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the method directly: ``Counter.count(counter, ...)``."""
        return self.function(instance, *args, **kwargs)


if TYPE_CHECKING:

    class BoundAsyncHandler(Generic[P, R]):
        """Type of a BoundHandler of an ``async def``, for type checkers."""

        def fork(self, *args: P.args, **kwargs: P.kwargs) -> None: ...
        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[object, None, R]: ...

    class AsyncHandler(Handler[P, Coroutine[Any, Any, R]]):
        """Type of a Handler of an ``async def``, for type checkers."""

        @overload  # type: ignore[override]
        def __get__(self, instance: None, owner: type, /) -> RemoteHandler[P, R]: ...
        @overload
        def __get__(self, instance: object, owner: type | None = None, /) -> BoundAsyncHandler[P, R]: ...
        def __get__(self, instance: object, owner: type | None = None, /) -> Any: ...


def by_position(function: Callable[..., R], signature: inspect.Signature) -> Callable[..., R]:
    """Wrap a method with keyword-only parameters: the wrapper takes all arguments by position, as in messages."""
    parameters = signature.parameters.values()
    names = [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
    count = 1 + len(parameters) - len(names)

    def call(*arguments: Any) -> R:
        return function(*arguments[:count], **dict(zip(names, arguments[count:], strict=False)))

    return call if names else function


def with_own_defaults(function: Callable[..., R]) -> Callable[..., R]:
    """Give each call of a function its own copies of defaults that can change, such as a list.

    A list for all calls would keep what a handler adds to it, up to the next crash.
    """
    plain: Any = function
    if all(
        type(one).__hash__ for one in itertools.chain(plain.__defaults__ or (), (plain.__kwdefaults__ or {}).values())
    ):
        return function

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> R:
        own = FunctionType(
            plain.__code__, plain.__globals__, plain.__name__, deepcopy(plain.__defaults__), plain.__closure__
        )
        own.__kwdefaults__ = deepcopy(plain.__kwdefaults__)
        return own(*arguments, **keywords)  # type: ignore[no-any-return]

    return call


def _refuse_generator(function: Callable[..., Any], decorator: str, subject: str) -> None:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise DefinitionError(f"{subject}: a generator can't be run as @{decorator}: it would never be resumed")


def check_handler_signature(function: Callable[..., Any], decorator: str) -> inspect.Signature:
    """Return a handler's signature without ``self``. Raises DefinitionError that names method and parameter."""
    if not inspect.isfunction(function):
        what = type(function).__name__
        raise DefinitionError(f"@{decorator} belongs on a plain method, this is a {what}: {function!r}")
    where = function.__qualname__
    _refuse_generator(function, decorator, where)
    signature = signature_of(function)
    parameters = list(signature.parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in positional:
        raise DefinitionError(f"{where}: a handler's first parameter is self")
    for parameter in parameters[1:]:
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise DefinitionError(
                f"{where}: parameter {str(parameter).partition(':')[0]!r}: a handler's parameters are listed one by "
                f"one (a list or dict can be one of them): the types decide how a call is encoded and checked"
            )
        if parameter.annotation is inspect.Parameter.empty:
            raise DefinitionError(
                f"{where}: parameter {parameter.name!r} has no annotation: write {parameter.name}: <its type>, "
                f"by which calls are encoded and checked"
            )
    if signature.return_annotation is inspect.Signature.empty:
        raise DefinitionError(f"{where}: the return value has no annotation: write '-> None' where nothing is returned")
    return signature.replace(parameters=parameters[1:])


@overload
def rpc(function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> AsyncHandler[P, R]: ...


@overload
def rpc(function: Callable[Concatenate[Any, P], R], /) -> Handler[P, R]: ...


@overload
def rpc(
    *,
    id: int = ...,
    raises: Raises = ...,
    on_error: OnError = ...,
    timeout: timedelta = ...,
    limit: int = ...,
    limit_by: str = ...,
    labels: Sequence[str] = ...,
) -> _Decorator: ...


def rpc(
    function: Callable[..., Any] | None = None,
    /,
    *,
    id: int | None = None,  # noqa: A002
    raises: Raises = (),
    on_error: OnError | None = None,
    timeout: timedelta | None = None,
    limit: int | None = None,
    limit_by: str | None = None,
    labels: Sequence[str] | None = None,
) -> Any:
    """Mark a method that other instances and clients call: ``proxy.method.fork(...)``, ``await proxy.method(...)``.

    ``id`` (1 .. METHOD_ID_MAX) replaces the method ID that follows from the name: for a name that changes while calls
    are in flight, and for two names whose IDs collide. ``raises`` lists the exceptions that a waiting caller gets as
    they are; the state stays as the handler left it. ``on_error`` says what any other exception does, in place of the
    class's keyword: "undo" (the call fails, and its changes are undone), "keep" (the call fails, its changes stay), or
    "stop" (the app stops).

    For an ``async def``: a run that exceeds ``timeout`` is cancelled (:class:`Cancelled`). At most ``limit`` run at
    once, or with ``limit_by`` that many for each value of that parameter; other calls wait for their turn.

    ``labels``: parameters by which `immortal executions` finds a call, for example ``("order",)``. With them, or with
    ``()``, the calls of a ``def`` are listed too. Raises DefinitionError.
    """
    running = Running(timeout, limit, limit_by)
    decorator = _Decorator(
        decorator="rpc", method_id=id, raises=raises, on_error=on_error, running=running, labels=labels
    )
    return decorator if function is None else decorator(function)


@overload
def query(function: Callable[Concatenate[Any, P], R], /) -> Handler[P, R]: ...


@overload
def query(*, id: int = ..., raises: Raises = ...) -> _Decorator: ...


def query(
    function: Callable[..., Any] | None = None,
    /,
    *,
    id: int | None = None,  # noqa: A002
    raises: Raises = (),
) -> Any:
    """Mark a method that only reads. Instances and clients call it like one of :func:`rpc`.

    It is a plain ``def``, which answers at once. If it sets or changes attributes (except :data:`~immortal.Transient`
    ones), or makes a call, a signal or a random draw, it fails with QueryError, and the state is as before it. The
    settings can allow a caller all queries of an instance at once: ``reports = ["@query"]``. Raises DefinitionError.
    """
    decorator = _Decorator(decorator="query", method_id=id, raises=raises)
    return decorator if function is None else decorator(function)


@overload
def impulse(function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> AsyncHandler[P, R]: ...


@overload
def impulse(function: Callable[Concatenate[Any, P], R], /) -> Handler[P, R]: ...


@overload
def impulse(
    *,
    id: int = ...,
    on_error: OnError = ...,
    timeout: timedelta = ...,
    limit: int = ...,
    limit_by: str = ...,
    labels: Sequence[str] = ...,
) -> _Decorator: ...


def impulse(
    function: Callable[..., Any] | None = None,
    /,
    *,
    id: int | None = None,  # noqa: A002
    on_error: OnError | None = None,
    timeout: timedelta | None = None,
    limit: int | None = None,
    limit_by: str | None = None,
    labels: Sequence[str] | None = None,
) -> Any:
    """Mark a method for input from outside, sent by :class:`Impulses`. Options: :func:`rpc`'s, without ``raises``."""
    running = Running(timeout, limit, limit_by)
    decorator = _Decorator(decorator="impulse", method_id=id, on_error=on_error, running=running, labels=labels)
    return decorator if function is None else decorator(function)


def every(period: str | timedelta, /) -> _Decorator:
    """Mark a method without parameters that runs once in each period from the first start on: ``@every("10m")``.

    ``period`` is a number and ms, s, m, h, d or w, or a timedelta. After a time in which the app was down, one run
    replaces all that were missed. Raises DefinitionError.
    """
    return _Decorator(decorator="every", schedule=Period(period))


def cron(expression: str, /, *, tz: str = "UTC") -> _Decorator:
    """Mark a method without parameters that runs at these times from the first start on: ``@cron("0 3 * * mon")``.

    ``expression`` has minute, hour, day of the month, month and day of the week, as in crontab (a sixth field in front
    is seconds); ``tz`` is the name of a time zone, such as "Europe/Berlin". After a time in which the app was down, one
    run replaces all that were missed. Raises DefinitionError.
    """
    return _Decorator(decorator="cron", schedule=Cron(expression, tz))


class _Decorator:
    """Decorator with options, returned by ``@rpc(id=...)`` and the like."""

    def __init__(self, **options: Any) -> None:
        """Make the decorator. ``options``: those of :class:`Handler`."""
        self._options = options

    @overload
    def __call__(self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> AsyncHandler[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Any, P], R], /) -> Handler[P, R]: ...
    def __call__(self, function: Callable[..., Any], /) -> Any:
        handler: Handler[Any, Any] = Handler(function, **self._options)
        if handler.is_query and handler.is_async:
            raise DefinitionError(
                f"{function.__qualname__}: @query belongs on a plain 'def', which answers at once: a handler that "
                f"waits is part of the state: make it an @rpc"
            )
        if handler.schedule and any(
            parameter.default is inspect.Parameter.empty for parameter in handler.signature.parameters.values()
        ):
            raise DefinitionError(
                f"{function.__qualname__}: @{handler.decorator} calls it without arguments: leave the parameters out"
            )
        return handler


HOOK_MARK = "_immortal_hook"


def _hook(function: Callable[..., Any], decorator: str, parameters_count: int, usage: str) -> None:
    if not inspect.isfunction(function):
        raise DefinitionError(f"@{decorator} belongs on a plain method, not on {function!r}")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise DefinitionError(
            f"{function.__qualname__}: @{decorator} belongs on a plain 'def', which can start an 'async def' handler: "
            f"{'self.<handler>.fork(...)' if decorator == 'initial' else 'impulses.<handler>(...)'}"
        )
    _refuse_generator(function, decorator, function.__qualname__)
    parameters = signature_of(function).parameters.values()
    required = [parameter for parameter in parameters if parameter.default is inspect.Parameter.empty]
    if len(required) != parameters_count or len(parameters) < parameters_count:
        raise DefinitionError(f"{function.__qualname__}: @{decorator} is written as {usage}")
    setattr(function, HOOK_MARK, decorator)


def on_primary(function: Callable[[S, Any], None], /) -> Callable[[S, Any], None]:
    """Mark a method that runs in its own thread once the app is primary: after the first start and each recovery.

    It is not replayed, so it can do anything. It changes the app only through its :class:`Impulses` handle. It can read
    attributes (handlers run meanwhile and can change them), and must not set any.
    """
    _hook(function, "on_primary", 2, "def feed(self, impulses: Impulses) -> None")
    return function


def initial(function: Callable[[S], None], /) -> Callable[[S], None]:
    """Mark a method that runs once in the life of the instance: as its first logged input, after ``__init__``.

    Unlike ``__init__`` it can send calls. A class has at most one.
    """
    _hook(function, "initial", 1, "def begin(self) -> None")
    return function
