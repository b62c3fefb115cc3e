"""Groups of instances, with ordered multicasts to their members: ``prices = group(Book, "prices", members=["b1",
"b2"])``. Their declaration and calls in classes, and the handlers by which members agree on views and messages.

`docs/how-to/ordering.md` has the guarantees; :mod:`immortal.appsdk.ordering.groups` the members' protocol.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, overload

import msgspec

import immortal
from immortal.appsdk.calls.codec import bind_arguments, encode_value, encoder, unencodable
from immortal.appsdk.errors import DefinitionError, UsageError
from immortal.appsdk.handlers.decorators import Handler, rpc
from immortal.appsdk.handlers.definition import Definition, Peer, definition_of
from immortal.appsdk.handlers.multicast import Destination, Multicast
from immortal.appsdk.handlers.proxy import find_handler, make_fork
from immortal.appsdk.immortal import Immortal
from immortal.appsdk.ordering.groups import Kind, Membership, Message, Outgoing, View
from immortal.appsdk.ordering.messages import Scope
from immortal.appsdk.waiting.task_self import TaskMulticast, TaskSelf
from immortal.protocol.identity import IdentityConflict
from immortal.protocol.safe_output import is_encodable

__all__ = ["Grouped", "group"]

EXPEL_AFTER_MIN = timedelta(seconds=1)


class Group(property):
    """Attribute that :func:`immortal.appsdk.patterns.groups.group` creates in a class."""

    def __init__(
        self,
        target: object,
        name: str,
        members: Iterable[str],
        expel_after: timedelta | None = None,
    ) -> None:
        super().__init__(self._proxy_of)
        if not isinstance(name, str) or not name or not is_encodable(name):
            raise DefinitionError(f"group(..., {name!r}): the second argument is the name of the group, a str")
        given = (members,) if isinstance(members, str) else tuple(members)
        if isinstance(members, str) or not given or len(set(given)) != len(given):
            raise DefinitionError(
                f"group(..., {name!r}, members={members!r}): the names of its first members were expected, each once: "
                f'members=["b1", "b2"]'
            )
        if expel_after is not None and not (isinstance(expel_after, timedelta) and expel_after >= EXPEL_AFTER_MIN):
            raise DefinitionError(
                f"group(..., {name!r}, expel_after={expel_after!r}): a timedelta of {EXPEL_AFTER_MIN.seconds} s or "
                f"more was expected, or None: nobody is expelled by itself"
            )
        self.name = name
        self.expel_after = expel_after
        self.first = View(1, given)
        self._target = target
        self._peers = {member: Peer(target, member) for member in given}

    @property
    def definition(self) -> Definition:
        """Definition of the members' class. Raises DefinitionError, and the errors of importing its module."""
        return self._peers[self.first.members[0]].resolve()

    def handler(self, name: str, reserved: Iterable[str]) -> Handler[Any, Any]:
        """Return the members' handler called ``name``, which must not be in ``reserved``. Raises AttributeError,
        UsageError.
        """
        definition = self.definition
        if not issubclass(definition.cls, Grouped):
            raise UsageError(f"group {self.name!r}: its members' class {definition.name} is not below Grouped")
        found = find_handler(definition, name)
        if found.is_async or name in reserved:
            raise UsageError(
                f"group {self.name!r}: {definition.name}.{name} can't be called in a group: only one's own 'def' "
                f"handlers can, as each message is executed as a whole at its place in the order"
            )
        return found

    def destinations(self, own: str, definition: Definition, members: Iterable[str]) -> list[Destination]:
        """Return the destinations of a multicast by ``own``, whose class is that of ``definition``."""
        found: list[Destination] = []
        for member in members:
            if member == own:
                found.append((own, lambda: definition))
                continue
            if member not in self._peers:
                self._peers[member] = Peer(self._target, member)
            found.append((member, self._peers[member].resolve))
        return found

    def _proxy_of(self, instance: Any) -> Any:
        if not issubclass(instance.__class__, Grouped):
            raise UsageError(f"group {self.name!r}: {type(instance).__qualname__} is not below Grouped, and must be")
        return GroupProxy(self, instance)


def check_groups(cls: type) -> None:
    """Check that each name belongs to only one group. Raises DefinitionError."""
    known: dict[str, Group] = {}
    for ancestor in cls.__mro__:
        for one in vars(ancestor).values():
            if isinstance(one, Group) and known.setdefault(one.name, one).first != one.first:
                what, advice = f"{cls.__qualname__}: group {one.name!r}", "give another group another name"
                conflict = IdentityConflict(what, f"of {_members(known[one.name])}", f"of {_members(one)}", advice)
                raise DefinitionError(str(conflict)) from conflict


def _members(group: Group) -> str:
    return ", ".join(group.first.members)


