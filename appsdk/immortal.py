"""Base class of apps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Protocol, Self, TypeVar, overload

from immortal.appsdk import functions
from immortal.appsdk.calls.context import Context, is_plain
from immortal.appsdk.calls.user_code import running
from immortal.appsdk.effects.effect import CONCURRENT_EFFECTS
from immortal.appsdk.errors import DefinitionError, OnError
from immortal.appsdk.handlers.definition import Definition, define
from immortal.appsdk.handlers.proxy import attach, new_context
from immortal.appsdk.nodes.node import Node
from immortal.appsdk.running.runner import run

A = TypeVar("A")


if TYPE_CHECKING:

    class ClientQueries(Protocol):
        """Type of ``counter.query`` of what ``connect(Counter, "counter")`` gives: its queries, no other handlers."""

        @overload
        def __get__(self, instance: None, owner: type[A]) -> type[A]: ...
        @overload
        def __get__(self, instance: A, owner: type[A]) -> A: ...


class Immortal:
    """Service that survives: its state is its annotated attributes, its inputs are calls of its handlers.

    ``__init__`` runs at the first start of the instance only; after a crash the object is made without it, gets its
    last checkpoint and handles the logged calls after it again. So handlers take whatever differs from run to run from
    the SDK: ``immortal.now()``, ``immortal.random``, ``immortal.uuid4()``. :mod:`immortal.appsdk.functions` has all of
    these functions.

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

    if TYPE_CHECKING:  # so that a class may have a state, a handler or a peer of that name
        query: ClassVar[ClientQueries]  # of what `connect` gives, which is this class to a type checker

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
        attach(instance, context := new_context())
        if is_plain(running.get()) and is_plain(context):  # for its __init__, and methods that are no handlers
            running.set(context)
        return instance

    @classmethod
    def main(cls, address: str | None = None) -> NoReturn:
        """Run this class as the app of a program of its own; never returns. See :func:`immortal.run`."""
        run(cls, address)


class _Moved:
    """Says which function has replaced an attribute of ``self``. A class may have an attribute of the same name."""

    def __init__(self, name: str, function: str) -> None:
        self._name = name
        self._function = function

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(
            f"{owner.__qualname__!r} object has no attribute {self._name!r}: handlers use immortal.{self._function}"
        )


for _function in functions.NAMES:
    _name = "log" if _function == "logger" else _function  # immortal.log is the module that reads logs
    setattr(Immortal, _name, _Moved(_name, _function))
