"""Stand-in for ``self`` in an ``async def`` handler, with awaitable calls in place of attributes.

It looks like the app: its class is the app's, so that ``super()`` and ``isinstance`` work, and its methods are those of
the class, with this ``self``. There are three differences. Calls of handlers and peers return awaitables. Attributes
are copies, which the journal keeps. Setting an attribute is refused: others change attributes while a handler waits,
and a recovery runs it again later. In the function of an `immortal.step` it is the app itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable
from types import FrameType, FunctionType, MethodType, SimpleNamespace
from typing import Any

from immortal.appsdk.calls.user_code import in_debugger, place_of
from immortal.appsdk.errors import UsageError
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.handlers.definition import Definition, Peer, Peers
from immortal.appsdk.handlers.keys import ByName
from immortal.appsdk.handlers.multicast import Destination, NodeHandles, make_multicast_fork, shared_handler
from immortal.appsdk.handlers.proxy import KeyPeers, find_handler
from immortal.appsdk.ordering.messages import Scope
from immortal.appsdk.state.schema import StateSchema
from immortal.appsdk.waiting.loop import Together
from immortal.appsdk.waiting.operations import (
    Call,
    MulticastCall,
    NodeTarget,
    Operation,
    Step,
    Target,
)
from immortal.appsdk.waiting.task import Task

_MISSING = object()
_TYPED = ("<stdin>", "<string>")  # files of expressions that a debugger evaluates


class TaskSelf:
    """Stand-in for the app in the run of a handler."""

    __slots__ = ("_immortal_task",)

    _immortal_task: Task

    def __init__(self, task: Task) -> None:
        object.__setattr__(self, "_immortal_task", task)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return _definition(self._immortal_task).cls

    def __repr__(self) -> str:
        return f"<{_definition(self._immortal_task).name} in {self._immortal_task.name}>"

    def __dir__(self) -> list[str]:
        definition = _definition(self._immortal_task)
        return sorted({*dir(definition.cls), *definition.state().fields})

    @property
    def _immortal_context(self) -> SimpleNamespace:
        """Stand-in for a Context, in which ``super()`` finds the handlers and peers of the class by their key."""
        task = self._immortal_task
        definition = task.tasks.definition

        def handler(key: str) -> TaskHandler:
            found = definition.by_key[key]
            return _own_handler(task, task.tasks.target("", definition.handlers[found.name], found))

        return SimpleNamespace(
            handlers=ByName(handler), peers=ByName(lambda key: _peer(task, definition.peers_by_key[key]))
        )

    def __getattr__(self, name: str) -> Any:
        task = self._immortal_task
        if task.runs_local_step:
            return getattr(_subject(task), name)
        member = task.tasks.members.get(name)
        if member is not None:
            return _own_handler(task, member) if isinstance(member, Target) else _peer(task, member)
        definition, whole = _definition(task), task.tasks.definition
        found: Any = inspect.getattr_static(definition.cls, name, _MISSING)
        if isinstance(found, Handler):
            own = found if definition is whole else whole.by_key[found.key]  # of a keyed class
            target = task.tasks.target("", whole.handlers[name], own)
            task.tasks.members[name] = target
            return _own_handler(task, target)
        if isinstance(found, Peer | Peers):
            task.tasks.members[name] = found
            return _peer(task, found)
        if isinstance(found, FunctionType):
            return MethodType(found, self)
        if isinstance(found, property) and found.fget is not None:
            return found.fget(self)
        schema = definition.state()
        if name not in schema.fields and name not in schema.transient:
            subject = _subject(task)
            if found is not _MISSING and (subject is None or name not in vars(subject)):
                return found.__get__(None, definition.cls) if hasattr(found, "__get__") else found
            if name.startswith("__") or not hasattr(subject, name):
                raise AttributeError(f"{definition.name!r} object has no attribute {name!r}")
        if name in schema.attributes and schema.serializer == "msgspec":
            frame = sys._getframe(1)
            is_looked_at = frame.f_code.co_filename in _TYPED or in_debugger(frame)  # no rebuild reads it there again
            return _read_attribute(task, schema, name) if is_looked_at else task.read(schema, name)
        raise _refused(task, "reads", name, sys._getframe(1))

    def __setattr__(self, name: str, value: object) -> None:
        if self._immortal_task.runs_local_step:
            setattr(_subject(self._immortal_task), name, value)
            return
        raise _refused(self._immortal_task, "sets", name, sys._getframe(1))

    def __delattr__(self, name: str) -> None:
        if self._immortal_task.runs_local_step:
            delattr(_subject(self._immortal_task), name)
            return
        raise _refused(self._immortal_task, "deletes", name, sys._getframe(1))


def _definition(task: Task) -> Definition:
    """Return the definition of the class of its ``self``."""
    return task.tasks.definition.objects or task.tasks.definition


def _subject(task: Task) -> Any:
    """Return the object for which its ``self`` stands: the app, or its key's object (None: there is none)."""
    app, present = task.tasks.instance, task.tasks.context.present
    if not task.handler.is_keyed:
        return app
    return app.keys.get(task.key) if present is None else present.one


def _read_attribute(task: Task, schema: StateSchema, name: str) -> Any:
    """Return a copy of an attribute for a debugger, without a journal entry. Raises StateError."""
    value = getattr(_subject(task), name)
    return schema.decode_attribute(name, schema.encode_attribute(name, value))


def _refused(task: Task, verb: str, name: str, frame: FrameType) -> UsageError:
    return UsageError(
        f"{place_of(frame)}: {frame.f_code.co_qualname} {verb} self.{name}: others change it while an "
        f"async handler waits: move this line into a function, or into a 'def' handler (@rpc), and await "
        f"immortal.step(<function>)"
    )


