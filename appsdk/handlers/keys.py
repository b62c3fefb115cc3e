"""Keyed classes: an instance has an object for each key, made at the key's first call; shards divide the keys.

For coordinators, clients and readers of logs a keyed class is an ordinary one: each handler takes the key as its first
argument, and the state is a table ``keys`` from key to object. :func:`keyed_definition` makes that class. A key belongs
to one of RANGES ranges by its hash, and each shard, an instance of its own, has a block of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType, SimpleNamespace, TracebackType
from typing import Any, cast

import msgspec

from immortal.appsdk.calls.codec import annotated_names
from immortal.appsdk.calls.failures import refused
from immortal.appsdk.errors import AS_RPC, DefinitionError, QueryError, StateError
from immortal.appsdk.handlers.decorators import BoundHandler, Handler, by_position
from immortal.appsdk.handlers.definition import ELSEWHERE, KEY, Definition, key_problem, range_of, shard_of
from immortal.appsdk.handlers.moves import HANDLERS as MOVING
from immortal.appsdk.handlers.moves import Moves, Moving
from immortal.appsdk.state.schema import hook_of
from immortal.appsdk.state.table import Table
from immortal.protocol import redaction
from immortal.protocol.extensions import INSTANCES
from immortal.protocol.verdicts import Cause

_HOOKS = ("prepare", "checkpoint", "restore")


class KeyContext:
    """Context of a key's object: gives its handlers and peers, and is entered while the object's code runs.

    ``one``: the object. ``is_forgotten``: it is removed when that code has ended.
    """

    __slots__ = ("_before", "_is_kept", "_keys", "_names", "is_forgotten", "key", "one")

    def __init__(self, keys: Keys, key: Any, *, is_kept: bool = True) -> None:
        self._keys = keys
        self._is_kept = is_kept
        self.key = key
        self.is_forgotten = False

    def __enter__(self) -> Any:
        keys = self._keys
        context, cls = keys._immortal_context, keys._immortal_definition.objects.cls
        found = keys.keys.get(self.key)
        self.one = one = object.__new__(cls) if found is None else found
        one._immortal_context = self
        self._names = None if found is None else set(vars(one))
        self._before, context.present = context.present, self
        try:
            if found is None:
                context.run_contexts.run(one.__init__)
        except BaseException:
            context.present = self._before
            raise
        return one

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        keys = self._keys
        keys._immortal_context.present = self._before
        if self.is_forgotten:
            keys.keys.pop(self.key, None)
        elif self._is_kept:
            if vars(self.one).keys() != self._names:
                keys._immortal_definition.objects.state().collect(self.one)
            keys.keys.settle(self.key, self.one)
            if self._names is None:
                keys.note_key(self.key)

    @property
    def handlers(self) -> Any:
        return ByName(self._handler)

    @property
    def peers(self) -> SimpleNamespace:
        found: SimpleNamespace = self._keys._immortal_context.peers
        return found

    def _handler(self, name: str) -> BoundHandler[Any, Any]:
        own = getattr(self._keys._immortal_context.handlers, name)
        handler = self._keys._immortal_definition.objects.by_key[name]
        call = own if handler.is_async else MethodType(handler.function, self.one)
        return BoundHandler(call, functools.partial(own.fork, self.key))


class ByName:
    """Namespace whose attributes ``find`` looks up."""

    __slots__ = ("_find",)

    def __init__(self, find: Callable[[str], Any]) -> None:
        self._find = find

    def __getattr__(self, name: str) -> Any:
        return self._find(name)


class Keys(Moving):
    """State of one instance of a keyed class: objects by key, its ``shard`` (from 1), and how many ``shards`` exist."""

    def __init__(self) -> None:
        self.shard = self.shards = 1

    def become(self, shard: int, count: int, before: int = 0) -> None:
        """Be that shard of ``count``. ``before``: the number of shards that have all ranges yet, without this one."""
        self.shard, self.shards = shard, before or count
        if before:
            self.moves = Moves(count)

    @classmethod
    def upgrade(cls, old: Keys) -> Keys:
        """Upgrade each key's object by the ``upgrade`` of its class."""
        new = cls()
        new.shard, new.shards, new.moves = old.shard, old.shards, old.moves
        for key, one in old.keys.items():
            new.keys[key] = cls._immortal_definition.objects.cls.upgrade(one)
        return new

    def problem(self, key: object) -> str:
        """Return why this shard answers no queries for ``key``; "" if it does."""
        definition, name = self._immortal_definition, self._immortal_context.instance_name
        if problem := key_problem(definition.keyed, key):
            return f"{definition.name}: {problem}"
        if self.moves is not None:
            owner = self.owner(range_of(key))
            return "" if owner == self.shard else f"{ELSEWHERE}: {name} has none for {key!r}, shard {owner} has"
        number = 1 if self.shards == 1 else shard_of(key, self.shards)
        if number == self.shard:
            return ""
        return (
            f"{name} is shard {self.shard} of {self.shards}, and key {key!r} is of shard {number}: its caller "
            f"has another count of shards: use peers({definition.name}, ..., shards={self.shards})"
        )

    def next_shard_of(self, name: str, key: object) -> int | None:
        """Return the shard through which a call of the handler ``name`` for ``key`` goes; None: it is for this one.

        Raises HandlerError."""
        problem = self.problem(key) if self.moves is None else key_problem(self._immortal_definition.keyed, key)
        if problem:
            raise refused(self._immortal_context, name, Cause.ARGUMENTS, problem)
        return None if self.moves is None else self.next_shard(range_of(key))

    def require_shard(self, given: tuple[int, ...] | None) -> None:
        """Check that nobody has changed the number of shards without a move. Raises StateError."""
        if self.moves is None and given is not None and given != (self.shard, self.shards):
            name = self._immortal_context.instance_name or "the instance"
            raise StateError(
                f"{name} began as shard {self.shard} of {self.shards}, and is started as {given[0]} of {given[1]}; "
                f"the app stops\n"
                f"  Nothing has changed. Set count = {self.shards}, and start it again: then 'immortal shards NAME "
                f"--count {given[1]}' moves the keys"
            )


