"""World of a test: all instances of an environment, their network and clock; single-threaded and deterministic.

A node has machine, log and app of one instance in memory; a plan crashes one of them between two of its steps.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Literal, NoReturn, cast

from immortal.appsdk.calls.context import SEED_SIZE_BYTES, datetime_of
from immortal.appsdk.calls.user_code import ControlFlowSignal, inherited_context, is_sdk_file, mark_interrupts
from immortal.appsdk.errors import AppError, UsageError
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.running.local_app import LocalApp
from immortal.appsdk.testing.outside import OUTSIDE_NAME, OUTSIDERS, EffectStubs, OutsideApp, StubEffectRunner
from immortal.appsdk.waiting.impulses import earlier
from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.components import Components
from immortal.coordinator.core.errors import InvariantError, require
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.machine import Machine
from immortal.coordinator.driver.ports import PlainApp, PlainHost, PlainLog, PlainPeers
from immortal.coordinator.driver.turn import Driver
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.protocol.errors import ImmortalError
from immortal.protocol.peer_frames import PeerFrame

STEPS_MAX = 500_000
"""Limit of steps of all instances at one moment of the clock: else handlers that call each other would run for ever."""

REPORTS_SHOWN = 3  # of the coordinators, if an answer does not come


class LivelockError(ImmortalError):
    """Raised if the instances never come to rest at one moment of the clock."""


class NoAnswerError(ImmortalError):
    """Raised if a call has no answer, and nothing more will happen by itself."""


Victim = Literal["instance", "app"]
"""Kind of crash: app and coordinator together, with all that is not durable, or only the app."""


class SimulatedCrash(ControlFlowSignal):
    """Crash of a process between two of its steps. It is no Exception, since nothing on the way must catch it."""


class CrashPlan:
    """Plan that counts the points at which an instance could crash, and crashes it at ``point`` (from 1; 0: never)."""

    def __init__(self, point: int = 0, victim: Victim = "instance") -> None:
        self.count = 0
        self.happened = ""  # which instance has crashed, and where
        self._point = point
        self._victim = victim

    def point(self, node: Node) -> None:
        """Count a point between two steps of ``node``. Raises SimulatedCrash if the plan crashes it there."""
        if node.definition is None:
            return
        self.count += 1
        if self.count != self._point:
            return
        if self._victim == "instance":
            self.happened = f"with app and coordinator of {node.name!r} crashed at point {self._point}"
            raise SimulatedCrash
        if node.app is not None:
            self.happened = f"with the app of {node.name!r} crashed at point {self._point}"
            node.lose_app()


class Node:
    """One instance: driver, log in memory, and app. ``definition`` None: the test itself, which never crashes."""

    def __init__(self, world: World, name: str, definition: Definition | None, committer_id: int) -> None:
        self.world = world
        self.name = name
        self.definition = definition
        self.effects: EffectStubs = {}
        self.store = MemoryLogStore(committer_id, name=name)
        self.store.clock_ns = lambda: world.now_ns
        self._driver: Driver | None = None
        self._log: PlainLog | None = None
        self.app: LocalApp | OutsideApp | None = None
        self.life = 0  # of the coordinator
        self.wake_ns: int | None = None
        self.upgrade_to: int | None = None  # the wished version, until the upgrade is done or given up
        self.failure: ImmortalError | None = None  # why the app or the coordinator is down
        self._to_app: deque[bytes | memoryview] = deque()
        self.paused = self.closing = False
        self._app_is_lost = False  # it has crashed, and the machine must be told

    @property
    def is_up(self) -> bool:
        return self._driver is not None

    @property
    def local_app(self) -> LocalApp | None:
        return self.app if isinstance(self.app, LocalApp) else None

    # --- life cycle -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start coordinator and app from the log."""
        self.failure = None
        machine = Machine(Components(self.name, self.world.limits, self.upgrade_to))
        inbox: list[ev.Event] = []
        self._log = PlainLog(self.store, inbox)
        self._driver = Driver(
            machine,
            inbox,
            _App(self),
            _Peers(self),
            self._log,
            _Clock(self),
            _Host(self),
            lambda effect: self.world.crashes.point(self),
        )
        inbox.append(ev.Started())
        self.connect()

    def connect(self) -> None:
        """Connect a new app to the running coordinator."""
        if self.definition is None:
            self.app = self.world.make_outside(self)
        else:
            seed = hashlib.blake2b(f"{self.world.seed} {self.name}".encode(), digest_size=SEED_SIZE_BYTES).digest()
            self.app = self.world.variables.copy().run(self.world.make_app, self, self.definition, seed)
        self.failure = None
        self.paused = self.closing = False
        self.do(lambda: self._handle(ev.AppConnected()))

    def crash(self) -> None:
        """Discard app and coordinator, with all that is not durable."""
        self.store = self.store.crash()
        self._end()

    def crash_app(self) -> None:
        """Discard the app; its coordinator waits for the next one."""
        self._drop_app()
        self.do(lambda: self._handle(ev.AppClosed()))

    def _end(self) -> None:
        self._drop_app()
        self._driver = self._log = None
        self.life += 1
        self.wake_ns = None
        self._app_is_lost = False
        self.world.network.forget_sender(self)

    def _drop_app(self) -> None:
        if self.app is not None:
            self.app.close()
        self.app = None
        self._to_app.clear()

    # --- turns ------------------------------------------------------------------------------------------------------

    def do(self, action: Callable[[], None]) -> None:
        """Run ``action`` as one step of this instance: a crash within it restarts the instance at once."""
        try:
            action()
            if self._app_is_lost:
                self._app_is_lost = False
                self._handle(ev.AppClosed())
                self.connect()
        except SimulatedCrash:
            self.crash()
            self.start()

    def lose_app(self) -> None:
        """Crash the app here. The machine is told when its current action has ended."""
        self._drop_app()
        self._app_is_lost = True

    def handle(self, *events: ev.Event) -> None:
        """Handle events in one turn."""
        self.do(lambda: self._handle(*events))

    def _handle(self, *events: ev.Event) -> None:
        if self._driver is not None:
            self._driver.inbox += events
            self._driver.turn()

    def step(self) -> bool:
        """Take the next step of this instance; return False if it has nothing to do."""
        if self._to_app:
            self.do(self._deliver_input)
        elif self._log is not None and self._log.jobs:
            self.do(self._run_log_job)
        elif self.closing and self.app is not None:
            self.do(self._close_app)
        elif not self._deliver_unasked():
            return False
        return True

    @property
    def next_due_ns(self) -> int | None:
        app_due_ns = None if self.app is None else self.app.next_due_ns
        return earlier(self.wake_ns, app_due_ns)

    def _deliver_input(self) -> None:
        data = b"".join(self._to_app)
        self._to_app.clear()
        app = self.app
        if app is None:
            return
        app.receive(data)
        self.world.crashes.point(self)
        self._handle(ev.AppSent(len(data)), *self._pop_output())
        if app.has_died and self.app is app:
            self.lose_app()
            return
        if app.error is not None and self.app is app:
            self.failure = app.error
            self._drop_app()
            self._handle(ev.AppClosed())
            app.error.add_note(f"in the instance {self.name!r}")
            raise app.error

    def _deliver_unasked(self) -> bool:
        """Deliver output that the app makes without input: calls from outside the handlers, and the time."""
        app, now_ns = self.app, self.world.now_ns
        if self.wake_ns is not None and self.wake_ns <= now_ns:
            self.wake_ns = None
            self.handle(ev.Tick())
            return True
        if app is None:
            return False
        if (due_ns := app.next_due_ns) is not None and due_ns <= now_ns:
            app.log_time(now_ns)
        app.take_output()
        if not app.output or self.paused:
            return False
        self.do(lambda: self._handle(*self._pop_output()))
        return True

    def _pop_output(self) -> list[ev.Event]:
        """Take the app's output that can be delivered now, as events."""
        if self.app is None or not self.app.output or self.paused or self.closing:
            return []
        data = bytes(self.app.output)
        self.app.output.clear()
        return [ev.AppData(data)]

    def _close_app(self) -> None:
        self._drop_app()
        self.closing = False
        self._handle(ev.AppClosed())

    def _run_log_job(self) -> None:
        assert self._log is not None
        event = self._log.work()
        if isinstance(event, ev.Committed):
            self.world.crashes.point(self)
        self._handle(event)

    def to_app(self, data: bytes | memoryview) -> None:
        if self.app is not None and not self.closing:
            self._to_app.append(data)

    # --- calls of the driver's ports ---------------------------------------------------------------------------------

    def stopped(self, error: ImmortalError | None) -> None:
        """Note that the coordinator has ended. Raises ``error``."""
        self.store = self.store.crash()
        self._end()
        if error is not None:
            self.failure = error
            raise error