def groups_of(cls: type) -> dict[str, Group]:
    """Return the groups of a class by name."""
    found = [one for ancestor in cls.__mro__ for one in vars(ancestor).values() if isinstance(one, Group)]
    return {one.name: one for one in reversed(found)}


def group_of(cls: type, name: str) -> Group:
    """Return the group of that name. Raises UsageError."""
    if (found := groups_of(cls).get(name)) is None:
        raise UsageError(
            f"{cls.__qualname__} declares no group {name!r}: give it an attribute: group(..., {name!r}, ...)"
        )
    return found


# Messages between members of groups and their senders: handlers, at their places in the log.


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """Answer of a member. ``view``: the member's present view."""

    is_executed: bool
    view: View
    result: bytes = b""


class Handled(msgspec.Struct, array_like=True, frozen=True):
    """Last message of one sender that was executed here, with the view that it was sent to. ``teller``: the member that
    reports to the sender.
    """

    executed: int
    view: int
    teller: str


class Known(msgspec.Struct, array_like=True):
    """State of a group at one instance.

    ``newest``: the newest view it has learned, which can be ahead of its place in the order. ``asking``: (sender,
    member, number of a view) for senders that wait for the view without that member. ``expelling``: members that this
    instance expels.
    """

    membership: Membership
    outgoing: Outgoing
    newest: View
    handled: dict[str, Handled] = {}
    asking: list[tuple[str, str, int]] = []
    expelling: list[str] = []

    @property
    def own(self) -> str:
        return self.membership.own

    @property
    def view(self) -> View:
        """Newest known view."""
        return max(self.membership.view, self.newest, key=number_of)


