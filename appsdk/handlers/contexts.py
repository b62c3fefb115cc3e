"""Which context an instance lives in: that of a run, which gives it time, randomness and calls, or a plain one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from immortal.appsdk.calls.context import SEED_SIZE_BYTES, Context
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.handlers.proxy import handler_namespace, peer_namespace

_context_factory: ContextVar[Callable[[], Context] | None] = ContextVar("context factory", default=None)


def attach(instance: Any, context: Context) -> None:
    """Make ``context`` the life that ``instance`` lives in."""
    definition = definition_of(type(instance))
    context.handlers = handler_namespace(instance, definition, context)
    context.peers = peer_namespace(definition, context)
    instance._immortal_context = context


def new_context() -> Context:
    """For an instance that is made now: as :func:`new_instances_live_in` says, or that of a plain object."""
    make_context = _context_factory.get()
    return Context(os.urandom(SEED_SIZE_BYTES)) if make_context is None else make_context()


@contextmanager
def new_instances_live_in(make_context: Callable[[], Context]) -> Iterator[None]:
    """Instances that this thread makes meanwhile get a context of ``make_context`` in place of a plain one."""
    token = _context_factory.set(make_context)
    try:
        yield
    finally:
        _context_factory.reset(token)
