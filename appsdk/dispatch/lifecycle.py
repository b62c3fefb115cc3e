"""Life cycle of the app's object: creation, restore, upgrade (``@upgrades``), save; and the start of its hooks."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any, TypeVar

from immortal.appsdk.calls.codec import signature_of
from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.replay_rules import OrderRules, Rules
from immortal.appsdk.calls.user_code import is_user_failure, run_user_code, user_traceback
from immortal.appsdk.dispatch.delivery import Delivery
from immortal.appsdk.errors import AppError, DefinitionError, StateError, UpgradeError
from immortal.appsdk.handlers.decorators import Handler, ImmortalProtocol
from immortal.appsdk.handlers.definition import Definition, definition_of, own_definition_of
from immortal.appsdk.handlers.proxy import attach, instances_use_context
from immortal.appsdk.ordering.machine import Ordering
from immortal.appsdk.ordering.messages import Plain
from immortal.appsdk.state.incoming import Incoming, Waiting, finish
from immortal.appsdk.state.journal import SavedTasks
from immortal.appsdk.state.schema import (
    Envelope,
    copied_envelope,
    decode_envelope,
    encode_envelope,
    envelope_size_bytes,
    hook_of,
)
from immortal.appsdk.state.table import Table
from immortal.appsdk.waiting.tasks import Tasks
from immortal.protocol.messages import RpcKind, RpcType
from immortal.protocol.state_envelope import FRONT


class Life:
    """Life cycle of the app's object. ``definition``: of the class that runs now, before an upgrade the old one.

    ``delivery``: calls its handlers. ``instance`` None: not yet created. ``next_sequence_id``: of the next record.
    ``limit_time``: calls the function that encodes the state, and stops it if it takes too long."""

    def __init__(
        self,
        definition: Definition,
        context: Context,
        tasks: Tasks,
        make_delivery: Callable[[Definition, Context], Delivery],
    ) -> None:
        self.definition = definition
        tasks.has_tables = bool(definition.state().tables)
        self.delivery = make_delivery(definition, context)
        self.instance: Any = None
        self.next_sequence_id = 0
        self._context = context
        self._tasks = tasks
        self._make_delivery = make_delivery
        self.limit_time: Callable[[Callable[[], tuple[bytes, bytes]]], tuple[bytes, bytes]] = lambda encode: encode()
        self._main_definition = definition

    def start(self, seed: bytes) -> None:
        """Start for the first time, with the ``seed`` of all random streams. Raises StateError."""
        context = self._context
        context.seed = seed
        self._tasks.is_first_start = True
        context.record_time_ns = context.now_ns()  # kept with the checkpoint: an upgrade of it gets the same time
        instance = self._new_instance()
        run = context.run_contexts.run
        run_user_code(f"{self.definition.name}.__init__", lambda: run(instance.__init__), StateError)
        if self.definition.shard is not None:
            instance.become(*self.definition.shard)
        self._prepare(instance)
        self.instance = instance
        context.nodes.use(self.definition, instance)
        self._tasks.use(self.definition, instance)
        self._tasks.list_restored(None)

    def restore(self, blob: Incoming) -> Waiting[tuple[bytes, bytes]]:
        """Restore the instance from a checkpoint, while it comes in. Return its envelope and its state; no state if
        the class has tables. Raises StateError, JournalError."""
        front = yield from blob.view(FRONT.size)
        front = yield from blob.read(envelope_size_bytes(front))
        envelope, _ = decode_envelope(front)
        self._use(restoring_class(self._main_definition, envelope))
        context = self._context
        context.seed = envelope.seed
        context.sites.rules = Rules(envelope.rules)
        context.multicasts.rules = OrderRules(envelope.order_rules)
        context.instance_name = envelope.instance_name
        instance, state = yield from self._restored(envelope, blob)
        self.instance = instance
        context.nodes.use(self.definition, instance)
        context.nodes.restore(envelope.nodes)
        self._tasks.use(self.definition, instance)
        context.multicasts.restore(envelope.ordering)
        if envelope.tasks is not None:
            self._tasks.restore(envelope.tasks)
        self._tasks.list_restored(envelope.tasks)
        return front, state

    def restore_copy(self, blob: bytes) -> None:
        """Rewind to a copy of the state of this life; the object stays the same. Raises StateError, JournalError."""
        envelope, state = decode_envelope(blob)
        for table in self.tables:
            table.undo_changes()
        fresh, _ = finish(self._restored(envelope, Incoming.of(state)))
        self.instance.__dict__ = fresh.__dict__  # in one step: hooks read the object and keep a reference to it
        attach(self.instance, self._context)
        self._context.multicasts.restore(envelope.ordering)
        self._context.nodes.restore(envelope.nodes)
        self._tasks.restore(envelope.tasks or SavedTasks())
        self._tasks.list_restored(envelope.tasks)

    def _restored(self, envelope: Envelope, state: Incoming) -> Waiting[tuple[Any, bytes]]:
        """Return (an object of the running class with the state of a blob, the encoded state), see
        :meth:`StateSchema.restoring`. Raises StateError."""
        self.next_sequence_id = envelope.sequence_id + 1
        self._context.sequence_id, self._context.record_time_ns = envelope.sequence_id, envelope.record_time_ns
        instance = self._new_instance()
        schema = self.definition.state()
        if self.instance is not None:  # a rewind, in which tables go back by themselves
            vars(instance).update(zip(schema.tables, self.tables, strict=True))

        def run(function: Callable[[], None]) -> None:
            guarded = partial(self._context.run_contexts.run, function)
            run_user_code(f"{self.definition.name}.restore", guarded, StateError)

        whole = yield from schema.restoring(instance, envelope, state, run)
        self._prepare(instance)
        return instance, whole

    def _new_instance(self) -> Any:
        instance = self.definition.new_instance()
        attach(instance, self._context)
        return instance

    def _prepare(self, instance: Any) -> None:
        if hook_of(type(instance), "prepare") is not None:
            prepare = partial(self._context.run_contexts.run, instance.prepare)
            run_user_code(f"{self.definition.name}.prepare", prepare, StateError)

    def _use(self, definition: Definition) -> None:
        """Handle input with this class's code from here on."""
        if definition is not self.definition:
            self.definition = definition
            self._tasks.has_tables = bool(definition.state().tables)
            self.delivery = self._make_delivery(definition, self._context)

    def upgrade(self, version: int | None) -> None:
        """Bring state and code to ``version`` (None: that of the app). Raises UpgradeError."""
        start, *steps = upgrade_path(self._main_definition, self.definition, version)
        run = self._context.run_contexts.run
        if start is not self.definition:
            self.instance = run(moved, start, self.definition, self.instance, self._context)
        for definition in steps:
            self.instance = run(upgraded, definition, self.instance, self._context)
            nodes = f"{definition.name}: its nodes"
            guarded(definition, nodes, partial(self._context.nodes.use, definition, self.instance))
            waiting = f"{definition.name}: what waits"
            guarded(definition, waiting, partial(self._tasks.use, definition, self.instance))
            self._use(definition)

    def require_shard(self) -> None:
        """Check that the project has not changed the shards of a keyed class. Raises StateError."""
        if self._main_definition.shard is not None:
            self.instance.require_shard(self._main_definition.shard)

    def require_savable(self) -> None:
        """Check that the state after the initial message can be saved, before the next checkpoint fails.

        Raises StateError.
        """
        schema = self.definition.state()
        if schema.serializer != "own":
            schema.encode_attributes(self.instance)
        for table in self.tables:
            if (problem := table.storage_problem()) is not None:
                raise problem

    @property
    def tables(self) -> list[Table[Any, Any]]:
        return self.definition.state().tables_of(self.instance)

    def encode(self) -> tuple[bytes, bytes]:
        """Encode the state without its tables; return its envelope and its attributes. Raises StateError."""
        return self.limit_time(self._encode)

    def encode_blob(self) -> tuple[int, Iterator[bytes]]:
        """Return the blob of a checkpoint, see :meth:`checkpoint_blob`. Raises StateError."""
        return self.checkpoint_blob(self.encode())

    def checkpoint_blob(self, pieces: Sequence[bytes]) -> tuple[int, Iterator[bytes]]:
        """Return the blob of a checkpoint: its size in bytes, and its pieces, from what :meth:`encode` returned."""
        envelope, state = pieces
        size_bytes, rest = self.definition.state().with_tables(self.instance, state)
        return len(envelope) + size_bytes, chain((envelope,), rest)

    def _encode(self) -> tuple[bytes, bytes]:
        schema = self.definition.state()
        encoded = partial(schema.encode_attributes, self.instance)
        encode = partial(self._context.run_contexts.run, encoded)
        state = run_user_code(f"{self.definition.name}.checkpoint", encode, StateError)
        waiting = f"{self.definition.name}: to save what its handlers wait for"
        return run_user_code(waiting, partial(self._envelope, schema.serializer), StateError), state

    def _envelope(self, serializer: str) -> bytes:
        context = self._context
        return encode_envelope(
            Envelope(
                class_name=self.definition.name,
                serializer=serializer,
                seed=context.seed,
                sequence_id=self.next_sequence_id - 1,
                version=self.definition.version,
                record_time_ns=context.record_time_ns,
                instance_name=context.instance_name,
                tasks=self._tasks.save(),
                rules=context.sites.rules,
                ordering=context.multicasts.save(),
                nodes=context.nodes.save(),
                order_rules=context.multicasts.rules,
            )
        )