class Grouped(Immortal):
    """Base class of members of groups and of senders to them. Its handlers are the members' protocol."""

    groups_known: dict[str, Known] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_groups(cls)

    if TYPE_CHECKING:  # for self.<group>, which a type checker takes for the class of its members

        @classmethod
        def join(cls) -> Awaitable[None]: ...

        @classmethod
        def leave(cls) -> Awaitable[None]: ...

    def on_expelled(self, name: str) -> None:
        """Called when other members have expelled this instance from the group ``name``; for classes to override."""

    @rpc
    def group_known(self, name: str) -> tuple[str, View]:
        """Return this instance's name, and the newest view of the group that it knows."""
        known = self._group(name)[1]
        return known.own, known.view

    @rpc
    def group_learn(self, name: str, view: View) -> View:
        """Learn the view of a member's answer. Later messages go to that view, or to a newer one."""
        known = self._group(name)[1]
        known.membership.learn(view)
        return max(view, known.view, key=number_of)

    # --- messages -----------------------------------------------------------------------------------------------------

    @rpc
    def group_send(self, name: str, method: str, arguments: bytes) -> None:
        source, known = self._group(name)
        self._group_multicast(source, known, known.outgoing.send(method, arguments, known.view))

    @rpc
    def group_told(self, name: str, number: int, view_number: int, newest: View | None) -> None:
        source, known = self._group(name)
        if newest is not None:
            known.membership.learn(newest)
        for message in known.outgoing.apply_report(number, view_number, newest):
            self._group_multicast(source, known, message)

    @rpc
    def group_deliver(self, name: str, view_number: int, message: Message, sender: str, teller: str) -> Answer:
        """Execute a message to the group, at its place in the order. ``teller``: the member that reports to the sender;
        "": none.
        """
        source, known = self._group(name)
        membership = known.membership
        is_current = membership.is_current(view_number)
        view = membership.view
        result = b""
        if is_current:
            handler = source.handler(message.method, definition_of(Grouped).handlers)
            codec = definition_of(type(self)).codec(definition_of(type(self)).handlers[handler.name])
            call: Callable[..., Any] = getattr(self, handler.name)
            result = encode_value(call(*codec.decode(message.arguments)))
        if teller:
            before = known.handled.get(sender, Handled(0, 0, teller))
            executed = (message.number, view_number) if is_current else (before.executed, before.view)
            known.handled[sender] = Handled(*executed, teller)
        if teller == known.own and not membership.is_cut(view_number):
            newest = None if is_current else view
            if sender == known.own:
                self.group_told(name, message.number, view_number, newest)
            else:
                self._group_tell(sender, "group_told", name, message.number, view_number, newest)
        return Answer(is_current, view, result)

    def _group_multicast(self, source: Group, known: Known, message: Message) -> None:
        own, view = known.own, known.outgoing.view
        self._group_members(source, own, view.number, view.members).group_deliver.fork(
            source.name, view.number, message, own, view.teller_of(own)
        )

    def _group_members(self, source: Group, own: str, view: int, members: Iterable[str]) -> Any:
        definition = definition_of(type(self))
        destinations = source.destinations(own, definition, members)
        return Multicast(self._immortal_context, destinations, Scope(source.name, view))

    def _group_tell(self, to: str, method: str, *arguments: Any) -> None:
        """Fork a handler of ``to``: another instance, or this one, after all that it has sent to itself before."""
        to = "" if to == self._immortal_context.instance_name else to
        make_fork(self._immortal_context, to, definition_of(Grouped).handlers[method])(*arguments)

    # --- changes ------------------------------------------------------------------------------------------------------

    @rpc
    def group_change(self, name: str, base: View, kind: Kind, changed: list[str], by: str) -> Answer:
        """Change the membership, at the change's place in the order."""
        known = self._group(name)[1]
        counts = known.membership.change(base, kind, *changed)
        view = known.membership.view
        known.expelling = [one for one in known.expelling if one in view.members and known.membership.is_member]
        if counts and kind == "expel":
            self._group_renew_all(name, known, base, changed)
        if by == known.own and kind == "expel":
            self._group_expel_again(name, known)
        return Answer(counts, view)

    def _group_expel_again(self, name: str, known: Known) -> None:
        view = known.membership.view
        for member in known.expelling:
            self._immortal_context.multicasts.expel(name, member, view.number, list(view.members))

    @rpc
    def group_ready(self, name: str, view_number: int, leaving: list[str]) -> None:
        """Note that no other member sends anything more to ``leaving``. This instance calls it itself."""
        source, known = self._group(name)
        view = known.membership.view
        others = [one for one in view.members if one not in leaving]
        is_cut = self._immortal_context.multicasts.is_cut(Scope(name, view.number), others)
        if view.number != view_number or is_cut:  # another change was first, or another member is being expelled too
            self._group_expel_again(name, known)
        else:
            members = self._group_members(source, known.own, view.number, others)
            members.group_change.fork(name, view, "expel", leaving, known.own)

    @rpc
    def group_asked(self, name: str, member: str, view_number: int, sender: str) -> None:
        """Make ``sender`` cancel its messages to the views up to that one, and wait for another view. This instance
        calls it itself.
        """
        known = self._group(name)[1]
        if member not in known.membership.view.members:
            self._group_renew(name, known, member, view_number, sender)
        elif sender != known.own:
            known.asking.append((sender, member, view_number))
        else:
            self._group_expel_again(name, known)  # its own change can be among the cancelled messages

    @rpc
    def group_renew(
        self, name: str, member: str, view_number: int, view: View, source: str, executed: tuple[int, int]
    ) -> None:
        """Learn from ``source`` that ``member`` was expelled from that view. ``executed``: (number of the sender's last
        message that ``source`` has executed, number of the view that it was sent to).
        """
        declared, known = self._group(name)
        known.newest = max(known.newest, view, key=number_of)
        if member == known.own and known.membership.is_member:
            known.membership.expelled(view_number, view)
            if not known.membership.is_member:
                self.on_expelled(name)
        else:
            known.membership.learn(view)
        outgoing = known.outgoing
        number = executed[0] if executed[1] == outgoing.view.number else 0
        again = outgoing.resend_after_expulsion(member, view_number, known.view, source, number)
        for message in again:
            self._group_multicast(declared, known, message)
        answer = encoder.encode(Answer(False, known.view))
        self._immortal_context.tasks.incoming.answer_expelled(Scope(name, view_number), member, source, answer)

    def _group_renew_all(self, name: str, known: Known, base: View, expelled: list[str]) -> None:
        """Notify all that wait for the view, or for an expelled member; the first member notifies the expelled ones
        too.
        """
        view, own = known.membership.view, known.own
        for member in expelled:
            waiting = {sender: number for sender, asked, number in known.asking if asked == member}
            told = [sender for sender, one in known.handled.items() if one.teller == member]
            first = [member] if view.members[0] == own else []
            for sender in dict.fromkeys([*waiting, *told, own, *first]):
                self._group_renew(name, known, member, waiting.get(sender, base.number), sender)
        known.asking = [one for one in known.asking if one[1] not in expelled]

    def _group_renew(self, name: str, known: Known, member: str, view_number: int, sender: str) -> None:
        view, own = known.membership.view, known.own
        handled = known.handled.get(sender, Handled(0, 0, ""))
        executed = handled.executed, handled.view
        self._group_tell(sender, "group_renew", name, member, view_number, view, own, executed)

    @classmethod
    def _immortal_of_order(cls) -> frozenset[int]:
        """Return the IDs of the methods by which groups keep their order: no user's call follows from them."""
        return frozenset(one.method_id for one in definition_of(Grouped).handlers.values())

    # --- silent members -----------------------------------------------------------------------------------------------

    def _immortal_expel_after(self) -> dict[str, int]:
        """Return, by group, the ns of silence after which a member is expelled."""
        found = groups_of(type(self)).values()
        return {one.name: one.expel_after // timedelta(microseconds=1) * 1000 for one in found if one.expel_after}

    @rpc
    def group_silent(self, name: str, member: str, view_number: int) -> None:
        """Expel ``member``, which is silent. Called by this instance itself, or by a sender to that view."""
        source, known = self._group(name)
        members = known.view.members
        if source.expel_after is not None and member in members and known.own in members and member != known.own:
            self._immortal_expel(name, member)

    # --- operators ----------------------------------------------------------------------------------------------------

    def _immortal_expel(self, name: str, member: str) -> tuple[bool, str]:
        """Begin to expel ``member``. Returns (True if that is possible, a text). It is an order, which no block
        delays.
        """
        if name not in groups_of(type(self)):
            return False, f"{type(self).__qualname__} declares no group {name!r}"
        known = self._group(name)[1]
        view, own = known.membership.view, known.own
        members = ", ".join(view.members)
        if own not in view.members:
            return False, f"{own!r} is no member of {name!r} itself: {members} are, as far as it knows"
        if member == own:
            return False, f"{own!r} does not expel itself: another member does, or it leaves"
        if member not in view.members:
            return False, f"{member!r} is no member of {name!r}: {members} are"
        if member not in known.expelling:
            known.expelling.append(member)
        self._group_expel_again(name, known)
        return True, f"{member} is being expelled from {name}"

    # --- state of the groups ------------------------------------------------------------------------------------------

    def _group(self, name: str) -> tuple[Group, Known]:
        """Return the group of that name with its state here. Raises UsageError."""
        source = group_of(type(self), name)
        if self.groups_known is None:
            self.groups_known = {}
        known = self.groups_known.get(name)
        if known is None:
            own, first = self._immortal_context.instance_name, source.first
            known = self.groups_known[name] = Known(Membership(own, first), Outgoing(first), first)
        return source, known

    def _immortal_groups(self) -> list[dict[str, Any]]:
        """Return the groups that the class declares in plain values, for :mod:`immortal.appsdk.waiting.tasks`."""
        found = []
        for name, source in groups_of(type(self)).items():
            known = (self.groups_known or {}).get(name)
            membership = Membership("", source.first) if known is None else known.membership
            own = self._immortal_context.instance_name
            found.append(
                {
                    "name": name,
                    "view": membership.view.number if known is None else known.view.number,
                    "members": list(membership.view.members if known is None else known.view.members),
                    "is_member": own in membership.view.members,
                    "expelling": [] if known is None else known.expelling,
                    "unconfirmed": 0 if known is None else len(known.outgoing.unconfirmed),
                }
            )
        return found


def number_of(view: View) -> int:
    return view.number


def newest_of(answers: Iterable[Answer]) -> View:
    return max((one.view for one in answers), key=number_of)


# Declaration of a group in a class, and its proxy in handlers: ``self.prices``.


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

    ``members``: its first members, the same in all classes and for ever; later ones join. ``expel_after``: a member
    that is silent for so long, while others wait for it, is expelled; None: only an operator expels. Raises
    DefinitionError.
    """
    return Group(target, name, members, expel_after)


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
    """Handler of all members: ``fork`` sends a call to each, ``await ....all(...)`` also returns their answers."""

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
        return self._call_members(self._encode(arguments, keywords))

    async def _call_members(self, encoded: bytes) -> tuple[Any, ...]:
        source, instance, name = self._source, self._instance, self._handler.name
        decode = source.definition.codec(self._handler).decode_result
        own, view = await immortal.step(instance.group_known, source.name)
        while True:
            members = _to_members(source, instance, own, view)
            answers: tuple[Answer, ...]
            answers = await members.group_deliver.all(source.name, view.number, Message(0, name, encoded), own, "")
            if executed := [one for one in answers if one.is_executed]:  # all agree, except members expelled meanwhile
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
        everybody = _to_members(source, instance, own, View(view.number, view.after("join", own).members))  # own last
        changed = await everybody.group_change.all(source.name, view, kind, [own], own)
        view = await immortal.step(
            instance.group_learn, source.name, newest_of(changed[: None if kind == "leave" else -1])
        )


def _to_members(source: Group, instance: Any, own: str, view: View) -> Any:
    """Return a multicast to the members, for an async handler."""
    task = instance._immortal_task
    destinations = source.destinations(own, task.tasks.definition, view.members)
    return TaskMulticast(task, destinations, Scope(source.name, view.number))


def is_task(instance: Any) -> bool:
    """Return True if ``instance`` is the ``self`` of an async handler, which claims the class of the app."""
    return type(instance) is TaskSelf


def _require_task(instance: Any, call: str) -> None:
    if not is_task(instance):
        raise UsageError(f"{call}(...): only async handlers wait: move it into an 'async def' handler")
