"""What the ``async def`` handlers of an instance share: what they wait for, by number; what their ``self`` finds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from immortal.appsdk.calls.codec import ArgumentCodec
from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.rules import Rules
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.handlers.definition import Definition, Peer
from immortal.appsdk.handlers.proxy import make_fork
from immortal.appsdk.handlers.queries import Queries
from immortal.appsdk.waiting.answers import Answers
from immortal.appsdk.waiting.clock import Clock
from immortal.appsdk.waiting.effects import Effect, WaitingEffects
from immortal.appsdk.waiting.events import Events
from immortal.appsdk.waiting.handler_runs import HandlerRuns
from immortal.appsdk.waiting.operations import Call, Event, MulticastCall, Operation, Step, Target, Timer
from immortal.appsdk.waiting.signals import event_decoder
from immortal.appsdk.waiting.waits import Fiber


class Host:
    """What a task asks of the instance that it is of. ``definition`` and ``instance`` are of the class that runs."""

    definition: Definition

    def __init__(self, context: Context) -> None:
        self.context = context
        self.instance: Any = None
        self.running: Any = None  # the task whose coroutines run now
        self.ready: deque[Fiber[Any]] = deque()
        self.calls: dict[int, Call] = {}
        self.clock = Clock()
        self.effects = WaitingEffects(context)
        self.queries = Queries(context)
        self.starts_first = False  # it is the instance's first start, and no replay
        self.handler_runs = HandlerRuns(context, self.queries)
        self.answers = Answers(context)
        self.events = Events(self.later, self._signalled)
        self._queue: deque[Callable[[], None]] = deque()
        self.one_by_one = False  # who is woken goes on by let_one_go_on, once it is said that it does
        self._next_number = 1
        self._forks: dict[tuple[str, int], Callable[..., None]] = {}
        self.members: dict[str, Target | Peer] = {}  # what handlers have found of their class, by name
        self.peer_targets: dict[tuple[Peer, str], Target] = {}
        self._event_decoders: dict[Any, Callable[[bytes], Any]] = {}

    def make_self(self, task: Any) -> Any:
        """The ``self`` of the handler that ``task`` runs."""
        raise NotImplementedError

    def began(self, task: Any) -> None:
        """It goes on from its beginning, with other arguments."""
        raise NotImplementedError

    def copied(self) -> None:
        """A copy of the state was taken: no rewind begins before it."""

    def rewinds(self) -> None:
        """What was handled since the copy is handled once more."""

    def resolve(self, operation: Any, raised: bool, value: bytes) -> None:
        """What ``operation`` waited for is there. Raises HandlerError."""
        raise NotImplementedError

    def _signalled(self, event: Event, value: bytes) -> None:
        self.resolve(event, False, value)

    # --- who goes on ------------------------------------------------------------------------------------------------

    def later(self, action: Callable[[], None]) -> None:
        """Once whoever runs now has come to a stop."""
        self._queue.append(action)

    def drain(self) -> None:
        """Let all go on that was woken. Raises HandlerError."""
        queue = self._queue
        while queue and not self.one_by_one:
            queue.popleft()()

    # --- what is waited for -----------------------------------------------------------------------------------------

    def draw_number(self, operation: Operation | None = None) -> int:
        """The next one, for ``operation`` or (None) for a handler that starts."""
        number = self._next_number
        self._next_number = number + 1
        return number

    def perform(self, operation: Operation) -> tuple[bool, bytes] | None:
        """Do it, not at a rebuild: (whether it raised, what came encoded), or None when that comes later.

        Raises HandlerError, UsageError.
        """
        if type(operation) is Call:
            self.answers.send_call(operation, operation.arguments)
        elif isinstance(operation, MulticastCall):
            operation.sent = operation.arguments
            self.answers.send_multicast(operation.all_of_it)
        elif isinstance(operation, Step):
            # Copies go in and come out, as at a rebuild: what the state holds is not to be in anybody else's hands.
            target = operation.target
            arguments = target.codec.decode(operation.encoded)
            return self.handler_runs.run_step(operation.task.number, operation.step, target.called, arguments)
        elif isinstance(operation, Event):
            self.events.offer(operation.name)
        return None

    def register(self, operation: Operation) -> None:
        """What comes for its number is to find it."""
        if isinstance(operation, Call):
            self.calls[operation.number] = operation
        elif isinstance(operation, Timer):
            self.clock.add(operation)
        elif isinstance(operation, Event):
            self.events.add(operation)
        elif isinstance(operation, Effect):
            if not operation.task.is_silent:
                self.context.multicasts.hold_effect(operation.number)
            self.effects.add(operation)

    def unregister(self, operation: Operation) -> None:
        """Nothing is to find it any more."""
        if isinstance(operation, Call):
            self.calls.pop(operation.number, None)
        elif isinstance(operation, Timer):
            self.clock.forget(operation.number)
        elif isinstance(operation, Event):
            self.events.remove(operation)
        elif isinstance(operation, Effect):
            self.effects.remove(operation)

    # --- what a handler's self finds --------------------------------------------------------------------------------

    def codec(self, handler: Handler[Any, Any]) -> ArgumentCodec:
        return self.definition.codec(handler)

    @property
    def signals_have_limit(self) -> bool:
        return self.context.sites.rules is not Rules.FIRST

    def target(self, destination: str, handler: Handler[Any, Any], called: Handler[Any, Any]) -> Target:
        return Target(destination, handler, called, self.codec(called))

    def event_decoder(self, kind: Any) -> Callable[[bytes], Any]:
        try:
            if (decode := self._event_decoders.get(kind)) is None:
                decode = self._event_decoders[kind] = event_decoder(kind)
        except TypeError:  # an annotation that can't be a key
            decode = event_decoder(kind)
        return decode

    def fork(self, destination: str, handler: Handler[Any, Any]) -> Callable[..., None]:
        key = (destination, handler.method_id)
        if (fork := self._forks.get(key)) is None:
            fork = self._forks[key] = make_fork(self.context, destination, handler)
        return fork
