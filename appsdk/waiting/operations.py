"""Operations that a journal records: calls, calls of nodes, steps, timers, events, signals; and the rebuild over it.

Effects are in :mod:`immortal.appsdk.waiting.impulses`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from immortal.appsdk.calls.codec import ArgumentCodec, ValueDecoder, encode_value, encoder, resolve_hints
from immortal.appsdk.errors import UsageError
from immortal.appsdk.handlers.decorators import TIME_NS_MAX, Handler
from immortal.appsdk.handlers.keys import KeyContext
from immortal.appsdk.nodes.node import node_definition
from immortal.appsdk.nodes.nodes import Nodes
from immortal.appsdk.ordering.messages import Scope
from immortal.appsdk.state.journal import (
    TIMER,
    WAYS_OUT,
    Described,
    Entry,
    JournalError,
    Pending,
    SavedTask,
    decode_raised,
    describe_operation,
)
from immortal.appsdk.state.schema import StateSchema
from immortal.appsdk.types.encoding import form_to_send
from immortal.appsdk.types.registry import unsupported_type
from immortal.appsdk.waiting.loop import HandlerLoop, LazyFuture
from immortal.protocol.checksum import crc64
from immortal.protocol.decoding import DecodeError
from immortal.protocol.messages import RpcKind
from immortal.protocol.safe_output import is_encodable
from immortal.protocol.system_methods import NODE_METHOD_ID

NOTHING = encoder.encode(None)
READ_SIZE_BYTES_MAX = 64 << 10  # of an attribute that an async handler reads: its journal keeps a copy


class Owner(HandlerLoop):
    """Run of an ``async def`` handler, as its operations see it: a :class:`immortal.appsdk.waiting.task.Task`.

    ``number``: unique in the life of the instance. ``generation``: how often it has begun again with continue_as.
    """

    __slots__ = ("generation",)

    generation: int
    runs_local_step: bool  # while True, its self is the app itself
    key: Any  # of a keyed class

    @property
    def is_silent(self) -> bool:
        """True if operations must not be carried out: this run repeats earlier ones."""
        raise NotImplementedError

    @property
    def instance_name(self) -> str:
        raise NotImplementedError

    @property
    def described_call(self) -> str:
        """Handler's name and arguments as text, without secrets and without the arguments' own types."""
        raise NotImplementedError

    def begin(self, operation: Operation) -> None:
        """Begin an awaited operation, or take its result from the journal."""
        raise NotImplementedError

    def forget(self, operation: Operation) -> None:
        """Forget an operation that nobody waits for any more."""
        raise NotImplementedError


class Operation(LazyFuture[Any]):
    """Operation of a handler. ``number``: unique in the instance's life; 0: done at once, or in the journal.

    ``step``, ``what`` and ``detail``: see :mod:`appsdk.state.journal`. ``since_ns``: when it began, if it waits.
    """

    __slots__ = ("detail", "number", "since_ns", "step", "what")

    task: Owner
    is_immediate = False  # it waits for nothing

    def __init__(self, task: Owner, what: str, detail: int = 0) -> None:
        LazyFuture.__init__(self, task)  # super() would cost as much again
        self.what = what
        self.detail = detail
        self.step = 0
        self.number = 0
        self.since_ns = 0

    def __str__(self) -> str:
        return self.what

    def _start(self) -> None:
        self.task.begin(self)

    def _drop(self) -> None:
        self.task.forget(self)

    def decode(self, value: bytes) -> Any:
        """Decode a result. Raises msgspec.DecodeError."""
        return None

    def decode_error(self, value: bytes) -> Exception:
        """Decode an error. Raises msgspec.DecodeError, LookupError."""
        return decode_raised({}, self.what, value)

    def outcome(self, raised: bool, value: bytes) -> tuple[Any, Exception | None]:
        """Return (result, None) or (None, the exception). Raises what the decoders raise."""
        return (None, self.decode_error(value)) if raised else (self.decode(value), None)

    def pending(self) -> Pending:
        return Pending(self.step, self.what, self.detail, self.number)

    def fits(self, saved: Described) -> bool:
        return (saved.what, saved.detail) == (self.what, self.detail)


class Target:
    """Awaitable handler of one destination ("" is the own instance): the data that all calls of it share.

    ``handler``: the method that the log calls; ``called``: the one that runs, with ``super()`` an overridden one.
    """

    __slots__ = ("called", "codec", "destination", "handler", "is_call", "is_overridden", "method_id", "send", "what")

    def __init__(
        self, destination: str, handler: Handler[Any, Any], called: Handler[Any, Any], codec: ArgumentCodec
    ) -> None:
        self.destination = destination
        self.handler = handler
        self.method_id = handler.method_id  # of the call in the log
        self.called = called
        self.codec = codec
        self.is_overridden = called is not handler and called.is_async
        self.is_call = bool(destination) or called.is_async  # else a step
        self.what = f"call {destination or 'self'}.{called.name}" if self.is_call else f"step {called.name}"
        self.send: Callable[[tuple[Any, ...]], None] | None = None  # made with the first call

    def wrapped(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments for the method in the log. Raises UsageError."""
        return arguments


