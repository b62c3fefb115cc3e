"""Forks and freed memory: in a child of ``os.fork()``, objects with threads and connections stay the parent's.

The child has none of its parent's threads. A lock that one of them held stays locked, and data that the child sent
through a socket of the parent would disturb the parent. So at the fork such an object drops all of them in the child,
and creates its own at the first use there; or it reports that it can't be used there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Protocol
from weakref import WeakValueDictionary


class Owner(Protocol):
    """Object with threads or connections."""

    def forked_in_child(self) -> None:
        """Reset this object in a child after a fork. Takes no lock, sends nothing, closes nothing."""


_owners: WeakValueDictionary[int, Owner] = WeakValueDictionary()  # by ID: not all are hashable
_parents: list[object] = []  # in a child: references that keep the parent's objects from being closed


def register(owner: Owner) -> None:
    """Call ``owner.forked_in_child()`` in the child, after each fork from now on."""
    _owners[id(owner)] = owner


def disown_in_child(*parts: object) -> None:
    """Keep objects of the parent alive and untouched in this child."""
    _parents.extend(parts)


def after_fork_message(name: str, process_id: int, advice: str) -> str:
    """Return the message for an object that was created in ``process_id`` and does not work in this process."""
    return f"{name} was made in process {process_id}, of which this one is a fork: {advice}"


def _in_child() -> None:
    owners = list(_owners.values())
    _parents.extend(owners)
    for owner in owners:
        owner.forked_in_child()


def at_fork(forked: Callable[[], None]) -> None:
    """Call ``forked`` in each child, after the fork."""
    os.register_at_fork(after_in_child=forked)


at_fork(_in_child)


# Settings of glibc's malloc for an app and its coordinator.
#
# Both hold many buffers of up to a few MiB for milliseconds. By default glibc returns such memory to the kernel at once
# and requests it again, zeroed, page by page: without this, the coordinators take a seventh more for calls of
# 64 KiB, and an app takes 32 µs to send one instead of 5. glibc would reach these limits by itself, later.
#
# Memory freed during the start is returned after modules are loaded and after the start: it would stay idle.


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8

KEPT_SIZE_BYTES = 64 << 20  # free memory at the top of the heap that is not given back
MAPPED_SIZE_BYTES = 32 << 20  # larger buffers are mappings of their own, returned when freed
GROWTH_SIZE_BYTES = 4 << 20


def retain_freed_memory(arenas_max: int | None = None) -> None:
    """Trim the heap, then let glibc's malloc keep freed memory. Call it once, when modules are loaded.

    ``arenas_max``: limit of arenas, for a process whose threads take little memory at a time; MALLOC_ARENA_MAX of the
    environment goes before it.
    """
    trim_heap()
    import ctypes  # imported here: few commands need it

    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in (
            (_M_TRIM_THRESHOLD, KEPT_SIZE_BYTES),
            (_M_TOP_PAD, GROWTH_SIZE_BYTES),
            (_M_MMAP_THRESHOLD, MAPPED_SIZE_BYTES),
        ):
            mallopt(parameter, value)
        if arenas_max is not None and "MALLOC_ARENA_MAX" not in os.environ:
            mallopt(_M_ARENA_MAX, arenas_max)


def trim_heap() -> None:
    """Return freed heap memory to the kernel. This takes a millisecond. Does nothing if malloc is not glibc's."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
