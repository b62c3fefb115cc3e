"""Outside of a test's instances: stubs in place of effects, and the test as their caller.

The test itself is an instance that never crashes. Its calls are impulses to other instances, so they are in its log
before they leave, and arrive once and in order whatever crashes; the answers come back through its log.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import itertools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from immortal.appsdk.calls.outbox import encode_call, make_writer
from immortal.appsdk.calls.user_code import is_user_failure
from immortal.appsdk.effects.effect import EffectRequest, current_context, encodable
from immortal.appsdk.errors import UsageError
from immortal.appsdk.handlers.decorators import Handler
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
    IncomingRpc,
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

_decode_answer = decoding.Decoder(list[msgspec.Raw]).decode


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
        self.put(destination, encode_call(write, arguments))

    def put(self, destination: str, message: bytes) -> None:
        """Send a message, as an impulse."""
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
            self.handle_call(rpc)
            return
        number, *rest = _decode_answer(rpc.arguments)
        raised = rpc.kind == RpcKind.RAISED
        value = msgspec.msgpack.encode(rest if raised else (rest[0] if rest else None))
        self.answers[decoding.decode(number, type=int)] = Answer(raised, value)

    def handle_call(self, rpc: IncomingRpc) -> None:
        """Do nothing: no instance knows the test."""

    def take_output(self) -> None:
        """Do nothing: ``output`` has no queue."""

    def log_time(self, time_ns: int) -> None:
        """Do nothing: this app has no timer."""

    def close(self) -> None:
        """Do nothing: no caller waits here."""
