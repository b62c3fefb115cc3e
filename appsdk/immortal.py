"""Class Immortal, the base class of apps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Protocol, Self, TypeVar, overload

from immortal.appsdk import functions
from immortal.appsdk.calls.context import Context, is_plain
from immortal.appsdk.calls.user_code import running
from immortal.appsdk.errors import DefinitionError, OnError
from immortal.appsdk.handlers.definition import Definition, define
from immortal.appsdk.handlers.keys import Keys, keyed_definition
from immortal.appsdk.handlers.proxy import attach, new_context
from immortal.appsdk.nodes.node import Node
from immortal.appsdk.running.runner import run

A = TypeVar("A")


if TYPE_CHECKING:

    class ClientQueries(Protocol):
        """Type of ``counter.query`` for a client ``connect(Counter, "counter")``: its queries, no other handlers."""

        @overload
        def __get__(self, instance: None, owner: type[A]) -> type[A]: ...
        @overload
        def __get__(self, instance: A, owner: type[A]) -> A: ...


class Immortal:
    """Base class of services: annotated attributes are the state, calls of handlers are the inputs.

    ``__init__`` runs only at the first start of the instance. After a crash the object is created without it, gets its
    last checkpoint and handles the logged calls after that again. So handlers must take all that differs from run to
    run from the SDK: ``immortal.now()``, ``immortal.random``, ``immortal.uuid4()``. :mod:`immortal.appsdk.functions`
    has all of these functions.

    A class can define ``prepare(self) -> None``, which runs after ``__init__`` and after each recovery (before any
    logged call) and sets what is :data:`~immortal.Transient`; and ``checkpoint(self) -> bytes`` together with
    ``restore(self, blob: bytes) -> None`` to keep its state in its own form.

    Class keywords: ``serializer="pickle"`` keeps the state with pickle. ``formerly=("Old",)`` lists older names of the
    class that older checkpoints contain. ``version=2`` is the version of the state (by default 1, and with
    :func:`~upgrades` the old class's + 1). ``checkpoint="fork"`` takes checkpoints in a child process, while handlers
    run. ``concurrent_effects=8``: how many effects run at once (by default 32). ``concurrent_handlers=100``: how many
    ``async def`` handlers run at once (by default without limit). ``on_error``: what an undeclared exception does,
    "undo" by default (see :func:`~immortal.rpc`). ``handler_time_limit=timedelta(seconds=30)`` ends the process of a
    handler that takes longer, as a crash would. ``share_tracebacks=True`` tells callers where a call failed, too.
    ``nodes=(Order,)`` lists the classes of nodes that it creates (:class:`~immortal.Node`). ``keyed=str`` (or ``int``)
    gives each key an object of its own (:func:`~immortal.peers`). ``roles={"worker":
    ["take"]}`` lists the handlers that a caller with keys can call only in that role
    (:mod:`immortal.appsdk.handlers.definition`). A class that a replay could not repeat raises DefinitionError.
    """

    __slots__ = ("__dict__", "__weakref__", "_immortal_context")

    _immortal_definition: ClassVar[Definition]
    _immortal_context: Context

    if TYPE_CHECKING:  # so that a class can have a state, a handler or a peer of that name
        query: ClassVar[ClientQueries]  # on what `connect` returns, which has this class for a type checker

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
        keyed: type[str | int] | None = None,
        roles: Mapping[str, Iterable[str]] | None = None,
        **keywords: Any,
    ) -> None:
        super().__init_subclass__(**keywords)
        options = {
            "serializer": serializer,
            "checkpoint_mode": checkpoint,
            "concurrent_effects": concurrent_effects,
            "on_error": on_error,
            "handler_time_limit": handler_time_limit,
            "share_tracebacks": share_tracebacks,
            "concurrent_handlers": concurrent_handlers,
            "nodes": nodes,
            "keyed": keyed,
        }
        inherited = getattr(cls, "_immortal_definition", None)
        chosen: Any = {name: getattr(inherited, name, None) if one is None else one for name, one in options.items()}
        if isinstance(formerly, str):
            raise DefinitionError(f"{cls.__qualname__}: formerly={formerly!r}: a tuple was expected: ({formerly!r},)")
        given = {name: one for name, one in chosen.items() if one is not None}  # the others have defaults
        made = define(Definition(cls, Immortal, tuple(formerly), version, **given), roles)
        is_keyed = made.keyed is not None and not issubclass(cls, Keys)
        cls._immortal_definition = keyed_definition(made) if is_keyed else made

    def __new__(cls, *arguments: Any, **keywords: Any) -> Self:
        if cls is Immortal:
            raise DefinitionError("Immortal itself can't be made: write a class below it")
        instance = super().__new__(cls)
        attach(instance, context := new_context())
        if is_plain(running.get()) and is_plain(context):  # for its __init__, and for methods that are no handlers
            running.set(context)
        return instance

    @classmethod
    def main(cls, address: str | None = None) -> NoReturn:
        """Run this class as the app in a program of its own; never return. See :func:`immortal.run`."""
        run(cls, address)


class _Moved:
    """Descriptor that names the function that replaced an attribute of ``self``. A class can define the same name."""

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
