"""Calls to an instance whose name is known only at run time: a batch names its collector."""

from __future__ import annotations

from collections.abc import Callable

from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.handlers.proxy import make_fork
from immortal.appsdk.immortal import Immortal


def fork_to(app: Immortal, name: str, cls: type[Immortal], method: str) -> Callable[..., None]:
    """The ``fork`` of a handler of the instance ``name``, whose class is ``cls`` or has such a handler."""
    return make_fork(app._immortal_context, name, definition_of(cls).handlers[method])
