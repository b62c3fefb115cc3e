"""Parts that all ``async def`` handlers share: pending operations, answers, runs of ``def`` handlers, limits."""

from __future__ import annotations

from asyncio import events
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import msgspec

from immortal.appsdk.calls.codec import ArgumentCodec, encode_value
from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.failures import answer_of, encode_failed, failure_of, reference, verdict_on
from immortal.appsdk.calls.outbox import Send, encode_call, make_writer
from immortal.appsdk.calls.user_code import context_of_owner, describe_arguments, handler_failed, is_user_failure
from immortal.appsdk.errors import HandlerError, StateError, UsageError
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.handlers.definition import Definition, Peer, Peers
from immortal.appsdk.handlers.keys import KeyContext
from immortal.appsdk.handlers.multicast import shared_method_id
from immortal.appsdk.handlers.proxy import make_fork
from immortal.appsdk.handlers.queries import Queries
from immortal.appsdk.state.journal import SavedTask, declared_name, encode_raised
from immortal.appsdk.state.table import Table
from immortal.appsdk.waiting.impulses import Clock, Effect, Events, WaitingEffects
from immortal.appsdk.waiting.loop import Ready
from immortal.appsdk.waiting.operations import (
    NOTHING,
    Call,
    Event,
    LocalFunction,
    LocalStep,
    MulticastCall,
    Operation,
    Read,
    Step,
    Target,
    Timer,
    event_decoder,
)
from immortal.protocol import decoding
from immortal.protocol.client_frames import CLIENTS, Caller
from immortal.protocol.messages import RpcKind, RpcType
from immortal.protocol.verdicts import MessageKey, Verdict


