"""Typed proxies of peers, own handlers and impulses, and the context that provides them to an instance.

For a type checker ``peer(Counter, "counter")`` is the class Counter: ``self.counter.count.fork("text")`` is checked
like a call, and ``await self.counter.count("text")`` has the type that ``count`` returns. At run time it is a
:class:`PeerProxy`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from immortal.appsdk.calls.codec import ArgumentCodec, bind_arguments, positional_count
from immortal.appsdk.calls.context import SEED_SIZE_BYTES, Context, is_plain
from immortal.appsdk.calls.outbox import ImpulseQueue, make_writer
from immortal.appsdk.calls.user_code import running
from immortal.appsdk.errors import DefinitionError, UsageError
from immortal.appsdk.handlers.decorators import (
    CLOCK_METHOD_ID,
    EFFECT_METHOD_ID,
    INITIAL_METHOD_ID,
    BoundHandler,
    Handler,
)
from immortal.appsdk.handlers.definition import KEY_MARK, Definition, Peer, Peers, own_definition_of
from immortal.protocol.extensions import QUERIES
from immortal.protocol.limits import NAME_SIZE_BYTES_MAX
from immortal.protocol.messages import RpcType
from immortal.protocol.system_methods import ORDER_METHOD_ID

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


def method_names(definition: Definition) -> dict[tuple[str, int], str]:
    """Return the names of the methods that a class has (destination "") and can call, by (destination, method ID).

    Queries are in it a second time, under the group QUERIES in place of a destination. A peer whose class can't be
    found (yet) is left out: its first call will report that.
    """
    initial = f"{definition.name}.{definition.initial or 'initial'}"
    found = [("", INITIAL_METHOD_ID, initial)]
    for handler in definition.by_method_id.values():
        groups = ("", QUERIES) if handler.is_query else ("",)
        owner, dot, own = handler.function.__qualname__.rpartition(".")
        found += [(group, handler.method_id, f"{owner}{KEY_MARK * handler.is_keyed}{dot}{own}") for group in groups]
    if definition.has_tasks or any(handler.schedule for handler in definition.handlers.values()):
        found.append(("", CLOCK_METHOD_ID, "the clock"))
    if definition.has_tasks:
        found.append(("", EFFECT_METHOD_ID, "the result of an effect"))
        found.append(("", ORDER_METHOD_ID, "an operator's order"))
    for source in definition.peers.values():
        with contextlib.suppress(Exception):  # whatever importing its module raises
            handlers = source.resolve().handlers.values()
            found += [(source.name, handler.method_id, handler.function.__qualname__) for handler in handlers]
    return {(destination, method_id): _clipped(name) for destination, method_id, name in found}


def all_method_names(definition: Definition) -> dict[tuple[str, int], str]:
    """Return the names of :func:`method_names`, also of the classes that this one upgrades; the newest name wins.

    A method counts as a query only if all of these classes have it as a query: callers do not know which class runs.
    """
    names = {key: name for one in reversed(definition.chain) for key, name in method_names(one).items()}
    for handler in chain.from_iterable(one.by_method_id.values() for one in definition.chain):
        if not handler.is_query:
            names.pop((QUERIES, handler.method_id), None)
    return names | _role_names(definition)


def _role_names(definition: Definition) -> dict[tuple[str, int], str]:
    """Return the methods that are not for everybody, once for each role that can call them, by the newest class."""
    found: dict[int, tuple[str, tuple[str, ...]]] = {}
    for one in reversed(definition.chain):
        for handler in one.by_method_id.values():
            found[handler.method_id] = _clipped(handler.function.__qualname__), one.roles.get(handler.name, ())
    return {(role, method_id): name for method_id, (name, roles) in found.items() for role in roles}


def _clipped(name: str) -> str:
    return name.encode()[:NAME_SIZE_BYTES_MAX].decode(errors="ignore")


@overload
def peer(target: type[T], name: str) -> type[T]: ...
@overload
def peer(target: str, name: str) -> Any: ...
@overload
def peer(target: Callable[[], type[T]], name: str) -> type[T]: ...
def peer(target: object, name: str) -> Any:
    """Declare the instance ``name`` as a peer: in the class body, ``counter = peer(Counter, "counter")``.

    ``target`` is its class; for two classes that refer to each other ``lambda: Counter`` or ``"module:Counter"``.
    Raises DefinitionError.
    """
    return Peer(target, name)


if TYPE_CHECKING:

    class KeyedPeers(Protocol[T_co]):
        """Type of :func:`peers`, for type checkers."""

        def __getitem__(self, key: str | int, /) -> type[T_co]: ...


@overload
def peers(target: type[T], name: str, *, shards: int = 1) -> KeyedPeers[T]: ...
@overload
def peers(target: str, name: str, *, shards: int = 1) -> Any: ...
@overload
def peers(target: Callable[[], type[T]], name: str, *, shards: int = 1) -> KeyedPeers[T]: ...
def peers(target: object, name: str, *, shards: int = 1) -> Any:
    """Declare the keys of a keyed class as peers: in the class body, ``carts = peers(Cart, "carts", shards=3)``.

    Handlers call one key: ``self.carts["ann"].add.fork("tea", 2)``. ``target``: as for :func:`peer`. ``shards``: the
    ``count`` of ``carts`` in the project; after a change of that, calls to the old shards are forwarded. Raises
    DefinitionError.
    """
    return Peers(target, name, shards)


# --- calls ------------------------------------------------------------------------------------------------------------


def find_handler(definition: Definition, name: str) -> Handler[Any, Any]:
    try:
        return definition.handlers[name]
    except KeyError:
        known = ", ".join(sorted(definition.handlers)) or "none"
        raise AttributeError(f"{definition.name} has no handler {name!r} (its handlers: {known})") from None


def make_fork(
    context: Context, destination: str, handler: Handler[Any, Any], definition: Definition | None = None
) -> Callable[..., None]:
    """Make the ``fork`` of a handler. ``definition``: of its class, so that values for ``Any`` keep their type."""
    name = handler.function.__qualname__
    if context.outbox is not None:
        fork: Callable[..., None] = context.outbox.make_fork(destination, name, handler.method_id, handler.signature)
        return fork if definition is None else _tagging_fork(context, definition, handler, fork)

    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise UsageError(
            f"{name}.fork: this instance does not run beside a coordinator, so there is no log to call through"
        )

    return refuse


def _tagging_fork(
    context: Context, definition: Definition, handler: Handler[Any, Any], fork: Callable[..., None]
) -> Callable[..., None]:
    """Return ``fork`` itself, or a wrapper if a parameter of ``handler`` can contain untyped values."""
    try:
        codec = definition.codec(handler)
    except (DefinitionError, NameError):  # reported elsewhere
        return fork
    if not codec.needs_forms:
        return fork

    def fork_tagged(*arguments: Any, **keywords: Any) -> None:
        if keywords or len(arguments) != codec.positional_count:
            arguments, keywords = codec.split_keywords(codec.tag_values(codec.bind(arguments, keywords)))
            fork(*arguments, **keywords)
        else:
            fork(*codec.tag_values(arguments))

    return fork_tagged


def handler_namespace(instance: object, definition: Definition, context: Context) -> SimpleNamespace:
    """Return the values of ``self.<handler>``, for each definition of each handler.

    All are made at once: in a class with ``__getattr__`` every look-up is slower, the successful ones too.
    """
    namespace = SimpleNamespace()
    for key, handler in definition.by_key.items():
        # A call through the log reaches the method that has the name then, also from an overridden handler.
        fork = make_fork(context, "", definition.handlers[handler.name], definition)
        call = _refuse_call(handler) if handler.is_async else MethodType(handler.function, instance)
        if is_plain(context):
            call = _run_plainly(call, context)
        setattr(namespace, key, BoundHandler(call, fork))
    return namespace


def _run_plainly(call: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrap a handler of a plain object: it runs in that object's context, unless another handler calls it."""

    def run(*arguments: Any, **keywords: Any) -> Any:
        if not is_plain(running.get()):
            return call(*arguments, **keywords)
        token = running.set(context)
        try:
            return call(*arguments, **keywords)
        finally:
            running.reset(token)

    return run


