"""Proxy of a group, ``self.prices``, for use in handlers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar, overload

import immortal
from immortal.appsdk.calls.codec import bind_arguments, encode_value, unencodable
from immortal.appsdk.errors import UsageError
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.ordering.messages import Scope
from immortal.appsdk.ordering.views import Kind, Message, View
from immortal.appsdk.patterns.groups.members import Answer, Group, Grouped, newest_of
from immortal.appsdk.waiting.task_self import TaskMulticast, TaskSelf

G = TypeVar("G", bound=Grouped)


@overload
def group(target: type[G], name: str, members: Iterable[str], *, expel_after: timedelta | None = None) -> type[G]: ...
@overload
def group(target: str, name: str, members: Iterable[str], *, expel_after: timedelta | None = None) -> Any: ...
@overload
def group(
    target: Callable[[], type[G]], name: str, members: Iterable[str], *, expel_after: timedelta | None = None
) -> type[G]: ...
def group(target: object, name: str, members: Iterable[str], *, expel_after: timedelta | None = None) -> Any:
    """Declare, in a class body, the group ``name`` of instances of the class ``target`` (given as for
    :func:`immortal.peer`).

    ``members``: its first ones, the same in all classes and for ever; later ones join. ``expel_after``: a member of
    which nothing is heard for that long, while others wait for it, is expelled; None: only by an operator. Raises
    DefinitionError.
    """
    return Group(target, name, members, GroupProxy, lambda cls: issubclass(cls, Grouped), expel_after)


class GroupProxy:
    """Proxy of a group in handlers, with an attribute for each handler of its members."""

    def __init__(self, source: Group, instance: Any) -> None:
        self._immortal_made_from = source, instance

    def __getattr__(self, name: str) -> GroupMethod:
        if name.startswith("__"):
            raise AttributeError(name)
        source, instance = self._immortal_made_from
        return GroupMethod(source, instance, source.handler(name, definition_of(Grouped).handlers))

    def join(self) -> Awaitable[None]:
        """Make this instance a member, from a place in the order on: ``await self.prices.join()``. Raises
        UsageError.
        """
        return _change(*self._immortal_made_from, "join")

    def leave(self) -> Awaitable[None]:
        """End this instance's membership: ``await self.prices.leave()``. Raises UsageError; ValueError for the last
        member.
        """
        return _change(*self._immortal_made_from, "leave")


class GroupMethod:
    """Handler of all members: ``fork`` sends a call to each, ``await ....all(...)`` returns all answers."""

    def __init__(self, source: Group, instance: Any, handler: Handler[Any, Any]) -> None:
        self._source = source
        self._instance = instance
        self._handler = handler

    def fork(self, *arguments: Any, **keywords: Any) -> None:
        """Send the call to all members. Raises TypeError, UsageError."""
        encoded = self._encode(arguments, keywords)
        if is_task(self._instance):
            self._instance.group_send.fork(self._source.name, self._handler.name, encoded)
        else:
            self._instance.group_send(self._source.name, self._handler.name, encoded)

    def all(self, *arguments: Any, **keywords: Any) -> Awaitable[tuple[Any, ...]]:
        """Call all members and return their answers, in the order of the members. Raises TypeError, UsageError."""
        _require_task(self._instance, f"self.<group>.{self._handler.name}.all")
        return self._ask(self._encode(arguments, keywords))

    async def _ask(self, encoded: bytes) -> tuple[Any, ...]:
        source, instance, name = self._source, self._instance, self._handler.name
        decode = source.definition.codec(self._handler).decode_result
        own, view = await immortal.step(instance.group_known, source.name)
        while True:
            members = _to_members(source, instance, own, view)
            answers: tuple[Answer, ...]
            answers = await members.group_deliver.all(source.name, view.number, Message(0, name, encoded), own, "")
            if executed := [one for one in answers if one.is_executed]:  # all alike, but for who is expelled meanwhile
                return tuple(decode(one.result) for one in executed)
            view = await immortal.step(instance.group_learn, source.name, newest_of(answers))

    def _encode(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bytes:
        name, signature = self._handler.function.__qualname__, self._handler.signature
        bound = bind_arguments(name, signature, arguments, keywords)
        try:
            return encode_value(bound)
        except Exception as error:
            raise unencodable(name, signature.parameters, bound, error) from None


async def _change(source: Group, instance: Any, kind: Kind) -> None:
    _require_task(instance, f"self.<group>.{kind}")
    if not issubclass(instance.__class__, source.definition.cls):
        cls, members = instance.__class__.__qualname__, source.definition.name
        raise UsageError(f"group {source.name!r}: a {cls} can't {kind}: its members are of the class {members}")
    own, view = await immortal.step(instance.group_known, source.name)
    while (own in view.members) != (kind == "join"):
        if kind == "leave" and view.members == (own,):
            raise ValueError(f"group {source.name!r}: {own!r} is its last member and can't leave: another must join")
        everybody = _to_members(source, instance, own, View(view.number, view.after("join", own).members))  # it is last
        changed = await everybody.group_change.all(source.name, view, kind, [own], own)
        view = await immortal.step(
            instance.group_learn, source.name, newest_of(changed[: None if kind == "leave" else -1])
        )


def _to_members(source: Group, instance: Any, own: str, view: View) -> Any:
    """Return a multicast to the members, of an async handler."""
    task = instance._immortal_task
    destinations = source.destinations(own, task.tasks.definition, view.members)
    return TaskMulticast(task, destinations, Scope(source.name, view.number))


def is_task(instance: Any) -> bool:
    """Tell whether ``instance`` is the ``self`` of an async handler, which claims the class of the app."""
    return type(instance) is TaskSelf


def _require_task(instance: Any, what: str) -> None:
    if not is_task(instance):
        raise UsageError(f"{what}(...): only async handlers wait: move it into an 'async def' handler")
