"""Proxies of multicasts: ``immortal.multicast([self.a, self.b]).count.fork("text")`` calls several in one order.

`docs/how-to/ordering.md` describes the guarantees.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from immortal.appsdk.calls.codec import bind_arguments, positional_count
from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.outbox import encode_call, make_writer, outside_handler_error
from immortal.appsdk.errors import UsageError
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.handlers.definition import Definition, Peer
from immortal.appsdk.handlers.proxy import PeerMethod, find_handler
from immortal.appsdk.ordering.messages import Scope
from immortal.appsdk.types.handles import Handle as HandleType
from immortal.protocol.messages import RpcType
from immortal.protocol.system_methods import NODE_METHOD_ID

Handle: Any = HandleType


class NodeHandles:
    """Nodes of one instance among the targets of a multicast. A call of it returns the definition of their class."""

    def __init__(self, handle: Any) -> None:
        self.handles = [handle]

    def add(self, handle: Any) -> None:
        """Add the handle of another node. Raises UsageError."""
        if handle in self.handles:
            raise UsageError(f"immortal.multicast(...): {handle!r} is in it twice")
        if handle._immortal_of[2] is not self.handles[0]._immortal_of[2]:
            raise UsageError(
                f"immortal.multicast(...): {handle!r} and {self.handles[0]!r} are nodes of one instance and of "
                f"different classes: send to one after the other"
            )
        self.handles.append(handle)

    def __call__(self) -> Any:
        cls = self.handles[0]._immortal_of[2]
        if cls is None:
            raise UsageError(
                f"immortal.multicast([{self.handles[0]!r}]): nobody says of which class its node is: annotate it as "
                f"Handle[...] where it comes from"
            )
        return cls._immortal_node

    def handler(self, name: str) -> Handler[Any, Any]:
        return find_handler(self(), name)

    def only(self, name: str) -> Any:
        """Return the only handle. Raises UsageError if there are more."""
        if len(self.handles) > 1:
            raise UsageError(
                f"await immortal.multicast(...).{name}: {self.handles[0]!r} and {self.handles[1]!r} are of one "
                f"instance, which answers once: await one after the other, or use .fork(...)"
            )
        return self.handles[0]


Destination = tuple[str, Callable[[], Definition]]
"""Destination of a multicast: the name of an instance, and a function that returns its class."""


def shared_method_id(method_ids: Iterable[int]) -> int:
    """Return the method ID of a multicast's calls: that of all, or its negative if there are nodes as well."""
    given = set(method_ids)
    others = given - {NODE_METHOD_ID}
    if len(given) == 1:
        return given.pop()
    return -others.pop()


def destinations_of(context: Context, targets: Iterable[Any]) -> list[Destination]:
    """Return the destinations of targets (peers, handles, and the instance itself). Raises UsageError."""
    definition = context.definition
    found: dict[str, Destination] = {}
    for target in targets:
        if isinstance(target, Handle):
            owner = target._immortal_of[0]
            known = found.get(owner)
            if known is not None and isinstance(known[1], NodeHandles):
                known[1].add(target)
                continue
            one: Destination = owner, NodeHandles(target)
        elif isinstance(source := getattr(target, "_immortal_peer", None), Peer):
            one = source.name, source.resolve
        elif target is definition.cls or getattr(target, "_immortal_context", None) is context:
            one = context.instance_name, lambda: definition
        else:
            raise UsageError(
                f"immortal.multicast([{target!r}]): peers (self.counter), handles or type(self) were expected"
            )
        if one[0] in found:
            raise UsageError(f"immortal.multicast(...): {one[0]!r} is in it twice")
        found[one[0]] = one
    if not found:
        raise UsageError("immortal.multicast([]): there is nobody to send to")
    return list(found.values())