class _HandlerOperation(Operation):
    """Operation of a handler with arguments, which are encoded when it begins."""

    __slots__ = ("arguments", "encoded", "target")

    def __init__(self, task: Owner, target: Target, arguments: tuple[Any, ...]) -> None:
        Operation.__init__(self, task, target.what)
        self.target = target
        self.arguments = arguments
        self.encoded = b""

    def _start(self) -> None:
        self.arguments, self.encoded = self.target.codec.encoded(self.arguments)
        self.detail = crc64(self.encoded)
        self.task.begin(self)
        self.arguments, self.encoded = (), b""

    def decode(self, value: bytes) -> Any:
        return self.target.codec.decode_result(value)

    def decode_error(self, value: bytes) -> Exception:
        return decode_raised(self.target.called.raises, self.target.codec.name, value)


class Step(_HandlerOperation):
    """Step: a ``def`` handler of the own class, which runs at once."""

    __slots__ = ()

    is_immediate = True


class LocalFunction:
    """Local function or lambda of `immortal.step`, with the attributes of a ``def`` handler.

    ``key``: the key whose object it may change, in a keyed class."""

    __slots__ = ("_form", "decode_result", "function", "key", "keywords", "name")

    is_query = False
    method_id = None
    on_error = None
    raises: Mapping[str, type[Exception]] = {}
    returns_nothing = False

    def __init__(self, function: Callable[..., Any], keywords: dict[str, Any]) -> None:
        self.key: Any = None
        self.function = function
        self.keywords = keywords
        self.name = getattr(function, "__qualname__", type(function).__qualname__)
        try:
            annotation = resolve_hints(function).get("return", Any)
        except (NameError, TypeError):  # its annotations have local names, or it is no function
            annotation = Any
        self._form = form_to_send(annotation)
        self.decode_result = ValueDecoder(annotation).decode

    def call(self, instance: Any, *arguments: Any) -> Any:
        with nullcontext() if self.key is None else KeyContext(instance, self.key):
            return self.function(*arguments, **self.keywords)

    def encode_result(self, value: Any) -> bytes:
        """Encode a result. Raises what the encoder raises."""
        return encode_value(value) if self._form is None else self._form.encode(value)


class LocalStep(Operation):
    """Step of a local function or lambda, which runs at once and owns the state."""

    __slots__ = ("arguments", "local")

    is_immediate = True

    def __init__(self, task: Owner, local: LocalFunction, arguments: tuple[Any, ...]) -> None:
        super().__init__(task, f"step {local.name}")
        self.local = local
        local.key = task.key
        self.arguments = arguments

    def _start(self) -> None:
        if self.arguments or self.local.keywords:
            self.detail = crc64(encode_value((self.arguments, self.local.keywords)))
        super()._start()

    def decode(self, value: bytes) -> Any:
        return self.local.decode_result(value)

    def decode_error(self, value: bytes) -> Exception:
        return decode_raised({}, self.local.name, value)


