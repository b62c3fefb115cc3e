"""What handlers do with a handle: ``handle.fill.fork(3)``, ``await handle.fill(3)``, and in multicasts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from immortal.appsdk.calls.codec import bind_arguments
from immortal.appsdk.calls.outbox import not_in_handler
from immortal.appsdk.errors import UsageError
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.nodes.node import node_definition


class HandleMethod:
    """A handler of a node. ``life``: an immortal.appsdk.nodes.nodes.Nodes."""

    __slots__ = ("_handle", "_handler", "_life")

    def __init__(self, life: Any, handle: Any, handler: Handler[Any, Any]) -> None:
        self._life = life
        self._handle = handle
        self._handler = handler

    @property
    def _name(self) -> str:
        return self._handler.function.__qualname__

    def fork(self, *arguments: Any, **keywords: Any) -> None:
        life, context = self._life, self._life.context
        bound = bind_arguments(self._name, self._handler.signature, arguments, keywords)
        if threading.get_ident() != context.handling_thread_id:
            raise not_in_handler(context, self._name)
        task = context.tasks.running
        if task is None or not task.is_silent:
            codec = node_definition(self._handle._immortal_of[2]).codec(self._handler)
            if codec.may_hold_any and context.keeps_types:
                bound, keywords = codec.exactly(bound), {"": None}
            life.send(self._handle, self._handler, bound if keywords else arguments)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        life = self._life
        task = life.context.tasks.running
        if task is None:
            raise UsageError(
                f"{self._name}(...): only async handlers wait for an answer: send the call with "
                f"{self._handler.name}.fork(...), or move it into an 'async def' handler"
            )
        make_call: Callable[..., Any] = life.make_call
        return make_call(task, self._handle, self._handler, arguments, keywords)
