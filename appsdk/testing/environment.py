"""Test environment: instances in one process, with a clock of their own. See docs/how-to/testing.md."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Self, TypeVar, cast, overload

import msgspec

from immortal.appsdk.calls.context import datetime_of
from immortal.appsdk.errors import HandlerError, UsageError
from immortal.appsdk.handlers.definition import Definition, definition_of, shard_name
from immortal.appsdk.handlers.moves import change_count, shard_numbers
from immortal.appsdk.immortal import Immortal
from immortal.appsdk.running.debugger import skip_in_replays
from immortal.appsdk.testing.instance import Instance, MemorySource, Pending, Shards
from immortal.appsdk.testing.outside import OUTSIDE_NAME, OUTSIDERS, EffectStubs
from immortal.appsdk.testing.replay_check import ReplayDiffers, problems_of
from immortal.appsdk.testing.world import CrashPlan, Victim, World
from immortal.coordinator.core import events as ev
from immortal.protocol import personal_keys
from immortal.protocol.limits import NAME_SIZE_BYTES_MAX
from immortal.protocol.safe_output import is_encodable
from immortal.replay.fleet.model import Answer, Check, Logs, Rules
from immortal.replay.fleet.outcome import FleetOutcome, what_if_fleet

T = TypeVar("T", bound=Immortal)

START = datetime(2030, 1, 1, tzinfo=UTC)


class Environment:
    """Test environment for instances in this process: real coordinators, logs in memory, the real SDK.

    It has no thread, no socket and no file. ``start``: first time of its clock, aware. ``seed``: of the apps'
    randomness. ``order``: seed of the order of simultaneous events; None: each instance in turn.
    The same three give the same run. ``crashes``: see :func:`immortal.appsdk.testing.crash_everywhere`, which makes
    one.

    ``fail_alone``: a call that fails does so alone, as in service: its caller gets CalleeFailed or CallRefused, and
    calls without a caller are in ``instance.dead_letters``. Without it an undeclared exception of a handler fails the
    test.

    As a context manager it ends with :meth:`close`, unless the test has failed.
    """

    def __init__(
        self,
        *,
        start: datetime = START,
        seed: int = 0,
        order: int | None = None,
        crashes: CrashPlan | None = None,
        fail_alone: bool = False,
    ) -> None:
        if start.tzinfo is None:
            raise UsageError(f"Environment(start={start!r}): a datetime with a time zone was expected")
        os.environ.setdefault(personal_keys.NOTES_VARIABLE, os.devnull)  # no keys of persons are kept
        start_ns = (start - datetime_of(0)) // timedelta(microseconds=1) * 1000
        self._world = World(start_ns, seed, order, crashes or CrashPlan(), fail_alone=fail_alone)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        try:
            if error is not None:
                self._note_crash(error)
                return
            try:
                self.close()
            except BaseException as failure:
                self._note_crash(failure)
                raise
        finally:
            self._world.discard_tasks()

    def _note_crash(self, error: BaseException) -> None:
        if self._world.crashes.happened:
            error.add_note(self._world.crashes.happened)

    # --- instances ---------------------------------------------------------------------------------------------------

    @overload
    def start(self, cls: type[T], name: str, *, effects: EffectStubs | None = None) -> Instance[T]: ...
    @overload
    def start(self, cls: type[T], name: str, *, effects: EffectStubs | None = None, shards: int) -> Shards[T]: ...
    def start(self, cls: type[T], name: str, *, effects: EffectStubs | None = None, shards: int | None = None) -> Any:
        """Start a new instance of ``cls`` under the name by which others call it. Return once all are at rest.

        ``effects``: functions that replace those that its handlers pass to ``immortal.effect``. ``shards``: so many
        instances have the keys of a keyed class. Raises UsageError, and as :meth:`run`.
        """
        __tracebackhide__ = True
        definition = definition_of(cls)
        if shards is None:
            return self._start(definition, name, effects)
        if definition.objects is None or shards < 1:
            raise UsageError(f"env.start(..., shards={shards!r}): a keyed class and a number from 1 were expected")
        started = {}
        for number in shard_numbers(shards):
            one = msgspec.structs.replace(definition, shard=(number or 1, shards))
            started[number] = self._start(one, shard_name(name, number, shards), effects)
        return Shards(name, started, shards)

    def change_shards(
        self, shards: Shards[T], count: int, *, meanwhile: Callable[[], object] = lambda: None
    ) -> list[str]:
        """Move the keys of a keyed class to another number of instances, as 'immortal shards NAME --count' does.

        Return the handlers for which some keys still wait; a further call moves them. ``meanwhile`` is called before
        each step of the move, for example to send calls. Raises as :meth:`run`.
        """
        __tracebackhide__ = True
        one = next(iter(shards.started.values()))

        def start() -> None:
            for number in set(shard_numbers(count)) - shards.started.keys():
                shard = msgspec.structs.replace(one.definition, shard=(number, count, shards.count))
                name = shard_name(shards.name, number, count)
                shards.started[number] = self._start(shard, name, one._node.effects)

        def call(number: int, handler: Any, *arguments: Any) -> Any:
            name = shards.started[number].name
            meanwhile()
            sent = self._world.outside.call(name, handler, arguments)
            return Pending(self._world, one.definition, handler, sent).result()

        rests = iter((True, True))  # after each, everything is at rest
        waiting = change_count(call, start, lambda: next(rests, False), shards.count, count)
        shards.count = shards.count if waiting else count
        return waiting

    def _start(self, definition: Definition, name: str, effects: EffectStubs | None) -> Instance[Any]:
        __tracebackhide__ = True
        self._world.require_open()
        skip_in_replays()  # for example those that check the test at its end
        is_text = isinstance(name, str) and is_encodable(name)
        if not is_text or not 1 <= len(name.encode()) <= NAME_SIZE_BYTES_MAX:
            raise UsageError(f"env.start(..., {name!r}): a name of 1 to {NAME_SIZE_BYTES_MAX} bytes was expected")
        if name in self._world.nodes:
            whose = "the test itself" if name == OUTSIDE_NAME else "an instance of this environment"
            raise UsageError(f"env.start(..., {name!r}): that is the name of {whose}: choose another one")
        node = self._world.add(name, definition)
        node.effects = dict(effects or {})
        node.start()
        self.run()
        return Instance(self._world, node)

    def partition(self, one: Instance[Any], other: Instance[Any]) -> None:
        """Cut the network between two instances, in both directions, until :meth:`heal`."""
        self._world.network.parted.add(frozenset((one.name, other.name)))

    def heal(self) -> None:
        """Reconnect all instances."""
        __tracebackhide__ = True
        self._world.network.parted.clear()
        self.run()

    # --- time --------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """Time of the environment's clock, aware, UTC. Only :meth:`advance`, :meth:`skip` and waiting calls move it."""
        return datetime_of(self._world.now_ns)

    def run(self) -> None:
        """Run until no instance has anything to do at this moment of the clock.

        Raises what a handler raises (the user's own exception), and errors that stop an app or a coordinator.
        """
        __tracebackhide__ = True
        self._world.run()

    def advance(
        self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0, milliseconds: float = 0
    ) -> None:
        """Advance the clock: each timer on the way fires at its own time. Raises as :meth:`run`."""
        __tracebackhide__ = True
        duration = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds, milliseconds=milliseconds)
        self._world.advance_to(self._moment_after("advance", duration))

    def skip(
        self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0, milliseconds: float = 0
    ) -> None:
        """Let the clock jump, as on a machine that was asleep: due timers fire late, each schedule once.

        A year takes as long as a second. Raises as :meth:`run`.
        """
        __tracebackhide__ = True
        duration = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds, milliseconds=milliseconds)
        self._world.skip_to(self._moment_after("skip", duration))

    def _moment_after(self, name: str, duration: timedelta) -> int:
        """Return the time after ``duration``, in ns since the Unix epoch. Raises UsageError."""
        __tracebackhide__ = True
        if duration < timedelta():
            raise UsageError(f"env.{name}: {duration}: the clock goes on only")
        return self._world.now_ns + duration // timedelta(microseconds=1) * 1000

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Run until all instances are at rest, then replay the whole log of each instance and compare.

        Raises ReplayDiffers, an AssertionError, if a replay makes other calls or another state than the run.
        """
        __tracebackhide__ = True
        if self._world.is_closed:
            return
        self.run()
        self.check_replays()
        self._world.is_closed = True

    def check_replays(self) -> None:
        """Replay each log so far and compare, like :meth:`close`, but without an end. Raises ReplayDiffers."""
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
                found = problems_of(sources[node.name], node.definition, sources, place)
                problems += self._world.variables.copy().run(list, found)
        if problems:
            raise ReplayDiffers(
                "a replay does not do again what was done: after a crash this app would not come back\n"
                + "\n".join(problems)
            )

    def what_if(
        self,
        changes: Mapping[str, type[Immortal]],
        *,
        effects: str | Answer = "fail",
        answer: Answer | None = None,
        check: Check | None = None,
        seeds: int = 1,
        delays: str = "recorded",
    ) -> FleetOutcome:
        """Run other classes over the log so far, and all instances that their changed calls reach.

        ``changes``: classes by the name of an instance. For the rest see docs/how-to/what-if.md. Raises UsageError if
        there is no such instance, ReplayError for a run that is impossible, and as :meth:`run`.
        """
        __tracebackhide__ = True
        self.run()
        nodes = {name: node for name, node in self._world.nodes.items() if node.definition is not None}
        if unknown := sorted(changes.keys() - nodes.keys()):
            raise UsageError(f"env.what_if({{{unknown[0]!r}: ...}}): there is no such instance: {sorted(nodes)}")
        logs = Logs(
            {name: MemorySource(name, node.store) for name, node in nodes.items()},
            lambda name: cast("Definition", nodes[name].definition),
            {name: definition_of(cls) for name, cls in changes.items()},
            outsiders=OUTSIDERS,
        )
        return what_if_fleet(logs, Rules(effects, answer, check, delays=delays), seeds=seeds)

    # --- for crash_everywhere ----------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self._world.is_closed

    @property
    def crash(self) -> str:
        """Place of this run's crash, as text; "" without one. See :func:`crash_everywhere`."""
        return self._world.crashes.happened

    @property
    def crash_point_count(self) -> int:
        """Number of points so far at which an instance could have crashed."""
        return self._world.crashes.count