# Start of the `@on_primary` hooks: once the state covers each impulse that was logged before.
#
# A logged impulse can still wait: for an ordered multicast, or for its handler's turn. A hook continues from the state,
# so before such impulses are handled it would send them a second time.


class HookGate:
    """Gate of the `@on_primary` hooks in one life of an app. ``is_open``: they can start."""

    def __init__(self, context: Context) -> None:
        self.is_open = False
        self._context = context
        self._is_watching = False
        self._filed_count = 0  # number of plain calls that had to wait before the app became primary
        self._queued: frozenset[int] | None = None  # numbers of async handlers; None: other calls are waited for first
        self._since_ns = 0
        self._released: tuple[Ordering, int] | None = None  # ..., and how many of its releases must be executed

    def begin(self) -> None:
        """Begin to watch: the app is primary, and all impulses of earlier lives have been received."""
        context = self._context
        ordering = context.multicasts.ordering
        self._is_watching = True
        self._filed_count = 0 if ordering is None else ordering.state.filed_count
        self._since_ns = context.record_time_ns or 0
        self.poll()

    def poll(self) -> bool:
        """Check after each record whether the hooks can start; return True if they can."""
        if self._is_watching and not self.is_open:
            self.is_open = not any(self._filed()) and self._is_executed() and not self._queued_count()
        return self.is_open

    def _filed(self) -> Iterator[bool]:
        """Yield True for each call that waits for a multicast and that nobody awaits: an impulse is such a fork."""
        ordering: Ordering | None = self._context.multicasts.ordering
        for filed in () if ordering is None else ordering.plain_calls():
            if filed.number <= self._filed_count:
                plain = Plain(filed.calls[0], None)
                if plain.kind == RpcKind.CALL and plain.rpc_type == RpcType.FORK:
                    yield True

    def _queued_count(self) -> int:
        """Return the number of calls of async handlers that nobody awaits and that wait for their turn."""
        queued = self._context.tasks.limits.queued
        if self._queued is None:
            self._queued = frozenset(number for number, one in queued.items() if one.caller is None)
        return sum(number in queued for number in self._queued)

    def _is_executed(self) -> bool:
        """Return True if all calls that left the queue have come back as calls of the instance to itself."""
        ordering: Ordering | None = self._context.multicasts.ordering
        if ordering is None:
            return True
        if self._released is None or self._released[0] is not ordering:  # a rewind has created it anew
            self._released = ordering, ordering.executed_count + ordering.state.released_count
        return ordering.executed_count >= self._released[1]

    def describe(self) -> list[dict[str, Any]]:
        """Describe what the hooks wait for, like :meth:`Multicasts.describe`; empty if they do not wait."""
        if not self._is_watching or self.is_open:
            return []
        what = "before its @on_primary hooks start: input that was logged before must be handled first, as it"
        context, count = self._context, sum(self._filed())
        if count:
            names = context.multicasts.awaited_instances()
            what += " stands behind a multicast"
        elif self._queued:
            names, count = [context.instance_name], self._queued_count()
            what += " waits for its turn"
        else:
            names, count = [context.instance_name], 1
            what += " is on its way back from the log"
        return [{"for": one, "what": what, "since_ns": self._since_ns, "count": count} for one in names]


