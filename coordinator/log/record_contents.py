"""Contents of a logged record: its batches and messages, as bytes or as plain values.

Messages are counted from 0 through the whole record, as the app counts them: RPCs, and the initial message.

Decoding here is plain Python. It is for records that pipeline.decode leaves, and for messages about damaged ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from immortal.coordinator.log.identity import verify_value
from immortal.coordinator.log.reader import LogReader
from immortal.protocol import decoding
from immortal.protocol.batch import (
    decode_batch,
    decode_replayable_batch,
    encode_batch,
    encode_replayable_batch,
    offset_after,
)
from immortal.protocol.client_frames import decode_caller
from immortal.protocol.errors import ImmortalError, RemoteProtocolError
from immortal.protocol.extensions import decode_record_time
from immortal.protocol.messages import (
    IncomingRpc,
    MessageType,
    RpcKind,
    RpcType,
    decode_incoming_rpc,
    decode_message,
    decode_messages,
    encode_incoming_data,
)
from immortal.protocol.readers import Record
from immortal.protocol.record import HEADER_SIZE_BYTES, RecordHeader, decode_header, encode_record
from immortal.protocol.trailer import BatchKind, BatchSource, Trailer

_NO_INPUT = (MessageType.RECORD_TIME, MessageType.INSTANCE_NAME)  # before the batches, and not counted


class NoSuchMessageError(ImmortalError):
    """Raised if a record has fewer messages than were asked for."""


class Batch(Struct, frozen=True):
    """Top-level message of a record: ``count`` RPC messages, packed in ``payload``."""

    message_type: int
    count: int
    payload: bytes


def record_of(value: bytes) -> Record:
    """Return the record at the start of a checked value of the log."""
    header = decode_header(value)
    return Record(header, value[HEADER_SIZE_BYTES : header.size_bytes])


def batches(content: bytes) -> Iterator[Batch]:
    """Yield the batches of a record, in the order of its trailer. Raises RemoteProtocolError."""
    offset = 0
    while offset < len(content):
        message_type, start, end = decode_message(content, offset)
        if message_type == MessageType.RPC:
            yield Batch(message_type, 1, content[offset:end])
        elif message_type == MessageType.RPC_BATCH:
            count, skipped = decode_batch(content[start:end])
            yield Batch(message_type, count, content[start + skipped : end])
        elif message_type == MessageType.COUNT_REPLAYABLE_RPC_BATCH:
            count, _, skipped = decode_replayable_batch(content[start:end])
            yield Batch(message_type, count, content[start + skipped : end])
        elif message_type == MessageType.INITIAL_MESSAGE:
            yield Batch(message_type, 1, content[start:end])
        elif message_type not in _NO_INPUT:
            raise RemoteProtocolError(f"the record holds a message of type {message_type}, which is never logged")
        offset = end


def message_at(content: bytes, index: int) -> bytes | None:
    """Return the whole message ``index`` of a record; None if there is none. Raises RemoteProtocolError."""
    for batch in batches(content):
        if batch.message_type == MessageType.INITIAL_MESSAGE and index == 0:
            return batch.payload  # which can be any bytes
        if index < batch.count:
            start = offset_after(batch.payload, index, batch.count)
            return batch.payload[start : decode_message(batch.payload, start)[2]]
        index -= batch.count
    return None


def rpc_of(message: bytes) -> IncomingRpc:
    """Decode a whole RPC message in incoming form. Raises RemoteProtocolError."""
    _, start, end = decode_message(message)
    return decode_incoming_rpc(message, start, end)


def shown_arguments(rpc: IncomingRpc) -> list[Any] | None:
    """Return a call's arguments without its caller, or an answer's value; None if the SDK did not encode them."""
    try:
        values = decoding.decode_shown(rpc.arguments)
    except decoding.DecodeError:
        return None
    if not isinstance(values, list):
        return None
    if rpc.kind != RpcKind.CALL:
        return values[1:]
    return values[2:] if rpc.rpc_type == RpcType.ASYNC else values


def waiting_caller(rpc: IncomingRpc) -> tuple[str, int] | None:
    """Return the waiting caller of a call, and its call number; None: nobody waits, or the SDK did not encode it."""
    data = encode_incoming_data(rpc.method_id, rpc.rpc_type, rpc.arguments, rpc.kind)
    caller = decode_caller(data, 0, len(data))  # decodes no further: the arguments can be nested deeply
    return None if caller is None else (caller.name, caller.number)


def rpcs(payload: bytes) -> Iterator[tuple[bytes, IncomingRpc]]:
    """Iterate over the messages of a batch's payload: (bytes, decoded). Raises RemoteProtocolError."""
    offset = 0
    for message_type, start, end in decode_messages(payload):
        if message_type != MessageType.RPC:
            raise RemoteProtocolError(f"a batch holds a message of type {message_type}, only RPCs (0) are allowed")
        yield payload[offset:end], decode_incoming_rpc(payload, start, end)
        offset = end


def with_first_messages(record: Record, count: int) -> bytes:
    """Return the record with only its first ``count`` messages. Raises NoSuchMessageError if it has fewer."""
    content = record.content
    parts = []
    left = count
    offset = 0
    for message_type, _, end in decode_messages(content):
        if message_type in _NO_INPUT:
            parts.append(content[offset:end])
        elif left:
            (batch,) = batches(content[offset:end])
            taken = min(left, batch.count)
            parts.append(content[offset:end] if taken == batch.count else _first_of(batch, taken))
            left -= taken
        offset = end
    if left:
        has = count - left
        raise NoSuchMessageError(
            f"record {record.header.sequence_id} has no message {count - 1}: "
            + (f"its {has} messages are counted from 0 to {has - 1}" if has else "it holds none")
        )
    return encode_record(record.header.committer_id, record.header.sequence_id, b"".join(parts))


