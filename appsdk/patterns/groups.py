"""``prices = group(Book, "prices", members=["b1", "b2"])``: ordered multicasts to whoever is a member by then.

`docs/guide/ordering.md` says what is promised; :mod:`appsdk.ordering.views` how members agree.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from appsdk.calls.codec import bind_arguments, encoder, unencodable
from appsdk.errors import DefinitionError, UsageError
from appsdk.handlers.decorators import Handler, rpc
from appsdk.handlers.definition import Definition, Peer, definition_of
from appsdk.handlers.proxy import PeerProxy, find_handler, make_fork
from appsdk.immortal import Immortal
from appsdk.ordering.views import Kind, Membership, Message, Outgoing, View
from appsdk.waiting.task_self import TaskSelf


class Group(property):
    """What :func:`group` puts into a class."""

    def __init__(self, target: object, name: str, members: Iterable[str]) -> None:
        super().__init__(self._of)
        if not isinstance(name, str) or not name:
            raise DefinitionError(f"group(..., {name!r}): the second argument is the name of the group, a str")
        given = (members,) if isinstance(members, str) else tuple(members)
        if isinstance(members, str) or not given or len(set(given)) != len(given):
            raise DefinitionError(
                f"group(..., {name!r}, members={members!r}): the names of its first members were expected, each once: "
                f'members=["b1", "b2"]'
            )
        self.name = name
        self.first = View(1, given)
        self._target = target
        self._peers = {member: Peer(target, member) for member in given}

    @property
    def definition(self) -> Definition:
        """Of the members' class. Raises DefinitionError, and whatever importing its module raises."""
        return self._peers[self.first.members[0]].resolve()

    def handler(self, name: str) -> Handler[Any, Any]:
        """Of the members. Raises AttributeError, UsageError."""
        definition = self.definition
        if not issubclass(definition.cls, Grouped):
            raise UsageError(f"group {self.name!r}: its members' class {definition.name} is not below Grouped")
        found = find_handler(definition, name)
        if found.is_async or name in definition_of(Grouped).handlers:
            raise UsageError(
                f"group {self.name!r}: {definition.name}.{name} can't be called in a group: only one's own 'def' "
                f"handlers can, as each message is executed as a whole at its place in the order"
            )
        return found

    def targets(self, instance: Any, own: str, view: View) -> list[Any]:
        """For ``self.multicast``."""
        found: list[Any] = []
        for member in view.members:
            if member == own:
                found.append(instance)  # as type(self) is
                continue
            if member not in self._peers:
                self._peers[member] = Peer(self._target, member)
            found.append(PeerProxy(self._peers[member], instance._immortal_context))
        return found

    def _of(self, instance: Any) -> GroupProxy:
        if not isinstance(instance, Grouped):
            raise UsageError(f"group {self.name!r}: {type(instance).__qualname__} is not below Grouped, and must be")
        return GroupProxy(self, instance)


def group(target: object, name: str, members: Iterable[str]) -> Any:
    """The group ``name`` of instances of the class ``target`` (given as for :func:`appsdk.peer`), in the class body.

    ``members``: its first ones, the same in all classes and for ever; later ones join. Raises DefinitionError.
    """
    return Group(target, name, members)


class GroupProxy:
    """A group, as handlers see it: an attribute for each handler of its members."""

    def __init__(self, source: Group, instance: Any) -> None:
        self._immortal_made_from = source, instance

    def __getattr__(self, name: str) -> GroupMethod:
        if name.startswith("__"):
            raise AttributeError(name)
        source, instance = self._immortal_made_from
        return GroupMethod(source, instance, source.handler(name))

    def join(self) -> Awaitable[None]:
        """``await self.prices.join()``: this instance is a member from a place in the order on. Raises UsageError."""
        return _change(*self._immortal_made_from, "join")

    def leave(self) -> Awaitable[None]:
        """``await self.prices.leave()``. Raises UsageError; ValueError for the last member."""
        return _change(*self._immortal_made_from, "leave")