# ``@upgrades``: the class whose state a class takes over, and the upgrades along a chain of such classes.
#
# A checkpoint names the version of the app that wrote it. The class of that version restores it and handles records, as
# before, until the app is told to upgrade. Then each class of the chain makes its state from that of the class before.


C = TypeVar("C", bound=type[ImmortalProtocol])

REASON_CHARACTERS_MAX = 1000
USAGE = "@classmethod def upgrade(cls, old: {old}) -> {new}"


def upgrades(old: type[ImmortalProtocol], *, retry_refused: bool = False) -> Callable[[C], C]:
    """Let a class take over the state of an older class, with its method ``upgrade``::

        @upgrades(CounterV1)
        class Counter(Immortal):
            @classmethod
            def upgrade(cls, old: CounterV1) -> Counter: ...

    ``upgrade`` gets the old object after its last record and returns a new one. Replays repeat it, so it must take time
    and randomness from the SDK (``immortal.now()``); like ``__init__`` it can't send calls. A subclass of the old class
    can leave it out: then ``__init__`` creates the object, which takes over each attribute of the old state by its
    name. The version of the class is the old one's + 1, unless ``version=`` gives another (a lower one for the way
    back). With ``retry_refused`` the upgrade gives the app once more the messages without a waiting caller that were
    refused because of unknown methods or parameters. Raises DefinitionError.
    """
    old_definition = definition_of(old)

    def decorate(cls: C) -> C:
        definition = definition_of(cls)
        if definition.upgrades is not None:
            raise DefinitionError(f"{definition.name}: a class upgrades one other: there are two @upgrades")
        usage = USAGE.format(old=old_definition.name, new=definition.name)
        found = vars(cls).get("upgrade")
        if found is None and issubclass(cls, old) and hook_of(old, "checkpoint") is None:
            found = _carry_over
        function = _check_upgrade(definition, found, usage)
        if definition.given_version == old_definition.version:
            raise DefinitionError(
                f"{definition.name}: it has the version of the class that it upgrades, {old_definition.version}: "
                f"leave version= out (it is then {old_definition.version + 1}), or give another"
            )
        definition.upgrades = old_definition
        definition.retries_refused = retry_refused
        setattr(cls, "upgrade", classmethod(function))  # noqa: B010 (a type checker knows no such attribute)
        return cls

    return decorate


