"""What becomes, in a child made by ``os.fork()``, of objects that have threads and connections: these are its parent's.

The child has none of its parent's threads, a lock that one of them held stays held in it, and what it sent through one
of its parent's sockets would disturb the parent. So such an object lets go of all of them in the child, at the fork,
and makes its own when it is used there; or it says that it can't be used there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol
from weakref import WeakValueDictionary


class Owner(Protocol):
    """Somebody who has threads or connections."""

    def forked(self) -> None:
        """This is the child. Takes no lock, sends nothing, closes nothing."""


_owners: WeakValueDictionary[int, Owner] = WeakValueDictionary()  # by their IDs: not all have a hash
_parents: list[object] = []  # in a child: closed there by nobody, not even as the last reference to it goes


def watch(owner: Owner) -> None:
    """Tell it of each fork, in the child."""
    _owners[id(owner)] = owner


def leave_to_parent(*parts: object) -> None:
    """In a child: these are the parent's, and are not touched again."""
    _parents.extend(parts)


def text_after_fork(what: str, process_id: int, advice: str) -> str:
    """Why something that was made in the process ``process_id`` does not go on in this one."""
    return f"{what} was made in process {process_id}, of which this one is a fork: {advice}"


def _in_child() -> None:
    owners = list(_owners.values())
    _parents.extend(owners)
    for owner in owners:
        owner.forked()


def at_fork(forked: Callable[[], None]) -> None:
    """Call it in each child, whoever is there."""
    os.register_at_fork(after_in_child=forked)


at_fork(_in_child)