def keyed_definition(objects: Definition) -> Definition:
    """Return the definition of the ordinary class that runs a keyed class: its handlers take the key first.

    ``objects``: the definition of the keyed class.

    Raises DefinitionError."""
    cls, name, kind = objects.cls, objects.name, cast(type, objects.keyed)
    if kind not in (str, int):
        raise DefinitionError(f"{name}: keyed={kind!r} came, str or int was expected")
    unfit = [f"@{one.decorator} ({one.name})" for one in objects.handlers.values() if one.schedule]
    unfit += [f"@on_primary ({one})" for one in objects.on_primary]
    unfit += [f"@initial ({objects.initial})"] if objects.initial else []
    unfit += [f"method {one!r}" for one in _HOOKS if hook_of(cls, one) is not None]
    unfit += ["nodes"] if objects.nodes else []
    unfit += ["tables"] if objects._state is not None and objects._state.tables else []
    unfit += ['serializer="pickle"'] if objects.serializer == "pickle" else []
    if unfit:
        raise DefinitionError(
            f"{name}: a keyed class has no {' and no '.join(unfit)}, which belong to no key: use another class"
        )
    for ancestor in reversed(cls.__mro__):  # so that the encoder knows their attributes
        if ancestor not in (object, objects.base) and "__dataclass_fields__" not in vars(ancestor):
            if ancestor is not cls and not annotated_names(ancestor):
                continue
            try:
                dataclass(init=False, repr=False, eq=False)(ancestor)
            except (TypeError, ValueError) as error:
                raise DefinitionError(f"{name}: {error}") from None
    body = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__annotations__": {"keys": Table[kind, cls]},  # type: ignore[valid-type]
    }
    holder: Any = type(cls.__name__, (Keys, objects.base), body)
    by_key = {one: _keyed_handler(handler, kind) for one, handler in objects.by_key.items()}
    handlers = {one: by_key[handler.key] for one, handler in objects.handlers.items()}
    by_method_id = {handler.method_id: handler for handler in (*handlers.values(), *MOVING)}
    roles = {one.name: (INSTANCES,) for one in MOVING} if objects.roles else {}
    holder._immortal_definition = made = msgspec.structs.replace(
        objects,
        cls=holder,
        objects=objects,
        handlers=handlers,
        by_key=by_key,
        by_method_id=by_method_id,
        roles=objects.roles | roles,
        _codecs={},
        _state=None,
    )
    made.resolve(names_may_be_missing=True)
    return made


def _keyed_handler(handler: Handler[Any, Any], kind: type) -> Handler[Any, Any]:
    """Return the instance's handler, which takes the key as its first argument."""
    where = handler.function.__qualname__
    if KEY in handler.signature.parameters:
        raise DefinitionError(f"{where}: a call of a keyed class has the key as its argument {KEY!r}: rename this one")
    if handler.limit_by is not None:
        raise DefinitionError(f"{where}: limit_by={handler.limit_by!r}: in a keyed class limit is for each key")

    def run(keys: Keys, key: Any, *arguments: Any, **keywords: Any) -> Any:
        with KeyContext(keys, key) as one:
            return handler.function(one, *arguments, **keywords)

    def ask(keys: Keys, key: Any, *arguments: Any, **keywords: Any) -> Any:
        with KeyContext(keys, key, is_kept=False) as one:
            before = {name: id(value) for name, value in vars(one).items()}
            value = handler.function(one, *arguments, **keywords)
            if before != {name: id(value) for name, value in vars(one).items()}:
                error = QueryError(f"{where} is a query, which only reads, and has set an attribute: {AS_RPC}")
                error.changed = True
                raise error
            return value

    def begin(task_self: Any, key: Any, *arguments: Any, **keywords: Any) -> Any:
        return handler.function(task_self, *arguments, **keywords)

    made: Handler[Any, Any] = Handler.__new__(Handler)
    vars(made).update(vars(handler))
    made.function = functools.wraps(handler.function)(begin if handler.is_async else ask if handler.is_query else run)
    made.function.__annotations__ = {KEY: kind, **annotated_names(handler.function)}
    key = inspect.Parameter(KEY, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
    made.signature = handler.signature.replace(parameters=[key, *handler.signature.parameters.values()])
    redaction.parameters[where] = tuple(made.signature.parameters)
    made.call = by_position(made.function, made.signature)
    made.is_keyed = True
    made.limit_by = KEY
    if handler.is_async or handler.labels is not None:
        made.labels = (KEY, *(handler.labels or ()))
    return made
