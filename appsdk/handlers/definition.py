"""Definition of a class: its declarations, collected and checked once, when the class is created."""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from operator import attrgetter
from typing import Any, Literal, cast

from msgspec import Struct, field

from immortal.appsdk.calls.codec import ArgumentCodec, annotated_names
from immortal.appsdk.calls.failures import checked_on_error
from immortal.appsdk.effects.effect import CONCURRENT_EFFECTS
from immortal.appsdk.errors import DefinitionError, OnError
from immortal.appsdk.handlers.decorators import HOOK_MARK, Handler, definition_key
from immortal.appsdk.state.schema import StateSchema, hook_of
from immortal.appsdk.types.registry import current_module
from immortal.protocol import redaction
from immortal.protocol.extensions import ANYBODYS, GROUP_MARK, INSTANCES, NO_ROLES, OWNERS
from immortal.protocol.limits import NAME_SIZE_BYTES_MAX
from immortal.protocol.safe_output import is_encodable
from immortal.protocol.varint import INT_MAX

Serializer = Literal["msgspec", "pickle"]
CheckpointMode = Literal["inline", "fork"]

VERSION_DEFAULT = 1
VERSION_MAX = INT_MAX  # a ZigZagInt in the protocol
INT_64_MAX = (1 << 63) - 1


class Peer(property):
    """Descriptor that ``peer(...)`` puts into a class."""

    def __init__(self, target: object, name: str, *, keyed: bool = False) -> None:
        super().__init__()
        self.is_keyed = keyed
        is_text = isinstance(name, str) and is_encodable(name)
        if not is_text or not 1 <= len(name.encode()) <= NAME_SIZE_BYTES_MAX:
            raise DefinitionError(
                f"peer(..., {name!r}): the second argument is the name of the instance, 1 to "
                f"{NAME_SIZE_BYTES_MAX} bytes"
            )
        if isinstance(target, type):
            self._checked(definition_of(target))
        elif isinstance(target, str):
            if not all(part.strip() for part in target.partition(":")):
                raise DefinitionError(f"peer({target!r}, {name!r}): a class is given as 'module:Class'")
        elif not callable(target):
            raise DefinitionError(
                f"peer({target!r}, {name!r}): a class, 'module:Class' or 'lambda: Class' were expected"
            )
        self.target = target
        self.name = name
        self.key = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.key = definition_key(name)
        property.__init__(self, attrgetter(f"_immortal_context.peers.{self.key}"))

    def resolve(self) -> Definition:
        """Return the definition of the peer's class. Raises DefinitionError, and errors of its module's import."""
        target: Any = self.target
        if isinstance(target, str):
            module_name, _, class_name = target.partition(":")
            module = importlib.import_module(current_module(module_name))
            try:
                target = attrgetter(class_name)(module)
            except AttributeError:
                raise DefinitionError(
                    f"peer({self.target!r}, {self.name!r}): {module_name} has no {class_name}"
                ) from None
        elif not isinstance(target, type):
            target = target()
        return self._checked(definition_of(target))

    def _checked(self, definition: Definition) -> Definition:
        if (definition.keyed is not None) is not self.is_keyed:
            right = "no keyed class: peer" if self.is_keyed else "a keyed class: peers"
            raise DefinitionError(f"{definition.name} is {right}({definition.name}, ...) was expected")
        return definition


# Keys of keyed classes, and the shards to which they belong: see :mod:`immortal.appsdk.handlers.keys`.


KEY = "key"  # name of the first argument of each call of a keyed class
KEY_MARK = "[key]"  # in the names of methods that an app tells: "Cart[key].add"
KEY_SIZE_BYTES_MAX = 400
RANGES = 4096
"""Number of ranges of keys, which the shards of a keyed class share."""
ELSEWHERE = "its key has moved"
"""Front of the refusal of a query that is not logged: a client calls it again through the log, which forwards it."""


def key_problem(kind: type, key: object) -> str:
    """Return why ``key`` can't be a key of a class that is keyed by ``kind``; "" if it can."""
    if type(key) is not kind:
        return f"the key {key!r:.80} came, a key of type {kind.__name__} was expected"
    if isinstance(key, int):
        is_short = -INT_64_MAX <= key <= INT_64_MAX
        return "" if is_short else f"a key of {key.bit_length()} bits came, at most 63 and a sign were expected"
    size_bytes = len(str(key).encode(errors="replace"))
    if not 1 <= size_bytes <= KEY_SIZE_BYTES_MAX:
        return f"a key of {size_bytes:,} bytes came, 1 to {KEY_SIZE_BYTES_MAX} were expected"
    return "" if is_encodable(str(key)) else f"the key {key!r} can't be encoded"


