"""Functions that handlers use. Each function finds the handler that calls it.

    started = immortal.now()
    await immortal.sleep(timedelta(minutes=5))

They are no methods, so all names in a class are the user's. :data:`immortal.appsdk.calls.user_code.running` holds the
handler that runs.
"""

from __future__ import annotations

import functools
import inspect
import sys
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from random import Random
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, TypeVar, overload

from immortal.appsdk.calls.context import QUERY_RUNS, Context, datetime_of
from immortal.appsdk.calls.failures import argument_mismatch, checked_raises
from immortal.appsdk.calls.user_code import is_collecting, running
from immortal.appsdk.effects.effect import EffectOptions, Retry
from immortal.appsdk.errors import AS_RPC, QueryError, UsageError
from immortal.appsdk.handlers.log import HandlerLog
from immortal.appsdk.handlers.multicast import MulticastCache, destinations_of
from immortal.appsdk.nodes.node import Node
from immortal.appsdk.waiting.impulses import Effect
from immortal.appsdk.waiting.loop import Race, Winner
from immortal.appsdk.waiting.operations import Event, LocalFunction, LocalStep, Timer, encode_signal, event_name
from immortal.appsdk.waiting.task import Task
from immortal.appsdk.waiting.task_self import TaskHandler, TaskMulticast, TaskSelf
from immortal.protocol.safe_output import is_encodable

NAMES = (
    *("at", "continue_as", "create_node", "destroy", "effect", "event", "forget_key", "holders_of", "key", "label"),
    *(
        "logger",
        "multicast",
        "node_of",
        "now",
        "now_ns",
        "race",
        "random",
        "release_handle",
        "revoke",
        "signal",
        "sleep",
    ),
    *("step", "uuid4"),
)
"""Names of the functions, which `immortal` offers too."""

LABEL_CHARACTERS_MAX = 256

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
N = TypeVar("N", bound=Node)
P = ParamSpec("P")
R = TypeVar("R")


_RUNNERS = (Context, Task)  # a tuple takes half the time of a union


def _runner(function_name: str) -> Any:
    """Return the Task of an ``async def`` handler, or the Context of an instance. Raises UsageError outside of both."""
    if is_collecting():  # a coroutine that nobody closed cleans up inside another handler's context
        raise GeneratorExit
    found = running.get()
    if isinstance(found, _RUNNERS):
        return found
    where = "no handler runs here" if found is None else "an effect's function is no part of what a replay repeats"
    raise UsageError(
        f"immortal.{function_name}: {where}: it is for handlers, and what they call; elsewhere use Python's modules "
        f"'time', 'random', 'uuid', and give the app what it is to know: as an effect's result, an impulse or a call"
    )


def _task(function_name: str) -> Task:
    found = _runner(function_name)
    if not isinstance(found, Task):
        raise UsageError(
            f"immortal.{function_name}: only an 'async def' handler waits: a 'def' handler runs to its end at once"
        )
    return found


# --- values that differ from run to run -------------------------------------------------------------------------------


def now() -> datetime:
    """Return the time of the call that is being handled: an aware UTC datetime, the same at each replay.

    ``__init__`` gets the time of the first start; ``prepare`` and ``upgrade`` get the time of the last call before
    them. Raises UsageError outside of handlers.
    """
    return datetime_of(_runner("now()").now_ns())


def now_ns() -> int:
    """Return the time of :func:`now` in nanoseconds since the Unix epoch. Raises UsageError outside of handlers."""
    now_ns: int = _runner("now_ns()").now_ns()
    return now_ns


class _Random:
    """Proxy that looks up each method of :class:`random.Random` in the stream of the calling place."""

    def __getattribute__(self, name: str) -> Any:  # a third faster than __getattr__
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        return getattr(_runner("random").random_at(sys._getframe(1), name), name)


if TYPE_CHECKING:
    random: Random
else:
    random = _Random()
"""Random numbers that are the same at each replay: ``immortal.random.choice(...)``. Each function has its own stream
for each method that it calls. Raises UsageError outside of handlers."""


def uuid4() -> uuid.UUID:
    """Return a version 4 UUID, the same at each replay. Raises UsageError outside of handlers."""
    stream = _runner("uuid4()").random_at(sys._getframe(1), None, b"uuid4")
    return uuid.UUID(int=stream.getrandbits(128), version=4)


logger = HandlerLog()
"""Log of handlers: ``immortal.logger.info("took order", order=3)`` writes a line, but not again in a replay."""


# --- for async handlers -----------------------------------------------------------------------------------------------


