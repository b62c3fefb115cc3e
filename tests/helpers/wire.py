"""Coordinator's end of the wire, by hand: for tests of the SDK, with or without a socket.

It does no I/O and keeps no log: it encodes the bytes that a coordinator sends, and decodes those that an app sends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from immortal.appsdk.calls.codec import encoder
from immortal.protocol.batch import encode_batch
from immortal.protocol.errors import LimitExceededError, RemoteProtocolError
from immortal.protocol.extensions import decode_app_batch, encode_impulses_accepted, encode_record_time
from immortal.protocol.messages import (
    MessageType,
    RpcKind,
    RpcType,
    decode_incoming_rpc,
    decode_messages,
    encode_checkpoint,
    encode_incoming_rpc,
    encode_message,
)
from immortal.protocol.readers import BlobData, BlobStart, Message, MessageReader
from immortal.protocol.record import CHECKPOINT_SEQUENCE_ID, CONTROL_SEQUENCE_ID, encode_record

COMMITTER_ID = 7
START_TIME_NS = 1_700_000_000_000_000_000


@dataclass(frozen=True, slots=True)
class Sent:
    """Message of an app. ``calls`` are those of a batch: (method ID, RPC type, encoded arguments)."""

    message_type: int
    data: bytes = b""
    destination: str = ""
    calls: tuple[tuple[int, int, bytes], ...] = ()


def call(method_id: int, *arguments: Any, rpc_type: RpcType = RpcType.FORK) -> bytes:
    """Return one RPC message, as its receiver gets it."""
    return encode_incoming_rpc(method_id, rpc_type, encoder.encode(arguments))


def control(message_type: MessageType, data: bytes = b"") -> bytes:
    """Return a control record with one message."""
    return encode_record(COMMITTER_ID, CONTROL_SEQUENCE_ID, encode_message(message_type, data))


def accepted(count: int) -> bytes:
    return encode_record(COMMITTER_ID, CONTROL_SEQUENCE_ID, encode_impulses_accepted(count))


def checkpoint_record(blob: bytes) -> bytes:
    """Return the start of a recovery: the record with sequence ID -2, and the blob."""
    return encode_record(COMMITTER_ID, CHECKPOINT_SEQUENCE_ID, encode_checkpoint(len(blob))) + blob


def logged(sequence_id: int, calls: Iterable[bytes], time_ns: int | None = None) -> bytes:
    """Return a logged record with one batch. ``time_ns``: by default one second per record after START_TIME_NS."""
    messages = list(calls)
    payload = b"".join(messages)
    time_ns = START_TIME_NS + sequence_id * 1_000_000_000 if time_ns is None else time_ns
    content = encode_record_time(time_ns) + encode_batch(payload, len(messages)) + payload
    return encode_record(COMMITTER_ID, sequence_id, content)


def answer(method_id: int, kind: RpcKind, number: int, *rest: Any) -> bytes:
    """Return the answer to the call with this number: a value, nothing, or (name, arguments, attributes)."""
    return encode_incoming_rpc(method_id, RpcType.ASYNC, encoder.encode((number, *rest)), kind)


def initial_record(initial_message: bytes, instance_name: str = "") -> bytes:
    """Return record 0: the instance's name, if given, and the data of the initial message."""
    name = encode_message(MessageType.INSTANCE_NAME, instance_name.encode()) if instance_name else b""
    content = encode_record_time(START_TIME_NS) + name + encode_message(MessageType.INITIAL_MESSAGE, initial_message)
    return encode_record(COMMITTER_ID, 0, content)


@dataclass
class AppOutput:
    """Reader of an app's output: ``messages`` in order, and the ``blobs`` of its checkpoints."""

    messages: list[Sent] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)
    _reader: MessageReader = field(default_factory=MessageReader)
    _pieces: list[bytes] = field(default_factory=list)

    def receive_data(self, data: bytes) -> None:
        """Take an app's bytes. Raises RemoteProtocolError for wrong ones, or for a peer that was not attached."""
        self._reader.receive_data(data)
        while (event := self._reader.next_event()) is not None:
            if isinstance(event, BlobStart):
                self.messages.append(Sent(MessageType.CHECKPOINT))
                self._pieces.clear()
            elif isinstance(event, BlobData):
                self._pieces.append(event.data)
                if event.last:
                    self.blobs.append(b"".join(self._pieces))
            elif not isinstance(event, Message):
                raise LimitExceededError("an RPC", event.size_bytes, event.limit_bytes)
            elif event.message_type in (MessageType.STREAM_BATCH, MessageType.IMPULSE_BATCH):
                self.messages.append(self._batch(event.message_type, event.data))
            else:
                self.messages.append(Sent(event.message_type, event.data))

    def _batch(self, message_type: int, data: bytes) -> Sent:
        batch = decode_app_batch(data)
        calls = []
        for _, start, end in decode_messages(batch.payload):
            rpc = decode_incoming_rpc(batch.payload, start, end)
            calls.append((rpc.method_id, rpc.rpc_type, rpc.arguments))
        if len(calls) != batch.count:
            raise RemoteProtocolError(f"a batch of {len(calls)} messages gives its count as {batch.count}")
        if batch.destination and batch.destination not in self.attached:
            raise RemoteProtocolError(f"a batch to {batch.destination!r} came without AttachTo")
        return Sent(message_type, b"", batch.destination, tuple(calls))

    @property
    def attached(self) -> set[str]:
        return {sent.data.decode() for sent in self.messages if sent.message_type == MessageType.ATTACH_TO}

    @property
    def calls_count(self) -> int:
        return sum(len(sent.calls) for sent in self.messages)

    @property
    def calls(self) -> list[tuple[str, int, tuple[Any, ...]]]:
        """Return all calls and impulses so far: (destination, method ID, arguments)."""
        return [
            (sent.destination, method_id, tuple(msgspec.msgpack.decode(arguments)))
            for sent in self.messages
            for method_id, _, arguments in sent.calls
        ]

    @property
    def initial_message(self) -> bytes:
        return next(sent.data for sent in self.messages if sent.message_type == MessageType.INITIAL_MESSAGE)
