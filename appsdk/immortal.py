"""The base class of apps."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from random import Random
from typing import Any, ClassVar, Literal, NoReturn, Self

from appsdk.context import SEED_SIZE_BYTES, Context, datetime_of
from appsdk.definition import Definition, define
from appsdk.errors import DefinitionError
from appsdk.proxy import handler_namespace, peer_namespace


def attach(instance: Immortal, context: Context) -> None:
    """Make ``context`` the life that ``instance`` lives in."""
    context.handlers = handler_namespace(instance, instance._immortal_definition, context)
    context.peers = peer_namespace(instance._immortal_definition, context)
    instance._immortal_context = context


def _plain_context() -> Context:
    """That of a plain object, until a run attaches it to its own."""
    return Context(os.urandom(SEED_SIZE_BYTES))


_context_factory: ContextVar[Callable[[], Context] | None] = ContextVar("context factory", default=None)


@contextmanager
def new_instances_live_in(make_context: Callable[[], Context]) -> Iterator[None]:
    """Instances that this thread makes meanwhile get a context of ``make_context`` in place of a plain one."""
    token = _context_factory.set(make_context)
    try:
        yield
    finally:
        _context_factory.reset(token)


class Immortal:
    """A service that survives: its state is its annotated attributes, its inputs are calls of its handlers.

    ``__init__`` runs at the first start of the instance only; after a crash the object is made without it, gets its
    last checkpoint and handles the logged calls after it again. So handlers take whatever differs from run to run from
    here: ``self.now()``, ``self.random``, ``self.uuid4()``.

    A class may define ``prepare(self) -> None``, which runs after ``__init__`` and after each recovery (before any
    logged call) and makes what is :data:`~appsdk.Transient`; and ``checkpoint(self) -> bytes`` together with
    ``restore(self, blob: bytes) -> None`` to keep its state in a form of its own.

    Class keywords: ``serializer="pickle"`` keeps the state with pickle; ``formerly=("Old",)`` names what the class was
    called when older checkpoints were taken; ``version=2`` is the version of the state (by default 1, and with
    :func:`~appsdk.upgrades` one more than the old class's); ``checkpoint="fork"`` takes checkpoints in a child process,
    beside the handlers. DefinitionError is raised for a class that could not be replayed.
    """

    __slots__ = ("__dict__", "__weakref__", "_immortal_context")

    _immortal_definition: ClassVar[Definition]
    _immortal_context: Context

    def __init_subclass__(
        cls,
        *,
        serializer: Literal["msgspec", "pickle"] | None = None,
        formerly: Iterable[str] = (),
        checkpoint: Literal["inline", "fork"] | None = None,
        version: int | None = None,
        **keywords: Any,
    ) -> None:
        super().__init_subclass__(**keywords)
        inherited = getattr(cls, "_immortal_definition", None)
        if serializer is None:
            serializer = inherited.serializer if inherited else "msgspec"
        if checkpoint is None:
            checkpoint = inherited.checkpoint_mode if inherited else "inline"
        if isinstance(formerly, str):
            raise DefinitionError(f"{cls.__qualname__}: formerly={formerly!r}: a tuple was expected: ({formerly!r},)")
        cls._immortal_definition = define(cls, Immortal, serializer, formerly, checkpoint, version)

    def __new__(cls, *arguments: Any, **keywords: Any) -> Self:
        if cls is Immortal:
            raise DefinitionError("Immortal itself can't be made: write a class below it")
        instance = super().__new__(cls)
        make_context = _context_factory.get() or _plain_context
        attach(instance, make_context())
        return instance

    def now(self) -> datetime:
        """The time of the call that is being handled: aware, UTC, the same at each replay.

        In ``__init__`` it is that of the first start, in ``prepare`` and ``upgrade`` that of the last call before.

        Raises UsageError outside the handlers' thread.
        """
        return datetime_of(self._immortal_context.now_ns())

    def now_ns(self) -> int:
        """As :meth:`now`, in nanoseconds since the Unix epoch."""
        return self._immortal_context.now_ns()

    @property
    def random(self) -> Random:
        """Random numbers that are the same at each replay: a stream of its own for each place in the code.

        Use it where it is read (``self.random.choice(...)``); do not keep it beyond the call that is being handled.
        Raises UsageError outside the handlers' thread.
        """
        return self._immortal_context.random_at(sys._getframe(1))

    def uuid4(self) -> uuid.UUID:
        """A version 4 UUID that is the same at each replay. Raises UsageError outside the handlers' thread."""
        return self._immortal_context.uuid4_at(sys._getframe(1))

    @classmethod
    def main(cls, address: str | None = None) -> NoReturn:
        """Run this class as the app of a program of its own; never returns. See :func:`appsdk.run`."""
        from appsdk.runner import run

        run(cls, address)