class GroupMethod:
    """A handler of all members: ``fork`` sends a call to them, ``await ....all(...)`` gives all answers."""

    def __init__(self, source: Group, instance: Any, handler: Handler[Any, Any]) -> None:
        self._source = source
        self._instance = instance
        self._handler = handler

    def fork(self, *arguments: Any, **keywords: Any) -> None:
        """Raises TypeError, UsageError."""
        encoded = self._encode(arguments, keywords)
        if is_task(self._instance):
            self._instance.group_send.fork(self._source.name, self._handler.name, encoded)
        else:
            self._instance.group_send(self._source.name, self._handler.name, encoded)

    def all(self, *arguments: Any, **keywords: Any) -> Awaitable[tuple[Any, ...]]:
        """In the order of the members. Raises TypeError, UsageError."""
        _require_task(self._instance, f"self.<group>.{self._handler.name}.all")
        return self._ask(self._encode(arguments, keywords))

    async def _ask(self, encoded: bytes) -> tuple[Any, ...]:
        source, instance, name = self._source, self._instance, self._handler.name
        decode = source.definition.codec(self._handler).decode_result
        own, view = await instance.group_known(source.name)
        while True:
            members = instance.multicast(source.targets(instance, own, view))
            answers = await members.group_deliver.all(source.name, view.number, Message(0, name, encoded), own, "")
            if all(one.is_executed for one in answers):
                return tuple(decode(one.result) for one in answers)
            view = await instance.group_learn(source.name, newest_of(answers))

    def _encode(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bytes:
        name, signature = self._handler.function.__qualname__, self._handler.signature
        bound = bind_arguments(name, signature, arguments, keywords)
        try:
            return encoder.encode(bound)
        except Exception as error:
            raise unencodable(name, signature.parameters, bound, error) from None


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """Of a member; ``view``: what it is there now."""

    is_executed: bool
    view: View
    result: bytes = b""


class Known(msgspec.Struct, array_like=True):
    membership: Membership
    outgoing: Outgoing


class Grouped(Immortal):
    """The base class of members of groups, and of who sends to them. Its handlers are how they talk to each other."""

    groups_known: dict[str, Known] | None = None

    @rpc
    def group_known(self, name: str) -> tuple[str, View]:
        """This instance's name, and the newest view of the group that it knows."""
        membership = self._group(name)[1].membership
        return membership.own, membership.view

    @rpc
    def group_learn(self, name: str, view: View) -> View:
        """What a member has answered. What is sent next goes there, or to a newer view."""
        membership = self._group(name)[1].membership
        membership.learn(view)
        return max(view, membership.view, key=number_of)

    @rpc
    def group_send(self, name: str, method: str, arguments: bytes) -> None:
        source, known = self._group(name)
        message = known.outgoing.send(method, arguments, known.membership.view)
        self._group_multicast(source, known, message)

    @rpc
    def group_told(self, name: str, number: int, view_number: int, newest: View | None) -> None:
        source, known = self._group(name)
        if newest is not None:
            known.membership.learn(newest)
        for message in known.outgoing.told(number, view_number, newest):
            self._group_multicast(source, known, message)

    @rpc
    def group_deliver(self, name: str, view_number: int, message: Message, sender: str, teller: str) -> Answer:
        """A message to the group, at its place in the order. ``teller``: which member tells the sender; "": none."""
        source, known = self._group(name)
        membership = known.membership
        is_current = membership.is_current(view_number)
        view = membership.view
        result = b""
        if is_current:
            handler = source.handler(message.method)
            codec = definition_of(type(self)).codec(definition_of(type(self)).handlers[handler.name])
            call: Callable[..., Any] = getattr(self, handler.name)
            result = encoder.encode(call(*codec.decode(message.arguments)))
        if teller == membership.own:
            newest = None if is_current else view
            if sender == membership.own:
                self.group_told(name, message.number, view_number, newest)
            else:
                told = definition_of(Grouped).handlers["group_told"]
                make_fork(self._immortal_context, sender, told)(name, message.number, view_number, newest)
        return Answer(is_current, view, result)

    @rpc
    def group_change(self, name: str, base: View, kind: Kind, member: str) -> Answer:
        """A change of membership, at its place in the order."""
        membership = self._group(name)[1].membership
        counts = membership.change(base, kind, member)
        return Answer(counts, membership.view)

    def _group(self, name: str) -> tuple[Group, Known]:
        source = group_of(type(self), name)
        if self.groups_known is None:
            self.groups_known = {}
        known = self.groups_known.get(name)
        if known is None:
            own = self._immortal_context.instance_name
            known = self.groups_known[name] = Known(Membership(own, source.first), Outgoing(source.first))
        return source, known

    def _group_multicast(self, source: Group, known: Known, message: Message) -> None:
        own, view = known.membership.own, known.outgoing.view
        members: Any = self.multicast(source.targets(self, own, view))
        members.group_deliver.fork(source.name, view.number, message, own, view.teller)


async def _change(source: Group, instance: Any, kind: Kind) -> None:
    _require_task(instance, f"self.<group>.{kind}")
    if not issubclass(instance.__class__, source.definition.cls):
        cls, members = instance.__class__.__qualname__, source.definition.name
        raise UsageError(f"group {source.name!r}: a {cls} can't {kind}: its members are of the class {members}")
    own, view = await instance.group_known(source.name)
    while (own in view.members) != (kind == "join"):
        if kind == "leave" and view.members == (own,):
            raise ValueError(f"group {source.name!r}: {own!r} is its last member and can't leave: another must join")
        everybody = View(view.number, view.after("join", own).members)  # this instance last
        members = instance.multicast(source.targets(instance, own, everybody))
        answers = (await members.group_change.all(source.name, view, kind, own))[: None if kind == "leave" else -1]
        view = await instance.group_learn(source.name, newest_of(answers))


def number_of(view: View) -> int:
    return view.number


def newest_of(answers: Iterable[Answer]) -> View:
    return max((one.view for one in answers), key=number_of)


def group_of(cls: type, name: str) -> Group:
    """Raises UsageError."""
    for ancestor in cls.__mro__:
        for one in vars(ancestor).values():
            if isinstance(one, Group) and one.name == name:
                return one
    raise UsageError(f"{cls.__qualname__} declares no group {name!r}: give it an attribute: group(..., {name!r}, ...)")


def is_task(instance: Any) -> bool:
    """Whether it is the self of an async handler, which says that it has the class of the app."""
    return type(instance) is TaskSelf


def _require_task(instance: Any, what: str) -> None:
    if not is_task(instance):
        raise UsageError(f"{what}(...): only async handlers wait: move it into an 'async def' handler")