def sleep(duration: timedelta) -> Coroutine[object, None, None]:
    """Wait for a duration: ``await immortal.sleep(timedelta(minutes=5))``; it outlives crashes. Raises UsageError."""
    task = _task("sleep")
    if not isinstance(duration, timedelta):
        raise UsageError(f"immortal.sleep({duration!r}): a timedelta was expected, such as timedelta(seconds=5)")
    now_ns = task.now_ns()
    made: Any = Timer(task, now_ns + duration // timedelta(microseconds=1) * 1000, now_ns)
    return made  # type: ignore[no-any-return]  # a future, with the type of what create_task takes


def at(moment: datetime) -> Coroutine[object, None, None]:
    """Wait until ``moment``, an aware datetime: ``await immortal.at(moment)``. Raises UsageError."""
    task = _task("at")
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        raise UsageError(
            f"immortal.at({moment!r}): a datetime with a time zone was expected, such as immortal.now() + "
            f"timedelta(days=1)"
        )
    made: Any = Timer(task, (moment - datetime_of(0)) // timedelta(microseconds=1) * 1000)
    return made  # type: ignore[no-any-return]


if (
    TYPE_CHECKING
):  # Winners by their index, so that a checker knows the type of the value after a test 'winner.index == 1'

    class _First(Winner[A]):
        index: Literal[0]

    class _Second(Winner[A]):
        index: Literal[1]

    class _Third(Winner[A]):
        index: Literal[2]


@overload
def race(first: Awaitable[A], second: Awaitable[B], /) -> Coroutine[object, None, _First[A] | _Second[B]]: ...
@overload
def race(
    first: Awaitable[A], second: Awaitable[B], third: Awaitable[C], /
) -> Coroutine[object, None, _First[A] | _Second[B] | _Third[C]]: ...
@overload
def race(*awaitables: Awaitable[A]) -> Coroutine[object, None, Winner[A]]: ...
@overload
def race(*awaitables: Awaitable[Any]) -> Coroutine[object, None, Winner[Any]]: ...
def race(*awaitables: Awaitable[Any]) -> Any:
    """Return the first awaitable that is done, with its value; cancel the others: ``await immortal.race(one, two)``.

    A call that lost the race is executed all the same. Accepts what asyncio.gather accepts. With up to three, type
    checkers know the value's type after a test of ``index``. Raises UsageError.
    """
    task = _task("race")
    if not awaitables:
        raise UsageError("immortal.race(): nothing takes part, so nobody could win")
    for awaitable in awaitables:
        if not inspect.isawaitable(awaitable):
            raise UsageError(f"immortal.race({awaitable!r}): awaitables were expected, such as calls and coroutines")
    return Race(task, awaitables)


@overload
def event(name: str) -> Coroutine[object, None, Any]: ...
@overload
def event(name: str, kind: type[A]) -> Coroutine[object, None, A]: ...
def event(name: str, kind: Any = Any) -> Any:
    """Wait for a signal, and return its value, of the type ``kind``: ``await immortal.event("approved", bool)``.

    Each signal wakes one handler: the one that has waited longest. Raises UsageError.
    """
    task = _task("event")
    return Event(task, _event_of_key("immortal.event", name, task.key), task.tasks.event_decoder(kind))


def step(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[object, None, R]:
    """Run a ``def`` handler of this class, or a local function, as a step: ``await immortal.step(self.count, 2)``.

    It runs at once and owns the state: it reads and sets attributes. A copy of its result is in the journal: a recovery
    does not run it again. ``function`` must not wait or reach outside. Raises UsageError, and TypeError for arguments
    that do not fit a handler. If ``function`` raises, the step fails with CalleeFailed.
    """
    task = _task("step")
    made: Any
    if callable(function):
        whole = functools.partial(function, *args, **kwargs)  # of a partial: its function, with all arguments
        if isinstance(whole.func, TaskHandler):
            made = whole.func.as_step(whole.args, whole.keywords)
            return made  # type: ignore[no-any-return]  # a future, with the type of what create_task takes
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise UsageError(
            f"immortal.step({function!r}): a function was expected that does not wait; an 'async def' is "
            f"awaited as it is: await function(...)"
        )
    made = LocalStep(task, LocalFunction(function, kwargs), args)
    return made  # type: ignore[no-any-return]


def continue_as(*arguments: Any, **keywords: Any) -> NoReturn:
    """Start this handler again, with these arguments and an empty journal: ``return immortal.continue_as(...)``.

    Raises TypeError for arguments that do not fit it, UsageError.
    """
    task = _task("continue_as")
    codec = task.tasks.codec(task.handler)
    try:
        _, encoded = codec.encoded(codec.bind(arguments, keywords))
    except TypeError as error:
        raise TypeError(f"immortal.continue_as: {error}") from None
    try:
        codec.decode(encoded)
    except Exception as error:
        raise TypeError(f"immortal.continue_as: {argument_mismatch(codec, error, encoded, 0)}") from None
    task.continue_as(encoded)


class Effects:
    """Class of ``immortal.effect``, which runs work in the outside world: ``await immortal.effect(fetch, url)``."""

    __slots__ = ("_options",)

    def __init__(self, options: EffectOptions | None = None) -> None:
        self._options = options or EffectOptions()

    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[object, None, R]: ...
    @overload
    def __call__(
        self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[object, None, R]: ...
    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run ``function`` as an effect, and return its result: ``await immortal.effect(fetch, url)``.

        ``function`` is a plain function of a module, with annotations. A ``def`` runs in a thread, an ``async def`` on
        an asyncio loop. It gets copies of its arguments. It runs at least once; its result is seen exactly once. Raises
        EffectFailed, and what the options declare; UsageError, TypeError for what can't be run.
        """
        task = _task("effect")
        found = task.tasks.effects.function(function)
        return Effect(task, found, found.codec.bind(args, kwargs), self._options)

    def options(
        self,
        *,
        retry: Retry | None = None,
        timeout: timedelta | None = None,
        raises: Iterable[type[Exception]] | None = None,
        key: str | None = None,
    ) -> Effects:
        """Return ``immortal.effect`` with these options changed. Raises UsageError, DefinitionError.

        ``retry``: by default ``Retry()``: attempts without end, but only one for an error of the program itself.
        ``timeout``: of each attempt. ``raises``: exceptions that the handler gets as they are, at once; all others
        become EffectFailed after the last attempt. ``key``: replaces the idempotency key that the SDK makes (see
        :func:`~immortal.effect_context`).
        """
        options = self._options
        if retry is not None:
            if not isinstance(retry, Retry):
                raise UsageError(f"immortal.effect.options(retry={retry!r}): Retry(attempts=...) was expected")
            options = replace(options, retry=retry)
        if timeout is not None:
            if not isinstance(timeout, timedelta) or timeout <= timedelta():
                raise UsageError(
                    f"immortal.effect.options(timeout={timeout!r}): a timedelta was expected, such as "
                    f"timedelta(seconds=5)"
                )
            options = replace(options, timeout=timeout)
        if raises is not None:
            options = replace(options, raises=checked_raises("immortal.effect.options", raises))
        if key is not None:
            if not isinstance(key, str) or not key:
                raise UsageError(f"immortal.effect.options(key={key!r}): a str was expected that is not empty")
            options = replace(options, key=key)
        return Effects(options)


effect = Effects()


# --- for all handlers -------------------------------------------------------------------------------------------------


def _require_coordinator(found: Any, function_name: str) -> Any:
    """Return ``found``, a part of a Context. Raises UsageError if it is None."""
    if found is None:
        raise UsageError(f"immortal.{function_name}: this instance does not run beside a coordinator")
    return found


def signal(name: str, value: Any = None) -> None:
    """Give ``value`` to the handler that has waited longest in ``immortal.event(name)``, or keep it for the next.

    Raises TypeError for a value that can't be encoded, UsageError outside of handlers.
    """
    task = _runner("signal")
    if isinstance(task, Context):
        name = name if task.present is None else _event_of_key("immortal.signal", name, task.present.key)
        _require_coordinator(task.tasks, "signal").signal(name, value)
        return
    name = _event_of_key("immortal.signal", name, task.key)
    encoded = encode_signal(name, value)
    if task.is_silent:
        return
    tasks = task.tasks
    try:
        tasks.events.require_room(name, encoded)
    except UsageError as error:  # the handler ends, whatever it catches: a rebuild would not refuse it again
        raise task.abandon(error) from error
    tasks.events.signal(name, encoded)


def _event_of_key(function_name: str, name: str, key: Any) -> str:
    """Return the full name of an event; with a ``key`` it differs from that of other keys. Raises UsageError."""
    name = event_name(function_name, name)
    return name if key is None else f"{key!r}: {name}"


def key() -> Any:
    """Return the key whose handler runs, in a keyed class (``class Cart(Immortal, keyed=str)``). Raises UsageError."""
    runs = _runner("key()")
    if isinstance(runs, Task):
        found = runs.key
    else:
        found = None if runs.present is None else runs.present.key
    if found is None:
        raise UsageError("immortal.key(): no handler of a keyed class runs here: class Cart(Immortal, keyed=str)")
    return found


def forget_key() -> None:
    """Remove the state of the key whose ``def`` handler runs, when that ends; the key's next call makes it anew.

    In an ``async def`` handler: ``await immortal.step(immortal.forget_key)``. Raises UsageError.
    """
    runs = _runner("forget_key()")
    if isinstance(runs, Task):
        raise UsageError("immortal.forget_key(): in an 'async def' handler: await immortal.step(immortal.forget_key)")
    key()
    if runs.handling_thread_id == QUERY_RUNS:
        raise QueryError(f"immortal.forget_key(): a query only reads: {AS_RPC}")
    runs.present.is_forgotten = True


def multicast(targets: Iterable[type[A]]) -> type[A]:
    """Call all targets, in one order for all receivers: ``immortal.multicast([self.a, self.b]).count.fork("text")``.

    Two instances that receive the same two multicasts receive them in the same order, and an effect never arrives
    before its cause; see ``docs/how-to/ordering.md``. ``targets``: peers of one class, or of several classes with that
    handler, and ``type(self)`` for this instance too. In an ``async def`` handler ``await
    immortal.multicast([...]).count.all("text")`` returns all answers, in the order of the targets. Raises UsageError.
    """
    found: Any = _runner("multicast")
    if isinstance(found, Task):
        context, cls = found.tasks.context, found.tasks.definition.cls
        given: list[Any] = list(targets)
        given = [cls if one is TaskSelf or type(one) is TaskSelf else one for one in given]
        destinations: Any = TaskMulticast(found, destinations_of(context, given))
    else:
        multicasts = _require_coordinator(found.multicasts, "multicast")
        if multicasts.proxies is None:
            multicasts.proxies = MulticastCache(found)
        destinations = multicasts.proxies.multicast_of(targets)
    return destinations  # type: ignore[no-any-return]


def label(**labels: str | int | uuid.UUID) -> None:
    """Label this execution with a business key: ``label(order=17)``, then `immortal executions shop --where order=17`.

    Works in an ``async def`` handler and its steps, and in a ``def`` handler whose decorator has ``labels=``. A second
    label of the same name replaces the first. It changes nothing else. Raises UsageError.
    """
    runs = _runner("label")
    for name, value in labels.items():
        text = str(value) if isinstance(value, str | int | uuid.UUID) else None
        if text is None or len(text) > LABEL_CHARACTERS_MAX or not is_encodable(text):
            raise UsageError(
                f"immortal.label({name}={value!r}): a str, int or UUID was expected, of at most"
                f" {LABEL_CHARACTERS_MAX} characters that can be encoded"
            )
    texts = {name: str(value) for name, value in labels.items()}
    tasks = None if isinstance(runs, Task) else runs.tasks
    task = runs if isinstance(runs, Task) else tasks and tasks.running  # the task that awaits this step
    if task is not None:
        task.label(texts)
    elif tasks is not None:  # else a plain object
        if tasks.open_labels is None:
            raise UsageError(
                "immortal.label: a 'def' handler is listed, and can be labelled, with @rpc(labels=()), or with its"
                " parameters in there; queries, schedules and hooks are not listed"
            )
        tasks.open_labels.update(texts)


# --- nodes and handles: docs/how-to/nodes.md --------------------------------------------------------------------------


def _nodes(function_name: str) -> Any:
    found = _runner(function_name)
    if isinstance(found, Task):
        raise UsageError(
            f"immortal.{function_name}: an async handler touches no nodes, as others change them while it waits: move "
            f"this into a 'def' handler (@rpc) and await immortal.step(self.<handler>, ...)"
        )
    return _require_coordinator(found.nodes, function_name)


def create_node(cls: Callable[P, N], /, *args: P.args, **kwargs: P.kwargs) -> type[N]:
    """Create a node, and return its handle, a ``Handle[Order]``: ``immortal.create_node(Order, "GOLD")``.

    Only holders of the handle can call the node. Raises UsageError, DefinitionError, what ``__init__`` raises.
    """
    found: type[N] = _nodes("create_node").create(cls, args, kwargs)
    return found


def node_of(handle: type[N]) -> N:
    """Return the node of a handle that this instance owns. Raises UsageError."""
    found: N = _nodes("node_of").node_of(handle)
    return found


def destroy(handle: type[Node]) -> None:
    """End a node of this instance. Earlier calls in the order are delivered, later ones are not.

    All holders are told in that order (``on_destroyed``). Raises UsageError.
    """
    _nodes("destroy").destroy(handle)


def revoke(handle: type[N], holder: Any = None) -> type[N]:
    """Revoke ``handle``, of a node of this instance, for ``holder`` (a peer or its name; None: all).

    Return a handle of the node that is still valid. Raises UsageError.
    """
    found: type[N] = _nodes("revoke").revoke(handle, holder)
    return found


def release_handle(handle: type[Node]) -> None:
    """Release ``handle``, of another instance's node; do nothing if it is not held. Raises UsageError."""
    _nodes("release_handle").release_handle(handle)


def holders_of(handle: type[Node]) -> list[str]:
    """Return the names of the known holders of ``handle``, of a node of this instance. Raises UsageError."""
    found: list[str] = _nodes("holders_of").holders_of(handle)
    return found