# --- handlers and peers -----------------------------------------------------------------------------------------------


class TaskHandler:
    """Handler: a call of it returns an awaitable, and `immortal.step` runs it if it is an own ``def``."""

    __slots__ = ("_front", "_target", "_task")

    def __init__(self, task: Task, target: Target, front: tuple[Any, ...] = ()) -> None:
        """Make it. ``front``: the key, of a handler of a keyed class itself."""
        self._task = task
        self._target = target
        self._front = front

    def __call__(self, *arguments: Any, **keywords: Any) -> Awaitable[Any]:
        task, target = self._task, self._target
        if target.is_overridden:  # the log would call the overriding one
            coroutine: Awaitable[Any] = target.called.function(TaskSelf(task), *self._front, *arguments, **keywords)
            return coroutine
        if not target.is_call:
            raise UsageError(
                f"{place_of(sys._getframe(1))}: self.{self.__name__}(...) in an async handler: a 'def' handler of its "
                f"own is a step there: await immortal.step(self.{self.__name__}, ...)"
            )
        bound = target.codec.bind((*self._front, *arguments), keywords)
        _ = target.codec.decode_result  # raises here, at the place of the call
        return Call(task, target, bound)

    @property
    def __name__(self) -> str:
        return self._target.called.name

    def as_step(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Operation:
        """Return the step that `immortal.step` makes of a handler. Raises UsageError, TypeError."""
        task, target, name = self._task, self._target, self.__name__
        if target.called.is_async or target.destination:
            whose = f"self.<peer>.{name}" if target.destination else f"self.{name}"
            raise UsageError(f"immortal.step({whose}): a 'def' handler of its own was expected: await {whose}(...)")
        bound = target.codec.bind((*self._front, *arguments), keywords)
        _ = target.codec.decode_result  # raises here, at the place of the step
        return Step(task, target, bound)

    def fork(self, *arguments: Any, **keywords: Any) -> None:
        task, target = self._task, self._target
        if not task.is_silent:
            arguments = *self._front, *arguments
            if target.codec.needs_forms:
                codec = target.codec
                arguments, keywords = codec.split_keywords(codec.tag_values(codec.bind(arguments, keywords)))
            task.tasks.fork(target.destination, target.handler)(*arguments, **keywords)


class TaskPeer:
    """Proxy of another instance for an ``async def`` handler."""

    __slots__ = ("_immortal_peer", "_immortal_task")

    def __init__(self, task: Task, source: Peer) -> None:
        self._immortal_task = task
        self._immortal_peer = source

    def __repr__(self) -> str:
        return f"<peer {self._immortal_peer.name!r}>"

    def __getattr__(self, name: str) -> TaskHandler:
        source, tasks = self._immortal_peer, self._immortal_task.tasks
        target = tasks.peer_targets.get((source, name))
        if target is None:
            if name.startswith("__"):
                raise AttributeError(name)
            handler = find_handler(source.resolve(), name)
            target = tasks.peer_targets[source, name] = tasks.target(source.name, handler, handler)
        return TaskHandler(self._immortal_task, target)


class TaskMulticast:
    """Proxy of several instances, with each handler that all have. ``scope``: set if they are members of a group."""

    __slots__ = ("_destinations", "_immortal_task", "_scope")

    def __init__(self, task: Task, destinations: list[Destination], scope: Scope | None = None) -> None:
        self._immortal_task = task
        self._destinations = destinations
        self._scope = scope

    def __getattr__(self, name: str) -> TaskMulticastMethod:
        if name.startswith("__"):
            raise AttributeError(name)
        handler = shared_handler(self._destinations, name)
        return TaskMulticastMethod(self._immortal_task, self._destinations, handler, self._scope)


class TaskMulticastMethod:
    """Handler of several instances: ``all(...)`` returns an awaitable of all answers, in the order of the instances."""

    __slots__ = ("_destinations", "_handler", "_scope", "_task")

    def __init__(
        self, task: Task, destinations: list[Destination], handler: Handler[Any, Any], scope: Scope | None
    ) -> None:
        self._task = task
        self._scope = scope
        self._destinations = destinations
        self._handler = handler

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        raise UsageError(
            f"immortal.multicast([...]).{self._handler.name}(...): all answers are written "
            f"await immortal.multicast([...]).{self._handler.name}.all(...)"
        )

    def all(self, *arguments: Any, **keywords: Any) -> Awaitable[Any]:
        task, handler = self._task, self._handler
        own_name = task.tasks.context.instance_name
        calls: list[MulticastCall] = []
        for to, source in self._destinations:
            if isinstance(source, NodeHandles):
                target: Target = NodeTarget(
                    task.tasks.context.nodes, source.only(handler.name), source.handler(handler.name)
                )
            else:
                target = task.tasks.target("" if to == own_name else to, handler, handler)
            bound = target.codec.bind(arguments, keywords)
            _ = target.codec.decode_result  # raises here, at the place of the call
            MulticastCall(task, target, to, bound, calls, self._scope)
        return Together(task, list(calls))

    def fork(self, *arguments: Any, **keywords: Any) -> None:
        if not self._task.is_silent:
            context = self._task.tasks.context
            make_multicast_fork(context, self._destinations, self._handler, self._scope)(*arguments, **keywords)


def _own_handler(task: Task, target: Target) -> TaskHandler:
    return TaskHandler(task, target, (task.key,) if target.called.is_keyed else ())


def _peer(task: Task, source: Peer | Peers) -> TaskPeer | KeyPeers:
    return TaskPeer(task, source) if isinstance(source, Peer) else KeyPeers(source, lambda one: TaskPeer(task, one))