class _Port:
    def __init__(self, node: Node) -> None:
        self._node = node


class _App(_Port, PlainApp):
    def send(self, effect: ef.SendToApp) -> None:
        self._node.to_app(effect.data)

    def close_app(self, effect: ef.CloseApp) -> None:
        self._node.closing = True

    def pause(self, effect: ef.PauseApp) -> None:
        self._node.paused = True

    def resume(self, effect: ef.ResumeApp) -> None:
        self._node.paused = False


class _Peers(_Port, PlainPeers):
    def send(self, effect: ef.SendToPeer) -> None:
        self._node.world.network.send(self._node, effect)

    def reset(self, effect: ef.ResetPeer) -> None:
        self._node.world.network.forget_sender(self._node, effect.destination)

    def reply(self, effect: ef.ReplyToPeer) -> None:
        self._node.world.network.reply(self._node, effect)

    def reply_to_client(self, effect: ef.ReplyToClient) -> None:
        self._node.world.reply_to_client(effect)


class _Clock(_Port):
    def now_ns(self) -> int:
        return self._node.world.now_ns

    def pop_events(self) -> Sequence[ev.Event]:
        return ()

    def wake_at(self, effect: ef.WakeAt) -> None:
        self._node.wake_ns = effect.time_ns


class _Host(_Port, PlainHost):
    def upgrade_ended(self, effect: ef.UpgradeEnded) -> None:
        self._node.upgrade_to = None

    def report(self, effect: ef.Report) -> None:
        notice = effect.notice
        if notice.level in ("warning", "error"):
            self._node.world.reports.append((self._node.name, notice.text))

    def stop(self, effect: ef.Stop) -> None:
        self._node.stopped(effect.error)


