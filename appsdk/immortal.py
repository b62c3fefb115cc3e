"""The base class of apps."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime, timedelta
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, ParamSpec, Protocol, Self, TypeVar, overload

from immortal.appsdk.calls.context import Context, datetime_of
from immortal.appsdk.effects.effect import CONCURRENT_EFFECTS, Effects
from immortal.appsdk.errors import DefinitionError, OnError, UsageError
from immortal.appsdk.handlers.definition import Definition, define
from immortal.appsdk.handlers.log import LogAttribute
from immortal.appsdk.handlers.multicast import MulticastCache
from immortal.appsdk.handlers.proxy import attach, new_context
from immortal.appsdk.nodes.node import Node
from immortal.appsdk.running.runner import run
from immortal.appsdk.waiting.waits import Winner

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
N = TypeVar("N", bound=Node)
P = ParamSpec("P")


if TYPE_CHECKING:

    class ClientQueries(Protocol):
        """``counter.query`` of what ``connect(Counter, "counter")`` gives: its queries, and no other handlers."""

        @overload
        def __get__(self, instance: None, owner: type[A]) -> type[A]: ...
        @overload
        def __get__(self, instance: A, owner: type[A]) -> A: ...


def _only_async(name: str) -> UsageError:
    return UsageError(f"self.{name}: only an 'async def' handler waits: a 'def' handler runs to its end at once")


class Immortal:
    """A service that survives: its state is its annotated attributes, its inputs are calls of its handlers.

    ``__init__`` runs at the first start of the instance only; after a crash the object is made without it, gets its
    last checkpoint and handles the logged calls after it again. So handlers take whatever differs from run to run from
    here: ``self.now()``, ``self.random``, ``self.uuid4()``. ``self.log.info("took order", order=3)`` writes a line, and
    none where a replay handles the call again (:mod:`immortal.appsdk.handlers.log`).

    A class may define ``prepare(self) -> None``, which runs after ``__init__`` and after each recovery (before any
    logged call) and makes what is :data:`~immortal.Transient`; and ``checkpoint(self) -> bytes`` together with
    ``restore(self, blob: bytes) -> None`` to keep its state in a form of its own.

    Class keywords: ``serializer="pickle"`` keeps the state with pickle; ``formerly=("Old",)`` names what the class was
    called when older checkpoints were taken; ``version=2`` is the version of the state (by default 1, and with
    :func:`~upgrades` one more than the old class's); ``checkpoint="fork"`` takes checkpoints in a child process,
    beside the handlers; ``concurrent_effects=8`` is how many effects run at once (by default 32), and
    ``concurrent_handlers=100`` how many ``async def`` handlers (by default without limit); ``on_error`` says
    what an exception does that a handler does not declare, "undo" by default (see :func:`~immortal.rpc`);
    ``handler_time_limit=timedelta(seconds=30)`` ends the process of a handler that takes longer, as a crash would;
    ``share_tracebacks=True`` tells callers where a call has failed, not only with what. ``nodes=(Order,)`` names the
    classes of nodes that it creates (:class:`~immortal.Node`). ``roles={"worker": ["take"]}`` says which handlers a
    caller with keys may call only in that role (:mod:`immortal.appsdk.handlers.definition`).
    DefinitionError is raised for a class that could not be replayed.
    """

    __slots__ = ("__dict__", "__weakref__", "_immortal_context")

    _immortal_definition: ClassVar[Definition]
    _immortal_context: Context

    def __init_subclass__(
        cls,
        *,
        serializer: Literal["msgspec", "pickle"] | None = None,
        formerly: Iterable[str] = (),
        checkpoint: Literal["inline", "fork"] | None = None,
        version: int | None = None,
        concurrent_effects: int | None = None,
        on_error: OnError | None = None,
        handler_time_limit: timedelta | None = None,
        share_tracebacks: bool | None = None,
        concurrent_handlers: int | None = None,
        nodes: Iterable[type[Node]] | None = None,
        roles: Mapping[str, Iterable[str]] | None = None,
        **keywords: Any,
    ) -> None:
        super().__init_subclass__(**keywords)
        inherited = getattr(cls, "_immortal_definition", None)
        if serializer is None:
            serializer = inherited.serializer if inherited else "msgspec"
        if checkpoint is None:
            checkpoint = inherited.checkpoint_mode if inherited else "inline"
        if concurrent_effects is None:
            concurrent_effects = inherited.concurrent_effects if inherited else CONCURRENT_EFFECTS
        if on_error is None:
            on_error = inherited.on_error if inherited else "undo"
        if handler_time_limit is None and inherited:
            handler_time_limit = inherited.handler_time_limit
        if share_tracebacks is None:
            share_tracebacks = inherited.share_tracebacks if inherited else False
        if concurrent_handlers is None and inherited:
            concurrent_handlers = inherited.concurrent_handlers
        if nodes is None:
            nodes = inherited.nodes if inherited else ()
        if isinstance(formerly, str):
            raise DefinitionError(f"{cls.__qualname__}: formerly={formerly!r}: a tuple was expected: ({formerly!r},)")
        cls._immortal_definition = define(
            cls,
            Immortal,
            serializer,
            formerly,
            checkpoint,
            version,
            concurrent_effects,
            on_error,
            handler_time_limit,
            share_tracebacks=share_tracebacks,
            concurrent_handlers=concurrent_handlers,
            nodes=nodes,
            roles=roles,
        )

    def __new__(cls, *arguments: Any, **keywords: Any) -> Self:
        if cls is Immortal:
            raise DefinitionError("Immortal itself can't be made: write a class below it")
        instance = super().__new__(cls)
        attach(instance, new_context())
        return instance

    def now(self) -> datetime:
        """The time of the call that is being handled: aware, UTC, the same at each replay.

        In ``__init__`` it is that of the first start, in ``prepare`` and ``upgrade`` that of the last call before.

        Raises UsageError outside the handlers' thread.
        """
        return datetime_of(self._immortal_context.now_ns())

    def now_ns(self) -> int:
        """As :meth:`now`, in nanoseconds since the Unix epoch."""
        return self._immortal_context.now_ns()

    @property
    def random(self) -> Random:
        """Random numbers that are the same at each replay: a stream of its own for each place in the code.

        Use it where it is read (``self.random.choice(...)``); do not keep it beyond the call that is being handled.
        Raises UsageError outside the handlers' thread.
        """
        return self._immortal_context.random_at(sys._getframe(1))

    def uuid4(self) -> uuid.UUID:
        """A version 4 UUID that is the same at each replay. Raises UsageError outside the handlers' thread."""
        return self._immortal_context.uuid4_at(sys._getframe(1))

    if TYPE_CHECKING:  # so that a class may have a state, a handler or a peer of that name
        log: Any
        query: ClassVar[ClientQueries]  # of what `connect` gives, which is this class to a type checker
    else:
        log = LogAttribute()

    # --- for async handlers: there self is an appsdk.waiting.task_self.TaskSelf, which has these once more -----------

    @property
    def effect(self) -> Effects:
        """``await self.effect(fetch, url)``: work in the outside world; see :class:`appsdk.effects.options.Effects`."""
        return Effects()

    def sleep(self, duration: timedelta) -> Awaitable[None]:
        """``await self.sleep(timedelta(minutes=5))``: until then; it outlives every crash. Raises UsageError."""
        raise _only_async("sleep")

    def at(self, moment: datetime) -> Awaitable[None]:
        """``await self.at(moment)``: until then, an aware datetime. Raises UsageError."""
        raise _only_async("at")

    @overload
    def gather(self, first: Awaitable[A], /) -> Awaitable[tuple[A]]: ...
    @overload
    def gather(self, first: Awaitable[A], second: Awaitable[B], /) -> Awaitable[tuple[A, B]]: ...
    @overload
    def gather(
        self, first: Awaitable[A], second: Awaitable[B], third: Awaitable[C], /
    ) -> Awaitable[tuple[A, B, C]]: ...
    @overload
    def gather(self, *awaitables: Awaitable[A]) -> Awaitable[tuple[A, ...]]: ...
    def gather(self, *awaitables: Awaitable[Any]) -> Awaitable[tuple[Any, ...]]:
        """``await self.gather(one, two)``: all at once; their values. At the first error the others are given up.

        Takes calls, timers, events, steps, other gathers and races, and coroutines of one's own. Raises UsageError.
        """
        raise _only_async("gather")

    @overload
    def race(self, *awaitables: Awaitable[A]) -> Awaitable[Winner[A]]: ...
    @overload
    def race(self, *awaitables: Awaitable[Any]) -> Awaitable[Winner[Any]]: ...
    def race(self, *awaitables: Awaitable[Any]) -> Awaitable[Winner[Any]]:
        """``await self.race(one, two)``: the first that is done, and its value; nobody waits for the others any more.

        A call that has lost is executed all the same. Takes what :meth:`gather` takes. Raises UsageError.
        """
        raise _only_async("race")

    @overload
    def event(self, name: str) -> Awaitable[Any]: ...
    @overload
    def event(self, name: str, kind: type[A]) -> Awaitable[A]: ...
    def event(self, name: str, kind: Any = Any) -> Awaitable[Any]:
        """``await self.event("approved", bool)``: until somebody signals it; the value, of the type ``kind``.

        Each signal is for one who waits, the one that has waited longest. Raises UsageError.
        """
        raise _only_async("event")

    def continue_as(self, *arguments: Any, **keywords: Any) -> NoReturn:
        """``return self.continue_as(...)``: begin this handler again, with these arguments and an empty journal."""
        raise _only_async("continue_as")

    def signal(self, name: str, value: Any = None) -> None:
        """Of any handler: whoever has waited longest in ``self.event(name)`` gets ``value``; kept if nobody waits.

        Raises TypeError for a value that can't be encoded, UsageError outside handlers.
        """
        tasks = self._immortal_context.tasks
        if tasks is None:
            raise UsageError("self.signal: this instance does not run beside a coordinator, so nobody waits")
        tasks.signal(name, value)

    def multicast(self, targets: Iterable[type[A]]) -> type[A]:
        """``self.multicast([self.a, self.b]).count.fork("text")``: to all of them, in one order for everybody.

        Two instances that get the same two multicasts get them in the same order, and an effect never comes before its
        cause; see ``docs/guide/ordering.md``. ``targets``: peers of one class or of several with that handler, and
        ``type(self)`` for this instance too. In an ``async def`` handler
        ``await self.multicast([...]).count("text")`` gives all answers, in the order of the targets. Raises UsageError.
        """
        context = self._immortal_context
        if context.multicasts is None:
            raise UsageError("self.multicast: this instance does not run beside a coordinator, so there are no peers")
        if context.multicasts.proxies is None:
            context.multicasts.proxies = MulticastCache(context)
        found: type[A] = context.multicasts.proxies.of(self, self._immortal_definition, targets)
        return found

    # --- nodes and handles: docs/guide/nodes.md -----------------------------------------------------------------------

    def _immortal_nodes(self, what: str) -> Any:
        """Raises UsageError."""
        if (nodes := self._immortal_context.nodes) is None:
            raise UsageError(f"self.{what}: this instance does not run beside a coordinator, so it has no nodes")
        return nodes

    def create_node(self, cls: Callable[P, N], /, *args: P.args, **kwargs: P.kwargs) -> type[N]:
        """``self.create_node(Order, "GOLD")``: a new node; its handle, an ``immortal.Handle[Order]``.

        Only who is passed the handle can call it. Raises UsageError, DefinitionError, what ``__init__`` raises.
        """
        found: type[N] = self._immortal_nodes("create_node").create(cls, args, kwargs)
        return found

    def node_of(self, handle: type[N]) -> N:
        """The node itself, of a handle of one's own. Raises UsageError."""
        found: N = self._immortal_nodes("node_of").node_of(handle)
        return found

    def destroy(self, handle: type[Node]) -> None:
        """Of a node of one's own. What was sent to it in an order before this is delivered, what comes behind is not;
        all holders hear of it in that order (``on_destroyed``). Raises UsageError."""
        self._immortal_nodes("destroy").destroy(handle)

    def revoke(self, handle: type[N], holder: Any = None) -> type[N]:
        """Of a node of one's own: ``handle`` leads nowhere for ``holder`` (a peer, or its name) any more, or without
        one for anybody; a handle that does. Raises UsageError."""
        found: type[N] = self._immortal_nodes("revoke").revoke(handle, holder)
        return found

    def release_handle(self, handle: type[Node]) -> None:
        """Of another's node: this instance does not hold ``handle`` any more. Nothing where it does not. Raises
        UsageError."""
        self._immortal_nodes("release_handle").release_handle(handle)

    def holders_of(self, handle: type[Node]) -> list[str]:
        """Of a node of one's own: the names of who holds ``handle``, as far as this instance knows. Raises
        UsageError."""
        found: list[str] = self._immortal_nodes("holders_of").holders_of(handle)
        return found

    @classmethod
    def main(cls, address: str | None = None) -> NoReturn:
        """Run this class as the app of a program of its own; never returns. See :func:`immortal.run`."""
        run(cls, address)