class Read(Operation):
    """Read of an attribute of the state by an async handler: it gets a copy, the same in a rebuild."""

    __slots__ = ("name", "schema")

    is_immediate = True

    def __init__(self, task: Owner, schema: StateSchema, name: str) -> None:
        super().__init__(task, f"read self.{name}")
        self.schema = schema
        self.name = name

    def decode(self, value: bytes) -> Any:
        return self.schema.decode_attribute(self.name, value)

    def encoded(self, value: Any) -> bytes:
        """Encode a copy of the value. Raises StateError if it can't be saved, UsageError if it is too large."""
        data = self.schema.encode_attribute(self.name, value)
        if len(data) > READ_SIZE_BYTES_MAX:
            raise UsageError(
                f"self.{self.name} has {len(data):,} bytes: an async handler reads at most {READ_SIZE_BYTES_MAX:,}, as "
                f"its journal keeps a copy: take the part that it needs with await immortal.step(lambda: ...)"
            )
        return data


class Call(_HandlerOperation):
    """Call of another instance's handler, or of an own ``async def`` handler through the log."""

    __slots__ = ()

    def is_addressed_to(self, name: str) -> bool:
        return name == self.target.destination

    @property
    def result_may_hold_handles(self) -> bool:
        return self.target.codec.result_may_hold_handles


class MulticastCall(Call):
    """Call of a multicast, which is sent when the last call of ``multicast`` begins. ``to``: the receiver."""

    __slots__ = ("multicast", "scope", "sent", "to")

    def __init__(
        self,
        task: Owner,
        target: Target,
        to: str,
        arguments: tuple[Any, ...],
        multicast: list[MulticastCall],
        scope: Scope | None = None,
    ) -> None:
        super().__init__(task, target, arguments)
        self.what = f"ordered call {to}.{target.called.name}"
        self.to = to
        self.scope = scope
        self.multicast = multicast
        self.sent: tuple[Any, ...] | None = None  # its arguments, once it has begun
        multicast.append(self)


class Timer(Operation):
    """Timer that ends at the time ``detail``, in ns since the Unix epoch.

    ``began_ns``: start of a duration, which steps of the clock do not change; None: it ends at a fixed time. Raises
    UsageError.
    """

    __slots__ = ("began_ns",)

    def __init__(self, task: Owner, due_ns: int, began_ns: int | None = None) -> None:
        if due_ns > TIME_NS_MAX:
            raise UsageError("a timer can be set up to the year 2262: wait for an earlier time, and then again")
        super().__init__(task, TIMER, max(due_ns, 0))
        self.began_ns = began_ns


class LoopTimer(Timer):
    """Timer that makes a callback of the loop ready."""

    __slots__ = ("_handle",)

    def __init__(self, task: Owner, due_ns: int, handle: asyncio.TimerHandle) -> None:
        super().__init__(task, due_ns, task.now_ns())
        self._handle = handle

    def complete(self, value: Any, error: BaseException | None = None) -> None:
        super().complete(value, error)
        self.task.ready.append(self._handle)


class Event(Operation):
    """Wait for a signal of the event ``name``."""

    __slots__ = ("_decode", "name")

    def __init__(self, task: Owner, name: str, decode: Callable[[bytes], Any]) -> None:
        super().__init__(task, f"event {name}")
        self.name = name
        self._decode = decode

    def decode(self, value: bytes) -> Any:
        return self._decode(value)


# Calls of nodes that an ``async def`` handler awaits.