class Host:
    """Interface of an instance to its tasks. ``definition`` and ``instance``: of the class that runs."""

    definition: Definition

    def __init__(self, context: Context) -> None:
        self.context = context
        self.instance: Any = None
        self.running: Any = None  # the task whose coroutines run now
        self.executions: Any = None  # an immortal.appsdk.running.executions.ExecutionWriter, or None: no list
        self.open_labels: dict[str, str] | None = None  # of the listed 'def' handler that runs
        self.ready = Ready()  # of all handlers (one runs at a time): it is large
        self.calls: dict[int, Call] = {}
        self.clock = Clock()
        self.effects = WaitingEffects(context)
        self.queries = Queries(context)
        self.has_tables = False  # the class that runs has
        self.is_first_start = False  # it is the instance's first start, not a replay
        self.handler_runs = HandlerRuns(context, self.queries)
        self.answers = Answers(context)
        self.events = Events(self.defer, self._signalled)
        self._queue: deque[Callable[[], None]] = deque()
        self.one_by_one = False  # woken handlers run by run_next_woken, after an announcement
        self._next_number = 1
        self._forks: dict[tuple[str, int], Callable[..., None]] = {}
        self.members: dict[str, Target | Peer | Peers] = {}  # members of the class that handlers have used, by name
        self.peer_targets: dict[tuple[Peer, str], Target] = {}
        self._event_decoders: dict[Any, Callable[[bytes], Any]] = {}

    def make_self(self, task: Any) -> Any:
        """Return the ``self`` for the handler that ``task`` runs."""
        raise NotImplementedError

    def note_start(self, task: Any) -> None:
        """Note that a task starts from its beginning, possibly again with other arguments."""
        raise NotImplementedError

    def note_copy(self) -> None:
        """Note that a copy of the state was taken: no rewind begins before it."""

    def note_rewind(self) -> None:
        """Note that messages since the copy are handled again."""

    def resolve(self, operation: Any, raised: bool, value: bytes) -> None:
        """Complete ``operation`` with its result. Raises HandlerError."""
        raise NotImplementedError

    def _signalled(self, event: Event, value: bytes) -> None:
        self.resolve(event, False, value)

    # --- order of handlers ------------------------------------------------------------------------------------------

    def defer(self, action: Callable[[], None]) -> None:
        """Call ``action`` after the code that runs now has come to a stop."""
        self._queue.append(action)

    def drain(self) -> None:
        """Let all woken handlers run. Raises HandlerError."""
        queue = self._queue
        while queue and not self.one_by_one:
            queue.popleft()()

    # --- operations -------------------------------------------------------------------------------------------------

    def draw_number(self, operation: Operation | None = None) -> int:
        """Return the next number, for ``operation`` or, if None, for a handler that starts."""
        number = self._next_number
        self._next_number = number + 1
        return number

    def perform(self, operation: Operation) -> tuple[bool, bytes] | None:
        """Perform an operation (not in a rebuild); return (True if it raised, result), or None if that comes later.

        Raises HandlerError, UsageError.
        """
        if type(operation) is Call:
            self.answers.send_call(operation, operation.arguments)
        elif isinstance(operation, MulticastCall):
            operation.sent = operation.arguments
            self.answers.send_multicast(operation.multicast)
        elif isinstance(operation, Step):
            # Copies go in and come out, as in a rebuild: nobody else must hold objects of the state.
            target = operation.target
            arguments = target.codec.decode(operation.encoded)
            return self._run_step(operation, target.called, arguments)
        elif isinstance(operation, LocalStep):
            operation.task.runs_local_step = True
            try:
                return self._run_step(operation, operation.local, operation.arguments)
            finally:
                operation.task.runs_local_step = False
        elif isinstance(operation, Read):
            app, is_keyed = self.instance, self.definition.objects is not None
            with KeyContext(app, operation.task.key, is_kept=False) if is_keyed else nullcontext(app) as subject:
                return False, operation.encoded(getattr(subject, operation.name))
        elif isinstance(operation, Event):
            self.events.offer(operation.name)
        return None

    def _run_step(self, operation: Operation, handler: AnyHandler, arguments: tuple[Any, ...]) -> tuple[bool, bytes]:
        loop, self.ready.loop = self.ready.loop, None
        events._set_running_loop(None)  # a 'def' handler has none elsewhere, and a rebuild does not run it
        try:
            return self.handler_runs.run_step(operation.task.number, operation.step, handler, arguments)
        finally:
            self.ready.enter(loop)

    def register(self, operation: Operation) -> None:
        """Register an operation, so that the result with its number finds it."""
        if isinstance(operation, Call):
            self.calls[operation.number] = operation
            if self.executions is not None and not operation.task.is_silent:
                to = operation.to if isinstance(operation, MulticastCall) else operation.target.destination
                self.executions.note_call(operation.task.number, operation.step, operation.number, to)
        elif isinstance(operation, Timer):
            self.clock.add(operation)
        elif isinstance(operation, Event):
            self.events.add(operation)
        elif isinstance(operation, Effect):
            if not operation.task.is_silent:
                self.context.multicasts.hold_effect(operation.number)
            self.effects.add(operation)

    def unregister(self, operation: Operation) -> None:
        """Unregister an operation, so that no result finds it any more."""
        if isinstance(operation, Call):
            self.calls.pop(operation.number, None)
        elif isinstance(operation, Timer):
            self.clock.forget(operation.number)
        elif isinstance(operation, Event):
            self.events.remove(operation)
        elif isinstance(operation, Effect):
            self.effects.remove(operation)

    # --- for a handler's self ---------------------------------------------------------------------------------------

    def codec(self, handler: Handler[Any, Any]) -> ArgumentCodec:
        return self.definition.codec(handler)

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


# Calls of waiting handlers, and answers to waiting callers.
#
# A call that waits for an answer has the RPC type ASYNC, and the arguments [caller's name ("" is oneself), number of
# the call, arguments ...]. The answer goes to the caller with the same method ID: RETURNED_VALUE [number, value],
# RETURNED_NOTHING [number] or RAISED [number, name of the exception, its arguments, its attributes].


_RETURNED_VALUE, _RETURNED_NOTHING = RpcKind.RETURNED_VALUE, RpcKind.RETURNED_NOTHING
# ... aliases, which are found faster than an enum's attributes


