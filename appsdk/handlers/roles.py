"""Which callers may call a handler: the roles of a class, which the settings of its instance give to names.

``class Jobs(Immortal, roles={"worker": ["ready"], ANYBODY: ["ping"]})``: ``ready`` is for the names that ``[allow]`` in
the settings gives "@worker", ``ping`` for all that may call, and every other handler of the class for the instance's
owner alone: so one that is forgotten is closed. What a class below adds is for everybody, unless that class says roles,
too; what it overrides stays as it was. Coordinators judge by this, and only where callers have keys.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from immortal.appsdk.errors import DefinitionError
from immortal.protocol.extensions import ANYBODYS, GROUP_MARK, INSTANCES, NO_ROLES, OWNERS

ANYBODY = ANYBODYS.removeprefix(GROUP_MARK)
"""In place of a role: all that may call at all."""
ANY_INSTANCE = INSTANCES.removeprefix(GROUP_MARK)
"""In place of a role: each instance that may call at all, and clients with that role."""


def roles_of(
    where: str,
    handlers: Collection[str],
    given: Mapping[str, Iterable[str]] | None,
    inherited: Mapping[str, tuple[str, ...]],
) -> dict[str, tuple[str, ...]]:
    """The groups that may call each handler that is not for everybody. Raises DefinitionError."""
    found = dict(inherited)
    if given is None:
        return found
    said: dict[str, set[str]] = {name: set() for name in handlers if name not in inherited}
    for role, names in given.items():
        if not role.isidentifier() or GROUP_MARK + role in NO_ROLES or isinstance(names, str):
            raise DefinitionError(
                f"{where}: roles={{{role!r}: {names!r}}}: the name of a role, which is a word and no decorator, with a "
                f"list of names of handlers was expected"
            )
        for name in names:
            if name not in handlers:
                known = ", ".join(sorted(handlers)) or "none"
                raise DefinitionError(f"{where}: roles={{{role!r}: [{name!r}]}}: no such handler (there are {known})")
            said.setdefault(name, set()).add(role)
    for name, roles in said.items():
        found[name] = tuple(sorted(GROUP_MARK + role for role in roles)) or (OWNERS,)
    return found