def _carry_over(cls: Any, old: Any) -> Any:
    new = cls()
    for name in own_definition_of(old).state().fields:
        value = getattr(old, name)
        is_dict = isinstance(value, Table) and name not in own_definition_of(new).state().tables
        setattr(new, name, dict(value) if is_dict else value)
    return new


def _check_upgrade(definition: Definition, found: object, usage: str) -> Callable[..., Any]:
    if found is None:
        raise DefinitionError(f"{definition.name}: @upgrades needs an upgrade method: write '{usage}'")
    function = found.__func__ if isinstance(found, classmethod) else found
    if isinstance(found, (Handler, staticmethod)) or not inspect.isfunction(function):
        raise DefinitionError(
            f"{definition.name}.upgrade: with @upgrades it is a class method, this is a {type(found).__name__}: "
            f"write '{usage}'"
        )
    if (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        raise DefinitionError(f"{definition.name}.upgrade: a plain function was expected: write '{usage}'")
    try:
        signature_of(function).bind(object, object)
    except TypeError:
        raise DefinitionError(
            f"{definition.name}.upgrade{signature_of(function)}: it is called with the class and the old object: "
            f"write '{usage}'"
        ) from None
    return function


# --- the class of a version -------------------------------------------------------------------------------------------


def restoring_class(main: Definition, envelope: Envelope) -> Definition:
    """Return the class of the checkpoint's version, of several the one nearest to ``main``. Raises StateError."""
    for definition in main.chain:
        if definition.version == envelope.version:
            return definition
    raise StateError(
        f"the checkpoint is of version {envelope.version} ({envelope.class_name}), the app {main.label} has "
        f"{_versions(main.chain)}: run the app that has version {envelope.version}. To get from one version to the "
        f"other, run an app that has both (@upgrades) and 'immortal upgrade NAME --to {main.version}'"
    )


def upgrade_path(main: Definition, current: Definition, version: int | None) -> list[Definition]:
    """Return the classes of an upgrade from ``current``'s version to ``version`` (None: that of ``main``).

    The first one is ``current`` or another class of its version, if only that has a path: after a way back there are
    two. Raises UpgradeError.
    """
    chain = main.chain
    version = main.version if version is None else version
    if current.version == version:
        return [current]
    starts = [definition for definition in chain if definition.version == current.version]
    for start in sorted(starts, key=lambda definition: definition is not current):
        newer = chain[: chain.index(start)][::-1]
        for count, definition in enumerate(newer, 1):
            if definition.version == version:
                return [start, *newer[:count]]
    held = f"{main.label} has {_versions(chain)}"
    reason = f"{held}: the app is of version {main.version}, the upgrade is to version {version}"
    raise UpgradeError(
        f"{reason}; the app stops\n"
        f"  Nothing has changed: the instance is of version {current.version}. Run an app whose class of version "
        f"{version} has\n"
        f"  @upgrades(<the class of version {current.version}>), or ask for another version: 'immortal upgrade NAME "
        f"--to ...'.",
        reason,
    )


def _versions(chain: Sequence[Definition]) -> str:
    versions = [str(version) for version in sorted({definition.version for definition in chain})]
    if len(versions) == 1:
        return f"version {versions[0]} only"
    return f"versions {', '.join(versions[:-1])} and {versions[-1]}"


# --- one upgrade ------------------------------------------------------------------------------------------------------


def upgraded(definition: Definition, old: Any, context: Context) -> Any:
    """Return an instance of ``definition``'s class, upgraded from ``old``, in ``context``. Raises UpgradeError."""
    what = f"{definition.name}.upgrade"
    record_index = context.message_index
    context.message_index = -definition.version  # each upgrade has its own random streams
    try:
        with instances_use_context(lambda: _context_for_another(context)):
            new: Any = guarded(definition, what, partial(definition.cls.upgrade, old))  # type: ignore[attr-defined]
        kind: type = type(new)
        if kind is not definition.cls:  # a subclass has a definition of its own
            came = "None" if new is None else f"a {kind.__qualname__}"
            raise failed(definition, f"{what} returned {came}, a {definition.name} was expected")
        attach(new, context)
        if hook_of(type(new), "prepare") is not None:
            guarded(definition, f"{definition.name}.prepare", new.prepare)
    finally:
        context.message_index = record_index
    return new


def moved(definition: Definition, old_definition: Definition, old: Any, context: Context) -> Any:
    """Move the state of ``old`` to another class of its version, in ``context``. Raises UpgradeError."""
    schema = old_definition.state()
    new = definition.new_instance()
    attach(new, context)

    def move() -> None:
        envelope = copied_envelope(definition.name, schema.serializer)
        _, pieces = schema.with_tables(old, schema.encode_attributes(old))
        finish(definition.state().restoring(new, envelope, Incoming(pieces)))

    guarded(definition, f"{definition.name}.restore", move)
    if hook_of(type(new), "prepare") is not None:
        guarded(definition, f"{definition.name}.prepare", new.prepare)
    return new


def _context_for_another(context: Context) -> Context:
    """Return a context for one more instance in the same life: the same time and randomness, no calls."""
    made = Context(context.seed, context.outbox)
    made.sites = context.sites
    made.committer_id = context.committer_id
    made.sequence_id = context.sequence_id
    made.message_index = context.message_index
    made.record_time_ns = context.record_time_ns
    return made


def guarded(definition: Definition, subject: str, function: Callable[[], Any]) -> Any:
    """Call ``function``; an exception becomes the UpgradeError of an upgrade to ``definition``."""
    try:
        return function()
    except AppError as error:
        text, _, ways_out = str(error).partition("\n")
        text = text.removesuffix("; the app stops")
        reason = text if text.startswith(definition.name) else f"{subject}: {text}"
        raise failed(definition, reason, ways_out, "Mend that" if ways_out else f"Fix {subject}") from error
    except BaseException as error:
        if not is_user_failure(error):
            raise
        summary = "".join(traceback.format_exception_only(error)).strip()
        reason = f"{subject} raised {summary}{_place(error.__traceback__)}"
        remedy = f"Fix {definition.name}" if ": " in subject else f"Fix {subject}"
        raise failed(definition, reason, user_traceback(error), remedy) from error


def failed(definition: Definition, reason: str, details: str = "", remedy: str = "") -> UpgradeError:
    reason = " ".join(reason.split())
    if len(reason) > REASON_CHARACTERS_MAX:
        reason = f"{reason[: REASON_CHARACTERS_MAX - 3]}..."
    old = definition.upgrades.version if definition.upgrades else definition.version
    return UpgradeError(
        f"the upgrade from version {old} to version {definition.version} failed: {reason}; the app stops\n"
        f"{details}{details and chr(10)}"
        f"  Nothing has changed: the log and the state are those of the old version. "
        f"{remedy or f'Fix {definition.name}.upgrade'} and start again.",
        reason,
    )


def _place(trace: TracebackType | None) -> str:
    """Return `` (file:line)`` of the last line in the file that the SDK called directly."""
    frames = traceback.extract_tb(trace)[1:]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