class Answers:
    """Sends the calls of one instance's async handlers, and the answers to its callers."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._senders: dict[tuple[str, int, RpcKind], Send] = {}

    def send_call(self, call: Call, arguments: tuple[Any, ...]) -> None:
        """Send a call whose answer is awaited. Raises UsageError."""
        target = call.target
        caller = self._context.instance_name if target.destination else ""
        if target.destination and not caller:
            raise UsageError(
                f"{call}: the log does not say what this instance is called, so the answer could not come back: a log "
                f"that an older version of the coordinator has begun; start the instance with a new log"
            )
        if (send := target.send) is None:
            send = target.send = self._sender(target.destination, target.handler, RpcKind.CALL)
        send((caller, call.number, *target.wrapped(arguments)))

    def send_multicast(self, calls: Sequence[MulticastCall]) -> None:
        """Send a multicast once all ``calls`` have begun. Raises UsageError."""
        if any(call.sent is None for call in calls):
            return
        handler, own_name = calls[0].target.handler, self._context.instance_name
        name = handler.function.__qualname__
        messages = []
        for call in calls:
            parameters, method_id = handler.signature.parameters, call.target.method_id
            write = make_writer(name, method_id, RpcType.ASYNC, parameters=parameters, context=self._context)
            front = "" if call.to == own_name else own_name, call.number
            messages.append(encode_call(write, (*front, *call.target.wrapped(call.sent or ()))))
        method_id = shared_method_id(call.target.method_id for call in calls)
        self._context.multicasts.send(name, method_id, [call.to for call in calls], messages, calls[0].scope)

    def _sender(self, destination: str, handler: Handler[Any, Any], kind: RpcKind) -> Send:
        key = (destination, handler.method_id, kind)
        if (send := self._senders.get(key)) is None:
            outbox, name = self._context.outbox, handler.function.__qualname__
            parameters = ("$caller", "$call", *handler.signature.parameters) if kind == RpcKind.CALL else ()
            made: Send = outbox.make_sender(destination, name, handler.method_id, kind, parameters)
            send = self._senders[key] = made
        return send

    def pass_on(self, destination: str, method_id: int, kind: RpcType, arguments: tuple[Any, ...]) -> None:
        """Forward a call of the method, which another instance of the same class has too."""
        sender = self._context.outbox.make_sender
        sender(destination, "a forwarded call", method_id, RpcKind.CALL, rpc_type=kind)(arguments)

    def answer(self, handler: Handler[Any, Any], caller: str, number: int, raised: bool, value: bytes) -> None:
        to, front = self.answer_address(caller, number)
        if raised:
            name, arguments, attributes = decoding.decode(value, type=list[msgspec.Raw])
            self._sender(to, handler, RpcKind.RAISED)((*front, name, arguments, attributes))
        elif value == NOTHING:
            self._sender(to, handler, _RETURNED_NOTHING)(front)
        else:
            self._sender(to, handler, _RETURNED_VALUE)((*front, msgspec.Raw(value)))

    def answer_value(self, caller: Caller, value: bool) -> None:
        """Answer a call of one of the SDK's own methods."""
        self._send(caller, _RETURNED_VALUE, value)

    def answer_verdict(self, verdict: Verdict, caller: Caller) -> None:
        """Tell ``caller`` how its call has failed."""
        self._send(caller, RpcKind.RAISED, *answer_of(verdict, self._context.instance_name))

    def _send(self, caller: Caller, kind: RpcKind, *values: Any) -> None:
        to, front = self.answer_address(caller.name, caller.number)
        self._context.outbox.make_sender(to, "the answer to a call", caller.method_id, kind)((*front, *values))

    @staticmethod
    def answer_address(caller: str, number: int) -> tuple[str, tuple[Any, ...]]:
        """Return the destination of an answer and its first arguments: answers to all clients have one destination."""
        return (CLIENTS, (caller, number)) if caller.startswith(CLIENTS) else (caller, (number,))


# Runs of ``def`` handlers whose result is awaited: by callers, or as steps of ``async def`` handlers.


AnyHandler: TypeAlias = Handler[Any, Any] | LocalFunction