class World:
    """All instances and their clock. ``seed``: of the apps' randomness. ``order``: seed of the order of all steps.

    ``order`` None: each instance in turn. ``outside``: the test itself. ``variables``: the context in which each life
    of each app begins.
    """

    outside_name = OUTSIDE_NAME
    limits = Limits(hold_off_ns_min=0)  # a test's clock stands still: a delay would never end

    def __init__(
        self, start_ns: int, seed: int, order: int | None, crashes: CrashPlan, *, fail_alone: bool = False
    ) -> None:
        self.variables = inherited_context()
        self.now_ns = start_ns
        self.fail_alone = fail_alone
        self.seed = seed
        self.crashes = crashes
        self.nodes: dict[str, Node] = {}
        self.network = Network(self.nodes)
        self.reports: list[tuple[str, str]] = []  # (instance, a warning of its coordinator's)
        self.is_closed = False
        self._random = None if order is None else random.Random(order)  # noqa: S311 (from a seed)
        self._outside = self.add(self.outside_name, None)
        self._outside.start()
        self._settle()

    def discard_tasks(self) -> None:
        """Close waiting handlers at the end of the test, not in the middle of another one."""
        for node in self.nodes.values():
            if (app := node.local_app) is not None:
                app.dispatcher.tasks.discard_all()

    @property
    def outside(self) -> OutsideApp:
        app = self._outside.app
        require(isinstance(app, OutsideApp), "the test itself has no app: it never crashes")
        return cast("OutsideApp", app)

    def add(self, name: str, definition: Definition | None) -> Node:
        node = self.nodes[name] = Node(self, name, definition, len(self.nodes) + 1)
        return node

    def reply_to_client(self, effect: ef.ReplyToClient) -> None:
        """Drop the reply: a test has no clients."""

    def make_outside(self, node: Node) -> OutsideApp:
        """Make the app of a node without a class."""
        return OutsideApp()

    def make_app(self, node: Node, definition: Definition, seed: bytes) -> LocalApp:
        """Make an app for one life of ``node``."""
        effects = StubEffectRunner(node.effects, lambda: self.now_ns)
        return LocalApp(definition, seed, self.now_ns, effects, fails_alone=self.fail_alone, outsiders=OUTSIDERS)

    def _settle(self) -> None:
        """Run until no instance has anything to do at this moment. Raises errors that ended an app or a coordinator."""
        steps_left = STEPS_MAX
        at_rest = False
        while not at_rest:
            moved, at_rest = self._pass(steps_left) if self._random is None else self._random_step(self._random)
            steps_left -= moved
            if steps_left <= 0:
                raise LivelockError(
                    f"after {STEPS_MAX:,} steps there is still something to do at one moment of the clock: do "
                    f"handlers call each other for ever? (A pause, such as await immortal.sleep(...), ends it.)"
                )

    def _pass(self, steps_max: int) -> tuple[int, bool]:
        """Run each instance in turn until it has nothing to do; return (number of steps, True if all are at rest)."""
        steps = 0
        for node in list(self.nodes.values()):
            while steps < steps_max and node.step():
                steps += 1
        own_steps = steps
        while steps < steps_max and self.network.step():
            steps += 1
        return steps, steps == own_steps  # they reach each other only over the network

    def _random_step(self, rng: random.Random) -> tuple[int, bool]:
        steps = [node.step for node in self.nodes.values()] + [self.network.step] * len(self.nodes)
        rng.shuffle(steps)
        moved = any(step() for step in steps)
        return moved, not moved

    def next_due_ns(self) -> int | None:
        """Return the time of the next timer of all instances; None: there is none."""
        due = [node.next_due_ns for node in self.nodes.values()]
        return min((one for one in due if one is not None), default=None)

    def _advance_to(self, time_ns: int) -> None:
        self._settle()
        while (due_ns := self.next_due_ns()) is not None and due_ns <= time_ns:
            self._skip_to(due_ns)
        self._skip_to(time_ns)

    def _skip_to(self, time_ns: int) -> None:
        self.now_ns = max(self.now_ns, time_ns)
        self._settle()

    # --- for the test ------------------------------------------------------------------------------------------------
    # __tracebackhide__: pytest shows a failure in the test and in the handler, not here.

    def run(self) -> None:
        """Run until all are at rest. Raises the errors that ended an app or a coordinator, the user's own if any."""
        __tracebackhide__ = True
        self.do(self._settle)

    def advance_to(self, time_ns: int) -> None:
        """Advance the clock, from timer to timer. Raises as :meth:`run`."""
        __tracebackhide__ = True
        self.do(lambda: self._advance_to(time_ns))

    def skip_to(self, time_ns: int) -> None:
        """Let the clock jump: what is due meanwhile fires late. Raises as :meth:`run`."""
        __tracebackhide__ = True
        self.run()
        self.do(lambda: self._skip_to(time_ns))

    def do(self, action: Callable[[], None]) -> None:
        """Run ``action``; raise the user's own exception if there is one. Raises as :meth:`run`."""
        __tracebackhide__ = True
        self.require_open()
        try:
            with mark_interrupts():
                action()
            return
        except ImmortalError as error:
            failure = error
        raise_user_error(failure)

    def require_open(self) -> None:
        """Check that the environment is not closed. Raises UsageError."""
        if self.is_closed:
            raise UsageError("this environment is closed: what is to be looked at is asked before close()")

    def wait_for(self, call: str, is_done: Callable[[], bool], patience: timedelta) -> None:
        """Advance the clock, from timer to timer, until ``is_done``. Raises NoAnswerError, and as :meth:`run`."""
        __tracebackhide__ = True
        self.run()
        latest_ns = self.now_ns + patience // timedelta(microseconds=1) * 1000
        while not is_done():
            due_ns = self.next_due_ns()
            if due_ns is None:
                raise NoAnswerError(f"{call} has no answer, and nothing more happens by itself{self._waiting_text()}")
            if due_ns > latest_ns:
                next_text = datetime_of(due_ns).isoformat()
                raise NoAnswerError(
                    f"{call} has no answer within {patience} (the next timer is due at {next_text})"
                    f"{self._waiting_text()}"
                )
            self.do(partial(self._skip_to, due_ns))

    def _waiting_text(self) -> str:
        lines = [f"{name}: {message}" for name, message in self.reports[-REPORTS_SHOWN:]]
        for node in self.nodes.values():
            app = node.local_app
            if not node.is_up:
                lines.append(f"{node.name!r} is down")
            elif node.app is None:
                lines.append(f"the app of {node.name!r} is down")
            elif app is not None and app.dispatcher.tasks.count:
                lines.append(f"{node.name!r} has {app.dispatcher.tasks.count} async handlers that wait")
                retried = app.dispatcher.tasks.effects.retried
                lines += [f"the effect {one.name} is tried again: {one.failure}" for one in retried]
            if node.definition is not None:
                absent = {peer.name for peer in node.definition.peers.values()} - self.nodes.keys()
                lines += [f"{node.name!r} has a peer {name!r}, which was not started" for name in sorted(absent)]
        return "".join(f"\n  {line}" for line in lines)