def range_of(key: object) -> int:
    """Return the range of ``key``, below RANGES. It never changes."""
    return int.from_bytes(hashlib.blake2b(str(key).encode(), digest_size=8).digest(), "big") % RANGES


@functools.cache
def blocks(shards: int) -> tuple[int, ...]:
    """Return the shard of each range: from 1 to ``shards``, a block for each; of one shard, which has no number, 0."""
    return tuple(number * shards // RANGES + 1 if shards > 1 else 0 for number in range(RANGES))


def shard_of(key: object, shards: int) -> int:
    """Return the shard to which ``key`` belongs, from 1 to ``shards``. It never changes for the same two values.

    >>> [shard_of(name, 3) for name in ("ann", "kim", "joe")]
    [1, 2, 3]
    """
    return blocks(shards)[range_of(key)] or 1


def shard_name(name: str, number: int, shards: int) -> str:
    """Return the instance's name of a shard, which is that of a project with ``count = shards``."""
    return name if shards == 1 else f"{name}-{number}"


class Peers(property):
    """Descriptor that ``peers(...)`` puts into a class. ``shards``: the instances that have the keys."""

    def __init__(self, target: object, name: str, shards: int) -> None:
        super().__init__()
        if not _is_number(shards) or shards > RANGES:
            raise DefinitionError(f"peers(..., {name!r}, shards={shards!r}): a number from 1 to {RANGES} was expected")
        self.name = name
        self.shards = [Peer(target, shard_name(name, one, shards), keyed=True) for one in range(1, shards + 1)]
        self.key = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.key = definition_key(name)
        property.__init__(self, attrgetter(f"_immortal_context.peers.{self.key}"))
        for number, shard in enumerate(self.shards, 1):
            shard.__set_name__(owner, f"{name}[{number}]")

    def shard(self, key: object) -> Peer:
        """Return the shard of a key. Raises TypeError."""
        if problem := key_problem(cast(type, self.shards[0].resolve().keyed), key):
            raise TypeError(f"{self.name}[...]: {problem}")
        return self.shards[shard_of(key, len(self.shards)) - 1]


class Definition(Struct):
    """Definition of one class: its handlers by name and ID, hooks, peers, and how its state is kept."""

    cls: type
    base: type  # Immortal
    formerly: tuple[str, ...]
    given_version: int | None  # set by the class itself
    serializer: Serializer = "msgspec"
    checkpoint_mode: CheckpointMode = "inline"
    concurrent_effects: int = CONCURRENT_EFFECTS
    on_error: OnError = "undo"
    handler_time_limit: timedelta | None = None  # a handler that exceeds it ends the process
    share_tracebacks: bool = False  # with callers that wait for a call that fails
    concurrent_handlers: int | None = None  # how many 'async def' handlers run at once
    upgrades: Definition | None = None  # the class whose state its upgrade() converts; set by @upgrades
    retries_refused: bool = False  # gives refused calls again at its upgrade; set by @upgrades
    nodes: tuple[Any, ...] = ()  # classes below immortal.Node that it can create
    keyed: type | None = None  # the type of its keys
    objects: Definition | None = None  # of the class of the keys' objects, in the definition of what calls reach
    shard: tuple[int, ...] | None = None  # which one a new instance is, of how many; see Keys.become
    handlers: dict[str, Handler[Any, Any]] = field(default_factory=dict)
    by_method_id: dict[int, Handler[Any, Any]] = field(default_factory=dict)
    by_key: dict[str, Handler[Any, Any]] = field(default_factory=dict)  # overridden ones included
    peers: dict[str, Peer] = field(default_factory=dict)
    peers_by_key: dict[str, Peer | Peers] = field(default_factory=dict)
    on_primary: list[str] = field(default_factory=list)  # names of methods
    initial: str | None = None
    roles: dict[str, tuple[str, ...]] = field(default_factory=dict)  # groups that can call a handler, by its name
    _codecs: dict[str, ArgumentCodec] = field(default_factory=dict)
    _state: StateSchema | None = None

    @property
    def name(self) -> str:
        return self.cls.__qualname__

    def new_instance(self) -> Any:
        """Return a new object of the class, without a call of its ``__init__`` and ``__new__``."""
        return self.state().with_own_defaults(object.__new__(self.cls))

    @property
    def label(self) -> str:
        """Name of the app for its coordinator: ``module:Class``."""
        return f"{self.cls.__module__}:{self.cls.__qualname__}"

    @property
    def version(self) -> int:
        """Version of the state, from 1; by default 1 more than that of the class that this one upgrades."""
        if self.given_version is not None:
            return self.given_version
        return VERSION_DEFAULT if self.upgrades is None else self.upgrades.version + 1

    @property
    def has_tasks(self) -> bool:
        """True if the class has ``async def`` handlers."""
        return any(handler.is_async for handler in self.handlers.values())

    @property
    def has_executions(self) -> bool:
        """True if calls of the class are listed as executions."""
        return any(handler.is_async or handler.labels is not None for handler in self.handlers.values())

    def policy(self, handler: Any) -> OnError:
        """Return the effect of an undeclared exception of ``handler`` on the state. A query never keeps changes.

        ``handler``: a Handler, or the local function of a step.
        """
        policy: OnError = handler.on_error or self.on_error
        return "undo" if handler.is_query and policy == "keep" else policy

    @property
    def can_undo(self) -> bool:
        """True if the failure of some handler undoes changes."""
        return any(self.policy(handler) == "undo" for handler in self.handlers.values())

    @property
    def chain(self) -> list[Definition]:
        """Return the class, then each class that the one before it upgrades."""
        chain = [self]
        while (older := chain[-1].upgrades) is not None:
            chain.append(older)
        return chain

    def codec(self, handler: Handler[Any, Any]) -> ArgumentCodec:
        """Return the codec of a handler's arguments. Raises DefinitionError for an unusable annotation."""
        if (codec := self._codecs.get(handler.key)) is None:
            with resolving(f"{handler.function.__qualname__}: an annotation"):
                codec = self._codecs[handler.key] = ArgumentCodec(handler.function, handler.signature)
        return codec

    def state(self) -> StateSchema:
        """Return the schema of the state. Raises DefinitionError if an annotation can't be resolved or encoded."""
        if self._state is None:
            with resolving(f"{self.name}: the annotation of an attribute"):
                objects = None if self.objects is None else self.objects.state()
                not_state = {*self.handlers, *self.peers} if objects is None else ()
                self._state = StateSchema(self.cls, self.serializer, not_state, self.formerly, objects)
        return self._state

    def resolve(self, *, names_may_be_missing: bool) -> None:
        """Check all annotations. ``names_may_be_missing``: a name in them can be defined later in the module."""
        subjects: list[Callable[[], object]] = [self.state]
        subjects += [lambda handler=handler: self.codec(handler) for handler in self.handlers.values()]  # type: ignore[misc]
        subjects += [node._immortal_node.resolve for node in self.nodes]
        for subject in subjects:
            try:
                subject()
            except DefinitionError as error:
                if not (names_may_be_missing and isinstance(error.__cause__, NameError)):
                    raise


@contextmanager
def resolving(subject: str) -> Iterator[None]:
    """Convert a NameError in the block into a DefinitionError."""
    try:
        yield
    except NameError as error:
        raise DefinitionError(f"{subject} can't be resolved: {error}") from error


def definition_of(cls: object) -> Definition:
    """Return the definition of an Immortal class. Raises DefinitionError for anything else."""
    definition = vars(cls).get("_immortal_definition") if isinstance(cls, type) else None
    if definition is None:
        raise DefinitionError(f"{cls!r} is not a class below immortal.Immortal")
    return cast(Definition, definition)


def own_definition_of(instance: object) -> Definition:
    """Return the definition of the class of an object, which can be the object of a key."""
    found = definition_of(type(instance))
    return found.objects if found.objects is not None and type(instance) is found.objects.cls else found


def define(definition: Definition, roles: Mapping[str, Iterable[str]] | None = None) -> Definition:
    """Check the options of a new class, and collect and check its declarations. Raises DefinitionError."""
    cls, name = definition.cls, definition.name
    for option, mode, modes in (
        ("serializer", definition.serializer, ("msgspec", "pickle")),
        ("checkpoint", definition.checkpoint_mode, ("inline", "fork")),
    ):
        if mode not in modes:
            raise DefinitionError(f"{name}: {option}={mode!r}: {modes[0]!r} or {modes[1]!r} were expected")
    version = definition.given_version
    if version is not None and (not _is_number(version) or version > VERSION_MAX):
        raise DefinitionError(f"{name}: version={version!r}: a number from 1 to {VERSION_MAX} was expected")
    for option in ("concurrent_effects", "concurrent_handlers"):
        number = getattr(definition, option)
        if number is not None and not _is_number(number):
            raise DefinitionError(f"{name}: {option}={number!r}: a number from 1 was expected")
    limit = definition.handler_time_limit
    if limit is not None and (not isinstance(limit, timedelta) or limit <= timedelta()):
        raise DefinitionError(
            f"{name}: handler_time_limit={limit!r}: a timedelta was expected, such as timedelta(seconds=30)"
        )
    definition.on_error = checked_on_error(name, definition.on_error)
    definition.nodes = _checked_nodes(cls, definition.nodes)
    for own_name in [*vars(cls), *annotated_names(cls)]:
        if own_name == "main" or (own_name.startswith("_immortal_") and own_name in vars(definition.base)):
            raise DefinitionError(f"{name}.{own_name}: {own_name!r} is one of Immortal's own names: choose another")
    for ancestor in reversed(cls.__mro__):
        for own_name, value in vars(ancestor).items():
            _add(definition, own_name, value, cls)
    if (hook_of(cls, "checkpoint") is None) != (hook_of(cls, "restore") is None):
        raise DefinitionError(
            f"{name}: checkpoint and restore go together: define 'def checkpoint(self) -> bytes' and "
            f"'def restore(self, blob: bytes) -> None'"
        )
    _check_method_ids(definition)
    inherited: Definition | None = getattr(cls, "_immortal_definition", None)
    definition.roles = roles_of(name, definition.handlers, roles, inherited.roles if inherited else {})
    definition.resolve(names_may_be_missing=True)
    for handler in definition.handlers.values():
        redaction.note_parameters(handler.function.__qualname__, handler.signature.parameters)
    return definition


def _is_number(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given >= 1


def _checked_nodes(cls: type, nodes: Any) -> tuple[Any, ...]:
    given = nodes if isinstance(nodes, tuple | list) else (nodes,)
    known: set[str] = set()
    for node in given:
        definition = getattr(node, "_immortal_node", None)
        if definition is None:
            raise DefinitionError(f"{cls.__qualname__}: nodes=({node!r},): classes below immortal.Node were expected")
        for name in (definition.name, *definition.formerly):
            if name in known:
                raise DefinitionError(f"{cls.__qualname__}: nodes=(...): two of them are called {name!r}")
            known.add(name)
    return tuple(given)


def _add(definition: Definition, name: str, value: object, cls: type) -> None:
    if isinstance(value, Handler):
        if value.name != name:
            raise DefinitionError(
                f"{cls.__qualname__}.{name}: the handler {value.name!r} can't have a second name, since its method ID "
                f"follows from the first: define {name!r} as a handler of its own"
            )
        definition.handlers[name] = value
        definition.by_key[value.key] = value
    elif name in definition.handlers:
        decorator = definition.handlers[name].decorator
        raise DefinitionError(
            f"{cls.__qualname__}.{name} replaces the handler of that name in a base class and is none itself: "
            f"write @{decorator} above it, or choose another name"
        )
    elif isinstance(value, Peer):
        definition.peers[name] = value
        definition.peers_by_key[value.key] = value
    elif isinstance(value, Peers):
        definition.peers_by_key[value.key] = value
        for number, shard in enumerate(value.shards, 1):
            _add(definition, f"{name}[{number}]", shard, cls)
    elif (mark := getattr(value, HOOK_MARK, None)) == "on_primary":
        if name not in definition.on_primary:
            definition.on_primary.append(name)
    elif mark == "initial":
        if definition.initial not in (None, name):
            raise DefinitionError(
                f"{cls.__qualname__}: two @initial methods, {definition.initial} and {name}: there is one initial "
                f"message; let one method call the other"
            )
        definition.initial = name


def _check_method_ids(definition: Definition) -> None:
    for handler in definition.handlers.values():
        other = definition.by_method_id.setdefault(handler.method_id, handler)
        if other is not handler:
            raise DefinitionError(
                f"{definition.name}: {other.name} and {handler.name} have the same method ID, "
                f"{handler.method_id}: give "
                f"the newer one another by hand, e.g. @{handler.decorator}(id=1) (1 .. 8191, never one that was used "
                f"before)"
            )


# Roles: which callers can call a handler. The settings of an instance give the roles of its class to names.
#
# ``class Jobs(Immortal, roles={"worker": ["ready"], ANYBODY: ["ping"]})``: ``ready`` is for the names to which
# ``[allow]`` in the settings gives "@worker", ``ping`` for all permitted callers, and every other handler of the class
# only for the instance's owner: so a forgotten handler is closed. Handlers that a subclass adds are for everybody,
# unless it has ``roles`` too; an overridden handler keeps its roles. Coordinators enforce this, and only if callers
# have keys.


ANYBODY = ANYBODYS.removeprefix(GROUP_MARK)
"""Pseudo role: all permitted callers."""
ANY_INSTANCE = INSTANCES.removeprefix(GROUP_MARK)
"""Pseudo role: each permitted instance, and clients with that role."""


def roles_of(
    where: str,
    handlers: Collection[str],
    given: Mapping[str, Iterable[str]] | None,
    inherited: Mapping[str, tuple[str, ...]],
) -> dict[str, tuple[str, ...]]:
    """Return the groups that can call each handler, except handlers for everybody. Raises DefinitionError."""
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