class HandlerRuns:
    """Runs handlers. ``definition`` and ``instance``: of the class that runs; ``verdicts``: the known ones.

    ``tell``: reports a new verdict and its error; returns False if the message can't fail alone.
    """

    definition: Definition

    def __init__(self, context: Context, queries: Queries) -> None:
        self.context = context
        self.instance: Any = None
        self.queries = queries
        self.verdicts: Mapping[MessageKey, Verdict] = {}
        self.report_failure: Callable[[Verdict, HandlerError], bool] = lambda verdict, error: False
        self._tables: list[Table[Any, Any]] = []
        self.check: Callable[[], StateError | None] | None = None  # the state, after each handler that can change it

    def use(self, definition: Definition, instance: Any) -> None:
        """Run this class's code from here on."""
        self.definition = definition
        self.instance = instance
        self._tables = definition.state().tables_of(instance)
        self.queries.use(definition.state())

    def run_handler(
        self,
        handler: AnyHandler,
        arguments: tuple[Any, ...],
        *,
        waits: bool = True,
        node: Any = None,
        caller: str | None = None,
    ) -> tuple[bool, bytes]:
        """Run a ``def`` handler, the instance's or of ``node``; return (True if it raised, encoded result).

        ``waits``: a caller or handler waits for the result. ``caller``: for messages. Raises HandlerError."""
        try:
            if handler.is_query:
                value = self.queries.run(handler, self.instance, *arguments)  # type: ignore[arg-type]  # a local function is none
            else:
                value = handler.call(self.instance if node is None else node, *arguments)
        except BaseException as error:
            if not is_user_failure(error):
                raise
            if (declared := declared_name(handler.raises, error)) is None:
                failed = self.failed(handler, arguments, error)
                if failed.failure is not None and failed.failure.policy == "keep":
                    self._require_savable(handler)
                raise failed from error
            self._require_savable(handler)
            self.declared(handler, arguments, caller, error)
            if not waits:
                return True, NOTHING
            return True, self.encoded(handler, arguments, partial(encode_raised, declared, error))
        self._require_savable(handler)
        if not waits:
            return False, NOTHING
        return False, self.encoded(handler, arguments, partial(self.result, handler, value))

    def _require_savable(self, handler: AnyHandler) -> None:
        """Check that the state can be saved after ``handler``. Raises HandlerError."""
        if handler.is_query:
            return
        problem: StateError | None = None
        for table in self._tables:
            problem = problem or table.storage_problem()
        if self.check is not None:
            problem = problem or self.check()
        if problem is not None:
            raise self.unsavable(handler, problem, max(self.context.message_index, 0))

    def unsavable(self, handler: AnyHandler | None, problem: StateError, message_index: int) -> HandlerError:
        """Return the error of a handler (None: unknown) that left an unsavable state: its call is undone."""
        context, definition = self.context, self.definition
        policy = "undo" if handler is None else definition.policy(handler)
        name = "a message" if handler is None else handler.function.__qualname__
        made = HandlerError(
            f"{name} has left a state that can't be saved, at record {context.sequence_id}, message {message_index}; "
            f"the app stops\n  {problem}",
            context.sequence_id,
            message_index,
        )
        if policy != "stop":
            made.failure = failure_of("undo", name, None if handler is None else handler.method_id, problem)
        made.__cause__ = problem
        return made

    def result(self, handler: AnyHandler, value: Any) -> bytes:
        """Encode a result for the caller. It is checked here, so that a misfit is a failure of this handler."""
        codec = handler if isinstance(handler, LocalFunction) else self.definition.codec(handler)
        data = codec.encode_result(value)
        if value is not None or not codec.returns_nothing:
            codec.decode_result(data)
        return data

    def encoded(self, handler: AnyHandler, arguments: tuple[Any, ...], encode: Callable[[], bytes]) -> bytes:
        """Encode what ``handler`` returned or raised. Raises HandlerError if it can't be sent."""
        try:
            return encode()
        except BaseException as error:
            if not is_user_failure(error):
                raise
            name = handler.function.__qualname__
            problem = TypeError(f"what {name} returned or raised can't be sent to whoever waits for it: {error}")
            raise self.failed(handler, arguments, problem) from error

    def failed(
        self, handler: AnyHandler, arguments: tuple[Any, ...], error: BaseException, task: int = 0
    ) -> HandlerError:
        """Return the HandlerError of a handler that raised ``error``. ``task``: number of an async handler."""
        context, definition = self.context, self.definition
        name = handler.function.__qualname__
        index = max(context.message_index, 0)
        made = handler_failed(name, arguments, error, context.sequence_id, index, _names(handler))
        if (policy := definition.policy(handler)) != "stop":
            shares_trace = definition.share_tracebacks
            made.failure = failure_of(policy, name, handler.method_id, error, task, shares_trace=shares_trace)
        made.__cause__ = error
        return made

    def declared(
        self, handler: AnyHandler, arguments: tuple[Any, ...], caller: str | None, error: BaseException
    ) -> None:
        """Report that ``handler`` raised an exception that it declares."""
        if self.context.reporter is not None:
            describe = partial(describe_arguments, arguments, _names(handler), handler.name)
            self.context.reporter.declared(self.context, handler.function.__qualname__, describe, caller, error)

    def run_step(self, task: int, step: int, handler: AnyHandler, arguments: tuple[Any, ...]) -> tuple[bool, bytes]:
        """Run a step of the ``async def`` handler ``task``, like :meth:`run_handler`.

        A step with a verdict is not called again.
        """
        context = self.context
        key = context.sequence_id, context.message_index, task, step
        verdict = self.verdicts.get(key)
        if verdict is None or not verdict.skips:
            try:
                return context_of_owner(context).run(self.run_handler, handler, arguments)
            except HandlerError as error:
                if error.failure is None:
                    raise
                error.failure = failure = replace(error.failure, task=task, step=step)
                verdict = verdict_on(error, failure, None, b"")
                if failure.policy != "keep" or not self.report_failure(verdict, error):
                    raise
        where = reference(context.instance_name, verdict.sequence_id, verdict.message_index)
        return True, encode_failed(verdict.type_name, verdict.text, where)


