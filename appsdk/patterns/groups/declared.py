"""A group as classes declare it: its name, its first members and their class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from immortal.appsdk.errors import DefinitionError, UsageError
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.handlers.definition import Definition, Peer
from immortal.appsdk.handlers.multicast import Destination
from immortal.appsdk.handlers.proxy import find_handler
from immortal.appsdk.ordering.views import View
from immortal.protocol.identity import IdentityConflict
from immortal.protocol.shown import is_encodable

EXPEL_AFTER_MIN = timedelta(seconds=1)


class Group(property):
    """What :func:`immortal.appsdk.patterns.groups.group` puts into a class."""

    def __init__(
        self,
        target: object,
        name: str,
        members: Iterable[str],
        make_proxy: Callable[[Group, Any], Any],
        is_of_members: Callable[[type], bool],
        expel_after: timedelta | None = None,
    ) -> None:
        super().__init__(self._of)
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
        self._make_proxy = make_proxy
        self._is_of_members = is_of_members

    @property
    def definition(self) -> Definition:
        """Of the members' class. Raises DefinitionError, and whatever importing its module raises."""
        return self._peers[self.first.members[0]].resolve()

    def handler(self, name: str, reserved: Iterable[str]) -> Handler[Any, Any]:
        """Of the members; none of ``reserved``. Raises AttributeError, UsageError."""
        definition = self.definition
        if not self._is_of_members(definition.cls):
            raise UsageError(f"group {self.name!r}: its members' class {definition.name} is not below Grouped")
        found = find_handler(definition, name)
        if found.is_async or name in reserved:
            raise UsageError(
                f"group {self.name!r}: {definition.name}.{name} can't be called in a group: only one's own 'def' "
                f"handlers can, as each message is executed as a whole at its place in the order"
            )
        return found

    def destinations(self, own: str, definition: Definition, members: Iterable[str]) -> list[Destination]:
        """For a multicast of ``own``, which is of the class of ``definition``."""
        found: list[Destination] = []
        for member in members:
            if member == own:
                found.append((own, lambda: definition))
                continue
            if member not in self._peers:
                self._peers[member] = Peer(self._target, member)
            found.append((member, self._peers[member].resolve))
        return found

    def _of(self, instance: Any) -> Any:
        if not self._is_of_members(instance.__class__):
            raise UsageError(f"group {self.name!r}: {type(instance).__qualname__} is not below Grouped, and must be")
        return self._make_proxy(self, instance)


def check_groups(cls: type) -> None:
    """Whether each name is of one group. Raises DefinitionError."""
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
    """By name."""
    found = [one for ancestor in cls.__mro__ for one in vars(ancestor).values() if isinstance(one, Group)]
    return {one.name: one for one in reversed(found)}


def group_of(cls: type, name: str) -> Group:
    """Raises UsageError."""
    for ancestor in cls.__mro__:
        for one in vars(ancestor).values():
            if isinstance(one, Group) and one.name == name:
                return one
    raise UsageError(f"{cls.__qualname__} declares no group {name!r}: give it an attribute: group(..., {name!r}, ...)")
