"""Node of a test environment: an instance in memory, with its effect stubs, its crash plan, and the test as its caller.

The test itself is an instance that never crashes. Its calls are impulses to other instances, so they are in its log
before they leave, and arrive once and in order whatever crashes; the answers come back through its log.

Effect stubs are functions of the test that replace effects. A node has machine, log and app of one instance in memory;
the plan crashes it between two steps.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import heapq
import inspect
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import msgspec

from immortal.appsdk.calls.context import SEED_SIZE_BYTES
from immortal.appsdk.calls.outbox import encode_call, make_writer
from immortal.appsdk.calls.user_code import ControlFlowSignal, is_user_failure
from immortal.appsdk.effects.effect import EffectRequest, current_context, encodable
from immortal.appsdk.errors import UsageError
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.running.local_app import LocalApp
from immortal.appsdk.waiting.impulses import earlier
from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.components import Components
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.machine import Machine
from immortal.coordinator.driver.ports import PlainApp, PlainHost, PlainLog, PlainPeers
from immortal.coordinator.driver.turn import Driver
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.protocol import decoding
from immortal.protocol.batch import decode_batch
from immortal.protocol.errors import ImmortalError
from immortal.protocol.extensions import (
    ALL_EXTENSIONS,
    AppDescription,
    Hello,
    encode_app_batch,
    encode_app_description,
    encode_hello,
)
from immortal.protocol.messages import (
    MessageType,
    RpcKind,
    RpcType,
    decode_incoming_rpc,
    decode_messages,
    encode_attach_to,
    encode_checkpoint,
    encode_message,
)
from immortal.protocol.readers import Record, RecordReader

EffectStubs = Mapping[Callable[..., Any], Callable[..., Any]]
"""Functions to run, with the same arguments, by the function that ``immortal.effect`` gets."""


class StubEffectRunner:
    """EffectRunner without a thread: :meth:`run` makes the attempts that are due, by the test's clock.

    ``stand_ins``: of one life of an app; the next life asks again for effects that were not answered.
    """

    def __init__(self, stand_ins: EffectStubs, now_ns: Callable[[], int]) -> None:
        self._stand_ins = stand_ins
        self._now_ns = now_ns
        self._due: list[tuple[int, int, EffectRequest, int]] = []  # a heap of (when, number, request, attempt)
        self._numbers = itertools.count()

    def start(self, request: EffectRequest) -> None:
        self._plan(request, self._now_ns(), 1)

    def cancel(self, request: EffectRequest) -> None:
        """Do nothing: the attempt is dropped when it is due."""

    def _plan(self, request: EffectRequest, time_ns: int, attempt: int) -> None:
        heapq.heappush(self._due, (time_ns, next(self._numbers), request, attempt))

    @property
    def next_due_ns(self) -> int | None:
        while self._due and self._due[0][2].is_cancelled:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def run(self) -> None:
        """Make each attempt that is due.

        Raises UsageError if there is no stub for an effect, TypeError for a result that does not fit the function.
        """
        while (due_ns := self.next_due_ns) is not None and due_ns <= self._now_ns():
            _, _, request, attempt = heapq.heappop(self._due)
            stand_in = self._stand_ins.get(request.function)
            if stand_in is None:
                positional, named = request.arguments
                given = ", ".join([*map(repr, positional), *(f"{name}={value!r}" for name, value in named.items())])
                raise UsageError(
                    f"a handler asks for the effect {request.name}({given}), and the test does not say what is to run "
                    f"in its place: env.start(..., effects={{{request.function.__name__}: ...}})"
                )
            request.attempt = attempt
            try:
                value = self._call(stand_in, request, attempt)
            except BaseException as error:
                if not is_user_failure(error):
                    raise
                wait_s = request.wait_s(error, attempt, self._now_ns())
                if wait_s is None:
                    request.raised(error, attempt)
                else:
                    request.failure = f"{type(error).__name__}: {encodable(error)}"
                    self._plan(request, due_ns + int(wait_s * 1e9), attempt + 1)
            else:
                request.returned(value)

    @staticmethod
    def _call(stand_in: Callable[..., Any], request: EffectRequest, attempt: int) -> Any:
        def call() -> Any:
            current_context.set(partial(request.context, attempt))
            positional, named = request.arguments
            value = stand_in(*positional, **named)
            return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value

        return request.new_context().run(call)


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


OUTSIDE_NAME = "test"
"""Name of the test as an instance: the caller that handlers see."""

OUTSIDERS = frozenset({OUTSIDE_NAME})

_take_answer = decoding.Decoder(list[msgspec.Raw]).decode


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a call. ``value``: encoded: the result, or with ``raised`` an error for :func:`decode_raised`."""

    raised: bool
    value: bytes