def _names(handler: AnyHandler) -> Iterable[str]:
    signature = getattr(handler, "signature", None)  # a local function has none, and a node's hook neither
    return () if signature is None else signature.parameters


# Limits on ``async def`` handlers that run at once: of the class, of one handler, of one handler for each key.
#
# A call that can't begin yet waits here for its turn, in the order of the log. It begins when another one ends, which
# the log decides as well.


Group: TypeAlias = tuple[int, bytes]  # a method ID, and the key among its calls
_ALL: Group = (0, b"")


class Limits:
    """Limits on concurrent handlers. ``queued``: calls that wait for their turn, by number, the oldest first."""

    _definition: Definition

    def __init__(self) -> None:
        self.queued: dict[int, SavedTask] = {}
        self._running: Counter[Group] = Counter()
        self._groups_of: dict[int, list[tuple[Group, int]]] = {}

    def use(self, definition: Definition) -> None:
        """Apply this class's limits from here on, without running or queued calls."""
        self._definition = definition
        self._running.clear()
        self._groups_of.clear()
        self.queued.clear()

    def has_room(self, handler: Handler[Any, Any], arguments: bytes) -> bool:
        return all(self._running[group] < limit for group, limit in self._groups(handler, arguments))

    def acquire(self, number: int, handler: Handler[Any, Any], arguments: bytes) -> None:
        groups = self._groups(handler, arguments)
        if groups:
            self._groups_of[number] = groups
            self._running.update(group for group, _ in groups)

    def release(self, number: int) -> None:
        for group, _ in self._groups_of.pop(number, ()):
            self._running[group] -= 1
            if not self._running[group]:
                del self._running[group]

    def pop_next(self) -> SavedTask | None:
        """Remove and return the oldest queued call that can begin now."""
        definition = self._definition
        whole = definition.concurrent_handlers
        if whole is not None and self._running[_ALL] >= whole:
            return None
        for number, saved in self.queued.items():
            if self.has_room(definition.by_method_id[saved.method_id], saved.arguments):
                return self.queued.pop(number)
        return None

    def describe(self, saved: SavedTask) -> str:
        """Return as text what a queued call waits for."""
        handler = self._definition.by_method_id[saved.method_id]
        full = [limit for group, limit in self._groups(handler, saved.arguments) if self._running[group] >= limit]
        return f"its turn: {full[0]} run at once" if full else "its turn"

    def _groups(self, handler: Handler[Any, Any], arguments: bytes) -> list[tuple[Group, int]]:
        definition = self._definition
        groups: list[tuple[Group, int]] = []
        if definition.concurrent_handlers is not None:
            groups.append((_ALL, definition.concurrent_handlers))
        if handler.limit is not None:
            groups.append(((handler.method_id, self._key(definition, handler, arguments)), handler.limit))
        return groups

    @staticmethod
    def _key(definition: Definition, handler: Handler[Any, Any], arguments: bytes) -> bytes:
        if handler.limit_by is None:
            return b""
        names = list(handler.signature.parameters)
        values = definition.codec(handler).decode(arguments)
        at = names.index(handler.limit_by)
        value = values[at] if at < len(values) else handler.signature.parameters[handler.limit_by].default
        return encode_value(value)
