"""Decodes one record in plain Python: records that pipeline.decode leaves, and damaged ones for error messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from immortal.coordinator.log import LogReader, verify_value
from immortal.coordinator.log.record_contents import batches, rpcs
from immortal.protocol.errors import ImmortalError, RemoteProtocolError
from immortal.protocol.extensions import decode_record_time
from immortal.protocol.messages import IncomingRpc, MessageType, decode_incoming_rpc, decode_message, decode_messages
from immortal.protocol.record import HEADER_SIZE_BYTES, RecordHeader
from immortal.protocol.trailer import BatchKind, BatchSource, Trailer

KIND_NAMES = ("stream", "impulse", "initial", "client")  # by BatchKind
RPC_TYPE_NAMES = ("async", "fork", "impulse")  # by RpcType
RPC_KIND_NAMES = ("call", "returned_value", "returned_nothing", "raised")  # by RpcKind


@dataclass(frozen=True, slots=True)
class DecodedMessage:
    """Message of a record. An initial message that wraps no RPC has neither method ID nor RPC type."""

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
    """Yield the batches of a record in order: what the trailer says of each, and its messages as they are packed.

    Of an initial message it is the message's data. Raises RemoteProtocolError where content and trailer do not fit.
    """
    sources, offset = iter(trailer.batches), 0
    for number, (message_type, start, end) in enumerate(decode_messages(content)):
        front, offset = offset, end
        if message_type == MessageType.RECORD_TIME and number == 0:
            decode_record_time(content, start, end)
            continue
        if message_type == MessageType.INSTANCE_NAME:  # in record 0, in front of the initial message; no input
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
    """Decode the RPC that an initial message usually wraps. It may be any bytes."""
    try:
        message_type, start, end = decode_message(data)
        return decode_incoming_rpc(data, start, end) if message_type == MessageType.RPC and end == len(data) else None
    except RemoteProtocolError:
        return None


# Finding a moment in a log by time. Needs neither Arrow nor Spark.


def first_record_at(reader: LogReader, time_ns: int, first: int | None = None, end: int | None = None) -> int:
    """Find the first of the records ``first`` to ``end`` - 1 (None: all) that may be from ``time_ns`` or later;
    ``end``, or the ID behind the last record, where all are earlier.

    The time of records never goes back. One that is damaged counts as the next sound one.
    """
    first_kept, last = reader.ends()
    first = first_kept if first is None else first
    end = last + 1 if end is None else end
    while first < end:
        middle = (first + end) // 2
        found = _time_from(reader, middle, end)
        if found is None:  # no sound record follows: the rest may be of any time
            end = middle
        elif found[1] < time_ns:
            first = found[0] + 1
        else:
            end = middle
    return first


def _time_from(reader: LogReader, first: int, end: int) -> tuple[int, int] | None:
    """Find the first sound record from ``first`` on: (sequence ID, time)."""
    for sequence_id in range(first, end):
        for logged in reader.records(sequence_id, sequence_id):
            record = logged.problem or read_record(logged.value, sequence_id, reader.identity.committer_id, whole=False)
            if not isinstance(record, str):
                return sequence_id, record.trailer.time_ns
    return None
