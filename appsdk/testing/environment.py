"""The environment of a test: immortals in one process, on a clock of its own. See docs/guide/testing.md."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar

from appsdk.context import datetime_of
from appsdk.errors import Disconnected, HandlerError, UsageError
from appsdk.handlers import Handler
from appsdk.immortal import Immortal
from appsdk.journal import decode_raised
from appsdk.proxy import Impulses, definition_of
from appsdk.state import Envelope
from appsdk.testing import outside
from appsdk.testing.app import LocalApp
from appsdk.testing.crashes import CrashPlan
from appsdk.testing.failures import raise_as_the_users
from appsdk.testing.hooks import HookQueue
from appsdk.testing.memory import MemorySource
from appsdk.testing.node import Node
from appsdk.testing.outside import OutsideApp
from appsdk.testing.replaying import ReplayDiffers, problems_of
from appsdk.testing.world import World
from coordinator.core import events as ev
from coordinator.replay.recorded import RecordedLog
from protocol.errors import ImmortalError
from protocol.limits import NAME_SIZE_BYTES_MAX

if TYPE_CHECKING:
    from appsdk.definition import Definition
    from appsdk.handlers import RemoteHandler

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound=Immortal)
U = TypeVar("U", bound=Immortal)

START = datetime(2030, 1, 1, tzinfo=UTC)
PATIENCE = timedelta(days=7)

# __tracebackhide__: pytest shows a failure in the test and in the handler, not in here.


class NoAnswerError(ImmortalError):
    """A call has not been answered, and nothing more will happen by itself."""


class Environment:
    """Runs immortals in this process: real coordinators, logs in memory, the real SDK; no thread, no socket, no file.

    ``start``: what its clock says at first, aware. ``seed``: of the apps' randomness. ``order``: a number by which the
    order of all that could happen at one moment is drawn; None: each instance in turn. The same three give the same
    run. ``crashes``: see :func:`appsdk.testing.crash_everywhere`, which makes one.

    As a context manager it ends with :meth:`close`, unless the test has failed.
    """

    def __init__(
        self, *, start: datetime = START, seed: int = 0, order: int | None = None, crashes: CrashPlan | None = None
    ) -> None:
        if start.tzinfo is None:
            raise UsageError(f"Environment(start={start!r}): a datetime with a time zone was expected")
        start_ns = (start - datetime_of(0)) // timedelta(microseconds=1) * 1000
        self._world = World(start_ns, seed, order, crashes or CrashPlan())
        self._outside = self._world.add(outside.NAME, None)
        self._outside.start()
        self._world.settle()
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        if error is not None:
            self._say_where(error)
            return
        try:
            self.close()
        except BaseException as failure:
            self._say_where(failure)
            raise

    def _say_where(self, error: BaseException) -> None:
        if self._world.crashes.happened:
            error.add_note(self._world.crashes.happened)

    # --- instances ---------------------------------------------------------------------------------------------------

    def start(self, cls: type[T], name: str) -> Instance[T]:
        """Start a new instance of ``cls`` under the name by which others call it. Returns once all is at rest."""
        __tracebackhide__ = True
        self._require_open()
        if not isinstance(name, str) or not 1 <= len(name.encode()) <= NAME_SIZE_BYTES_MAX:
            raise UsageError(f"env.start(..., {name!r}): a name of 1 to {NAME_SIZE_BYTES_MAX} bytes was expected")
        if name in self._world.nodes:
            whose = "the test itself" if name == outside.NAME else "an instance of this environment"
            raise UsageError(f"env.start(..., {name!r}): that is the name of {whose}: choose another one")
        node = self._world.add(name, definition_of(cls))
        node.start()
        self.run()
        return Instance(self, node)

    def partition(self, one: Instance[Any], other: Instance[Any]) -> None:
        """Nothing gets from one to the other any more, in both directions, until :meth:`heal`."""
        self._world.network.parted.add(frozenset((one.name, other.name)))

    def heal(self) -> None:
        """All reach each other again."""
        __tracebackhide__ = True
        self._world.network.parted.clear()
        self.run()

    # --- time --------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """What the clock says: aware, UTC. It moves by :meth:`advance` and by calls that wait, never by itself."""
        return datetime_of(self._world.now_ns)

    def run(self) -> None:
        """Until nobody has anything to do at this moment of the clock.

        Raises what a handler raises (the user's own exception), and what stops an app or a coordinator.
        """
        __tracebackhide__ = True
        self._require_open()
        self._guarded(self._world.settle)

    def advance(
        self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0, milliseconds: float = 0
    ) -> None:
        """Let so much time go by: each timer on the way goes off at its own time. Raises as :meth:`run`."""
        __tracebackhide__ = True
        duration = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds, milliseconds=milliseconds)
        if duration < timedelta():
            raise UsageError(f"env.advance: {duration}: the clock goes on only")
        self._require_open()
        time_ns = self._world.now_ns + duration // timedelta(microseconds=1) * 1000
        self._guarded(lambda: self._world.advance_to(time_ns))

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Run until all is at rest, then replay the whole log of each instance and compare.

        Raises ReplayDiffers, an AssertionError, where a replay makes other calls or another state than the run has.
        """
        __tracebackhide__ = True
        if self._is_closed:
            return
        self.run()
        self.check_replays()
        self._is_closed = True

    def check_replays(self) -> None:
        """What :meth:`close` checks, at any moment before. Raises ReplayDiffers."""
        __tracebackhide__ = True
        self.run()
        nodes = [node for node in self._world.nodes.values() if node.definition is not None]
        for node in nodes:
            app = node.local_app
            if app is not None and app.is_primary:  # so that there is a state to compare with
                node.handle(ev.CheckpointRequested())
        self.run()
        sources = {node.name: MemorySource(node.name, node.store) for node in nodes}
        problems: list[str] = []
        for node in nodes:
            failure = node.failure
            place = (failure.sequence_id, failure.message_index) if isinstance(failure, HandlerError) else None
            if node.definition is not None and node.store.summary().extensions is not None:
                problems += problems_of(sources[node.name], node.definition, sources, place)
        if problems:
            raise ReplayDiffers(
                "a replay does not do again what was done: after a crash this app would not come back\n"
                + "\n".join(problems)
            )

    # --- for handles -------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def crash(self) -> str:
        """Where the crash of this run was, in words; "" without one. See :func:`crash_everywhere`."""
        return self._world.crashes.happened

    @property
    def crash_point_count(self) -> int:
        """How many points there were so far at which an instance could have crashed."""
        return self._world.crashes.count

    def _guarded(self, action: Callable[[], None]) -> None:
        __tracebackhide__ = True
        try:
            action()
            return
        except ImmortalError as error:
            failure = error
        raise_as_the_users(failure)

    def _require_open(self) -> None:
        if self._is_closed:
            raise UsageError("this environment is closed: what is to be looked at is asked before close()")

    def _outside_app(self) -> OutsideApp:
        app = self._outside.app
        if not isinstance(app, OutsideApp):
            raise UsageError("this environment has no outside any more")
        return app

    def _wait(self, pending: Pending[Any], patience: timedelta) -> None:
        """Let time go by, from timer to timer, until the answer is there. Raises NoAnswerError."""
        __tracebackhide__ = True
        world = self._world
        self.run()
        latest_ns = world.now_ns + patience // timedelta(microseconds=1) * 1000
        while not pending.done:
            due_ns = world.next_due_ns()
            if due_ns is None or due_ns > latest_ns:
                raise NoAnswerError(self._why_not(pending, due_ns, patience))
            time_ns = due_ns
            self._guarded(lambda time_ns=time_ns: world.advance_to(time_ns))  # type: ignore[misc]

    def _why_not(self, pending: Pending[Any], due_ns: int | None, patience: timedelta) -> str:
        waits = [f"{name}: {message}" for name, message in self._world.reports[-3:]]
        for node in self._world.nodes.values():
            if not node.is_up:
                waits.append(f"{node.name!r} is down")
            elif node.app is None:
                waits.append(f"the app of {node.name!r} is down")
            elif (app := node.local_app) is not None and app.dispatcher.tasks.count:
                waits.append(f"{node.name!r} has {app.dispatcher.tasks.count} async handlers that wait")
            if node.definition is not None:
                for peer in node.definition.peers.values():
                    if peer.name not in self._world.nodes:
                        waits.append(f"{node.name!r} has a peer {peer.name!r}, which was not started")
        if due_ns is None:
            why = "and nothing more happens by itself"
        else:
            why = f"within {patience} (the next timer is due at {datetime_of(due_ns).isoformat()})"
        return f"{pending} has no answer, {why}" + "".join(f"\n  {line}" for line in waits)


class Pending(Generic[R]):
    """A call on its way. Made by :meth:`Instance.begin`."""

    def __init__(self, instance: Instance[Any], handler: Handler[Any, Any], number: int) -> None:
        self._instance = instance
        self._handler = handler
        self._number = number

    def __repr__(self) -> str:
        return f"the call {self._handler.function.__qualname__} of {self._instance.name!r}"

    @property
    def done(self) -> bool:
        """The answer is there."""
        return self._number in self._instance.env._outside_app().answers

    def result(self, *, patience: timedelta = PATIENCE) -> R:
        """What the handler returned; the clock goes on meanwhile, from timer to timer, by at most ``patience``.

        Raises what the handler declares to raise (``raises=[...]``), NoAnswerError, and what :meth:`Environment.run`
        raises.
        """
        __tracebackhide__ = True
        env, handler = self._instance.env, self._handler
        if not self.done:
            env._wait(self, patience)
        answer = env._outside_app().answers[self._number]
        if answer.raised:
            raise decode_raised(handler, answer.value)
        value: R = self._instance.definition.codec(handler).decode_result(answer.value)
        return value


class Instance(Generic[T]):
    """One instance of an environment, made by :meth:`Environment.start`.

    Handlers are given as they stand in the class: ``bank.call(Bank.debit, "ann", 5)``.
    """

    def __init__(self, env: Environment, node: Node) -> None:
        self.env = env
        self._node = node

    def __repr__(self) -> str:
        return f"<{self.definition.name} {self.name!r}>"

    @property
    def name(self) -> str:
        return self._node.name

    @property
    def definition(self) -> Definition:
        definition = self._node.definition
        assert definition is not None
        return definition

    @property
    def state(self) -> T:
        """A copy of the object as it is now, as a checkpoint would keep it: what is Transient is not in it.

        Raises UsageError while the instance is down, StateError for a state that can't be kept.
        """
        app = self._app()
        definition = app.dispatcher.definition
        schema = definition.state()
        copy: T = Immortal.__new__(definition.cls)
        envelope = Envelope(class_name=definition.name, serializer=schema.serializer, seed=b"", sequence_id=-1)
        schema.restore(copy, envelope, memoryview(schema.encode(app.instance)))
        return copy

    @property
    def is_up(self) -> bool:
        """It has a coordinator and an app, which is at work."""
        app = self._node.local_app
        return self._node.is_up and app is not None and app.is_primary

    def _app(self) -> LocalApp:
        app = self._node.local_app
        if app is None or app.instance is None:
            raise UsageError(f"{self!r} is down: recover() starts it again")
        return app

    # --- life and death ----------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Its app and its coordinator die, with all that is not on disk yet. It is down until :meth:`recover`."""
        self._require_up()
        self._node.crash()

    def crash_app(self) -> None:
        """Its app dies alone; its coordinator goes on taking calls for it. It is down until :meth:`recover`."""
        self._require_up()
        self._node.crash_app()

    def stop(self) -> None:
        """A clean stop, with a checkpoint. It is down until :meth:`recover`."""
        __tracebackhide__ = True
        self._require_up()
        self._node.handle(ev.StopRequested())
        self.env.run()

    def recover(self) -> None:
        """Start again what is down, from its log. Returns once all is at rest; raises as :meth:`Environment.run`."""
        __tracebackhide__ = True
        self.env._require_open()
        node = self._node
        if node.is_up and node.app is not None:
            raise UsageError(f"{self!r} is up: crash() or stop() it first")
        self.env._guarded(node.connect if node.is_up else node.start)
        self.env.run()

    def upgrade(self, cls: type[U]) -> Instance[U]:
        """Start it again, after a clean stop if it is up, with the class ``cls``.

        One of another version (``@upgrades``) takes over the state; one of the same version is repaired code. Raises
        what the new class's ``upgrade`` raises, and as :meth:`Environment.run`.
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
        self.env._guarded(lambda: self._node.start(definition.version if is_new else None))
        self.env.run()
        return Instance(self.env, self._node)

    def checkpoint(self) -> None:
        """Take a checkpoint now: the next recovery begins there."""
        __tracebackhide__ = True
        self._require_up()
        self._node.handle(ev.CheckpointRequested())
        self.env.run()

    def export_log(self, path: str | os.PathLike[str]) -> None:
        """Write its log, up to now and with a checkpoint at the end, into a new file for :func:`assert_replays`.

        Raises OSError, FileExistsError among them.
        """
        if self.is_up:
            self.checkpoint()
        RecordedLog.of(MemorySource(self.name, self._node.store)).write(Path(path))

    def _require_up(self) -> None:
        self.env._require_open()
        if not self._node.is_up or self._node.app is None:
            raise UsageError(f"{self!r} is down: recover() starts it again")

    # --- calls from outside ------------------------------------------------------------------------------------------

    def call(self, handler: RemoteHandler[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a handler from outside and wait for what it returns. The clock goes on meanwhile, by up to a week.

        Raises what the handler declares to raise, TypeError for arguments that it does not take, NoAnswerError, and
        what :meth:`Environment.run` raises.
        """
        __tracebackhide__ = True
        return self.begin(handler, *args, **kwargs).result()

    def begin(self, handler: RemoteHandler[P, R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        """Send a call that waits for its answer, and go on: nothing runs before the environment does.

        Raises TypeError for arguments that the handler does not take.
        """
        found, arguments = self._bound(handler, args, kwargs)
        return Pending(self, found, self.env._outside_app().call(self.name, found, arguments))

    def send(self, handler: RemoteHandler[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Send an impulse, and go on: nothing runs before the environment does.

        Raises TypeError for arguments that the handler does not take.
        """
        found, arguments = self._bound(handler, args, kwargs)
        self.env._outside_app().send(self.name, found, arguments)

    def run_hook(self, hook: Callable[[T, Any], None]) -> None:
        """Run an ``@on_primary`` hook to its end, here: ``reader.run_hook(Reader.feed)``. None runs by itself.

        Each impulse is handled before the hook goes on; the clock stands still. If a crash of
        :func:`crash_everywhere` comes meanwhile, it runs once more, as after each recovery. Raises what the hook
        raises, and as :meth:`Environment.run`.
        """
        __tracebackhide__ = True
        app = None
        while app is not self._node.local_app:  # an app that has crashed takes its hook along; the next one has its own
            app = self._app()
            self._run_hook_in(app, hook)
            self.env.run()

    def _run_hook_in(self, app: LocalApp, hook: Callable[[T, Any], None]) -> None:
        __tracebackhide__ = True
        dispatcher = app.dispatcher
        queue = HookQueue(
            dispatcher.context, dispatcher.outbox.impulses, self.env.run, lambda: self._node.local_app is app
        )
        with queue.thread(), suppress(Disconnected):
            hook(app.instance, Impulses(app.instance, dispatcher.definition, queue))

    def _bound(self, handler: object, args: Any, kwargs: Any) -> tuple[Handler[Any, Any], tuple[Any, ...]]:
        self.env._require_open()
        found = self.definition.handlers.get(handler.name) if isinstance(handler, Handler) else None
        if found is None:
            known = ", ".join(f"{self.definition.name}.{name}" for name in sorted(self.definition.handlers)) or "none"
            what = handler.function.__qualname__ if isinstance(handler, Handler) else repr(handler)
            raise UsageError(f"{what} is no handler of {self!r}: it has {known}")
        return found, self.definition.codec(found).bind(args, kwargs)