class NodeTarget(Target):
    """Handler of the node of ``handle``."""

    __slots__ = ("handle", "nodes")

    def __init__(self, nodes: Nodes, handle: Any, handler: Handler[Any, Any]) -> None:
        codec = node_definition(handle._immortal_of[2]).codec(handler)
        super().__init__(nodes.destination(handle), handler, handler, codec)
        self.nodes = nodes
        self.handle = handle
        self.method_id = NODE_METHOD_ID
        self.is_call = True  # also of an own node: by its handle it is called through the log
        self.what = f"call node {handler.function.__qualname__} of {self.destination or 'self'}"
        name = handler.function.__qualname__
        self.send = nodes.context.outbox.make_sender(self.destination, name, NODE_METHOD_ID, RpcKind.CALL)

    def wrapped(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments for the method in the log. Raises UsageError."""
        self.nodes.require_usable(self.handle)
        return self.nodes.wrapped([self.handle._immortal_of[1]], self.handler, arguments)


def make_node_call(
    task: Owner, handle: Any, handler: Handler[Any, Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Call:
    """Make the call ``handle.<handler>(...)`` in an async handler. Raises TypeError, DefinitionError."""
    target = NodeTarget(handle._immortal_of[3], handle, handler)
    bound = target.codec.bind(arguments, keywords)
    _ = target.codec.decode_result  # raises here, where the call is made
    return Call(task, target, bound)


# Values of signals, from the sender to the waiter.


def event_name(function_name: str, name: object) -> str:
    """Return an event's name as a plain str. ``function_name``: for messages. Raises UsageError."""
    if not isinstance(name, str):
        raise UsageError(f"{function_name}({name!r}): the name of an event is a str")
    if not is_encodable(name):
        raise UsageError(
            f"{function_name}({name!r}): the name of an event is text that can be encoded, without lone surrogates"
        )
    return str.__str__(name)


def encode_signal(name: str, value: object) -> bytes:
    """Encode the value of a signal. Raises TypeError."""
    try:
        return encode_value(value)
    except Exception as error:
        raise TypeError(f"immortal.signal({name!r}, ...): the value can't be encoded: {error}") from error


def event_decoder(kind: Any) -> Callable[[bytes], Any]:
    """Return the decoder of an event's values. Raises UsageError for a type that can't be encoded."""
    if problem := unsupported_type(kind):
        raise UsageError(f"immortal.event(..., {kind!r}): {problem}")
    return ValueDecoder(kind).decode


# A rebuild runs a waiting handler again over its journal: operations are compared with it, results taken from it.


MISFITS = (DecodeError, LookupError)
"""Errors of :meth:`Operation.outcome` for a result without the declared type."""


class Rebuild:
    """Rebuild over the journal of ``saved``. ``next_entry``: the first unused one. ``title``: the handler's title."""

    def __init__(self, saved: SavedTask, title: Callable[[], str]) -> None:
        self.pending = {pending.step: pending for pending in saved.pending}
        self.next_entry: Entry | None = None
        self._entries = iter(saved.entries)
        self._by_step: dict[int, Entry | Pending] = {**self.pending, **{entry.step: entry for entry in saved.entries}}
        self._title = title
        self.consume_entry()

    def consume_entry(self) -> None:
        self.next_entry = next(self._entries, None)

    def check(self, operation: Operation) -> None:
        """Check that an operation is the one that had this step, and give it its earlier number.

        Raises JournalError.
        """
        saved = self._by_step.get(operation.step)
        if saved is not None and not operation.fits(saved):
            raise self.mismatch(operation.step, saved, describe_operation(operation))
        if isinstance(saved, Pending) and not operation.is_immediate:
            operation.number = saved.number

    def take_entry(self, operation: Operation) -> Entry:
        """Return the journal's result of an operation that does not wait. Raises JournalError."""
        entry = self.next_entry
        if entry is None or entry.step != operation.step:
            raise self.mismatch(
                operation.step, entry or self._by_step.get(operation.step), describe_operation(operation)
            )
        self.consume_entry()
        return entry

    def outcome(self, operation: Operation, entry: Entry) -> tuple[Any, Exception | None]:
        """Decode an outcome, like :meth:`Operation.outcome`. Raises JournalError."""
        try:
            return operation.outcome(entry.raised, entry.value)
        except MISFITS as error:
            raise JournalError(
                f"{self._title()} has a result at step {entry.step} ({entry.what}) that does not fit what that is "
                f"declared to return or raise any more: {error}; the app stops\n{WAYS_OUT}"
            ) from None

    def mismatch(self, step: int, saved: Entry | Pending | None, got: str) -> JournalError:
        expected = describe_operation(saved) if saved is not None else "nothing more"
        if got == expected:
            got = f"{got}, in another order"
        return JournalError(
            f"{self._title()} does not match its journal at step {step}: expected {expected}, got {got}; the app "
            f"stops\n{WAYS_OUT}"
        )

    def end_mismatch(self, waits: Mapping[int, Operation], steps_count: int, got: str) -> JournalError:
        """Return the error for a handler that ``waits`` for other operations than before at the end of its journal."""
        missing = [pending for step, pending in self.pending.items() if step not in waits]
        extra = [operation for step, operation in waits.items() if step not in self.pending]
        step = (missing or extra)[0].step if missing or extra else steps_count
        return self.mismatch(step, missing[0] if missing else None, got)