# Messages in flight between the instances of an environment: sent in order, at least once, until they are answered.


@dataclass(slots=True, eq=False)
class _Message:
    """Message that is sent again to each new process of the receiver, until it is answered."""

    sender: Node
    effect: ef.SendToPeer
    delivered: tuple[Node, int] | None = None  # (receiver, number of its life) that has it
    answer: PeerFrame | None = None


class Network:
    """Network that loses nothing and keeps the order. Messages between partitioned instances wait."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self._nodes = nodes
        self._messages: list[_Message] = []
        self.parted: set[frozenset[str]] = set()

    def send(self, sender: Node, effect: ef.SendToPeer) -> None:
        self._messages.append(_Message(sender, effect))

    def reply(self, receiver: Node, effect: ef.ReplyToPeer) -> None:
        message = effect.token
        if isinstance(message, _Message) and message.delivered == (receiver, receiver.life):
            message.answer = effect.frame

    def forget_sender(self, sender: Node, destination: str | None = None) -> None:
        self._messages = [
            message
            for message in self._messages
            if message.sender is not sender or destination not in (None, message.effect.destination)
        ]

    def step(self) -> bool:
        """Deliver the first message that can be delivered; return False if there is none."""
        for message in self._messages:
            effect = message.effect
            receiver = self._nodes.get(effect.destination)
            if self.parted and frozenset((message.sender.name, effect.destination)) in self.parted:
                continue
            if message.answer is not None:
                self._messages.remove(message)
                message.sender.handle(ev.PeerReplied(effect.destination, effect.tag, message.answer))
                return True
            if receiver is None or not receiver.is_up or message.delivered == (receiver, receiver.life):
                continue
            message.delivered = (receiver, receiver.life)
            receiver.handle(ev.PeerFrameReceived(message, effect.frame))
            return True
        return False


# Failures of an app, as the test should see them.


def raise_user_error(failure: ImmortalError) -> NoReturn:
    """Raise the user's own exception that caused ``failure``, with its own traceback; without one, ``failure``."""
    __tracebackhide__ = True
    error = failure.__cause__
    if not isinstance(failure, AppError) or error is None:
        raise failure if isinstance(failure, InvariantError) else failure.with_traceback(None)
    said = str(failure).split("\n")
    for line in [*getattr(failure, "__notes__", ()), *said[: 2 if said[1:2] and "arguments:" in said[1] else 1]]:
        error.add_note(line.strip())
    raise error.with_traceback(_users_own(error.__traceback__))


def _users_own(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame on that is not the SDK's."""
    found = trace
    while found is not None and is_sdk_file(found.tb_frame.f_code.co_filename):
        found = found.tb_next
    return found or trace