def _refuse_call(handler: Handler[Any, Any]) -> Callable[..., Any]:
    name = handler.function.__qualname__

    def refuse(*arguments: Any, **keywords: Any) -> Any:
        raise UsageError(
            f"{name}(...): an async handler is started with .fork(...), or awaited in another async handler"
        )

    return refuse


def peer_namespace(definition: Definition, context: Context) -> SimpleNamespace:
    """Return the values of ``self.<peer>``."""
    made = SimpleNamespace()
    for key, found in definition.peers_by_key.items():
        if isinstance(found, Peer):
            setattr(made, key, UnresolvedPeer(found, context))
        else:
            setattr(made, key, KeyPeers(found, lambda shard: getattr(made, shard.key)))
    return made


class KeyPeers:
    """Proxies of the keys of a keyed class: ``self.carts["ann"]``. ``shard``: makes the proxy of one of its shards."""

    __iter__ = __contains__ = None  # by numbers from 0 they would not end

    def __init__(self, source: Peers, shard: Callable[[Peer], Any]) -> None:
        self._immortal_peers = source
        self._immortal_shard = shard

    def __repr__(self) -> str:
        return f"<peers {self._immortal_peers.name!r}>"

    def __getitem__(self, key: Any) -> OfKey:
        return OfKey(self._immortal_shard(self._immortal_peers.shard(key)), key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        where = f"self.<peers>[key].{name}(...)"
        raise UsageError(f"{self._immortal_peers.name!r} is keyed, so a call must name the key: {where}")


class OfKey:
    """Proxy of one key: ``proxy`` is that of the instance, whose handlers take the key as their first argument."""

    def __init__(self, proxy: Any, key: Any) -> None:
        self._immortal_proxy = proxy
        self._immortal_key = key

    def __repr__(self) -> str:
        return f"<{self._immortal_key!r} of {self._immortal_proxy!r}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _KeyMethod(getattr(self._immortal_proxy, name), self._immortal_key)


class _KeyMethod:
    """Handler of one key. ``method``: the one that takes the key as its first argument."""

    __slots__ = ("_key", "_method")

    def __init__(self, method: Any, key: Any) -> None:
        self._method = method
        self._key = key

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._method(self._key, *arguments, **keywords)

    def fork(self, *arguments: Any, **keywords: Any) -> None:
        self._method.fork(self._key, *arguments, **keywords)


class PeerMethod:
    """Handler of a peer: ``fork`` sends a call to it."""

    __slots__ = ("_name", "fork")

    def __init__(self, name: str, fork: Callable[..., None]) -> None:
        self._name = name
        self.fork = fork

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        raise UsageError(
            f"{self._name}(...): only async handlers wait for an answer: send the call with {self._name}.fork(...), or "
            f"move it into an 'async def' handler: await self.<peer>.{self._name.rpartition('.')[2]}(...)"
        )


class PeerProxy:
    """Proxy of another instance for handlers, with an attribute for each handler of that instance."""

    def __init__(self, source: Peer, context: Context) -> None:
        self._immortal_peer = source
        self._immortal_context = context

    def __repr__(self) -> str:
        return f"<peer {self._immortal_peer.name!r}>"


class UnresolvedPeer(PeerProxy):
    """PeerProxy before its first use, when its class can still be missing; then it becomes a plain PeerProxy."""

    def __getattr__(self, name: str) -> PeerMethod:
        if name.startswith("__"):
            raise AttributeError(name)
        source = self._immortal_peer
        definition = source.resolve()
        find_handler(definition, name)
        for handler in definition.handlers.values():
            fork = make_fork(self._immortal_context, source.name, handler, definition)
            vars(self)[handler.name] = PeerMethod(handler.function.__qualname__, fork)
        self.__class__ = PeerProxy  # type: ignore[assignment]
        found: PeerMethod = vars(self)[name]
        return found


# --- impulses ---------------------------------------------------------------------------------------------------------


class ImpulseProxy:
    """Proxy of one destination that sends impulses to its handlers."""

    def __init__(self, definition: Definition, destination: str, queue: ImpulseQueue) -> None:
        self._source = (definition, destination, queue)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        definition, destination, queue = self._source
        handler = find_handler(definition, name)
        send = _make_impulse(queue, destination, handler, definition.codec(handler))
        setattr(self, name, send)
        return send


def _make_impulse(
    queue: ImpulseQueue, destination: str, handler: Handler[Any, Any], codec: ArgumentCodec
) -> Callable[..., None]:
    name, signature = handler.function.__qualname__, handler.signature
    write = make_writer(name, handler.method_id, RpcType.IMPULSE, parameters=signature.parameters)
    parameters_count = positional_count(signature)
    append = queue.append

    def send(*arguments: Any, **keywords: Any) -> None:
        if keywords or len(arguments) != parameters_count:
            bound = bind_arguments(name, signature, arguments, keywords)
            arguments = bound if keywords else arguments
        if codec.needs_forms:
            arguments = codec.tag_values(arguments)
        append(destination, name, write, arguments)

    return send


class Impulses:
    """Handle that ``@on_primary`` hooks get to send input from the outside world. Any thread can use it.

    ``impulses.line(text)`` sends to a handler of the own instance, ``impulses.counter.count(text)`` to a peer's; typed:
    ``impulses.to(self).line(text)``, ``impulses.to(self.counter).count(text)``. Sending blocks only while too many
    impulses are not durable yet. An accepted impulse is handled exactly once. If the app or the coordinator crashes, an
    impulse that was sent and not accepted can be handled or lost, so a hook continues from the state, which knows.

    All methods raise Disconnected once the connection has ended, TypeError for arguments that do not fit the handler.
    """

    def __init__(self, instance: Any, definition: Definition, queue: ImpulseQueue) -> None:
        self._instance = instance
        self._definition = definition
        self._queue = queue
        self._own = ImpulseProxy(definition, "", queue)

    @overload
    def to(self, target: type[T]) -> type[T]: ...
    @overload
    def to(self, target: T) -> type[T]: ...
    def to(self, target: Any) -> Any:
        """Return the proxy of ``target``: a peer (``self.counter``) or the app itself (``self``)."""
        if target is self._instance:
            return self._own
        if isinstance(target, OfKey):
            return OfKey(self.to(target._immortal_proxy), target._immortal_key)
        if not isinstance(target, PeerProxy):
            raise TypeError(f"impulses.to({target!r}): self or one of its peers was expected")
        source = target._immortal_peer
        name = f"\x00{source.key}"  # a name that no attribute has
        if (proxy := vars(self).get(name)) is None:
            proxy = vars(self)[name] = ImpulseProxy(source.resolve(), source.name, self._queue)
        return proxy

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all impulses sent so far are durable, at most ``timeout`` seconds. Raises TimeoutError."""
        self._queue.flush(timeout)

    def checkpoint(self) -> None:
        """Ask for a checkpoint soon, without waiting for it: after much work, to make the next recovery short."""
        self._queue.request_checkpoint()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._definition.peers:
            found: Any = self.to(getattr(self._instance, name))
        elif isinstance(peers := getattr(type(self._instance), name, None), Peers):
            found = KeyPeers(peers, lambda shard: self.to(getattr(self._instance._immortal_context.peers, shard.key)))
        else:
            found = getattr(self._own, name)
        setattr(self, name, found)
        return found


# The context of an instance: of a run, with time, randomness and calls, or a plain one.


_context_factory: ContextVar[Callable[[], Context] | None] = ContextVar("context factory", default=None)


def attach(instance: Any, context: Context) -> None:
    """Make ``context`` the context of ``instance``."""
    definition = context.definition = own_definition_of(instance)
    context.handlers = handler_namespace(instance, definition, context)
    context.peers = peer_namespace(definition, context)
    instance._immortal_context = context


def new_context() -> Context:
    """Return the context of a new instance: one of :func:`instances_use_context`, or that of a plain object."""
    make_context = _context_factory.get()
    return Context(os.urandom(SEED_SIZE_BYTES)) if make_context is None else make_context()


@contextmanager
def instances_use_context(make_context: Callable[[], Context]) -> Iterator[None]:
    """Inside this context manager, give new instances of this thread a context of ``make_context``."""
    token = _context_factory.set(make_context)
    try:
        yield
    finally:
        _context_factory.reset(token)
