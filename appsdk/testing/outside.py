"""Caller from outside: the test itself, as an instance of its own that never crashes.

Its calls are impulses to other instances, so they are in its log before they leave, and arrive once and in order
whatever crashes; the answers come back through its log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from immortal.appsdk.calls.outbox import encode_call, make_writer
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

NAME = "test"
OUTSIDERS = frozenset({NAME})
"""Name of the test as an instance: the caller that handlers see."""

_take_answer = decoding.Decoder(list[msgspec.Raw]).decode


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a call. ``value``: the encoded value, or with ``raised`` what
    :func:`appsdk.state.journal.decode_raised` reads.
    """

    raised: bool
    value: bytes


class OutsideApp:
    """App that speaks the protocol by hand. ``answers``: those that have come, by the number of the call."""

    def __init__(self) -> None:
        self.error: ImmortalError | None = None
        self.has_left = False
        self.has_died = False
        self.is_primary = False
        self.next_due_ns: int | None = None
        self.answers: dict[int, Answer] = {}
        self.output = bytearray(encode_hello(Hello(ALL_EXTENSIONS, NAME)))
        self.output += encode_app_description(AppDescription(1))
        self._reader = RecordReader()
        self._attached: set[str] = set()
        self._call_count = 0

    def call(self, destination: str, handler: Handler[Any, Any], arguments: tuple[Any, ...]) -> int:
        """Send a call that waits for its answer, and return its number. Raises TypeError for arguments that can't be
        encoded.
        """
        self._call_count += 1
        self._send(destination, handler, RpcType.ASYNC, (NAME, self._call_count, *arguments))
        return self._call_count

    def send(self, destination: str, handler: Handler[Any, Any], arguments: tuple[Any, ...]) -> None:
        """Send an impulse. Raises TypeError."""
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
            return  # nobody knows the test
        number, *rest = _take_answer(rpc.arguments)
        raised = rpc.kind == RpcKind.RAISED
        value = msgspec.msgpack.encode(rest if raised else (rest[0] if rest else None))
        self.answers[decoding.decode(number, type=int)] = Answer(raised, value)

    def take_output(self) -> None:
        """Do nothing: no queue is behind ``output``."""

    def tell_time(self, time_ns: int) -> None:
        """Do nothing: no timer is set here."""

    def close(self) -> None:
        """Do nothing: no caller waits here."""