def shared_handler(destinations: list[Destination], name: str) -> Handler[Any, Any]:
    """Return the handler ``name`` that all have, under one method ID. Raises AttributeError, UsageError."""
    handlers = [find_handler(resolve(), name) for _, resolve in destinations]
    for (destination, _), handler in zip(destinations, handlers, strict=True):
        if handler.method_id != handlers[0].method_id or handler.signature != handlers[0].signature:
            raise UsageError(
                f"immortal.multicast(...).{name}: {destination!r} and {destinations[0][0]!r} have different handlers "
                f"of that name: other parameters, or another method ID"
            )
    return handlers[0]


def make_multicast_fork(
    context: Context, destinations: list[Destination], handler: Handler[Any, Any], scope: Scope | None = None
) -> Callable[..., None]:
    """Make the ``fork`` of a multicast. Raises TypeError, and what
    :meth:`immortal.appsdk.ordering.multicasts.Multicasts.send` raises."""
    name, signature, method_id = handler.function.__qualname__, handler.signature, handler.method_id
    write = make_writer(name, method_id, RpcType.FORK, parameters=signature.parameters, context=context)
    parameters_count = positional_count(signature)
    names = [destination for destination, _ in destinations]
    nodes = [source if isinstance(source, NodeHandles) else None for _, source in destinations]
    write_node = make_writer(name, NODE_METHOD_ID, RpcType.FORK, context=context)
    common = shared_method_id(method_id if node is None else NODE_METHOD_ID for node in nodes)
    codec = destinations[0][1]().codec(handler)

    def fork(*arguments: Any, **keywords: Any) -> None:
        if keywords or len(arguments) != parameters_count:
            bound = bind_arguments(name, signature, arguments, keywords)
            arguments = bound if keywords else arguments
        if threading.get_ident() != context.handling_thread_id:
            raise outside_handler_error(context, f"multicast(...).{name}")
        if codec.needs_forms:
            arguments = codec.tag_values(arguments)
        if not any(nodes):
            context.multicasts.send(name, method_id, names, [encode_call(write, arguments)], scope)
            return
        calls = []
        for node in nodes:
            if node is None:
                calls.append(encode_call(write, arguments))
                continue
            for handle in node.handles:
                context.nodes.require_usable(handle)
            keys = [handle._immortal_of[1] for handle in node.handles]
            wrapped = context.nodes.wrapped(keys, node.handler(handler.name), arguments)
            calls.append(encode_call(write_node, wrapped))
        context.multicasts.send(name, common, names, calls)

    return fork


class MulticastMethod(PeerMethod):
    """Handler of several instances: ``fork`` sends a call to all of them."""

    __slots__ = ()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        raise UsageError(
            f"{self._name}(...): only async handlers wait for answers: send it with .fork(...), or move it into an "
            f"'async def' handler"
        )


class Multicast:
    """Proxy of several instances for ``def`` handlers, with an attribute for each handler that all have.

    ``scope``: set if they are the members of a group.
    """

    def __init__(self, context: Context, destinations: list[Destination], scope: Scope | None = None) -> None:
        self._immortal_made_from = context, destinations, scope

    def __getattr__(self, name: str) -> MulticastMethod:
        if name.startswith("__"):
            raise AttributeError(name)
        context, destinations, scope = self._immortal_made_from
        handler = shared_handler(destinations, name)
        method = MulticastMethod(
            f"multicast(...).{handler.function.__qualname__}",
            make_multicast_fork(context, destinations, handler, scope),
        )
        vars(self)[name] = method
        return method


class MulticastCache:
    """Cache of an instance's multicast proxies, by destinations."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: dict[tuple[int, ...], tuple[Multicast, tuple[Any, ...]]] = {}

    def multicast_of(self, targets: Iterable[Any]) -> Multicast:
        """Return the proxy for ``targets``. Raises UsageError."""
        given = tuple(targets)
        if any(isinstance(one, Handle) for one in given):  # their number has no limit
            return Multicast(self._context, destinations_of(self._context, given))
        key = tuple(map(id, given))
        if (found := self._known.get(key)) is None:
            made = Multicast(self._context, destinations_of(self._context, given))
            found = self._known[key] = made, given  # the reference keeps the identities valid
        return found[0]