# The same test repeated, each time with a crash at another point.


def crash_everywhere(
    *,
    victims: Sequence[Victim] = ("instance", "app"),
    runs_max: int | None = None,
    start: datetime = START,
    seed: int = 0,
    order: int | None = None,
    fail_alone: bool = False,
) -> Iterator[Environment]:
    """Yield environments for one test: the first without a crash, then one for each possible point of a crash.

    ::

        for env in crash_everywhere():
            with env:
                ...  # the test

    The crash happens by itself, at one of the points between any two steps of any instance, and what has crashed is
    restarted at once. ``victims``: "instance" is app and coordinator, "app" only the app. ``runs_max``: limit of the
    number of runs, spread evenly over the points. ``fail_alone``: see :class:`Environment`. Each failure says where the
    crash was.
    """
    first = Environment(start=start, seed=seed, order=order, fail_alone=fail_alone)
    yield first
    if not first.is_closed:
        raise UsageError("crash_everywhere: each environment is to be used in a with statement: with env: ...")
    plans = [(point, victim) for victim in victims for point in range(1, first.crash_point_count + 1)]
    if runs_max is not None and len(plans) >= runs_max:
        plans = [plans[index * len(plans) // (runs_max - 1)] for index in range(runs_max - 1)]
    for point, victim in plans:
        plan = CrashPlan(point, victim)
        yield Environment(start=start, seed=seed, order=order, crashes=plan, fail_alone=fail_alone)