class OutsideApp:
    """App of the test, which speaks the protocol by hand. ``answers``: received ones, by the number of the call."""

    def __init__(self) -> None:
        self.error: ImmortalError | None = None
        self.has_left = False
        self.has_died = False
        self.is_primary = False
        self.next_due_ns: int | None = None
        self.answers: dict[int, Answer] = {}
        self.output = bytearray(encode_hello(Hello(ALL_EXTENSIONS, OUTSIDE_NAME)))
        self.output += encode_app_description(AppDescription(1))
        self._reader = RecordReader()
        self._attached: set[str] = set()
        self._call_count = 0

    def call(self, destination: str, handler: Handler[Any, Any], arguments: tuple[Any, ...]) -> int:
        """Send a call that waits for its answer, and return its number. Raises TypeError if it can't be encoded."""
        self._call_count += 1
        self._send(destination, handler, RpcType.ASYNC, (OUTSIDE_NAME, self._call_count, *arguments))
        return self._call_count

    def send(self, destination: str, handler: Handler[Any, Any], arguments: tuple[Any, ...]) -> None:
        """Send an impulse. Raises TypeError if it can't be encoded."""
        self._send(destination, handler, RpcType.IMPULSE, arguments)

    def _send(
        self, destination: str, handler: Handler[Any, Any], rpc_type: RpcType, arguments: tuple[Any, ...]
    ) -> None:
        write = make_writer(handler.function.__qualname__, handler.method_id, rpc_type)
        message = encode_call(write, arguments)
        if destination not in self._attached:
            self._attached.add(destination)
            self.output += encode_attach_to(destination)
        self.output += encode_app_batch(MessageType.IMPULSE_BATCH, destination, 1, message)

    def receive(self, data: bytes | memoryview) -> None:
        self._reader.receive_data(bytes(data))
        while (event := self._reader.next_event()) is not None:
            if isinstance(event, Record):
                self._record(event.content)

    def _record(self, content: bytes) -> None:
        for message_type, start, end in decode_messages(content):
            if message_type == MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT:
                self.output += encode_message(MessageType.INITIAL_MESSAGE, b"") + encode_checkpoint(1) + b"\0"
            elif message_type == MessageType.RPC:
                self._answer(content, start, end)
            elif message_type == MessageType.RPC_BATCH:
                _, skipped = decode_batch(content[start:end])
                batch = content[start + skipped : end]
                for _, first, last in decode_messages(batch):
                    self._answer(batch, first, last)
            elif message_type == MessageType.INITIAL_MESSAGE:
                self.is_primary = True

    def _answer(self, content: bytes, start: int, end: int) -> None:
        rpc = decode_incoming_rpc(content, start, end)
        if rpc.kind == RpcKind.CALL:
            return  # no instance knows the test
        number, *rest = _take_answer(rpc.arguments)
        raised = rpc.kind == RpcKind.RAISED
        value = msgspec.msgpack.encode(rest if raised else (rest[0] if rest else None))
        self.answers[decoding.decode(number, type=int)] = Answer(raised, value)

    def take_output(self) -> None:
        """Do nothing: ``output`` has no queue."""

    def tell_time(self, time_ns: int) -> None:
        """Do nothing: this app has no timer."""

    def close(self) -> None:
        """Do nothing: no caller waits here."""


LIMITS = Limits(hold_off_ns_min=0)  # a test's clock stands still: a delay would never end


class PeerNetwork(Protocol):
    """Network as a node sees it; :class:`immortal.appsdk.testing.world.Network` implements it."""

    def send(self, sender: Node, effect: ef.SendToPeer) -> None: ...
    def reply(self, receiver: Node, effect: ef.ReplyToPeer) -> None: ...
    def forget_sender(self, sender: Node, destination: str | None = None) -> None: ...


class SharedWorld(Protocol):
    """World as a node sees it; :class:`immortal.appsdk.testing.world.World` implements it."""

    now_ns: int
    fail_alone: bool
    seed: int
    crashes: CrashPlan
    reports: list[tuple[str, str]]
    variables: contextvars.Context

    @property
    def network(self) -> PeerNetwork: ...


