"""Calls of nodes that an ``async def`` handler awaits."""

from __future__ import annotations

from typing import Any

from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.nodes.node import node_definition
from immortal.appsdk.nodes.nodes import Nodes
from immortal.appsdk.waiting.operations import Call, Owner, Target
from immortal.protocol.messages import RpcKind
from immortal.protocol.nodes import NODE_METHOD_ID


class NodeTarget(Target):
    """A handler of the node that ``handle`` leads to."""

    __slots__ = ("handle", "nodes")

    def __init__(self, nodes: Nodes, handle: Any, handler: Handler[Any, Any]) -> None:
        codec = node_definition(handle._immortal_of[2]).codec(handler)
        super().__init__(nodes.destination(handle), handler, handler, codec)
        self.nodes = nodes
        self.handle = handle
        self.is_call = True  # also of one's own node: by its handle it is called through the log
        self.what = f"call node {handler.function.__qualname__} of {self.destination or 'self'}"
        name = handler.function.__qualname__
        self.send = nodes.context.outbox.make_sender(self.destination, name, NODE_METHOD_ID, RpcKind.CALL)

    @property
    def method_id(self) -> int:
        return NODE_METHOD_ID

    def wrapped(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Raises UsageError."""
        self.nodes.require_usable(self.handle)
        return self.nodes.wrapped([self.handle._immortal_of[1]], self.handler, arguments)


def make_node_call(
    task: Owner, handle: Any, handler: Handler[Any, Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Call:
    """What ``handle.<handler>(...)`` is in an async handler. Raises TypeError, DefinitionError."""
    target = NodeTarget(handle._immortal_of[3], handle, handler)
    bound = target.codec.bind(arguments, keywords)
    _ = target.codec.decode_result  # raises here, where the call is made
    return Call(task, target, bound)
