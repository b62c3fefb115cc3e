"""Handle of one instance for tests: its calls, its on_primary hooks, its log in memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.outbox import ImpulseQueue, Write
from immortal.appsdk.errors import Disconnected, UsageError
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.handlers.definition import blocks, definition_of, range_of
from immortal.appsdk.handlers.proxy import Impulses
from immortal.appsdk.immortal import Immortal
from immortal.appsdk.running.local_app import LocalApp
from immortal.appsdk.state.journal import decode_raised
from immortal.appsdk.state.schema import copied_envelope
from immortal.appsdk.testing.world import Node, World
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.interfaces import LogSummary
from immortal.coordinator.log.format import FORMAT_VERSION
from immortal.coordinator.log.identity import LogIdentity
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.protocol.verdicts import Verdict
from immortal.replay.plan import RecordedLog

if TYPE_CHECKING:
    from immortal.appsdk.handlers.decorators import RemoteHandler
    from immortal.appsdk.handlers.definition import Definition


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound=Immortal)
U = TypeVar("U", bound=Immortal)

PATIENCE = timedelta(days=7)


class Pending(Generic[R]):
    """Call that waits for its answer, returned by :meth:`Instance.begin`."""

    def __init__(self, world: World, definition: Definition, handler: Handler[Any, Any], number: int) -> None:
        self._world = world
        self._definition = definition
        self._handler = handler
        self._number = number

    @property
    def done(self) -> bool:
        """True if the answer has come."""
        return self._number in self._world.outside.answers

    def result(self, *, patience: timedelta = PATIENCE) -> R:
        """Return the handler's result. Meanwhile the clock advances from timer to timer, by at most ``patience``.

        Raises the exceptions that the handler declares (``raises=[...]``), NoAnswerError, and what
        :meth:`Environment.run` raises.
        """
        __tracebackhide__ = True
        handler = self._handler
        if not self.done:
            self._world.wait_for(f"the call of {handler.function.__qualname__}", lambda: self.done, patience)
        answer = self._world.outside.answers[self._number]
        if answer.raised:
            raise decode_raised(handler.raises, handler.function.__qualname__, answer.value)
        value: R = self._definition.codec(handler).decode_result(answer.value)
        return value


class Instance(Generic[T]):
    """Handle of one instance of an environment, returned by :meth:`Environment.start`.

    Handlers are passed as attributes of the class: ``bank.call(Bank.debit, "ann", 5)``.
    """

    def __init__(self, world: World, node: Node) -> None:
        self._world = world
        self._node = node

    def __repr__(self) -> str:
        return f"<{self.definition.name} {self.name!r}>"

    @property
    def name(self) -> str:
        return self._node.name

    @property
    def definition(self) -> Definition:
        return cast("Definition", self._node.definition)

    @property
    def state(self) -> T:
        """Copy of the object as a checkpoint would save it now, without Transient attributes.

        Raises UsageError while the instance is down, StateError for a state that can't be saved.
        """
        app = self._app()
        definition = app.dispatcher.definition
        schema = definition.state()
        copy: T = Immortal.__new__(definition.cls)
        envelope = copied_envelope(definition.name, schema.serializer)
        schema.restore(copy, envelope, memoryview(schema.encode(app.instance)))
        return copy

    def __getitem__(self, key: Any) -> OfKey[T]:
        """Return the handle of one key of a keyed class: ``carts["ann"].call(Cart.add, "tea", 2)``."""
        return OfKey(self, key)

    @property
    def is_up(self) -> bool:
        """True if the instance has a running coordinator and app."""
        app = self._node.local_app
        return self._node.is_up and app is not None and app.is_primary

    def _app(self) -> LocalApp:
        app = self._node.local_app
        if app is None or app.instance is None:
            raise UsageError(f"{self!r} is down: recover() starts it again")
        return app

    @property
    def dead_letters(self) -> list[Verdict]:
        """Failed or refused calls that no caller waits for, oldest first. Only with ``fail_alone``."""
        letters = map(self._node.store.letter, self._node.store.summary().letters)
        return [letter.verdict for letter in letters if letter is not None]

    # --- life cycle --------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Crash app and coordinator, and lose all that is not durable. The instance is down until :meth:`recover`."""
        self._require_up()
        self._node.crash()

    def crash_app(self) -> None:
        """Crash only the app; the coordinator still takes calls for it. The instance is down until :meth:`recover`."""
        self._require_up()
        self._node.crash_app()

    def stop(self) -> None:
        """Stop the instance cleanly, with a checkpoint. It is down until :meth:`recover`."""
        __tracebackhide__ = True
        self._require_up()
        self._node.handle(ev.StopRequested())
        self._world.run()

    def recover(self) -> None:
        """Restart what is down from the log. Return when all is at rest; raise as :meth:`Environment.run`."""
        __tracebackhide__ = True
        self._world.require_open()
        node = self._node
        if node.is_up and node.app is not None:
            raise UsageError(f"{self!r} is up: crash() or stop() it first")
        self._world.do(node.connect if node.is_up else node.start)
        self._world.run()

    def upgrade(self, cls: type[U]) -> Instance[U]:
        """Restart the instance with the class ``cls``, after a clean stop if it is up.

        A class of another version (``@upgrades``) takes over the state; one of the same version is repaired code.
        Raises what the new class's ``upgrade`` raises, and as :meth:`Environment.run`.
        """
        __tracebackhide__ = True
        definition = definition_of(cls)
        if self._node.is_up and self._node.app is not None:
            self.stop()
        elif self._node.is_up:
            self._node.crash()
        versions = self._node.store.summary().versions
        self._node.definition = definition
        is_new = bool(versions) and versions[-1].version != definition.version
        self._node.upgrade_to = definition.version if is_new else None
        self._world.do(self._node.start)
        self._world.run()
        return Instance(self._world, self._node)

    def checkpoint(self) -> None:
        """Take a checkpoint now: the next recovery begins there."""
        __tracebackhide__ = True
        self._require_up()
        self._node.handle(ev.CheckpointRequested())
        self._world.run()

    def export_log(self, path: str | os.PathLike[str]) -> None:
        """Write the log, with a checkpoint at its end, into a new file for :func:`assert_replays`.

        Raises OSError, also FileExistsError.
        """
        if self.is_up:
            self.checkpoint()
        RecordedLog.of(MemorySource(self.name, self._node.store)).write(Path(path))

    def _require_up(self) -> None:
        self._world.require_open()
        if not self._node.is_up or self._node.app is None:
            raise UsageError(f"{self!r} is down: recover() starts it again")

    # --- calls from outside ------------------------------------------------------------------------------------------

    def call(self, handler: RemoteHandler[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a handler from outside and return its result. Meanwhile the clock advances, by at most a week.

        Raises the exceptions that the handler declares, TypeError for arguments that do not fit it, NoAnswerError, and
        what :meth:`Environment.run` raises.
        """
        __tracebackhide__ = True
        return self.begin(handler, *args, **kwargs).result()

    def begin(self, handler: RemoteHandler[P, R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        """Send a call that waits for its answer, but do not wait here: nothing runs before the environment does.

        Raises TypeError for arguments that do not fit the handler.
        """
        found, arguments = self._bound(handler, args, kwargs)
        return Pending(self._world, self.definition, found, self._world.outside.call(self.name, found, arguments))

    def send(self, handler: RemoteHandler[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Send an impulse, without waiting: nothing runs before the environment does.

        Raises TypeError for arguments that do not fit the handler.
        """
        found, arguments = self._bound(handler, args, kwargs)
        self._world.outside.send(self.name, found, arguments)

    def run_hook(self, hook: Callable[[T, Any], None]) -> None:
        """Run an ``@on_primary`` hook to its end, here: ``reader.run_hook(Reader.feed)``. No hook runs by itself.

        Each impulse is handled before the hook continues; the clock stands still. If a crash of
        :func:`crash_everywhere` happens meanwhile, the hook runs again, as after each recovery. Raises what the hook
        raises, and as :meth:`Environment.run`.
        """
        __tracebackhide__ = True
        app = None
        while app is not self._node.local_app:  # a crash of the app ends its hook; the next app has its own
            app = self._app()
            self._run_hook_in(app, hook)
            self._world.run()

    def _run_hook_in(self, app: LocalApp, hook: Callable[[T, Any], None]) -> None:
        __tracebackhide__ = True
        dispatcher = app.dispatcher
        queue = HookQueue(
            dispatcher.context, dispatcher.outbox.impulses, self._world.run, lambda: self._node.local_app is app
        )

        def may_start() -> bool:  # or its app is gone
            return dispatcher.may_start_hooks or self._node.local_app is not app

        self._world.wait_for(f"the hook of {self!r}", may_start, PATIENCE)
        if self._node.local_app is not app:
            return
        with as_thread(dispatcher.context), suppress(Disconnected):
            impulses = Impulses(app.instance, dispatcher.definition, queue)
            dispatcher.context.run_contexts.run(hook, app.instance, impulses)

    def _bound(self, handler: object, args: Any, kwargs: Any) -> tuple[Handler[Any, Any], tuple[Any, ...]]:
        self._world.require_open()
        found = self.definition.handlers.get(handler.name) if isinstance(handler, Handler) else None
        if found is None:
            known = ", ".join(f"{self.definition.name}.{name}" for name in sorted(self.definition.handlers)) or "none"
            what = handler.function.__qualname__ if isinstance(handler, Handler) else repr(handler)
            raise UsageError(f"{what} is no handler of {self!r}: it has {known}")
        codec = self.definition.codec(found)
        bound = codec.bind(args, kwargs)
        return found, codec.tag_values(bound) if codec.needs_forms else bound


class OfKey(Generic[T]):
    """Handle of one key of a keyed class, returned by ``carts["ann"]``: has the calls of :class:`Instance`."""

    def __init__(self, instance: Instance[T], key: Any) -> None:
        if instance.definition.objects is None:
            raise UsageError(f"{instance!r}[{key!r}]: {instance.definition.name} is no keyed class")
        self.instance = instance
        self._calls: Any = instance
        self._key = key

    @property
    def state(self) -> T:
        """Copy of the key's object. Raises KeyError if there is none, else like :attr:`Instance.state`."""
        state: Any = self.instance.state
        found: T = state.keys[self._key]
        return found

    def call(self, handler: RemoteHandler[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        value: R = self._calls.call(handler, self._key, *args, **kwargs)
        return value

    def begin(self, handler: RemoteHandler[P, R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        pending: Pending[R] = self._calls.begin(handler, self._key, *args, **kwargs)
        return pending

    def send(self, handler: RemoteHandler[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        self._calls.send(handler, self._key, *args, **kwargs)


class Shards(Generic[T]):
    """Handle of all instances of a keyed class, returned by ``env.start(Cart, "carts", shards=3)``.

    ``started``: also those that had keys before; by number, 0 for one alone. ``count``: of those that have keys now."""

    def __init__(self, name: str, started: dict[int, Instance[T]], count: int) -> None:
        self.name = name
        self.started = started
        self.count = count

    @property
    def instances(self) -> list[Instance[T]]:
        return [self.started[number] for number in sorted(self.started)]

    def __getitem__(self, key: Any) -> OfKey[T]:
        return self.started[blocks(self.count)[range_of(key)]][key]

    @property
    def keys(self) -> dict[Any, T]:
        """Copies of all keys' objects."""
        states: list[Any] = [one.state for one in self.instances]
        return {key: found for state in states for key, found in state.keys.items()}


# ``@on_primary`` hooks in the test's own thread: each impulse that they send is handled before they continue.


NO_THREAD = 0


@contextmanager
def as_thread(context: Context, thread_id: int = NO_THREAD) -> Iterator[None]:
    """Make ``thread_id`` the handlers' thread meanwhile; NO_THREAD refuses what only handlers can do."""
    before, context.thread_id = context.thread_id, thread_id
    try:
        yield
    finally:
        context.thread_id = before


class HookQueue(ImpulseQueue):
    """Impulse queue in front of the app's own, for hooks that a test runs.

    When a hook's thread would block, ``run`` runs the environment instead."""

    def __init__(
        self, context: Context, queue: ImpulseQueue, run: Callable[[], None], is_alive: Callable[[], bool]
    ) -> None:
        super().__init__(context, lambda: None)
        self._hook_context = context
        self._queue = queue
        self._run = run
        self._is_alive = is_alive

    def append(self, destination: str, name: str, write: Write, arguments: tuple[Any, ...]) -> None:
        self._queue.append(destination, name, write, arguments)
        self._run_handlers()

    def flush(self, timeout_s: float | None) -> None:
        self._run_handlers()
        self._queue.flush(0)  # all are accepted, or it raises the reason

    def request_checkpoint(self) -> None:
        self._queue.request_checkpoint()
        self._run_handlers()

    def _run_handlers(self) -> None:
        with as_thread(self._hook_context, threading.get_ident()):
            self._run()
        if not self._is_alive():  # a hook's thread dies with its app: this one must not continue
            raise Disconnected("the app has crashed")


# A log in memory, as a replay reads it.


READ_SIZE_BYTES = 1 << 20


class MemorySource:
    """Source of records for replays, a :class:`replay.RecordSource`, over the log of the instance ``name``."""

    def __init__(self, name: str, store: MemoryLogStore) -> None:
        self._store = store
        self.identity = LogIdentity(FORMAT_VERSION, name, store.summary().committer_id, 0)
        self.problems: list[str] = []
        self.trusts_pickle = True  # this process wrote it

    def summary(self) -> LogSummary:
        return self._store.summary()

    def values(self, first_sequence_id: int, last_sequence_id: int | None = None) -> Iterator[bytes]:
        sequence_id = max(first_sequence_id, 0)
        while values := self._store.read(sequence_id, READ_SIZE_BYTES):
            for value in values:
                if last_sequence_id is not None and sequence_id > last_sequence_id:
                    return
                yield value
                sequence_id += 1

    def checkpoint_chunks(self, checkpoint_id: int) -> Iterator[bytes]:
        for index in count():
            chunk = self._store.read_checkpoint_chunk(checkpoint_id, index)
            if not chunk:
                return
            yield chunk
