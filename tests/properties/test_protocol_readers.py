"""Any stream, in any pieces, read at any time: the same events."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.messages import MessageType, encode_checkpoint, encode_message
from immortal.protocol.readers import BlobData, BlobStart, Message, MessageReader, Record, RecordReader
from immortal.protocol.record import CHECKPOINT_SEQUENCE_ID, decode_header, encode_record

Event = Message | Record | BlobStart | BlobData

payloads = st.binary(max_size=100)
messages = st.tuples(st.integers(0, 255).filter(lambda number: number != MessageType.CHECKPOINT), payloads)
blobs = st.tuples(st.just(None), st.binary(max_size=40), st.booleans())  # the last: fixed width
from_app = st.lists(st.one_of(messages, blobs), max_size=12)
records = st.tuples(st.integers(-1, 1 << 40), payloads)
to_app = st.lists(st.one_of(records, st.tuples(st.just(None), st.binary(max_size=40))), max_size=8)
schedules = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=60)  # (bytes to come, events to read)


def encode_from_app(items: list[tuple[int | None, bytes] | tuple[None, bytes, bool]]) -> tuple[bytes, list[Event]]:
    stream, events = b"", list[Event]()
    for item in items:
        if item[0] is not None:
            stream += encode_message(item[0], item[1])
            events.append(Message(item[0], item[1]))
            continue
        blob = item[1]
        fixed_width = item[2]  # type: ignore[misc]
        data = len(blob).to_bytes(8, "little")
        stream += encode_message(MessageType.CHECKPOINT, data) if fixed_width else encode_checkpoint(len(blob))
        stream += blob
        events += [BlobStart(len(blob)), BlobData(blob, last=True)]
    return stream, events


def encode_to_app(items: list[tuple[int | None, bytes]]) -> tuple[bytes, list[Event]]:
    stream, events = b"", list[Event]()
    for sequence_id, content in items:
        if sequence_id is None:
            stream += encode_record(7, CHECKPOINT_SEQUENCE_ID, encode_checkpoint(len(content))) + content
            events += [BlobStart(len(content)), BlobData(content, last=True)]
        else:
            record = encode_record(7, sequence_id, content)
            stream += record
            events.append(Record(decode_header(record), content))
    return stream, events


def joined(events: Iterable[Event]) -> list[Event]:
    """The same with each blob in one piece."""
    result: list[Event] = []
    for event in events:
        if isinstance(event, BlobData) and result and isinstance(result[-1], BlobData) and not result[-1].last:
            event = BlobData(result[-1].data + event.data, event.last)
            result.pop()
        result.append(event)
    return result


def play(reader: MessageReader | RecordReader, stream: bytes, schedule: list[tuple[int, int]]) -> list[Event]:
    """Feed and read as the schedule says, then all that is left."""
    events: list[Event] = []
    position = 0
    for size_bytes, reads in [*schedule, (len(stream), 1 << 30)]:
        piece = stream[position : position + size_bytes]
        reader.receive_data(piece)
        position += len(piece)
        for _ in range(reads):
            event = reader.next_event()
            if event is None:
                break
            events.append(event)
    return joined(events)


@given(from_app, schedules)
def test_messages_in_any_pieces(items: list[tuple[int | None, bytes]], schedule: list[tuple[int, int]]) -> None:
    stream, expected = encode_from_app(items)
    reader = MessageReader()
    assert play(reader, stream, schedule) == expected
    assert (reader.buffered_bytes, reader.inside_blob) == (0, False)


@given(to_app, schedules)
def test_records_in_any_pieces(items: list[tuple[int | None, bytes]], schedule: list[tuple[int, int]]) -> None:
    stream, expected = encode_to_app(items)
    reader = RecordReader()
    assert play(reader, stream, schedule) == expected
    assert (reader.buffered_bytes, reader.inside_blob) == (0, False)


@given(from_app, schedules, st.binary(min_size=1, max_size=30))
def test_trailing_bytes_change_nothing_before_them(
    items: list[tuple[int | None, bytes]], schedule: list[tuple[int, int]], trailing: bytes
) -> None:
    stream, expected = encode_from_app(items)
    reader = MessageReader()
    reader.receive_data(stream + trailing)
    events = joined(event for event in (reader.next_event() for _ in range(len(expected))) if event is not None)
    assert events == expected
    assert reader.buffered_bytes == len(trailing)


@given(st.one_of(st.binary(max_size=200), st.lists(st.sampled_from((0, 2, 4, 8, 16, 0x80)), max_size=60).map(bytes)))
def test_random_bytes_from_an_app(data: bytes) -> None:
    """Only documented errors; and what comes out does not depend on the pieces."""
    outcomes = []
    for pieces in ([data], [data[index : index + 1] for index in range(len(data))]):
        reader = MessageReader()
        events: list[Event] = []
        refused = False
        try:
            for piece in pieces:
                reader.receive_data(piece)
                while (event := reader.next_event()) is not None:
                    events.append(event)
        except RemoteProtocolError:
            refused = True
        outcomes.append((joined(events), refused))
    assert outcomes[0] == outcomes[1]


@given(to_app.filter(bool), st.data())
def test_damaged_records_never_come_out(items: list[tuple[int | None, bytes]], data: st.DataObject) -> None:
    items = [(sequence_id, content) for sequence_id, content in items if sequence_id is not None] or [(0, b"x")]
    stream, expected = encode_to_app(items)
    damaged = bytearray(stream)
    place = data.draw(st.integers(0, len(stream) - 1), label="place")
    damaged[place] ^= data.draw(st.integers(1, 255), label="flips")
    reader = RecordReader()
    reader.receive_data(bytes(damaged))
    events: list[Event] = []
    refused = False
    try:
        while (event := reader.next_event()) is not None:
            events.append(event)
    except RemoteProtocolError:
        refused = True
    assert events == expected[: len(events)]
    assert sum(24 + len(event.content) for event in events if isinstance(event, Record)) <= place
    assert refused or reader.buffered_bytes  # a size that grew: more is waited for


@given(st.binary(max_size=200))
def test_random_bytes_from_a_coordinator(data: bytes) -> None:
    reader = RecordReader()
    reader.receive_data(data)
    with contextlib.suppress(RemoteProtocolError):
        assert reader.next_event() is None  # no random bytes have the right check