class Node:
    """One instance: driver, log in memory, and app. ``definition`` None: the test itself, which never crashes."""

    def __init__(self, world: SharedWorld, name: str, definition: Definition | None, committer_id: int) -> None:
        self.world = world
        self.name = name
        self.definition = definition
        self.effects: EffectStubs = {}
        self.store = MemoryLogStore(committer_id)
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
        machine = Machine(Components(self.name, LIMITS, self.upgrade_to))
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
            self.app = OutsideApp()
        else:
            seed = hashlib.blake2b(f"{self.world.seed} {self.name}".encode(), digest_size=SEED_SIZE_BYTES).digest()
            effects = StubEffectRunner(self.effects, lambda: self.world.now_ns)
            self.app = self.world.variables.copy().run(
                LocalApp,
                self.definition,
                seed,
                self.world.now_ns,
                effects,
                fails_alone=self.world.fail_alone,
                outsiders=OUTSIDERS,
            )
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
        """Run ``action``, as every step of this instance: a crash within it restarts the instance at once."""
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

    def handle(self, event: ev.Event) -> None:
        self.do(lambda: self._handle(event))

    def _handle(self, *events: ev.Event) -> None:
        if self._driver is not None:
            self._driver.inbox += events
            self._driver.turn()

    def step(self) -> bool:
        """Take the next step of this instance; return False if it has nothing to do."""
        if self._to_app:
            self.do(self._app_reads)
        elif self._log is not None and self._log.jobs:
            self.do(self._disk)
        elif self.closing and self.app is not None:
            self.do(self._app_leaves)
        elif not self._app_tells():
            return False
        return True

    @property
    def next_due_ns(self) -> int | None:
        app_due_ns = None if self.app is None else self.app.next_due_ns
        return earlier(self.wake_ns, app_due_ns)

    def _app_reads(self) -> None:
        data = b"".join(self._to_app)
        self._to_app.clear()
        app = self.app
        if app is None:
            return
        app.receive(data)
        self.world.crashes.point(self)
        self._handle(ev.AppSent(len(data)), *self._said())
        if app.has_died and self.app is app:
            self.lose_app()
            return
        if app.error is not None and self.app is app:
            self.failure = app.error
            self._drop_app()
            self._handle(ev.AppClosed())
            app.error.add_note(f"in the instance {self.name!r}")
            raise app.error

    def _app_tells(self) -> bool:
        """Deliver what the app sends unasked: calls from outside the handlers, and the time."""
        app, now_ns = self.app, self.world.now_ns
        if self.wake_ns is not None and self.wake_ns <= now_ns:
            self.wake_ns = None
            self.handle(ev.Tick())
            return True
        if app is None:
            return False
        if (due_ns := app.next_due_ns) is not None and due_ns <= now_ns:
            app.tell_time(now_ns)
        app.take_output()
        if not app.output or self.paused:
            return False
        self.do(self._say)
        return True

    def _say(self) -> None:
        self._handle(*self._said())

    def _said(self) -> list[ev.Event]:
        """Take the app's output that can be delivered now, as events."""
        if self.app is None or not self.app.output or self.paused or self.closing:
            return []
        data = bytes(self.app.output)
        self.app.output.clear()
        return [ev.AppData(data)]

    def _app_leaves(self) -> None:
        self._drop_app()
        self.closing = False
        self._handle(ev.AppClosed())

    def _disk(self) -> None:
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


class _App(PlainApp):
    def __init__(self, node: Node) -> None:
        self._node = node

    def send(self, effect: ef.SendToApp) -> None:
        self._node.to_app(effect.data)

    def close_app(self, effect: ef.CloseApp) -> None:
        self._node.closing = True

    def pause(self, effect: ef.PauseApp) -> None:
        self._node.paused = True

    def resume(self, effect: ef.ResumeApp) -> None:
        self._node.paused = False


class _Peers(PlainPeers):
    def __init__(self, node: Node) -> None:
        self._node = node

    def send(self, effect: ef.SendToPeer) -> None:
        self._node.world.network.send(self._node, effect)

    def reset(self, effect: ef.ResetPeer) -> None:
        self._node.world.network.forget_sender(self._node, effect.destination)

    def reply(self, effect: ef.ReplyToPeer) -> None:
        self._node.world.network.reply(self._node, effect)


class _Clock:
    def __init__(self, node: Node) -> None:
        self._node = node

    def now_ns(self) -> int:
        return self._node.world.now_ns

    def take_events(self) -> Sequence[ev.Event]:
        return ()

    def wake_at(self, effect: ef.WakeAt) -> None:
        self._node.wake_ns = effect.time_ns


class _Host(PlainHost):
    def __init__(self, node: Node) -> None:
        self._node = node

    def upgrade_ended(self, effect: ef.UpgradeEnded) -> None:
        self._node.upgrade_to = None

    def report(self, effect: ef.Report) -> None:
        notice = effect.notice
        if notice.level in ("warning", "error"):
            self._node.world.reports.append((self._node.name, notice.text))

    def stop(self, effect: ef.Stop) -> None:
        self._node.stopped(effect.error)


# Crashes at every point of a test: the same test repeated, each time with a crash one point later.


Victim = Literal["instance", "app"]
"""Kind of crash: app and coordinator together, with all that is not durable, or only the app."""


class SimulatedCrash(ControlFlowSignal):
    """Crash of a process between two of its steps. It is no Exception, since nothing on the way must catch it."""


class Crashable(Protocol):
    """Instance as a crash plan sees it. ``definition`` None: it never crashes; ``app`` None: its app is gone."""

    name: str

    @property
    def definition(self) -> object | None: ...
    @property
    def app(self) -> object | None: ...
    def lose_app(self) -> None: ...


class CrashPlan:
    """Plan that counts the points at which an instance could crash, and crashes it at ``point`` (from 1; 0: never)."""

    def __init__(self, point: int = 0, victim: Victim = "instance") -> None:
        self.count = 0
        self.happened = ""  # which instance has crashed, and where
        self._point = point
        self._victim = victim

    def point(self, node: Crashable) -> None:
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