def _first_of(batch: Batch, count: int) -> bytes:
    payload = batch.payload[: offset_after(batch.payload, count, batch.count)]
    if batch.message_type == MessageType.COUNT_REPLAYABLE_RPC_BATCH:
        replayable = sum(rpc.rpc_type != RpcType.IMPULSE for _, rpc in rpcs(payload))
        return encode_replayable_batch(payload, count, replayable)
    if count == 1:
        return payload
    return encode_batch(payload, count) + payload


KIND_NAMES = ("stream", "impulse", "initial", "client")  # by BatchKind
RPC_TYPE_NAMES = ("async", "fork", "impulse")  # by RpcType
RPC_KIND_NAMES = ("call", "returned_value", "returned_nothing", "raised")  # by RpcKind


@dataclass(frozen=True, slots=True)
class DecodedMessage:
    """Message of a record. ``rpc``: None for an initial message that wraps no RPC."""

    source: BatchSource
    position: int
    rpc: IncomingRpc | None
    arguments: bytes


@dataclass(frozen=True, slots=True)
class DecodedRecord:
    header: RecordHeader
    trailer: Trailer
    messages: list[DecodedMessage]


def read_record(value: bytes | memoryview, sequence_id: int, committer_id: int, *, whole: bool) -> DecodedRecord | str:
    """Decode a record, or describe its damage. Without ``whole`` its content is only checked."""
    try:
        header, trailer = verify_value(value, sequence_id, committer_id)
        content = bytes(value[HEADER_SIZE_BYTES : header.size_bytes]) if whole else b""
        messages = list(_messages(content, trailer)) if whole else []
    except RemoteProtocolError as error:
        return f"record {sequence_id} cannot be decoded: {error}"
    except ImmortalError as error:
        return str(error)
    return DecodedRecord(header, trailer, messages)


def _messages(content: bytes, trailer: Trailer) -> Iterator[DecodedMessage]:
    for source, payload in packed_batches(content, trailer):
        is_initial = source.kind == BatchKind.INITIAL
        found = [_initial_rpc(payload)] if is_initial else [rpc for _, rpc in rpcs(payload)]
        if len(found) != source.count:
            raise RemoteProtocolError(f"a batch of {len(found)} messages where the trailer has {source}")
        for index, rpc in enumerate(found):
            arguments = payload if rpc is None else rpc.arguments
            yield DecodedMessage(source, source.first_position + index, rpc, arguments)


def packed_batches(content: bytes, trailer: Trailer) -> Iterator[tuple[BatchSource, bytes]]:
    """Yield the batches of a record in order: the trailer's entry, and the packed messages.

    For an initial message the latter are its data. Raises RemoteProtocolError if content and trailer do not fit.
    """
    sources, offset = iter(trailer.batches), 0
    for number, (message_type, start, end) in enumerate(decode_messages(content)):
        front, offset = offset, end
        if message_type == MessageType.RECORD_TIME and number == 0:
            decode_record_time(content, start, end)
            continue
        if message_type == MessageType.INSTANCE_NAME:  # in record 0, before the initial message; no input
            continue
        source = next(sources, None)
        if source is None:
            raise RemoteProtocolError(f"its trailer names {len(trailer.batches)} batches, it has more")
        batch = next(batches(content[front:end]), None)
        if batch is None or (message_type == MessageType.INITIAL_MESSAGE) != (source.kind == BatchKind.INITIAL):
            raise RemoteProtocolError(f"a message of type {message_type} where the trailer has a batch of {source}")
        if batch.count != source.count:
            raise RemoteProtocolError(f"a batch gives its count as {batch.count} where the trailer has {source}")
        yield source, batch.payload
    if next(sources, None) is not None:
        raise RemoteProtocolError(f"its trailer names {len(trailer.batches)} batches, it has fewer")


def _initial_rpc(data: bytes) -> IncomingRpc | None:
    """Decode the RPC that an initial message usually wraps; None if it is something else."""
    try:
        message_type, start, end = decode_message(data)
        return decode_incoming_rpc(data, start, end) if message_type == MessageType.RPC and end == len(data) else None
    except RemoteProtocolError:
        return None


# Finding a moment in a log by time. Needs neither Arrow nor Spark.


def first_record_at(reader: LogReader, time_ns: int, first: int | None = None, end: int | None = None) -> int:
    """Find the first of the records ``first`` to ``end`` - 1 (None: all) that can be from ``time_ns`` or later. Return
    ``end``, or the ID after the last record, if all are earlier.

    The time of records never goes back. A damaged record counts like the next undamaged one.
    """
    first_kept, last = reader.ends()
    first = first_kept if first is None else first
    end = last + 1 if end is None else end
    while first < end:
        middle = (first + end) // 2
        found = _time_from(reader, middle, end)
        if found is None:  # no undamaged record follows: the rest can be of any time
            end = middle
        elif found[1] < time_ns:
            first = found[0] + 1
        else:
            end = middle
    return first


def _time_from(reader: LogReader, first: int, end: int) -> tuple[int, int] | None:
    """Find the first undamaged record from ``first`` on: (sequence ID, time)."""
    for sequence_id in range(first, end):
        for logged in reader.records(sequence_id, sequence_id):
            record = logged.problem or read_record(logged.value, sequence_id, reader.identity.committer_id, whole=False)
            if not isinstance(record, str):
                return sequence_id, record.trailer.time_ns
    return None
